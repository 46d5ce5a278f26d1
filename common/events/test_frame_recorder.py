"""Recording between steps, at errors and at its end; and of any cache that keeps the contract."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import prefix_cache_local
from block_pool import Block
from common.engine import LLMEngine
from common.engine_config import EngineConfig
from common.events import text_deltas
from common.events.listener_chain import listener_of, observe
from common.events.memory_changes import MemoryChanges
from common.serve.kv_events import CacheChanges
from common.tests.engine_oracle import finish, paged_runner
from common.tests.film_runs import (
    RecordedRun,
    Workshop,
    check_film,
)
from policies import SchedulePolicy
from prefix_cache import CachedPrefix, HasBlockId, PrefixCache, PrefixKey
from request import Request, RequestStatus, SamplingParams
from tiered_cache import KVTierConfig
from workshop.watch.replay.film import Film

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SMALL = {"block_size": 4, "num_blocks": 40, "max_num_batched_tokens": 64, "max_num_seqs": 4}


def make_engine(loaded, **config) -> LLMEngine:
    return LLMEngine(EngineConfig(**{**SMALL, "check_invariants": True, **config}), loaded=loaded)


def tokens_of(outputs) -> dict[str, list[int]]:
    return {name: output.outputs[0].token_ids for name, output in outputs.items()}


def moments(path: Path) -> list[str]:
    """The `at` of each frame."""
    return [line["at"] for line in Film.read(path).lines]


def serve_unwatched(engine: LLMEngine, prompts: list[list[int]]) -> dict[str, list[int]]:
    for number, prompt in enumerate(prompts):
        engine.add_request(f"r{number}", prompt, GREEDY)
    return tokens_of(finish(engine))


def test_a_recorded_run_ends_where_an_interrupt_makes_state_inconsistent(
    random_loaded, monkeypatch, tmp_path: Path
) -> None:
    """State that is rebuilt is not an event. In other places the recorded run continues, with a
    failure."""
    prompts = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8]]
    plain = serve_unwatched(make_engine(random_loaded), prompts)
    engine, path = make_engine(random_loaded), tmp_path / "run.jsonl"
    engine.watch(path)
    for place, is_inconsistent in ((paged_runner(engine), False), (engine.kv_manager, True)):
        engine.add_request("gone", [9, 8, 7], GREEDY)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            name = "allocate_slots" if is_inconsistent else "forward"
            patch.setattr(place, name, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            engine.step()
        (aborted,) = finish(engine).values()
        assert aborted.outputs[0].finish_reason == ("length" if is_inconsistent else "abort")
        assert serve_unwatched(engine, prompts) == plain
        found = moments(path)
        assert found.count("failed") == 1 + is_inconsistent
        assert (found[-1] == "failed") is is_inconsistent
    assert not vars(engine.kv_manager.pool).keys() & {"allocate", "free"}
    engine.watch(path)
    assert moments(path) == ["start"]


class ShortFile(io.StringIO):
    """A disk that is full after some lines."""

    def write(self, text: str) -> int:
        if self.tell() > 2000:
            raise OSError("no space left on device")
        return super().write(text)


def test_a_film_that_cannot_be_written_ends_no_request(random_loaded, caplog) -> None:
    engine = make_engine(random_loaded)
    plain = serve_unwatched(engine, [[3, 1, 4, 1, 5]])
    engine.watch(ShortFile())
    for _ in range(4):
        assert serve_unwatched(engine, [[3, 1, 4, 1, 5]]) == plain
    assert caplog.text.count("the run is not recorded any more") == 1
    engine.unwatch()
    engine.watch(ShortFile())
    engine.close()


def test_an_engine_that_cannot_be_recorded_is_left_unchanged(random_loaded, monkeypatch) -> None:
    engine = make_engine(random_loaded)
    plugins, inner, parts = engine.scheduler.plugins, engine.scheduler, vars(engine.kv_manager.pool)
    before = dict(parts)
    monkeypatch.setattr("common.events.frame_recorder.read_frame", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.watch(io.StringIO())
    assert (engine.scheduler.plugins, engine.recorder.scheduler) == (plugins, inner)
    assert parts == before


def test_nothing_is_written_while_state_is_changed(random_loaded) -> None:
    """Writing would count as part of a step, and an interrupt in it would cost the cache."""

    class Looking(io.StringIO):
        def write(self, text: str) -> int:
            torn.append(engine.recorder.is_inconsistent)
            return super().write(text)

    engine, stream, torn = make_engine(random_loaded), Looking(), list[bool]()
    engine.watch(stream)
    torn.clear()
    engine.add_request("a", [1, 2, 3], GREEDY)
    finish(engine)
    engine.unwatch()
    finish_again = serve_unwatched(engine, [[1, 2, 3]])
    assert len(torn) == 8 and not any(torn) and finish_again and not stream.closed


class Counting(SchedulePolicy):
    """A key may count: it is asked once, when a request comes."""

    name = "counting"

    def __init__(self) -> None:
        self.num_asked = 0

    def key(self, request: Request) -> int:
        self.num_asked += 1
        return self.num_asked


def test_a_policy_is_asked_once_with_any_number_of_recorders(random_loaded, tmp_path: Path) -> None:
    policy, path = Counting(), tmp_path / "run.jsonl"
    engine = make_engine(random_loaded, policy=policy)
    for name in "abc":
        engine.add_request(name, [1, 2, 3], GREEDY)
    engine.watch(path)
    engine.add_request("d", [1, 2, 3], GREEDY)
    assert policy.num_asked == 4
    engine.step()
    rows = Film.read(path).requests()
    assert {name: row["order_key"] for name, row in rows.items()} == dict(zip("abcd", "1234"))


def test_a_recorder_from_the_start_needs_no_snapshot(random_loaded, tmp_path: Path) -> None:
    engine, path = make_engine(random_loaded), tmp_path / "run.jsonl"
    engine.watch(path)
    assert moments(path) == []
    engine.add_request("a", [1, 2, 3], GREEDY)
    engine.watch(path)
    (line,) = Film.read(path).lines
    assert line["at"] == "start"
    assert list(line["changes"]["requests"]) == line["changes"]["waiting"][1] == ["a"]


def test_an_engine_that_is_watched_no_more_is_as_it_was(random_loaded, tmp_path: Path) -> None:
    """Part by part."""
    engine = make_engine(
        random_loaded, policy="lpm", prefix_cache="radix", kv_tiers=KVTierConfig(8)
    )
    memory, base_scheduler, recorder = engine.kv_manager, engine.scheduler, engine.recorder

    def parts() -> list:
        found = [vars(part).copy() for part in (memory.pool, memory.cache, memory.loads)]
        return [*found, recorder.scheduler, base_scheduler.plugins, base_scheduler.waiting.policy,
                memory.cache.tree.on_split]  # fmt: skip

    before = parts()
    engine.watch(tmp_path / "run.jsonl")
    assert all(old != new for old, new in zip(before, parts(), strict=True))
    engine.unwatch()
    engine.unwatch()
    assert all(old is new or old == new for old, new in zip(before[3:], parts()[3:], strict=True))
    for old, new in zip(before[:3], parts()[:3]):
        assert old.keys() == new.keys()
        assert type(old.get("listener")) is type(new.get("listener"))


@pytest.mark.parametrize("is_recorded_first", [False, True])
@pytest.mark.parametrize("is_removed_first", [False, True])
def test_a_recorder_and_kv_events_observe_one_cache(
    is_recorded_first: bool, is_removed_first: bool, random_loaded, tmp_path: Path
) -> None:
    """Recorders start and stop in any order; both record the tiers."""
    engine, path = make_engine(random_loaded, kv_tiers=KVTierConfig(8)), tmp_path / "run.jsonl"
    cache, recorded = engine.prefix_cache, RecordedRun(path)
    tiers = cache.listener
    if is_recorded_first:
        engine.watch(path)
    changes = CacheChanges(cache)
    changes.put_in()
    if not is_recorded_first:
        engine.watch(path)
    assert listener_of(cache) is tiers and changes._below
    serve_unwatched(engine, [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8]])
    recorded.look(engine)
    check_film(recorded)
    assert len(changes._hashes) == len(recorded.frame["cached"]) > 1
    if is_removed_first:
        engine.unwatch()
    changes.take_out()
    assert (cache.listener is tiers) is is_removed_first
    engine.unwatch()
    assert cache.listener is tiers


@pytest.mark.parametrize(
    ("event", "order"),
    [
        ("block_cached", ["observer", "tiers"]),
        ("blocks_evicted", ["tiers", "observer"]),
        ("blocks_invalidated", ["tiers", "observer"]),
    ],
)
def test_observers_know_a_block_before_the_tiers_copy_it_and_until_it_is_removed(
    event: str, order: list[str]
) -> None:
    """Also if the tiers raise: the block has left the cache all the same."""
    calls: list[str] = []

    def fail(*_: object) -> None:
        calls.append("tiers")
        raise OSError("no space left on device")

    cache: Any = SimpleNamespace(listener=SimpleNamespace(**{event: fail}))
    observe(cache, SimpleNamespace(**{event: lambda *_: calls.append("observer")}))  # type: ignore[arg-type]
    with pytest.raises(OSError):
        getattr(cache.listener, event)(*[None] * (4 if event == "block_cached" else 1))
    assert calls == order


@pytest.mark.parametrize(
    ("status", "rest"),
    [(RequestStatus.FINISHED_ERROR, "\ufffd"), (RequestStatus.FINISHED_STOPPED, "")],
)
def test_the_undecoded_rest_of_a_request_that_fails_has_no_token(
    status: RequestStatus, rest: str, random_loaded
) -> None:
    """Otherwise the last token of the step brings it."""
    engine = make_engine(random_loaded)
    engine.watch(io.StringIO())
    engine.add_request("a", [1, 2, 3], GREEDY)
    recorder, request = engine._plugins["watch"], engine.scheduler.requests["a"]
    recorder._texts = SimpleNamespace(end=lambda request: "\ufffd")
    recorder._is_updating, request.status = True, status
    recorder._finished(request)
    assert recorder._finishes["a"]["rest"] == rest


def test_the_last_token_adds_what_is_left_to_decode(shipped_tokenizer) -> None:
    texts, ids = text_deltas.TextDeltas({}, shipped_tokenizer), shipped_tokenizer.encode("a😀")[:-1]
    request, rest = Request.from_tokens("a", ids), [""] * (len(ids) - 2)
    assert texts.begin(request) == ["a", *rest, "\ufffd"]
    assert texts.add(request, ids[:-1]) == ["a", *rest]
    request.status = RequestStatus.FINISHED_LENGTH_CAPPED
    assert texts.add(request, ids[-1:]) == ["\ufffd"]


def test_a_loaded_block_is_the_loads_whatever_request_is_considered_then(random_loaded) -> None:
    """Viewers read the tokens of a block by the request that published it."""
    engine, stream = make_engine(random_loaded), io.StringIO()
    engine.watch(stream)
    changes: MemoryChanges = engine._plugins["watch"].memory
    engine.kv_manager.current_req_id = "considered"
    rows: list[dict] = [{}, {}]
    blocks = engine.kv_manager.pool.blocks
    with changes.acting_for("loads"):
        changes._enter(blocks[1], rows[0])
    changes._enter(blocks[2], rows[1])
    assert [row["by"] for row in rows] == ["loads", "considered"]


def test_the_last_memory_change_is_recorded(random_loaded, tmp_path: Path) -> None:
    """An interrupt comes before the purpose of the change is known."""
    engine, path = make_engine(random_loaded), tmp_path / "run.jsonl"
    engine.watch(path)
    engine.add_request("a", [1, 2, 3], GREEDY)
    engine.step()
    engine.kv_manager.free(engine.scheduler.requests["a"])
    engine.unwatch()
    assert "a" not in Film.read(path).last_state()["tables"]


def test_a_plan_of_an_aborted_request_is_not_its_successors(random_loaded, tmp_path: Path) -> None:
    """A new request may have the same name."""
    engine = make_engine(random_loaded, overlap_scheduling=True)
    for name in "ab":
        engine.add_request(name, [1, 2, ord(name) - 90], GREEDY)
    engine.step()
    engine.abort_request("a")
    engine.add_request("a", [5, 6, 7], GREEDY)
    recorded = RecordedRun(tmp_path / "run.jsonl")
    engine.watch(recorded.path)
    plans = Film.read(recorded.path).last_state()["in_flight"].values()
    assert [plan["requests"] for plan in plans] == [["b"]]
    while engine.has_unfinished_requests():
        recorded.look(engine)
        engine.step()
    check_film(recorded)


def test_a_recorded_run_that_starts_after_a_preemption_knows_the_lost_tokens(
    random_loaded, tmp_path: Path
) -> None:
    """So that it is seen to be computed again."""
    engine, path = make_engine(random_loaded, preempt_every=4), tmp_path / "run.jsonl"
    for name in "ab":
        engine.add_request(name, [1, 2, ord(name) - 90], GREEDY)
    while not engine.stats().num_preemptions:
        engine.step()
    (gone,) = engine.scheduler.waiting
    assert gone.output_token_ids and gone.num_computed_tokens == 0
    engine.watch(path)
    while gone.request_id not in engine.scheduler.running:
        engine.step()
    bounds = [plan.get("recomputed", {}) for step in Film.read(path).steps() for plan in step.plans]
    assert {gone.request_id: gone.num_tokens - 2} in bounds  # one token was added since


# -- parts of a user


class SuffixFreeCache(PrefixCache):
    """A third index: a dictionary from a whole prefix to its block, in order of last use."""

    def __init__(self, pool, block_size, listener=None) -> None:
        super().__init__(pool, block_size, listener)
        self.entries: dict[tuple, Block] = {}

    def _entry(self, block: HasBlockId) -> tuple:
        if block.block_id not in self._by_block_id:
            raise ValueError(f"block {block.block_id} is not cached")
        return self._by_block_id[block.block_id]

    def _mark_used(self, blocks: list[Block]) -> None:
        for block in reversed(blocks):
            if block.ref_cnt == 1:
                entry = self._entry(block)
                self.entries[entry] = self.entries.pop(entry)

    def touch(self, blocks) -> None:
        self.pool.touch([self.entries[self._entry(block)] for block in blocks])

    def release(self, blocks) -> None:
        held = [self.entries[self._entry(block)] for block in blocks]
        self.pool.free(held)
        self._mark_used(held)

    def _key(self, key: PrefixKey, index: int) -> tuple:
        return (key.keys, tuple(key.token_ids[: (index + 1) * self.block_size]))

    def _match(self, key: PrefixKey, begin: int, end: int) -> list[Block]:
        found = []
        for index in range(begin, end):
            if (block := self.entries.get(self._key(key, index))) is None:
                break
            found.append(block)
        return found

    def _insert(self, key: PrefixKey, first: int, parent, blocks: list[Block]) -> None:
        for index, block in enumerate(blocks, first):
            entry = self._by_block_id[block.block_id] = self._key(key, index)
            self.entries[entry] = block

    def _idle(self) -> list[Block]:
        return [block for block in self.entries.values() if block.ref_cnt == 1]

    def _pop_lru(self, num_blocks: int) -> list[Block]:
        gone = self._idle()[:num_blocks]
        for block in gone:
            del self.entries[self._entry(block)]
        return gone

    def clear(self) -> None:
        super().clear()
        self.entries.clear()

    def _remove_subtree(self, block: HasBlockId) -> list[Block]:
        keys, tokens = self._entry(block)
        after = [e for e in self.entries if e[0] == keys and e[1][: len(tokens)] == tokens]
        return [self.entries.pop(e) for e in sorted(after, key=lambda e: -len(e[1]))]

    @property
    def num_evictable_blocks(self) -> int:
        return len(self._idle())

    def cached_prefixes(self) -> Iterator[CachedPrefix]:
        used = [block for block in self.entries.values() if block.ref_cnt > 1]
        for block in [*used, *self._idle()]:
            yield CachedPrefix(*self._entry(block), block)

    def check_invariants(self) -> None:
        assert len(self.entries) == len(self._by_block_id)


def test_a_third_cache_is_watched(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_cache_local, "PrefixCacheLocal", SuffixFreeCache)
    for seed in (4, 5):
        recorded = workshop.run(seed, num_blocks=40, block_size=3, max_num_seqs=4)
        check_film(recorded)
        found = [
            happened for step in Film.read(recorded.path).steps() for happened in step.happened
        ]
        assert any(happened["shared"] for happened in found) and any(
            happened["published"] for happened in found
        )
