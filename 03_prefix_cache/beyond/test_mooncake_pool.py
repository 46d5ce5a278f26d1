"""The pool on the real store: two processes, a master that dies or stops, values that are damaged.

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
from kv_pool import KVBlock, TransferResult
from mooncake_master import MooncakeMaster
from mooncake_pool import MooncakePool, decode_block, encode_block, store_key
from pool_connector import PoolConnector
from request import Request, SamplingParams

SIZE = 16
KV_NBYTES = 5_000
WAIT_S = 30.0  # never waited for, unless the test fails
QUICK_S = 1.0

Chain = list[tuple[bytes, tuple[int, ...], bytes]]  # hash, tokens, KV bytes


def make_chain(name: str, num_blocks: int, kv_nbytes: int = KV_NBYTES) -> Chain:
    """The same in every process; another name, other blocks."""
    rng = random.Random(name)
    return [
        (
            blake2b(f"{name} {index}".encode(), digest_size=32).digest(),
            tuple(rng.randrange(50_000) for _ in range(SIZE)),
            rng.randbytes(kv_nbytes),
        )
        for index in range(num_blocks)
    ]


def hashes(chain: Chain) -> list[bytes]:
    return [block_hash for block_hash, _, _ in chain]


def publish(pool: MooncakePool, chain: Chain, node_id: str = "near") -> list[bool]:
    return [pool.publish(each, node_id, tokens, data) for each, tokens, data in chain]


def transfer(pool: MooncakePool, chain: Chain, request_id: str = "r") -> TransferResult:
    ended = threading.Event()
    pool.async_transfer(request_id, hashes(chain), "far", lambda *_: ended.set())
    assert ended.wait(WAIT_S)
    return pool.transfer_result(request_id)


def content(result: TransferResult) -> Chain:
    return [(each.block_hash, each.token_ids, each.kv_data) for each in result.blocks]


def elapsed_s(call: Callable[[], object]) -> float:
    start = time.monotonic()
    call()
    return time.monotonic() - start


# -- values, without a store


def example_block() -> KVBlock:
    return KVBlock.create(b"\x01" * 32, "near", [0, 7, 2**40], b"key and value bytes")


def test_a_block_is_the_same_after_its_journey() -> None:
    block = example_block()
    value = b"".join(encode_block(block))
    assert decode_block(bytearray(value), block.block_hash, "near") == block
    assert decode_block(value, block.block_hash, "far").node_id == "far"


def test_no_damaged_value_is_taken_for_a_block() -> None:
    """Every byte changed, every length cut, a longer one, and the right value under a wrong key."""
    block = example_block()
    value = b"".join(encode_block(block))
    damaged = [value[:n] for n in range(len(value))] + [value + b"\0", b""]
    for index in range(len(value)):
        flipped = bytearray(value)
        flipped[index] ^= 1 << index % 8
        damaged.append(bytes(flipped))
    for wrong in damaged:
        with pytest.raises(ValueError, match="value"):
            decode_block(wrong, block.block_hash, "far")
    with pytest.raises(ValueError, match="checksum"):
        decode_block(value, b"\x02" * 32, "far")


# -- the store


def test_what_one_publishes_another_finds_and_reads_bit_for_bit(
    near: MooncakePool, far: MooncakePool
) -> None:
    chain = make_chain("one", 5, kv_nbytes=300_000)
    num_before = far.total_cached_blocks
    assert far.query(hashes(chain)) == (0, [])
    assert publish(near, chain) == [True] * 5
    num_tokens, node_ids = far.query(hashes(chain))
    assert num_tokens == 5 * SIZE and len(node_ids) == 5
    assert len(set(node_ids)) == 1  # only one lends memory
    assert far.total_cached_blocks == num_before + 5
    result = transfer(far, chain)
    assert content(result) == chain and result.error is None
    assert all(block.node_id == "far" and block.is_intact for block in result.blocks)


def test_a_match_ends_at_the_first_block_that_is_missing(
    near: MooncakePool, far: MooncakePool
) -> None:
    chain = make_chain("gap", 4)
    publish(near, [chain[0], chain[1], chain[3]])
    assert far.query(hashes(chain))[0] == 2 * SIZE
    assert far.query(hashes(chain[2:])) == (0, [])
    result = transfer(far, chain)
    assert content(result) == chain[:2] and "not in the store" in result.error


def test_a_cold_process_learns_the_block_size_from_the_store(
    near: MooncakePool, cold: MooncakePool
) -> None:
    chain = make_chain("cold", 3)
    publish(near, chain)
    with pytest.raises(ValueError, match="token_ids"):
        cold.publish(b"h" * 32, "far", [], b"x")
    other = make_chain("other", 2)
    assert cold.query(hashes(other)) == (0, [])
    near._client.put(store_key(other[0][0]), b"no block")
    assert cold.query(hashes(other)) == (0, [])
    assert cold.query(hashes(chain))[0] == 3 * SIZE
    with pytest.raises(ValueError, match="token_ids"):
        cold.publish(b"h" * 32, "far", [1] * (SIZE - 1), b"x")
    cold.close()
    assert cold._client.process.poll() is not None


def test_a_block_is_published_once(near: MooncakePool, far: MooncakePool) -> None:
    chain = make_chain("twice", 1)
    assert publish(near, chain) == [True]
    assert publish(far, [(chain[0][0], chain[0][1], b"other bytes")], "far") == [False]
    assert content(transfer(far, chain)) == chain
    with pytest.raises(ValueError, match="token_ids"):
        near.publish(b"h" * 32, "near", [], b"x")


@pytest.mark.parametrize("damage", ["cut", "flipped", "foreign", "moved"])
def test_a_damaged_value_is_a_miss_and_makes_room_for_a_good_one(
    near: MooncakePool, far: MooncakePool, damage: str
) -> None:
    chain = make_chain(f"damage {damage}", 3)
    publish(near, chain[:1] + chain[2:])
    block_hash, tokens, kv_data = chain[1]
    value = bytearray(b"".join(encode_block(KVBlock.create(block_hash, "near", tokens, kv_data))))
    if damage == "cut":
        value = value[:-1]
    elif damage == "flipped":
        value[-7] ^= 4
    elif damage == "foreign":
        value = bytearray(b"something else")
    else:
        other_hash, *other = make_chain("another", 1)[0]
        value = b"".join(encode_block(KVBlock.create(other_hash, "near", *other)))
    near._client.put(store_key(block_hash), value)
    result = transfer(far, chain)
    assert content(result) == chain[:1] and "value" in result.error
    assert far.query(hashes(chain))[0] == SIZE
    assert publish(near, chain) == [False, True, False]
    assert content(transfer(far, chain)) == chain


def test_a_value_without_room_is_refused_and_the_store_goes_on(near: MooncakePool) -> None:
    block_hash, tokens, _ = make_chain("huge", 1)[0]
    assert not near.publish(block_hash, "near", tokens, bytes(80 << 20))
    assert near.down_reason is None and near.query([block_hash]) == (0, [])
    assert publish(near, make_chain("after huge", 1)) == [True]


def test_many_threads_of_two_processes_at_once(near: MooncakePool, far: MooncakePool) -> None:
    chains = [make_chain(f"thread {index}", 6) for index in range(8)]
    results: dict[int, TransferResult] = {}
    failures: list[BaseException] = []

    def work(index: int) -> None:
        try:
            own, pool = chains[index], (near, far)[index % 2]
            publish(pool, own, "far")
            publish(pool, chains[index - 1], "far")  # which its owner is publishing
            assert pool.query(hashes(own))[0] == 6 * SIZE
            results[index] = transfer((far, near)[index % 2], own, f"thread {index}")
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=[index]) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert not failures
    assert [content(results[index]) for index in range(8)] == chains


def test_a_cancelled_transfer_calls_nobody(near: MooncakePool, far: MooncakePool) -> None:
    chain = make_chain("cancelled", 20)
    publish(near, chain)
    calls: list[str] = []
    for index in range(5):
        far.async_transfer(f"c{index}", hashes(chain), "far", lambda name, _: calls.append(name))
    for index in range(1, 5):
        far.cancel_transfer(f"c{index}")
    assert content(transfer(far, chain, "last")) == chain
    assert set(calls) <= {"c0"}
    with pytest.raises(ValueError, match="c1"):
        far.is_transfer_complete("c1")
    far.cancel_transfer("c0")


# -- two engines' processes

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


def load(connector: PoolConnector, request: Request) -> int:
    """What the manager does: ask, take blocks, wait. Returns the tokens loaded."""
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


def test_an_engine_loads_what_another_process_has_published(
    master: MooncakeMaster, near: MooncakePool, publisher: subprocess.Popen[str]
) -> None:
    """And when that process is killed, with its memory, a load fails instead of waiting."""
    pool = MooncakePool(master.address, segment_nbytes=0, timeout_s=WAIT_S)
    io = MemoryIO(is_filled=False)
    connector = make_connector(pool, "reader", io)
    assert load(connector, make_request()) == 6 * SIZE
    assert io.data == MemoryIO().data
    publisher.kill()
    publisher.wait()
    assert all(publish(near, make_chain("after a death", 20))), "a dead client's memory is used"
    io = MemoryIO(is_filled=False)
    connector = make_connector(pool, "reader", io)
    assert elapsed_s(lambda: load(connector, make_request())) < WAIT_S
    assert connector.stats.num_tokens_loaded == 0 and not io.data
    pool._client.process.kill()  # without the second that leaving in good order takes
    pool.close()


# -- a master that fails


def test_a_killed_store_is_an_empty_one(
    doomed: MooncakeMaster, caplog: pytest.LogCaptureFixture
) -> None:
    """Killed in the midst of publishing and loading: nothing hangs, nothing raises, and what was
    loaded before is right."""
    pool = MooncakePool(doomed.address, segment_nbytes=64 << 20)
    chain = make_chain("killed", 50, kv_nbytes=200_000)
    publish(pool, chain)
    ended = threading.Event()
    pool.async_transfer("r", hashes(chain) * 20, "far", lambda *_: ended.set())
    more = make_chain("killed meanwhile", 500, kv_nbytes=1000)
    published: list[bool] = []
    writer = threading.Thread(target=lambda: [published.extend(publish(pool, [b])) for b in more])
    writer.start()
    deadline = time.monotonic() + WAIT_S
    while len(published) < 5 and time.monotonic() < deadline:
        time.sleep(0.001)
    doomed.process.kill()
    assert ended.wait(WAIT_S), "the transfer hangs"
    result = pool.transfer_result("r")
    assert result.error is not None
    assert content(result) == (chain * 20)[: len(result.blocks)]
    writer.join(WAIT_S)
    assert not writer.is_alive() and len(published) == 500
    assert published[0] is True and published[-1] is False

    def everything() -> None:
        assert pool.query(hashes(chain)) == (0, [])
        assert pool.publish(b"new" * 8, "far", [1] * SIZE, b"x") is False
        assert content(transfer(pool, chain, "later")) == []
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
    assert pool.query(hashes(chain))[0] == 2 * SIZE
    pool._client.timeout_s = 0.2
    master.process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, master.process.pid, os.WSTOPPED)
    try:
        assert pool.total_cached_blocks == 0
        assert 0.15 < elapsed_s(lambda: pool.query(hashes(chain))) < WAIT_S
        assert elapsed_s(lambda: transfer(pool, chain)) < QUICK_S
        assert elapsed_s(lambda: pool.total_cached_blocks) < QUICK_S
        assert elapsed_s(pool.close) < QUICK_S
    finally:
        master.process.send_signal(signal.SIGCONT)
    assert pool.query(hashes(chain)) == (0, []), "a store that was given up is asked again"
    assert near.query(hashes(chain))[0] == 2 * SIZE
