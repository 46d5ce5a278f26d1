"""The chance that a draft is accepted, and when speculation pays.

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

Source: Leviathan et al., arXiv 2211.17192, sections 3.1 and 3.3.
"""

from __future__ import annotations

import torch

from acceptance import expected_tokens
from request import require

RULES = ("rejection", "shared", "argmax", "matching")


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
    raise ValueError(f"rule must be one of {', '.join(RULES)}, got {rule!r}")


def expected_tokens_per_pass(acceptance: float, num_drafts: int) -> float:
    """`expected_tokens`. Raises `ValueError` for what is no chance and no number of drafts."""
    require(0 <= acceptance <= 1, "acceptance", acceptance, "in [0, 1]")
    require(num_drafts >= 0, "num_drafts", num_drafts, ">= 0")
    return expected_tokens(acceptance, num_drafts)


def expected_speedup(
    acceptance: float, num_drafts: int, draft_cost: float, verify_cost: float = 1.0
) -> float:
    """Tokens per unit of time, over those of plain decoding; below 1 speculation loses.

    `draft_cost` is that of one draft, `verify_cost` that of the pass that judges all of them; both
    in units of a plain pass, which yields one token. 1.0 says that a pass over k + 1 tokens costs
    what a pass over one does: true for a small batch, whose passes wait for the weights."""
    require(draft_cost >= 0, "draft_cost", draft_cost, ">= 0")
    require(verify_cost > 0, "verify_cost", verify_cost, "> 0")
    tokens = expected_tokens_per_pass(acceptance, num_drafts)
    return tokens / (verify_cost + num_drafts * draft_cost)
