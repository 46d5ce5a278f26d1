"""How often drafts are accepted, counted (`SpecDecodeStats`), and what that is worth, foreseen.

The worth is a geometric sum, if each draft is accepted with the same chance a once those before it
are. Real chances differ from place to place and hang together, so this is a guide. The chance
itself, for each way to draw and judge a draft: `testing/draft_acceptance.py`.

Source: Leviathan et al., arXiv 2211.17192, section 3.1.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from itertools import zip_longest
from typing import Any

_POST_NAMES = {"num_draft": "num_drafted", "speedup": "tokens_per_pass"}
_POST_NAMES |= {"num_accepted": "num_accepted", "acceptance_rate": "acceptance_rate"}


@dataclass(slots=True)
class SpecDecodeStats:
    """What was counted. A *pass* is one request in one step that yields tokens.
    `accepted_by_position[i]` counts drafts at place i of their run; those behind a rejection are in
    `drafted_by_position` all the same. `stats["speedup"]` and the like are the posts' names."""

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
        def add(own: Any, others: Any) -> Any:
            if isinstance(own, int):
                return own + others
            return [a + b for a, b in zip_longest(own, others, fillvalue=0)]

        names = [field.name for field in fields(self)]
        return SpecDecodeStats(*(add(getattr(self, name), getattr(other, name)) for name in names))

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


def expected_tokens(acceptance: float, num_drafts: int) -> float:
    """Tokens of one pass over `num_drafts` drafts: 1 + a + a^2 + ... + a^k, if each is accepted
    with this chance once those before it were. The 1 is the token that the target adds itself."""
    if acceptance == 1:
        return num_drafts + 1
    return (1 - acceptance ** (num_drafts + 1)) / (1 - acceptance)
