"""What else has to be true before a request is admitted.

Memory and budget are the scheduler's own questions. Others come from features that this book does
not have, or has elsewhere: a batch may hold only so many LoRA adapters; a grammar that bounds the
output has to be compiled first. `Constrained`, mixed into a scheduler, asks every constraint before
the cache is looked at. A request that one of them holds back is passed over, until it has waited
too long: then the line waits for it.

KV that is on its way is the same kind of question, and is answered by the KV memory itself:
`NotReady` (chapter 3).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Any, Protocol

from kv_memory import ComputedBlocks, extra_keys_of
from request import Request, check_integers
from scheduler import Scheduler
from scheduler_base import SchedulerBase


class AdmissionConstraint(Protocol):
    """Holds requests back that must not run beside those that do. Told of every request that
    begins and ends to run, in pairs; preemption is an end."""

    def may_run(self, request: Request) -> bool:
        """May this waiting request join those that run? Changes nothing that a later call would
        answer differently."""
        ...

    def has_started(self, request: Request) -> None: ...

    def has_stopped(self, request: Request) -> None: ...

    def forget(self, request: Request) -> None:
        """The request has ended, whether it ever ran or not."""


class Constrained(SchedulerBase):
    """The constraints of a scheduler. Mixed in, in front of it."""

    def __init__(
        self, *limits: Any, constraints: Sequence[AdmissionConstraint] = (), **options: Any
    ) -> None:
        super().__init__(*limits, **options)
        self.constraints = list(constraints)

    def may_run(self, request: Request) -> bool:
        return all(constraint.may_run(request) for constraint in self.constraints)

    def seat(
        self, request: Request, computed: ComputedBlocks, num_new_tokens: int, num_reserved: int
    ) -> bool:
        is_seated = super().seat(request, computed, num_new_tokens, num_reserved)
        for constraint in self.constraints if is_seated else ():
            constraint.has_started(request)
        return is_seated

    def preempt(self, request: Request) -> None:
        super().preempt(request)
        for constraint in self.constraints:
            constraint.has_stopped(request)

    def forget(self, request: Request) -> None:
        for constraint in self.constraints:
            if request.request_id in self.running:
                constraint.has_stopped(request)
            constraint.forget(request)
        super().forget(request)


class ConstrainedScheduler(Constrained, Scheduler):
    """The two phases, with constraints."""


class MaxLoRAs:
    """At most `max_loras` different adapters run at once. A request names its adapter in its extra
    keys, `("lora", id)`; those without one are never held back. Raises `ValueError` below 1."""

    def __init__(self, max_loras: int) -> None:
        check_integers(1, max_loras=max_loras)
        self.max_loras = max_loras
        self._num_running: Counter[str | int] = Counter()

    @staticmethod
    def _adapter(request: Request) -> str | int | None:
        return dict(extra_keys_of(request)).get("lora")

    def may_run(self, request: Request) -> bool:
        adapter = self._adapter(request)
        is_there = adapter is None or adapter in self._num_running
        return is_there or len(self._num_running) < self.max_loras

    def has_started(self, request: Request) -> None:
        if (adapter := self._adapter(request)) is not None:
            self._num_running[adapter] += 1

    def has_stopped(self, request: Request) -> None:
        if (adapter := self._adapter(request)) is not None:
            self._num_running[adapter] -= 1
            if self._num_running[adapter] == 0:
                del self._num_running[adapter]

    def forget(self, request: Request) -> None:
        pass


class GrammarsCompiled:
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

    def may_run(self, request: Request) -> bool:
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

    def has_started(self, request: Request) -> None:
        pass

    def has_stopped(self, request: Request) -> None:
        pass

    def forget(self, request: Request) -> None:
        future = self._futures.pop(request.request_id, None)
        if future is not None:
            future.cancel()
