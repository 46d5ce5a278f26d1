"""A reader of the stream knows which blocks are cached and where, from any start on."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from block_pool import Block, BlockPool
from common.serve.kv_events import CacheChanges
from common.serve.kv_wire import CLEARED, CPU, GPU, STORAGE, pack_batch, wire_hash
from common.tests.engine_oracle import Oracle, serve, serve_a_crowd
from common.tests.kv_stream import Index, check, engine_of, prefixes_of, take, tiers_of
from kv_slots import PREFIX_CACHES
from kv_tiers import ignore_change
from prefix_cache import PrefixCache
from tiered_cache import KVTierConfig, TieredCache


def observed(cache: PrefixCache, **options: Any) -> tuple[CacheChanges, Index]:
    """Observe `cache`. Returns the changes, and an index that has read nothing yet."""
    changes = CacheChanges(cache, **options)
    changes.put_in()
    return changes, Index()


CACHES = pytest.mark.parametrize("kind", ["hash", "radix"])


# -- the cache alone


def work(cache: PrefixCache, rng: random.Random) -> None:
    """Something that changes what is cached, one way or another."""
    tokens = [rng.randrange(3) for _ in range(rng.randint(2, 18))]
    adapter = rng.choice([None, "d1", "d2"])
    salt = rng.choice([None, None, "tenant a"])
    keys = [(tag, value) for tag, value in (("lora", adapter), ("salt", salt)) if value]
    choice = rng.random()
    if choice < 0.7:
        cache.cache_computed_blocks(tokens, keys)
    elif choice < 0.9:
        cache.evict(rng.randint(1, 5))
    elif choice < 0.95:
        cached = [prefix.block for prefix in cache.cached_prefixes()]
        if cached:
            cache.invalidate(rng.choice(cached))
    elif choice < 0.975:
        assert cache.reset()
    else:
        cache.clear()
        for block in cache.pool.blocks[1:]:
            if block.ref_cnt:
                cache.pool.free([block])


@CACHES
@pytest.mark.parametrize("max_pending_changes", [4, 100_000])
def test_the_stream_alone_determines_the_cached_blocks(kind: str, max_pending_changes: int) -> None:
    """From the middle on, and with a thread that comes late."""
    max_cached = 0
    for seed in range(40):
        rng = random.Random(seed)
        cache = PREFIX_CACHES[kind](BlockPool(24), 2)
        for _ in range(rng.randint(0, 20)):
            work(cache, rng)
        changes, index = observed(cache, max_pending_changes=max_pending_changes)
        check(changes, index, cache)
        for _ in range(60):
            work(cache, rng)
            assert len(changes._pending_events) <= max_pending_changes, f"seed {seed}"
            if rng.random() < 0.5:
                events = check(changes, index, cache)
                assert CLEARED not in events[1:], f"seed {seed}"
            max_cached = max(max_cached, cache.num_cached_blocks)
        cache.cache_computed_blocks([1, 2])
        assert cache.reset() and check(changes, index, cache) == [CLEARED], f"seed {seed}"
        assert not changes._held, f"seed {seed}: what is nowhere is forgotten"
    assert max_cached == 23


def test_a_chain_is_one_event_and_so_is_its_end() -> None:
    cache = PREFIX_CACHES["radix"](BlockPool(40), 2)
    changes, index = observed(cache)
    cache.cache_computed_blocks(list(range(20)))
    assert changes.has_news
    _, stored = check(changes, index, cache)
    assert not changes.has_news
    assert len(stored["block_hashes"]) == 10 and stored["parent_block_hash"] is None
    cache.cache_computed_blocks([*range(10), 77, 78])
    assert changes.has_news
    (stored,) = check(changes, index, cache)
    assert len(stored["block_hashes"]) == 1 and stored["parent_block_hash"] is not None
    cache.evict(3)
    (removed,) = check(changes, index, cache)
    assert len(removed["block_hashes"]) == 3


def test_parents_are_published_before_their_children() -> None:
    """A parent may have gone, and come again, while a tier kept its child."""
    cache = PREFIX_CACHES["hash"](BlockPool(40), 2)
    changes, index = observed(cache)
    cache.cache_computed_blocks(list(range(20)))
    check(changes, index, cache)
    changes._held = dict(reversed(changes._held.items()))
    changes.restart_stream()
    assert len(check(changes, index, cache)) == 2
    changes._held = dict(reversed(changes._held.items()))
    changes.restart_stream()
    assert len(check(changes, index, cache)) == 2, "and a path is one event"


def test_a_batch_is_never_too_large_for_its_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.serve.kv_events.MAX_EVENTS", 2)
    monkeypatch.setattr("common.serve.kv_events.MAX_TOKENS", 12)
    cache = PREFIX_CACHES["hash"](BlockPool(80), 2)
    for first in range(12):
        cache.cache_computed_blocks([first, 0] * (1 + first % 5))
    changes, index = observed(cache)
    batches = list(changes.take())
    assert len(batches) > 3
    for batch in batches:
        sizes = [len(event.get("token_ids", ())) for event in batch]
        assert len(batch) <= 2 and (len(batch) == 1 or sum(sizes) <= 12)
        index.apply(pack_batch(batch, 0.0))
    assert index.prefixes() == prefixes_of(cache)


class Failing:
    """Another listener, whose disk is full."""

    def block_cached(self, *_: object) -> None:
        """Hears it."""

    def blocks_evicted(self, blocks: Sequence[Block]) -> None:
        raise OSError("no space left on device")

    blocks_invalidated = blocks_evicted


def test_an_error_of_another_listener_reaches_the_stream() -> None:
    cache = PREFIX_CACHES["hash"](BlockPool(9), 2)
    cache.listener = Failing()
    changes, index = observed(cache)
    cache.cache_computed_blocks(list(range(10)))
    check(changes, index, cache)
    with pytest.raises(OSError):
        cache.evict(2)
    check(changes, index, cache)
    with pytest.raises(OSError):
        cache.invalidate(
            next(iter(cache.cached_prefixes())).block
        )  # not taken when it is taken out
    other, _ = observed(cache)
    changes.take_out()
    other.take_out()
    assert isinstance(cache.listener, Failing)
    assert take(changes, index) == [CLEARED]


# -- the engine


@pytest.mark.sample
@CACHES
@pytest.mark.parametrize("write_policy", [None, "write_back", "write_through"])
def test_after_each_step_the_stream_says_what_is_cached_and_where(
    kind: str, write_policy: str | None, oracle: Oracle, loaded, one_thread
) -> None:
    config = write_policy and KVTierConfig(6, 9, write_policy=write_policy)
    engine = engine_of(loaded, kind, config, preempt_every=7)
    serve(engine, oracle, [0, 1, 2], 3, salt="b")
    tiers = engine.prefix_cache.listener
    if isinstance(tiers, TieredCache):  # what went down before has no tokens here
        assert engine.reset_prefix_cache()
        tiers.host._blocks.clear()
        for name in list(tiers.disk._slots):
            tiers.disk.drop((name, ()))
    changes, index = observed(engine.prefix_cache)
    seen = set[str]()

    def look(_: object) -> None:
        events = check(changes, index, engine.prefix_cache)
        seen.update(f"{event['type']} {event.get('medium')}" for event in events)
        if isinstance(tiers, TieredCache):
            assert {medium: index.places.get(medium, set()) for medium in (CPU, STORAGE)} == (
                tiers_of(tiers)
            )

    engine.on_step = look
    serve_a_crowd(engine, oracle, random.Random(5), 5, salts=[None, "a", "b"], num_requests=20)
    media = [GPU, CPU, STORAGE] if config else [GPU]
    expected = {f"{kind} {medium}" for medium in media for kind in ("BlockStored", "BlockRemoved")}
    assert seen >= expected and engine.stats().num_preemptions
    assert engine.reset_prefix_cache()
    look(None)
    assert not index.places.get(GPU)
    serve(engine, oracle, [0], 2)
    seen.clear()
    engine.kv_manager.clear()
    look(None)
    assert "AllBlocksCleared None" in seen and not index.places.get(GPU)
    engine.close()


def test_a_block_that_goes_down_is_never_nowhere(oracle: Oracle, loaded, one_thread) -> None:
    engine = engine_of(loaded, "hash", KVTierConfig(40))
    serve(engine, oracle, [0, 1], 2)
    changes, index = observed(engine.prefix_cache)
    check(changes, index, engine.prefix_cache)
    engine.prefix_cache.evict(2)
    events = [
        (event["type"], event["medium"]) for event in check(changes, index, engine.prefix_cache)
    ]
    *stored, removed = events
    assert stored and set(stored) == {("BlockStored", CPU)} and removed == ("BlockRemoved", GPU)
    changes.take_out()
    assert engine.prefix_cache.listener.host.on_change is ignore_change
    engine.close()


def test_a_tier_s_block_of_an_earlier_process_is_published_once_its_tokens_are_known(
    oracle: Oracle, loaded, tmp_path: Path, one_thread
) -> None:
    tiers = KVTierConfig(2, 40, disk_path=tmp_path / "disk")
    first = engine_of(loaded, "hash", tiers)
    serve(first, oracle, [0, 1], 2)
    assert first.reset_prefix_cache()
    first.close()
    engine = engine_of(loaded, "hash", tiers)
    changes, index = observed(engine.prefix_cache)
    assert take(changes, index) == [CLEARED] and len(changes._below[STORAGE]) > 4
    (output,) = serve(engine, oracle, [0], 2)
    assert output.num_cached_tokens
    check(changes, index, engine.prefix_cache)
    assert len(index.places[STORAGE]) >= output.num_cached_tokens // 4
    engine.close()


def test_a_corrupt_record_is_published_as_removed(oracle: Oracle, loaded, one_thread) -> None:
    """By the thread that reads."""
    engine = engine_of(loaded, "hash", KVTierConfig(0, 40))
    changes, index = observed(engine.prefix_cache)
    serve(engine, oracle, [0], 2)
    assert engine.reset_prefix_cache()
    check(changes, index, engine.prefix_cache)
    before, disk = set(index.places[STORAGE]), changes._below[STORAGE]
    disk._map[-disk._record_nbytes * 40 :] = bytes(disk._record_nbytes * 40)
    serve(engine, oracle, [0], 2)
    check(changes, index, engine.prefix_cache)
    assert before - index.places[STORAGE] and disk.num_corrupt
    assert index.places[STORAGE] == set(map(wire_hash, disk._slots))
    engine.close()
