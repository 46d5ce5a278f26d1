"""Print the KV events of an engine: `python -m common.serve.kv_listen tcp://127.0.0.1:5557`.

See common/serve/KV_EVENTS.md#try-it"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import msgpack

from common.serve.kv_wire import Event


def listen(endpoint: str) -> Iterator[tuple[int, Event]]:
    """Yield the sequence number and the event, forever."""
    import zmq

    socket = zmq.Context.instance().socket(zmq.SUB)
    socket.connect(endpoint)
    socket.subscribe("")  # every topic
    while True:
        _topic, sequence, batch = socket.recv_multipart()
        _time, events, _rank = msgpack.unpackb(batch)
        for event in events:
            yield int.from_bytes(sequence, "big"), event


if __name__ == "__main__":
    for number, event in listen(sys.argv[1]):
        print(number, event, flush=True)
