"""Grammars are compiled in a thread, one after another, and kept as long as there is room.

The library lets other threads run meanwhile. What comes back is text, which each rank that samples
makes a matcher of (`grammar_masks.py`): masks never cross processes."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor

from common.grammars.lark_text import compile_source
from common.grammars.vocabulary import Vocabulary, tokenizer_of

KEPT = 16 << 20  # characters of grammars that nobody need be waiting for


class GrammarCompiler:
    """A grammar that was compiled is found again by its source; the least recently wanted go first.
    One thread at a time may `submit`."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._futures: OrderedDict[str, Future[str]] = OrderedDict()
        self.close = weakref.finalize(self, _close, self._thread)

    def submit(self, source: str) -> Future[str]:
        """What is compiled of it, or a `ValueError` that says what is wrong."""
        future = self._futures.pop(source, None)
        if future is None or (future.done() and not _is_compiled(future)):
            future = self._thread.submit(_compile, source, self.vocabulary)
        self._futures[source] = future
        self._make_room()
        return future

    def _make_room(self) -> None:
        done = {name: f for name, f in self._futures.items() if f.done()}
        sizes = {name: len(f.result()) for name, f in done.items() if _is_compiled(f)}
        num_kept = sum(sizes.values())
        for name in done:
            if num_kept > KEPT or name not in sizes:
                num_kept -= sizes.get(name, 0)
                del self._futures[name]


def _compile(source: str, vocabulary: Vocabulary) -> str:
    try:
        return compile_source(source, tokenizer_of(vocabulary))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it does not compile: {error}") from error


def _is_compiled(future: Future[str]) -> bool:
    return not future.cancelled() and future.exception() is None


def _close(thread: ThreadPoolExecutor) -> None:
    thread.shutdown(wait=False, cancel_futures=True)
