"""Runs that are filmed: random workloads, what the engine was after each of their steps, and what a
film rebuilds."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.engine import LLMEngine
from common.engine_config import EngineConfig
from common.events.event_kinds import read_events
from common.events.event_log import label_of
from common.requests.tokenizer import Tokenizer
from common.tests.engine_oracle import MAX_TOKENS, Oracle, paged_runner
from grouped_kv_memory import GroupedKVMemory
from grouped_prefix_cache import GroupedPrefixCache
from loading_kv_cache_manager import LoadingKVCacheManager
from prefix_cache import PrefixCache
from prefix_cache_local import PrefixCacheLocal
from radix_cache import RadixCache
from request import SamplingParams
from tiered_cache import KVTierConfig, TieredCache
from workshop.watch.replay.film import State

# -- the engine's own state, and the film's, as the same plain data


def state_of_engine(engine: LLMEngine) -> dict[str, Any]:
    manager, scheduler = engine.kv_manager, engine.scheduler
    pool, cache = manager.pool, cache_of(engine)
    state = {
        "ref_cnt": [block.ref_cnt for block in pool.blocks],
        "free": [block.block_id for block in pool.free_order()],
        "tables": _tables_of(manager),
        "waiting": queue_of(engine),
        "running": list(scheduler.running),
        "computed": {n: r.num_computed_tokens for n, r in scheduler.requests.items()},
        "cached tokens": {n: r.num_cached_tokens for n, r in scheduler.requests.items()},
        "preemptions": {n: r.num_preemptions for n, r in scheduler.requests.items()},
        "outputs": {n: list(r.output_token_ids) for n, r in scheduler.requests.items()},
        "limits": {n: r.max_tokens for n, r in scheduler.requests.items()},
        "under way": len(getattr(engine.core, "_in_flight", ())),
        "cached": {},
        "eviction order": [],
        "nodes": [],
        "loads": {},
        "loaded": {},
    }
    if isinstance(cache, GroupedPrefixCache):
        known = {prefix.block.block_id: prefix for prefix in cache.cached_prefixes()}
        state["eviction order"] = [block for block in state["free"] if block in known]
        state["hashes"] = {b: p.key[1].hex()[:8] for b, p in known.items()}
        state["cached"] = {b: (p.chain[p.index][1], p.group, p.index) for b, p in known.items()}
    elif cache is not None:
        for prefix in cache.cached_prefixes():
            name = prefix.block.block_id
            state["cached"][name] = (prefix.token_ids, label_of(prefix.extra_keys))
        state["hashes"] = {}
        if isinstance(cache, RadixCache):
            nodes = [node for node in cache.tree.nodes() if not node.is_root]
            state["nodes"] = sorted([block.block_id for block in node.blocks] for node in nodes)
            idle = sorted(
                (node for node in nodes if node.lock_ref == 0),
                key=lambda node: (node.last_access, -node.end),
            )
            order = [block for node in idle for block in reversed(node.blocks)]
            state["eviction order"] = [block.block_id for block in order]
        elif isinstance(cache, PrefixCacheLocal):
            state["eviction order"] = list(cache._evictable)
            state["hashes"] = {b: c.block_hash.hex()[:8] for b, c in cache._by_block_id.items()}
        else:  # somebody else's: what the contract says
            idle = [p.block for p in cache.cached_prefixes() if p.num_users == 0]
            state["eviction order"] = [block.block_id for block in idle]
            state["hashes"] = dict.fromkeys(cache.cached_block_ids(), "")
    if isinstance(manager, LoadingKVCacheManager):
        for load in manager.loads.loads():
            name = load.request.request_id
            ids = [[block.block_id for block in blocks] for blocks in (load.prefix, load.blocks)]
            state["loads"][name] = (*ids, load.has_arrived)
        if isinstance(manager.connector, TieredCache):
            stats = manager.connector.stats
            state["loaded"] = {"host": stats.num_host_hits, "disk": stats.num_disk_hits}
    return state


def _tables_of(manager: Any) -> dict[str, list[list[int]]]:
    groups = manager.groups if isinstance(manager, GroupedKVMemory) else [manager]
    names = [name for group in groups for name in group._tables]
    return {name: [list(group.get_block_ids(name)) for group in groups] for name in names}


def cache_of(engine: LLMEngine) -> PrefixCache | None:
    """Its own, and not what looks on."""
    return engine.prefix_cache if engine._watch is None else engine._watch.memory.cache


def queue_of(engine: LLMEngine) -> list[str]:
    """In the order of service. Where the policy looks at the cache, asking is a use of the cache,
    and the answer of the last plan has to do."""
    if engine._watch is not None:
        return engine._watch.requests.queue_order()
    return [request.request_id for request in engine.scheduler.waiting.in_order()]


def state_of_film(state: State) -> dict[str, Any]:
    unfinished = {n: r for n, r in state.requests.items() if r.finish_reason is None}
    has_tree, has_cache = state.run.prefix_cache == "radix", state.run.prefix_cache is not None
    found = {
        "ref_cnt": state.ref_cnt,
        "free": list(state.free),
        "tables": {n: r.tables for n, r in state.requests.items() if any(r.tables)},
        "waiting": state.waiting,
        "running": list(state.running),
        "computed": {n: r.num_computed_tokens for n, r in unfinished.items()},
        "cached tokens": {n: r.num_cached_tokens for n, r in unfinished.items()},
        "preemptions": {n: r.num_preemptions for n, r in unfinished.items()},
        "outputs": {n: r.outputs for n, r in unfinished.items()},
        "limits": {n: r.max_tokens for n, r in unfinished.items()},
        "under way": len(state.under_way),
        "cached": {
            b: (state.prefix_of(b), c.tenant) if c.place is None else (c.tokens, c.group, c.place)
            for b, c in state.cached.items()
        },
        "eviction order": state.eviction_order(),
        "nodes": sorted(state.nodes()) if has_tree else [],
        "loads": {n: (x.prefix, x.blocks, x.has_arrived) for n, x in state.loads.items()},
        "loaded": {name: num for name, num in state.num_loaded.items() if name != "store"},
    }
    if has_cache:
        hashes = {b: c.block_hash for b, c in state.cached.items()}
        found["hashes"] = {} if has_tree else hashes
    return found


def differences(film: dict[str, Any], engine: dict[str, Any]) -> list[str]:
    zeros = {"host": 0, "disk": 0}
    film, engine = ({**s, "loaded": {**zeros, **s["loaded"]}} for s in (film, engine))
    return [
        f"{name}: the film has {film.get(name)}, the engine {engine.get(name)}"
        for name in sorted(film.keys() | engine.keys())
        if film.get(name) != engine.get(name)
    ]


# -- a run, and what the engine was after each of its steps


@dataclass
class RecordedRun:
    path: Path
    states: list[tuple[int, dict[str, Any]]] = field(default_factory=list)  # after so many events
    ends: dict[str, tuple] = field(default_factory=dict)  # by name of a member: how it ended
    num_errors: int = 0
    what: str = ""

    def look(self, engine: LLMEngine) -> None:
        with self.path.open("rb") as file:
            num_events = sum(1 for _ in file) - 1  # the run line is none
        self.states.append((num_events, state_of_engine(engine)))

    def end(self, output: Any) -> None:
        samples = output.outputs
        for completion in samples if output.finished else ():
            name = output.request_id
            name = name if len(samples) == 1 else f"{name}#{completion.index}"
            c = completion
            self.ends[name] = (c.token_ids, c.text, c.finish_reason, c.stop_reason)


def replay(recorded: RecordedRun, without: str | None = None) -> list[str]:
    """Every difference between the film, without the events of one kind, and the engine."""
    run, *events = read_events(recorded.path)
    state, looks = State(run), dict(recorded.states)
    broken: list[str] = []
    try:
        for position, event in enumerate([None, *events]):
            if event is not None and event.kind != without:
                state.apply(event)
            if position in looks:
                found = differences(state_of_film(state), looks[position])
                broken += [f"after {position} events: {sentence}" for sentence in found]
                if broken:
                    return broken
    except (ValueError, KeyError, IndexError) as error:
        return [f"{type(error).__name__}: {error}"]
    for name, end in recorded.ends.items():
        request = state.requests[name]
        reached = (request.outputs, request.text, request.finish_reason, request.stop_reason)
        if reached != end:
            broken.append(f"request {name!r} ended as {reached} in the film, as {end} for the user")
    if len(state.errors) != recorded.num_errors:
        broken.append(f"{len(state.errors)} errors in the film, {recorded.num_errors} in truth")
    return broken


def serve(
    path: Path,
    loaded,
    tokenizer,
    prompts: list[list[int]],
    run_seed: int,
    draft=None,
    first_step: int = 0,
    **config,
) -> RecordedRun:
    """Requests of all kinds come, go, and are aborted between steps and in the middle of them; now
    and then a step fails. The film begins before `first_step`."""
    rng, recorded = random.Random(run_seed), RecordedRun(path)
    settings = EngineConfig(events=None if first_step else path, check_invariants=True, **config)
    engine = LLMEngine(settings, loaded=loaded, tokenizer=tokenizer, draft=draft)
    runner, num_requests = paged_runner(engine), 0
    forward, fails = runner.forward, rng.random() < 0.3
    luck = random.Random(run_seed)  # its own: an overlapped engine computes in another thread

    def failing_forward(batch):
        if luck.random() < 0.05:
            raise RuntimeError("no memory")
        return forward(batch)

    if fails:
        runner.forward = failing_forward

    def on_step(record) -> None:
        if rng.random() < 0.05 and engine._groups:
            engine.abort_request(rng.choice(sorted(engine._groups)))
        if rng.random() < 0.05:
            add_one()

    def add_one() -> None:
        nonlocal num_requests
        params = SamplingParams(
            n=rng.choice([1, 1, 1, 2]),
            temperature=rng.choice([0.0, 1.0]),
            seed=rng.randrange(100),
            max_tokens=rng.randint(1, MAX_TOKENS),
            stop=rng.choice([(), (), ("E", "v2"), ("z",)]) if tokenizer else (),
            stop_token_ids=rng.choice([(), (), (1, 5, 9, 14, 20, 30, 40)]),
        )
        name = rng.choice("abcdefgh") if rng.random() < 0.3 else f"r{num_requests}"
        num_requests += 1
        if name in engine._groups:
            return
        salt = rng.choice([None, None, "mine"])
        prompt, priority = rng.choice(prompts), rng.randint(0, 3)
        try:
            engine.add_request(name, prompt, params, priority=priority, cache_salt=salt)
        except ValueError:
            assert name not in engine._groups  # it would never have fitted

    engine.on_step = on_step
    num_coming = rng.randint(3, 12)
    for step in range(400):
        if 0 < step == first_step:
            recorded = RecordedRun(path)
            engine.watch(path)
            recorded.look(engine)
        if num_requests < num_coming and rng.random() < 0.5:
            add_one()
        if rng.random() < 0.03 and engine._groups:
            output = engine.abort_request(rng.choice(sorted(engine._groups)))
            recorded.end(output)
        if rng.random() < 0.02:
            engine.reset_prefix_cache()
        if num_requests >= num_coming and not engine.has_unfinished_requests():
            break
        try:
            outputs = engine.step()
        except RuntimeError:
            recorded.num_errors += 1
            outputs = []
        if step >= first_step:
            recorded.look(engine)
        for output in outputs:
            recorded.end(output)
    else:
        raise AssertionError(f"seed {run_seed}: it does not end")
    runner.forward = forward
    try:
        engine.close()
    except RuntimeError:  # a step that was under way, and of nobody
        recorded.num_errors += 1
    else:
        recorded.look(engine)
    return recorded


def random_config(rng: random.Random, longest: int) -> dict[str, Any]:
    """Of all that the engine can be, with little memory."""
    scheduler = rng.choice(["two_phase", "two_phase", "prefill_first", "fcfs"])
    size = rng.choice([1, 3, 4, 16])
    needed = -(-(longest + MAX_TOKENS) // size)
    cache = rng.choice(["hash", "radix", "hash", "radix", None])
    config: dict[str, Any] = {
        "scheduler": scheduler,
        "block_size": size,
        "num_blocks": 1 + needed + rng.choice([0, 2, needed // 2, 3 * needed]),
        "prefix_cache": cache,
        "max_num_seqs": rng.choice([1, 2, 4, 64]),
        "max_num_batched_tokens": rng.choice([longest + MAX_TOKENS, 150, 2048]),
        "overlap_scheduling": rng.random() < 0.3,
        "shuffle_batch": rng.random() < 0.5,
        "seed": rng.randrange(5),
    }
    if scheduler == "fcfs":
        config["chunked_prefill"] = False
    else:
        config["policy"] = rng.choice(["fcfs", "priority", "lof", "random", "lpm", "dfs-weight"])
        config["chunked_prefill"] = rng.choice([True, False, 5, 16])
        config["preempt_every"] = rng.choice([None, None, 3, 5])
        config["shuffle_waiting"] = rng.random() < 0.2
        if rng.random() < 0.3:
            method = rng.choice(["ngram", "draft"])
            config["speculative"] = {"method": method, "num_spec_tokens": rng.randint(1, 4)}
        if scheduler == "prefill_first":
            config["mixing"] = rng.random() < 0.5
        elif isinstance(config["chunked_prefill"], int) and config["chunked_prefill"] > 1:
            config["max_long_partial_prefills"] = rng.choice([None, 1])
    if cache is not None and rng.random() < 0.4:
        disk = rng.choice([0, 16])
        policy = rng.choice(["write_back", "write_through"])
        config["kv_tiers"] = KVTierConfig(rng.choice([4, 64]), disk, write_policy=policy)
    return config


def short_prompts(oracle: Oracle, most: int = 50) -> list[list[int]]:
    return [prompt for prompt in oracle.prompts if len(prompt) <= most]


@dataclass(repr=False)
class Workshop:
    """What runs are made of."""

    folder: Path
    loaded: Any
    draft: Any
    tokenizer: Tokenizer
    prompts: list[list[int]]
    num_runs: int = 0

    def run(self, seed: int, **config: Any) -> RecordedRun:
        """With random settings, if none are given."""
        rng = random.Random(seed)
        config = config or random_config(rng, max(map(len, self.prompts)))
        tokenizer = self.tokenizer if rng.random() < 0.8 else None
        self.num_runs += 1
        path = self.folder / f"{self.num_runs}.jsonl"
        recorded = serve(path, self.loaded, tokenizer, self.prompts, seed, self.draft, **config)
        recorded.what = f"seed {seed}: {config}"
        return recorded


def check_film(recorded: RecordedRun) -> None:
    found = replay(recorded)
    assert not found, (str(found)[:3000], recorded.what)
