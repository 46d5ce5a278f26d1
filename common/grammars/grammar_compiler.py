"""Grammars are compiled one after another, beside the steps, and kept as long as there is room.

The library lets other threads run meanwhile, and cannot be stopped. So a thread watches the one
that compiles: a grammar that takes too long fails, one that no request waits for any more is left
alone, and the next one begins in either case. A future may be cancelled until it is done.

The result is text, which each rank that samples makes a matcher of (`grammar_masks.py`): masks
never cross processes."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Semaphore, Thread

from common.grammars.lark_text import compile_source
from common.grammars.vocabulary import Vocabulary, tokenizer_of

KEPT = 64 << 20  # bytes, about, of grammars that no request may be waiting for
MOST_SECONDS = 10.0  # for one grammar, without its wait for others
MOST_AT_ONCE = 2  # one is compiled for a request; one that was given up may still be at work
Jobs = SimpleQueue[tuple[str, "Future[str]"] | None]


class GrammarCompiler:
    """A grammar that was compiled is found again by its source; the least recently wanted go first.
    One thread at a time may `submit`."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._futures: OrderedDict[str, Future[str]] = OrderedDict()
        self._num_bytes = 0  # of these
        self._jobs: Jobs = SimpleQueue()
        Thread(target=_watch, args=(self._jobs, vocabulary), name="grammar", daemon=True).start()
        self.close = weakref.finalize(self, _close, self._jobs, self._futures)

    def submit(self, source: str) -> Future[str]:
        """The text that is compiled of it, or a `ValueError` that says what is wrong."""
        future = self._futures.pop(source, None)
        if future is None:
            self._num_bytes += _size(source)
        if future is None or (future.done() and not _is_compiled(future)):
            future = Future[str]()
            self._jobs.put((source, future))
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


def _is_compiled(future: Future[str]) -> bool:
    return not future.cancelled() and future.exception() is None


def _watch(jobs: Jobs, vocabulary: Vocabulary) -> None:
    with suppress(Exception):  # each grammar would say it
        tokenizer_of(vocabulary)  # takes seconds for a large one, which no grammar is charged with
    at_work = Semaphore(MOST_AT_ONCE)
    while (job := jobs.get()) is not None:
        source, future = job
        at_work.acquire()
        outcomes = SimpleQueue[str | BaseException | None]()  # None: it was cancelled
        future.add_done_callback(lambda _, put=outcomes.put: put(None))
        if future.cancelled():
            at_work.release()
            continue
        arguments = source, vocabulary, outcomes.put, at_work.release
        Thread(target=_compile, args=arguments, name="grammar", daemon=True).start()
        try:
            outcome = outcomes.get(timeout=MOST_SECONDS)
        except Empty:
            outcome = _refused(f"compiling takes longer than {MOST_SECONDS:.0f} s")
        if outcome is None or not future.set_running_or_notify_cancel():
            continue
        if isinstance(outcome, str):
            future.set_result(outcome)
        else:
            future.set_exception(outcome)


def _compile(
    source: str,
    vocabulary: Vocabulary,
    put: Callable[[str | BaseException], None],
    release: Callable[[], None],
) -> None:
    try:
        outcome = compile_source(source, tokenizer_of(vocabulary))
    except (ValueError, RecursionError) as error:
        outcome = _refused(error)
    except BaseException as error:
        outcome = error
    release()
    put(outcome)


def _refused(why: object) -> ValueError:
    return ValueError(f"it does not compile: {why}")


def _close(jobs: Jobs, futures: OrderedDict[str, Future[str]]) -> None:
    for future in futures.values():
        future.cancel()  # no effect on what is done
    jobs.put(None)
