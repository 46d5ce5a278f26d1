"""Chapter 5 in the engine: whatever is drafted, and however much of it is right, the tokens are
those of `transformers` in float64; with a seed, those of plain decoding. Their law is in
`test_grammar_engine.py`, random runs are the array's (`equivalence.py`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest

from cache_checks import cached_prefixes
from common.engine import EngineConfig, LLMEngine
from common.tests.engine_oracle import MAX_TOKENS, Oracle, checked_engine, serve
from common.tests.every_kind import must_say_the_same
from proposers import ProposerInput
from request import SamplingParams

BY_SCRIPT = {"method": "ngram", "adaptive": False}


@dataclass
class ScriptedProposer:
    """Knows how each prompt continues: `script(truth, k)` are the draft tokens, where `truth` is
    what follows."""

    oracle: Oracle
    script: Callable[[list[int], int], list[int]]
    num_spec_tokens: int = 4
    num_lookahead_tokens: int = 0

    def propose(
        self, inputs: Sequence[ProposerInput], num_drafts: Sequence[int]
    ) -> dict[str, list[int]]:
        drafts = {}
        for request, k in zip((f.request for f in inputs), num_drafts, strict=True):
            index = self.oracle.prompts.index(request.prompt_token_ids)
            truth = self.oracle.continuations[index][len(request.output_token_ids) :]
            drafts[request.req_id] = self.script(truth, k)
        return drafts

    def draft_probs(self, request_id: str) -> None:
        return None

    def remove_request(self, request_id: str) -> None:
        pass


def wrong_at(*places: int) -> Callable[[list[int], int], list[int]]:
    return lambda truth, k: [(t + (i in places)) % 97 for i, t in enumerate(truth[:k])]


SCRIPTS = {
    "right": wrong_at(),
    "wrong": wrong_at(0, 1, 2, 3),
    "wrong at 2": wrong_at(2),
    "none": lambda truth, k: [],
    "shifted": lambda truth, k: truth[1 : 1 + k],
    "too many": lambda truth, k: [*truth, 1, 2, 3, 4, 5, 6, 7, 8, 9] * 3,
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_any_guess_whatever_leaves_the_tokens_as_they_are(script, oracle, loaded):
    """Traps 36, 38, 39: verified at its own position, and no more than there may be. Scheduled are
    prompts, outputs but the last, and rejected guesses."""
    engine = checked_engine(loaded, speculative=BY_SCRIPT, num_blocks=200, prefix_cache=None)
    engine.core.runner.proposer = ScriptedProposer(oracle, SCRIPTS[script])
    indices = [0, 3, 5, 6, 7]
    outputs = serve(engine, oracle, indices, MAX_TOKENS)
    stats = engine.stats()
    accepted = stats.num_accepted_tokens
    drafted = stats.num_drafted_tokens
    if script == "right":
        assert accepted == drafted > 0 and stats.acceptance_by_position == [1.0] * 4
    if script == "wrong":
        assert accepted == 0 < drafted
    if script == "wrong at 2":
        assert stats.acceptance_by_position == [1.0, 1.0, 0.0, 0.0]
    num_fed = sum(len(oracle.prompts[i]) + MAX_TOKENS - 1 for i in indices)
    assert stats.scheduled_tokens == num_fed + drafted - accepted
    assert stats.num_passes + accepted == stats.output_tokens
    assert {len(o.metrics.inter_token_latencies) for o in outputs} == {MAX_TOKENS - 1}


@pytest.mark.parametrize(("k", "cache"), [(1, "hash"), (3, None), (6, "radix")])
def test_a_drafter_that_is_the_target_is_always_right(k, cache, oracle, loaded):
    """Trap 41: neither a prefix hit nor full acceptance leaves a hole in the draft model's KV."""
    how = {"method": "draft", "num_spec_tokens": k, "adaptive": False}
    sizes = dict(block_size=4, num_blocks=400, prefix_cache=cache)
    engine = checked_engine(loaded, draft=loaded, speculative=how, **sizes)
    for _ in range(3):  # the second and third time with every prompt in the cache
        serve(engine, oracle, list(range(len(oracle.prompts))), 9)
    stats = engine.stats()
    assert stats.num_accepted_tokens == stats.num_drafted_tokens > 0
    assert (stats.cached_tokens > 0) == (cache is not None)


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
ORDERS = {
    "together-ngram": {},
    "together-perfect": {},
    "alone-draft": {"max_num_seqs": 1},
    "preempted-draft": {"preempt_every": 3},
}


@pytest.mark.parametrize("name", ORDERS)
def test_with_a_seed_every_constraint_gives_the_tokens_of_plain_decoding(
    name, oracle, loaded, draft
):
    """Traps 37, 42: constraints hold at every guess's place, and batch mates are not seen."""
    prompts = oracle.prompts[: len(PARAMS)]
    plain = LLMEngine(EngineConfig(num_blocks=300), loaded=loaded)
    expected = plain.generate_batch(prompts, PARAMS)
    method = "ngram" if "ngram" in name else "draft"
    how = {"method": method, "adaptive": "alone" in name, "min_ngram": 1}
    config = dict(num_blocks=300, shuffle_batch=True, speculative=how) | ORDERS[name]
    engine = checked_engine(loaded, loaded if "perfect" in name else draft, **config)
    must_say_the_same(engine.generate_batch(prompts, PARAMS), expected)
    if "perfect" in name:
        # The guess is made with the number that draws the token, so a perfect model is right; only
        # penalties do not see the guesses of the same run, and a cut run counts as a rejection.
        assert engine.stats().num_accepted_tokens > 0.6 * engine.stats().num_drafted_tokens


@pytest.mark.parametrize("end", [0, 3, 8])  # a run is of six tokens
def test_an_end_inside_an_accepted_run_cuts_everything_alike(
    end, shipped_oracle, shipped_loaded, shipped_tokenizer
):
    """Trap 38: a stop string, a stop token or `max_tokens` at any place of a run: text, ids and
    log-probabilities end there, nothing behind it is published to the cache."""
    prompt, truth = shipped_oracle.prompts[4], shipped_oracle.continuations[4]
    text = shipped_tokenizer.decode(truth[: end + 1])
    ends = (
        dict(max_tokens=end + 1, ignore_eos=True),
        dict(stop_token_ids=(truth[end],)),
        dict(stop=(text[-3:-1], "\n\n")),
    )
    for params in (SamplingParams(temperature=0, **{"max_tokens": 24} | each) for each in ends):
        results = []
        for speculative in (None, BY_SCRIPT | {"num_spec_tokens": 5}):
            config = dict(block_size=1, num_blocks=200, speculative=speculative)
            engine = checked_engine(shipped_loaded, tokenizer=shipped_tokenizer, **config)
            if speculative:
                proposer = ScriptedProposer(shipped_oracle, SCRIPTS["right"], num_spec_tokens=5)
                engine.core.runner.proposer = proposer
            output = engine.generate_batch([prompt], replace(params, logprobs=1))["request-0"]
            results.append(output)
            visible = [*prompt, *output.outputs[0].token_ids]
            for prefix in cached_prefixes(engine.prefix_cache):
                assert list(prefix.token_ids) == visible[: len(prefix.token_ids)]
        must_say_the_same({"": results[1]}, {"": results[0]})
        assert results[1].metrics.finish_detail == results[0].metrics.finish_detail


def test_a_draft_model_that_is_not_there_or_says_other_tokens_is_refused(loaded):
    with pytest.raises(FileNotFoundError):
        checked_engine(loaded, speculative={"method": "draft", "model": "no/where/x"})
    with pytest.raises(ValueError, match="vocabulary"):
        checked_engine(loaded, num_blocks=50, speculative={"method": "draft"})
