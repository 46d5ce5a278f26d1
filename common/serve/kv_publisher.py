"""Publish batches of events to subscribers over ZeroMQ, in vLLM's format.

    PUB      topic, empty | sequence, 8 bytes, big-endian | msgpack of [time, events, 0]
    ROUTER   a reader sends   "" | first sequence that it needs
             and gets         "" | topic | sequence | batch      for each that is kept, and
                              "" | ""    | -1       | ""

A PUB socket never waits: a reader that connects late or reads too slowly misses batches, and
detects that from the sequence. It requests them once; if they are no longer kept, the next batch to
all readers restarts the stream with the complete state.

Sources: vLLM's `vllm/distributed/kv_events.py` (0.33; older ones replay without the
topic, and a batch is a map there).

See common/serve/KV_EVENTS.md"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, Protocol

from common.serve.kv_wire import Event, pack_batch

BUFFER_STEPS = 10_000  # batches that are kept
SEND_LIMIT = 100_000  # messages queued for one slow reader before it misses some
POLL_MS = 50  # between two batches
TOPIC = b""
END = (-1).to_bytes(8, "big", signed=True)


class EventSource(Protocol):
    """Called in the publisher's thread."""

    def take(self) -> Iterator[list[Event]]:
        """Yield the events since the last call, in batches."""
        ...

    def restart_stream(self) -> None:
        """Begin the next `take` with the complete state."""


class EventPublisher:
    """Sends the batches of `source` from a separate thread, until `close`. The constructor binds
    the sockets and raises `ValueError` for an unavailable address. `tcp://*:5557` is reachable from
    other machines, `tcp://127.0.0.1:*` only from this one, at a free port, which `endpoint` then
    contains."""

    def __init__(self, source: EventSource, endpoint: str, replay_endpoint: str | None) -> None:
        import zmq

        self._source = source
        self._kept = deque[tuple[int, bytes]](maxlen=BUFFER_STEPS)
        self._sequence = 0
        self._is_closing = False
        context = zmq.Context.instance()
        self._publish_socket = context.socket(zmq.PUB)
        self._publish_socket.set_hwm(SEND_LIMIT)
        self._replay_socket = context.socket(zmq.ROUTER)
        # The reader's acknowledgements come late, so the queue must fit a whole replay twice.
        self._replay_socket.set_hwm(2 * (BUFFER_STEPS + 1))
        try:
            self.endpoint = _bind("kv_events", self._publish_socket, endpoint)
            self.replay_endpoint = replay_endpoint and _bind(
                "kv_events_replay", self._replay_socket, replay_endpoint
            )
        except ValueError:
            self._close_sockets()
            raise
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Send the remaining events, then stop."""
        self._is_closing = True
        self._thread.join()

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._is_closing
            if self._replay_socket.poll(0 if is_last else POLL_MS):
                self._replay(self._replay_socket.recv_multipart())
            for events in self._source.take():
                sequence = self._sequence.to_bytes(8, "big")
                batch = pack_batch(events, time.time())
                self._kept.append((self._sequence, batch))
                self._sequence += 1
                self._publish_socket.send_multipart([TOPIC, sequence, batch])
        self._close_sockets()

    def _replay(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or frames[1] or len(frames[2]) != 8:
            return  # not a request
        reader = frames[0]
        first = int.from_bytes(frames[2], "big")
        for sequence, batch in self._kept:
            if sequence >= first:
                answer = [reader, b"", TOPIC, sequence.to_bytes(8, "big"), batch]
                self._replay_socket.send_multipart(answer)
        self._replay_socket.send_multipart([reader, b"", b"", END, b""])
        if self._kept and first < self._kept[0][0]:
            self._source.restart_stream()

    def _close_sockets(self) -> None:
        self._publish_socket.close(linger=1000)
        self._replay_socket.close(linger=1000)


def _bind(name: str, socket: Any, address: str) -> str:
    import zmq

    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        raise ValueError(f"{name} must be like 'tcp://*:5557', got {address!r}: {error}") from None
    return socket.last_endpoint.decode()
