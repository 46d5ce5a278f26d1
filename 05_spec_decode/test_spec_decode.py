"""Speculation on toy models: the same tokens when greedy, the same law when sampled; and what it is
worth.

That the verification rules are exact to the last digit is shown in `test_rejection_sampler.py`;
here the functions around them are held against plain decoding, scripts and exact laws."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

import rejection_sampler
from acceptance import SpecDecodeStats
from draft_acceptance import (
    RULES,
    acceptance_probability,
    expected_speedup,
    expected_tokens_per_pass,
)
from inverse_cdf import draw
from spec_decode import (
    SimpleLM,
    draft_generate,
    sample_token,
    speculative_decode_step,
    token_probs,
    verify_and_sample,
)
from toy_generation import plain_generate, speculative_generate

CONTEXT = [1, 0, 2]


def peaked(tokens: Sequence[int], vocab_size: int = 10) -> torch.Tensor:
    return 100.0 * torch.eye(vocab_size, dtype=torch.float64)[list(tokens)]


class ScriptedLM:
    """A model that returns `answers[i]` after the token at index i, whatever it was, with near
    certainty."""

    def __init__(self, answers: Sequence[int], vocab_size: int = 10) -> None:
        self.logits = peaked(answers, vocab_size)
        self.num_passes = 0

    def get_logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        self.num_passes += 1
        return self.logits[: len(token_ids)]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_tokens(num: int, vocab_size: int, seed: int) -> list[int]:
    return torch.randint(vocab_size, (num,), generator=seeded(seed)).tolist()


# -- the toy model, and sampling from it


def test_the_toy_model_reads_tokens_in_order_and_a_noisy_copy_agrees_less_and_less():
    model = SimpleLM(32)
    difference = model.get_logits([3, 4, 5])[-1] - model.get_logits([4, 3, 5])[-1]
    assert difference.abs().max() > 1e-2
    ids = random_tokens(100, 32, seed=3)
    p = token_probs(model.get_logits(ids), 1.0)
    copies = [model.noisy_copy(noise).get_logits(ids) for noise in (0.0, 0.1, 0.2, 0.4, 0.8, 1.0)]
    rates = [float(acceptance_probability(p, token_probs(q, 1.0)).mean()) for q in copies]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] == pytest.approx(1, abs=1e-12) and rates[-1] < 0.3
    for make in (lambda seed: SimpleLM(32, seed=seed), lambda seed: model.noisy_copy(0.3, seed)):
        one, again, other = (make(seed).get_logits([1]) for seed in (5, 5, 6))
        assert torch.equal(one, again) and not torch.equal(one, other)


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_a_token_is_sampled_with_its_probability(temperature):
    """Next to no temperature is greedy, and not NaN; of equal ones the lowest id is drawn."""
    logits = torch.tensor([0.0, 1.0, -torch.inf, 2.0], dtype=torch.float64)
    p = (logits / temperature).softmax(-1)
    for seed in range(50):
        u = torch.rand(1, dtype=torch.float64, generator=seeded(seed))
        assert sample_token(logits, temperature, seeded(seed)) == int(draw(p[None], u)[0])
    high = torch.tensor([0.0, 2000.0, 1999.0, -torch.inf])
    for cold in (1e-6, 1e-306):
        assert token_probs(high, cold).tolist() == [0, 1, 0, 0]
    assert sample_token(torch.tensor([1.0, 3.0, 3.0, 2.0]), temperature=0) == 1


# -- verifying scripts: every way is certain, so every rule must go it


@pytest.mark.parametrize("settings", [{"temperature": 0}, {}, {"rule": "matching"}], ids=str)
@pytest.mark.parametrize("has_logits", [True, False])
def test_drafts_are_kept_up_to_the_first_that_is_wrong(settings, has_logits):
    """Trap 36: by the row before it. Its own says what the draft itself is, if it is wrong."""
    for num_right in range(5):
        drafts = [5, 6, 7, 8]
        answers = [5, 6, 7, 8, 9]
        if num_right < 4:
            drafts[num_right] = answers[num_right + 1] = 1
        target = ScriptedLM([0, 0, *answers])
        logits = peaked(drafts) if has_logits else None
        found = verify_and_sample(target, CONTEXT, drafts, draft_logits=logits, **settings)
        assert found == (answers[: num_right + 1], num_right)


def test_the_calls_of_the_reading_material_work_as_typed():
    """Temperature fourth. Where all drafts are right, ours has the bonus token besides."""
    target, draft = ScriptedLM([0, 0, 5, 6, 7, 8]), ScriptedLM([0, 0, 5, 6, 1, 1])
    drafts, draft_logits = draft_generate(draft, CONTEXT, 3, 0.0)
    assert drafts == [5, 6, 1] and len(draft_logits) == 3
    assert verify_and_sample(target, CONTEXT, drafts, 0.0) == ([5, 6, 7], 2)
    assert verify_and_sample(target, CONTEXT, [5, 6, 7], 0.0) == ([5, 6, 7, 8], 3)
    tokens, stats = speculative_decode_step(target, draft, CONTEXT, 3, 0.0)
    assert tokens == [5, 6, 7]
    assert (stats.num_drafted, stats.num_accepted, stats.tokens_per_pass) == (3, 2, 3)


# -- the same tokens, the same law


@pytest.mark.net
@pytest.mark.parametrize("noise", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("num_drafts", [0, 1, 3, 6])
def test_greedy_tokens_are_those_of_plain_decoding(num_drafts, noise):
    """Exactly as many as are asked for. No draft is made for nothing."""
    target = SimpleLM(40, seed=num_drafts)
    draft = target.noisy_copy(noise, seed=7)
    context = random_tokens(5, 40, seed=num_drafts)
    for num_tokens in (0, 1, 2, 5, 24, 25):
        plain = plain_generate(target, context, num_tokens, temperature=0)
        arguments = target, draft, context, num_tokens, num_drafts
        tokens, stats = speculative_generate(*arguments, temperature=0)
        assert tokens == plain
        assert stats.num_accepted + stats.num_passes == num_tokens
        if noise == 0:
            assert stats.num_accepted == stats.num_drafted
            assert stats.num_passes == math.ceil(num_tokens / (num_drafts + 1))


@pytest.mark.net
@pytest.mark.parametrize("has_logits", [True, False])
@pytest.mark.parametrize("temperature", [0.7, 2.0])
def test_the_rules_get_fresh_numbers_and_the_probabilities_at_the_temperature(
    temperature, has_logits
):
    """With the laws of the rules themselves, which are proved elsewhere, this is exact."""
    target = SimpleLM(3, seed=2)
    draft = target.noisy_copy(0.7)
    p_logits = target.get_logits([*CONTEXT, 2, 0, 1])[2:]
    q_logits = draft.get_logits([*CONTEXT, 2, 0])[2:] if has_logits else None
    p = (p_logits / temperature).softmax(-1)
    q = (q_logits / temperature).softmax(-1) if has_logits else None
    rows = torch.tensor([0, 4])
    drafts = torch.tensor([2, 0, 1])
    for seed in range(60):
        u = torch.rand(7, dtype=torch.float64, generator=seeded(seed))
        expected = rejection_sampler.rejection_sample(p, drafts, q, rows, 3, u[:3], u[3:])
        args = target, CONTEXT, [2, 0, 1], temperature
        tokens, _ = verify_and_sample(*args, seeded(seed), draft_logits=q_logits)
        assert tokens == expected.token_ids[0, : expected.num_sampled[0]].tolist()
        # Matching makes what plain decoding makes of the same numbers, as far as it gets.
        settings = {"draft_logits": q_logits, "rule": "matching"}
        tokens, _ = verify_and_sample(*args, seeded(seed), **settings)
        assert tokens == plain_generate(target, CONTEXT, len(tokens), temperature, seeded(seed))
        # A step draws its drafts first, at the same temperature.
        run = (target, draft, CONTEXT, 3, temperature)
        generator = seeded(seed)
        sampled, logits = draft_generate(*run[1:], generator)
        assert sampled == plain_generate(*run[1:], seeded(seed))
        torch.testing.assert_close(logits, draft.get_logits([*CONTEXT, *sampled])[2:5])
        options = {"draft_logits": logits, "rule": "rejection" if has_logits else "matching"}
        tokens, _ = verify_and_sample(target, CONTEXT, sampled, temperature, generator, **options)
        assert speculative_decode_step(*run, seeded(seed), rule=options["rule"])[0] == tokens


# -- counts, and how often drafts are accepted


def test_the_counts_by_hand():
    passes = [(0, 0), (2, 1), (4, 4), (2, 0)]
    stats = SpecDecodeStats()
    for drafted, accepted in passes:
        stats.observe(drafted, accepted)
    assert stats == SpecDecodeStats(4, 8, 5, 3, 2, [3, 3, 1, 1], [2, 1, 1, 1])
    assert stats.acceptance_by_position == [2 / 3, 1 / 3, 1, 1]
    assert (stats.acceptance_rate, stats.mean_accepted_length) == (5 / 8, 1 + 5 / 3)
    assert stats.tokens_per_pass == 9 / 4
    none = SpecDecodeStats()
    assert (none.acceptance_rate, none.mean_accepted_length, none.tokens_per_pass) == (0, 1, 0)


def test_acceptance_by_hand():
    p, q = (torch.tensor(x, dtype=torch.float64) for x in ([0.5, 0.3, 0.2], [0.2, 0.3, 0.5]))
    by_hand = {
        "rejection": 0.2 + 0.3 + 0.2,
        "shared": 0.2 + 0.0 + 0.2,  # [0, .2); [.5, .8) and [.2, .5) do not meet; [.8, 1)
        "argmax": 0.2,
        "matching": 0.10 + 0.09 + 0.10,
    }
    assert tuple(by_hand) == RULES
    for rule, chance in by_hand.items():
        assert float(acceptance_probability(p, q, rule)) == pytest.approx(chance)


def test_speedup_by_hand():
    assert expected_tokens_per_pass(0.3, 2) == pytest.approx(1 + 0.3 + 0.09)
    for acceptance in (1.0, 1 - 1e-12):  # where the quotient is 0 / 0, or next to it
        assert expected_tokens_per_pass(acceptance, 5) == pytest.approx(6)
    # 1 + 0.5 + 0.25 tokens, in the time of 1.5 + 2 * 0.1 passes.
    assert expected_speedup(0.5, 2, 0.1, verify_cost=1.5) == pytest.approx(1.75 / 1.7)
    assert expected_speedup(0.0, 4, 0.1) == pytest.approx(1 / 1.4)  # it loses


# -- bad input

ONE = torch.zeros(1, 8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sample_token(ONE[0], -1.0), "temperature must"),
        (lambda: sample_token(ONE[0], math.inf), "temperature must"),
        (lambda: acceptance_probability(torch.ones(1), torch.ones(1), "x"), "rule must"),
        (lambda: expected_tokens_per_pass(1.1, 2), "acceptance must"),
        (lambda: expected_speedup(0.5, 2, -0.1), "draft_cost must"),
        (lambda: expected_speedup(0.5, 2, 0.1, 0.0), "verify_cost must"),
    ],
)
def test_bad_input_is_refused_with_its_name_and_value(call, message):
    with pytest.raises(ValueError, match=f"{message} .*, got "):
        call()
