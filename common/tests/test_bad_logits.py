"""A model that answers NaN for one request: it ends with an error, and nobody else notices, not
even who asks for the same prompt later."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan

import pytest

from common.engine import EngineConfig, LLMEngine
from common.tests.engine_oracle import Oracle, finish, paged_runner, spoil_kv
from request import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
GUESSES = {"num_spec_tokens": 3, "adaptive": False}
ENGINES = {
    "fcfs": {"scheduler": "fcfs", "prefix_cache": None},
    "two_phase": {},
    "prefill_first": {"scheduler": "prefill_first", "prefix_cache": "radix"},
    "chunks": {"chunked_prefill": 5, "shuffle_batch": True},
    "a step ahead": {"overlap_scheduling": True},
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
        logits, sampling = forward(batch).clone(), batch.sampling
        for row, name in enumerate(sampling.req_ids):
            if name == request_id and sampling.num_outputs[row] == position:
                logits[row] = value
        return logits

    runner.forward = spoiled


@pytest.mark.sample
@pytest.mark.parametrize("value", [nan, inf, -inf])
@pytest.mark.parametrize("position", [0, 1, 6])
@pytest.mark.parametrize("name", ENGINES)
def test_request_without_usable_logits_ends_alone_with_an_error(
    name: str, position: int, value: float, family_oracle: Oracle, family_loaded
) -> None:
    """However many tokens a step may yield, it keeps those that came before."""
    engine = make_engine(family_loaded, name)
    spoil(engine, "1", position, value)
    for i in range(4):
        engine.add_request(str(i), family_oracle.prompts[i], replace(GREEDY, logprobs=i % 2))
    outputs = finish(engine)
    bad = outputs.pop("1")
    completion = bad.outputs[0]
    assert (completion.finish_reason, completion.stop_reason) == ("error", None)
    assert "no finite maximum" in bad.metrics.finish_detail
    assert completion.token_ids == family_oracle.expected(1, position)
    assert len(completion.logprobs) == position
    for request_id, output in outputs.items():
        assert output.outputs[0].finish_reason == "length"
        assert output.outputs[0].token_ids == family_oracle.expected(int(request_id), 12)
        assert output.metrics.finish_detail is None
    assert engine.stats().kv_blocks_in_use == 0


@pytest.mark.parametrize("position", [0, 1, 6])
@pytest.mark.parametrize("name", ["two_phase", "draft"])
def test_others_draw_what_they_would_have_drawn(
    name: str, position: int, family_oracle: Oracle, family_loaded
) -> None:
    """Without seeds of their own: drafts bring probabilities, and are accepted or rejected."""

    def run(is_spoiled: bool) -> dict[str, list[int]]:
        engine = make_engine(family_loaded, name)
        if is_spoiled:
            spoil(engine, "1", position)
        for i in range(4):
            params = SamplingParams(temperature=1.5, top_k=20 * (i % 2), max_tokens=12)
            engine.add_request(str(i), family_oracle.prompts[i], params)
        return {r: o.outputs[0].token_ids for r, o in finish(engine).items()}

    clean, spoiled = run(False), run(True)
    assert len(set(map(tuple, clean.values()))) == 4
    assert spoiled.pop("1") == clean.pop("1")[:position]
    assert spoiled == clean


def test_end_before_the_bad_row_of_a_run_is_an_ordinary_end(
    family_oracle: Oracle, family_loaded
) -> None:
    """Trap 38: the earliest event decides. Guesses reach a row that plain decoding never asks."""
    engine = make_engine(family_loaded, "draft")
    spoil(engine, "a", 3)
    tokens = family_oracle.expected(0, 3)
    assert len(set(tokens)) == 3
    params = replace(GREEDY, stop_token_ids=[tokens[2]])
    engine.add_request("a", family_oracle.prompts[0], params)
    completion = finish(engine)["a"].outputs[0]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", tokens[2])
    assert completion.token_ids == tokens


def test_one_sample_of_several_ends_and_the_group_goes_on(
    family_oracle: Oracle, family_loaded
) -> None:
    engine = make_engine(family_loaded, "two_phase")
    spoil(engine, "a#1", 2)
    engine.add_request("a", family_oracle.prompts[3], replace(GREEDY, n=3))
    output = finish(engine)["a"]
    assert [c.finish_reason for c in output.outputs] == ["length", "error", "length"]
    assert [len(c.token_ids) for c in output.outputs] == [12, 2, 12]
    assert "no finite maximum" in output.metrics.finish_detail


@pytest.mark.parametrize("cache", ["hash", "radix"])
@pytest.mark.parametrize("name", ["two_phase", "prefill_first", "ngram"])
def test_kv_of_a_bad_step_is_never_a_cached_prefix(
    name: str, cache: str, family_oracle: Oracle, family_loaded
) -> None:
    """The embedding of one token is NaN, and is mended before the prompt comes again."""
    rare, weight = unused_token(family_oracle), family_loaded.model.embed_weight
    head = family_oracle.prompts[3][:8]
    assert len(head) == 8
    prompt = [*head, rare, *head]
    engine = make_engine(family_loaded, name, prefix_cache=cache)
    engine.add_request("head", [*head, head[0]], replace(GREEDY, max_tokens=1))
    finish(engine)
    kept = weight[rare].clone()
    try:
        weight.data[rare] = nan
        for request_id in ("bad", "same"):  # the second waits for the blocks of the first
            engine.add_request(request_id, prompt, GREEDY)
        outputs = finish(engine)
    finally:
        weight.data[rare] = kept
    assert {o.outputs[0].finish_reason for o in outputs.values()} == {"error"}
    assert {o.num_cached_tokens for o in outputs.values()} == {8}
    engine.add_request("again", prompt, GREEDY)
    again = finish(engine)["again"]
    assert again.num_cached_tokens == 8, "what was computed before, and nothing of the bad step"
    cold = make_engine(family_loaded, name, prefix_cache=None)
    cold.add_request("cold", prompt, GREEDY)
    assert again.outputs[0].token_ids == finish(cold)["cold"].outputs[0].token_ids


@pytest.mark.parametrize("cache", ["hash", "radix"])
@pytest.mark.parametrize("name", ["two_phase", "prefill_first", "fcfs", "chunks", "ngram"])
def test_who_ends_in_an_error_takes_its_kv_out_of_the_cache(
    name: str, cache: str, family_oracle: Oracle, family_loaded
) -> None:
    """And who shares it when it happens ends too, or computes it, and leaves nothing bad either."""
    engine = make_engine(family_loaded, name, prefix_cache=cache)
    prompt, index = family_oracle.prompts[3], 3
    assert len(prompt) >= 8
    spoil_kv(engine, "bad")
    for request_id in ("bad", "same"):
        engine.add_request(request_id, prompt, GREEDY)
    engine.add_request("other", family_oracle.prompts[1], GREEDY)
    outputs = {r: o.outputs[0] for r, o in finish(engine).items()}
    assert outputs["other"].token_ids == family_oracle.expected(1, 12)
    assert outputs["bad"].finish_reason == "error"
    has_found_it = name != "chunks"
    assert outputs["same"].finish_reason == ("error" if has_found_it else "length")
    assert has_found_it or outputs["same"].token_ids == family_oracle.expected(index, 12)
    engine.add_request("again", prompt, GREEDY)
    again = finish(engine)["again"]
    assert again.outputs[0].token_ids == family_oracle.expected(index, 12)
    assert has_found_it == (again.num_cached_tokens == 0)
    (found,) = engine.generate_batch([prompt], GREEDY).values()
    assert found.num_cached_tokens == (len(prompt) - 1) // 4 * 4


@pytest.mark.parametrize("cache", ["hash", "radix"])
def test_kv_that_an_aborted_request_left_costs_one_error_and_no_more(
    cache: str, family_oracle: Oracle, family_loaded
) -> None:
    """Nobody has sampled with it: it is withdrawn by the one who found it, and what was computed
    before it stays."""
    prompt = max(family_oracle.prompts, key=len)
    index = family_oracle.prompts.index(prompt)
    engine = make_engine(family_loaded, "chunks", prefix_cache=cache, max_num_batched_tokens=8)
    engine.add_request("head", prompt[:9], replace(GREEDY, max_tokens=1))
    finish(engine)
    assert len(prompt) > 24
    spoil_kv(engine, "aborted", 2)
    engine.add_request("aborted", prompt, GREEDY)
    engine.step()
    engine.abort_request("aborted")
    for expected, num_cached in (("error", 12), ("length", 8)):
        (output,) = engine.generate_batch([prompt], GREEDY).values()
        assert (output.outputs[0].finish_reason, output.num_cached_tokens) == (expected, num_cached)
    assert output.outputs[0].token_ids == family_oracle.expected(index, 12)


def unused_token(oracle: Oracle) -> int:
    used = {t for tokens in (*oracle.prompts, *oracle.continuations) for t in tokens}
    return next(t for t in range(97) if t not in used)


def test_stop_strings_are_looked_for_before_the_bad_row_only(shipped_loaded, shipped_tokenizer):
    """A run of guesses that ends in a bad row has no text there."""
    config = EngineConfig(num_blocks=100, speculative={"method": "draft", **GUESSES})
    engine = LLMEngine(
        config, loaded=shipped_loaded, draft=shipped_loaded, tokenizer=shipped_tokenizer
    )
    params = replace(GREEDY, max_tokens=20, stop=["never there"])
    plain = engine.generate_batch(["class Stack:"], params)["request-0"].outputs[0]
    spoil(engine, "a", 6)
    engine.add_request("a", "class Stack:", params)
    completion = finish(engine)["a"].outputs[0]
    assert completion.finish_reason == "error"
    assert completion.token_ids == plain.token_ids[:6]
    assert completion.text == shipped_tokenizer.decode(plain.token_ids[:6])
