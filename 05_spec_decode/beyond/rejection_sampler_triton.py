"""`rejection_sample` and `rejection_sampling_batched` as Triton kernels: one program a request.

PyTorch takes 65 operations for a step of the rejection rule, nine of which write a row of the
vocabulary for each request. Here there is one kernel, and all that it writes is the result:

    accept    a lane for each draft: u * q(d) < p(d), all loaded at once. The first lane that is not
              accepted ends the run; lane k, where no draft is, never is.
    draw      the row at which the run ended is walked in tiles of the vocabulary:

                  tile        0       1       2     ...
                  its sum     S0      S1      S2          of the integer weights
                  its end     S0      S0+S1   ...         the point u * total lies in one tile,
                                                          and that one is loaded once more

The tokens are bitwise identical to those of the PyTorch version for the same random numbers. In
floating point they could not be, because a sum depends on the order of addition. So weights are
converted to the integers of `inverse_cdf.draw`, and p - q is computed in the number format of p.

The rejection rule wants drafts with probabilities, the matching rule a flat list of drafts: the
other forms that the PyTorch versions take are the same rules, and no engine needs them.

Cost: for a request, one row of p, and one of q if a draft was rejected, are read once, and a tile
of each again: 1.2 MB of float32 for 152,000 tokens, a fourteenth of the PyTorch version's traffic.
From other rows, only the numbers of the draft tokens are read. The second walk below happens where
rounding left nothing of p - q: about once in 10**7 drafts.

One program uses one SM, so a few requests leave most of a GPU idle. vLLM has one program a request
for acceptance, too; another kernel before it draws a replacement for every draft, needed or not.
Sources: those of `rejection_sampler.py`.

See 05_spec_decode/README.md#the-rule-for-a-batch"""

from __future__ import annotations

import torch

from inverse_cdf import SCALE
from kernel_launch import TRITON_TYPES, Launch
from rejection_sampler import PADDING, VerifiedTokens
from triton_or_none import jit, jit_for_any, tl

# Tokens that a program loads at a time: 32 KB of float32 p and q. An SM must have about that much
# in flight for its share of an H200's memory (4.8 TB/s / 132 SMs * 0.7 us of latency: 25 KB). With
# 8 warps a thread holds 16 of them, in fewer than 80 registers.
TILE = 4096
NUM_WARPS = 8
# Small tensors that came to the GPU in one copy with others.
UNALIGNED = ("draft_token_ids", "cu_num_logits", "accept_u", "sample_u")
UNALIGNED_IN_MATCHING = ("target_sampled", "draft_tokens", "cu_num_logits")


@jit
def _drafts_of(cu_num_logits, max_num_drafts, WIDTH: tl.constexpr):
    """This program's request, its first row, and a lane for each draft and at least one more."""
    request = tl.program_id(0).to(tl.int64)
    first_row = tl.load(cu_num_logits + request)
    num_drafts = tl.load(cu_num_logits + request + 1) - first_row - 1
    column = tl.arange(0, WIDTH)
    return request, first_row, column, (column < num_drafts) & (column < max_num_drafts)


@jit
def _store(token_ids, num_sampled, request, column, run, num_accepted, max_num_drafts):
    target = token_ids + request * (max_num_drafts + 1) + column
    tl.store(target, run, mask=column <= max_num_drafts)
    tl.store(num_sampled + request, (num_accepted + 1).to(tl.int64))


@jit
def _weights(
    tokens,  # [TILE] int32
    p_row,  # address of a row of p
    q_row,  # address of a row of q
    num_q,  # tokens that have a q: vocab_size; 0: the weights are p
    VOCAB_SIZE: tl.constexpr,
    SCALE: tl.constexpr,
):  # [TILE] int64
    p = tl.load(p_row + tokens, mask=tokens < VOCAB_SIZE, other=0.0)
    q = tl.load(q_row + tokens, mask=tokens < num_q, other=0.0)
    return (tl.maximum(p - q, 0.0).to(tl.float64) * SCALE).to(tl.int64)


@jit
def _tile_sums(
    p_row,
    q_row,
    num_q,
    VOCAB_SIZE: tl.constexpr,
    SCALE: tl.constexpr,
    TILE: tl.constexpr,
    MAX_TILES: tl.constexpr,
):  # [MAX_TILES] int64
    index = tl.arange(0, MAX_TILES)
    sums = tl.full([MAX_TILES], 0, tl.int64)
    for tile in range(0, tl.cdiv(VOCAB_SIZE, TILE)):
        tokens = tile * TILE + tl.arange(0, TILE)
        weights = _weights(tokens, p_row, q_row, num_q, VOCAB_SIZE, SCALE)
        sums = tl.where(index == tile, tl.sum(weights), sums)
    return sums


@jit_for_any("max_num_drafts", unaligned=UNALIGNED)
def _rejection_kernel(
    token_ids,  # [num_reqs, max_num_drafts + 1] int64, written
    num_sampled,  # [num_reqs] int64, written
    target_probs,  # [num_rows, vocab_size]
    draft_token_ids,  # [num_drafts]
    draft_probs,  # [num_drafts, vocab_size]
    cu_num_logits,  # [num_reqs + 1]
    accept_u,  # [num_drafts]
    sample_u,  # [num_rows]
    max_num_drafts,
    VOCAB_SIZE: tl.constexpr,
    SCALE: tl.constexpr,
    PADDING: tl.constexpr,
    WIDTH: tl.constexpr,  # max_num_drafts + 1 padded to a power of two, at least 8
    TILE: tl.constexpr,
    MAX_TILES: tl.constexpr,  # of the vocabulary, padded to a power of two
):
    request, first_row, column, is_draft = _drafts_of(cu_num_logits, max_num_drafts, WIDTH)
    first_draft = first_row - request

    # Accept. A lane without a draft has p = 0; an out-of-range id is not looked up.
    drafts = tl.load(draft_token_ids + first_draft + column, mask=is_draft, other=-1)
    is_token = (drafts >= 0) & (drafts < VOCAB_SIZE)
    p_offset = (first_row + column) * VOCAB_SIZE + drafts
    q_offset = (first_draft + column) * VOCAB_SIZE + drafts
    p = tl.load(target_probs + p_offset, mask=is_token, other=0.0).to(tl.float64)
    q = tl.load(draft_probs + q_offset, mask=is_token, other=0.0).to(tl.float64)
    u = tl.load(accept_u + first_draft + column, mask=is_draft, other=0.0)
    num_accepted = tl.min(tl.where(u * q < p, WIDTH, column))

    # Draw, from p - q if a token was rejected. Rounding can leave nothing of it: then from p.
    num_q = tl.max(tl.where((column == num_accepted) & is_token, VOCAB_SIZE, 0))
    row = first_row + num_accepted
    p_row = target_probs + row * VOCAB_SIZE
    q_row = draft_probs + (row - request) * VOCAB_SIZE
    sums = _tile_sums(p_row, q_row, num_q, VOCAB_SIZE, SCALE, TILE, MAX_TILES)
    if tl.sum(sums) == 0:
        num_q *= 0
        sums = _tile_sums(p_row, q_row, num_q, VOCAB_SIZE, SCALE, TILE, MAX_TILES)
    point = (tl.load(sample_u + row) * tl.sum(sums).to(tl.float64)).to(tl.int64)

    # Count the tiles, and then the tokens, whose end is at or before the point. In a row of zeros,
    # all are: then it is the last token.
    tile = tl.sum((tl.cumsum(sums) <= point).to(tl.int32))
    start = tl.sum(tl.where(tl.arange(0, MAX_TILES) < tile, sums, 0))
    tokens = tile * TILE + tl.arange(0, TILE)
    weights = _weights(tokens, p_row, q_row, num_q, VOCAB_SIZE, SCALE)
    token = tile * TILE + tl.sum((start + tl.cumsum(weights) <= point).to(tl.int32))
    token = tl.minimum(token, VOCAB_SIZE - 1).to(tl.int64)

    run = tl.where(column < num_accepted, drafts, PADDING)
    run = tl.where(column == num_accepted, token, run)
    _store(token_ids, num_sampled, request, column, run, num_accepted, max_num_drafts)


@jit_for_any("max_num_drafts", unaligned=UNALIGNED_IN_MATCHING)
def _matching_kernel(
    token_ids,  # [num_reqs, max_num_drafts + 1] int64, written
    num_sampled,  # [num_reqs] int64, written
    target_sampled,  # [num_rows]
    draft_tokens,  # [num_drafts]
    cu_num_logits,  # [num_reqs + 1]
    max_num_drafts,
    PADDING: tl.constexpr,
    WIDTH: tl.constexpr,  # max_num_drafts + 1 padded to a power of two, at least 8
):
    request, first_row, column, is_draft = _drafts_of(cu_num_logits, max_num_drafts, WIDTH)
    is_row = column <= tl.sum(is_draft.to(tl.int32))
    drafts = tl.load(draft_tokens + first_row - request + column, mask=is_draft, other=0)
    sampled = tl.load(target_sampled + first_row + column, mask=is_row, other=0)
    is_accepted = is_draft & (drafts == sampled) & (drafts >= 0)
    num_accepted = tl.min(tl.where(is_accepted, WIDTH, column))

    # Accepted drafts are what was sampled.
    run = tl.where(column <= num_accepted, sampled, PADDING)
    _store(token_ids, num_sampled, request, column, run, num_accepted, max_num_drafts)


def rejection_launch(vocab_size: int, max_num_drafts: int, dtype: torch.dtype) -> Launch:
    integers = ("token_ids", "num_sampled", "draft_token_ids", "cu_num_logits")
    arguments = dict.fromkeys(integers, "*i64") | {"max_num_drafts": "i32"}
    arguments |= dict.fromkeys(("target_probs", "draft_probs"), "*" + TRITON_TYPES[dtype])
    arguments |= dict.fromkeys(("accept_u", "sample_u"), "*fp64")
    constants = {
        "VOCAB_SIZE": vocab_size,
        "SCALE": SCALE,
        "PADDING": PADDING,
        "WIDTH": _width(max_num_drafts),
        "TILE": TILE,
        "MAX_TILES": _next_power_of_2(-(-vocab_size // TILE)),
    }
    return Launch(
        kernel=_rejection_kernel,
        arguments=arguments,
        constants=constants,
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,
        unaligned=UNALIGNED,
    )


def matching_launch(max_num_drafts: int) -> Launch:
    names = ("token_ids", "num_sampled", "target_sampled", "draft_tokens", "cu_num_logits")
    return Launch(
        kernel=_matching_kernel,
        arguments=dict.fromkeys(names, "*i64") | {"max_num_drafts": "i32"},
        constants={"PADDING": PADDING, "WIDTH": _width(max_num_drafts)},
        num_warps=1,
        unaligned=UNALIGNED_IN_MATCHING,
    )


def _width(max_num_drafts: int) -> int:
    """At least 8: another width is another compilation, and a batch has few drafts or none."""
    return max(8, _next_power_of_2(max_num_drafts + 1))


def _next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def rejection_sample_triton(
    target_probs: torch.Tensor,  # [num_rows, vocab_size] float32 or float64
    draft_token_ids: torch.Tensor,  # [num_drafts] int64, request after request
    draft_probs: torch.Tensor,  # [num_drafts, vocab_size], as `target_probs`
    cu_num_logits: torch.Tensor,  # [num_reqs + 1] int64, first row of each request
    max_num_drafts: int,  # at least the drafts of any request
    accept_u: torch.Tensor,  # [num_drafts] float64 in [0, 1)
    sample_u: torch.Tensor,  # [num_rows] float64 in [0, 1)
) -> VerifiedTokens:
    """`rejection_sample` for drafts that have probabilities. Needs Triton, and a GPU or its
    interpreter, as attention does (`TritonAttentionBackend`). Raises `ValueError` for other number
    formats of probabilities."""
    dtype = target_probs.dtype
    if dtype not in (torch.float32, torch.float64) or draft_probs.dtype != dtype:
        raise ValueError(
            "target_probs and draft_probs must be float32 or float64, the same, "
            f"got {dtype} and {draft_probs.dtype}"
        )
    return _verify(
        rejection_launch(target_probs.shape[1], max_num_drafts, dtype),
        max_num_drafts,
        cu_num_logits,
        [target_probs, draft_token_ids, draft_probs, cu_num_logits, accept_u, sample_u],
    )


def rejection_sampling_batched_triton(
    target_sampled: torch.Tensor,  # [num_rows] int64, drawn from the target's distribution
    draft_tokens: torch.Tensor,  # [num_drafts] int64, request after request
    cu_num_logits: torch.Tensor,  # [num_reqs + 1] int64, first row of each request
    num_speculative_steps: int,  # at least the drafts of any request
) -> VerifiedTokens:
    """`rejection_sampling_batched`."""
    return _verify(
        matching_launch(num_speculative_steps),
        num_speculative_steps,
        cu_num_logits,
        [target_sampled, draft_tokens, cu_num_logits],
    )


def _verify(
    launch: Launch, max_num_drafts: int, cu_num_logits: torch.Tensor, tensors: list[torch.Tensor]
) -> VerifiedTokens:
    num_reqs = len(cu_num_logits) - 1
    verified = VerifiedTokens(
        token_ids=cu_num_logits.new_empty(num_reqs, max_num_drafts + 1),
        num_sampled=cu_num_logits.new_empty(num_reqs),
    )
    if num_reqs:
        given = [tensor.contiguous() for tensor in tensors]
        launch((num_reqs,), *verified, *given, max_num_drafts)
    return verified
