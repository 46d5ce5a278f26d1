"""`GrammarCompiler`: compiles grammars one after another, concurrently with steps, and caches them.

The library lets other threads run in the meantime, and cannot be stopped. So a thread watches the
thread that compiles: a grammar that takes too long fails, a grammar that no request waits for any
longer is abandoned, and in both cases the next one starts. A job can be cancelled until it is done.

An abandoned compilation continues until the library's own limits end it (`_LIMITS` in
`vocabulary.py`), which can take minutes, because the library does not count all of its work. Three
of them do not delay another grammar. Short and long sources have separate queues, so however many
long ones are abandoned, short ones do not wait.

The result is text, from which each rank that samples makes a matcher (`grammar_masks.py`), so masks
never cross processes. A separate process for compiling could be ended, but its matcher would stay
in it, and the next step would have to compile again.

See 04_scheduler/beyond/GRAMMARS.md#which-tokens-may-come-next"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Lock, Semaphore, Thread

from common.features.grammars.lark_text import compile_source
from common.features.grammars.vocabulary import Vocabulary, tokenizer_of

KEPT = 64 << 20  # approximate bytes of cached grammars, which no request may need
TIMEOUT_S = 10.0  # for one grammar, without its wait for others
MAX_CONCURRENT = 4  # of a queue: one for a request, and three abandoned ones that still run
SHORT = 4_000  # characters


class GrammarJob(Future[str]):
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
    """Compiles grammars and caches them by source; evicts the least recently requested first. Only
    one thread at a time may call `submit`."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._kept: OrderedDict[str, GrammarJob] = OrderedDict()
        self._num_bytes = 0  # of the cached grammars
        self._short = Jobs()
        self._long = Jobs()
        making = Lock()
        for jobs in (self._short, self._long):
            arguments = jobs, vocabulary, making
            Thread(target=_watch, args=arguments, name="grammar", daemon=True).start()
        self.close = weakref.finalize(self, _close, [self._short, self._long], self._kept)

    def submit(self, source: str) -> GrammarJob:
        """Return the job of a grammar. Its result is the compiled text, or a `ValueError` with the
        reason."""
        job = self._kept.pop(source, None)
        if job is None:
            self._num_bytes += _size(source)
        if job is None or (job.done() and not _is_compiled(job)):
            job = GrammarJob(source)
            (self._short if len(source) <= SHORT else self._long).put(job)
        self._kept[source] = job
        self._evict_to_fit()
        return job

    def _evict_to_fit(self) -> None:
        """Evict grammars until they fit into `KEPT`. The cost does not depend on their number."""
        while self._num_bytes > KEPT and len(self._kept) > 1:
            source, job = next(iter(self._kept.items()))
            if not job.done():  # most jobs after it are not done either
                break
            del self._kept[source]
            self._num_bytes -= _size(source)


def _size(source: str) -> int:
    """The approximate bytes of a source, its compiled text (which is longer) and its job."""
    return 4 * len(source) + 4096


def _is_compiled(job: GrammarJob) -> bool:
    return not job.cancelled() and job.exception() is None


def _watch(jobs: Jobs, vocabulary: Vocabulary, making: Lock) -> None:
    """Compile the jobs of one queue. `making` is held while the tokenizer is made, once."""
    with making, suppress(Exception):  # each grammar's compilation raises it again
        tokenizer_of(vocabulary)  # takes seconds for a large one; no grammar's time includes it
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
        if outcome is None or not job.set_running_or_notify_cancel():
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


def _refused(reason: object) -> ValueError:
    return ValueError(f"cannot compile: {reason}")


def _close(queues: list[Jobs], kept: OrderedDict[str, GrammarJob]) -> None:
    for job in kept.values():
        job.cancel()  # no effect on finished jobs
    for jobs in queues:
        jobs.put(None)
