"""Engines that share a store: what the second reads is what it would have computed, or nothing.

Each test runs with every store of `kv_stores.py`, a throw-away one among them, and with Mooncake.
The engine is a toy, whose memory holds bytes (`kv_bytes.py`).
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence

import pytest

from block_pool import BlockPool
from bounded_loops import as_long_as
from global_kv_pool import GlobalKVPool, KVBlock
from kv_bytes import ByteEngine, ByteMemory, make_request, true_kv
from kv_connector import ConnectorChain, KVConnector
from kv_slots import MakeCache
from kv_store import make_record
from kv_stores import MAX_BLOCKS, RECORD_NBYTES, WAIT_S
from kv_tiers import DiskTier, HostTier
from pool_connector import PoolConnector
from request import Request

SIZE = 4
MODEL = (("model", "tiny"), ("dtype", "float64"))


class Engine:
    """A connector, a memory, and what `LoadingKVCacheManager` does with them for one request."""

    def __init__(self, pool, node_id: str, namespace=MODEL, size: int = SIZE, **kwargs) -> None:
        self.connector = PoolConnector(pool, node_id, **{"load_timeout_s": 3 * WAIT_S, **kwargs})
        self.io, self.namespace, self.size = ByteMemory(), namespace, size
        self.connector.bind(self.io, size, namespace)
        self.stats = self.connector.stats

    def content(self, request: Request, index: int) -> bytes:
        return true_kv(request, index, self.size, self.namespace)

    def num_matched_tokens(self, request: Request, num_computed: int = 0) -> int:
        num_tokens, is_async = self.connector.get_num_new_matched_tokens(request, num_computed)
        assert is_async == (num_tokens > 0)
        return num_tokens

    def begin(self, request: Request, num_computed: int = 0) -> list[int]:
        """Ask and start the load; the blocks it goes to."""
        num_tokens = self.num_matched_tokens(request, num_computed)
        block_ids = random.Random(request.request_id).sample(range(1, 99), num_tokens // self.size)
        self.connector.update_state_after_alloc(request, block_ids, num_tokens)
        return block_ids

    def finish(self, request: Request) -> int:
        """Poll as an engine does, until the load has ended."""
        num_tokens = self.connector.get_finished_load(request.request_id)
        for _ in as_long_as(lambda: num_tokens is None, seconds=60):
            self.wait()
            num_tokens = self.connector.get_finished_load(request.request_id)
        with pytest.raises(KeyError):  # it is said once
            self.connector.get_finished_load(request.request_id)
        return num_tokens

    def wait(self) -> None:
        """Assert that the wait returns early instead of sleeping for the full timeout."""
        start = time.monotonic()
        self.connector.wait_for_load(WAIT_S)
        assert time.monotonic() - start < WAIT_S / 2

    def load(self, request: Request, num_computed: int = 0) -> int:
        """Load what there is; every byte that has arrived is right."""
        block_ids = self.begin(request, num_computed)
        num_tokens = self.finish(request)
        self.check(request, block_ids[: num_tokens // self.size], num_computed // self.size)
        assert self.io.written == block_ids[: num_tokens // self.size]
        return num_tokens

    def check(self, request: Request, block_ids: Sequence[int], start: int = 0) -> None:
        for index, block_id in enumerate(block_ids, start):
            assert self.io.data[block_id] == self.content(request, index), index

    def save(self, request: Request, num_blocks: int | None = None) -> None:
        """Compute a request's full blocks and give them up."""
        num_full = request.num_tokens // self.size if num_blocks is None else num_blocks
        block_ids = random.Random(7).sample(range(100, 199), num_full)
        for index, block_id in enumerate(block_ids):
            self.io.data[block_id] = self.content(request, index)
        self.io.read.clear()
        self.connector.request_finished(request, block_ids)


@pytest.fixture
def engines(pool) -> tuple[Engine, Engine]:
    return Engine(pool, "a"), Engine(pool, "b")


TOKENS = list(range(100, 118))  # 4 full blocks and 2 tokens


@pytest.fixture
def saved(engines) -> tuple[Engine, Engine]:
    """The first has computed `TOKENS`."""
    engines[0].save(make_request("0", TOKENS))
    return engines


def test_the_second_engine_reads_what_the_first_has_computed_byte_for_byte(saved):
    first, second = saved
    assert second.load(make_request("0", TOKENS)) == 16
    assert (second.stats.num_loads, second.stats.num_failed_loads) == (1, 0)
    assert (second.stats.num_tokens_loaded, first.stats.num_blocks_published) == (16, 4)


def test_a_store_that_counts_below_zero_has_nothing(saved, monkeypatch):
    _, second = saved
    monkeypatch.setattr(second.connector.store, "has", lambda links: -1)
    assert second.num_matched_tokens(make_request("0", TOKENS)) == 0
    second.save(make_request("1", TOKENS[::-1]))
    assert second.stats.num_blocks_published == 4


@pytest.mark.parametrize("num_computed", [0, 4, 8, 12])
def test_only_what_is_behind_the_local_hit_is_loaded(saved, num_computed):
    _, second = saved
    request = make_request("0", TOKENS)
    assert second.num_matched_tokens(request, num_computed) == 16 - num_computed
    assert second.load(request, num_computed) == 16 - num_computed
    assert second.stats.num_failed_loads == 0


@pytest.mark.parametrize(("num_tokens", "expected"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8)])
def test_at_least_the_last_token_is_left_to_compute(saved, num_tokens, expected):
    """Trap 3."""
    _, second = saved
    request = make_request("1", TOKENS[:num_tokens])
    assert second.num_matched_tokens(request) == expected
    assert second.num_matched_tokens(request, expected) == 0


@pytest.mark.parametrize(
    "namespace",
    [
        (("model", "other"), ("dtype", "float64")),
        (("model", "tiny"),),
        (("model", "float64"), ("dtype", "tiny")),
        (),
    ],
)
def test_kv_of_another_model_or_layout_is_not_found(pool, namespace):
    """Trap 12."""
    Engine(pool, "a").save(make_request("0", TOKENS))
    assert Engine(pool, "b", namespace).num_matched_tokens(make_request("0", TOKENS)) == 0
    assert Engine(pool, "b", MODEL[::-1]).num_matched_tokens(make_request("0", TOKENS)) == 16


def test_kv_of_another_block_size_is_not_found(pool):
    """Trap 8."""
    Engine(pool, "a").save(make_request("0", TOKENS))
    assert Engine(pool, "b", size=2).num_matched_tokens(make_request("0", TOKENS)) == 0
    assert Engine(pool, "b", size=8).num_matched_tokens(make_request("0", TOKENS)) == 0


FULL_WITH_FOUR = {
    "host": lambda folder: HostTier(4),
    "disk": lambda folder: DiskTier(folder / "kv", 4, RECORD_NBYTES),
    "pool": lambda folder: GlobalKVPool(max_blocks_per_node=4),
}
KEYS = [(), (("salt", "x"),), (("lora", "x"),), (("salt", "1"),), (("salt", 1),), (("model", "x"),)]


@pytest.mark.parametrize("mine", KEYS)
def test_a_salt_or_an_adapter_of_another_is_not_found(engines, mine):
    """Trap 12."""
    first, second = engines
    for number, keys in enumerate(KEYS):
        if keys != mine:
            first.save(make_request(str(number), TOKENS, keys))
    assert second.num_matched_tokens(make_request("9", TOKENS, mine)) == 0
    first.save(make_request("10", TOKENS, mine))
    assert second.load(make_request("11", TOKENS, mine)) == 16


def test_a_request_cannot_spell_a_namespace(pool):
    """Trap 12: a tag that two prompts share raises no error either."""
    Engine(pool, "a").save(make_request("0", TOKENS))
    bare = Engine(pool, "b", namespace=())
    for prefix in ("", "engine ", "request "):
        keys = tuple((prefix + tag, value) for tag, value in MODEL)
        assert bare.num_matched_tokens(make_request(prefix, TOKENS, keys)) == 0
        assert Engine(pool, "c").num_matched_tokens(make_request(prefix, TOKENS, keys)) == 0


def test_a_request_is_hashed_once_and_its_outputs_when_they_come(engines, monkeypatch):
    """The cost of asking again is a query."""
    import prefix_cache_local
    import request_chain

    first, second = engines
    counts = {"blocks": 0}
    hash_block = prefix_cache_local.compute_block_hash

    def counted(*args):
        counts["blocks"] += 1
        return hash_block(*args)

    for module in (request_chain, prefix_cache_local):
        monkeypatch.setattr(module, "compute_block_hash", counted)
    request = make_request("0", TOKENS)
    second.num_matched_tokens(request)
    second.num_matched_tokens(request, 8)
    assert counts["blocks"] == 4
    for token in range(6):
        request.append_output_token(token)
    second.save(request)
    assert counts["blocks"] == 6
    assert first.load(make_request("1", request.all_token_ids)) == 20


def test_a_finished_request_leaves_no_state(engines):
    _, second = engines
    request = make_request("0", TOKENS)
    second.num_matched_tokens(request)
    second.connector.cancel_load("0")
    second.begin(request)
    second.finish(request)
    connector = second.connector
    assert not connector._found and not connector._loading and not connector._loads._loads
    assert len(connector._chains._chains) == 1
    del request
    assert len(connector._chains._chains) == 0


def raises(records: list[bytes]) -> list[bytes]:
    raise OSError("cable cut")


def other_block(records: list[bytes]) -> list[bytes]:
    return [make_record((b"h" * 32, (1, 2, 3, 4)), bytes(40)), *records[1:]]


def other_tokens(records: list[bytes]) -> list[bytes]:
    """The right hash, and a checksum that is right for other tokens."""
    link = records[0][8:40], (0, 0, 0, 0)
    return [make_record(link, records[0][-40:]), *records[1:]]


LIES = {  # and how many tokens are loaded all the same
    "raises": (raises, 0),
    "other order": (lambda records: records[::-1], 0),
    "shifted": (lambda records: records[1:], 0),
    "another block": (other_block, 0),
    "other tokens": (other_tokens, 0),
    "flipped": (lambda records: [r[:-1] + bytes([r[-1] ^ 1]) for r in records], 0),
    "cut": (lambda records: [r[:-1] for r in records], 0),
    "longer": (lambda records: [r * 2 for r in records], 0),
    "empty": (lambda records: [b""] * 4, 0),
    "nothing": (lambda records: [], 0),
    "one in the middle": (lambda records: [records[0], records[1][1:], *records[2:]], SIZE),
    "too much": (lambda records: [*records, *records], 16),
}


@pytest.mark.parametrize(("lie", "expected"), LIES.values(), ids=LIES)
def test_nothing_is_written_from_a_corrupt_block_on(saved, faults, lie, expected):
    _, second = saved
    faults.lie = lie
    assert second.load(make_request("0", TOKENS)) == expected
    assert second.stats.num_failed_loads == (expected < 16)
    assert second.stats.num_tokens_loaded == expected


def test_a_damaged_block_makes_room_for_a_good_one(saved, faults):
    _, second = saved
    faults.lie = lambda records: [records[0], records[1][::-1], *records[2:]]
    assert second.load(make_request("0", TOKENS)) == 4
    faults.lie = list
    assert second.num_matched_tokens(make_request("1", TOKENS)) == 4
    second.save(make_request("2", TOKENS))
    assert second.num_matched_tokens(make_request("3", TOKENS)) == 16


@pytest.mark.parametrize("moment", ["under way", "arrived"])
def test_a_cancelled_load_writes_nothing_afterwards(saved, faults, moment):
    """Trap 34: its blocks may be another request's by then."""
    _, second = saved
    request = make_request("0", TOKENS)
    faults.hold.clear()
    second.begin(request)
    assert faults.entered.wait(WAIT_S)
    if moment == "arrived":
        faults.hold.set()
        second.wait()
    second.connector.cancel_load("0")
    faults.hold.set()
    with pytest.raises(KeyError):
        second.connector.get_finished_load("0")
    assert second.load(make_request("1", TOKENS)) == 16  # it runs after the other
    assert not second.connector._loads._loads, "and is not read to its end"
    second.connector.cancel_load("never heard of")


def test_waiting_ends_with_the_first_load_that_has_arrived(engines, faults):
    first, second = engines
    for number in "01":
        first.save(make_request(number, [int(number), *TOKENS]))
    requests = [make_request(number, [int(number), *TOKENS]) for number in "01"]
    slow = first.content(requests[0], 0)
    held = threading.Event()

    def hold_one(records: list[bytes]) -> list[bytes]:
        return records if not records[0].endswith(slow) or held.wait(WAIT_S) else []

    faults.lie = hold_one
    for request in requests:
        second.begin(request)
    second.wait()
    assert second.connector.get_finished_load("0") is None
    assert second.connector.get_finished_load("1") == 16
    held.set()
    assert second.finish(requests[0]) == 16


def test_two_engines_may_use_one_request_id_at_the_same_time(pool, faults):
    """Trap 50."""
    engines = [Engine(pool, node_id) for node_id in "abc"]
    engines[0].save(make_request("0", TOKENS))
    faults.hold.clear()
    requests = [make_request("0", TOKENS[: n * SIZE + 1]) for n in (4, 2)]
    places = [e.begin(r) for e, r in zip(engines[1:], requests, strict=True)]
    faults.hold.set()
    for engine, request, place, expected in zip(
        engines[1:], requests, places, (16, 8), strict=True
    ):
        assert engine.finish(request) == expected
        engine.check(request, place)


@pytest.mark.parametrize("broken", ["has", "put", "get", "next", "get drop"])
def test_a_store_that_raises_costs_a_computation_and_nothing_else(pool, saved, broken, caplog):
    _, second = saved
    pool.faults.broken = broken
    request = make_request("0", TOKENS)
    num_tokens = second.num_matched_tokens(request)
    if broken == "has":
        assert num_tokens == 0
    else:
        second.connector.update_state_after_alloc(request, [1, 2, 3, 4], num_tokens)
        second.wait()
        assert second.finish(request) == (16 if broken == "put" else 0)
    second.save(make_request("1", [1, *TOKENS]))
    assert second.stats.num_blocks_published == (0 if broken in ("has", "put") else 4)
    second.connector.invalidate(request, 0, 4)
    second.connector.close()
    assert caplog.text, "a failure is announced"


def test_a_closed_connector_loads_nothing_and_leaves_the_pool_to_others(pool, saved, faults):
    _, second = saved
    request = make_request("0", TOKENS)
    faults.hold.clear()
    second.begin(request)
    second.connector.close()
    faults.hold.set()
    assert not second.io.written
    with pytest.raises(RuntimeError, match="closed"):
        second.begin(make_request("1", TOKENS))
    assert Engine(pool, "c").load(make_request("0", TOKENS)) == 16


def test_bad_arguments_are_refused(pool, engines):
    with pytest.raises(ValueError, match="load_timeout_s must be > 0, got 0"):
        PoolConnector(pool, "a", load_timeout_s=0)
    first, second = engines
    request = make_request("0", TOKENS)
    first.save(request)
    second.num_matched_tokens(request)
    with pytest.raises(ValueError, match="3 block_ids must hold 16 tokens"):
        second.connector.update_state_after_alloc(request, [1, 2, 3], 16)
    second.begin(request)
    with pytest.raises(ValueError, match="request '0'"):
        second.begin(request)
    second.finish(request)


def test_only_blocks_that_the_pool_has_not_got_are_read_and_published(engines):
    first, second = engines
    first.save(make_request("0", TOKENS), num_blocks=2)
    assert len(first.io.read) == 2
    second.save(make_request("1", TOKENS))
    assert (len(second.io.read), second.stats.num_blocks_published) == (2, 2)
    second.save(make_request("2", TOKENS))
    assert (second.io.read, second.stats.num_blocks_published) == ([], 2)


@pytest.mark.parametrize("num_known", [0, 1, 3])
@pytest.mark.parametrize("make_store", FULL_WITH_FOUR.values(), ids=FULL_WITH_FOUR)
def test_a_full_store_loses_the_tail_of_a_saved_chain_first(make_store, num_known, tmp_path):
    """Trap 11."""
    pool = make_store(tmp_path)
    first = Engine(pool, "a")
    first.save(make_request("0", TOKENS), num_known)
    first.save(make_request("1", TOKENS))
    request = make_request("2", TOKENS)
    for number, expected in enumerate([16, 12, 8, 4, 0]):
        hashes = [block_hash for block_hash, _ in first.connector._chains.chain(request, 4)]
        tier = pool._nodes["a"] if isinstance(pool, GlobalKVPool) else pool
        held = [block_hash in tier for block_hash in hashes]  # `has` would be a use
        assert held == [index * SIZE < expected for index in range(4)]
        first.save(make_request(f"other {number}", [number] * SIZE))


def test_a_block_that_its_reader_rejects_is_not_kept_in_a_nearer_tier():
    pool = GlobalKVPool(MAX_BLOCKS)
    first, second = Engine(pool, "a"), Engine(pool, "b")
    first.save(make_request("0", TOKENS))
    block_hash, token_ids = first.connector._chains.chain(make_request("1", TOKENS), 2)[1]
    pool.invalidate([block_hash])
    pool.publish(block_hash, "a", token_ids, b"intact, but not a record")
    assert second.load(make_request("2", TOKENS)) == SIZE
    assert second.num_matched_tokens(make_request("3", TOKENS)) == SIZE
    pool.close()


@pytest.mark.parametrize(("start", "end", "num_stored"), [(1, 3, 4), (3, 4, 12)])
def test_only_invalidated_blocks_leave_the_store(saved, start, end, num_stored):
    first, second = saved
    first.connector.invalidate(make_request("0", TOKENS), start, end)
    assert second.num_matched_tokens(make_request("1", TOKENS)) == num_stored
    second.save(make_request("2", TOKENS))
    assert second.num_matched_tokens(make_request("3", TOKENS)) == 16


def make_engine(connector: KVConnector, make_cache: MakeCache, num_usable: int) -> ByteEngine:
    return ByteEngine(connector, make_cache(BlockPool(num_usable + 1), SIZE), MODEL)


@pytest.mark.parametrize("is_chained", [False, True])
def test_two_managers_share_one_pool(pool, make_cache, is_chained):
    engines = []
    for node_id in "ab":
        connector = PoolConnector(pool, node_id)
        if is_chained:
            connector = ConnectorChain([connector, PoolConnector(pool, node_id + "'")])
        engines.append(make_engine(connector, make_cache, 7))
    first, second = engines
    assert first.serve(TOKENS) == 0
    assert second.serve(TOKENS) == 16
    assert second.serve([*TOKENS[:8], *range(9)]) == 8
    assert first.serve([*TOKENS[:8], *range(9)]) == 16
    assert second.serve(TOKENS, (("salt", "x"),)) == 0


@pytest.mark.parametrize("seed", [0, 1])
def test_engines_too_small_for_their_prompts_serve_right_bytes_from_a_pool_that_fails(
    make_cache, seed
):
    """Random families of prompts; a quarter of all copies fails."""
    rng, chance = random.Random(seed), random.Random(seed + 100)

    def transport(block: KVBlock) -> bytes:
        fault = chance.randrange(8)
        return bytes(1) if fault == 0 else block.kv_data[fault == 1 :]

    pool = GlobalKVPool(max_blocks_per_node=12, transport=transport, num_transfer_threads=1)
    connectors = [PoolConnector(pool, node_id) for node_id in "ab"]
    engines = [make_engine(connector, make_cache, 8) for connector in connectors]
    heads = [[family] * rng.randint(3, 14) for family in range(3)]
    for _ in range(40):
        tokens = rng.choice(heads) + [rng.randint(10, 11) for _ in range(rng.randint(1, 12))]
        keys = (("salt", "x"),) if rng.random() < 0.2 else ()
        rng.choice(engines).serve(tokens, keys)
        pool.check_invariants()
    stats = [connector.stats for connector in connectors]
    assert sum(s.num_tokens_loaded for s in stats) > 0, f"seed {seed}: nothing was loaded"
    assert sum(s.num_failed_loads for s in stats) > 0, f"seed {seed}: nothing has failed"
    pool.close()


@pytest.mark.parametrize(("nbytes", "expected"), [(39, 0), (40, 16), (41, 0)])
def test_bytes_that_are_here_are_loaded_immediately_if_their_size_is_right(nbytes, expected):
    engine, request = Engine(GlobalKVPool(9), "a"), make_request("0", TOKENS)
    found = [(link, bytes(nbytes)) for link in engine.connector._chains.chain(request, 4)]
    assert engine.connector._offer(request, found) == (16, False)
    engine.connector.update_state_after_alloc(request, [1, 2, 3, 4], 16)
    assert engine.connector.get_finished_load("0") == expected
    assert len(engine.io.written) == expected // SIZE
