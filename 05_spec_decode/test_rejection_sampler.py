"""Outputs have exactly the target's distribution, and no number, row or other request disturbs it.

`exact_law` computes the distribution from the code; these tests state the expected one. Nothing
here repeats the rules themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, chain

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from common.sampling.sampling_rules import SAMPLING_RULES
from common.tests.sampling_cases import RECIPES, make_sampling, sampling_probs
from draft_acceptance import acceptance_probability
from exact_law import (
    LAST,
    Cases,
    Model,
    Tokens,
    acceptance,
    continuation,
    distance,
    find_points,
    histories,
    matching_laws,
    plain_laws,
    step_laws,
)
from rejection_sampler import (
    PADDING,
    VerifiedTokens,
    rejection_sample,
    rejection_sampling_batched,
)
from request import SamplingParams

EXACT = 1e-12
NAN = float("nan")
FIXTURE = [HealthCheck.function_scoped_fixture]  # which has no state


@dataclass(frozen=True)
class VerificationRules:
    """Two functions that verify. The Triton suite has the kernels, and imports the tests of here
    that get these as an argument."""

    reject: Callable[..., VerifiedTokens]
    match: Callable[..., tuple[torch.Tensor, torch.Tensor]]


@pytest.fixture
def rules() -> VerificationRules:
    return VerificationRules(rejection_sample, rejection_sampling_batched)


def flat(lists: list[list]) -> list:
    return list(chain.from_iterable(lists))


# -- models: random tables, another distribution after every history


def random_pair(rng: np.random.Generator, vocab_size: int, kind: str) -> tuple[np.ndarray, ...]:
    p, q = rng.dirichlet(np.full(vocab_size, 0.7), size=2)
    certain_p, certain_q = np.eye(vocab_size)[rng.integers(vocab_size, size=2)]
    side = rng.permutation(vocab_size) < rng.integers(1, vocab_size)
    if kind == "zeros":
        p, q = p * ((rng.random(vocab_size) < 0.5) | (certain_p > 0)), q * ((p > 0.2) | side)
    elif kind == "disjoint":
        p, q = p * side, q * ~side
    elif kind == "equal":
        q = p
    elif kind == "close":
        q = p * (1 + 1e-9 * rng.standard_normal(vocab_size))
    elif kind == "one-hot":
        p, q = ((p, certain_q), (certain_p, q), (certain_p, certain_q))[rng.integers(3)]
    return p / p.sum(), q / q.sum()


KINDS = ("random", "zeros", "disjoint", "equal", "close", "one-hot")


@cache
def models(vocab_size: int, kind: str, seed: int = 0) -> tuple[Model, Model]:
    """Target and draft model. "mixed": another kind of distribution after each history."""

    @cache
    def pair(history: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
        rng = np.random.default_rng([seed, vocab_size, len(history), *history])
        chosen = rng.choice(KINDS) if kind == "mixed" else kind
        p, q = random_pair(rng, vocab_size, chosen)
        return torch.from_numpy(p), torch.from_numpy(q)

    return (lambda outputs, drafts: pair(outputs + drafts)[0]), (
        lambda outputs, drafts: pair(outputs + drafts)[1]
    )


def certain(model: Model) -> Model:
    """A model that always proposes its most likely token."""
    return lambda outputs, drafts: _one_hot(model(outputs, drafts))


def _one_hot(probs: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.one_hot(probs.argmax(), len(probs)).to(probs.dtype)


def rejection_sample_certain(p, drafts, q, *rest) -> VerifiedTokens:
    """As for drafts without probabilities."""
    return rejection_sample(p, drafts, None, *rest)


def plain(p: Model, vocab_size: int, num_tokens: int) -> dict:
    """Plain decoding after every history of fewer than `num_tokens` tokens."""
    return plain_laws(p, [h for n in range(num_tokens) for h in histories(vocab_size, n)])


SHAPES = ((2, 4), (3, 2), (5, 1), (3, 0))  # (vocab_size, num_drafts)


# -- the rejection rule is exact


@pytest.mark.net
@pytest.mark.parametrize(
    ("vocab_size", "num_drafts", "kind"),
    [(*shape, kind) for shape in SHAPES for kind in (*KINDS, "mixed")]
    + [(4, 4, "mixed"), (5, 3, "mixed"), (5, 2, "random")],
)
def test_a_step_has_the_law_of_the_target(vocab_size, num_drafts, kind):
    """One step, filled up to k + 1 tokens by plain decoding. Traps 36, 46."""
    p, q = models(vocab_size, kind)
    plainly = plain(p, vocab_size, num_drafts + 1)
    stepwise = plainly | step_laws(rejection_sample, p, q, [()], num_drafts)
    expected = continuation(plainly, num_drafts + 1)
    law = continuation(stepwise, num_drafts + 1)
    assert distance(law, expected) < EXACT
    assert law.keys() <= expected.keys(), "the target gives these no chance"


@pytest.mark.parametrize("kind", ("random", "zeros", "one-hot", "mixed"))
def test_certain_drafts_need_no_probabilities(kind):
    """Given none, the rule does what it does for a one-hot q, and that is exact."""
    p, q = models(3, kind, seed=2)
    q = certain(q)
    plainly = plain(p, 3, 4)
    laws = step_laws(rejection_sample_certain, p, q, [()], 3)
    assert distance(continuation(plainly | laws, 4), continuation(plainly, 4)) < EXACT
    assert distance(laws[()], step_laws(rejection_sample, p, q, [()], 3)[()]) < EXACT


def worked_out(p: Model, q: Model, rule: str) -> float:
    return float(acceptance_probability(p((), ()), q((), ()), rule))


@pytest.mark.parametrize("kind", ("random", "zeros", "close"))
def test_decisions_change_where_theory_says(kind):
    """A draft is accepted below p / q; the token is drawn from the positive part of p - q, and
    after the last draft from p."""
    p, q = models(4, kind, seed=4)
    cases = Cases.of(p, q, [()], 2)
    points = find_points(rejection_sample, cases)
    target = cases.target_probs[:, :2].gather(2, cases.drafts[..., None])[..., 0]
    draft = cases.draft_probs.gather(2, cases.drafts[..., None])[..., 0]
    # The code multiplies by q; where that is small, half an ulp of p is more than half an ulp.
    assert torch.allclose(points.accept, (target / draft).clamp(max=1), rtol=0, atol=EXACT)
    weights = cases.target_probs.clone()
    weights[:, :2] = (weights[:, :2] - cases.draft_probs).clamp(min=0)
    ends = (weights / weights.sum(dim=-1, keepdim=True)).cumsum(dim=-1)
    can_reject = points.accept < 1
    certain = torch.ones_like(can_reject[:, :1])
    reached = torch.cat([certain, points.accept.cumprod(dim=1) > 0], dim=1)
    reached &= torch.cat([can_reject, certain], dim=1)
    tolerance = 1e-4 if kind == "close" else EXACT  # of p - q only so many digits are left
    assert torch.allclose(points.ends[reached], ends[reached], rtol=0, atol=tolerance)


@pytest.mark.parametrize("kind", ("random", "zeros", "mixed"))
def test_each_number_decides_one_thing(kind):
    """Any numbers give what the points say: so the law, a product of lengths, is the law of
    independent numbers, and nothing depends on a number that has been used or is not reached."""
    lengths_seen = set()
    for seed in range(4):
        cases = Cases.of(*models(3, kind, seed), [()], 3)
        points = find_points(rejection_sample, cases)
        generator = torch.Generator().manual_seed(seed)
        case = torch.randint(len(cases.drafts), (500,), generator=generator)
        accept_u = torch.rand(500, 3, generator=generator, dtype=torch.float64)
        sample_u = torch.rand(500, 4, generator=generator, dtype=torch.float64)
        verified = cases.verify(rejection_sample, case, accept_u, sample_u)
        for i, run in enumerate(verified.token_ids.tolist()):
            predicted = points.predict(int(case[i]), accept_u[i].tolist(), sample_u[i].tolist())
            *accepted, last = predicted
            drafts = cases.drafts[case[i]].tolist()[: len(accepted)]
            assert run[: int(verified.num_sampled[i])] == [*drafts, last]
            lengths_seen.add(len(predicted))
    assert lengths_seen == {1, 2, 3, 4}


def test_a_law_that_is_wrong_is_seen():
    """Rules with one mistake each, and the distance of their law from the target's."""
    p, q = models(3, "random", seed=6)
    plainly = plain(p, 3, 3)

    def wrong(change: Callable[..., tuple]) -> float:
        def rule(*arguments):
            return rejection_sample(*change(*arguments))

        laws = plainly | step_laws(rule, p, q, [()], 2)
        return distance(continuation(laws, 3), continuation(plainly, 3))

    assert wrong(lambda *arguments: arguments) < EXACT
    assert wrong(lambda p, d, q, *rest: (p, d, q.roll(1, 0), *rest)) > 1e-2
    assert wrong(lambda p, d, q, cu, k, a, s: (p, d, q, cu, k, a * 0, s)) > 1e-2  # Trap 36
    assert wrong(lambda p, d, q, cu, k, a, s: (p, d, q, cu, k, a, s**2)) > 1e-2
    assert wrong(lambda p, d, q, cu, k, a, s: (p, d, q, cu, k, a * (1 + 1e-9), s)) > 1e-11


# -- under the constraints of sampling

VOCAB_SIZE, EOS, PROMPT = 4, 3, [1]

CONSTRAINTS = {
    **{rule.name: RECIPES[rule.name] for rule in SAMPLING_RULES},
    "greedy": SamplingParams(temperature=0),
    "min_tokens": SamplingParams(min_tokens=2),
    "greedy with penalties": SamplingParams(temperature=0, presence_penalty=-2.0),
    "all": SamplingParams(
        temperature=0.8,
        top_k=3,
        top_p=0.9,
        min_p=0.05,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        min_tokens=1,
    ),
}
PENALTIES = [rule.name for rule in SAMPLING_RULES if rule.is_penalty]
SEES_DRAFTS = (*PENALTIES, "min_tokens", "greedy with penalties", "all")


@dataclass(frozen=True)
class ConstrainedModel:
    """Random logits after every history, then `sampling_probs`: a `Model`."""

    params: SamplingParams
    seed: int
    sees_drafts: bool = True  # as history of penalties and minimum length

    def __call__(self, outputs: Tokens, drafts: Tokens) -> torch.Tensor:
        return _constrained(self)[outputs, drafts]


@cache
def _constrained(model: ConstrainedModel) -> dict[tuple[Tokens, Tokens], torch.Tensor]:
    """All histories of up to two tokens, however they divide into outputs and drafts: one batch."""
    tokens = [h for n in range(3) for h in histories(VOCAB_SIZE, n)]
    parts = [(h[:cut], h[cut:]) for h in tokens for cut in range(len(h) + 1)]
    logits = [
        np.random.default_rng([model.seed, len(h), *h]).normal(scale=1.5, size=VOCAB_SIZE)
        for h in (outputs + drafts for outputs, drafts in parts)
    ]
    sampling = make_sampling(
        [model.params] * len(parts),
        prompts=[PROMPT] * len(parts),
        outputs=[list(outputs) for outputs, _ in parts],
        drafts=[list(drafts) if model.sees_drafts else [] for _, drafts in parts],
        eos=[(EOS,)] * len(parts),
    )
    probs = sampling_probs(torch.from_numpy(np.stack(logits)), sampling)
    return dict(zip(parts, probs, strict=True))


def constrained_error(name: str, p: Model) -> float:
    """Three tokens that come out in steps of 2, 1 and 0 drafts, where the rows of verification are
    `p`'s: how far their law is from that of plain decoding under the constraint."""
    params = CONSTRAINTS[name]
    # As in the engine, the draft model's penalties do not see the drafts of the same run. And of a
    # greedy one, all but one draft would never be tried.
    q = ConstrainedModel(replace(params, temperature=params.temperature or 1.0), 8, False)
    laws = plain_laws(p, histories(VOCAB_SIZE, 2))
    for n, k in enumerate((2, 1)):
        laws |= step_laws(rejection_sample, p, q, histories(VOCAB_SIZE, n), k)
    plainly = plain(ConstrainedModel(params, seed=7), VOCAB_SIZE, 3)
    return distance(continuation(laws, 3), continuation(plainly, 3))


@pytest.mark.net
@pytest.mark.parametrize("name", CONSTRAINTS)
def test_constraints_give_the_law_of_plain_decoding_under_them(name):
    """Traps 37, 45. At each position the constraint and its history, drafts before it included. A
    constraint on the bonus token alone gives another law. A history without drafts does, too."""
    free = ConstrainedModel(SamplingParams(), seed=7)
    bound = ConstrainedModel(CONSTRAINTS[name], seed=7)

    def bound_at_bonus(outputs: Tokens, drafts: Tokens) -> torch.Tensor:
        is_bonus = len(outputs) + len(drafts) == 2  # the steps above all end there
        return (bound if is_bonus else free)(outputs, drafts)

    assert constrained_error(name, bound) < EXACT
    assert constrained_error(name, bound_at_bonus) > 1e-3
    if name in SEES_DRAFTS:
        assert constrained_error(name, replace(bound, sees_drafts=False)) > 1e-3


# -- the matching rule


@pytest.mark.parametrize("kind", (*KINDS, "mixed"))
def test_matching_accepts_less_and_for_certain_drafts_the_same(kind):
    """By the formulas of the chapter's page. No rule accepts more often than rejection does."""
    p, q = models(4, kind, seed=3)
    matched = acceptance(matching_laws(p, q, [()], 1)[()])
    assert matched == pytest.approx(worked_out(p, q, "matching"), abs=EXACT)
    accepted = acceptance(step_laws(rejection_sample, p, q, [()], 1)[()])
    assert accepted == pytest.approx(worked_out(p, q, "rejection"), abs=EXACT)
    assert matched <= accepted + EXACT
    likeliest = worked_out(p, q, "argmax")
    q = certain(q)
    for laws in (matching_laws(p, q, [()], 1), step_laws(rejection_sample, p, q, [()], 1)):
        assert acceptance(laws[()]) == pytest.approx(likeliest, abs=EXACT)


def match_one(sampled: list[int], drafts: list[int]) -> list[int]:
    """The rule for one request, in words: what was sampled, up to where it differs."""
    run = []
    for token, draft in zip(sampled, [*drafts, None], strict=True):
        run.append(token)
        if token != draft:
            break
    return run


@pytest.mark.net
@settings(deadline=None, max_examples=100, derandomize=True, suppress_health_check=FIXTURE)
@given(
    num_drafts=st.lists(st.integers(0, 4), min_size=1, max_size=6),
    num_extra=st.integers(0, 3),
    seed=st.integers(0, 2**32),
)
def test_both_layouts_of_drafts_agree_with_a_loop(rules, num_drafts, num_extra, seed):
    """[num_drafts], or [num_rows] as fed to the model, whose first row is the last known token."""
    rng = np.random.default_rng(seed)
    drafts = [rng.integers(2, size=k).tolist() for k in num_drafts]
    sampled = [rng.integers(2, size=k + 1).tolist() for k in num_drafts]
    fed = [[int(rng.integers(2)), *tokens] for tokens in drafts]
    cu_num_logits = torch.tensor([0, *accumulate(k + 1 for k in num_drafts)])
    width = max(num_drafts) + num_extra
    runs = [match_one(*pair) for pair in zip(sampled, drafts)]
    expected = [run + [PADDING] * (width + 1 - len(run)) for run in runs]
    for layout in (drafts, fed):
        tokens, num_sampled = rules.match(
            torch.tensor(flat(sampled)),
            torch.tensor(flat(layout), dtype=torch.int64),
            cu_num_logits,
            width,
        )
        assert tokens.dtype == num_sampled.dtype == torch.int64
        assert tokens.tolist() == expected
        assert num_sampled.tolist() == [len(run) for run in runs]


@pytest.mark.parametrize("is_fed", [False, True])
def test_a_placeholder_matches_nothing_not_even_a_row_that_says_nothing(rules, is_fed):
    """-1 is a draft that is none, and the sample of a row of NaN."""
    sampled = torch.tensor([-1, 3, 2, 2, -1, 4])
    drafts = [-1, 3, 2, -1]  # two for each request; the first of the second one is right
    tokens = torch.tensor([9, -1, 3, 9, 2, -1] if is_fed else drafts)
    assert rules.match(sampled, tokens, torch.tensor([0, 3, 6]), 2)[1].tolist() == [1, 2]


@pytest.mark.sample
@pytest.mark.parametrize("num_reqs", [0, 1, 3])
@pytest.mark.parametrize("width", [0, 1, 4])
def test_without_any_drafts_each_request_gets_its_sample(rules, num_reqs, width):
    sampled = torch.arange(num_reqs) + 5
    cu_num_logits = torch.arange(num_reqs + 1)
    for drafts in (torch.zeros(0, dtype=torch.int64), torch.arange(num_reqs) + 7):
        tokens, num_sampled = rules.match(sampled, drafts, cu_num_logits, width)
        assert tokens.shape == (num_reqs, width + 1)
        assert tokens.tolist() == [[i + 5] + [PADDING] * width for i in range(num_reqs)]
        assert num_sampled.tolist() == [1] * num_reqs
    u = torch.zeros(num_reqs, dtype=torch.float64)
    for q in (torch.zeros(0, 9), None):
        none = torch.zeros(0, dtype=torch.int64), q, cu_num_logits, width, u[:0]
        verified = rules.reject(torch.eye(9)[sampled], *none, u)
        assert torch.equal(verified.token_ids, tokens)
        assert torch.equal(verified.num_sampled, num_sampled)


# -- zeros, roundings and ends


@dataclass(frozen=True)
class DraftedRequests:
    """The arguments of `rejection_sample`, request by request."""

    target_probs: list[torch.Tensor]  # each [k + 1, vocab_size]
    drafts: list[list[int]]
    draft_probs: list[torch.Tensor] | None  # each [k, vocab_size]
    accept_u: list[list[float]]
    sample_u: list[list[float]]

    def select(self, order: list[int]) -> DraftedRequests:
        columns = (self.target_probs, self.drafts, self.draft_probs, self.accept_u, self.sample_u)
        return DraftedRequests(*(None if c is None else [c[i] for i in order] for c in columns))

    def arguments(self, num_extra: int = 0) -> tuple:
        lengths = [len(drafts) for drafts in self.drafts]
        return (
            torch.cat(self.target_probs),
            torch.tensor(flat(self.drafts), dtype=torch.int64),
            None if self.draft_probs is None else torch.cat(self.draft_probs),
            torch.tensor([0, *accumulate(k + 1 for k in lengths)]),
            max(lengths) + num_extra,
            torch.tensor(flat(self.accept_u), dtype=torch.float64),
            torch.tensor(flat(self.sample_u), dtype=torch.float64),
        )

    def runs(self, rules: VerificationRules, num_extra: int = 0) -> list[list[int]]:
        """Also holds the form of the result to what it should be."""
        verified = rules.reject(*self.arguments(num_extra))
        width = max(map(len, self.drafts)) + num_extra + 1
        assert verified.token_ids.shape == (len(self.drafts), width)
        assert verified.token_ids.dtype == verified.num_sampled.dtype == torch.int64
        runs = []
        rows = zip(verified.token_ids.tolist(), verified.num_sampled.tolist(), strict=True)
        for run, length in rows:
            assert all(token == PADDING for token in run[length:])
            runs.append(run[:length])
        return runs

    def check(self, runs: list[list[int]]) -> None:
        """Each run is some drafts and one token more, all possible, and ends where it should."""
        for i, run in enumerate(runs):
            drafts, probs, n = self.drafts[i], self.target_probs[i], len(run) - 1
            assert 0 <= n <= len(drafts)
            assert run[:n] == drafts[:n]
            assert all(0 <= token < probs.shape[1] for token in run)
            assert all(probs[j, token] > 0 for j, token in enumerate(run)), (run, probs)
            for j, draft in enumerate(drafts[: n + 1]):
                q = 1.0 if self.draft_probs is None else float(self.draft_probs[i][j, draft])
                p, u = float(probs[j, draft]), self.accept_u[i][j]
                assert (j < n) == (u * q < p), "accepted below p / q, and nowhere else"


def single(
    p: list, q: list | None, drafts: list[int], accept_u: list, sample_u: list
) -> DraftedRequests:
    """One request; `p` and `q` one distribution each, for all rows."""
    k = len(drafts)
    return DraftedRequests(
        [torch.tensor([p] * (k + 1))],
        [drafts],
        None if q is None else [torch.tensor([q] * k)],
        [accept_u],
        [sample_u],
    )


ENDS = (0.0, 2.0**-53, 0.5, LAST)

# p, q, draft -> what may come out, and whether the draft may stay
IMPOSSIBLE = [
    ("q = 0 at the draft", [0.5, 0.5], [1.0, 0.0], 1, True),
    ("p = 0 at the draft", [0.0, 0.5, 0.5], [1.0, 0.0, 0.0], 0, False),
    ("p = q = 0 at the draft", [0.0, 0.5, 0.5], [0.0, 0.5, 0.5], 0, False),
    ("a denormal p at the draft", [1e-45, 1.0, 0.0], [1.0, 0.0, 0.0], 0, True),
    ("a denormal q at the draft", [0.0, 1.0, 0.0], [1e-45, 1.0, 0.0], 0, False),
    ("both denormal", [2e-45, 1.0, 0.0], [1e-45, 1.0, 0.0], 0, True),
    ("one-hot q", [0.25, 0.75, 0.0], [0.0, 1.0, 0.0], 1, True),
    ("one-hot p and q", [0.0, 1.0], [0.0, 1.0], 1, True),
    ("one-hot p and q apart", [0.0, 1.0], [1.0, 0.0], 0, False),
    ("p = q", [0.3, 0.7, 0.0], [0.3, 0.7, 0.0], 0, True),
    ("the draft is in the padding", [0.0, 0.75, 0.25, 0.0], [0.5, 0.25, 0.25, 0.0], 3, False),
    ("no probabilities", [0.25, 0.75, 0.0], None, 1, True),
    ("no probabilities and p = 0", [0.0, 1.0, 0.0], None, 0, False),
    ("no probabilities and p = 1", [0.0, 1.0, 0.0], None, 1, True),
]


@pytest.mark.parametrize(
    ("p", "q", "draft", "may_stay"),
    [case[1:] for case in IMPOSSIBLE],
    ids=[c[0] for c in IMPOSSIBLE],
)
def test_impossible_tokens_stay_out(rules, p, q, draft, may_stay):
    """Traps 36, 46: no NaN, no acceptance of what has p = 0, for no number, 0 included."""
    stayed = set()
    for u in ENDS:
        for v in ENDS:
            batch = single(p, q, [draft, draft], [u, u], [v, v, v])
            runs = batch.runs(rules)
            batch.check(runs)
            stayed.add(len(runs[0]) > 1)
    assert (True in stayed) == may_stay


def test_the_ends_of_intervals_belong_to_the_token_above(rules):
    """Accepted strictly below p / q; `u` at a cumulative sum draws the token that begins there."""
    p, q = [0.25, 0.25, 0.5, 0.0], [0.5, 0.5, 0.0, 0.0]
    below = 0.5 - 2.0**-53
    assert single(p, q, [0], [below], [0.0, 0.0]).runs(rules) == [[0, 0]]
    assert single(p, q, [0], [0.5], [0.0, 0.0]).runs(rules) == [[2]]
    assert single(p, q, [0], [0.5], [LAST, 0.0]).runs(rules) == [[2]]
    for v, token in ((0.25 - 2.0**-53, 0), (0.25, 1), (below, 1), (0.5, 2), (LAST, 2)):
        assert single(p, q, [0], [0.0], [0.0, v]).runs(rules) == [[0, token]]
        assert single(p, None, [3], [0.0], [v, 0.0]).runs(rules) == [[token]]
    assert single(p, None, [2], [below], [0.0, 0.0]).runs(rules) == [[2, 0]]
    assert single(p, None, [2], [0.5], [0.0, 0.0]).runs(rules) == [[0]]
    p, q = [0.25, 0.5, 0.25], [1.0, 0.0, 0.0]  # the rest: two parts of token 1, one of token 2
    assert single(p, q, [0], [0.5], [0.6666, 0.0]).runs(rules) == [[1]]
    assert single(p, q, [0], [0.5], [0.6667, 0.0]).runs(rules) == [[2]]


def test_at_the_quotient_itself_the_product_decides(rules):
    """p / q is rounded, up as often as down. So that every program decides alike there, it is said
    which arithmetic counts: u * q < p in float64, of probabilities as they are."""
    rng = np.random.default_rng(4)
    p, q = torch.from_numpy(rng.uniform(0.01, 0.99, size=(2, 60))).float().sort(dim=0).values
    quotient = p.double() / q.double()
    verified = rules.reject(
        torch.stack([p, 1 - p], dim=1).repeat_interleave(2, dim=0),
        torch.zeros(60, dtype=torch.int64),
        torch.stack([q, 1 - q], dim=1),
        torch.arange(61) * 2,
        1,
        quotient,
        torch.zeros(120, dtype=torch.float64),
    )
    is_accepted = verified.num_sampled == 2
    assert torch.equal(is_accepted, quotient * q.double() < p.double())
    assert 0 < is_accepted.sum() < 60, "a quotient below p / q, and one that is not"


@pytest.mark.parametrize(
    ("p", "q"),
    [
        # All that is left of p - q is a token too small for an integer of `draw`.
        ([0.6, 0.4, 1e-20, 0.0], [0.6, 0.40000004, 0.0, 0.0]),
        # Softmax in float32 says 1 - 2**-24 and rejects the draft once in 2**24.
        ([1e-20, 0.99999994, 0.0, 0.0], None),
        ([1e-16, 0.99999994, 1e-16, 1e-16, 0.0], None),  # each is too small, their sum is not
        ([0.0, 0.99999994, 0.0, 0.0], None),
        ([0.0, 0.99999994, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]),
    ],
)
def test_a_rejection_that_leaves_nothing_draws_from_p(rules, p, q):
    """Trap 43: above all not the vocabulary's last lane, which is padding."""
    for v in ENDS:
        batch = single(p, q, [1], [LAST], [v, v])
        runs = batch.runs(rules)
        batch.check(runs)
        assert len(runs[0]) == 1, "rejected"


weights = st.one_of(
    st.sampled_from([0.0, 0.0, 1e-45, 1e-38, 1e-20, 1e-8, 0.25, 1.0]), st.floats(0, 1, width=32)
)
numbers = st.one_of(st.sampled_from(ENDS), st.floats(0, LAST))


@st.composite
def distributions(draw_from, vocab_size: int) -> torch.Tensor:
    values = draw_from(st.lists(weights, min_size=vocab_size, max_size=vocab_size))
    values[draw_from(st.integers(0, vocab_size - 1))] = 1.0
    row = torch.tensor([*values, 0.0, 0.0], dtype=torch.float32)  # two lanes of padding
    return row / row.sum()


def nudged(row: torch.Tensor, seed: int) -> torch.Tensor:
    """Each number up, down or not, by one ulp; some small ones gone."""
    rng = np.random.default_rng(seed)
    to = torch.from_numpy(rng.choice([0.0, 1.0], size=len(row))).float()
    moved = torch.where(torch.from_numpy(rng.random(len(row)) < 0.5), torch.nextafter(row, to), row)
    return torch.where((row == 0) | ((row < 1e-6) & (to == 0)), 0.0, moved)


@st.composite
def batches(draw_from) -> DraftedRequests:
    vocab_size = draw_from(st.integers(1, 4))
    lengths = draw_from(st.lists(st.integers(0, 3), min_size=1, max_size=4))
    is_certain = draw_from(st.booleans())
    columns: tuple[list, ...] = ([], [], [], [], [])
    for k in lengths:
        p = [draw_from(distributions(vocab_size)) for _ in range(k + 1)]
        q = [
            draw_from(
                st.one_of(
                    distributions(vocab_size),
                    st.just(row),
                    st.integers(0, 999).map(lambda seed, row=row: nudged(row, seed)),
                )
            )
            for row in p[:k]
        ]
        columns[0].append(torch.stack(p))
        columns[1].append([draw_from(st.integers(0, vocab_size + 1)) for _ in range(k)])
        columns[2].append(torch.stack(q) if k else torch.zeros(0, vocab_size + 2))
        columns[3].append([draw_from(numbers) for _ in range(k)])
        columns[4].append([draw_from(numbers) for _ in range(k + 1)])
    batch = DraftedRequests(*columns)
    return replace(batch, draft_probs=None) if is_certain else batch


@pytest.mark.net
@settings(deadline=None, max_examples=90, derandomize=True, suppress_health_check=FIXTURE)
@given(batch=batches())
def test_every_run_is_possible_and_rows_are_independent(rules, batch):
    """Traps 36, 43, 46. float32 with zeros, denormals, p == q to the last bit and almost, any
    drafts, padding lanes; then each request alone, in another order and a wider result."""
    runs = batch.runs(rules)
    batch.check(runs)
    order = list(range(len(runs)))
    assert [batch.select([i]).runs(rules)[0] for i in order] == runs
    assert batch.select(order[::-1]).runs(rules, num_extra=2) == runs[::-1]
    assert batch.select(order + order).runs(rules) == runs + runs


# -- company


def random_batch(
    num_reqs: int, vocab_size: int, seed: int, is_certain: bool = False
) -> DraftedRequests:
    """Target and drafts agree so much that runs of every length occur."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 5, size=num_reqs).tolist()

    def rows(n: int) -> torch.Tensor:
        probs = rng.dirichlet(np.full(vocab_size, 0.3), size=n).reshape(n, vocab_size)
        return torch.from_numpy(probs).float()

    q = [rows(k) for k in lengths]
    drafts = [[int(rng.choice(vocab_size, p=row / row.sum())) for row in x.numpy()] for x in q]
    agreed = [torch.eye(vocab_size)[tokens] for tokens in drafts] if is_certain else q
    p = [torch.cat([x, rows(1)]) * 0.7 + rows(len(x) + 1) * 0.3 for x in agreed]
    accept_u = [rng.random(k).tolist() for k in lengths]
    sample_u = [rng.random(k + 1).tolist() for k in lengths]
    return DraftedRequests(p, drafts, None if is_certain else q, accept_u, sample_u)


def test_nan_of_one_request_stays_with_it(rules):
    """Logits that say nothing make NaN. Their request gets some token; the others their own."""
    batch = random_batch(30, 11, seed=2)
    runs = batch.runs(rules)
    for i in range(0, 30, 4):
        batch.target_probs[i].fill_(NAN)
        batch.draft_probs[i].fill_(NAN)
    broken = batch.runs(rules)
    for i, (run, before) in enumerate(zip(broken, runs)):
        if i % 4:
            assert run == before
        else:
            assert len(run) == 1 and 0 <= run[0] < 11, "nothing is accepted"


def test_the_bonus_token_comes_only_behind_all_drafts(rules):
    """Certain drafts and targets: the bonus row says 9, all others something else."""
    target = torch.eye(10)[[1, 2, 3, 9]]
    for num_right, expected in enumerate([[1], [1, 2], [1, 2, 3], [1, 2, 3, 9]]):
        drafts = [1, 2, 3][:num_right] + [0] * (3 - num_right)
        for q in (None, [torch.eye(10)[drafts]]):
            batch = DraftedRequests([target], [drafts], q, [[0.0] * 3], [[LAST] * 4])
            assert batch.runs(rules) == [expected]
        sampled = target.argmax(dim=1)
        tokens, _ = rules.match(sampled, torch.tensor(drafts), torch.tensor([0, 4]), 3)
        assert [t for t in tokens[0].tolist() if t != PADDING] == expected


@pytest.mark.parametrize("is_certain", [False, True])
def test_an_id_that_is_no_token_is_never_emitted_and_its_place_has_the_law_of_p(rules, is_certain):
    """As a placeholder (Trap 40). Beside the rows lie numbers that would accept it, and -1 is also
    the last token's address in Python, where p is 1/4."""
    drafts = torch.tensor([-1, 4, -2, -5, 99, 2**62, -(2**62)])
    n = len(drafts)
    p, q = torch.full((2 * n + 2, 8), 9.0)[1:-1, 2:6], torch.full((n + 2, 8), 1e-3)[1:-1, 2:6]
    p[:], q[:] = torch.tensor([0.0, 0.5, 0.25, 0.25]), torch.tensor([0.0, 0.0, 1.0, 0.0])
    rows = torch.arange(n + 1) * 2
    for u, token in ((0.0, 1), (0.25, 1), (0.6, 2), (0.8, 3)):
        numbers = torch.zeros(n, dtype=torch.float64), torch.full((2 * n,), u, dtype=torch.float64)
        verified = rules.reject(p, drafts, None if is_certain else q, rows, 1, *numbers)
        assert verified.token_ids.tolist() == [[token, PADDING]] * n
        assert verified.num_sampled.tolist() == [1] * n
    # Another request's token beside it is accepted.
    numbers = torch.zeros(2, dtype=torch.float64), torch.full((4,), 0.6, dtype=torch.float64)
    q_two = None if is_certain else q[:2]
    verified = rules.reject(p[:4], torch.tensor([1, -1]), q_two, rows[:3], 1, *numbers)
    assert verified.token_ids.tolist() == [[1, 2], [2, PADDING]]


def test_a_draft_behind_a_rejected_one_never_counts(rules):
    """Even if it is certain to be accepted."""
    target = torch.eye(4)[[1, 2, 3, 0]]
    batch = DraftedRequests([target], [[0, 2, 3]], None, [[0.0] * 3], [[0.5] * 4])
    assert batch.runs(rules) == [[1]]
    sampled, drafts = target.argmax(dim=1), torch.tensor([0, 2, 3])
    tokens, num_sampled = rules.match(sampled, drafts, torch.tensor([0, 4]), 3)
    assert tokens.tolist() == [[1, PADDING, PADDING, PADDING]] and num_sampled.tolist() == [1]


@pytest.mark.parametrize("is_certain", [False, True])
def test_arguments_stay_as_they_are(rules, is_certain):
    """Trap 42: the result is new memory, and nothing is written into what was given."""
    batch = random_batch(20, 7, seed=3, is_certain=is_certain)
    arguments = batch.arguments()
    tensors = [x for x in arguments if isinstance(x, torch.Tensor)]
    copies = [x.clone() for x in tensors]
    verified = rules.reject(*arguments)
    sampled, drafts, cu_num_logits = arguments[0].argmax(dim=1), arguments[1], arguments[3]
    tensors.append(sampled)
    copies.append(sampled.clone())
    matched = rules.match(sampled, drafts, cu_num_logits, arguments[4])
    results = [verified.token_ids, verified.num_sampled, *matched]
    assert all(torch.equal(x, copy) for x, copy in zip(tensors, copies, strict=True))
    given_memory = {x.untyped_storage().data_ptr() for x in tensors}
    memory = [x.untyped_storage().data_ptr() for x in results]
    assert not given_memory & set(memory) and not set(memory[:2]) & set(memory[2:])
