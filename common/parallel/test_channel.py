"""Messages over a socket, lifelines, and a driver's view of workers that are played here."""

from __future__ import annotations

import json
import random
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from common.parallel import executor as executor_module
from common.parallel import message
from common.parallel.channel import (
    Channel,
    ChannelClosed,
    Lifeline,
    ask_locations,
)
from common.parallel.executor import Executor, Link, WorkerError


def pair() -> tuple[Channel, Channel]:
    one, other = socket.socketpair()
    return Channel(one), Channel(other)


def test_a_lifeline_names_its_process_and_a_silent_peer_is_refused():
    (one, its_one) = pair()
    (two, _its_two) = pair()
    (three, its_three) = pair()
    line = Lifeline(its_one.sock, parent=None)
    line.step = 7
    code = compile("said |= line.location()", "/engine/collectives.py", "exec")
    exec(code, {"line": line, "said": (facts := {})})
    assert facts["is_waiting"], "in a collective"
    line.start()
    its_three.close()
    answers = ask_locations({0: one, 1: two, 2: three}, 1.0)
    assert answers.keys() == {0} and answers[0]["step"] == 7 and not answers[0]["is_waiting"]
    assert answers[0]["place"].startswith("channel.py:")  # of ours, the innermost line: it waits
    line.is_over = True
    one.close()
    line.join(5)
    assert not line.is_alive()


# -- the driver


class Actor:
    """A worker that is played: `answer(step)` are its messages to a plan."""

    def __init__(self, rank: int, answer: Callable[[int], list[bytes]], facts: dict | None) -> None:
        channel, self.channel = pair()
        lifeline, self.lifeline = pair()
        self.link = Link(rank, channel, lifeline)
        self.answer = answer
        self.facts = facts
        for play in (self.work, self.live):
            threading.Thread(target=play, daemon=True).start()

    def work(self) -> None:
        kinds = {"plan": ("step",), "write": ("data",), "close": ()}
        with suppress(ChannelClosed, OSError):
            while True:
                kind, received = message.unpack(self.channel.receive(), kinds)
                answers = [b""] if kind == "close" else self.answer(received.get("step", -1))
                for data in answers:
                    if data == b"":
                        self.channel.close()
                    self.channel.send(data)

    def live(self) -> None:
        with suppress(ChannelClosed, OSError):
            while self.facts is not None:
                self.lifeline.receive()
                self.lifeline.send(json.dumps(self.facts).encode())


def right(step: int) -> list[bytes]:
    return [message.pack("output", step=step, output={"of": step}, digest=None)]


def silent(step: int) -> list[bytes]:
    return []


def broken(kind: str, is_collective: bool) -> Callable[[int], list[bytes]]:
    fault = {"kind_of_error": kind, "sentence": "so it is"}
    return lambda step: [message.pack("error", **fault, is_collective=is_collective)]


def location(is_waiting: bool, step: int | None = 3) -> dict:
    return {"step": step, "is_waiting": is_waiting, "place": f"a.py:{int(is_waiting)}"}


def played(*actors: tuple, timeout_s: float = 0.2) -> Executor:
    made = [Actor(rank, *actor) for rank, actor in enumerate(actors)]
    return Executor([actor.link for actor in made], 0, timeout_s)


def linked() -> tuple[Executor, list[Channel]]:
    """An executor without actors, and the two workers' ends of its channels."""
    pairs = [pair() for _ in range(2)]
    links = [Link(rank, ours, pair()[0]) for rank, (ours, _) in enumerate(pairs)]
    return Executor(links, 0, 5.0), [its for _, its in pairs]


def step(executor: Executor, number: int = 3) -> dict:
    executor.send(message.pack("plan", step=number))
    return executor.wait_for_output(number)


@pytest.fixture(autouse=True)
def impatient(monkeypatch) -> None:
    monkeypatch.setattr(executor_module, "GRACE_S", 0.2)


def test_two_that_talk_at_once_do_not_wait_for_each_other():
    """A driver that writes and a worker that answers at length, with full buffers between them; in
    a thread, where interrupts are not to be asked for. Short answers arrive several at a time."""
    datas = [random.Random(n).randbytes(n) for n in (10**7, 0, 1, 3)]
    blocks = [message.pack("block", data=data) for data in datas]
    executor = played((lambda _: blocks, None), (lambda _: blocks, None), timeout_s=20)
    with ThreadPoolExecutor(1) as pool:
        for _ in range(2):
            pool.submit(executor.send, message.pack("write", data=bytes(10**7))).result(60)
    for data in datas * 2:
        assert executor.collect("it") == [{"data": data}] * 2
    executor.close()


WAITS = location(True)
WORKS = location(False)
IS_IDLE = location(False, None)
FAILURES = {
    "gone, and another has noticed": (
        (broken("CollectiveError", True), WAITS),
        (lambda _: time.sleep(0.1) or [b""], WAITS),
        "^rank 1 has exited$",
    ),
    "raises, and another has noticed": (
        (broken("CollectiveError", True), IS_IDLE),
        (lambda step: time.sleep(0.1) or broken("KeyError", False)(step), WAITS),
        "^rank 1 raised KeyError: so it is$",
    ),
    "is stuck": (
        (silent, WAITS),
        (silent, None),
        "^rank 1 is stuck: no sign of life, and no end of step 3 in 0.2 s$",
    ),
    "is late": (
        (silent, WAITS),
        (silent, WORKS),
        "^rank 1 at a.py:0 is late: no end of step 3 in 0.2 s$",
    ),
    "all wait": (
        (silent, WAITS),
        (silent, WAITS),
        "^no rank has come to the end of step 3 in 0.2 s: rank 0 at a.py:1, rank 1 at a.py:1$",
    ),
    "a collective fails": (
        (broken("CollectiveError", True), IS_IDLE),
        (silent, WAITS),
        "^rank 0 raised CollectiveError: so it is$",
    ),
}


@pytest.mark.parametrize("name", FAILURES)
def test_the_rank_to_blame_is_named(name, monkeypatch):
    """Not the one that suffers from it. The rank that has the tokens may have given them."""
    one, other, sentence = FAILURES[name]
    # On a busy machine whatever is waited for comes late: short is only what has to pass.
    has_grace_to_pass = "stuck" in name or name == "a collective fails"
    monkeypatch.setattr(executor_module, "GRACE_S", 0.5 if has_grace_to_pass else 20.0)
    executor = played(one, other, timeout_s=0.2 if "0.2 s" in sentence else 20.0)
    with pytest.raises(WorkerError, match=sentence):
        for number in range(3, 100):
            step(executor, number)
            time.sleep(0.1)  # until what the other rank has said of the first has come
    with pytest.raises(WorkerError, match="the engine has failed: "):
        step(executor, 5)
    executor.close()


@pytest.mark.parametrize("second, raised", [("ValueError", ValueError), ("KeyError", WorkerError)])
def test_a_startup_error_is_the_users_if_all_ranks_report_it(second, raised):
    executor, ends = linked()
    for its, kind in zip(ends, ("ValueError", second)):  # sent before any read
        its.send(broken(kind, False)(0)[0])
    with pytest.raises(raised, match="so it is"):
        executor.start([b"start"] * 2)


def test_an_interrupted_message_is_taken_to_its_end_by_all():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    executor, (its_one, its_two) = linked()
    one = executor.links[0].channel

    class Interrupted:
        """A socket. Ctrl-C comes when the system call is over, and before the next line of ours."""

        def __init__(self, sock: socket.socket) -> None:
            self.sock = sock

        def send(self, data, flags: int) -> int:
            num_sent = self.sock.send(data, flags)
            signal.raise_signal(signal.SIGINT)
            return num_sent

        def recv(self, size: int) -> bytes:
            data = self.sock.recv(size)
            signal.raise_signal(signal.SIGINT)
            return data

    sock = one.sock  # pyright: ignore
    one.sock = Interrupted(one.sock)
    with pytest.raises(KeyboardInterrupt):
        executor.send(b"plan")
    assert its_one.receive() == its_two.receive() == b"plan"
    for its in (its_one, its_two):
        its.send(message.pack("block", data=b"x"))
    with pytest.raises(KeyboardInterrupt):
        executor.collect("a block")
    one.sock = sock
    assert executor.collect("a block") == [{"data": b"x"}] * 2
    executor.send(b"next")
    assert its_one.receive() == its_two.receive() == b"next"
    signal.signal(signal.SIGINT, before)


def test_the_workers_of_a_fork_are_not_its_own(monkeypatch):
    executor = played((right, WAITS))
    channel = executor.links[0].channel
    channel.is_inconsistent = True  # its parent's business, not a reason to end them
    monkeypatch.setattr(executor_module.os, "getpid", lambda: -1)
    for use in (lambda: executor.send(b"plan"), lambda: executor.collect("a block")):
        with pytest.raises(RuntimeError, match="cannot use workers of process"):
            use()
    executor.close()
    monkeypatch.undo()
    channel.is_inconsistent = False
    assert executor.failure is None
    assert step(executor)["step"] == 3
    executor.close()
