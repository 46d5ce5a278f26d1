"""Decode attention that reads keys and values where they lie: on a CPU, compiled by `torch.compile`.

`paged_attention.py` gathers what each sequence holds and then attends to it, so keys travel through
the memory three times. Here nothing is gathered. All blocks of all sequences stand in one flat list,
cut into *splits* of `SPLIT_BLOCKS` blocks that never hold two sequences:

    sequence A, 5 blocks     | a0 a1 a2 a3 | a4  .  .  . |         splits of 4 blocks:
    sequence B, 2 blocks                                 | b0 b1  .  . |    3, whoever they are of
    num_keys left            |    73       |     9       |     30      |

Each split yields a *partial* result: the highest score, the sum of exp(score - highest), and the
values weighted with these. A sequence merges the partials of its splits, each scaled to the highest
score of all. Long and short sequences side by side cost what they hold, rounded up to a split.

`decode_attention` is plain PyTorch and the specification: run as it stands, `key_cache[block_ids]`
is a gather, in float32 at that. Compiled, indexing, multiplication and sum become one loop that
reads each block once, in the order in which it lies in the memory, and keeps nothing but scores.
Therefore memory is head-major, `[num_blocks, num_kv_heads, block_size, head_dim]`: a head's keys of
a block are one run. Callers see the transposed view, in which nothing changes for them.

Invariants: what is not a sequence's own does not reach its output, not even NaN; a result does not
depend on the batch mates, bit for bit: splits begin at position 0, have one size and are merged in
their order. Source: FlashDecoding; the merge is that of FlashAttention-2, arXiv 2307.08691.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

logger = logging.getLogger(__name__)

SPLIT_BLOCKS = 8
VECTOR_BYTES = 64  # values are summed in pieces that fill a vector register


@dataclass(frozen=True, slots=True)
class DecodeSplits:
    """The flat list of a step, the same for all its layers. There are two of everything at least:
    a size of one would be compiled anew. Who is alone gets a mate of one token, whom nobody reads."""

    block_ids: torch.Tensor  # [num_splits, SPLIT_BLOCKS] int64, its last block again beyond its own
    owners: torch.Tensor  # [num_splits] int64, the sequence
    num_keys: torch.Tensor  # [num_splits] int64, from its first one to the end of the sequence
    of_sequence: torch.Tensor  # [num_seqs, most splits] int64, -1 beyond its own


# The compiler takes tensors made in inference mode and others for two kinds: make one kind only.
@torch.inference_mode(False)
def split_sequences(
    seq_lens: torch.Tensor,  # [num_seqs] int, each at least 1, on the host
    block_tables: torch.Tensor,  # [num_seqs, max_blocks] int
    block_size: int,
) -> DecodeSplits:
    if len(seq_lens) == 1:  # a second one, of one token
        seq_lens = torch.cat([seq_lens, torch.ones_like(seq_lens)])
        block_tables = torch.cat([block_tables, block_tables])
    num_blocks = (seq_lens + block_size - 1) // block_size
    num_splits = (num_blocks + SPLIT_BLOCKS - 1) // SPLIT_BLOCKS
    owners = torch.repeat_interleave(num_splits)
    first = num_splits.cumsum(0) - num_splits
    index = torch.arange(len(owners)) - first[owners]  # of a split in its sequence
    columns = index[:, None] * SPLIT_BLOCKS + torch.arange(SPLIT_BLOCKS)
    columns = columns.minimum(num_blocks[owners, None] - 1)
    places = torch.arange(max(int(num_splits.max()), 2))
    of_sequence = (first[:, None] + places).masked_fill_(places >= num_splits[:, None], -1)
    return DecodeSplits(
        block_ids=block_tables[owners[:, None], columns].long(),
        owners=owners,
        num_keys=seq_lens[owners] - index * (SPLIT_BLOCKS * block_size),
        of_sequence=of_sequence,
    )


def decode_attention(
    query: torch.Tensor,  # [num_seqs, num_heads, head_dim] float32 or float64, scaled
    key_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
    value_cache: torch.Tensor,  # the same
    block_ids: torch.Tensor,  # this one and the next ones: the fields of `DecodeSplits`
    owners: torch.Tensor,
    num_keys: torch.Tensor,
    of_sequence: torch.Tensor,
) -> torch.Tensor:  # [num_seqs, num_heads, head_dim], of the caches' dtype
    """Attention of one query token of each sequence to all its keys."""
    num_seqs, num_heads, head_dim = query.shape
    _, block_size, num_kv_heads, _ = key_cache.shape
    keys = key_cache.transpose(1, 2)[block_ids]
    values = value_cache.transpose(1, 2)[block_ids]
    # [num_splits, SPLIT_BLOCKS, num_kv_heads, block_size, head_dim]; scores are without head_dim
    positions = torch.arange(SPLIT_BLOCKS * block_size, device=query.device)
    is_own = positions.view(SPLIT_BLOCKS, 1, block_size) < num_keys[:, None, None, None]
    pieces = values.split(VECTOR_BYTES // values.itemsize, dim=-1)
    highest, total, weighted = [], [], []
    # The query heads that share keys are written out one by one: so they share a loop, and loads.
    for shared in query.view(num_seqs, num_kv_heads, -1, head_dim).unbind(2):
        scores = (shared[owners][:, None, :, None] * keys).sum(-1)
        scores = torch.where(is_own, scores, -math.inf)
        highest.append(scores.amax((1, 3)))
        weights = torch.exp(scores - highest[-1][:, None, :, None])
        total.append(weights.sum((1, 3)))
        # First within each block, as it lies in the memory. A weight of 0 does not hide NaN.
        sums = [
            (weights[..., None] * torch.where(is_own[..., None], piece, 0)).sum(3)
            for piece in pieces
        ]
        weighted.append(torch.cat(sums, dim=-1))
    return _merge(
        torch.stack(highest, 2).view(-1, num_heads, 1),
        torch.stack(total, 2).view(-1, num_heads, 1),
        torch.stack(weighted, 3).view(-1, SPLIT_BLOCKS, num_heads, head_dim).sum(1),
        of_sequence,
    ).to(key_cache.dtype)


def _merge(
    highest: torch.Tensor,  # [num_splits, num_heads, 1]
    total: torch.Tensor,  # [num_splits, num_heads, 1], of exp(score - highest)
    weighted: torch.Tensor,  # [num_splits, num_heads, head_dim], values with these weights
    of_sequence: torch.Tensor,  # [num_seqs, most splits], -1 beyond its own
) -> torch.Tensor:  # [num_seqs, num_heads, head_dim]
    is_real = (of_sequence >= 0)[..., None, None]
    splits = of_sequence.clamp(min=0)
    highest = torch.where(is_real, highest[splits], -math.inf)  # [num_seqs, most splits, heads, 1]
    shares = torch.exp(highest - highest.amax(1, keepdim=True))
    return (shares * weighted[splits]).sum(1) / (shares * total[splits]).sum(1)


DecodeAttention = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, DecodeSplits, float], torch.Tensor
]


def attend(
    query: torch.Tensor,  # [num_seqs, num_heads, head_dim], any dtype
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    splits: DecodeSplits,
    scale: float,
    function: Callable[..., torch.Tensor] = decode_attention,
) -> torch.Tensor:  # [num_seqs, num_heads, head_dim]
    """`decode_attention`, or what it was compiled to, of a query as a model has it."""
    wide = torch.promote_types(query.dtype, torch.float32)
    scaled = query.to(wide) * scale
    if len(scaled) == 1:
        scaled = torch.cat([scaled, scaled])
    return function(scaled, key_cache, value_cache, *_fields(splits))[: len(query)]


def compile_decode_attention(
    num_heads: int, key_cache: torch.Tensor, value_cache: torch.Tensor
) -> DecodeAttention | None:
    """`attend` in machine code for caches like these, any number of sequences, splits and blocks.

    Compiles at once, some 20 seconds the first time on a machine and a few once its files are
    there, and says how long it took. Without a C++ compiler: None, and a warning.
    """
    start = time.perf_counter()
    compiled = torch.compile(decode_attention, dynamic=False, fullgraph=True)

    @torch.inference_mode(False)
    @torch.no_grad()
    def attend_compiled(query, key_cache, value_cache, splits, scale):
        return attend(query, key_cache, value_cache, splits, scale, compiled)

    try:
        _first_call(compiled, num_heads, key_cache, value_cache)
    except Exception as error:  # whatever a compiler that is missing or broken raises
        logger.warning("decode attention is not compiled, keys are gathered: %s", _first_line(error))
        return None
    logger.info("decode attention compiled in %.1f s", time.perf_counter() - start)
    return attend_compiled


@torch.inference_mode(False)
@torch.no_grad()
def _first_call(compiled, num_heads: int, key_cache: torch.Tensor, value_cache: torch.Tensor):
    """Tell the compiler which sizes vary, and let it see typical ones."""
    num_seqs, num_splits = 32, 64
    block_size, head_dim = key_cache.shape[1], key_cache.shape[3]
    wide = torch.promote_types(key_cache.dtype, torch.float32)
    splits = split_sequences(
        torch.full((num_seqs,), num_splits // num_seqs * SPLIT_BLOCKS * block_size),
        torch.zeros(num_seqs, num_splits // num_seqs * SPLIT_BLOCKS, dtype=torch.int64),
        block_size,
    )
    query = torch.zeros(num_seqs, num_heads, head_dim, dtype=wide)
    tensors = query, key_cache.detach(), value_cache.detach(), *_fields(splits)
    for tensor in tensors:
        torch._dynamo.mark_dynamic(tensor, 0)
    torch._dynamo.mark_dynamic(splits.of_sequence, 1)
    compiled(*tensors)


def _fields(splits: DecodeSplits) -> tuple[torch.Tensor, ...]:
    return splits.block_ids, splits.owners, splits.num_keys, splits.of_sequence


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
