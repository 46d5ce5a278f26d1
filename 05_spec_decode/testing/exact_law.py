"""The exact distribution of the output of verification, found by calling the code.

Once the drafts and the uniform numbers are given, verification is a function. Each number makes one
decision, which changes at points: below a point it is one way, above it the other.

    accept_u[j]    |---- draft j accepted ----|---- rejected ----|
    sample_u[j]    |-- 0 --|-- 1 --|------------ 2 --------------|    the token drawn at row j

A search finds the points. Their distances are probabilities, so the distribution of the output,
given the drafts, is a product of lengths; summed over all drafts that may be proposed, it is what a
user sees, exact to about 1e-15. That the numbers decide nothing else, and nothing twice, is what
`test_runs_are_those_of_a_loop_over_one_request` shows.

Models are functions of a history, given in two parts: output tokens, and the drafts after them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import product

import torch

from rejection_sampler import VerifiedTokens

Tokens = tuple[int, ...]
Law = dict[Tokens, float]
Model = Callable[[Tokens, Tokens], torch.Tensor]  # (outputs, drafts) -> [vocab_size] float64
Rule = Callable[..., VerifiedTokens]  # called as `rejection_sample` is

LAST = 1 - 2.0**-53  # the last number below 1


def histories(vocab_size: int, num_tokens: int) -> list[Tokens]:
    """Every sequence of `num_tokens` tokens."""
    return list(product(range(vocab_size), repeat=num_tokens))


def step_laws(
    rule: Rule, p: Model, q: Model, outputs: Iterable[Tokens], num_drafts: int
) -> dict[Tokens, Law]:
    """The distribution of the run that one step emits, after each of `outputs`: 1 to `num_drafts` +
    1 tokens. Impossible runs are left out."""
    cases = Cases.of(p, q, outputs, num_drafts)
    points = find_points(rule, cases)
    certain = torch.ones_like(cases.chance)[:, None]
    reached = torch.cat([certain, points.accept.cumprod(dim=1)], dim=1)
    ended = torch.cat([1 - points.accept, certain], dim=1)
    start = torch.cat([torch.zeros_like(points.ends[..., :1]), points.ends[..., :-1]], dim=-1)
    chance = (cases.chance[:, None] * reached * ended)[..., None] * (points.ends - start)
    laws: dict[Tokens, Law] = {history: defaultdict(float) for history in cases.outputs}
    drafts = cases.drafts.tolist()
    values = chance.tolist()
    for case, row, token in chance.nonzero().tolist():
        run = (*drafts[case][:row], token)
        laws[cases.outputs[case]][run] += values[case][row][token]
    return laws


def plain_laws(p: Model, outputs: Iterable[Tokens]) -> dict[Tokens, Law]:
    """The distribution for plain decoding steps: one token each."""
    return {
        history: {(t,): chance for t, chance in enumerate(p(history, ()).tolist()) if chance > 0}
        for history in outputs
    }


def continuation(laws: dict[Tokens, Law], num_tokens: int, outputs: Tokens = ()) -> Law:
    """The distribution of the next `num_tokens` tokens, step after step; further tokens are cut
    off."""
    law: Law = defaultdict(float)
    for run, chance in laws[outputs].items():
        num_missing = num_tokens - len(run)
        if num_missing <= 0:
            law[run[:num_tokens]] += chance
            continue
        for suffix, suffix_chance in continuation(laws, num_missing, outputs + run).items():
            law[run + suffix] += chance * suffix_chance
    return law


def distance(law: Law, other: Law) -> float:
    """The largest difference in the probability of one sequence."""
    return max(abs(law.get(run, 0.0) - other.get(run, 0.0)) for run in law.keys() | other.keys())


@dataclass(frozen=True, slots=True)
class Cases:
    """Each run of k draft tokens that the draft model can propose, after each of some outputs."""

    outputs: list[Tokens]
    drafts: torch.Tensor  # [num_cases, k] int64
    chance: torch.Tensor  # [num_cases] float64, of these drafts after these outputs
    target_probs: torch.Tensor  # [num_cases, k + 1, vocab_size] float64
    draft_probs: torch.Tensor  # [num_cases, k, vocab_size] float64

    @classmethod
    def of(cls, p: Model, q: Model, outputs: Iterable[Tokens], num_drafts: int) -> Cases:
        found = [
            (history, drafts, chance)
            for history in outputs
            for drafts, chance in _proposals(q, history, num_drafts)
        ]
        before = [(history, drafts[:j]) for history, drafts, _ in found for j in range(num_drafts)]
        rows = [
            (history, drafts[:j]) for history, drafts, _ in found for j in range(num_drafts + 1)
        ]
        target_probs = torch.stack([p(*row) for row in rows]).unflatten(0, (len(found), -1))
        draft_probs = target_probs.new_zeros(len(found), 0, target_probs.shape[-1])
        if num_drafts:
            draft_probs = torch.stack([q(*row) for row in before]).unflatten(0, (len(found), -1))
        return cls(
            [history for history, _, _ in found],
            torch.tensor([drafts for _, drafts, _ in found], dtype=torch.int64),
            torch.tensor([chance for _, _, chance in found], dtype=torch.float64),
            target_probs,
            draft_probs,
        )

    def verify(
        self,
        rule: Rule,
        case: torch.Tensor,  # [num_reqs] which case each request of the batch is
        accept_u: torch.Tensor,  # [num_reqs, k]
        sample_u: torch.Tensor,  # [num_reqs, k + 1]
    ) -> VerifiedTokens:
        num_drafts = self.drafts.shape[1]
        return rule(
            self.target_probs[case].flatten(0, 1),
            self.drafts[case].flatten(),
            self.draft_probs[case].flatten(0, 1),
            torch.arange(len(case) + 1) * (num_drafts + 1),
            num_drafts,
            accept_u.flatten(),
            sample_u.flatten(),
        )


def _proposals(q: Model, outputs: Tokens, num_drafts: int) -> Iterator[tuple[Tokens, float]]:
    """`(drafts, chance)`, without those of chance 0."""
    if num_drafts == 0:
        yield (), 1.0
        return
    for drafts, chance in _proposals(q, outputs, num_drafts - 1):
        for token, factor in enumerate(q(outputs, drafts).tolist()):
            if factor > 0:
                yield (*drafts, token), chance * factor


@dataclass(frozen=True, slots=True)
class Points:
    """Numbers at which decisions change; arbitrary if a decision cannot be reached."""

    accept: torch.Tensor  # [num_cases, k]; draft j is accepted below
    ends: torch.Tensor  # [num_cases, k + 1, vocab_size]; the token drawn at a row is <= t below


def find_points(rule: Rule, cases: Cases) -> Points:
    """Find all points by one search, in which each request of a batch tests one number."""
    num_cases, num_rows, vocab_size = cases.target_probs.shape
    num_drafts = num_rows - 1
    # Token -1 tests whether the draft of a row is accepted, t whether the token drawn is at most t.
    case, row, token = torch.cartesian_prod(
        torch.arange(num_cases), torch.arange(num_rows), torch.arange(-1, vocab_size)
    ).T.repeat_interleave(len(_DIGITS), dim=1)
    is_about_draft = token < 0
    at_row = row[:, None]
    ends_at_row = LAST * (torch.arange(num_drafts) == at_row).double()

    def holds(u: torch.Tensor) -> torch.Tensor:
        accept_u = torch.where(is_about_draft[:, None] & (ends_at_row > 0), u[:, None], ends_at_row)
        sample_u = torch.full((len(u), num_rows), 0.5, dtype=torch.float64)
        sample_u.scatter_(1, at_row, u[:, None])
        verified = cases.verify(rule, case, accept_u, sample_u)
        is_accepted = verified.num_sampled > row + 1
        is_at_most = verified.token_ids.gather(1, at_row)[:, 0] <= token
        return torch.where(is_about_draft, is_accepted, is_at_most)

    points = _search(holds, len(case)).view(num_cases, num_rows, vocab_size + 1)
    return Points(points[:, :num_drafts, 0], points[:, :, 1:])


_DIGITS = torch.arange(1, 4, dtype=torch.float64)  # base 4 is twice as quick as halving


def _search(holds: Callable[[torch.Tensor], torch.Tensor], num_queries: int) -> torch.Tensor:
    """Find, for conditions on numbers in [0, 1) that each hold below a point, the points, to
    2**-52. `holds` is called with three numbers for each condition."""
    point = torch.zeros(num_queries // len(_DIGITS), 1, dtype=torch.float64)
    for place in range(1, 27):
        does_hold = holds((point + _DIGITS * 4.0**-place).flatten()).view(-1, len(_DIGITS))
        point += does_hold.sum(dim=1, keepdim=True) * 4.0**-place
    is_certain = holds(torch.full((num_queries,), LAST, dtype=torch.float64))[:: len(_DIGITS)]
    return torch.where(is_certain, 1.0, point[:, 0])
