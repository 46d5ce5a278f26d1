"""The pool on the real store: two processes, a master that dies. A store that does not answer
is that of `test_mooncake_client.py`. Cases of all stores are
in `test_kv_store.py` and `test_pool_connector.py`.

Without the store these tests are skipped, except in a CI, where it has to be there (`conftest.py`).
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from block_pool import BlockPool
from kv_bytes import MODEL, ByteEngine
from kv_slots import PREFIX_CACHES
from mooncake_master import MooncakeMaster
from mooncake_pool import MooncakePool
from pool_connector import PoolConnector
from request_chain import Link
from store_loads import Loads

WAIT_S = 30.0  # never waited for, unless the test fails
QUICK_S = 1.0
TOKENS = list(range(500, 518))  # 4 full blocks and 2 tokens, which no other test stores

Chain = list[tuple[Link, bytes]]


def make_chain(name: str, num_blocks: int, kv_nbytes: int = 5_000) -> Chain:
    rng = random.Random(name)
    links = [(rng.randbytes(32), (index, 7)) for index in range(num_blocks)]
    return [(link, rng.randbytes(kv_nbytes)) for link in links]


def links_of(chain: Chain) -> list[Link]:
    return [link for link, _ in chain]


def publish(pool: MooncakePool, chain: Chain) -> list[bool]:
    return [pool.put(link, data) for link, data in chain]


def elapsed_s(call: Callable[[], object]) -> float:
    start = time.monotonic()
    call()
    return time.monotonic() - start


def make_engine(pool: MooncakePool, node_id: str) -> ByteEngine:
    connector = PoolConnector(pool, node_id, load_timeout_s=WAIT_S)
    return ByteEngine(connector, PREFIX_CACHES["hash"](BlockPool(9), 4), MODEL)


PUBLISHER = """
import sys
from mooncake_master import MooncakeAddress
from mooncake_pool import MooncakePool
from test_mooncake_pool import TOKENS, make_engine
pool = MooncakePool(MooncakeAddress(*sys.argv[1:]), segment_nbytes=32 << 20, timeout_s=30.0)
engine = make_engine(pool, "publisher")
engine.serve(TOKENS)
print(engine.connector.stats.num_blocks_published, flush=True)
sys.stdin.readline()  # its memory is the store's
"""


def test_an_engine_loads_blocks_published_by_another_process(
    master: MooncakeMaster, near: MooncakePool
) -> None:
    """And when that process is killed, with its memory, a load fails instead of waiting."""
    publisher = subprocess.Popen(
        [sys.executable, "-c", PUBLISHER, master.address.master, master.address.metadata],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with publisher:
        try:
            assert publisher.stdout.readline().strip() == "4"
            pool = MooncakePool(master.address, segment_nbytes=0, timeout_s=WAIT_S)
            assert make_engine(pool, "reader").serve(TOKENS) == 16
        finally:
            publisher.kill()
    assert all(publish(near, make_chain("after a death", 20))), "a dead client's memory is used"
    engine = make_engine(pool, "reader")
    assert elapsed_s(lambda: engine.serve(TOKENS)) < WAIT_S
    assert engine.connector.stats.num_tokens_loaded == 0 and not engine.io.written
    pool._client.process.kill()  # without the second that leaving in good order takes
    pool.close()


def check_down(pool: MooncakePool, chain: Chain) -> None:
    """A store that has failed is an empty one, at once."""
    assert pool.has(links_of(chain)) == 0 and pool.down_reason
    assert publish(pool, make_chain("later", 1)) == [False]
    with pytest.raises(RuntimeError):
        next(pool.get(links_of(chain)))
    pool.drop(chain[0][0])
    assert pool.total_cached_blocks == 0
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
    published: list[bool] = []
    for block in make_chain("killed meanwhile", 500, kv_nbytes=1000):
        published += publish(pool, [block])
        if len(published) == 5:
            doomed.process.kill()
    loads.wait(WAIT_S)
    arrived, error = loads.take("r")
    loads.close()
    assert error is not None
    assert arrived == [data for _, data in chain * 20][: len(arrived)]
    assert published[0] is True and published[-1] is False
    assert elapsed_s(lambda: check_down(pool, chain)) < QUICK_S
    assert len([each for each in caplog.records if each.levelname == "WARNING"]) == 1
    doomed.stop()
