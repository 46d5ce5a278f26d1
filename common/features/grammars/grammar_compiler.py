"""Grammars are compiled one after another, beside the steps, and kept as long as there is room.

The library lets other threads run meanwhile, and cannot be stopped. So a thread watches the one
that compiles: a grammar that takes too long fails, one that no request waits for any more is left
alone, and the next one begins in either case. A job may be cancelled until it is done.

A grammar that was given up is compiled on until the library's own limits end it (`_LIMITS` in
`vocabulary.py`). The longest compilation that was found, of a schema as long as `grammars.py`
accepts, took 2.3 s of processor time and 65 MB. Three of them hold up no other grammar.

The result is text, which each rank that samples makes a matcher of (`grammar_masks.py`): masks
never cross processes. A process that compiles could be ended, but it would keep its matcher, so
the next step would have to make it again."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Semaphore, Thread

from common.features.grammars.lark_text import compile_source
from common.features.grammars.vocabulary import Vocabulary, tokenizer_of
from worker_thread import ThreadJob

KEPT = 64 << 20  # bytes, about, of grammars that no request may be waiting for
TIMEOUT_S = 10.0  # for one grammar, without its wait for others
MAX_CONCURRENT = 4  # one for a request, and three that were given up and have not ended


class GrammarJob(ThreadJob[str]):
    def __init__(self, source: str) -> None:
        super().__init__()
        self.source = source
        self.outcomes = SimpleQueue[str | BaseException | None]()  # None: it was cancelled

    def cancel(self) -> bool:
        is_cancelled = super().cancel()
        if is_cancelled:
            self.outcomes.put(None)
        return is_cancelled


Jobs = SimpleQueue[GrammarJob | None]


class GrammarCompiler:
    """A grammar that was compiled is found again by its source; the least recently wanted go first.
    One thread at a time may `submit`."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._kept: OrderedDict[str, GrammarJob] = OrderedDict()
        self._num_bytes = 0  # of these
        self._jobs: Jobs = SimpleQueue()
        Thread(target=_watch, args=(self._jobs, vocabulary), name="grammar", daemon=True).start()
        self.close = weakref.finalize(self, _close, self._jobs, self._kept)

    def submit(self, source: str) -> GrammarJob:
        """The text that is compiled of it, or a `ValueError` that says what is wrong."""
        job = self._kept.pop(source, None)
        if job is None:
            self._num_bytes += _size(source)
        if job is None or (job.done() and not _is_compiled(job)):
            job = GrammarJob(source)
            self._jobs.put(job)
        self._kept[source] = job
        self._make_room()
        return job

    def _make_room(self) -> None:
        """What it costs does not depend on how many are kept."""
        while self._num_bytes > KEPT and len(self._kept) > 1:
            source, job = next(iter(self._kept.items()))
            if not job.done():  # nor are those behind it
                break
            del self._kept[source]
            self._num_bytes -= _size(source)


def _size(source: str) -> int:
    """With what was compiled of it, which is longer, and a job."""
    return 4 * len(source) + 4096


def _is_compiled(job: GrammarJob) -> bool:
    return not job.cancelled() and job.exception() is None


def _watch(jobs: Jobs, vocabulary: Vocabulary) -> None:
    with suppress(Exception):  # each grammar would say it
        tokenizer_of(vocabulary)  # takes seconds for a large one, which no grammar is charged with
    at_work = Semaphore(MAX_CONCURRENT)
    while (job := jobs.get()) is not None:
        at_work.acquire()
        if job.cancelled():
            at_work.release()
            continue
        arguments = job.source, vocabulary, job.outcomes.put, at_work.release
        Thread(target=_compile, args=arguments, name="grammar", daemon=True).start()
        try:
            outcome = job.outcomes.get(timeout=TIMEOUT_S)
        except Empty:
            outcome = _refused(f"compiling takes longer than {TIMEOUT_S:.0f} s")
        if outcome is None or not job.begin():
            continue
        if isinstance(outcome, str):
            job.set_result(outcome)
        else:
            job.set_exception(outcome)


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
    return ValueError(f"cannot compile: {why}")


def _close(jobs: Jobs, kept: OrderedDict[str, GrammarJob]) -> None:
    for job in kept.values():
        job.cancel()  # no effect on what is done
    jobs.put(None)
