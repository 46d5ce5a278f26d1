"""Decode attention on a CPU that reads keys and values where they lie, by `torch.compile`.

`paged_attention.py` gathers what each sequence holds and then attends to it, so keys travel through
the memory three times. Here nothing is gathered. Each block yields a *partial* result: the highest
score, the sum of exp(score - highest), and the values weighted with these. Partial results are
merged, each scaled to the highest score of all: those of up to `FAN_IN` neighbouring blocks are a
*split* of the sequence, those of so many splits a larger one, until there is one for the sequence.

With splits of 3 blocks, and two sequences whose tables are A: 7 2 8 3 and B: 6 5:

    place in the list    0    1    2    3    4    5
    block, and whose     2 A  3 A  5 B  6 B  7 A  8 A    ascending, as they lie in the memory
    of_split             4 0 5 | 1 . . | 3 2 .           of A, A and B, in the order of positions
    merges               0 1 . | 2 . .                   of A and B: places among those three

A processor fetches ahead along ascending addresses, so the tables of many sequences are read as one
sorted list, which takes less time where tables are in disorder.

`attend_splits` is plain PyTorch and the specification: as it stands, `key_cache[block_ids]` is a
gather. Compiled, indexing, multiplication and sum become one loop that reads each block once.
Therefore memory is head-major, `[num_blocks, num_kv_heads, block_size, head_dim]`: a head's keys of
a block are one run. Callers see the transposed view, in which nothing changes for them. A list has
`MAX_BLOCKS` blocks on average at most: the partial results of more do not fit the cache.

Invariants: what is not a sequence's own does not reach its output, not even NaN; a result depends
neither on the batch mates nor on which blocks a sequence has, bit for bit: splits are counted from
position 0, have one size and are merged in the order of positions. Source: FlashDecoding; the merge
is that of FlashAttention-2, arXiv 2307.08691.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

logger = logging.getLogger(__name__)

FAN_IN = 8
MAX_BLOCKS = 512
VECTOR_BYTES = 64  # values are summed in pieces that fill a vector register

Partials = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class BlockList(NamedTuple):
    """What one call reads."""

    block_ids: torch.Tensor  # [num_blocks] int64, ascending
    owners: torch.Tensor  # [num_blocks] int64, the sequence
    num_keys: torch.Tensor  # [num_blocks] int64, of the sequence, from the block's first slot on
    num_hidden: torch.Tensor  # [num_blocks] int64, slots at its beginning: in front of a window
    of_split: torch.Tensor  # [num_splits, FAN_IN] int64, places in this list, -1: none


@dataclass(frozen=True, slots=True)
class DecodeSplits:
    """The work of a step, the same for all its layers. There are two of everything at least: a
    size of one would be compiled anew. A lonely sequence gets a mate of one token."""

    calls: list[BlockList]
    # [num_results, FAN_IN] int64, of each merge: places in the results of the one before, of the
    # first among the splits of all calls; -1: none. The last one's results are the sequences'.
    merges: list[torch.Tensor]


# The compiler takes tensors made in inference mode and others for two kinds: make one kind only.
@torch.inference_mode(False)
def split_sequences(
    seq_lens: torch.Tensor,  # [num_seqs] int, each at least 1, on the host
    block_tables: torch.Tensor,  # [num_seqs, max_blocks] int
    block_size: int,
    window: int | None = None,  # keys that a sequence sees, some of them in its first block
) -> DecodeSplits:
    seq_lens = seq_lens.long()
    if len(seq_lens) == 1:  # a second one, of one token
        seq_lens = torch.cat([seq_lens, torch.ones_like(seq_lens)])
        block_tables = torch.cat([block_tables, block_tables])
    num_blocks = -(-seq_lens // block_size)
    owners, index = _enumerate(num_blocks)
    block_ids = block_tables[owners, index].long()
    num_keys = seq_lens[owners] - index * block_size
    num_hidden = torch.zeros_like(num_keys) if window is None else (num_keys - window).clamp(min=0)
    of_split, num_splits = _neighbours(num_blocks)
    calls, merges = [], []
    for rows in of_split.tensor_split(-(-len(owners) // MAX_BLOCKS)):
        start, stop = int(rows[0, 0]), int(rows.max()) + 1
        in_memory, order = block_ids[start:stop].sort()
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order))
        of_call = torch.where(rows >= 0, place[(rows - start).clamp(min=0)], -1)
        order += start
        of_blocks = owners[order], num_keys[order], num_hidden[order]
        calls.append(BlockList(in_memory, *of_blocks, of_call))
    while num_splits.max() > 1:
        places, num_splits = _neighbours(num_splits)
        merges.append(places)
    return DecodeSplits(calls, merges)


def _enumerate(counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[2, 3] -> [0, 0, 1, 1, 1] and [0, 1, 0, 1, 2]."""
    owners = torch.repeat_interleave(counts)
    return owners, torch.arange(len(owners)) - (counts.cumsum(0) - counts)[owners]


def _neighbours(counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """By threes, [4, 2] -> [[0, 1, 2], [3, -1, -1], [4, 5, -1]], and their rows' counts, [2, 1]."""
    num_rows = -(-counts // FAN_IN)
    owners, index = _enumerate(num_rows)
    places = index[:, None] * FAN_IN + torch.arange(FAN_IN)
    is_own, first = places < counts[owners, None], (counts.cumsum(0) - counts)[owners, None]
    return torch.where(is_own, first + places, -1), num_rows


def attend_splits(
    query: torch.Tensor,  # [num_seqs, num_heads, head_dim] float32 or float64, scaled
    key_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
    value_cache: torch.Tensor,  # the same
    block_ids: torch.Tensor,  # as the next ones of `BlockList`
    owners: torch.Tensor,
    num_keys: torch.Tensor,
    num_hidden: torch.Tensor,
    of_split: torch.Tensor,
) -> Partials:
    """The partial result of each split and head: the highest score and the sum of exp(score -
    highest), `[num_splits, num_heads, 1]`, and the values weighted with these, `[num_splits,
    num_heads, head_dim]`."""
    num_seqs, num_heads, head_dim = query.shape
    _, block_size, num_kv_heads, _ = key_cache.shape
    keys = key_cache.transpose(1, 2)[block_ids]
    values = value_cache.transpose(1, 2)[block_ids]
    # [blocks of the list, num_kv_heads, block_size, head_dim]; scores are without head_dim
    slot = torch.arange(block_size, device=query.device)
    is_own = (slot < num_keys[:, None, None]) & (slot >= num_hidden[:, None, None])
    pieces = values.split(VECTOR_BYTES // values.itemsize, dim=-1)
    highest, total, weighted = [], [], []
    # The query heads that share keys are written out one by one: so they share a loop, and loads.
    for shared in query.view(num_seqs, num_kv_heads, -1, head_dim).unbind(2):
        scores = (shared[owners][:, :, None] * keys).sum(-1)
        scores = torch.where(is_own, scores, -math.inf)
        highest.append(scores.amax(2))
        weights = torch.exp(scores - highest[-1][:, :, None])
        total.append(weights.sum(2))
        # A weight of 0 does not hide NaN.
        sums = [
            (weights[..., None] * torch.where(is_own[..., None], piece, 0)).sum(2)
            for piece in pieces
        ]
        weighted.append(torch.cat(sums, dim=-1))
    partials = (torch.stack(parts, 2) for parts in (highest, total, weighted))
    return merge(of_split, *(part.view(len(owners), num_heads, -1) for part in partials))


def merge(
    places: torch.Tensor,  # [num_results, FAN_IN] int64; -1: none
    highest: torch.Tensor,  # partial results
    total: torch.Tensor,
    weighted: torch.Tensor,
) -> Partials:  # of all that is in a row
    is_real = (places >= 0)[..., None, None]
    places = places.clamp(min=0)
    of_each = torch.where(is_real, highest[places], -math.inf)
    together = of_each.amax(1)
    shares = torch.exp(of_each - together[:, None])
    totals, sums = (torch.where(is_real, part[places], 0) for part in (total, weighted))
    return together, (shares * totals).sum(1), (shares * sums).sum(1)


DecodeAttention = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, DecodeSplits, float], torch.Tensor
]


def decode_attention(
    query: torch.Tensor,  # [num_seqs, num_heads, head_dim], any dtype
    key_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
    value_cache: torch.Tensor,  # the same
    splits: DecodeSplits,
    scale: float,
    attend_splits: Callable[..., Partials] = attend_splits,
    merge: Callable[..., Partials] = merge,
) -> torch.Tensor:  # [num_seqs, num_heads, head_dim]
    """Attention of one query token of each sequence to all its keys. The two functions are those
    above, or what they were compiled to."""
    wide = torch.promote_types(query.dtype, torch.float32)
    scaled = query.to(wide) * scale
    if len(scaled) == 1:
        scaled = torch.cat([scaled, scaled])
    of_calls = [attend_splits(scaled, key_cache, value_cache, *call) for call in splits.calls]
    partials = map(torch.cat, zip(*of_calls)) if len(of_calls) > 1 else of_calls[0]
    for places in splits.merges:
        partials = merge(places, *partials)
    _, total, weighted = partials
    return (weighted / total)[: len(query)].to(query.dtype)


def _compiled(function: Callable[..., Partials]) -> Callable[..., Partials]:
    """Multiplying and adding are one instruction."""
    return compile_for_these_threads(
        function, options={"cpp.enable_floating_point_contract_flag": "fast"}
    )


def compile_for_these_threads(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`function` in machine code, for as many threads as torch has now. With another number it runs
    as it stands: the compiler would compile it again for each number of tokens, half a minute in
    the middle of a step, and raise at the ninth."""
    num_threads = torch.get_num_threads()
    compiled = torch.compile(function, dynamic=False, fullgraph=True, **options)

    def call(*arguments: Any) -> Any:
        chosen = compiled if torch.get_num_threads() == num_threads else function
        return chosen(*arguments)

    return call


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
    attend_compiled = _compiled(attend_splits)
    merge_compiled = _compiled(merge)

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
    num_seqs, (_, block_size, _, head_dim) = 16, key_cache.shape
    num_keys = 2 * FAN_IN * block_size
    splits = split_sequences(
        torch.full((num_seqs,), num_keys),
        torch.zeros(num_seqs, num_keys // block_size, dtype=torch.int64),
        block_size,
    )
    (call,) = splits.calls
    wide = torch.promote_types(key_cache.dtype, torch.float32)
    query = torch.zeros(num_seqs, num_heads, head_dim, dtype=wide)
    arguments = query, key_cache.detach(), value_cache.detach(), *call
    for tensor in (*arguments, *splits.merges):
        torch._dynamo.mark_dynamic(tensor, 0)
    partials = attend_compiled(*arguments)
    for tensor in partials:
        torch._dynamo.mark_dynamic(tensor, 0)
    merge_compiled(*splits.merges, *partials)
