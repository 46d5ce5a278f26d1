"""How often drafts are accepted, and what that is worth: counted (`SpecDecodeStats`), and foreseen.

Four ways to come by a draft and judge it. All are exact: what comes out has the target's law p.
They differ in the chance that a draft is accepted, which depends on p and the draft's law q:

    rejection   draft drawn from q, judged by its probabilities        sum of min(p, q)
    shared      draft and target's token drawn from p and q with the   overlap of the intervals
                same uniform number, compared
    argmax      draft is q's most likely token; with a draft that is   p at q's most likely token
                certain, both rules of `rejection_sampler.py` agree
    matching    draft and target's token drawn apart, compared         sum of p * q

"Shared" lays the intervals of both end to end, as `inverse_cdf.py` does; a number that falls into
the same token's interval on both sides is a match. Tokens whose weights are moved to others push
all intervals between them out of line, so equal p(t) and q(t) are not enough:

    p    |---- 0 ----|-------- 1 --------|- 2 -|
    q    |-- 0 --|-------- 1 --------|--- 2 ---|
         ^^^^^^^^^   ^^^^^^^^^^^^^^^^^   ^^^^^^^      the numbers that match

Of drafts drawn from q, no way accepts more than rejection. Argmax draws from another law and can
beat it: q = (0.6, 0.4) and p = (1, 0) gives 1 against 0.6. Nor is shared always above matching.

The worth of it is a geometric sum, if each draft is accepted with the same chance a once those
before it are. Real chances differ from place to place and hang together, so this is a guide.

Source: Leviathan et al., arXiv 2211.17192, sections 3.1 and 3.3.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import zip_longest

import torch

RULES = ("rejection", "shared", "argmax", "matching")

_POST_NAMES = {
    "num_draft": "num_drafted",
    "num_accepted": "num_accepted",
    "acceptance_rate": "acceptance_rate",
    "speedup": "tokens_per_pass",
}


@dataclass(slots=True)
class SpecDecodeStats:
    """What was counted. A *pass* is one request in one step that yields tokens.
    `accepted_by_position[i]` counts drafts at place i of their run; those behind a rejection are in
    `drafted_by_position` all the same. `stats["speedup"]` and the like are the reading material's
    names."""

    num_passes: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_drafted_passes: int = 0
    num_rejections: int = 0  # passes that ended with one
    drafted_by_position: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """One pass over a run of drafts."""
        self.num_passes += 1
        if num_drafted == 0:
            return
        self.num_drafted_passes += 1
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        self.num_rejections += num_accepted < num_drafted
        missing = num_drafted - len(self.drafted_by_position)
        self.drafted_by_position += [0] * missing
        self.accepted_by_position += [0] * missing
        for i in range(num_drafted):
            self.drafted_by_position[i] += 1
            self.accepted_by_position[i] += i < num_accepted

    def __add__(self, other: SpecDecodeStats) -> SpecDecodeStats:
        def add(own: list[int], others: list[int]) -> list[int]:
            return [a + b for a, b in zip_longest(own, others, fillvalue=0)]

        return SpecDecodeStats(
            self.num_passes + other.num_passes,
            self.num_drafted + other.num_drafted,
            self.num_accepted + other.num_accepted,
            self.num_drafted_passes + other.num_drafted_passes,
            self.num_rejections + other.num_rejections,
            add(self.drafted_by_position, other.drafted_by_position),
            add(self.accepted_by_position, other.accepted_by_position),
        )

    def __getitem__(self, name: str) -> float:
        return getattr(self, _POST_NAMES[name])

    @property
    def num_tokens(self) -> int:
        """That the passes yielded: each one more than the drafts that it accepted."""
        return self.num_passes + self.num_accepted

    @property
    def acceptance_rate(self) -> float:
        """Of all drafts, those behind a rejection included."""
        return self.num_accepted / self.num_drafted if self.num_drafted else 0.0

    @property
    def acceptance_by_position(self) -> list[float]:
        """Share of the drafts at each place that were accepted, and so were all before them."""
        pairs = zip(self.accepted_by_position, self.drafted_by_position, strict=True)
        return [accepted / drafted for accepted, drafted in pairs]

    @property
    def mean_accepted_length(self) -> float:
        """Tokens of a pass that had drafts: those accepted, and one more."""
        return 1 + self.num_accepted / self.num_drafted_passes if self.num_drafted_passes else 1.0

    @property
    def tokens_per_pass(self) -> float:
        return self.num_tokens / self.num_passes if self.num_passes else 0.0


def acceptance_probability(
    p: torch.Tensor,  # [..., vocab_size] float, the target's distributions
    q: torch.Tensor,  # [..., vocab_size] float, the draft's
    rule: str = "rejection",
) -> torch.Tensor:
    """The chance [...] that a draft is accepted. Raises `ValueError` for a rule not in `RULES`."""
    if rule == "rejection":
        return torch.minimum(p, q).sum(dim=-1)
    if rule == "matching":
        return (p * q).sum(dim=-1)
    if rule == "argmax":
        return p.gather(-1, q.argmax(dim=-1, keepdim=True))[..., 0]
    if rule == "shared":
        ends_p, ends_q = p.cumsum(dim=-1), q.cumsum(dim=-1)
        end = torch.minimum(ends_p, ends_q)
        start = torch.maximum(ends_p - p, ends_q - q)
        return (end - start).clamp(min=0).sum(dim=-1)
    raise ValueError(f"rule is {rule!r}: it must be one of {', '.join(RULES)}")


def expected_tokens(acceptance: float, num_drafts: int) -> float:
    """Tokens of one pass over `num_drafts` drafts, each of which is accepted with this chance if
    those before it were: 1 + a + a^2 + ... + a^k. The 1 is the token that the target adds itself.
    """
    if acceptance == 1:
        return num_drafts + 1
    return (1 - acceptance ** (num_drafts + 1)) / (1 - acceptance)


def expected_tokens_per_pass(acceptance: float, num_drafts: int) -> float:
    """The same. Raises `ValueError` for what is no chance and no number of drafts."""
    _check(acceptance, num_drafts)
    return expected_tokens(acceptance, num_drafts)


def expected_speedup(
    acceptance: float, num_drafts: int, draft_cost: float, verify_cost: float = 1.0
) -> float:
    """Tokens per unit of time, over those of plain decoding; below 1 speculation loses.

    `draft_cost` is that of one draft, `verify_cost` that of the pass that judges all of them; both
    in units of a plain pass, which yields one token. 1.0 says that a pass over k + 1 tokens costs
    what a pass over one does: true for a small batch, whose passes wait for the weights."""
    _check(acceptance, num_drafts)
    if not draft_cost >= 0:
        raise ValueError(f"draft_cost is {draft_cost!r}: it must be >= 0")
    if not verify_cost > 0:
        raise ValueError(f"verify_cost is {verify_cost!r}: it must be > 0")
    return expected_tokens(acceptance, num_drafts) / (verify_cost + num_drafts * draft_cost)


def _check(acceptance: float, num_drafts: int) -> None:
    if not 0 <= acceptance <= 1:
        raise ValueError(f"acceptance is {acceptance!r}: it must be in [0, 1]")
    if num_drafts < 0:
        raise ValueError(f"num_drafts is {num_drafts!r}: it must be >= 0")
