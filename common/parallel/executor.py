"""The driver's side of the workers: send the same message to all, collect the answers.

    driver                     worker 0            worker 1
      | -- plan 7 -------------> |                   |
      | -- plan 7 ---------------------------------> |
      |      (plans the next step, if it may)   all-reduce ...
      | <------------- output 7 -|                   |

Every worker reads and answers its messages in order, so no message is sent twice and only the step
number has to be matched.

A worker that raises reports the error. A killed worker's socket closes. A stuck worker is late: the
driver then asks over its lifeline, where a thread answers even if the model waits in a collective.
That tells the rank that the others wait for from the ranks that wait. After any failure all workers
are ended, and every later call raises the same message, because ranks that are no longer in the
same step cannot continue.

See common/parallel/README.md#processes"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import subprocess
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from common.parallel import message
from common.parallel.channel import (
    START_TIMEOUT_S,
    Channel,
    ChannelClosed,
    ask_locations,
    interrupts_held,
)

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0
GRACE_S = 1.0  # for other ranks' reports, after one rank has reported an error
# Errors in the arguments of `LLM` keep their type, whichever process found them.
OF_THE_USER = {"ValueError": ValueError, "FileNotFoundError": FileNotFoundError}


class WorkerError(RuntimeError):
    """A worker has exited, is stuck or has raised. The message names the worker."""

    is_final = True  # no later step can do better


@dataclass(frozen=True, slots=True)
class Link:
    """The driver's handle of a worker. `process` is None if the driver did not start it."""

    rank: int
    channel: Channel
    lifeline: Channel
    process: subprocess.Popen | None = None

    @property
    def name(self) -> str:
        return f"rank {self.rank}" + (f" (process {self.process.pid})" if self.process else "")


class Executor:
    """Sends messages to all workers and collects their answers. `output_rank` returns the tokens.
    With `compares`, all ranks report their sampled tokens."""

    def __init__(
        self, links: Sequence[Link], output_rank: int, timeout_s: float, compares: bool = False
    ) -> None:
        self.links = list(links)
        self.output_rank = output_rank
        self.timeout_s = timeout_s
        self.compares = compares
        self.failure: str | None = None  # why all calls raise
        self._is_closed = False
        self._pid = os.getpid()
        self._outputs: list[dict[int, dict[str, Any]]] = [{} for _ in links]  # by step
        self._answers: list[deque[dict[str, Any]]] = [deque() for _ in links]
        # Adapters being read: by number, the answer of each rank.
        self.loading: dict[int, dict[int, dict[str, Any]]] = {}
        self._errors: dict[int, dict[str, Any]] = {}
        self._exited_ranks: set[int] = set()
        self._selector = selectors.DefaultSelector()
        for link in self.links:
            self._selector.register(link.channel, selectors.EVENT_READ, link)

    # -- to the workers

    def start(self, messages: Sequence[bytes]) -> list[dict[str, Any]]:
        """Send each worker its start message and return the answers. A user's error keeps its
        type."""
        try:
            self._deliver(messages, START_TIMEOUT_S)
            return [answer["facts"] for answer in self._collect(START_TIMEOUT_S, "to start")]
        except WorkerError:
            wrong = [e for e in self._errors.values() if e["kind_of_error"] in OF_THE_USER]
            if wrong and len(wrong) == len(self._errors):
                raise OF_THE_USER[wrong[0]["kind_of_error"]](wrong[0]["sentence"]) from None
            raise
        except BaseException:
            self.close()
            raise

    def send(self, content: bytes | Sequence[bytes]) -> None:
        """Send one message to all workers, or one to each. Returns when all have received theirs,
        not when they have processed it. An interrupt waits until then, because ranks with
        different messages would wait for each other forever."""
        messages = [content] * len(self.links) if isinstance(content, bytes) else content
        with interrupts_held():
            self._deliver(messages, self.timeout_s)

    def _deliver(self, messages: Sequence[bytes], timeout_s: float) -> None:
        self._check()
        for link, content in zip(self.links, messages, strict=True):
            link.channel.put(content)
        left = self.links
        deadline = time.monotonic() + timeout_s
        while True:
            left = [link for link in left if not self._send_some(link)]
            if not left:
                return
            if time.monotonic() > deadline:
                names = ", ".join(link.name for link in left)
                self._fail(f"{names} did not take a message in {timeout_s:g} s")
            self._receive(0.001)  # otherwise two full sockets would wait for each other

    def _send_some(self, link: Link) -> bool:
        try:
            if not link.channel.is_sent:
                link.channel.send_some()
        except ChannelClosed:
            self._exited_ranks.add(link.rank)
            self._fail()
        return link.channel.is_sent

    # -- from the workers

    def wait_for_output(self, step: int) -> dict[str, Any]:
        """Return the output rank's answer to the plan of this step number. Answers to earlier plans
        that no call has waited for are dropped."""
        self._check()
        ranks = range(len(self.links)) if self.compares else (self.output_rank,)
        waiting = list(ranks)
        late_for = f"step {step}"
        deadline = time.monotonic() + self.timeout_s
        while waiting := [rank for rank in waiting if step not in self._outputs[rank]]:
            self._receive(deadline - time.monotonic(), late_for)
        answers = [self._outputs[rank].pop(step) for rank in ranks]
        for outputs in self._outputs:
            for number in [n for n in outputs if n < step]:
                del outputs[number]
        if self.compares:
            self._compare(step, answers)
            return answers[self.output_rank]
        return answers[0]

    def collect(self, late_for: str) -> list[dict[str, Any]]:
        """Return every rank's next answer other than answers to plans."""
        self._check()
        return self._collect(self.timeout_s, late_for)

    def look(self, seconds: float) -> None:
        """Process the messages that arrive within `seconds`."""
        self._check()
        self._receive(seconds)

    def _collect(self, timeout_s: float, late_for: str) -> list[dict[str, Any]]:
        deadline = time.monotonic() + timeout_s
        while not all(self._answers):
            self._receive(deadline - time.monotonic(), late_for, timeout_s)
        return [answers.popleft() for answers in self._answers]

    def _receive(
        self, seconds: float, late_for: str | None = None, timeout_s: float | None = None
    ) -> None:
        """Wait up to `seconds` for a message and process what has arrived. If none arrives and
        `late_for` is set, that is a failure: `late_for` names the missing answer."""
        ready = self._selector.select(max(seconds, 0))
        with interrupts_held():  # so that no answer is lost between socket and parsing
            for key, _ in ready:
                self._take(key.data)
        if self._errors or self._exited_ranks:
            self._fail()
        if not ready and late_for is not None:
            self._fail(late_for=late_for, timeout_s=timeout_s or self.timeout_s)

    def _take(self, link: Link) -> None:
        try:
            messages = link.channel.arrived()
        except ChannelClosed:
            self._exited_ranks.add(link.rank)
            self._selector.unregister(link.channel)
            return
        for data in messages:
            kind, content = message.unpack(data, message.FROM_WORKER)
            if kind == "output":
                self._outputs[link.rank][content["step"]] = content
            elif kind == "error":
                self._errors[link.rank] = content
            elif kind == "adapter":  # may no longer be wanted
                self.loading.get(content["number"], {})[link.rank] = content
            else:
                self._answers[link.rank].append(content)

    def _compare(self, step: int, answers: Iterable[dict[str, Any]]) -> None:
        digests = {i: a["digest"] for i, a in enumerate(answers) if a["digest"] is not None}
        right = digests[self.output_rank]
        if differing := [rank for rank, digest in digests.items() if digest != right]:
            self._end(
                f"{self.links[differing[0]].name} has sampled other tokens in step {step} than "
                f"{self.links[self.output_rank].name}"
            )

    # -- when something is wrong

    def _check(self) -> None:
        if (pid := os.getpid()) != self._pid:
            raise RuntimeError(f"cannot use workers of process {self._pid} in {pid}, a fork")
        if self.failure is not None:
            raise WorkerError(f"the engine has failed: {self.failure}")
        if self._is_closed:
            raise WorkerError("the engine is closed; create a new one")
        if any(link.channel.is_inconsistent for link in self.links):
            self._end("it was interrupted in the middle of a message")

    def _fail(
        self,
        sentence: str | None = None,
        *,
        late_for: str | None = None,
        timeout_s: float | None = None,
    ) -> NoReturn:
        """Find the rank at fault, end all workers and raise. A rank that failed in a collective was
        hit by another rank's failure, whose report may still arrive."""
        deadline = time.monotonic() + GRACE_S
        while self._errors and not self._culprits() and time.monotonic() < deadline:
            for key, _ in self._selector.select(max(0.0, deadline - time.monotonic())):
                self._take(key.data)
        self._end(self._culprits() or self._find_stuck(late_for, timeout_s) or sentence or "")

    def _culprits(self) -> str:
        """A sentence that names the ranks that exited or raised. Empty if others are at fault."""
        exits = [self._describe_exit(self.links[rank]) for rank in sorted(self._exited_ranks)]
        raised = [
            self._describe_error(rank)
            for rank, error in sorted(self._errors.items())
            if not error["is_collective"]
        ]
        return "; ".join(raised[:1] or exits)

    def _describe_error(self, rank: int) -> str:
        error = self._errors[rank]
        return f"{self.links[rank].name} raised {error['kind_of_error']}: {error['sentence']}"

    @staticmethod
    def _describe_exit(link: Link) -> str:
        if link.process is None:
            return f"{link.name} has exited"
        with suppress(subprocess.TimeoutExpired):
            code = link.process.wait(GRACE_S)
            if code < 0:
                return f"{link.name} was killed by {signal.Signals(-code).name}"
            return f"{link.name} has ended with exit code {code}: its last words are on stderr"
        return f"{link.name} has closed its connection"

    def _find_stuck(self, late_for: str | None, timeout_s: float | None) -> str:
        lifelines = {link.rank: link.lifeline for link in self.links}
        answers = ask_locations(lifelines, GRACE_S)
        late = "" if late_for is None else f" in {timeout_s:g} s"
        awaited = late_for or "its step"
        if silent := [link.name for link in self.links if link.rank not in answers]:
            return f"{', '.join(silent)} is stuck: no sign of life, and no end of {awaited}{late}"
        places = {rank: answer["place"] for rank, answer in answers.items()}
        busy = {r for r, a in answers.items() if a["step"] is not None and not a["is_waiting"]}
        if late_for is not None and busy:
            shown = ", ".join(f"{self.links[r].name} at {places[r]}" for r in sorted(busy))
            return f"{shown} is late: no end of {awaited}{late}"
        if self._errors:
            return self._describe_error(min(self._errors))
        shown = ", ".join(f"rank {rank} at {place}" for rank, place in sorted(places.items()))
        return f"no rank has come to the end of {awaited}{late}: {shown}"

    def _end(self, reason: str) -> NoReturn:
        self.failure = reason
        self._kill()
        raise WorkerError(reason)

    # -- the end

    def close(self) -> None:
        """End the workers. None is left when this returns. Can be called again."""
        if self._is_closed or os.getpid() != self._pid:  # a fork does not own the workers
            return
        self._is_closed = True
        if self.failure is None:
            with suppress(Exception, KeyboardInterrupt):
                self._send_close()
        self._kill()

    def _send_close(self) -> None:
        goodbye = message.pack("close")
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        left = [link for link in self.links if link.rank not in self._exited_ranks]
        for link in left:
            if link.channel.is_sent and not link.channel.is_inconsistent:
                link.channel.put(goodbye)
                with suppress(ChannelClosed):
                    link.channel.send_some()
        while len(self._exited_ranks) < len(self.links) and time.monotonic() < deadline:
            for key, _ in self._selector.select(max(0.0, deadline - time.monotonic())):
                self._take(key.data)
        for link in left:
            if link.process is not None:
                with suppress(subprocess.TimeoutExpired):
                    link.process.wait(max(0.0, deadline - time.monotonic()))

    def _kill(self) -> None:
        for link in self.links:
            if link.process is not None and link.process.poll() is None:
                link.process.kill()
        for link in self.links:
            if link.process is not None:
                link.process.wait()
            link.channel.close()
            link.lifeline.close()
        self._selector.close()
