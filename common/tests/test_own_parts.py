"""Every role of `LLM(...)` takes a part of one's own instead of a name. It is used, and greedy
tokens are those of `transformers`, in float64."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import pytest

from block_pool import BlockPool
from common.engine import EngineConfig, LLMEngine
from common.tests.engine_oracle import MAX_TOKENS, checked_engine, paged_runner, serve
from common.tests.test_speculation_engine import ScriptedProposer, wrong_at
from mixed_attention import MixedAttentionBackend
from policies import FCFSPolicy, SchedulePolicy
from prefix_cache_local import PrefixCacheLocal
from request import Request
from scheduler import Scheduler
from unchunked import ChunkToBudget

EVERYONE = [0, 3, 5, 6, 7, 2]


class ShortestFirst(SchedulePolicy):
    name = "shortest-first"

    def key(self, request: Request) -> int:
        return request.num_prompt_tokens


class FiveAtATime(ChunkToBudget):
    """Wants to know what steps take, so no step is planned before the last one is over."""

    num_observed = 0

    def num_tokens_to_schedule(
        self, request: Request, num_uncomputed_tokens: int, budget: int, max_step_tokens: int
    ) -> int:
        return min(num_uncomputed_tokens, budget, 5)

    def observe_step(
        self, starts: Sequence[int], num_tokens: Collection[int], step_ms: float
    ) -> None:
        assert len(starts) == len(num_tokens) and step_ms > 0
        self.num_observed += 1


class OwnBackend(MixedAttentionBackend):
    pass


class OwnCache(PrefixCacheLocal):
    def __init__(self, pool: Any, block_size: int, listener: Any = None) -> None:
        super().__init__(pool=pool, block_size=block_size, listener=listener)


class OwnScheduler(Scheduler):
    pass


def own(oracle: Any = None) -> dict[str, Any]:
    return {
        "policy": ShortestFirst(),
        "chunked_prefill": FiveAtATime(),
        "speculative": ScriptedProposer(oracle, wrong_at(2)),
        "attention_backend": OwnBackend(),
    }


OWN = own()
MAKERS = {"prefix_cache": OwnCache, "scheduler": OwnScheduler}


def engine_with(loaded, **parts: Any) -> LLMEngine:
    return checked_engine(loaded, **{"block_size": 4, "num_blocks": 200} | parts)


def test_all_roles_at_once(oracle, loaded) -> None:
    """What a function makes is another one in each engine; a proposer may stand in the dict."""
    parts = own(oracle)
    how = dict(preempt_every=3, overlap_scheduling=True, **MAKERS)
    engine = engine_with(loaded, **parts, **how)
    chunks = []
    order = list[str]()
    engine.on_step = lambda record: chunks.extend(record.num_scheduled_tokens.values())
    serve(engine, oracle, EVERYONE, MAX_TOKENS)
    assert max(chunks) == 5 and parts["chunked_prefill"].num_observed == engine.stats().num_steps
    assert engine.stats().num_preemptions > 0 and engine.stats().num_drafted_tokens > 0
    assert paged_runner(engine).backend is parts["attention_backend"]
    how |= dict(attention_backend=parts["attention_backend"], policy=f"{__name__}:ShortestFirst")
    how |= dict(speculative={"method": ScriptedProposer(oracle, wrong_at(0), 3)})
    how |= dict(max_num_seqs=1, preempt_every=None)
    other = engine_with(loaded, **how)
    other.on_step = lambda record: order.extend(record.num_scheduled_tokens)
    serve(other, oracle, EVERYONE, MAX_TOKENS)
    assert other.config.num_rows_per_request == 1 + 3
    lengths = [len(oracle.prompts[EVERYONE[int(name.split("-")[1])]]) for name in order]
    assert lengths == sorted(lengths) and len(set(lengths)) > 3
    serve(engine, oracle, EVERYONE, MAX_TOKENS)
    for made, kind in (("prefix_cache", OwnCache), ("scheduler", OwnScheduler)):
        one, another = (getattr(each, made) for each in (engine, other))
        assert isinstance(one, kind) and isinstance(another, kind) and one is not another


# -- what is refused


@pytest.mark.parametrize(
    ("field", "make", "said"),
    [
        ("prefix_cache", lambda **_: OwnCache(BlockPool(9), 4), "got .*OwnCache"),
        ("prefix_cache", lambda pool, **_: OwnCache(pool, 32), "block_size.*OwnCache"),
        ("scheduler", lambda **_: Scheduler(max_num_seqs=4), "kv_memory, got .*Scheduler"),
        ("scheduler", lambda **_: None, "None"),
    ],
)
def test_a_maker_that_gives_what_is_not_this_engines_is_refused(field, make, said, loaded) -> None:
    with pytest.raises(ValueError, match=f"{field} must .*{said}"):
        engine_with(loaded, **{field: make})


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"policy": FCFSPolicy}, "policy must be .*an instance of.*, got <class"),
        ({"policy": "request:Request"}, "policy must be .*, got 'request:Request'"),
        ({"scheduler": 5}, "scheduler must be .*two_phase.*, got 5"),
        ({"attention_backend": FiveAtATime()}, "attention_backend must be .*torch.*, got"),
        ({"chunked_prefill": FiveAtATime}, "chunked_prefill must be .*ChunkPolicy.*, got"),
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
