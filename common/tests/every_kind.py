"""Requests of every kind, for engines that are to say the same: greedy and seeded, with every
constraint, samples, stops and log-probabilities."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import pytest

from common.engine import LLMEngine
from common.requests.output_processor import RequestOutput
from request import SamplingParams

PROMPTS = [
    "def area(width, height):\n    return width",
    "def area(width, height):\n    return height",
    "import os\nimport sys\n",
    "x = [1, 2, 1, 2, 1, 2, 1,",
    "class A",
]
EVERY_KIND = [
    SamplingParams(temperature=0, max_tokens=8, ignore_eos=True),
    SamplingParams(seed=1, max_tokens=7, top_p=0.9, ignore_eos=True),
    SamplingParams(seed=2, max_tokens=5, top_k=5, min_p=0.05, logprobs=2),
    SamplingParams(seed=3, max_tokens=9, repetition_penalty=1.4, presence_penalty=0.3),
    SamplingParams(temperature=0, max_tokens=9, frequency_penalty=1.9, min_tokens=4, logprobs=0),
    SamplingParams(seed=5, n=2, max_tokens=5, temperature=1.5),
    SamplingParams(temperature=0, max_tokens=12, stop=["e", "self"]),
    SamplingParams(seed=7, max_tokens=12, stop_token_ids=list(range(0, 200, 3))),
    SamplingParams(seed=8, max_tokens=9, bad_words=["self", " x", "ret"], logit_bias={7: 3.0}),
    SamplingParams(temperature=0, max_tokens=5, allowed_token_ids=range(5, 90), prompt_logprobs=2),
    SamplingParams(max_tokens=6),  # the engine draws a seed
]
NUM_REQUESTS = 2 * len(EVERY_KIND)
DRAWN = {str(i) for i in range(NUM_REQUESTS) if EVERY_KIND[i % len(EVERY_KIND)] == EVERY_KIND[-1]}


def everything_said(engine: LLMEngine, seed: int = 0) -> dict[str, RequestOutput]:
    """Requests of every kind, arriving over some steps."""
    rng = random.Random(seed)
    outputs = {}
    coming = [(rng.randrange(6), i) for i in range(NUM_REQUESTS)]
    for step in range(400):
        if step > 6 and not engine.has_unfinished_requests():
            break
        for when, i in coming:
            if when == step:
                prompt, params = PROMPTS[i % len(PROMPTS)], EVERY_KIND[i % len(EVERY_KIND)]
                engine.add_request(str(i), prompt, params, priority=i % 3)
        outputs |= {o.request_id: o for o in engine.step() if o.finished}
    assert not engine.has_unfinished_requests() and engine.stats().kv_blocks_in_use == 0
    return outputs


def must_say_the_same(
    found: Mapping[str, RequestOutput],
    expected: Mapping[str, RequestOutput],
    tolerance: float = 1e-9,
) -> None:
    """The same tokens, text, reasons and ranks, and log-probabilities within `tolerance`."""
    assert found.keys() == expected.keys()
    for name, output in expected.items():
        for one, other in zip(found[name].outputs, output.outputs, strict=True):
            assert replace(one, logprobs=None) == replace(other, logprobs=None), name
            must_be_as_likely(one.logprobs, other.logprobs, tolerance)
        scored = found[name].prompt_logprobs, output.prompt_logprobs
        must_be_as_likely(*(entries and entries[1:] for entries in scored), tolerance)


def must_be_as_likely(found: list | None, expected: list | None, tolerance: float = 1e-9) -> None:
    assert (found is None) == (expected is None)
    for entry, same in zip(found or (), expected or (), strict=True):
        assert (entry.token_id, entry.rank) == (same.token_id, same.rank)
        assert entry.logprob == pytest.approx(same.logprob, abs=tolerance)
        assert entry.top == pytest.approx(same.top, abs=tolerance)


def must_be_drawn_from(law: Mapping[tuple[int, ...], float], found: Counter) -> None:
    """Counts of texts against their probabilities. Those expected fewer than five times are counted
    together, with another one if all of them are so few."""
    from scipy.stats import chisquare  # not above: it takes seconds

    num_drawn = found.total()
    likely = [tokens for tokens, share in law.items() if share * num_drawn >= 5]
    counts, shares = [found[tokens] for tokens in likely], [law[tokens] for tokens in likely]
    counts.append(num_drawn - sum(counts))
    shares.append(max(1 - sum(shares), 0.0))
    if shares[-1] * num_drawn < 5:
        counts[-2:] = [sum(counts[-2:])]
        shares[-2:] = [sum(shares[-2:])]
    expected = [share / sum(shares) * num_drawn for share in shares]
    assert chisquare(counts, expected).pvalue > 1e-4, found
