"""Chapter 5 in the engine: whatever is drafted, and however much of it is right, the tokens are
those of `transformers` in float64; with a seed, those of plain decoding; without one, their law.
Random runs in pools that run out are rows of `claims.py`."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from transformers import Qwen3ForCausalLM

from common.engine import EngineConfig, LLMEngine
from common.tests.engine_oracle import (
    MAX_TOKENS,
    Oracle,
    checked_engine,
    serve,
)
from common.tests.every_kind import must_be_drawn_from, must_say_the_same
from common.tests.scripted_proposer import SCRIPTS, ScriptedProposer
from request import SamplingParams

SCHEDULERS = ("two_phase", "prefill_first")
CACHES = (None, "hash", "radix")


@pytest.mark.sample
@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_any_guess_whatever_leaves_the_tokens_as_they_are(script, scheduler, oracle, loaded):
    """Traps 36, 38, 39: verified at its own position, and no more than there may be."""
    engine = checked_engine(
        loaded,
        num_blocks=200,
        scheduler=scheduler,
        speculative={"method": "ngram", "adaptive": False},
    )
    engine.speculation.proposer = ScriptedProposer(oracle, SCRIPTS[script])
    outputs = serve(engine, oracle, [0, 3, 5, 6, 7], MAX_TOKENS)
    stats = engine.stats()
    assert all(o.outputs[0].finish_reason == "length" for o in outputs)
    if script == "right":
        assert stats.num_accepted_tokens == stats.num_drafted_tokens > 0
        assert stats.acceptance_by_position == [1.0] * 4
    if script == "wrong":
        assert stats.num_accepted_tokens == 0 < stats.num_drafted_tokens
    if script == "wrong at 2":
        assert stats.acceptance_by_position[:2] == [1.0, 1.0]
        assert stats.acceptance_by_position[2:] == [0.0, 0.0]
    assert stats.num_passes + stats.num_accepted_tokens == stats.output_tokens
    assert sum(stats.accepted_by_position) == stats.num_accepted_tokens
    num_drafted_passes = stats.num_drafted_passes
    assert num_drafted_passes <= min(stats.num_drafted_tokens, stats.num_passes)
    found = stats.num_accepted_tokens / max(num_drafted_passes, 1)
    assert stats.mean_accepted_length == pytest.approx(1 + found)


# -- constraints and ends

PARAMS = [
    SamplingParams(temperature=1.0, seed=3, max_tokens=20),
    SamplingParams(temperature=0.7, seed=4, top_k=5, max_tokens=20, logprobs=2),
    SamplingParams(temperature=1.3, seed=5, top_p=0.7, presence_penalty=1.0, max_tokens=20),
    SamplingParams(temperature=0.9, seed=6, min_p=0.1, frequency_penalty=0.5, max_tokens=20),
    SamplingParams(temperature=0.8, seed=7, repetition_penalty=1.3, max_tokens=20, logprobs=0),
    SamplingParams(temperature=0.0, repetition_penalty=1.5, max_tokens=20, logprobs=3),
    SamplingParams(temperature=0.0, presence_penalty=2.0, min_tokens=5, max_tokens=20),
    SamplingParams(temperature=1.0, seed=8, max_tokens=20, stop_token_ids=tuple(range(0, 97, 9))),
    SamplingParams(temperature=0.0, min_tokens=7, max_tokens=20, stop_token_ids=tuple(range(60))),
]


def shown(output) -> tuple:
    completion = output.outputs[0]
    return completion.token_ids, completion.finish_reason, completion.stop_reason, completion.text


@pytest.mark.sample
@pytest.mark.parametrize("speculative", ["ngram", "draft", "perfect"])
@pytest.mark.parametrize("order", ["together", "alone", "preempted"])
def test_with_a_seed_every_constraint_gives_the_tokens_of_plain_decoding(
    speculative, order, oracle, loaded, draft
):
    """Traps 37, 42: constraints hold at every guess's place, and batch mates are not seen."""
    prompts = [oracle.prompts[i % len(oracle.prompts)] for i in range(len(PARAMS))]
    plain = LLMEngine(EngineConfig(num_blocks=300), loaded=loaded)
    expected = plain.generate_batch(prompts, PARAMS)
    config = EngineConfig(
        num_blocks=300,
        preempt_every=3 if order == "preempted" else None,
        max_num_seqs=1 if order == "alone" else 64,
        shuffle_batch=True,
        speculative={
            "method": "ngram" if speculative == "ngram" else "draft",
            "adaptive": order == "alone",
            "min_ngram": 1,
        },
    )
    engine = LLMEngine(config, loaded=loaded, draft=loaded if speculative == "perfect" else draft)
    must_say_the_same(engine.generate_batch(prompts, PARAMS), expected)
    if speculative == "perfect" and order == "together":
        # The guess is made with the number that draws the token, so a perfect model is right; only
        # penalties do not see the guesses of the same run, and a cut run counts as a rejection.
        assert engine.stats().num_accepted_tokens > 0.6 * engine.stats().num_drafted_tokens


@pytest.mark.sample(every=5)  # a run is of six tokens: in its front, at its end, inside
@pytest.mark.parametrize("end", range(12))
def test_an_end_inside_an_accepted_run_cuts_everything_alike(
    end, shipped_oracle, shipped_loaded, shipped_tokenizer
):
    """Trap 38: a stop string, a stop token or `max_tokens` at any place of a run: text, ids and
    log-probabilities end there, nothing behind it is published to the cache."""
    index = 4
    prompt, truth = shipped_oracle.prompts[index], shipped_oracle.continuations[index]
    text = shipped_tokenizer.decode(truth[: end + 1])
    ends = [
        SamplingParams(temperature=0, max_tokens=end + 1, logprobs=1, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=24, logprobs=1, stop_token_ids=(truth[end],)),
        SamplingParams(temperature=0, max_tokens=24, logprobs=1, stop=(text[-2:],)),
        SamplingParams(temperature=0, max_tokens=24, logprobs=1, stop=(text[-3:-1], "\n\n")),
    ]
    for params in ends:
        results = []
        for speculative in (None, {"method": "ngram", "num_spec_tokens": 5, "adaptive": False}):
            config = EngineConfig(
                block_size=1, num_blocks=200, speculative=speculative, check_invariants=True
            )
            engine = LLMEngine(config, loaded=shipped_loaded, tokenizer=shipped_tokenizer)
            if speculative:
                proposer = ScriptedProposer(shipped_oracle, SCRIPTS["right"], num_spec_tokens=5)
                engine.speculation.proposer = proposer
            output = engine.generate_batch([prompt], params)["request-0"]
            completion = output.outputs[0]
            logprobs = [(entry.token_id, round(entry.logprob, 9)) for entry in completion.logprobs]
            results.append((shown(output), logprobs, output.metrics.finish_detail))
            visible = [*prompt, *completion.token_ids]
            for prefix in engine.prefix_cache.cached_prefixes():
                assert list(prefix.token_ids) == visible[: len(prefix.token_ids)]
        assert results[0] == results[1], params
        assert len(results[1][1]) == len(results[1][0][0])


# -- without a seed: the law


def test_without_a_seed_the_law_is_the_targets(oracle, loaded, draft):
    """Rejection sampling in the engine: the frequencies of three-token outputs against the exact
    probabilities of `transformers`, with draft probabilities, a temperature and top-k."""
    params = SamplingParams(temperature=1.1, top_k=3, max_tokens=3)
    prompt = oracle.prompts[3]
    law = exact_law(oracle, prompt, params)
    config = EngineConfig(
        num_blocks=3000,
        max_num_seqs=256,
        speculative={"method": "draft", "num_spec_tokens": 2, "adaptive": False},
    )
    engine = LLMEngine(config, loaded=loaded, draft=draft)
    num_samples = 3000
    outputs = engine.generate_batch([prompt] * num_samples, params)
    seen = Counter(tuple(output.outputs[0].token_ids) for output in outputs.values())
    assert seen.keys() <= law.keys()
    stats = engine.stats()
    assert 0.3 < stats.num_accepted_tokens / stats.num_drafted_tokens < 0.95
    assert engine.speculation.proposer.proposer.num_computed_tokens > 0
    must_be_drawn_from(law, seen)


def exact_law(oracle: Oracle, prompt: list[int], params: SamplingParams) -> dict:
    model = Qwen3ForCausalLM.from_pretrained(oracle.path, dtype=torch.float64).eval()

    def next_law(tokens: tuple[int, ...]) -> dict[int, float]:
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, -1]
        highest = logits.topk(params.top_k)
        probs = (highest.values / params.temperature).softmax(-1)
        return dict(zip(highest.indices.tolist(), probs.tolist(), strict=True))

    law = {(): 1.0}
    for _ in range(params.max_tokens):
        law = {
            (*tokens, token): p * q
            for tokens, p in law.items()
            for token, q in next_law(tokens).items()
        }
    assert sum(law.values()) == pytest.approx(1)
    return law


# -- configuration and books


def test_a_draft_model_that_is_not_there_or_says_other_tokens_is_refused(loaded):
    with pytest.raises(FileNotFoundError):
        config = EngineConfig(num_blocks=50, speculative={"method": "draft", "model": "no/where/x"})
        LLMEngine(config, loaded=loaded)
    with pytest.raises(ValueError, match="vocabulary"):
        LLMEngine(EngineConfig(num_blocks=50, speculative={"method": "draft"}), loaded=loaded)


def test_the_pool_is_sized_for_both_models(loaded, draft, monkeypatch):
    monkeypatch.setattr("common.runner.kv_sizing.free_memory_bytes", lambda: 20 << 20)

    def num_blocks(speculative) -> int:
        config = EngineConfig(speculative=speculative, max_num_seqs=1000)
        return LLMEngine(config, loaded=loaded, draft=draft).kv_cache.num_blocks

    assert num_blocks({"method": "draft"}) == num_blocks({"method": "ngram"}) // 2
