"""Requests that bring rules for their tokens, or are scored, in whole engines: against the logits
of `transformers` with the rules written down plainly, and its log-probabilities."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import Qwen3ForCausalLM

from common.engine import EngineConfig, LLMEngine
from common.requests.tokenizer import Tokenizer
from common.tests.engine_oracle import MAX_TOKENS, Oracle, checked_engine, greedy_params
from request import SamplingParams

GUESSES = {"num_spec_tokens": 3, "adaptive": False}
WAYS: dict[str, dict] = {
    "overlap": {"overlap_scheduling": True, "max_num_batched_tokens": 16, "preempt_every": 2},
    "graphs": {"emulate_graphs": True, "max_model_len": 128, "max_num_batched_tokens": 11},
    "one at a time": {"scheduler": "fcfs", "max_num_seqs": 1, "prefix_cache": "radix"},
    "draft model": {"speculative": {"method": "draft", **GUESSES}, "preempt_every": 3},
}
SIZES = {"block_size": 4, "num_blocks": 400, "max_num_seqs": 8, "shuffle_batch": True}


@pytest.fixture(scope="module")
def model(family_oracle: Oracle) -> torch.nn.Module:
    return Qwen3ForCausalLM.from_pretrained(family_oracle.path, dtype=torch.float64).eval()


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


@pytest.fixture(scope="module")
def ruled(family_oracle: Oracle, model) -> list[tuple[list[int], SamplingParams, list[int]]]:
    """Prompts, parameters, and what is said."""
    oracle = family_oracle
    found = []
    for i, prompt in enumerate(oracle.prompts[:5]):
        rules = rules_for(oracle.continuations[i])[i]
        tokens = said_by_the_rules(model, prompt, **rules)
        assert tokens != oracle.continuations[i], "these rules change nothing"
        found.append((prompt, replace(greedy_params(MAX_TOKENS), **rules), tokens))
    return found


@torch.inference_mode()
def said_by_the_rules(
    model, prompt: list[int], bad_words=(), logit_bias=None, allowed_token_ids=None
) -> list[int]:
    said: list[int] = []
    for _ in range(MAX_TOKENS):
        scores = model(torch.tensor([prompt + said])).logits[0, -1]
        for token in range(len(scores)):
            is_allowed = allowed_token_ids is None or token in allowed_token_ids
            if not is_allowed or any([*said, token][-len(word) :] == word for word in bad_words):
                scores[token] = -torch.inf
            scores[token] += (logit_bias or {}).get(token, 0.0)
        said.append(int(scores.argmax()))
    return said


@pytest.mark.parametrize("way", WAYS)
def test_tokens_keep_to_their_rules(way: str, ruled, loaded, draft) -> None:
    engine = checked_engine(loaded, draft if way == "draft model" else None, **SIZES | WAYS[way])
    prompts = [prompt for prompt, _, _ in ruled]
    params = [replace(params, n=1 + i % 2) for i, (_, params, _) in enumerate(ruled)]
    outputs = engine.generate_batch(prompts, params)
    for output, (_, _, expected) in zip(outputs.values(), ruled, strict=True):
        for completion in output.outputs:
            assert completion.token_ids == expected, output.request_id
    stats = engine.stats()
    assert (stats.num_preemptions > 0) == ("preempt_every" in WAYS[way])
    assert (stats.num_accepted_tokens > 0) == ("speculative" in WAYS[way])


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
    plain = SamplingParams(temperature=0, max_tokens=9)
    params = [replace(plain, bad_words=words) for words in ([], ["[PAD]", "x[PAD]y"], ["return"])]
    outputs = engine.generate_batch(["def area(self"] * 3, params).values()
    texts = [output.outputs[0].text for output in outputs]
    assert texts[0] == texts[1] and "return" in texts[0] and "return" not in texts[2]
    with pytest.raises(ValueError, match=f"^bad_words must .*0 to {row - 1}, got {row}"):
        engine.add_request("a", [1], SamplingParams(bad_words=[[row]]))


# -- prompts that are scored

LENGTHS = {0: 1, 3: 17, 4: 16, 7: 33, 9: 2}  # how much of which prompt


@pytest.fixture(scope="module")
def likely(family_oracle: Oracle, model) -> dict[int, torch.Tensor]:
    with torch.inference_mode():
        return {
            i: model(torch.tensor([family_oracle.prompts[i][:n]])).logits[0].log_softmax(-1)
            for i, n in LENGTHS.items()
        }


def must_be(output, expected: torch.Tensor, num_top: int) -> None:
    (first, *entries) = output.prompt_logprobs
    prompt = output.prompt_token_ids
    assert first is None and len(entries) == len(prompt) - 1
    for token, entry, row in zip(prompt[1:], entries, expected[:-1], strict=True):
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(row[token].item(), abs=1e-9)
        assert entry.rank == 1 + (row > row[token]).sum()
        best = row.sort(descending=True, stable=True)
        assert list(entry.top) == best.indices[:num_top].tolist()
        assert list(entry.top.values()) == pytest.approx(best.values[:num_top].tolist(), abs=1e-9)


@pytest.mark.parametrize("way", WAYS)
def test_a_prompt_is_scored_as_transformers_does(way: str, oracle, loaded, draft, likely) -> None:
    """Some twice, some with samples, behind each other and beside who asks for nothing; the second
    time all are in the cache."""
    engine = checked_engine(loaded, draft if way == "draft model" else None, **SIZES | WAYS[way])
    tops = dict(zip(LENGTHS, (3, 0, 97, 2, -1)))
    prompts = [oracle.prompts[i][:n] for i, n in LENGTHS.items()]
    params = [replace(greedy_params(5, n=1 + i % 2), prompt_logprobs=k) for i, k in tops.items()]
    for _ in range(2):
        outputs = engine.generate_batch(prompts * 2, params + [greedy_params(5)] * len(params))
        every = list(outputs.values())
        for (i, k), output, other in zip(tops.items(), every, every[len(params) :]):
            must_be(output, likely[i], k % 98)
            assert other.prompt_logprobs is None and output.num_cached_tokens == 0
            for completion in output.outputs:
                assert completion.token_ids == other.outputs[0].token_ids
