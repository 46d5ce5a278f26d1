"""How often draft tokens are accepted (counted by `SpecDecodeStats`), and the speedup to expect.

The expected number of tokens is a geometric sum, if each draft token is accepted with the same
probability a, given that those before it were. Real probabilities differ by position and are
correlated, so the sum is a guide. For the probability itself, for each way to draw and verify a
draft token: `testing/draft_acceptance.py`. Source: Leviathan et al., arXiv 2211.17192, section 3.1.

See 05_spec_decode/README.md#counting"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class SpecDecodeStats:
    """Counters. A *pass* is one request in one step that yields tokens. `accepted_by_position[i]`
    counts the accepted draft tokens at position i of their run; `drafted_by_position` also counts
    those after a rejection."""

    num_passes: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_drafted_passes: int = 0
    num_rejections: int = 0  # passes that ended with a rejection
    drafted_by_position: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """Count one pass that verified a run of draft tokens."""
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

    @property
    def num_tokens(self) -> int:
        """Tokens that the passes yielded: the accepted draft tokens, and one more per pass."""
        return self.num_passes + self.num_accepted

    @property
    def acceptance_rate(self) -> float:
        """Share of all draft tokens that were accepted; those after a rejection count as not
        accepted."""
        return self.num_accepted / self.num_drafted if self.num_drafted else 0.0

    @property
    def acceptance_by_position(self) -> list[float]:
        """Share of the draft tokens at each position that were accepted, together with all before
        them."""
        pairs = zip(self.accepted_by_position, self.drafted_by_position, strict=True)
        return [accepted / drafted for accepted, drafted in pairs]

    @property
    def mean_accepted_length(self) -> float:
        """Tokens per pass, over passes that had draft tokens: the accepted ones, and one more."""
        return 1 + self.num_accepted / self.num_drafted_passes if self.num_drafted_passes else 1.0

    @property
    def tokens_per_pass(self) -> float:
        return self.num_tokens / self.num_passes if self.num_passes else 0.0


def expected_tokens(acceptance: float, num_drafts: int) -> float:
    """Expected tokens of one pass over `num_drafts` draft tokens: 1 + a + a^2 + ... + a^k, if each
    is accepted with probability a once those before it were. The 1 is the token from the target
    itself."""
    if acceptance == 1:
        return num_drafts + 1
    return (1 - acceptance ** (num_drafts + 1)) / (1 - acceptance)
