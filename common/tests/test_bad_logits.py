"""A model that answers NaN for one request: it ends with an error, and nobody else notices, not
even who asks for the same prompt later."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan

import pytest

from common.engine import EngineConfig, LLMEngine
from common.tests.engine_oracle import Oracle, finish, paged_runner, spoil_kv
from global_kv_pool import GlobalKVPool
from pool_connector import PoolConnector
from request import SamplingParams
from tiered_cache import KVTierConfig

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
GUESSES = {"num_spec_tokens": 3, "adaptive": False}
ENGINES = {
    "fcfs": {"scheduler": "fcfs", "prefix_cache": None},
    "two_phase": {},
    "chunks": {"chunked_prefill": 5, "shuffle_batch": True},
    "a step ahead": {"overlap_scheduling": True, "scheduler": "prefill_first"},
    "ngram": {"speculative": {"method": "ngram", **GUESSES}},
    "draft": {"speculative": {"method": "draft", **GUESSES}},
}


def make_engine(loaded, name: str, **config: object) -> LLMEngine:
    base = {"block_size": 4, "num_blocks": 300, "chunked_prefill": False, "check_invariants": True}
    return LLMEngine(EngineConfig(**base | ENGINES[name] | config), loaded=loaded, draft=loaded)


def spoil(engine: LLMEngine, request_id: str, position: int, value: float = nan) -> None:
    """The logits from which the request's output token number `position` is to be chosen."""
    runner = paged_runner(engine)
    forward = runner.forward

    def spoiled(batch):
        logits = forward(batch).clone()
        sampling = batch.sampling
        for row, name in enumerate(sampling.req_ids):
            if name == request_id and sampling.num_outputs[row] == position:
                logits[row] = value
        return logits

    runner.forward = spoiled


@pytest.mark.parametrize(("position", "value"), [(0, nan), (6, -inf)])
@pytest.mark.parametrize("name", ENGINES)
def test_request_without_usable_logits_ends_alone_with_an_error(
    name: str, position: int, value: float, family_oracle: Oracle, family_loaded
) -> None:
    """However many tokens a step may yield, it keeps those that came before; the other one of two
    samples goes on."""
    engine = make_engine(family_loaded, name)
    spoil(engine, "1", position, value)
    for i in range(4):
        engine.add_request(str(i), family_oracle.prompts[i], replace(GREEDY, logprobs=i % 2))
    spoil(engine, "two#1", position, value)
    engine.add_request("two", family_oracle.prompts[3], replace(GREEDY, n=2))
    outputs = finish(engine)
    bad, two = outputs.pop("1"), outputs.pop("two")
    assert [c.finish_reason for c in two.outputs] == ["length", "error"]
    assert [len(c.token_ids) for c in two.outputs] == [12, position]
    (completion,) = bad.outputs
    assert (completion.finish_reason, completion.stop_reason) == ("error", None)
    assert "no finite maximum" in bad.metrics.finish_detail
    assert completion.token_ids == family_oracle.expected(1, position)
    assert len(completion.logprobs) == position
    for request_id, output in outputs.items():
        assert output.outputs[0].token_ids == family_oracle.expected(int(request_id), 12)
        assert output.metrics.finish_detail is None
    assert engine.stats().kv_blocks_in_use == 0


SHARED = {
    "hash": lambda: {"prefix_cache": "hash"},
    "radix": lambda: {"prefix_cache": "radix"},
    "tiers": lambda: {"kv_tiers": KVTierConfig(100)},
    "pool": lambda: {"kv_connector": PoolConnector(GlobalKVPool(100))},
}


@pytest.mark.parametrize("cache", SHARED)
@pytest.mark.parametrize("name", ["chunks", "ngram"])
def test_bad_kv_is_not_shared(name: str, cache, family_oracle: Oracle, family_loaded) -> None:
    """Who shares it when it happens ends too, or computes it, and leaves nothing bad either. The
    tiers and the pool neither load nor take any of it again."""
    engine = make_engine(family_loaded, name, **SHARED[cache]())
    prompt = family_oracle.prompts[3]
    expected = family_oracle.expected(3, 12)
    spoil_kv(engine, "bad")
    for request_id in ("bad", "same"):
        engine.add_request(request_id, prompt, GREEDY)
    outputs = {r: o.outputs[0] for r, o in finish(engine).items()}
    assert outputs["bad"].finish_reason == "error"
    assert outputs["same"].finish_reason == "error" or outputs["same"].token_ids == expected
    is_refused = cache in ("tiers", "pool")
    has_found_it = outputs["same"].finish_reason == "error"
    for is_computed in (has_found_it, is_refused):
        num_cached = 0 if is_computed else len(prompt) - 1
        (found,) = engine.generate_batch([prompt], GREEDY).values()
        assert found.outputs[0].token_ids == expected
        assert found.num_cached_tokens == num_cached // 4 * 4
        assert not is_refused or engine.reset_prefix_cache()
    engine.close()
