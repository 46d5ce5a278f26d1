"""Log-probabilities of prompts, against `transformers` in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import Qwen3ForCausalLM

from common.engine import LLMEngine
from common.tests.engine_oracle import Oracle, checked_engine, greedy_params
from request import SamplingParams

GUESSES = {"num_spec_tokens": 3, "adaptive": False}
WAYS: dict[str, dict] = {
    "whole": {"chunked_prefill": False},
    "chunks": {"max_num_batched_tokens": 9, "shuffle_batch": True},
    "overlap": {"overlap_scheduling": True, "max_num_batched_tokens": 16},
    "preempted": {"preempt_every": 2, "max_num_batched_tokens": 7},
    "graphs": {"emulate_graphs": True, "max_model_len": 96, "max_num_batched_tokens": 11},
    "fcfs": {"scheduler": "fcfs", "prefix_cache": "radix"},
    "n-gram": {"speculative": {"method": "ngram", "min_ngram": 1, **GUESSES}},
}
LENGTHS = {0: 1, 3: 17, 4: 16, 7: 33, 9: 2}  # how much of which prompt


@pytest.fixture(scope="module")
def expected(family_oracle: Oracle) -> dict[int, torch.Tensor]:
    model = Qwen3ForCausalLM.from_pretrained(family_oracle.path, dtype=torch.float64).eval()
    with torch.inference_mode():
        return {
            i: model(torch.tensor([family_oracle.prompts[i][:n]])).logits[0].log_softmax(-1)
            for i, n in LENGTHS.items()
        }


def must_be(output, prompt: list[int], expected: torch.Tensor, num_top: int) -> None:
    first, *entries = output.prompt_logprobs
    assert first is None and len(entries) == len(prompt) - 1
    for token, entry, row in zip(prompt[1:], entries, expected[:-1], strict=True):
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(row[token].item(), abs=1e-9)
        assert entry.rank == 1 + (row > row[token]).sum()
        best = row.sort(descending=True, stable=True)
        assert list(entry.top) == best.indices[:num_top].tolist()
        assert list(entry.top.values()) == pytest.approx(best.values[:num_top].tolist(), abs=1e-9)


@pytest.mark.parametrize("way", WAYS)
def test_a_prompt_is_scored_as_transformers_does(way: str, oracle, loaded, expected) -> None:
    """Some twice, some with samples, behind each other and beside who asks for nothing; the second
    time all are in the cache."""
    config = {"block_size": 4, "num_blocks": 300, "max_num_seqs": 6}
    engine = checked_engine(loaded, **config | WAYS[way])
    tops = dict(zip(LENGTHS, (3, 0, 97, 2, -1)))
    for _ in range(2):
        prompts = [oracle.prompts[i][:n] for i, n in LENGTHS.items()]
        params = [
            replace(greedy_params(5, n=1 + i % 2), prompt_logprobs=k) for i, k in tops.items()
        ]
        plain = [greedy_params(5)] * len(params)
        outputs = list(engine.generate_batch(prompts * 2, params + plain).values())
        scored, others = outputs[: len(params)], outputs[len(params) :]
        for (i, k), output, other in zip(tops.items(), scored, others, strict=True):
            must_be(output, output.prompt_token_ids, expected[i], k % 98)
            assert other.prompt_logprobs is None and output.num_cached_tokens == 0
            for completion in output.outputs:
                assert completion.token_ids == other.outputs[0].token_ids
    assert (engine.stats().num_preemptions > 0) == (way == "preempted")


def test_what_is_aborted_keeps_what_was_scored(oracle, loaded, expected) -> None:
    engine = checked_engine(loaded, num_blocks=200, max_num_batched_tokens=8)
    prompt = oracle.prompts[7][:33]
    engine.add_request("a", prompt, replace(greedy_params(5), prompt_logprobs=0))
    engine.step()
    output = engine.abort_request("a")
    assert output is not None and output.prompt_logprobs is not None
    assert [entry and entry.token_id for entry in output.prompt_logprobs] == [None, *prompt[1:9]]


def test_what_is_in_the_cache_cannot_be_scored(loaded) -> None:
    params = SamplingParams(prompt_logprobs=1, skip_reading_prefix_cache=False)
    with pytest.raises(ValueError, match=r"^skip_reading_prefix_cache must"):
        LLMEngine(loaded=loaded).add_request("a", [1, 2], params)
