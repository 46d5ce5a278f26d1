"""Every role of `LLM(...)` takes a part of one's own instead of a name. It is used, and greedy
tokens are those of `transformers`, in float64."""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Sequence
from pkgutil import resolve_name
from typing import Any

import pytest
import torch

from block_pool import BlockPool
from common.assembly.scheduler_assembly import SchedulerParts
from common.engine import EngineConfig, LLMEngine
from common.engine_config import (
    ATTENTION_BACKENDS,
    LAZY_ENGINE_PLUGINS,
    LAZY_PLUGINS,
    PREFIX_CACHES,
    PROPOSERS,
    SCHEDULERS,
)
from common.tests.engine_oracle import MAX_TOKENS, checked_engine, serve
from mixed_attention import MixedAttentionBackend
from policies import FCFSPolicy, SchedulePolicy
from prefix_cache import CachedPrefix
from prefix_cache_local import PrefixCacheLocal
from proposers import ProposerInput
from radix_cache import RadixCache
from request import Request
from scheduler import Scheduler
from step_plan import PreemptiveSchedulerOutput
from unchunked import ChunkToBudget

EVERYONE = [0, 3, 5, 6, 7, 2]


class Counting:
    num_calls = 0


class ShortestFirst(Counting, SchedulePolicy):
    name = "shortest-first"

    def key(self, request: Request) -> int:
        self.num_calls += 1
        return request.num_prompt_tokens


class FiveAtATime(Counting, ChunkToBudget):
    """Wants to know what steps take, so no step is planned before the last one is over."""

    num_observed = 0

    def num_tokens_to_schedule(
        self, request: Request, num_uncomputed_tokens: int, budget: int, max_step_tokens: int
    ) -> int:
        self.num_calls += 1
        return min(num_uncomputed_tokens, budget, 5)

    def observe_step(
        self, starts: Sequence[int], num_tokens: Collection[int], step_ms: float
    ) -> None:
        assert len(starts) == len(num_tokens) and step_ms > 0
        self.num_observed += 1


class SayItAgain(Counting):
    """Guesses that the last token comes again and again."""

    num_spec_tokens = 3
    num_lookahead_tokens = 0

    def propose(
        self, inputs: Sequence[ProposerInput], num_drafts: Sequence[int]
    ) -> dict[str, list[int]]:
        self.num_calls += 1
        requests = [f.request for f in inputs]
        lasts = [r.tokens(r.num_tokens - 1, r.num_tokens) for r in requests]
        return {r.req_id: last * n for r, last, n in zip(requests, lasts, num_drafts)}

    def draft_probs(self, request_id: str) -> torch.Tensor | None:
        return None

    def remove_request(self, request_id: str) -> None:
        pass


class CountedBackend(Counting, MixedAttentionBackend):
    def plan(self, *what: Any) -> Any:
        self.num_calls += 1
        return super().plan(*what)


class CountedCache(PrefixCacheLocal):
    num_calls = 0

    def __init__(self, pool: Any, block_size: int, listener: Any = None) -> None:
        super().__init__(pool=pool, block_size=block_size, listener=listener)

    def insert(self, *args: Any, **how: Any) -> CachedPrefix:
        type(self).num_calls += 1
        return super().insert(*args, **how)


class CountedScheduler(Scheduler):
    num_calls = 0

    def schedule(self) -> PreemptiveSchedulerOutput:
        type(self).num_calls += 1
        return super().schedule()


def make_counted_scheduler(parts: SchedulerParts) -> Scheduler:
    return CountedScheduler(*parts.limits, policy=parts.policy, **parts.options)


ROLES = {
    "policy": ShortestFirst,
    "chunked_prefill": FiveAtATime,
    "speculative": SayItAgain,
    "attention_backend": CountedBackend,
}
MAKERS = {"prefix_cache": CountedCache, "scheduler": make_counted_scheduler}


def engine_with(loaded, **parts: Any) -> LLMEngine:
    return checked_engine(loaded, **{"block_size": 4, "num_blocks": 200} | parts)


def test_all_roles_at_once(oracle, loaded) -> None:
    """What a function makes is another one in each engine; a proposer may stand in the dict."""
    parts = {field: make() for field, make in ROLES.items()}
    how = dict(preempt_every=3, overlap_scheduling=True, **MAKERS)
    engine = engine_with(loaded, **parts, **how)
    serve(engine, oracle, EVERYONE, MAX_TOKENS)
    assert all(part.num_calls for part in (*parts.values(), CountedCache, CountedScheduler))
    assert parts["chunked_prefill"].num_observed == engine.stats().num_steps
    assert engine.stats().num_preemptions > 0 and engine.stats().num_drafted_tokens > 0
    how |= dict(attention_backend=parts["attention_backend"], policy=f"{__name__}:ShortestFirst")
    other = engine_with(loaded, **how, speculative={"method": SayItAgain()})
    serve(other, oracle, EVERYONE, MAX_TOKENS)
    serve(engine, oracle, EVERYONE, MAX_TOKENS)
    assert other.config.num_rows_per_request == 1 + SayItAgain.num_spec_tokens
    assert engine.scheduler is not other.scheduler
    assert engine.prefix_cache is not other.prefix_cache


def test_an_own_policy_says_who_is_first(oracle, loaded, tmp_path) -> None:
    engine = engine_with(loaded, policy=ShortestFirst(), max_num_seqs=1, events=tmp_path / "film")
    order: list[str] = []
    engine.on_step = lambda record: order.extend(record.num_scheduled_tokens)
    serve(engine, oracle, EVERYONE, 1)
    engine.close()
    lengths = [len(oracle.prompts[EVERYONE[int(name.split("-")[1])]]) for name in order]
    assert lengths == sorted(lengths) and len(set(lengths)) > 3
    run = json.loads((tmp_path / "film").read_text().splitlines()[0])
    assert run["policy"] == run["config"]["policy"] == "shortest-first"


# -- what is refused


@pytest.mark.parametrize("field", ["policy", "chunked_prefill", "speculative"])
def test_a_part_with_state_is_one_engines(field, oracle, loaded) -> None:
    part = ROLES[field]()
    engine = engine_with(loaded, **{field: part})
    with pytest.raises(ValueError, match=f"^{field} must belong to this engine.*; make one"):
        engine_with(loaded, **{field: part})
    serve(engine, oracle, EVERYONE, MAX_TOKENS)


@pytest.mark.parametrize(
    ("field", "make", "said"),
    [
        ("prefix_cache", lambda **_: CountedCache(BlockPool(9), 4), "got .*CountedCache"),
        ("prefix_cache", lambda pool, **_: RadixCache(8, pool), "got .*RadixCache"),
        ("scheduler", lambda parts: Scheduler(*parts.limits), "kv_memory, got .*Scheduler"),
        ("scheduler", lambda parts: None, "None"),
    ],
)
def test_a_maker_that_gives_what_is_not_this_engines_is_refused(field, make, said, loaded) -> None:
    with pytest.raises(ValueError, match=f"{field} must .*{said}"):
        engine_with(loaded, **{field: make})


OWN = {field: make() for field, make in ROLES.items()}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"policy": FCFSPolicy}, "policy must be .*an instance of.*fcfs.*, got <class"),
        ({"policy": "request:Request"}, "policy must be .*, got 'request:Request'"),
        ({"policy": SchedulePolicy()}, "policy must .*define key, or set is_cache_aware"),
        ({"scheduler": 5}, "scheduler must be .*two_phase.*, got 5"),
        ({"attention_backend": SayItAgain()}, "attention_backend must be .*torch.*, got"),
        ({"chunked_prefill": FiveAtATime}, "chunked_prefill must be .*True.*, got"),
        ({"speculative": {"method": "magic"}}, "method must be .*ngram.*, got 'magic'"),
        ({"speculative": {"method": FiveAtATime()}}, "method must be .*, got"),
        ({"speculative": ..., "tensor_parallel_size": 2}, "speculative must .*in other processes"),
        ({"attention_backend": ..., "batch_invariant": True}, ".*backend must .*batch_invariant"),
        ({"speculative": ..., "scheduler": "fcfs"}, "speculative must .*with scheduler"),
        ({"chunked_prefill": ..., "scheduler": "fcfs"}, "chunked_prefill must .*with scheduler"),
        ({"chunked_prefill": ..., "target_step_ms": 5}, "target_step_ms must .*its own"),
        ({"chunked_prefill": ..., "pipeline_parallel_size": 2}, ".* must .*durations"),
    ],
)
def test_what_is_no_part_or_does_not_go_with_one_is_refused(config, said) -> None:
    config = {field: OWN[field] if value is ... else value for field, value in config.items()}
    with pytest.raises(ValueError, match=f"^{said}"):
        EngineConfig(**config)


def test_every_name_leads_somewhere() -> None:
    tables = SCHEDULERS, PREFIX_CACHES, PROPOSERS, LAZY_PLUGINS, LAZY_ENGINE_PLUGINS
    places = [place for table in tables for place in table.values()]
    for place in (*places, *itertools.chain(*ATTENTION_BACKENDS.values())):
        assert callable(resolve_name(place))
