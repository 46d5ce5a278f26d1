"""Requests that bring rules for their tokens, in whole engines: the tokens are those of
`transformers`' own loop with the rules written down plainly."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, Qwen3ForCausalLM

from common.engine import EngineConfig, LLMEngine
from common.requests.tokenizer import Tokenizer
from common.tests.engine_oracle import MAX_TOKENS, Oracle, checked_engine, greedy_params
from request import SamplingParams

GUESSES = {"num_spec_tokens": 3, "adaptive": False}
WAYS: dict[str, dict] = {
    "plain": {},
    "overlap": {"overlap_scheduling": True},
    "graphs": {"emulate_graphs": True, "max_model_len": 128},
    "chunks": {"max_num_batched_tokens": 9},
    "preempted": {"preempt_every": 2, "overlap_scheduling": True},
    "one at a time": {"scheduler": "fcfs", "max_num_seqs": 1, "prefix_cache": None},
    "n-gram": {"speculative": {"method": "ngram", "min_ngram": 1, **GUESSES}, "preempt_every": 3},
    "draft model": {"speculative": {"method": "draft", **GUESSES}},
}


def rules_for(continuation: list[int]) -> list[dict]:
    """That bite: what would be said is ruled out, or made likely, where it is about to be said."""
    a, b, c, d, *_, last = continuation
    return [
        {"bad_words": [[b], [c, d], [a, b, c], [last]]},
        {"bad_words": [[a, b], [b, c, d], *([t, a] for t in range(40))]},
        {"logit_bias": {a: -3.0, b: 4.0, 5: 2.0}, "bad_words": [[b, b], [5, b]]},
        {"allowed_token_ids": range(3, 90, 2)},
        {"allowed_token_ids": [a, b, c, 7, 8], "bad_words": [[a, a], [b, a], [c, 7]]},
    ]


class ByTheRules(LogitsProcessor):
    def __init__(self, params: SamplingParams, num_prompt: int) -> None:
        self.params, self.num_prompt = params, num_prompt

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        outputs, p = input_ids[0, self.num_prompt :].tolist(), self.params
        for token in range(scores.shape[1]):
            is_allowed = p.allowed_token_ids is None or token in p.allowed_token_ids
            words = p.bad_words or ()
            if not is_allowed or any([*outputs, token][-len(w) :] == w for w in words):
                scores[0, token] = -torch.inf
            scores[0, token] += (p.logit_bias or {}).get(token, 0.0)
        return scores


@pytest.fixture(scope="module")
def ruled(family_oracle: Oracle) -> list[tuple[list[int], SamplingParams, list[int]]]:
    """Prompts, parameters, and what is said."""
    oracle = family_oracle
    model = Qwen3ForCausalLM.from_pretrained(oracle.path, dtype=torch.float64).eval()
    found = []
    for i, prompt in enumerate(oracle.prompts[:5]):
        rules = rules_for(oracle.continuations[i])[i % 5]
        params = replace(greedy_params(MAX_TOKENS), **rules)
        how = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        how["logits_processor"] = LogitsProcessorList([ByTheRules(params, len(prompt))])
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, **how)
        tokens = out[0, len(prompt) :].tolist()
        assert tokens != oracle.continuations[i], "these rules change nothing"
        found.append((prompt, params, tokens))
    return found


@pytest.mark.parametrize("way", WAYS)
def test_tokens_keep_to_their_rules(way: str, ruled, loaded, draft) -> None:
    config = {"block_size": 4, "num_blocks": 400, "max_num_seqs": 8, "shuffle_batch": True}
    if way == "draft model":
        engine = checked_engine(loaded, draft, **config | WAYS[way])
    else:
        engine = checked_engine(loaded, **config | WAYS[way])
    prompts = [prompt for prompt, _, _ in ruled]
    params = [replace(params, n=1 + i % 2) for i, (_, params, _) in enumerate(ruled)]
    outputs = engine.generate_batch(prompts, params)
    for output, (_, _, expected) in zip(outputs.values(), ruled, strict=True):
        for completion in output.outputs:
            assert completion.token_ids == expected, output.request_id
    stats = engine.stats()
    assert (stats.num_preemptions > 0) == ("preempt_every" in WAYS[way])
    assert (stats.num_accepted_tokens > 0) == ("speculative" in WAYS[way])


@pytest.mark.parametrize("overlaps", [False, True])
def test_who_has_no_token_left_ends_in_an_error_and_alone(
    overlaps: bool, oracle: Oracle, loaded
) -> None:
    a, b = oracle.continuations[0][:2]
    only = replace(greedy_params(5), allowed_token_ids=[a, b], bad_words=[[a, a], [a, b]])
    early = dict(allowed_token_ids=[a, b], stop_token_ids=[b], min_tokens=1, bad_words=[[a]])
    params = [only, greedy_params(5), replace(greedy_params(5), **early)]
    engine = checked_engine(loaded, num_blocks=200, overlap_scheduling=overlaps)
    outputs = engine.generate_batch([*oracle.prompts[:2], oracle.prompts[0]], params).values()
    one, other, third = outputs
    said = "allowed_token_ids and bad_words and min_tokens: no token may come next"
    assert third.metrics.finish_detail == said
    assert one.outputs[0].finish_reason == "error" and one.outputs[0].token_ids == [a]
    said = "allowed_token_ids and bad_words: no token may come next"
    assert one.metrics.finish_detail == said
    assert other.outputs[0].token_ids == oracle.expected(1, 5)


def test_min_tokens_needs_an_allowed_token_that_does_not_stop(loaded) -> None:
    engine, stops = LLMEngine(loaded=loaded), {"stop_token_ids": [3, 4], "min_tokens": 2}
    for rules in (dict(allowed_token_ids=[4, 3]), dict(stop_token_ids=range(97))):
        with pytest.raises(ValueError, match=r"^min_tokens must be 0 .*, got 2"):
            engine.add_request("a", [1], SamplingParams(**stops | rules))
    engine.add_request("a", [1], SamplingParams(allowed_token_ids=[4, 5], **stops))


def test_a_bad_word_that_the_model_has_no_row_for_rules_nothing_out(
    shipped_loaded, shipped_tokenizer
) -> None:
    """Trap 79: of many fine-tunes of Llama 2, `[PAD]` is 32000, of a vocabulary of 32,000."""
    backend = type(shipped_tokenizer.backend).from_str(shipped_tokenizer.backend.to_str())
    backend.add_special_tokens(["[PAD]"])
    tokenizer = Tokenizer(backend, shipped_tokenizer.eos_token_id)
    row = shipped_loaded.config.vocab_size
    assert tokenizer.encode("[PAD]") == [row]
    engine = LLMEngine(EngineConfig(num_blocks=50), loaded=shipped_loaded, tokenizer=tokenizer)
    params = SamplingParams(temperature=0, max_tokens=4)
    bad = replace(params, bad_words=["[PAD]", "x[PAD]y"])
    first = replace(params, logit_bias={0: 100.0}, ignore_eos=True)  # which the next row lost

    def tokens(*every: SamplingParams) -> list[list[int]]:
        outputs = engine.generate_batch(["def f("] * len(every), every)
        return [output.outputs[0].token_ids for output in outputs.values()]

    assert tokens(bad, first, bad) == tokens(params, first, params)
    with pytest.raises(ValueError, match=f"^bad_words must .*0 to {row - 1}, got {row}"):
        engine.add_request("a", [1], SamplingParams(bad_words=[[row]]))
