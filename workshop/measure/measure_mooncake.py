"""The time to put one block into the real store, and to get it in another process, on loopback.

    python -m workshop.measure_mooncake [--kv-nbytes 1000000] [--repeats 50]

`put` and `get` are the store's own calls and one hop to the client's process; `publish` and
`fetch` are those of a connector, checksum included. All memory is lent by the publishing process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kv_store import make_record, open_record
from mooncake_master import MooncakeMaster
from mooncake_pool import MooncakePool

NUM_TOKENS = 16


def _times_ms(call: Callable[[int], object], repeats: int) -> list[float]:
    times_ms = []
    for index in range(-2, repeats):  # two to warm up
        start = time.perf_counter()
        assert call(index)
        times_ms.append((time.perf_counter() - start) * 1e3)
    return times_ms[2:]


def measure(kv_nbytes: int, repeats: int) -> dict[str, list[float]]:
    """Return milliseconds of each repeat, by operation."""
    kv_data = [os.urandom(kv_nbytes) for _ in range(4)]
    tokens = tuple(range(NUM_TOKENS))
    links = {i: (i.to_bytes(32, "big", signed=True), tokens) for i in range(-2, repeats)}
    segment_nbytes = 3 * (repeats + 2) * (kv_nbytes + 4096) + (64 << 20)
    with MooncakeMaster() as master:
        near = MooncakePool(master.address, segment_nbytes)
        far = MooncakePool(master.address, segment_nbytes=0)
        put, get = near._client.put, far._client.get
        operations = {
            "put": lambda i: put(f"raw {i}", kv_data[i % 4]),
            "get": lambda i: get(f"raw {i}") == kv_data[i % 4],
            "publish": lambda i: near.put(links[i], make_record(links[i], kv_data[i % 4])),
            "fetch": lambda i: open_record(next(far.get([links[i]])), links[i]) == kv_data[i % 4],
            "query": lambda i: far.has([links[i]]),
        }
        times = {name: _times_ms(call, repeats) for name, call in operations.items()}
        near.close()
        far.close()
    return times


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kv-nbytes", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    times = measure(options.kv_nbytes, options.repeats)
    for name, times_ms in times.items():
        print(f"{name:8} median {statistics.median(times_ms):7.2f} ms  min {min(times_ms):7.2f} ms")
    if options.json is not None:
        record = {"kv_nbytes": options.kv_nbytes, "times_ms": times}
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
