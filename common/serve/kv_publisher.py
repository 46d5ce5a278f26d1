"""Publish batches of events to subscribers over ZeroMQ, in vLLM's format.

    PUB      topic | sequence, 8 bytes, big-endian | msgpack of [time, events, 0]
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

import logging
import threading
import time
from collections import deque
from typing import Any

from common.serve.kv_wire import Event, pack_batch

logger = logging.getLogger(__name__)
BUFFER_STEPS = 10_000  # batches that are kept
SEND_LIMIT = 100_000  # messages queued for one slow reader before it misses some
POLL_S = 0.1  # between checks for events without `wake`, and for replay requests
END = (-1).to_bytes(8, "big", signed=True)


class EventPublisher:
    """Sends the batches of `source` from a separate thread. The constructor binds the sockets
    and raises `ValueError` for an unavailable address; sending begins with `start`. `tcp://*:5557`
    is reachable from other machines, `tcp://127.0.0.1:*` only from this one, at a free port, which
    `endpoint` then contains."""

    def __init__(
        self,
        source: Any,  # `CacheChanges`
        endpoint: str,
        replay_endpoint: str | None = None,
        topic: str = "",
        buffer_steps: int = BUFFER_STEPS,
    ) -> None:
        import zmq

        self._source = source
        self._topic = topic.encode()
        self._kept = deque[tuple[int, bytes]](maxlen=buffer_steps)
        self._sequence = 0
        self._wake = threading.Event()
        self._is_closing = False
        self._context = zmq.Context.instance()
        self._publish_socket = self._context.socket(zmq.PUB)
        self._publish_socket.set_hwm(SEND_LIMIT)
        self._replay_socket = self._context.socket(zmq.ROUTER)
        # The reader's acknowledgements come late, so the queue must fit a whole replay twice.
        self._replay_socket.set_hwm(2 * (buffer_steps + 1))
        try:
            self.endpoint = _bind("kv_events", self._publish_socket, endpoint)
            self.replay_endpoint = None
            if replay_endpoint is not None:
                name = "kv_events_replay"
                self.replay_endpoint = _bind(name, self._replay_socket, replay_endpoint)
        except ValueError:
            self._close_sockets()
            raise
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """Tell the thread that there are events to send."""
        self._wake.set()

    def close(self) -> None:
        """Send the remaining events, then stop. Can be called again, and from any thread."""
        self._is_closing = True
        self._wake.set()
        if not self._thread.is_alive():
            self._close_sockets()
        elif self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        is_last = False
        while not is_last:
            self._wake.wait(POLL_S)
            self._wake.clear()
            is_last = self._is_closing
            try:
                for events in self._source.take():
                    self._send(events)
                while self._replay_socket.poll(0):
                    self._replay(self._replay_socket.recv_multipart())
            except Exception:
                logger.exception("cannot send KV events; publishing starts again from scratch")
                self._source.restart_stream()
        self._close_sockets()

    def _send(self, events: list[Event]) -> None:
        sequence = self._sequence
        batch = pack_batch(events, time.time())
        self._sequence += 1
        self._kept.append((sequence, batch))
        self._publish_socket.send_multipart([self._topic, sequence.to_bytes(8, "big"), batch])

    def _replay(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or frames[1] or len(frames[2]) != 8:
            logger.warning("ignoring a replay request that is not %r", "'' | 8 bytes")
            return
        reader = frames[0]
        first = int.from_bytes(frames[2], "big")
        for sequence, batch in self._kept:
            if sequence >= first:
                answer = [reader, b"", self._topic, sequence.to_bytes(8, "big"), batch]
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
