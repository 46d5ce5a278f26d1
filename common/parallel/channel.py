"""Messages over a socket: eight bytes of length, then so many bytes.

    worker   waits for one message after another             `receive`
    driver   takes what has come, waits for nobody alone     `arrived`, `send_some`

An interrupt (Ctrl-C) between a system call and the line that notes what it did would lose bytes,
and the rest of the stream would make no sense. So the driver's interrupts wait for the end of a
message (`interrupts_held`); what is torn all the same is seen (`is_inconsistent`) and never read
on.

A second socket, the lifeline, carries no messages of the engine. A thread of the worker sits at its
end: it ends the process when the driver is gone, and answers where the process is when it is asked,
while the model computes or waits for another rank."""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

_LENGTH = struct.Struct("<Q")
_AT_ONCE = 1 << 20
START_TIMEOUT_S = 600.0  # for a worker's imports, and to read its weights


class ChannelClosed(ConnectionError):
    """The other side is gone."""


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Ctrl-C comes when this ends. Only the main thread is ever interrupted."""
    own = signal.getsignal(signal.SIGINT)
    if own is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, own)
        if came:
            signal.raise_signal(came[0])


class Channel:
    """One end. Raises `ChannelClosed`."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.is_inconsistent = False  # somewhere in the middle of a message
        self._buffer = bytearray()
        self._unsent = memoryview(b"")
        self._sending = threading.Lock()

    def fileno(self) -> int:
        return self.sock.fileno()

    def close(self) -> None:
        self.sock.close()

    # -- a worker's way

    def send(self, message: bytes) -> None:
        """From any thread."""
        try:
            with self._sending:
                self.sock.sendall(_LENGTH.pack(len(message)) + message)
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    def receive(self) -> bytes:
        while (message := self._next()) is None:
            self._read()
        return message

    # -- the driver's way

    def put(self, message: bytes) -> None:
        """To be sent by `send_some`. There must be nothing left of the one before."""
        self._unsent = memoryview(_LENGTH.pack(len(message)) + message)

    @property
    def is_sent(self) -> bool:
        return not self._unsent

    def send_some(self) -> None:
        """What the socket takes, at once."""
        self.is_inconsistent = True
        try:
            num_sent = self.sock.send(self._unsent, socket.MSG_DONTWAIT)
        except BlockingIOError:
            num_sent = 0
        except OSError as error:
            raise ChannelClosed(str(error)) from error
        self._unsent = self._unsent[num_sent:]
        self.is_inconsistent = False

    def arrived(self) -> list[bytes]:
        """Messages, after the socket was said to be readable: perhaps none is complete."""
        self._read()
        messages = []
        while (message := self._next()) is not None:
            messages.append(message)
        return messages

    def _read(self) -> None:
        self.is_inconsistent = True
        try:
            data = self.sock.recv(_AT_ONCE)
        except OSError as error:
            raise ChannelClosed(str(error)) from error
        self._buffer += data
        self.is_inconsistent = False
        if not data:
            raise ChannelClosed("cannot receive: the peer has closed the connection")

    def _next(self) -> bytes | None:
        if len(self._buffer) < _LENGTH.size:
            return None
        end = _LENGTH.size + _LENGTH.unpack_from(self._buffer)[0]
        if len(self._buffer) < end:
            return None
        message = bytes(memoryview(self._buffer)[_LENGTH.size : end])
        del self._buffer[:end]
        return message


# -- lifelines


class Lifeline(threading.Thread):
    """A worker's. `parent` is the process that started this one: when it is another, the driver is
    gone, even if somebody it forked keeps its sockets open. None: somebody else started it."""

    def __init__(self, sock: socket.socket, parent: int | None) -> None:
        super().__init__(name="lifeline", daemon=True)
        self.channel, self.parent = Channel(sock), parent
        self.step: int | None = None  # under way
        self.is_over = False  # it may go: the driver said so
        sock.settimeout(1.0)

    def run(self) -> None:
        while True:
            try:
                self.channel.receive()
                self.channel.send(json.dumps(self.where()).encode())
            except ChannelClosed as error:
                if isinstance(error.__cause__, TimeoutError) and self._has_parent():
                    continue
                if not self.is_over:
                    os._exit(1)  # whatever it computes, or waits for, is for nobody
                return

    def _has_parent(self) -> bool:
        return self.parent is None or os.getppid() == self.parent

    def where(self) -> dict[str, Any]:
        """The step under way, whether it waits for other ranks, and the line of ours it is in."""
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        place, is_waiting = "nowhere", False
        while frame is not None:
            name = frame.f_code.co_filename
            is_ours = "site-packages" not in name and not name.startswith("<")
            is_ours &= not name.startswith(os.path.dirname(os.__file__))
            is_waiting |= name.endswith("collectives.py")
            if is_ours and place == "nowhere":
                place = f"{os.path.basename(name)}:{frame.f_lineno} ({frame.f_code.co_name})"
            frame = frame.f_back
        return {"step": self.step, "is_waiting": is_waiting, "place": place}


def ask_where(lifelines: dict[int, Channel], timeout_s: float) -> dict[int, dict[str, Any]]:
    """What each process answers at the other end, by rank. One that is gone or stopped does not."""
    answers: dict[int, dict[str, Any]] = {}
    deadline = time.monotonic() + timeout_s
    with selectors.DefaultSelector() as selector:
        for rank, channel in lifelines.items():
            with suppress(ChannelClosed):
                channel.put(b"where?")
                channel.send_some()
                selector.register(channel, selectors.EVENT_READ, rank)
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                channel: Any = key.fileobj
                try:
                    messages = channel.arrived()
                except ChannelClosed:
                    selector.unregister(channel)
                    continue
                if messages:
                    answers[key.data] = json.loads(messages[-1])
                    selector.unregister(channel)
    return answers
