"""Messages over a socket: eight bytes that hold the length, then the message's bytes.

    worker   waits for one message after another             `receive`
    driver   takes what has come, never waits for one rank   `arrived`, `send_some`

`multiprocessing.connection` has the same framing, but its `send_bytes` blocks: a driver and a
worker that send large messages at the same time would wait for each other.

An interrupt (Ctrl-C) between a system call and the line that records its result would lose bytes,
and the rest of the stream could not be decoded. So the driver holds interrupts until the end of a
message (`interrupts_held`). A stream that is cut anyway is detected (`is_inconsistent`) and never
read again.

A second socket, the lifeline, carries no engine messages. A worker thread reads it. The thread ends
the process when the driver has exited, and reports the process's current position on request, even
while the model computes or waits for another rank.

See common/parallel/README.md#processes"""

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
    """The peer has closed the connection or exited."""


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Delay Ctrl-C until the block ends. Only the main thread is ever interrupted."""
    previous_handler = signal.getsignal(signal.SIGINT)
    if previous_handler is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: received.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous_handler)
        if received:
            signal.raise_signal(received[0])


class Channel:
    """One end of a message socket. Raises `ChannelClosed`."""

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
        """Send a message. Can be called from any thread."""
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
        """Set the message that `send_some` sends. The previous one must be sent completely."""
        self._unsent = memoryview(_LENGTH.pack(len(message)) + message)

    @property
    def is_sent(self) -> bool:
        return not self._unsent

    def send_some(self) -> None:
        """Send as many bytes as the socket accepts without blocking."""
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
        """Return the complete messages, maybe none. Call when the socket is readable."""
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
    """A worker's lifeline thread. `parent` is the process that started this one. If the parent
    changes, the driver has exited, even if a process it forked keeps its sockets open. None: the
    driver did not start this process."""

    def __init__(self, sock: socket.socket, parent: int | None) -> None:
        super().__init__(name="lifeline", daemon=True)
        self.channel = Channel(sock)
        self.parent = parent
        self.step: int | None = None  # the step in flight
        self.is_over = False  # the driver has asked this process to exit
        sock.settimeout(1.0)

    def run(self) -> None:
        while True:
            try:
                self.channel.receive()
                self.channel.send(json.dumps(self.location()).encode())
            except ChannelClosed as error:
                if isinstance(error.__cause__, TimeoutError) and self._has_parent():
                    continue
                if not self.is_over:
                    os._exit(1)  # no process will read the result
                return

    def _has_parent(self) -> bool:
        return self.parent is None or os.getppid() == self.parent

    def location(self) -> dict[str, Any]:
        """The step in flight, whether it waits for other ranks, and our current source line."""
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        place = "nowhere"
        is_waiting = False
        while frame is not None:
            name = frame.f_code.co_filename
            is_ours = "site-packages" not in name and not name.startswith("<")
            is_ours &= not name.startswith(os.path.dirname(os.__file__))
            is_waiting |= name.endswith("collectives.py")
            if is_ours and place == "nowhere":
                place = f"{os.path.basename(name)}:{frame.f_lineno} ({frame.f_code.co_name})"
            frame = frame.f_back
        return {"step": self.step, "is_waiting": is_waiting, "place": place}


def ask_locations(lifelines: dict[int, Channel], timeout_s: float) -> dict[int, dict[str, Any]]:
    """Return each process's answer by rank. A process that has exited or stopped has none."""
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
