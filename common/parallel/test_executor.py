"""A driver's view of workers that are played here, over real sockets."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import pytest
import zmq

from common.parallel import channel, message
from common.parallel import executor as executor_module
from common.parallel.channel import WorkerChannel
from common.parallel.executor import Executor, Link, WorkerError
from scheduler_interface import StepOutput


class Process:
    """What the driver asks of a worker's process, and its lifeline."""

    pid = 0

    def __init__(self) -> None:
        self.code: int | None = None

    def poll(self) -> int | None:
        return self.code

    def wait(self, timeout: float | None = None) -> int | None:
        return self.code

    def kill(self) -> None:
        self.code = -9

    close = kill


Answers = list[tuple[str, dict[str, Any]]]
Play = Callable[[Process, int], Answers]


def play(worker: WorkerChannel, process: Process, answer: Play) -> None:
    """A worker: `answer(process, number)` are its messages to a plan."""
    kind = ""
    while kind != "close" and process.code is None:
        kind, received = message.unpack(worker.receive())
        for name, content in answer(process, received.get("number", -1)):
            worker.send(message.pack(name, **content))
    process.code = process.code or 0


def played(*answers: Play, timeout_s: float = 0.2) -> Executor:
    folder = TemporaryDirectory()
    processes = [Process() for _ in answers]
    links = [Link(rank, process, process) for rank, process in enumerate(processes)]
    executor = Executor(links, folder, [0], timeout_s)
    for rank, answer in enumerate(answers):
        arguments = (WorkerChannel(folder.name, rank), processes[rank], answer)
        threading.Thread(target=play, args=arguments, daemon=True).start()
    return executor


def right(process: Process, number: int) -> Answers:
    return [("answer", dict(number=number, output=StepOutput({"of": [number]})))]


def silent(process: Process, number: int) -> Answers:
    return []


def raises(kind: str, is_collective: bool, after_s: float = 0.0) -> Play:
    fault = dict(kind_of_error=kind, sentence="so it is", is_collective=is_collective)
    return lambda process, number: time.sleep(after_s) or [("error", fault)]


def exits(process: Process, number: int) -> Answers:
    time.sleep(0.1)
    process.code = -9
    return []


def step(executor: Executor) -> StepOutput:
    number = executor._num_asked + 1
    executor._answers[number] = {}
    executor._num_asked = number
    executor.send(message.pack("plan", number=number))
    return executor.wait_for_output(number)


def test_two_that_talk_at_once_do_not_wait_for_each_other_and_old_answers_are_dropped():
    """A driver that writes and a worker that answers at length; in a thread, where interrupts are
    not to be asked for. An answer to an earlier question is not taken for one to a later."""
    datas = [random.Random(n).randbytes(n) for n in (10**7, 0, 1, 3)]
    blocks = [("block", dict(number=n, data=data)) for n, data in enumerate(datas)]
    executor = played(lambda *_: blocks, lambda *_: blocks, timeout_s=20)
    executor._answers |= {1: {}, 3: {}}
    with ThreadPoolExecutor(1) as pool:
        for _ in range(2):
            pool.submit(executor.send, message.pack("write", data=bytes(10**7))).result(60)
    assert executor.answers(3, "it") == [{"number": 3, "data": datas[3]}] * 2
    assert executor._answers.keys() == {1}
    folder = Path(executor._folder.name)
    assert folder.stat().st_mode & 0o777 == 0o700
    executor.close()
    assert not folder.exists()


victim = raises("CollectiveError", True)
FAILURES = {
    "gone, and another has noticed": (
        (victim, exits),
        r"^rank 1 \(process 0\) was killed by SIGKILL$",
    ),
    "raises, and another has noticed": (
        (victim, raises("KeyError", False, after_s=0.1)),
        r"^rank 1 \(process 0\) raised KeyError: so it is$",
    ),
    "is stopped": (
        (silent, silent),
        r"^rank 0 \(process 0\), rank 1 \(process 0\) is stopped: no end of step 1 in 0.2 s$",
    ),
    "is late": (
        (raises("CollectiveError", True, after_s=0.3), silent),
        r"^rank 1 \(process 0\) is late: no end of step 1 in 0.2 s$",
    ),
    "a collective fails": (
        (victim, victim),
        r"^rank 0 \(process 0\) raised CollectiveError: so it is$",
    ),
}


@pytest.mark.parametrize("name", FAILURES)
def test_the_rank_to_blame_is_named(name, monkeypatch):
    """Not the one that suffers from it. The rank that has the tokens may have given them."""
    actors, sentence = FAILURES[name]
    status = psutil.STATUS_STOPPED if "stopped" in name else psutil.STATUS_RUNNING
    monkeypatch.setattr(psutil, "Process", lambda pid: psutil)
    monkeypatch.setattr(psutil, "status", lambda: status, raising=False)
    # On a busy machine whatever is waited for comes late: short is only what has to pass.
    monkeypatch.setattr(executor_module, "GRACE_S", 1.0)
    executor = played(*actors, timeout_s=0.2 if "0.2 s" in sentence else 20.0)
    with pytest.raises(WorkerError, match=sentence):
        step(executor)
    with pytest.raises(WorkerError, match="the engine has failed: "):
        step(executor)
    executor.close()


@pytest.mark.parametrize("second, raised", [("ValueError", ValueError), ("KeyError", WorkerError)])
def test_a_startup_error_is_the_users_if_all_ranks_report_it(second, raised):
    executor = played(raises("ValueError", False), raises(second, False), timeout_s=20)
    while len(executor._errors) < 2:  # sent before any read
        executor._channel.send(0, message.pack("plan", number=1))
        executor._channel.send(1, message.pack("plan", number=1))
        executor._take(0.1)
    with pytest.raises(raised, match="so it is"):
        executor.start([message.pack("plan", number=2)] * 2)


def test_an_interrupted_message_is_taken_to_its_end_by_all(monkeypatch):
    """Ctrl-C comes when a system call is over, and before the next line of ours."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    executor = played(right, right, timeout_s=20)

    def interrupted(call: Callable) -> Callable:
        def then(*arguments, **options):
            result = call(*arguments, **options)
            signal.raise_signal(signal.SIGINT)
            return result

        return then

    executor._answers = {1: {}, 2: {}}
    with monkeypatch.context() as patch:
        patch.setattr(channel.DriverChannel, "send", interrupted(channel.DriverChannel.send))
        with pytest.raises(KeyboardInterrupt):
            executor.send(message.pack("plan", number=1))
    with monkeypatch.context() as patch:
        patch.setattr(zmq.Socket, "recv_multipart", interrupted(zmq.Socket.recv_multipart))
        with pytest.raises(KeyboardInterrupt):
            executor.answers(1, "it")
    assert [answer["number"] for answer in executor.answers(1, "it")] == [1, 1]
    executor.send(message.pack("plan", number=2))
    assert executor.wait_for_output(2).token_ids == {"of": [2]}
    executor.close()
    signal.signal(signal.SIGINT, before)


def test_the_workers_of_a_fork_are_not_its_own(monkeypatch):
    executor = played(right, timeout_s=20)
    monkeypatch.setattr(executor_module.os, "getpid", lambda: -1)
    for use in (lambda: executor.send(b"plan"), lambda: executor.answers(1, "it")):
        with pytest.raises(RuntimeError, match="cannot use workers of process"):
            use()
    executor.close()
    monkeypatch.undo()
    assert executor.failure is None
    assert step(executor).token_ids == {"of": [1]}
    executor.close()
