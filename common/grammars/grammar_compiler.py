"""Grammars are compiled in a thread, one after another, and kept as long as there is room.

The library lets other threads run meanwhile. What comes back is text, which each rank that samples
makes a matcher of (`grammar_masks.py`): masks never cross processes."""

from __future__ import annotations

from collections import OrderedDict

from common.grammars.lark_text import compile_source
from common.grammars.vocabulary import Vocabulary, tokenizer_of
from worker_thread import ThreadJob, WorkerThread

KEPT = 64 << 20  # bytes, about, of grammars that nobody need be waiting for


class GrammarCompiler:
    """A grammar that was compiled is found again by its source; the least recently wanted go first.
    One thread at a time may `submit`."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._thread = WorkerThread("grammar", finishes=False)
        self._jobs: OrderedDict[str, ThreadJob[str]] = OrderedDict()
        self._num_bytes = 0  # of these
        self.close = self._thread.close

    def submit(self, source: str) -> ThreadJob[str]:
        """What is compiled of it, or a `ValueError` that says what is wrong."""
        job = self._jobs.pop(source, None)
        if job is None:
            self._num_bytes += _size(source)
        if job is None or (job.done() and not _is_compiled(job)):
            job = self._thread.submit(_compile, source, self.vocabulary)
        self._jobs[source] = job
        self._make_room()
        return job

    def _make_room(self) -> None:
        """What it costs does not depend on how many are kept."""
        while self._num_bytes > KEPT and len(self._jobs) > 1:
            source, job = next(iter(self._jobs.items()))
            if not job.done():  # nor are those behind it
                break
            del self._jobs[source]
            self._num_bytes -= _size(source)


def _size(source: str) -> int:
    """With what was compiled of it, which is longer, and a job."""
    return 4 * len(source) + 4096


def _compile(source: str, vocabulary: Vocabulary) -> str:
    try:
        return compile_source(source, tokenizer_of(vocabulary))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it does not compile: {error}") from error


def _is_compiled(job: ThreadJob[str]) -> bool:
    return not job.cancelled() and job.exception() is None
