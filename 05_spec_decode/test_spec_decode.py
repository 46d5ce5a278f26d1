"""Speculation on toy models: the same tokens when greedy, the same law when sampled.

That the verification rules are exact to the last digit is shown in `test_rejection_sampler.py`;
here the functions around them are held against plain decoding, scripts and exact laws."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import pytest
import torch

import rejection_sampler
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


# -- the toy model


def test_a_row_depends_on_every_token_before_it_and_on_none_after():
    model = SimpleLM(32)
    ids = random_tokens(12, 32, seed=1)
    logits = model.get_logits(ids)
    assert logits.shape == (12, 32) and logits.dtype == torch.float64
    for j in range(12):
        changed = [*ids[:j], (ids[j] + 1) % 32, *ids[j + 1 :]]
        difference = (model.get_logits(changed) - logits).abs().amax(dim=-1)
        assert difference[:j].sum() < 1e-12
        assert difference[j:].min() > 1e-3, f"token {j} is not seen by all behind it"


def test_the_order_of_earlier_tokens_matters():
    model = SimpleLM(32)
    difference = model.get_logits([3, 4, 5])[-1] - model.get_logits([4, 3, 5])[-1]
    assert difference.abs().max() > 1e-2


def test_models_are_made_by_their_seeds():
    logits = SimpleLM(32, seed=5).get_logits([1, 2])
    assert torch.equal(SimpleLM(32, seed=5).get_logits([1, 2]), logits)
    assert not torch.equal(SimpleLM(32, seed=6).get_logits([1, 2]), logits)
    assert SimpleLM(7, hidden_size=1).get_logits([1, 2]).shape == (2, 7)


def test_a_noisy_copy_agrees_from_always_to_hardly_ever():
    model = SimpleLM(32)
    ids = random_tokens(100, 32, seed=3)
    p = token_probs(model.get_logits(ids), 1.0)
    rates = []
    for noise in (0.0, 0.1, 0.2, 0.4, 0.8, 1.0):
        q = token_probs(model.noisy_copy(noise).get_logits(ids), 1.0)
        rates.append(float(acceptance_probability(p, q).mean()))
    assert rates == sorted(rates, reverse=True)
    assert rates[0] == pytest.approx(1, abs=1e-12) and rates[-1] < 0.3
    unrelated = SimpleLM(32, seed=9).noisy_copy(1.0)
    assert torch.equal(model.noisy_copy(1.0).get_logits([1]), unrelated.get_logits([1]))
    again, other = model.noisy_copy(0.3, seed=1), model.noisy_copy(0.3, seed=2)
    assert torch.equal(again.get_logits([1]), model.noisy_copy(0.3, seed=1).get_logits([1]))
    assert not torch.equal(again.get_logits([1]), other.get_logits([1]))


# -- sampling


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_a_token_is_sampled_with_its_probability(temperature):
    logits = torch.tensor([0.0, 1.0, -torch.inf, 2.0])
    weights = [math.exp(x / temperature) for x in logits.tolist()]
    law = {t: w / sum(weights) for t, w in enumerate(weights) if w > 0}
    generator = seeded(4)
    counts = Counter(sample_token(logits, temperature, generator) for _ in range(2000))
    assert counts.keys() == law.keys()
    expected = [2000 * chance for chance in law.values()]
    from scipy import stats  # `make test` installs it

    assert stats.chisquare([counts[token] for token in law], expected).pvalue > 1e-6


@pytest.mark.parametrize("temperature", [1e-6, 1e-306])
def test_next_to_no_temperature_is_greedy_and_not_nan(temperature):
    logits = torch.tensor([0.0, 2000.0, 1999.0, -torch.inf])
    assert token_probs(logits, temperature).tolist() == [0, 1, 0, 0]
    assert sample_token(logits, temperature, seeded(0)) == 1
    assert sample_token(torch.tensor([1.0, 3.0, 3.0, 2.0]), temperature=0) == 1, "the lowest id"


# -- drafting


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_are_the_draft_models_tokens_with_their_logits(temperature):
    model = SimpleLM(32)
    drafts, draft_logits = draft_generate(model, CONTEXT, 5, temperature, seeded(1))
    assert drafts == plain_generate(model, CONTEXT, 5, temperature, seeded(1))
    torch.testing.assert_close(draft_logits, model.get_logits([*CONTEXT, *drafts])[2:7])
    drafts, draft_logits = draft_generate(model, CONTEXT, 0, temperature)
    assert drafts == [] and draft_logits.shape == (0, 32)


# -- verifying scripts: every way is certain, so every rule must go it

HOW = [
    pytest.param({"temperature": 0}, id="greedy"),
    pytest.param({"rule": "rejection"}, id="rejection"),
    pytest.param({"rule": "matching"}, id="matching"),
]


@pytest.mark.parametrize("settings", HOW)
@pytest.mark.parametrize("has_logits", [True, False])
def test_drafts_are_kept_up_to_the_first_that_is_wrong(settings, has_logits):
    right = [5, 6, 7, 8]
    target = ScriptedLM([0, 0, *right, 9])
    for num_right in range(5):
        drafts = [t if j != num_right else t - 1 for j, t in enumerate(right)]
        logits = peaked(drafts) if has_logits else None
        tokens = verify_and_sample(target, CONTEXT, drafts, draft_logits=logits, **settings)
        assert tokens == ([*right, 9][: num_right + 1], num_right)


@pytest.mark.parametrize("settings", HOW)
@pytest.mark.parametrize("place", range(3))
def test_a_draft_is_judged_by_the_row_before_it_and_not_by_its_own(settings, place):
    """Trap 36. The target returns 5 6 7 8, and 1 after the wrong draft 1: a comparison with the
    next row would find a match there. A verifier that accepts d0 unseen fails at place 0."""
    answers = [5, 6, 7, 8]
    drafts = answers[:3]
    drafts[place] = 1
    answers[place + 1] = 1
    target = ScriptedLM([0, 0, *answers])
    tokens, num_accepted = verify_and_sample(
        target, CONTEXT, drafts, draft_logits=peaked(drafts), **settings
    )
    assert tokens == answers[: place + 1]
    assert num_accepted == place


@pytest.mark.parametrize("settings", HOW)
def test_without_drafts_a_step_is_plain_decoding(settings):
    """With k drafts, it is one pass of the target and k of the draft model."""
    target = ScriptedLM([0, 0, 5])
    assert verify_and_sample(target, CONTEXT, [], **settings) == ([5], 0)
    assert speculative_decode_step(target, target, CONTEXT, 0, **settings)[0] == [5]
    target, draft = ScriptedLM([0, 0, 5, 6, 7, 8]), ScriptedLM([0, 0, 5, 6, 1, 1])
    tokens, stats = speculative_decode_step(target, draft, CONTEXT, 3, **settings)
    assert tokens == [5, 6, 7] and stats.num_passes == 1
    assert (stats.num_drafted, stats.num_accepted) == (3, 2)
    assert (target.num_passes, draft.num_passes) == (1, 3)


def test_the_calls_of_the_reading_material_work_as_typed():
    """Temperature fourth, and a statistics object that is read by key. Where all drafts are right,
    ours has the bonus token besides."""
    target, draft = ScriptedLM([0, 0, 5, 6, 7, 8]), ScriptedLM([0, 0, 5, 6, 1, 1])
    drafts, draft_logits = draft_generate(draft, CONTEXT, 3, 0.0)
    assert drafts == [5, 6, 1] and len(draft_logits) == 3
    assert verify_and_sample(target, CONTEXT, drafts, 0.0) == ([5, 6, 7], 2)
    assert verify_and_sample(target, CONTEXT, [5, 6, 7], 0.0) == ([5, 6, 7, 8], 3)
    tokens, stats = speculative_decode_step(target, draft, CONTEXT, 3, 0.0)
    assert tokens == [5, 6, 7]
    assert (stats["num_draft"], stats["num_accepted"], stats["speedup"]) == (3, 2, 3)
    assert stats["acceptance_rate"] == pytest.approx(2 / 3)


# -- the same tokens


@pytest.mark.net
@pytest.mark.parametrize("noise", [0.0, 0.2, 0.5, 1.0])
@pytest.mark.parametrize("num_drafts", range(7))
def test_greedy_tokens_are_those_of_plain_decoding(num_drafts, noise):
    target = SimpleLM(40, seed=num_drafts)
    draft = target.noisy_copy(noise, seed=7)
    context = random_tokens(5, 40, seed=num_drafts)
    plain = plain_generate(target, context, 25, temperature=0)
    tokens, stats = speculative_generate(target, draft, context, 25, num_drafts, temperature=0)
    assert tokens == plain
    assert stats.num_accepted + stats.num_passes == 25
    if noise == 0:
        assert stats.num_accepted == stats.num_drafted
        assert stats.num_passes == math.ceil(25 / (num_drafts + 1))
    elif num_drafts:
        assert stats.num_accepted < stats.num_drafted


@pytest.mark.parametrize("num_tokens", range(8))
def test_exactly_the_tokens_asked_for_are_made_and_no_draft_is_made_for_nothing(num_tokens):
    target = SimpleLM(20)
    tokens, stats = speculative_generate(target, target, CONTEXT, num_tokens, 3, temperature=0)
    assert tokens == plain_generate(target, CONTEXT, num_tokens, temperature=0)
    # 4 tokens a pass, and the last pass makes what is missing: one itself, the rest by drafts.
    num_passes = math.ceil(num_tokens / 4)
    assert stats.num_drafted == stats.num_accepted == num_tokens - num_passes
    assert stats.num_passes == num_passes


# -- the same law


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
    rows, drafts = torch.tensor([0, 4]), torch.tensor([2, 0, 1])
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
        run, generator = (target, draft, CONTEXT, 3, temperature), seeded(seed)
        sampled, logits = draft_generate(*run[1:], generator)
        options = {"draft_logits": logits, "rule": "rejection" if has_logits else "matching"}
        tokens, _ = verify_and_sample(target, CONTEXT, sampled, temperature, generator, **options)
        assert speculative_decode_step(*run, seeded(seed), rule=options["rule"])[0] == tokens


# -- how often drafts are accepted; the rules of acceptance: `test_rejection_sampler.py`

P = [0.05, 0.30, 0.10, 0.25, 0.02, 0.08, 0.20]
Q = [0.20, 0.20, 0.02, 0.40, 0.10, 0.03, 0.05]


def test_a_shared_number_matches_as_often_as_worked_out():
    """Every number of a grid that is fine enough to hold all ends of intervals."""
    u = torch.arange(1000, dtype=torch.float64) / 1000 + 0.0005
    p, q = (torch.tensor(x, dtype=torch.float64).expand(1000, -1) for x in (P, Q))
    num_matches = int((draw(p, u)[0] == draw(q, u)[0]).sum())
    chance = acceptance_probability(p[0], q[0], "shared")
    assert num_matches / 1000 == pytest.approx(float(chance))


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


# -- what it is worth


@pytest.mark.sample
@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.9, 1 - 1e-12, 1.0])
@pytest.mark.parametrize("num_drafts", [0, 1, 5])
def test_expected_tokens_are_the_formula(acceptance, num_drafts):
    if acceptance in (1.0, 1 - 1e-12):
        formula = num_drafts + 1  # where the quotient is 0 / 0, or next to it
    else:
        formula = (1 - acceptance ** (num_drafts + 1)) / (1 - acceptance)
    assert expected_tokens_per_pass(acceptance, num_drafts) == pytest.approx(formula)


def test_speedup_by_hand():
    # 1 + 0.5 + 0.25 tokens, in the time of 1 + 2 * 0.1 passes.
    assert expected_speedup(0.5, 2, 0.1) == pytest.approx(1.75 / 1.2)
    assert expected_speedup(0.5, 2, 0.1, verify_cost=1.5) == pytest.approx(1.75 / 1.7)
    assert expected_speedup(0.7, 0, 0.1) == 1
    assert expected_speedup(0.0, 4, 0.1) == pytest.approx(1 / 1.4)  # it loses
    assert expected_speedup(1.0, 4, 0.0) == 5


# -- bad input

MODEL = SimpleLM(8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: SimpleLM(0), "vocab_size must"),
        (lambda: SimpleLM(8, 0), "hidden_size must"),
        (lambda: MODEL.noisy_copy(1.5), "noise must"),
        (lambda: MODEL.get_logits([1, 8]), "token_ids must"),
        (lambda: MODEL.get_logits([-1]), "token_ids must"),
        (lambda: sample_token(torch.zeros(3), -1.0), "temperature must"),
        (lambda: sample_token(torch.zeros(3), math.nan), "temperature must"),
        (lambda: sample_token(torch.zeros(3), math.inf), "temperature must"),
        (lambda: draft_generate(MODEL, [], 2), "context_ids must"),
        (lambda: draft_generate(MODEL, [1], -1), "num_speculative_tokens must"),
        (lambda: verify_and_sample(MODEL, [], [1]), "context_ids must"),
        (lambda: verify_and_sample(MODEL, [1], [1], rule="best"), "rule must"),
        (
            lambda: verify_and_sample(MODEL, [1], [1, 2], draft_logits=torch.zeros(1, 8)),
            "shape of draft_logits must",
        ),
        (
            lambda: verify_and_sample(MODEL, [1], [1], draft_logits=torch.zeros(1, 9)),
            "shape of draft_logits must",
        ),
        (lambda: verify_and_sample(ScriptedLM([1, 1]), [1], [-1]), "draft token must"),
        (lambda: verify_and_sample(ScriptedLM([1, 1]), [1], [10]), "draft token must"),
        (lambda: speculative_generate(MODEL, MODEL, [1], -5), "num_tokens must"),
        (lambda: plain_generate(MODEL, [], 5), "context_ids must"),
        (lambda: plain_generate(MODEL, [1], -5), "num_tokens must"),
        (lambda: acceptance_probability(torch.ones(1), torch.ones(1), "x"), "rule must"),
        (lambda: expected_tokens_per_pass(1.1, 2), "acceptance must"),
        (lambda: expected_tokens_per_pass(0.5, -1), "num_drafts must"),
        (lambda: expected_speedup(0.5, 2, -0.1), "draft_cost must"),
        (lambda: expected_speedup(0.5, 2, 0.1, 0.0), "verify_cost must"),
    ],
)
def test_bad_input_is_refused_with_its_name_and_value(call, message):
    with pytest.raises(ValueError, match=f"{message} .*, got "):
        call()
