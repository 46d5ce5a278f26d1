"""Grammars are compiled in a thread, one after another, and kept as long as there is room.

The library lets other threads run meanwhile. What comes back is text, which each rank that samples
makes a matcher of (`grammar_masks.py`): masks never cross processes."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor

from common.grammars.lark_text import compile_source
from common.grammars.vocabulary import Vocabulary, tokenizer_of

KEPT = 64 << 20  # bytes, about, of grammars that nobody need be waiting for


class GrammarCompiler:
    """A grammar that was compiled is found again by its source; the least recently wanted go first.
    One thread at a time may `submit`."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._futures: OrderedDict[str, Future[str]] = OrderedDict()
        self._num_bytes = 0  # of these
        self.close = weakref.finalize(self, _close, self._thread)

    def submit(self, source: str) -> Future[str]:
        """What is compiled of it, or a `ValueError` that says what is wrong."""
        future = self._futures.pop(source, None)
        if future is None:
            self._num_bytes += _size(source)
        if future is None or (future.done() and not _is_compiled(future)):
            future = self._thread.submit(_compile, source, self.vocabulary)
        self._futures[source] = future
        self._make_room()
        return future

    def _make_room(self) -> None:
        """What it costs does not depend on how many are kept."""
        while self._num_bytes > KEPT and len(self._futures) > 1:
            source, future = next(iter(self._futures.items()))
            if not future.done():  # nor are those behind it
                break
            del self._futures[source]
            self._num_bytes -= _size(source)


def _size(source: str) -> int:
    """With what was compiled of it, which is longer, and a future."""
    return 4 * len(source) + 4096


def _compile(source: str, vocabulary: Vocabulary) -> str:
    try:
        return compile_source(source, tokenizer_of(vocabulary))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it does not compile: {error}") from error


def _is_compiled(future: Future[str]) -> bool:
    return not future.cancelled() and future.exception() is None


def _close(thread: ThreadPoolExecutor) -> None:
    thread.shutdown(wait=False, cancel_futures=True)
