"""`GrammarCompiler`: compiles grammars in threads, concurrently with steps, and caches them.

The library lets other threads run in the meantime, and cannot be stopped. A grammar that takes too
long fails, and a job that no request waits for any longer can be cancelled until it is done; the
thread that compiles it stays busy until the library's own limits end it (`_LIMITS` in
`vocabulary.py`), which can take minutes, because the library does not count all of its work. Three
of them do not delay another grammar.

The result is text, from which each rank that samples makes a matcher (`grammar_masks.py`), so masks
never cross processes. A separate process for compiling could be ended, but its matcher would stay
in it, and the next step would have to compile again.

See 04_scheduler/beyond/GRAMMARS.md#which-tokens-may-come-next"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from queue import SimpleQueue
from threading import Lock, Thread, Timer

from common.features.grammars.lark_text import compile_source
from common.features.grammars.vocabulary import Vocabulary, tokenizer_of

NUM_KEPT = 32  # cached grammars, which no request may need
TIMEOUT_S = 10.0  # for one grammar, without its wait for others
NUM_THREADS = 4
_MAKING_TOKENIZER = Lock()

Jobs = SimpleQueue[tuple[str, Future[str]] | None]


class GrammarCompiler:
    """Compiles grammars and caches them by source; evicts the least recently requested first. Only
    one thread at a time may call `submit`."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._kept: OrderedDict[str, Future[str]] = OrderedDict()
        self._jobs = Jobs()
        for _ in range(NUM_THREADS):
            arguments = self._jobs, vocabulary
            Thread(target=_work, args=arguments, name="grammar", daemon=True).start()
        self.close = weakref.finalize(self, _close, self._jobs, self._kept)

    def submit(self, source: str) -> Future[str]:
        """Return the job of a grammar. Its result is the compiled text, or a `ValueError` with the
        reason."""
        job = self._kept.pop(source, None)
        if job is None or (job.done() and (job.cancelled() or job.exception())):
            job = Future()
            self._jobs.put((source, job))
        self._kept[source] = job
        if len(self._kept) > NUM_KEPT:
            self._kept.popitem(last=False)
        return job


def _work(jobs: Jobs, vocabulary: Vocabulary) -> None:
    while (entry := jobs.get()) is not None:
        source, job = entry
        reason = f"compiling takes longer than {TIMEOUT_S:.0f} s"
        timer = Timer(TIMEOUT_S, _fail, (job, reason))
        timer.daemon = True
        try:
            with _MAKING_TOKENIZER:  # takes seconds for a large one, the first time
                tokenizer = tokenizer_of(vocabulary)
            if not job.done():
                timer.start()
                compiled = compile_source(source, tokenizer)
                with suppress(InvalidStateError):  # cancelled, or too late
                    job.set_result(compiled)
        except BaseException as error:
            _fail(job, error)
        timer.cancel()


def _fail(job: Future[str], reason: object) -> None:
    with suppress(InvalidStateError):
        job.set_exception(ValueError(f"cannot compile: {reason}"))


def _close(jobs: Jobs, kept: OrderedDict[str, Future[str]]) -> None:
    for job in kept.values():
        job.cancel()  # no effect on finished jobs
    for _ in range(NUM_THREADS):
        jobs.put(None)
