"""Decode attention on a CPU that reads keys and values where they lie, by `torch.compile`.

`paged_attention.py` gathers what each sequence holds and then attends to it, so keys travel through
the memory three times. Here nothing is gathered. The blocks of all sequences form one flat list,
cut into *splits* of `SPLIT_BLOCKS` blocks that never hold two sequences:

    sequence A, 5 blocks     | a0 a1 a2 a3 | a4  .  .  . |         splits of 4 blocks:
    sequence B, 2 blocks                                 | b0 b1  .  . |    3, whoever they are of
    num_keys left            |    73       |     9       |     30      |

Each split yields a *partial* result: the highest score, the sum of exp(score - highest), and the
values weighted with these. A sequence merges the partials of its splits, each scaled to the highest
score of all. Long and short sequences side by side cost what they hold, rounded up to a split.

`attend_splits` is plain PyTorch and the specification: as it stands, `key_cache[block_ids]` is a
gather. Compiled, indexing, multiplication and sum become one loop that reads each block once, in
the order in which it lies in the memory. Therefore memory is head-major, `[num_blocks,
num_kv_heads, block_size, head_dim]`: a head's keys of a block are one run. Callers see the
transposed view, in which nothing changes for them. A call takes at most `MAX_SPLITS` splits: with
fewer, short sequences pay for several calls; with more, the sums of long ones leave the cache.

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
MAX_SPLITS = 64
VECTOR_BYTES = 64  # values are summed in pieces that fill a vector register


@dataclass(frozen=True, slots=True)
class DecodeSplits:
    """The flat list of a step, the same for all its layers. There are two of everything at least:
    a size of one would be compiled anew. A lonely sequence gets a mate of one token."""

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


def attend_splits(
    query: torch.Tensor,  # [num_seqs, num_heads, head_dim] float32 or float64, scaled
    key_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
    value_cache: torch.Tensor,  # the same
    block_ids: torch.Tensor,  # [num_splits, SPLIT_BLOCKS], as the next ones of `DecodeSplits`
    owners: torch.Tensor,  # [num_splits]
    num_keys: torch.Tensor,  # [num_splits]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The partial result of each split and head: the highest score and the sum of exp(score -
    highest), `[num_splits, num_heads, 1]`, and the values weighted with these, `[num_splits,
    num_heads, head_dim]`."""
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
    return (
        torch.stack(highest, 2).view(-1, num_heads, 1),
        torch.stack(total, 2).view(-1, num_heads, 1),
        torch.stack(weighted, 3).view(-1, SPLIT_BLOCKS, num_heads, head_dim).sum(1),
    )


def merge_splits(
    highest: torch.Tensor,  # the partial results of all splits
    total: torch.Tensor,
    weighted: torch.Tensor,
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


def decode_attention(
    query: torch.Tensor,  # [num_seqs, num_heads, head_dim], any dtype
    key_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
    value_cache: torch.Tensor,  # the same
    splits: DecodeSplits,
    scale: float,
    attend_splits: Callable[..., tuple[torch.Tensor, ...]] = attend_splits,
    merge_splits: Callable[..., torch.Tensor] = merge_splits,
) -> torch.Tensor:  # [num_seqs, num_heads, head_dim]
    """Attention of one query token of each sequence to all its keys. The two functions are those
    above, or what they were compiled to."""
    wide = torch.promote_types(query.dtype, torch.float32)
    scaled = query.to(wide) * scale
    if len(scaled) == 1:
        scaled = torch.cat([scaled, scaled])
    num_calls = -(-len(splits.owners) // MAX_SPLITS)
    flat = (splits.block_ids, splits.owners, splits.num_keys)
    partials = [
        attend_splits(scaled, key_cache, value_cache, *some)
        for some in zip(*(field.tensor_split(num_calls) for field in flat), strict=True)
    ]
    joined = (torch.cat(parts) if num_calls > 1 else parts[0] for parts in zip(*partials))
    return merge_splits(*joined, splits.of_sequence)[: len(query)].to(query.dtype)


def compile_decode_attention(
    num_heads: int, key_cache: torch.Tensor, value_cache: torch.Tensor
) -> DecodeAttention | None:
    """`decode_attention` in machine code for caches like these, any number of sequences, splits and
    blocks.

    Compiles at once, some 20 seconds the first time on a machine and a few once its files are
    there, and says how long it took. Without a C++ compiler: None, and a warning.
    """
    # A warning, because the wait is long: those are shown where nobody has set up logging.
    logger.warning("compiling decode attention (some 20 s the first time, then a few) ...")
    start = time.perf_counter()
    attend_compiled = torch.compile(attend_splits, dynamic=False, fullgraph=True)
    merge_compiled = torch.compile(merge_splits, dynamic=False, fullgraph=True)

    @torch.inference_mode(False)
    @torch.no_grad()
    def compiled(query, key_cache, value_cache, splits, scale):
        return decode_attention(
            query, key_cache, value_cache, splits, scale, attend_compiled, merge_compiled
        )

    try:
        # There may be engines of many shapes, and the compiler gives up at the ninth.
        with torch._dynamo.config.patch(recompile_limit=256):
            _first_call(attend_compiled, merge_compiled, num_heads, key_cache, value_cache)
    except Exception as error:  # whatever a compiler that is missing or broken raises
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        logger.warning("decode attention is not compiled, keys are gathered: %s", reason)
        return None
    logger.info("decode attention compiled in %.1f s", time.perf_counter() - start)
    return compiled


@torch.inference_mode(False)
@torch.no_grad()
def _first_call(attend_compiled, merge_compiled, num_heads, key_cache, value_cache) -> None:
    """Show the compiler typical sizes, and which of them vary."""
    num_seqs, num_splits = 16, 32
    block_size, head_dim = key_cache.shape[1], key_cache.shape[3]
    per_sequence = num_splits // num_seqs * SPLIT_BLOCKS
    splits = split_sequences(
        torch.full((num_seqs,), per_sequence * block_size),
        torch.zeros(num_seqs, per_sequence, dtype=torch.int64),
        block_size,
    )
    wide = torch.promote_types(key_cache.dtype, torch.float32)
    query = torch.zeros(num_seqs, num_heads, head_dim, dtype=wide)
    caches = key_cache.detach(), value_cache.detach()
    arguments = (query, *caches, splits.block_ids, splits.owners, splits.num_keys)
    for tensor in (*arguments, splits.of_sequence):
        torch._dynamo.mark_dynamic(tensor, 0)
    torch._dynamo.mark_dynamic(splits.of_sequence, 1)
    partials = attend_compiled(*arguments)
    for tensor in partials:
        torch._dynamo.mark_dynamic(tensor, 0)
    merge_compiled(*partials, splits.of_sequence)
