"""Verification: which draft tokens are accepted, and which token follows them.

A request brings k draft tokens (k can differ by request and be 0) and gets k + 1 rows of the
target's output: one for the position of each draft token, and one after the last. The rows of all
requests are concatenated:

    rows             | p(d0) p(d1) p(d2) p(+) | p(+) | p(d0) p(+) |      + bonus
    cu_num_logits    0                        4      5            7
    drafts           | d0    d1    d2         |      | d0         |      flat, 4 of them

From the first draft token on, each is accepted or ends the run. There are two rules, both exact:
the output has the target's distribution, whatever the draft tokens were (proof: README;
enumeration: the tests).

    rejection    accept d with probability min(1, p(d) / q(d)); on rejection draw from the
                 positive part of p - q, normalised; after k accepted ones draw from p
    matching     draw x from p at every row, without looking at the drafts; accept d while d == x;
                 the first x that differs is the next token

Rejection accepts as often as any rule for one position can: sum(min(p, q)). (A rule for the whole
run accepts more: Sun et al.) Matching accepts less, unless draft tokens are deterministic (q
one-hot, as in a lookup), where both accept with probability p(d). The advantage of matching is that
x is the same token that plain decoding draws from the same random numbers. So matching serves
greedy requests, draft tokens without probabilities, and requests with a seed, whose tokens must not
depend on how many draft tokens they happened to get.

Invariants: a token with p = 0 is never returned; an out-of-range id is never looked up and never
accepted, and the token that replaces it is drawn from p; nothing here waits for the device; the
same numbers give bitwise identical tokens in the Triton kernels.

Source: Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318; Sun et al., 2403.10444.

See 05_spec_decode/README.md#the-rule-for-a-batch"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from inverse_cdf import SCALE, draw

PADDING = -1


class VerifiedTokens(NamedTuple):
    """`token_ids` [num_reqs, max_num_drafts + 1] int64 holds the `num_sampled` [num_reqs] int64
    tokens of each request (its accepted draft tokens and one more), then `PADDING`."""

    token_ids: torch.Tensor
    num_sampled: torch.Tensor


def rejection_sample(
    target_probs: torch.Tensor,  # [num_rows, vocab_size] float, after every sampling constraint
    draft_token_ids: torch.Tensor,  # [num_drafts] int64, request after request
    draft_probs: torch.Tensor | None,  # [num_drafts, vocab_size] float; None: one-hot
    cu_num_logits: torch.Tensor,  # [num_reqs + 1] int64, first row of each request
    max_num_drafts: int,  # upper bound of the draft tokens per request
    accept_u: torch.Tensor,  # [num_drafts] float64 in [0, 1)
    sample_u: torch.Tensor,  # [num_rows] float64 in [0, 1)
) -> VerifiedTokens:
    """Verify draft tokens by the rejection rule. Row r's own number in `sample_u` draws the token
    that replaces the draft there, or the bonus token; all numbers must be independent of each other
    and of the drafts."""
    layout = _Layout.of(cu_num_logits, max_num_drafts, len(draft_token_ids))
    draft_token_ids, accept_u = _not_empty(draft_token_ids), _not_empty(accept_u)
    # An out-of-range id is clamped to a valid index so that the lookup cannot fail; `is_token`
    # makes sure that the result is ignored.
    nearest = draft_token_ids.clamp(0, target_probs.shape[1] - 1)
    is_token = nearest == draft_token_ids
    drafts = nearest[layout.draft_index]
    p = target_probs[layout.draft_rows, drafts].double()
    if draft_probs is None:
        q = torch.ones_like(p)
    else:
        draft_probs = _not_empty(draft_probs)
        q = draft_probs[layout.draft_index, drafts].double()
    # u < p / q without a division: q = 0 makes no NaN, p = 0 is never accepted.
    is_accepted = accept_u[layout.draft_index] * q < p
    num_accepted = layout.count_leading(is_accepted & is_token[layout.draft_index])
    row = cu_num_logits[:-1] + num_accepted
    weights = target_probs[row]
    first_rejected = (row - layout.requests).clamp(max=len(draft_token_ids) - 1)
    if draft_probs is None:
        residual = weights.scatter(1, nearest[first_rejected][:, None], 0.0)
    else:
        residual = (weights - draft_probs[first_rejected].to(weights.dtype)).clamp(min=0)
    # Rounding can leave nothing of p - q, or nothing that can be drawn; then draw from p. After an
    # out-of-range id draw from p as well, because that id was not drawn from q.
    can_be_drawn = residual.amax(dim=-1).double() * SCALE >= 1
    is_rejected = (num_accepted < layout.num_drafts) & is_token[first_rejected]
    is_residual = is_rejected & can_be_drawn
    weights = torch.where(is_residual[:, None], residual, weights)
    last, _ = draw(weights, sample_u[row])
    return layout.assemble(drafts, num_accepted, last)


def rejection_sampling_batched(
    target_sampled: torch.Tensor,  # [num_rows] int64, drawn from the target's distribution
    draft_tokens: torch.Tensor,  # [num_drafts] int64, request after request
    cu_num_logits: torch.Tensor,  # [num_reqs + 1] int64, first row of each request
    num_speculative_steps: int,  # upper bound of the draft tokens per request
) -> VerifiedTokens:
    """Verify draft tokens by the matching rule (the function's name is that of the Chinese blog
    posts). With the target's most likely tokens as `target_sampled` this is greedy speculative
    decoding."""
    layout = _Layout.of(cu_num_logits, num_speculative_steps, len(draft_tokens))
    drafts = _not_empty(draft_tokens)[layout.draft_index]
    # A negative draft is a placeholder; a negative sample marks a row without a distribution.
    is_accepted = (target_sampled[layout.draft_rows] == drafts) & (drafts >= 0)
    num_accepted = layout.count_leading(is_accepted)
    last = target_sampled[cu_num_logits[:-1] + num_accepted]
    return layout.assemble(drafts, num_accepted, last)


@dataclass(frozen=True, slots=True)
class _Layout:
    """Rows and drafts as a grid [num_reqs, max_num_drafts]. Draft j of request r has row `cu[r] +
    j` and index `cu[r] - r + j` among the drafts, since every request has one row more than drafts.
    Cells without a draft hold the indices of another one: a mask of varying size would make the
    host wait for the device."""

    requests: torch.Tensor  # [num_reqs] 0, 1, ...
    num_drafts: torch.Tensor  # [num_reqs]
    is_draft: torch.Tensor  # [num_reqs, max_num_drafts] bool
    draft_rows: torch.Tensor  # the same
    draft_index: torch.Tensor

    @classmethod
    def of(cls, cu_num_logits: torch.Tensor, max_num_drafts: int, num_drafts: int) -> _Layout:
        device = cu_num_logits.device
        num_reqs = len(cu_num_logits) - 1
        requests = torch.arange(num_reqs, device=device)
        columns = torch.arange(max_num_drafts, device=device)
        per_request = cu_num_logits.diff() - 1
        index = (cu_num_logits[:-1] - requests)[:, None] + columns
        index = index.clamp(max=max(num_drafts - 1, 0))
        rows = cu_num_logits[:-1, None] + columns
        is_draft = columns < per_request[:, None]
        return cls(requests, per_request, is_draft, torch.where(is_draft, rows, 0), index)

    def count_leading(self, is_accepted: torch.Tensor) -> torch.Tensor:
        """How many draft tokens [num_reqs] precede the first one that is not accepted."""
        return (self.is_draft & is_accepted).cumprod(dim=-1).sum(dim=-1)

    def assemble(
        self, drafts: torch.Tensor, num_accepted: torch.Tensor, last: torch.Tensor
    ) -> VerifiedTokens:
        columns = torch.arange(drafts.shape[1] + 1, device=last.device)
        tokens = torch.cat([drafts, torch.full_like(last, PADDING)[:, None]], dim=1)
        tokens = tokens.masked_fill(columns >= num_accepted[:, None], PADDING)
        return VerifiedTokens(
            tokens.scatter(1, num_accepted[:, None], last[:, None]), num_accepted + 1
        )


def _not_empty(x: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or one row of zeros to index if it is empty."""
    return x if len(x) else x.new_zeros((1, *x.shape[1:]))
