"""The driver's side of the workers: send the same message to all, collect the answers.

    driver                     worker 0            worker 1
      | -- plan 7 -------------> |                   |
      | -- plan 7 ---------------------------------> |
      |      (plans the next step, if it may)   all-reduce ...
      | <------------- output 7 -|                   |

A message that is answered has a number, and each answer repeats it. An answer that no
call waits for any longer is dropped.

A worker that raises reports the error. The process handle of a killed worker says so. A worker that
is stopped or computes forever is late: then ranks that wait for it in a collective report that, and
it does not. After any failure all workers are ended, and every later call raises the same message,
because ranks that are no longer in the same step cannot continue.

See common/parallel/README.md#processes"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import IO, Any, NoReturn

import psutil

from common.parallel import message
from common.parallel.channel import DriverChannel, interrupts_held
from scheduler_interface import StepOutput

START_TIMEOUT_S = 600.0  # for a worker's imports, and to read its weights
CLOSE_TIMEOUT_S = 5.0
GRACE_S = 1.0  # for other ranks' reports, after one rank has failed or is late
LOOK_S = 0.05  # between two looks at the processes
# Errors in the arguments of `LLM` keep their type, whichever process found them.
OF_THE_USER = {"ValueError": ValueError, "FileNotFoundError": FileNotFoundError}


class WorkerError(RuntimeError):
    """A worker has exited, is stuck or has raised. The message names the worker."""

    is_final = True  # no later step can do better


@dataclass(frozen=True, slots=True)
class Link:
    """The driver's handle of a worker, which ends when `lifeline` closes."""

    rank: int
    process: subprocess.Popen
    lifeline: IO[bytes]

    @property
    def name(self) -> str:
        return f"rank {self.rank} (process {self.process.pid})"


class Executor:
    """Sends messages to all workers and collects their answers. `output_ranks` return the sampled
    tokens, which must be the same. `folder` has the sockets' files."""

    def __init__(
        self,
        links: Sequence[Link],
        folder: TemporaryDirectory,
        output_ranks: Sequence[int],
        timeout_s: float,
    ) -> None:
        self.links = list(links)
        self.output_ranks = output_ranks
        self.timeout_s = timeout_s
        self.failure: str | None = None  # why all calls raise
        self._is_closed = False
        self._pid = os.getpid()
        self._folder = folder
        self._channel = DriverChannel(folder.name, len(self.links))
        self._num_asked = 0
        self._answers: dict[int, dict[int, dict[str, Any]]] = {}  # awaited; by number, then rank
        self._errors: dict[int, dict[str, Any]] = {}  # by rank

    # -- to the workers

    def start(self, messages: Sequence[bytes]) -> list[dict[str, Any]]:
        """Send each worker its start message and return the answers. A user's error keeps its
        type."""
        self._answers[message.START] = {}
        try:
            self.send(messages)
            answers = self.answers(message.START, "the start", START_TIMEOUT_S)
        except WorkerError:
            wrong = [e for e in self._errors.values() if e["kind_of_error"] in OF_THE_USER]
            if wrong and len(wrong) == len(self._errors):
                raise OF_THE_USER[wrong[0]["kind_of_error"]](wrong[0]["sentence"]) from None
            raise
        self._folder.cleanup()  # all are connected
        return [answer["facts"] for answer in answers]

    def send(self, content: bytes | Sequence[bytes]) -> None:
        """Send one message to all workers, or one to each. An interrupt waits until all have
        theirs, because ranks with different messages would wait for each other forever."""
        self._check()
        messages = [content] * len(self.links) if isinstance(content, bytes) else content
        with interrupts_held():
            try:
                for link, data in zip(self.links, messages, strict=True):
                    self._channel.send(link.rank, data)
            except BaseException as error:
                self.failure = f"only some ranks got a message: {error!r}"
                self._kill()
                raise

    def ask(self, kind: str, **content: Any) -> int:
        """Send all workers a message that they answer. Returns its number."""
        self._num_asked += 1
        number = self._num_asked
        self._answers[number] = {}
        self.send(message.pack(kind, number=number, **content))
        return number

    # -- from the workers

    def wait_for_output(self, number: int) -> StepOutput:
        """Return the output of the plan of this number."""
        answers = self.answers(number, f"step {number}", ranks=self.output_ranks)
        outputs = [answer["output"] for answer in answers]
        for rank, output in zip(self.output_ranks, outputs, strict=True):
            if output.token_ids != outputs[0].token_ids:
                names = [self.links[rank].name, self.links[self.output_ranks[0]].name]
                self._end(f"{names[0]} has sampled other tokens in step {number} than {names[1]}")
        return outputs[0]

    def answers(
        self,
        number: int,
        late_for: str,
        timeout_s: float | None = None,
        ranks: Sequence[int] | None = None,  # None: all
    ) -> list[dict[str, Any]]:
        """Wait for the answers of `ranks` to the message of this number."""
        self._check()
        timeout_s = timeout_s or self.timeout_s
        deadline = time.monotonic() + timeout_s
        ranks = range(len(self.links)) if ranks is None else ranks
        found = self._answers[number]
        while not found.keys() >= set(ranks):
            self._take(min(LOOK_S, deadline - time.monotonic()))
            if self._errors or self._exited():
                self._fail()
            if time.monotonic() > deadline:
                self._fail(f"no end of {late_for} in {timeout_s:g} s")
        del self._answers[number]
        return [found[rank] for rank in ranks]

    def _take(self, seconds: float) -> None:
        self._channel.wait(seconds)
        with interrupts_held():  # so that no answer is lost between socket and table
            for rank, data in self._channel.arrived():
                kind, content = message.unpack(data)
                if kind == "error":
                    self._errors[rank] = content
                elif content["number"] in self._answers:
                    self._answers[content["number"]][rank] = content

    # -- when something is wrong

    def _check(self) -> None:
        if (pid := os.getpid()) != self._pid:
            raise RuntimeError(f"cannot use workers of process {self._pid} in {pid}, a fork")
        if self.failure is not None:
            raise WorkerError(f"the engine has failed: {self.failure}")
        if self._is_closed:
            raise WorkerError("the engine is closed; create a new one")

    def _exited(self) -> list[Link]:
        return [link for link in self.links if link.process.poll() is not None]

    def _fail(self, late: str = "") -> NoReturn:
        """Find the rank at fault, end all workers and raise. A rank that failed in a collective was
        hit by another rank's failure, whose report may still arrive."""
        deadline = time.monotonic() + GRACE_S
        while not self._culprits() and time.monotonic() < deadline:
            self._take(LOOK_S)
        self._end(self._culprits() or self._late_ranks(late))

    def _culprits(self) -> str:
        """A sentence that names the ranks that raised or exited. Empty if others are at fault."""
        for rank, error in sorted(self._errors.items()):
            if not error["is_collective"]:
                return self._describe_error(rank)
        return "; ".join(map(_describe_exit, self._exited()))

    def _describe_error(self, rank: int) -> str:
        error = self._errors[rank]
        return f"{self.links[rank].name} raised {error['kind_of_error']}: {error['sentence']}"

    def _late_ranks(self, late: str) -> str:
        """A sentence that names the ranks for which the others waited."""
        silent = [link for link in self.links if link.rank not in self._errors]
        status = psutil.STATUS_STOPPED
        stopped = [link for link in silent if psutil.Process(link.process.pid).status() == status]
        if stopped:
            return f"{_names(stopped)} is stopped: {late or 'others wait for it'}"
        if late and silent:
            return f"{_names(silent)} is late: {late}"
        return self._describe_error(min(self._errors))

    def _end(self, reason: str) -> NoReturn:
        self.failure = reason
        self._kill()
        raise WorkerError(reason)

    # -- the end

    def close(self) -> None:
        """End the workers. None is left when this returns. Can be called again."""
        if self._is_closed or os.getpid() != self._pid:  # a fork does not own the workers
            return
        if self.failure is None:
            deadline = time.monotonic() + CLOSE_TIMEOUT_S
            with suppress(Exception, KeyboardInterrupt):
                self.send(message.pack("close"))
                for link in self.links:
                    link.process.wait(max(0.0, deadline - time.monotonic()))
        self._kill()
        self._is_closed = True

    def _kill(self) -> None:
        for link in self.links:
            if link.process.poll() is None:
                link.process.kill()
        for link in self.links:
            link.process.wait()
            link.lifeline.close()
        self._channel.close()
        self._folder.cleanup()


def _names(links: Sequence[Link]) -> str:
    return ", ".join(link.name for link in links)


def _describe_exit(link: Link) -> str:
    code = link.process.wait()
    if code < 0:
        return f"{link.name} was killed by {signal.Signals(-code).name}"
    return f"{link.name} has ended with exit code {code}: its last words are on stderr"
