"""Outputs have exactly the target's distribution, and no number, row or other request disturbs it.

Two views that share nothing: `exact_law` computes the distribution from the code, and a loop over
one request says in words which run certain numbers make. The kernels' file imports the tests that
get `rules` as an argument."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, chain

import numpy as np
import pytest
import torch

from exact_law import (
    LAST,
    Model,
    Tokens,
    continuation,
    distance,
    histories,
    plain_laws,
    step_laws,
)
from inverse_cdf import SCALE
from rejection_sampler import (
    PADDING,
    VerifiedTokens,
    rejection_sample,
    rejection_sampling_batched,
)

EXACT = 1e-12
NAN = float("nan")
F32 = torch.float32
F64 = torch.float64


@dataclass(frozen=True)
class VerificationRules:
    reject: Callable[..., VerifiedTokens]
    match: Callable[..., tuple[torch.Tensor, torch.Tensor]]


@pytest.fixture
def rules() -> VerificationRules:
    return VerificationRules(rejection_sample, rejection_sampling_batched)


# -- models: random tables, another distribution after every history

KINDS = ("random", "zeros", "disjoint", "equal", "close", "one-hot")


def random_pair(rng: np.random.Generator, vocab_size: int, kind: str) -> tuple[np.ndarray, ...]:
    p, q = rng.dirichlet(np.full(vocab_size, 0.7), size=2)
    certain_p, certain_q = np.eye(vocab_size)[rng.integers(vocab_size, size=2)]
    side = rng.permutation(vocab_size) < rng.integers(1, vocab_size)
    if kind == "zeros":
        p, q = p * ((rng.random(vocab_size) < 0.5) | (certain_p > 0)), q * ((p > 0.2) | side)
    elif kind == "disjoint":
        p = p * side
        q = q * ~side
    elif kind == "equal":
        q = p
    elif kind == "close":
        q = p * (1 + 1e-9 * rng.standard_normal(vocab_size))
    elif kind == "one-hot":
        p, q = ((p, certain_q), (certain_p, q), (certain_p, certain_q))[rng.integers(3)]
    return p / p.sum(), q / q.sum()


@cache
def models(vocab_size: int, kind: str, seed: int = 0) -> tuple[Model, Model]:
    """Target and draft model. "mixed": another kind of distribution after each history."""

    @cache
    def pair(history: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
        rng = np.random.default_rng([seed, vocab_size, len(history), *history])
        chosen = rng.choice(KINDS) if kind == "mixed" else kind
        p, q = random_pair(rng, vocab_size, chosen)
        return torch.from_numpy(p), torch.from_numpy(q)

    target = lambda outputs, drafts: pair(outputs + drafts)[0]  # noqa: E731
    return target, lambda outputs, drafts: pair(outputs + drafts)[1]


def certain(model: Model) -> Model:
    """A model that always proposes its most likely token."""

    def one_hot(outputs: Tokens, drafts: Tokens) -> torch.Tensor:
        probs = model(outputs, drafts)
        return torch.nn.functional.one_hot(probs.argmax(), len(probs)).to(probs.dtype)

    return one_hot


def rejection_sample_certain(p, drafts, q, *rest) -> VerifiedTokens:
    """As for drafts without probabilities."""
    return rejection_sample(p, drafts, None, *rest)


# -- the rules are exact


@pytest.mark.net
@pytest.mark.parametrize(
    ("vocab_size", "num_drafts", "kind"),
    [
        *((3, 2, kind) for kind in KINDS),
        *((2, 4, "mixed"), (5, 1, "mixed"), (3, 0, "random"), (4, 4, "mixed"), (5, 3, "mixed")),
        *((3, 3, "certain-random"), (3, 3, "certain-mixed")),
    ],
)
def test_a_step_has_the_law_of_the_target(vocab_size, num_drafts, kind):
    """One step, filled up to k + 1 tokens by plain decoding. Certain drafts need no probabilities.
    Traps 36, 46."""
    p, q = models(vocab_size, kind.removeprefix("certain-"))
    rule = rejection_sample
    if kind.startswith("certain"):
        q = certain(q)
        rule = rejection_sample_certain
    before = [h for n in range(num_drafts + 1) for h in histories(vocab_size, n)]
    plainly = plain_laws(p, before)
    stepwise = plainly | step_laws(rule, p, q, [()], num_drafts)
    expected = continuation(plainly, num_drafts + 1)
    law = continuation(stepwise, num_drafts + 1)
    assert distance(law, expected) < EXACT
    assert law.keys() <= expected.keys(), "the target gives these no chance"


# -- the rules in words, for one request


def verify_one(
    p: torch.Tensor, drafts: list[int], q: torch.Tensor | None, accept_u, sample_u
) -> list[int]:
    """`u * q < p` in float64 accepts. After a rejection, what is left of p - q draws, unless an
    integer is more than any of it; and p itself, if the id was no token."""
    run = []
    for j, weights in enumerate(p):
        if j < len(drafts) and 0 <= drafts[j] < len(weights):
            draft = drafts[j]
            q_row = torch.eye(len(weights))[draft] if q is None else q[j]
            if accept_u[j] * float(q_row[draft]) < float(weights[draft]):
                run.append(draft)
                continue
            rest = (weights - q_row.to(weights.dtype)).clamp(min=0)
            if q is None:
                rest = weights.clone()
                rest[draft] = 0
            weights = rest if float(rest.max()) * SCALE >= 1 else weights
        ends = list(accumulate(int(weight * SCALE) for weight in weights.tolist()))
        token = bisect_right(ends, int(sample_u[j] * ends[-1]))
        return [*run, min(token, len(ends) - 1)]
    raise AssertionError("there is a row more than drafts")


def match_one(sampled: list[int], drafts: list[int]) -> list[int]:
    """What was sampled, up to where it differs. A placeholder matches nothing."""
    run = []
    for token, draft in zip(sampled, [*drafts, None], strict=True):
        run.append(token)
        if token != draft or token < 0:
            break
    return run


@dataclass(frozen=True)
class DraftedRequests:
    """The arguments of `rejection_sample`, request by request."""

    target_probs: list[torch.Tensor]  # each [k + 1, vocab_size]
    drafts: list[list[int]]
    draft_probs: list[torch.Tensor] | None  # each [k, vocab_size]
    accept_u: list[list[float]]
    sample_u: list[list[float]]

    def arguments(self, num_extra: int = 0) -> list:
        lengths = [len(drafts) for drafts in self.drafts]
        return [
            torch.cat(self.target_probs),
            torch.tensor(list(chain(*self.drafts)), dtype=torch.int64),
            None if self.draft_probs is None else torch.cat(self.draft_probs),
            torch.tensor([0, *accumulate(k + 1 for k in lengths)]),
            max(lengths) + num_extra,
            torch.tensor(list(chain(*self.accept_u)), dtype=F64),
            torch.tensor(list(chain(*self.sample_u)), dtype=F64),
        ]

    def expected(self) -> list[list[int]]:
        q = self.draft_probs or [None] * len(self.drafts)
        columns = self.target_probs, self.drafts, q, self.accept_u, self.sample_u
        return [verify_one(*request) for request in zip(*columns, strict=True)]

    def runs(self, rules: VerificationRules, num_extra: int = 0) -> list[list[int]]:
        """Also checks the form of the result, and that nothing is written into what was given."""
        verified = rules.reject(*(given := self.arguments(num_extra)))
        pairs = zip(given, self.arguments(num_extra), strict=True)
        tensors = [(x, y) for x, y in pairs if isinstance(x, torch.Tensor)]
        assert all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in tensors), "Trap 42"
        width = max(map(len, self.drafts)) + num_extra + 1
        assert verified.token_ids.shape == (len(self.drafts), width)
        assert verified.token_ids.dtype == verified.num_sampled.dtype == torch.int64
        runs = []
        rows = zip(verified.token_ids.tolist(), verified.num_sampled.tolist(), strict=True)
        for run, length in rows:
            assert all(token == PADDING for token in run[length:])
            runs.append(run[:length])
        return runs


ENDS = (0.0, 2.0**-53, 0.25, 0.5 - 2.0**-53, 0.5, LAST)


def random_requests(
    seed: int,
    lengths: Sequence[int],
    vocab_size: int,
    is_certain: bool = False,
    formats: Sequence[torch.dtype] = (F32, F32),
) -> DraftedRequests:
    """Two tokens or more, and a lane of padding. At each draft another relation of p and q, or an
    id that is no token. Some numbers are 0, next to 1, or the quotient itself."""
    rng = np.random.default_rng([seed, vocab_size, is_certain])
    columns: tuple[list, ...] = ([], [], [], [], [])
    for k in lengths:
        kinds = rng.choice([*KINDS, "equal", "close"], size=k + 1)
        pairs = [random_pair(rng, vocab_size, kind) for kind in kinds]
        p, q = (
            torch.from_numpy(np.pad(rows, ((0, 0), (0, 1)))).to(dtype)
            for rows, dtype in zip(zip(*pairs), formats)
        )
        p[:, 0] += 1e-42  # a denormal
        drafts = [int(rng.choice(vocab_size, p=q_row)) for _, q_row in pairs[:k]]
        numbers = [
            rng.choice(ENDS) if rng.random() < 0.3 else rng.random() for _ in range(2 * k + 1)
        ]
        for j, draft in enumerate(drafts):
            if rng.random() < 0.2:
                numbers[j] = min(
                    float(p[j, draft]) / (1.0 if is_certain else float(q[j, draft])), LAST
                )
            if rng.random() < 0.1:
                drafts[j] = int(rng.choice([-1, vocab_size + 1, 2**62, -(2**62)]))
        values = p, drafts, q[:k], numbers[:k], numbers[k:]
        for column, value in zip(columns, values):
            column.append(value)
    requests = DraftedRequests(*columns)
    return replace(requests, draft_probs=None) if is_certain else requests


@pytest.mark.net
@pytest.mark.parametrize("vocab_size", (2, 3, 11))
@pytest.mark.parametrize("is_certain", (False, True))
def test_runs_are_those_of_a_loop_over_one_request(rules, vocab_size, is_certain):
    """Traps 36, 40, 43, 46. In a batch with others, in any order, in a wider result."""
    lengths_seen = set()
    for seed in range(3):
        lengths = [*np.random.default_rng(seed).integers(0, 5, size=12).tolist(), 0]
        requests = random_requests(seed, lengths, vocab_size, is_certain)
        runs = requests.runs(rules, num_extra=seed)
        assert runs == requests.expected()
        lengths_seen |= {len(run) for run in runs}
        for run, probs in zip(runs, requests.target_probs):
            assert all(probs[j, token] > 0 for j, token in enumerate(run)), (run, probs)
    assert lengths_seen >= {1, 2}


# p, q, draft -> whether the draft may stay
IMPOSSIBLE = {
    "p = 0 at the draft": ([0.0, 0.5, 0.5], [1.0, 0.0, 0.0], 0, False),
    "p = q = 0 at the draft": ([0.0, 0.5, 0.5], [0.0, 0.5, 0.5], 0, False),
    "a denormal p": ([1e-45, 1.0, 0.0], [1.0, 0.0, 0.0], 0, True),
    "a denormal q": ([0.0, 1.0, 0.0], [1e-45, 1.0, 0.0], 0, False),
    "both denormal": ([2e-45, 1.0, 0.0], [1e-45, 1.0, 0.0], 0, True),
    "one-hot p and q apart": ([0.0, 1.0], [1.0, 0.0], 0, False),
    "the draft is in the padding": ([0.0, 0.75, 0.25, 0.0], [0.5, 0.25, 0.25, 0.0], 3, False),
    "no probabilities and p = 0": ([0.0, 1.0, 0.0], None, 0, False),
    "no probabilities and p = 1": ([0.0, 1.0, 0.0], None, 1, True),
    # Nothing is left of p - q, or less than an integer of `draw`: drawn from p, not from the
    # padding. Softmax in float32 says 1 - 2**-24 and rejects the draft once in 2**24.
    "a rest below an integer": ([0.6, 0.4, 1e-20, 0.0], [0.6, 0.40000004, 0.0, 0.0], 1, True),
    "1 - 2**-24": ([1e-20, 0.99999994, 0.0, 0.0], None, 1, True),
    "integers in sum only": ([1e-16, 0.99999994, 1e-16, 1e-16, 0.0], None, 1, True),
    "nothing but the draft": ([0.0, 0.99999994, 0.0, 0.0], None, 1, True),
    # Numbers at p / q = 0.5, next to it, and at the ends of intervals, which belong to the token
    # above; and an id that is no token, which the law of p replaces.
    "p / q is a number": ([0.25, 0.25, 0.5, 0.0], [0.5, 0.5, 0.0, 0.0], 0, True),
    "p is a number": ([0.25, 0.25, 0.5, 0.0], None, 2, True),
    "no token": ([0.25, 0.25, 0.5, 0.0], [0.5, 0.5, 0.0, 0.0], -1, False),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_impossible_tokens_stay_out(rules, name):
    """Traps 36, 43, 46: no NaN, no acceptance of what has p = 0, for no number, 0 included."""
    p, q, draft, may_stay = IMPOSSIBLE[name]
    numbers = [(u, v) for i, u in enumerate(ENDS) for v in (u, ENDS[i - 1])]
    n = len(numbers)
    requests = DraftedRequests(
        [torch.tensor([p] * 3)] * n,
        [[draft] * 2] * n,
        None if q is None else [torch.tensor([q] * 2)] * n,
        [[u] * 2 for u, _ in numbers],
        [[v] * 3 for _, v in numbers],
    )
    runs = requests.runs(rules)
    assert runs == requests.expected()
    assert all(p[token] > 0 for run in runs for token in run)
    assert any(len(run) > 1 for run in runs) == may_stay


def test_nan_of_one_request_stays_with_it(rules):
    """Logits that say nothing make NaN. Their request gets some token; the others their own."""
    requests = random_requests(2, [2, 0, 3, 1] * 3, 11)
    expected = requests.expected()
    for i in range(0, 12, 3):
        requests.target_probs[i].fill_(NAN)
        requests.draft_probs[i].fill_(NAN)
    for i, run in enumerate(requests.runs(rules)):
        if i % 3:
            assert run == expected[i]
        else:
            assert len(run) == 1 and 0 <= run[0] <= 11, "nothing is accepted"


@pytest.mark.net
@pytest.mark.parametrize("num_extra", [0, 3])
def test_matching_agrees_with_a_loop(rules, num_extra):
    """-1 is a draft that is none, and the sample of a row of NaN."""
    for seed, num_reqs in enumerate([0, 1, 1, 2, 3, 3, 5, 6, 6, 6, 6, 6]):
        rng = np.random.default_rng(seed)
        num_drafts = rng.integers(0, 5 if seed % 4 else 1, size=num_reqs).tolist()
        drafts = [rng.integers(-1, 2, size=k).tolist() for k in num_drafts]
        sampled = [rng.integers(-1, 2, size=k + 1).tolist() for k in num_drafts]
        for tokens, ids in list(zip(sampled, drafts))[::2]:
            tokens[:-1] = ids  # all of them match, placeholders apart
        width = max(num_drafts, default=0) + num_extra
        runs = [match_one(*pair) for pair in zip(sampled, drafts)]
        tokens, num_sampled = rules.match(
            torch.tensor(list(chain(*sampled)), dtype=torch.int64),
            torch.tensor(list(chain(*drafts)), dtype=torch.int64),
            torch.tensor([0, *accumulate(k + 1 for k in num_drafts)]),
            width,
        )
        assert tokens.dtype == num_sampled.dtype == torch.int64
        assert tokens.tolist() == [run + [PADDING] * (width + 1 - len(run)) for run in runs]
        assert num_sampled.tolist() == [len(run) for run in runs]
