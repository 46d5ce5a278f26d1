"""Down and up again, under a real cache and manager, over a memory of bytes (`kv_bytes.py`)."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from block_pool import BlockPool
from kv_bytes import ByteEngine, Tags, make_request
from kv_memory import NotReady
from kv_slots import MakeCache
from prefix_cache_local import compute_hash_chain
from tiered_cache import KVTierConfig, TieredCache

BLOCK_SIZE = 2
NAMESPACE = (("model", "test"),)


class Engine(ByteEngine):
    """With tiers below a cache of 8 blocks."""

    def __init__(self, config: KVTierConfig, make_cache: MakeCache, namespace: Tags) -> None:
        self.tiers = TieredCache(config)
        super().__init__(self.tiers, make_cache(BlockPool(9), BLOCK_SIZE), namespace)
        self.cache.listener = self.tiers

    def serve(self, tokens: Sequence[int], keys: Tags = ()) -> int:
        num_tokens = super().serve(tokens, keys)
        self.tiers.check_invariants()
        return num_tokens


@pytest.fixture
def make_engine(make_cache: MakeCache) -> Iterator[Callable[..., Engine]]:
    """`make_engine(config)`, closed at the end."""
    engines: list[Engine] = []

    def make(config: KVTierConfig, namespace: Tags = NAMESPACE) -> Engine:
        engines.append(Engine(config, make_cache, namespace))
        return engines[-1]

    yield make
    for engine in engines:
        engine.tiers.close()


@pytest.mark.parametrize("write_policy", ["write_back", "write_through"])
def test_an_evicted_block_is_loaded_again(make_engine, write_policy, tmp_path):
    """Four prompts of 8 blocks in a device of 8: each but the last has been evicted whole."""
    config = KVTierConfig(8, 100, tmp_path / "kv", write_policy)
    engine = make_engine(config)
    prompts = [[n] * 16 for n in range(4)]
    assert [engine.serve(prompt) for prompt in prompts] == [0, 0, 0, 0]
    assert [engine.serve(prompt) for prompt in prompts] == [14, 14, 14, 14]
    assert engine.tiers.stats.num_disk_hits > 0


@pytest.mark.sample(seed=4)
@pytest.mark.parametrize("seed", range(8))
def test_random_prompts_never_see_the_kv_of_another(seed, make_engine, tmp_path):
    rng = random.Random(seed)
    config = KVTierConfig(
        rng.choice([0, 1, 3, 10]),
        rng.choice([2, 5, 30]),
        tmp_path / "kv",
        rng.choice(["write_back", "write_through"]),
    )
    engine = make_engine(config)
    for _ in range(60):
        tokens = [rng.randrange(2) for _ in range(rng.randint(1, 14))]
        engine.serve(tokens, rng.choice([(), (), (("salt", "x"),)]))
        assert len(engine.tiers.host) <= config.host_blocks
        assert len(engine.tiers.disk) <= config.disk_blocks


@pytest.mark.parametrize("tiers", [(100, 0), (0, 100)], ids=["host", "disk"])
def test_a_second_eviction_copies_nothing(make_engine, tiers):
    """Copies below stay: what comes back and leaves again is not read from the device twice."""
    engine = make_engine(KVTierConfig(*tiers))
    for _ in range(3):
        engine.serve([1] * 16)
        engine.serve([2] * 16)
    assert len(engine.io.read) == engine.tiers.stats.num_saved <= 16


def test_write_through_copies_when_a_block_is_published(make_engine):
    through = make_engine(KVTierConfig(100, write_policy="write_through"))
    through.serve([1] * 8)
    assert len(through.tiers.host) == 4
    back = make_engine(KVTierConfig(100))
    back.serve([1] * 8)
    assert len(back.tiers.host) == 0


@pytest.mark.parametrize(("model", "num_found"), [("test", 4), ("another", 0)])
def test_a_file_serves_the_next_engine_of_the_model(make_engine, model, num_found, tmp_path):
    config = KVTierConfig(0, 50, tmp_path / "kv", "write_through")
    first = make_engine(config)
    assert first.serve([3] * 10) == 0
    first.tiers.close()
    second = make_engine(config, namespace=(("model", model),))
    assert second.serve([3] * 10) == num_found * BLOCK_SIZE
    assert second.tiers.stats.num_disk_hits == num_found


def test_a_corrupt_block_ends_the_load_in_front_of_it(make_engine, tmp_path, caplog):
    config = KVTierConfig(0, 50, tmp_path / "kv", "write_through")
    engine = make_engine(config)
    engine.serve([3] * 10)
    assert engine.manager.reset_prefix_cache()
    keys = [("engine model", "test")]
    bad = compute_hash_chain([3] * 10, BLOCK_SIZE, keys)[2][0]
    disk = engine.tiers.disk
    disk._map[disk._offset(disk._slots[bad]) + 100] ^= 1
    assert engine.serve([3] * 10) == 4
    assert disk.num_corrupt == 1 and engine.tiers.stats.num_short_loads == 1
    assert engine.tiers.num_loaded_blocks() == {"host": 0, "disk": 2}
    assert engine.manager.reset_prefix_cache()
    assert engine.serve([3] * 10) == 8, "it was computed, and saved again"


def test_an_invalidated_block_leaves_both_tiers(make_engine, tmp_path):
    engine = make_engine(KVTierConfig(2, 50, tmp_path / "kv", "write_through"))
    engine.serve([3] * 8)
    tiers = engine.tiers
    assert (len(tiers.host), len(tiers.disk)) == (2, 2)
    first = min(engine.cache.cached_prefixes(), key=lambda prefix: len(prefix.token_ids))
    engine.cache.invalidate(first.block)
    assert (len(tiers.host), len(tiers.disk)) == (0, 0) and not tiers._link_of


def test_a_request_whose_blocks_are_being_read_is_skipped(make_engine, tmp_path):
    """The request is not ready until the disk has answered; others are served meanwhile."""
    engine = make_engine(KVTierConfig(0, 50, tmp_path / "kv", "write_through"))
    engine.serve([3] * 8)
    engine.manager.reset_prefix_cache()
    gate, read = threading.Event(), engine.tiers.disk.read
    engine.tiers.disk.read = lambda link: gate.wait(20) and read(link)
    request = make_request("again", [3] * 8)
    assert engine.manager.get_computed_blocks(request) is NotReady.LOADING
    assert engine.serve([4] * 4) == 0
    assert engine.manager.get_computed_blocks(request) is NotReady.LOADING
    gate.set()
    assert engine.wait_until_ready(request).num_tokens == 6
    engine.manager.free(request)
    engine.manager.check_invariants()


def test_a_child_is_never_left_below_without_its_parent_while_both_fit(make_engine):
    """Trap 11, a floor down: the tail of a prompt leaves the host before its head."""
    engine = make_engine(KVTierConfig(host_blocks=6))
    engine.serve([1] * 16)  # 8 blocks
    engine.serve([2] * 16)  # evicts them, tail first; the host keeps 6
    assert engine.serve([1] * 16) >= 2 * BLOCK_SIZE, "the head is still there"


@pytest.mark.parametrize("in_host", [(), (0, 2), (1, 3)])
def test_a_chain_that_was_found_leaves_each_tier_tail_first(make_engine, in_host):
    """Trap 11, a floor down: a look-up marks the head as used last, also where tiers alternate."""
    engine = make_engine(KVTierConfig(host_blocks=2, disk_blocks=4))
    tiers, data = engine.tiers, bytes(engine.io.block_nbytes)
    chain = compute_hash_chain([1] * 8, BLOCK_SIZE, [("engine model", "test")])
    for number, link in enumerate(chain):
        (tiers.host if number in in_host else tiers.disk).put(link, data)
    found, _ = tiers.get_num_new_matched_tokens(make_request("r", [1] * 9), 0)
    assert found == 8
    tiers.host.below = None  # the tiers one by one
    for tier in (tiers.host, tiers.disk):
        here = [block_hash for block_hash, _ in chain if block_hash in tier]
        for number in range(len(here), tier.max_blocks + len(here)):
            tier.put((bytes([number]) * 32, (number,)), data)
            num_kept = min(len(here), tier.max_blocks + len(here) - 1 - number)
            assert [block_hash for block_hash in here if block_hash in tier] == here[:num_kept]


@pytest.mark.parametrize("is_found", [False, True])
def test_nothing_is_kept_of_a_request_that_never_published_a_block(is_found, make_engine):
    """Whether the tiers had something for it, or nothing."""
    engine = make_engine(KVTierConfig(host_blocks=100))
    engine.serve([1] * 16)
    engine.serve([2] * 16)  # evicts it
    requests = [make_request(f"r{i}", [1 if is_found else 3] * 8) for i in range(20)]
    for request in requests:
        computed = engine.manager.get_computed_blocks(request)
        assert computed.num_tokens == (6 if is_found else 0)
    assert not engine.tiers._loading and not engine.tiers._loads._loads
    for request in requests:
        engine.manager.free(request)  # aborted while it waits
    for _ in range(20):
        assert engine.serve([4]) == 0
    assert engine.tiers._found == {}


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
        {"host_blocks": 1, "disk_path": Path(__file__).parent},
    ],
)
def test_wrong_configurations_are_named(wrong):
    with pytest.raises(ValueError, match=list(wrong)[-1]):
        KVTierConfig(**wrong)


def test_a_temporary_file_is_removed(make_engine):
    engine = make_engine(KVTierConfig(0, 10))
    path = engine.tiers.disk.path
    assert path.exists()
    engine.tiers.close()
    engine.tiers.close()
    assert not Path(path).exists()


def test_a_chain_read_from_disk_is_then_in_the_host_its_head_for_longest(make_engine, tmp_path):
    """Five blocks come up from disk into a host of three, where the first three of them stay; the
    block for the last token then evicts one on the device, which takes the place of the third."""
    config = KVTierConfig(3, 100, tmp_path / "kv")
    engine = make_engine(config)
    engine.serve([1] * 11)
    engine.serve([2] * 16)  # evicts it
    engine.serve([3] * 16)  # pushes it out of the host
    assert engine.serve([1] * 11) == 10
    chain = compute_hash_chain([1] * 10, BLOCK_SIZE, [("engine model", "test")])
    assert [block_hash in engine.tiers.host for block_hash, _ in chain] == [True] * 2 + [False] * 3


@pytest.mark.parametrize("evicted_from", ["device", "host"])
def test_eviction_from_a_higher_tier_counts_as_use_on_disk(make_engine, evicted_from, tmp_path):
    """A full disk drops what was not used for longest: not what has just come down again."""
    engine = make_engine(KVTierConfig(0 if evicted_from == "device" else 1, 4, tmp_path / "kv"))
    tiers = engine.tiers
    names = [(bytes([n]) * 32, (n,)) for n in range(6)]
    for name in names[:4]:
        tiers.disk.put(name, bytes(engine.io.block_nbytes))
    if evicted_from == "device":
        (block,) = engine.manager.pool.allocate(1)
        tiers._link_of[block.block_id] = names[0]
        tiers.blocks_evicted([block])
    else:
        for name in (names[0], names[5]):  # what is read from disk goes to the host, then leaves it
            tiers._keep(name, bytes(engine.io.block_nbytes))
    tiers.disk.put(names[4], bytes(engine.io.block_nbytes))
    assert names[0][0] in tiers.disk and names[1][0] not in tiers.disk


def test_an_eviction_is_a_use_of_the_copy_below(make_engine):
    """Written through long ago and evicted just now: the copy is young, and stays in the host."""
    engine = make_engine(KVTierConfig(8, write_policy="write_through"))
    engine.serve([1] * 4)
    engine.serve([2] * 8)
    for token in (3, 4):  # evicts [1] * 4, then pushes four blocks out of the host
        engine.serve([token] * 4)
    assert engine.manager.pool.num_free_blocks + engine.cache.num_cached_blocks == 8
    assert engine.cache.evict(2) == 2  # the oldest on the device: of prompt 1
    engine.serve([5] * 4)
    chain = compute_hash_chain([1] * 4, BLOCK_SIZE, [("engine model", "test")])
    assert all(block_hash in engine.tiers.host for block_hash, _ in chain)
