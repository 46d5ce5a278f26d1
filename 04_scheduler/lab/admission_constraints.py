"""What else has to be true before a request is admitted.

Memory and budget are the scheduler's own questions. Others come from features: a batch may hold so
many LoRA adapters (`beyond/adapter_limit.py`); a grammar that bounds the output has to be compiled
first. Such a constraint is a plugin that says whether a request may
start, and is asked before the cache is looked at. A request that one of them holds back is passed
over, until it has waited too long: then the line waits for it.

KV that is on its way is the same kind of question, and is answered by the KV memory itself:
`NotReady` (chapter 3).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

from request import Request
from scheduler_books import SchedulerPlugin


class GrammarsCompiled(SchedulerPlugin):
    """A request with a grammar waits until it is compiled, in a thread of `executor`, once.

    `grammar_of` says what a request asked for, None for most; `compile` makes of it whatever the
    sampler will need. A grammar that does not compile holds nobody back: the sampler finds the
    error in `result`."""

    def __init__(
        self,
        executor: Executor,
        compile: Callable[[Any], Any],
        grammar_of: Callable[[Request], Any],
    ) -> None:
        self._executor, self._compile, self._grammar_of = executor, compile, grammar_of
        self._futures: dict[str, Future] = {}

    def may_start(self, request: Request) -> bool:
        grammar = self._grammar_of(request)
        if grammar is None:
            return True
        future = self._futures.get(request.request_id)
        if future is None:
            future = self._executor.submit(self._compile, grammar)
            self._futures[request.request_id] = future
        return future.done()

    def result(self, request: Request) -> Any:
        """The compiled grammar. Raises what its compilation raised, `KeyError` if there is none."""
        return self._futures[request.request_id].result()

    def ended(self, request: Request) -> None:
        future = self._futures.pop(request.request_id, None)
        if future is not None:
            future.cancel()
