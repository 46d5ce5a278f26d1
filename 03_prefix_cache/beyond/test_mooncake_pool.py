"""The pool on the real store: two processes, a master that dies or stops. Cases of all stores are
in `test_kv_store.py` and `test_pool_connector.py`.

Without the store these tests are skipped, except in a CI, where it has to be there (`conftest.py`).
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from hashlib import blake2b

import pytest

from bounded_loops import as_long_as
from kv_bytes import ByteMemory
from mooncake_master import MooncakeMaster
from mooncake_pool import MooncakePool
from pool_connector import PoolConnector
from request import Request, SamplingParams
from request_chain import Link
from store_loads import Loads

SIZE = 16
KV_NBYTES = 5_000
WAIT_S = 30.0  # never waited for, unless the test fails
QUICK_S = 1.0

Chain = list[tuple[Link, bytes]]


def make_chain(name: str, num_blocks: int, kv_nbytes: int = KV_NBYTES) -> Chain:
    """The same in every process; another name, other blocks."""
    rng = random.Random(name)
    return [
        (
            (
                blake2b(f"{name} {index}".encode(), digest_size=32).digest(),
                tuple(rng.randrange(50_000) for _ in range(SIZE)),
            ),
            rng.randbytes(kv_nbytes),
        )
        for index in range(num_blocks)
    ]


def links_of(chain: Chain) -> list[Link]:
    return [link for link, _ in chain]


def publish(pool: MooncakePool, chain: Chain) -> list[bool]:
    return [pool.put(link, data) for link, data in chain]


def load(pool: MooncakePool, chain: Chain) -> tuple[Chain, str | None]:
    """The blocks that arrive from the front, and the reason why no more do."""
    loads = Loads[bytes](WAIT_S)
    loads.start("r", pool.get(links_of(chain)))
    for _ in as_long_as(lambda: not loads.has_ended("r"), seconds=WAIT_S):
        loads.wait(WAIT_S)
    arrived, error = loads.take("r")
    loads.close()
    return list(zip(links_of(chain), arrived, strict=False)), error


def elapsed_s(call: Callable[[], object]) -> float:
    start = time.monotonic()
    call()
    return time.monotonic() - start


PUBLISHER = """
import sys
from mooncake_master import MooncakeAddress
from mooncake_pool import MooncakePool
from test_mooncake_pool import MemoryIO, finish_request, make_connector
pool = MooncakePool(MooncakeAddress(*sys.argv[1:]), segment_nbytes=32 << 20, timeout_s=30.0)
print(finish_request(make_connector(pool, "publisher", MemoryIO())), flush=True)
sys.stdin.readline()  # its memory is the store's
"""
PROMPT = [index * 7 % 1000 for index in range(6 * SIZE + 5)]


class MemoryIO(ByteMemory):
    """KV memory of 6 blocks, which hold random bytes: the same ones in every process."""

    block_nbytes = KV_NBYTES

    def __init__(self, is_filled: bool = True) -> None:
        super().__init__()
        rng = random.Random("memory")
        if is_filled:
            self.data = {block_id: rng.randbytes(KV_NBYTES) for block_id in range(6)}


def make_connector(pool: MooncakePool, node_id: str, io: MemoryIO) -> PoolConnector:
    connector = PoolConnector(pool, node_id, load_timeout_s=WAIT_S)
    connector.bind(io, SIZE, [("model", "tiny")])
    return connector


def make_request() -> Request:
    return Request("r", list(PROMPT), SamplingParams(temperature=0, max_tokens=8))


def finish_request(connector: PoolConnector) -> int:
    connector.request_finished(make_request(), range(6))
    return connector.stats.num_blocks_published


def load_request(connector: PoolConnector, request: Request) -> int:
    """Do as the manager: ask, take blocks, wait. Return the number of loaded tokens."""
    num_tokens, _ = connector.get_num_new_matched_tokens(request, 0)
    if num_tokens == 0:
        return 0
    connector.update_state_after_alloc(request, range(num_tokens // SIZE), num_tokens)
    num_loaded = connector.get_finished_load(request.request_id)
    for _ in as_long_as(lambda: num_loaded is None, seconds=60):
        connector.wait_for_load(WAIT_S)
        num_loaded = connector.get_finished_load(request.request_id)
    return num_loaded


@pytest.fixture
def publisher(master: MooncakeMaster) -> Iterator[subprocess.Popen[str]]:
    """An engine's process that has published the prompt, and waits."""
    address = master.address
    process = subprocess.Popen(
        [sys.executable, "-c", PUBLISHER, address.master, address.metadata],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline().strip() == "6"
    yield process
    process.kill()
    process.communicate()


def test_an_engine_loads_blocks_published_by_another_process(
    master: MooncakeMaster, near: MooncakePool, publisher: subprocess.Popen[str]
) -> None:
    """And when that process is killed, with its memory, a load fails instead of waiting."""
    pool = MooncakePool(master.address, segment_nbytes=0, timeout_s=WAIT_S)
    io = MemoryIO(is_filled=False)
    connector = make_connector(pool, "reader", io)
    assert load_request(connector, make_request()) == 6 * SIZE
    assert io.data == MemoryIO().data
    publisher.kill()
    publisher.wait()
    assert all(publish(near, make_chain("after a death", 20))), "a dead client's memory is used"
    io = MemoryIO(is_filled=False)
    connector = make_connector(pool, "reader", io)
    assert elapsed_s(lambda: load_request(connector, make_request())) < WAIT_S
    assert connector.stats.num_tokens_loaded == 0 and not io.data
    pool._client.process.kill()  # without the second that leaving in good order takes
    pool.close()


def test_a_killed_store_is_an_empty_one(
    doomed: MooncakeMaster, caplog: pytest.LogCaptureFixture
) -> None:
    """Killed in the midst of publishing and loading: nothing hangs, nothing raises, and what was
    loaded before is right."""
    pool = MooncakePool(doomed.address, segment_nbytes=64 << 20)
    chain = make_chain("killed", 50, kv_nbytes=200_000)
    publish(pool, chain)
    loads = Loads[bytes](WAIT_S)
    loads.start("r", pool.get(links_of(chain) * 20))
    more = make_chain("killed meanwhile", 500, kv_nbytes=1000)
    published: list[bool] = []
    writer = threading.Thread(target=lambda: [published.extend(publish(pool, [b])) for b in more])
    writer.start()
    deadline = time.monotonic() + WAIT_S
    while len(published) < 5 and time.monotonic() < deadline:
        time.sleep(0.001)
    doomed.process.kill()
    loads.wait(WAIT_S)
    arrived, error = loads.take("r")
    assert error is not None
    assert arrived == [data for _, data in chain * 20][: len(arrived)]
    writer.join(WAIT_S)
    assert not writer.is_alive() and len(published) == 500
    assert published[0] is True and published[-1] is False

    def everything() -> None:
        assert pool.has(links_of(chain)) == 0
        assert publish(pool, make_chain("later", 1)) == [False]
        assert load(pool, chain)[0] == []
        pool.drop(chain[0][0])
        assert pool.total_cached_blocks == 0
        pool.close()

    assert elapsed_s(everything) < QUICK_S
    assert pool.down_reason
    assert len([each for each in caplog.records if each.levelname == "WARNING"]) == 1
    doomed.stop()


def test_a_store_that_stops_answering_costs_one_time_limit(
    master: MooncakeMaster, near: MooncakePool
) -> None:
    """Not killed, which the kernel would tell, but silent. A signal only asks: threads that are at
    work answer for a while, so the test waits until the last one has stopped."""
    chain = make_chain("silent", 2)
    assert publish(near, chain) == [True, True]
    pool = MooncakePool(master.address, segment_nbytes=0, timeout_s=WAIT_S)
    assert pool.has(links_of(chain)) == 2
    pool._client.timeout_s = 0.2
    master.process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, master.process.pid, os.WSTOPPED)
    try:
        assert pool.total_cached_blocks == 0
        assert 0.15 < elapsed_s(lambda: pool.has(links_of(chain))) < WAIT_S
        assert elapsed_s(lambda: load(pool, chain)) < QUICK_S
        assert elapsed_s(lambda: pool.total_cached_blocks) < QUICK_S
        assert elapsed_s(pool.close) < QUICK_S
    finally:
        master.process.send_signal(signal.SIGCONT)
    assert pool.has(links_of(chain)) == 0, "a store that was given up is asked again"
    assert near.has(links_of(chain)) == 2
