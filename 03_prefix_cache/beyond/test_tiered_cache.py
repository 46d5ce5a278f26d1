"""Down and up again, under a real cache and manager. A block's bytes are a function of its chain
hash, so KV of another prefix would be seen at once."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest

from block_pool import BlockPool
from bounded_loops import as_long_as
from kv_memory import ComputedBlocks, NotReady
from loading_kv_cache_manager import LoadingKVCacheManager
from prefix_cache import KeyedRequest
from prefix_cache_local import PrefixCacheLocal, compute_hash_chain
from radix_cache import RadixCache
from request import SamplingParams
from tiered_cache import KVTierConfig, TieredCache

BLOCK_SIZE = 2
NAMESPACE = (("model", "test"),)


class FakeIO:
    block_nbytes = 40

    def __init__(self) -> None:
        self.blocks: dict[int, bytes] = {}
        self.num_reads = 0

    def read_block(self, block_id: int) -> bytes:
        self.num_reads += 1
        return self.blocks[block_id]

    def write_block(self, block_id: int, data: bytes | memoryview) -> None:
        assert len(data) == self.block_nbytes
        self.blocks[block_id] = bytes(data)


def kv_of(token_ids: tuple[int, ...], extra_keys=()) -> bytes:
    """What a forward pass writes for the last block of this prefix."""
    return random.Random(repr((token_ids, extra_keys))).randbytes(FakeIO.block_nbytes)


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(ValueError, match=r"disk_path is .*: it must be a file"):
        KVTierConfig(host_blocks=1, disk_path=tmp_path)


class Engine:
    """A manager, a cache, tiers and a memory of bytes, without a model."""

    def __init__(
        self,
        config: KVTierConfig,
        kind=PrefixCacheLocal,
        num_blocks: int = 8,
        namespace=NAMESPACE,
    ) -> None:
        self.pool, self.io = BlockPool(num_blocks + 1), FakeIO()
        self.tiers = TieredCache(config)
        self.tiers.bind(self.io, BLOCK_SIZE, namespace)
        size = "block_size" if kind is PrefixCacheLocal else "page_size"
        self.cache = kind(pool=self.pool, listener=self.tiers, **{size: BLOCK_SIZE})
        self.manager = LoadingKVCacheManager(self.pool, BLOCK_SIZE, self.cache, self.tiers)
        self.num_requests = 0

    def request(self, token_ids, extra_keys=()) -> KeyedRequest:
        self.num_requests += 1
        params = SamplingParams(temperature=0, max_tokens=1)
        return KeyedRequest(str(self.num_requests), token_ids, params, extra_keys=extra_keys)

    def serve(self, token_ids, extra_keys=()) -> int:
        """One request from look-up to end. Returns the tokens that it did not compute, after every
        block of its table has been compared with what a forward pass would have written."""
        request = self.request(token_ids, extra_keys)
        computed = self.manager.get_computed_blocks(request)
        for _ in as_long_as(lambda: isinstance(computed, NotReady), seconds=30):
            self.manager.wait_for_loads()
            computed = self.manager.get_computed_blocks(request)
        num_new = request.num_tokens - computed.num_tokens
        assert self.manager.allocate_slots(request, num_new, 0, computed)
        block_ids = self.manager.get_block_ids(request.request_id)
        for index in range(request.num_tokens // BLOCK_SIZE):
            prefix = tuple(request.all_token_ids[: (index + 1) * BLOCK_SIZE])
            if index < len(computed.blocks):
                assert self.io.blocks[block_ids[index]] == kv_of(prefix, extra_keys), index
            else:
                self.io.blocks[block_ids[index]] = kv_of(prefix, extra_keys)
        request.num_computed_tokens = request.num_tokens
        self.manager.cache_blocks(request, request.num_tokens)
        self.manager.check_invariants([request])
        self.tiers.check_invariants()
        self.manager.free(request)
        return computed.num_tokens


@pytest.fixture(params=[PrefixCacheLocal, RadixCache])
def kind(request):
    return request.param


@pytest.mark.parametrize("write_policy", ["write_back", "write_through"])
def test_what_was_evicted_comes_back(kind, write_policy, tmp_path):
    """Four prompts of 8 blocks in a device of 8: each but the last has been evicted whole."""
    config = KVTierConfig(8, 100, tmp_path / "kv", write_policy)
    engine = Engine(config, kind)
    prompts = [[n] * 16 for n in range(4)]
    assert [engine.serve(prompt) for prompt in prompts] == [0, 0, 0, 0]
    assert [engine.serve(prompt) for prompt in prompts] == [14, 14, 14, 14]
    assert engine.tiers.stats.num_disk_hits > 0
    engine.tiers.close()


def test_without_a_tier_they_are_computed_again(kind):
    engine = Engine(KVTierConfig(host_blocks=1), kind)
    prompts = [[n] * 16 for n in range(4)]
    assert [engine.serve(prompt) for prompt in prompts * 2] == [0] * 8
    engine.tiers.close()


@pytest.mark.sample(seed=4)
@pytest.mark.parametrize("seed", range(8))
def test_random_prompts_never_see_the_kv_of_another(seed, kind, tmp_path):
    rng = random.Random(seed)
    config = KVTierConfig(
        rng.choice([0, 1, 3, 10]),
        rng.choice([2, 5, 30]),
        tmp_path / "kv",
        rng.choice(["write_back", "write_through"]),
    )
    engine = Engine(config, kind)
    for _ in range(60):
        tokens = [rng.randrange(2) for _ in range(rng.randint(1, 14))]
        engine.serve(tokens, rng.choice([(), (), (("salt", "x"),)]))
        assert len(engine.tiers.host) <= config.host_blocks
        assert len(engine.tiers.disk) <= config.disk_blocks
    engine.tiers.close()


def test_a_second_eviction_copies_nothing(kind):
    """Copies below stay: what comes back and leaves again is not read from the device twice."""
    engine = Engine(KVTierConfig(host_blocks=100), kind)
    for _ in range(3):
        engine.serve([1] * 16)
        engine.serve([2] * 16)
    assert engine.io.num_reads == engine.tiers.stats.num_saved <= 16
    engine.tiers.close()


def test_write_through_copies_when_a_block_is_published(kind):
    through = Engine(KVTierConfig(100, write_policy="write_through"), kind)
    through.serve([1] * 8)
    assert len(through.tiers.host) == 4
    back = Engine(KVTierConfig(100), kind)
    back.serve([1] * 8)
    assert len(back.tiers.host) == 0
    for engine in (through, back):
        engine.tiers.close()


def test_a_file_serves_the_next_engine(kind, tmp_path):
    config = KVTierConfig(0, 50, tmp_path / "kv", "write_through")
    first = Engine(config, kind)
    assert first.serve([3] * 10) == 0
    first.tiers.close()
    second = Engine(config, kind)
    assert second.serve([3] * 10) == 8
    assert second.tiers.stats.num_disk_hits == 4
    second.tiers.close()


def test_kv_of_another_model_is_not_found(tmp_path):
    config = KVTierConfig(0, 50, tmp_path / "kv", "write_through")
    first = Engine(config)
    first.serve([3] * 10)
    first.tiers.close()
    second = Engine(config, namespace=(("model", "another"),))
    assert second.serve([3] * 10) == 0
    second.tiers.close()


def test_a_corrupt_block_ends_the_load_in_front_of_it(tmp_path, caplog):
    config = KVTierConfig(0, 50, tmp_path / "kv", "write_through")
    engine = Engine(config)
    engine.serve([3] * 10)
    assert engine.manager.reset_prefix_cache()
    keys = [("engine model", "test")]
    bad = compute_hash_chain([3] * 10, BLOCK_SIZE, keys)[2][0]
    disk = engine.tiers.disk
    disk._map[disk._offset(disk._slots[bad]) + 100] ^= 1
    assert engine.serve([3] * 10) == 4
    assert disk.num_corrupt == 1 and engine.tiers.stats.num_short_loads == 1
    assert engine.manager.reset_prefix_cache()
    assert engine.serve([3] * 10) == 8, "it was computed, and saved again"
    engine.tiers.close()


def engine_with_a_slow_disk(config: KVTierConfig) -> tuple[Engine, KeyedRequest, threading.Event]:
    """A request whose blocks are on disk alone, and what its reads wait for."""
    engine = Engine(config)
    engine.serve([3] * 8)
    engine.manager.reset_prefix_cache()
    gate, read = threading.Event(), engine.tiers.disk.read

    def slow_read(block_hash: bytes) -> bytes | None:
        gate.wait(20)
        return read(block_hash)

    engine.tiers.disk.read = slow_read
    return engine, engine.request([3] * 8), gate


def wait_until_ready(engine: Engine, request: KeyedRequest) -> ComputedBlocks:
    computed = engine.manager.get_computed_blocks(request)
    for _ in as_long_as(lambda: isinstance(computed, NotReady), seconds=30):
        engine.manager.wait_for_loads()
        computed = engine.manager.get_computed_blocks(request)
    return computed


def test_a_request_whose_blocks_are_being_read_is_passed_over(tmp_path):
    """It is not ready until the disk has answered; others are served meanwhile."""
    config = KVTierConfig(0, 50, tmp_path / "kv", "write_through")
    engine, request, gate = engine_with_a_slow_disk(config)
    assert engine.manager.get_computed_blocks(request) is NotReady.LOADING
    assert engine.serve([4] * 4) == 0
    assert engine.manager.get_computed_blocks(request) is NotReady.LOADING
    gate.set()
    assert wait_until_ready(engine, request).num_tokens == 6
    engine.manager.free(request)
    engine.manager.check_invariants()
    engine.tiers.close()


@pytest.mark.parametrize("how", ["cancelled", "late"])
def test_a_load_that_is_given_up_writes_nothing(how, tmp_path):
    timeout = 0.2 if how == "late" else 20.0
    config = KVTierConfig(0, 50, tmp_path / "kv", "write_through", load_timeout_s=timeout)
    engine, request, gate = engine_with_a_slow_disk(config)
    if how == "late":
        assert wait_until_ready(engine, request).num_tokens == 0
    else:
        computed = engine.manager.get_computed_blocks(request)
        assert computed is NotReady.LOADING
    engine.manager.free(request)
    before = dict(engine.io.blocks)
    gate.set()
    engine.tiers.close()
    assert engine.io.blocks == before
    engine.manager.check_invariants()
    assert engine.pool.num_free_blocks == engine.pool.num_usable_blocks


def test_a_child_is_never_left_below_without_its_parent_while_both_fit(kind):
    """Trap 11, a floor down: the tail of a prompt leaves the host before its head."""
    engine = Engine(KVTierConfig(host_blocks=6), kind)
    engine.serve([1] * 16)  # 8 blocks
    engine.serve([2] * 16)  # evicts them, tail first; the host keeps 6
    assert engine.serve([1] * 16) >= 2 * BLOCK_SIZE, "the head is still there"
    engine.tiers.close()


@pytest.mark.parametrize("is_found", [False, True])
def test_nothing_is_kept_of_a_request_that_never_published_a_block(is_found, kind):
    """Whether the tiers had something for it, or nothing."""
    engine = Engine(KVTierConfig(host_blocks=100), kind)
    engine.serve([1] * 16)
    engine.serve([2] * 16)  # evicts it
    requests = [engine.request([1 if is_found else 3] * 8) for _ in range(20)]
    for request in requests:
        computed = engine.manager.get_computed_blocks(request)
        assert computed.num_tokens == (6 if is_found else 0)
    assert not engine.tiers._loads
    for request in requests:
        engine.manager.free(request)  # aborted while it waits
    for _ in range(20):
        assert engine.serve([4]) == 0
    assert engine.tiers._found == {}
    engine.tiers.close()


@pytest.mark.parametrize(
    "wrong",
    [
        {"host_blocks": -1},
        {"host_blocks": 1.5},
        {"host_blocks": 0},
        {"host_blocks": 1, "disk_blocks": True},
        {"host_blocks": 1, "write_policy": "never"},
        {"host_blocks": 1, "load_timeout_s": 0},
        {"host_blocks": 1, "disk_path": 3},
    ],
)
def test_wrong_configurations_are_named(wrong):
    with pytest.raises(ValueError, match=list(wrong)[-1]):
        KVTierConfig(**wrong)


def test_a_temporary_file_is_removed(kind):
    engine = Engine(KVTierConfig(0, 10), kind)
    path = engine.tiers.disk.path
    assert path.exists()
    engine.tiers.close()
    engine.tiers.close()
    assert not Path(path).exists()


def test_what_is_on_disk_is_not_copied_again(kind, tmp_path):
    engine = Engine(KVTierConfig(0, 100, tmp_path / "kv"), kind)
    for _ in range(3):
        engine.serve([1] * 16)
        engine.serve([2] * 16)
    assert engine.tiers.stats.num_saved <= 16
    engine.tiers.close()


def test_what_came_from_disk_is_in_the_host_next_time_its_head_for_longest(tmp_path):
    """Five blocks come up from disk into a host of three, where the first three of them stay; the
    block for the last token then evicts one on the device, which takes the place of the third."""
    config = KVTierConfig(3, 100, tmp_path / "kv")
    engine = Engine(config)
    engine.serve([1] * 11)
    engine.serve([2] * 16)  # evicts it
    engine.serve([3] * 16)  # pushes it out of the host
    assert engine.serve([1] * 11) == 10
    chain = compute_hash_chain([1] * 10, BLOCK_SIZE, [("engine model", "test")])
    assert [block_hash in engine.tiers.host for block_hash, _ in chain] == [True] * 2 + [False] * 3
    engine.tiers.close()


@pytest.mark.parametrize("how", ["device", "host"])
def test_what_leaves_the_tier_above_counts_as_used_on_disk(how, tmp_path):
    """A full disk drops what was not used for longest: not what has just come down again."""
    engine = Engine(KVTierConfig(0 if how == "device" else 1, 4, tmp_path / "kv"))
    tiers = engine.tiers
    names = [bytes([n]) * 32 for n in range(6)]
    for name in names[:4]:
        tiers.disk.put(name, bytes(engine.io.block_nbytes))
    if how == "device":
        (block,) = engine.manager.pool.allocate(1)
        tiers._hash_of[block.block_id] = names[0]
        tiers.blocks_evicted([block])
    else:
        for name in (names[0], names[5]):  # what is read from disk goes to the host, then leaves it
            tiers._put(name, bytes(engine.io.block_nbytes))
    tiers.disk.put(names[4], bytes(engine.io.block_nbytes))
    assert names[0] in tiers.disk and names[1] not in tiers.disk
    tiers.close()


def test_an_eviction_is_a_use_of_the_copy_below(kind):
    """Written through long ago and evicted just now: the copy is young, and stays in the host."""
    engine = Engine(KVTierConfig(8, write_policy="write_through"), kind)
    engine.serve([1] * 4)
    engine.serve([2] * 8)
    for token in (3, 4):  # evicts [1] * 4, then pushes four blocks out of the host
        engine.serve([token] * 4)
    assert engine.manager.pool.num_free_blocks + engine.cache.num_cached_blocks == 8
    assert engine.cache.evict(2) == 2  # the oldest on the device: of prompt 1
    engine.serve([5] * 4)
    chain = compute_hash_chain([1] * 4, BLOCK_SIZE, [("engine model", "test")])
    assert all(block_hash in engine.tiers.host for block_hash, _ in chain)
    engine.tiers.close()


# Mutations tried (each makes a test here fail): the namespace or the extra keys left out of the
# root; the parent's hash left out; write-through always, or never; a saved block saved again, in
# the host or on disk; an eviction that does not refresh the host's copy; nothing to disk; a look-up
# up to the last token; a chain from the first block for a load behind it; holes filled up; no
# deadline; no wait; blocks from disk not kept in the host, or kept in the wrong order; ids of
# evicted blocks kept; the temporary file kept. Equivalent: reading on behind a block that is gone.
