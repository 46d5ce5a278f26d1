"""Messages between the driver and its workers, over zmq.

    driver    a socket to each worker, and one from all of them     `DriverChannel`
    worker    a socket from the driver, and one to it               `WorkerChannel`

zmq's own threads send and receive, so no process waits for a peer that reads slowly: a driver and a
worker that send large messages at the same time do not wait for each other. The sockets are files
of a folder that only this user may enter; it is removed when all workers have answered.

zmq reconnects, and hides a peer that is gone. So a worker's death is seen by its process handle
(`executor.py`), and the driver's by a pipe that closes (`worker.py`), never here.

See common/parallel/README.md#processes"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import zmq


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


def _unlimited_context() -> zmq.Context:
    """A context whose sockets queue any number of messages."""
    context = zmq.Context()
    context.setsockopt(zmq.SNDHWM, 0)
    context.setsockopt(zmq.RCVHWM, 0)
    return context


class DriverChannel:
    """Can be used from any thread: zmq's sockets are used by one at a time."""

    def __init__(self, folder: str, num_ranks: int) -> None:
        self._context = _unlimited_context()
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.bind(f"ipc://{folder}/driver")
        self._outboxes: list[zmq.Socket] = []
        for rank in range(num_ranks):
            outbox = self._context.socket(zmq.PUSH)
            outbox.connect(f"ipc://{folder}/{rank}")  # queues messages until the worker is there
            self._outboxes.append(outbox)
        self._using = threading.RLock()

    def send(self, rank: int, message: bytes) -> None:
        """Queue a message. Returns at once."""
        with self._using:
            self._outboxes[rank].send(message)

    def wait(self, seconds: float) -> None:
        """Wait until a message has arrived, up to `seconds`."""
        with self._using:
            self._inbox.poll(int(1000 * max(0.0, seconds)))

    def arrived(self) -> list[tuple[int, bytes]]:
        """Return rank and message of everything that has arrived."""
        messages: list[tuple[int, bytes]] = []
        with self._using:
            while self._inbox.poll(0):
                rank, message = self._inbox.recv_multipart()
                messages.append((int(rank), message))
        return messages

    def close(self) -> None:
        with self._using:
            self._context.destroy(linger=0)


class WorkerChannel:
    def __init__(self, folder: str, rank: int) -> None:
        context = _unlimited_context()
        self._rank = str(rank).encode()
        self._inbox = context.socket(zmq.PULL)
        self._inbox.bind(f"ipc://{folder}/{rank}")
        self._outbox = context.socket(zmq.PUSH)
        self._outbox.connect(f"ipc://{folder}/driver")
        self._sending = threading.Lock()

    def receive(self) -> bytes:
        return self._inbox.recv()

    def send(self, message: bytes) -> None:
        """Send a message. Can be called from any thread."""
        with self._sending:
            self._outbox.send_multipart([self._rank, message])
