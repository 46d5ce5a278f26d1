"""Sampling as Triton kernels: penalties, top-k, temperature, min-p, top-p, and the draw.

PyTorch needs about sixty operations to draw from a batch, and sorts the vocabulary for top-k and
for top-p. Here are four kernels, with PyTorch's softmax between them:

    apply_penalties      one pass
    shape                the k highest logits, by search; the temperature, min-p
    softmax              PyTorch's
    apply_top_p          the highest logits that reach p, by the same search; then softmax again
    sample_from_probs    the draw

The results are bitwise identical to those of `common/sampling`, which is the specification: `Rules`
takes either. So a kernel only computes operations with one right result: comparisons, single
operations that IEEE 754 rounds in one way (no fused multiply-add, divisions rounded to nearest),
and sums of integers, which do not depend on the order of addition. PyTorch computes the others,
exponentials and sums of floats, for both: the softmax, and the mass of each block of the
vocabulary. On one device both draw the same tokens. Between devices the tokens can differ where
PyTorch's softmax differs in its last bit.

Nothing is sorted. The k-th highest logit, or the one that reaches p, is the lowest threshold with
fewer than k tokens, or less mass than p, above it. Logits are read as integers of the same order,
and thresholds are tried `WAYS` at a time:

    low         t1          t2          t3          t4        high      above(t) >= k | above(t) < k
                            low        high                             after one pass over the row

Among equal logits the lower ids are kept: sums give the tile in which they reach k or p, and they
are counted one by one only in that tile. For up to 256 tokens, the vocabulary is read once, for the
maxima of its blocks, and then only as many blocks as tokens.

The draw is chapter 5's, with one uniform number and integer weights. Gumbel noise, which vLLM and
others use, needs a random number and a logarithm for each token of the vocabulary, and the winner
depends on the last bit of each, so another device can draw another token. It also leaves no
remainder for a second draw (first a block, then a token in it).

A row's highest logit, which greedy rows need anyway, is an argument. So without top-k, `shape` is
one pass, and a program takes a tile of a row. A search takes the whole row, so a few rows leave
most of a GPU idle. Logits are float32, or the model's 16-bit type, converted when loaded. PyTorch
samples from the logits of a float64 model.

See common/models/regions/README.md#the-sampler"""

from __future__ import annotations

from functools import cache

import torch

from common.sampling import counter_random, sampling_constraints
from common.sampling.counter_random import BLOCK, block_mass
from common.sampling.distributions import IN_TORCH, Rules
from common.sampling.sampling_rules import apply_min_p
from inverse_cdf import SCALE
from kernel_launch import TRITON_TYPES, Launch
from paged_attention_triton import next_power_of_2
from triton_or_none import jit, jit_for_any, tl

PART = 64  # tokens per block; only the best blocks are searched for a small top-k
TILE = 2048  # tokens that a program loads in one operation
WAYS = 4  # thresholds per pass: more would cost more than the passes they save
NUM_WARPS = 8


@jit
def _divide(a, b):
    """Divide with rounding to nearest, as PyTorch does."""
    if a.dtype == tl.float64:
        return a / b
    else:
        return tl.div_rn(a, b)


@jit
def _key(x):
    """Return integers in the order of the floats, with the same integer for both zeros."""
    x = tl.where(x == 0.0, 0.0, x)
    if x.dtype == tl.float64:
        bits = x.to(tl.int64, bitcast=True)
        return tl.where(bits < 0, bits ^ 0x7FFFFFFFFFFFFFFF, bits)
    else:
        bits = x.to(tl.int32, bitcast=True)
        return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@jit
def _token(index, candidates, PART: tl.constexpr):
    """Return a candidate's token. Candidates are the tokens of some blocks, and then the tokens
    after all blocks."""
    blocks, num_blocks, next_offset = candidates
    is_inside = index < num_blocks * PART
    block = tl.load(blocks + index // PART, mask=is_inside, other=0).to(tl.int32)
    token = next_offset + index - num_blocks * PART
    return tl.where(is_inside, block * PART + index % PART, token)


@jit
def _load_keys(
    row,
    weights_row,
    index,
    width,
    candidates,
    HAS_WEIGHTS: tl.constexpr,
    SCALE: tl.constexpr,
    PART: tl.constexpr,
):
    """Return logits, keys and weights (int64: 1, or the scaled probability) of some candidates. If
    PART is 0, all tokens are candidates."""
    is_token = index < width
    if PART > 0:
        token = _token(index, candidates, PART)
    else:
        token = index
    x = tl.load(row + token, mask=is_token, other=float("-inf"))
    if x.dtype != tl.float64:
        x = x.to(tl.float32)
    if HAS_WEIGHTS:
        p = tl.load(weights_row + token, mask=is_token, other=0.0).to(tl.float64)
        weight = tl.where(is_token, (p * SCALE + 0.5).to(tl.int64), 0)
    else:
        weight = is_token.to(tl.int64)
    return x, _key(x), weight


@jit
def _search(
    row,
    weights_row,
    width,
    bound,
    low,
    high,
    candidates,
    HAS_WEIGHTS: tl.constexpr,
    SCALE: tl.constexpr,
    PART: tl.constexpr,
    TILE: tl.constexpr,
    WAYS: tl.constexpr,
):
    """Return the lowest key with less than `bound` weight above it, and that weight, int64. The key
    is above `low`, and the weight above `high` is less than `bound`; both are int64."""
    way = tl.arange(0, WAYS)
    above_high = tl.zeros([], tl.int64)
    gap = high - low
    while gap > 1:
        step = tl.maximum(gap // (WAYS + 1), 1)
        threshold = tl.minimum(low + step * (way + 1), low + gap - 1)
        above = tl.zeros([WAYS], tl.int64)
        for start in range(0, width, TILE):
            index = start + tl.arange(0, TILE)
            _, key, weight = _load_keys(
                row, weights_row, index, width, candidates, HAS_WEIGHTS, SCALE, PART
            )
            is_above = key[:, None] > threshold.to(key.dtype)[None, :]
            above += tl.sum(tl.where(is_above, weight[:, None], 0), 0)
        is_less = above < bound
        low = tl.max(tl.where(is_less, low, threshold))
        found = tl.min(tl.where(is_less, threshold, high))
        here = tl.max(tl.where(is_less & (threshold == found), above, 0))
        above_high = tl.where(found == high, above_high, here)
        high = found
        gap = high - low  # pyright: ignore[reportOperatorIssue]
    return high, above_high


@jit
def _border(
    row,
    weights_row,
    width,
    bound,
    low,
    high,
    candidates,
    HAS_WEIGHTS: tl.constexpr,
    SCALE: tl.constexpr,
    PART: tl.constexpr,
    TILE: tl.constexpr,
    WAYS: tl.constexpr,
):
    """Return key and index of the last candidate that is kept. Among equals the first ones are
    kept. Arguments are those of `_search`."""
    last, above = _search(
        row, weights_row, width, bound, low, high, candidates, HAS_WEIGHTS, SCALE, PART, TILE, WAYS
    )
    # The tile in which the equals reach the bound; all equals before it are kept.
    stop = tl.zeros([], tl.int32)
    reached = above
    while (stop < width) & (reached < bound):
        above = reached
        index = stop + tl.arange(0, TILE)
        _, key, weight = _load_keys(
            row, weights_row, index, width, candidates, HAS_WEIGHTS, SCALE, PART
        )
        reached += tl.sum(tl.where(key == last, weight, 0))
        stop += TILE
    index = stop - TILE + tl.arange(0, TILE)
    _, key, weight = _load_keys(
        row, weights_row, index, width, candidates, HAS_WEIGHTS, SCALE, PART
    )
    tie = tl.where(key == last, weight, 0)
    before = above + tl.cumsum(tie) - tie
    is_kept = (tie > 0) & (before < bound)
    return last, tl.max(tl.where(is_kept, index, stop - TILE - 1))


@jit
def _kept(key, index, last, last_index):
    """Whether each candidate is kept, given the result of `_border`."""
    return (key > last) | ((key == last) & (index <= last_index))


@jit_for_any("width", "logits_stride", unaligned=("repetition", "presence", "frequency"))
def _penalties_kernel(
    output,  # [num_rows, width] float32, contiguous
    logits,  # [num_rows, width] float32
    is_known,  # [num_rows, width] bool, contiguous
    counts,  # [num_rows, width] int32, contiguous
    repetition,  # [num_rows] float64
    presence,
    frequency,
    width,
    logits_stride,  # from row to row
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = token < width
    place = row * width + token
    x = tl.load(logits + row * logits_stride + token, mask=mask, other=0.0)
    known = tl.load(is_known + place, mask=mask, other=0) != 0
    count = tl.load(counts + place, mask=mask, other=0)
    factor = tl.load(repetition + row).to(tl.float32)
    repeated = tl.where(x > 0, tl.div_rn(x, tl.zeros_like(x) + factor), x * factor)
    x = tl.where(known, repeated, x)
    x = x - tl.load(frequency + row).to(tl.float32) * count.to(tl.float32)
    x = x - tl.load(presence + row).to(tl.float32) * (count > 0).to(tl.float32)
    tl.store(output + place, x, mask=mask)


@jit_for_any(
    "width",
    "num_columns",
    "has_top_k",
    "has_min_p",
    "logits_stride",
    "num_blocks",
    "next_offset",
    unaligned=("highest", "temperature", "top_k", "lowest"),
)
def _shape_kernel(
    output,  # [num_rows, num_columns], float64 if IS_NARROW, else float32
    ids,  # [num_rows, num_columns] int64 if IS_NARROW
    logits,  # [num_rows, vocab_size], of 16 or 32 bits
    blocks,  # [num_rows, num_blocks] int64 if IS_NARROW, ascending: the candidates' blocks
    highest,  # [num_rows], like logits
    temperature,  # [num_rows] float64
    top_k,  # [num_rows] int64; 0: no limit
    lowest,  # [num_rows] float64: min-p removes lower values
    width,  # number of candidates
    num_columns,  # of the output
    has_top_k,
    has_min_p,
    logits_stride,  # from row to row
    num_blocks,
    next_offset,  # first token after all blocks; it and all later ones are candidates
    IS_NARROW: tl.constexpr,
    COOLEST: tl.constexpr,
    HOTTEST: tl.constexpr,
    PART: tl.constexpr,  # tokens of a block; 0: all tokens are candidates
    TILE: tl.constexpr,
    WAYS: tl.constexpr,
):
    """Shape the logits. A program takes a row, or one tile of it if there is no top-k."""
    row = tl.program_id(0).to(tl.int64)
    source = logits + row * logits_stride
    candidates = blocks + row * num_blocks, num_blocks, next_offset
    target = output + row * num_columns
    lowest_key = tl.full([], -(2**31), tl.int64)  # as int32
    low = lowest_key - 1
    high = -lowest_key - 1
    num_before = tl.zeros([], tl.int32)
    # Narrow rows: first find the columns, and then the columns that are kept.
    if IS_NARROW:
        bound = tl.zeros([], tl.int64) + num_columns
        column_last, column_index = _border(
            source, source, width, bound, low, high, candidates, False, 1.0, PART, TILE, WAYS
        )
        low = column_last - 1
    k = tl.load(top_k + row)
    is_cut = (has_top_k != 0) & (k > 0) & (k < num_columns)
    last = lowest_key - 1
    last_index = tl.zeros([], tl.int32)
    if is_cut:
        last, last_index = _border(
            source, source, width, k, low, high, candidates, False, 1.0, PART, TILE, WAYS
        )

    dtype = output.dtype.element_ty
    scale = tl.minimum(tl.maximum(tl.load(temperature + row), COOLEST), HOTTEST).to(dtype)
    first = tl.load(highest + row).to(dtype)
    floor = tl.load(lowest + row).to(dtype)
    for start in range(tl.program_id(1) * TILE, width, tl.num_programs(1) * TILE):
        index = start + tl.arange(0, TILE)
        x, key, _ = _load_keys(source, source, index, width, candidates, False, 1.0, PART)
        key = key.to(tl.int64)
        wide = x.to(dtype) - first
        wide = _divide(wide, tl.zeros_like(wide) + scale)
        wide = tl.where(_kept(key, index, last, last_index), wide, float("-inf"))
        wide = tl.where((has_min_p != 0) & (wide < floor), float("-inf"), wide)
        if IS_NARROW:
            is_column = _kept(key, index, column_last, column_index) & (index < width)
            column = num_before + tl.cumsum(is_column.to(tl.int32)) - 1
            num_before += tl.sum(is_column.to(tl.int32))
            token = _token(index, candidates, PART).to(tl.int64)
            tl.store(target + column, wide, mask=is_column)
            tl.store(ids + row * num_columns + column, token, mask=is_column)
        else:
            tl.store(target + index, wide, mask=index < width)


@jit_for_any("width", unaligned=("top_p",))
def _top_p_kernel(
    logits,  # [num_rows, width], none above 0, contiguous; removed tokens become -inf
    probs,  # the same, their softmax
    top_p,  # [num_rows] float64
    width,
    LOW: tl.constexpr,  # below the key of -inf
    SCALE: tl.constexpr,
    TILE: tl.constexpr,
    WAYS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    p = tl.load(top_p + row)
    if p >= 1:
        return
    logits += row * width
    probs += row * width
    bound = tl.ceil(tl.maximum(p * SCALE, 1.0)).to(tl.int64)
    low = tl.full([], LOW, tl.int64)
    high = tl.zeros([], tl.int64)
    all_tokens = probs, 0, 0
    last, last_index = _border(
        logits, probs, width, bound, low, high, all_tokens, True, SCALE, 0, TILE, WAYS
    )
    for start in range(0, width, TILE):
        token = start + tl.arange(0, TILE)
        x, key, _ = _load_keys(logits, probs, token, width, all_tokens, False, SCALE, 0)
        is_kept = _kept(key.to(tl.int64), token, last, last_index)
        tl.store(logits + token, tl.where(is_kept, x, float("-inf")), mask=token < width)


@jit
def _draw(weights, u, num, SCALE: tl.constexpr):
    """Return `inverse_cdf.draw` of one row, and the weight of the drawn index."""
    lane = tl.arange(0, weights.shape[0])
    integers = (weights * SCALE).to(tl.int64)
    ends = tl.cumsum(integers)
    target = (u * tl.sum(integers).to(tl.float64)).to(tl.int64)
    index = tl.minimum(tl.sum((ends <= target).to(tl.int32)), num - 1)
    start = tl.sum(tl.where(lane < index, integers, 0))
    integer = tl.sum(tl.where(lane == index, integers, 0))
    within = (target - start).to(tl.float64) / integer.to(tl.float64)
    return index, within, tl.sum(tl.where(lane == index, weights, 0.0))


@jit_for_any("width", "num_blocks", unaligned=("u",))
def _draw_kernel(
    tokens,  # [num_rows] int64, written
    probs,  # [num_rows, width], contiguous
    mass,  # [num_rows, num_blocks], like probs, contiguous
    u,  # [num_rows] float64
    width,
    num_blocks,
    SCALE: tl.constexpr,
    BLOCK: tl.constexpr,  # tokens per sum in `mass`
    MAX_BLOCKS: tl.constexpr,  # num_blocks padded to a power of two
):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, MAX_BLOCKS)
    masses = tl.load(mass + row * num_blocks + lane, mask=lane < num_blocks, other=0.0)
    block, within, total = _draw(masses.to(tl.float64), tl.load(u + row), num_blocks, SCALE)
    token = block * BLOCK + tl.arange(0, BLOCK)
    inside = tl.load(probs + row * width + token, mask=token < width, other=0.0)
    offset, _, _ = _draw(inside.to(tl.float64) / total, within, BLOCK, SCALE)
    tl.store(tokens + row, tl.minimum(block * BLOCK + offset, width - 1).to(tl.int64))


# -- launches (`kernel_launch.py`)


@cache
def penalties_launch() -> Launch:
    names = "repetition", "presence", "frequency"
    arguments = {"output": "*fp32", "logits": "*fp32", "is_known": "*i1", "counts": "*i32"}
    arguments |= dict.fromkeys(names, "*fp64") | {"width": "i32", "logits_stride": "i32"}
    return Launch(_penalties_kernel, arguments, {"TILE": TILE}, unaligned=names, **_EXACT)


@cache
def shape_launch(is_narrow: bool, dtype: torch.dtype) -> Launch:
    kind = "*fp64" if is_narrow else "*fp32"
    given = "*" + TRITON_TYPES[dtype]
    arguments = {"output": kind, "ids": "*i64", "logits": given, "blocks": "*i64"}
    unaligned = "highest", "temperature", "top_k", "lowest"
    arguments |= dict(zip(unaligned, (given, "*fp64", "*i64", "*fp64")))
    arguments |= dict.fromkeys(("width", "num_columns", "has_top_k", "has_min_p"), "i32")
    arguments |= dict.fromkeys(("logits_stride", "num_blocks", "next_offset"), "i32")
    limits = torch.finfo(torch.float64 if is_narrow else torch.float32)
    constants = {"IS_NARROW": is_narrow, "COOLEST": limits.tiny, "HOTTEST": limits.max}
    constants |= {"PART": PART if is_narrow else 0, "TILE": TILE, "WAYS": WAYS}
    return Launch(_shape_kernel, arguments, constants, NUM_WARPS, unaligned=unaligned, **_EXACT)


@cache
def top_p_launch(dtype: torch.dtype) -> Launch:
    """Return the launch of top-p. Rows in float64 are narrow and have one tile."""
    is_narrow = dtype == torch.float64
    pointer = "*" + TRITON_TYPES[dtype]
    arguments = {"logits": pointer, "probs": pointer, "top_p": "*fp64", "width": "i32"}
    constants = {
        "LOW": _key_of_infinity(is_narrow),
        "SCALE": SCALE,
        "TILE": MAX_NARROW_COLUMNS if is_narrow else TILE,
        "WAYS": WAYS,
    }
    num_warps = 4 if is_narrow else NUM_WARPS
    return Launch(_top_p_kernel, arguments, constants, num_warps, unaligned=("top_p",), **_EXACT)


@cache
def draw_launch(dtype: torch.dtype, num_blocks: int) -> Launch:
    arguments = {"tokens": "*i64"} | dict.fromkeys(("probs", "mass"), "*" + TRITON_TYPES[dtype])
    arguments |= {"u": "*fp64", "width": "i32", "num_blocks": "i32"}
    max_blocks = max(4, next_power_of_2(num_blocks))  # narrow rows have up to three
    constants = {"SCALE": SCALE, "BLOCK": BLOCK, "MAX_BLOCKS": max_blocks}
    return Launch(_draw_kernel, arguments, constants, unaligned=("u",), **_EXACT)


MAX_NARROW_COLUMNS = 256  # of the narrow rows
_EXACT = {"enable_fp_fusion": False}  # a * b + c is rounded twice, as in PyTorch


def _key_of_infinity(is_double: bool) -> int:
    """Return one less than the key of -inf."""
    return -(0x7FF << 52) - 2 if is_double else -(0xFF << 23) - 2


def sampling_launches(vocab_size: int, dtype: torch.dtype = torch.float32) -> list[Launch]:
    """Return all launches of a sampler with this vocabulary and logits in `dtype`. Logits that
    rules have changed are float32."""
    launches, logit_dtypes = [penalties_launch()], dict.fromkeys((dtype, torch.float32))
    for kind, width in ((torch.float32, vocab_size), (torch.float64, MAX_NARROW_COLUMNS)):
        launches += [
            *(shape_launch(kind == torch.float64, given) for given in logit_dtypes),
            top_p_launch(kind),
            draw_launch(kind, width // BLOCK + 1),
        ]
    return launches


# -- functions with the signatures of the specification


def apply_penalties(
    logits: torch.Tensor,
    is_known: torch.Tensor,
    output_counts: torch.Tensor,
    repetition_penalty: torch.Tensor,
    presence_penalty: torch.Tensor,
    frequency_penalty: torch.Tensor,
) -> torch.Tensor:
    penalties = repetition_penalty, presence_penalty, frequency_penalty
    if logits.dtype != torch.float32:
        return sampling_constraints.apply_penalties(logits, is_known, output_counts, *penalties)
    logits = _with_rows(logits)
    output, (num_rows, width) = torch.empty_like(logits).contiguous(), logits.shape
    if num_rows:
        grid = num_rows, -(-width // TILE)
        counted = is_known.contiguous(), output_counts.contiguous()
        penalties_launch()(grid, output, logits, *counted, *penalties, width, logits.stride(0))
    return output


def shape(
    logits: torch.Tensor,
    highest: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None,
    max_top_k: int,
    is_narrow: bool,
    min_p: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Launch `_shape_kernel`, which also applies min-p. The k = `max_top_k` highest logits are in
    the k blocks with the highest maxima, as in `ranked_ids`. So for narrow rows only these blocks
    are searched, after the same search among the maxima of all blocks."""
    if logits.dtype == torch.float64:
        given = highest, temperature, top_k, max_top_k, is_narrow
        output, ids = sampling_constraints.shape(logits, *given)
        return (output if min_p is None else apply_min_p(output, min_p)), ids
    logits, (num_rows, vocab_size) = _with_rows(logits), logits.shape
    num_columns, dtype = (max_top_k, torch.float64) if is_narrow else (vocab_size, torch.float32)
    output = logits.new_empty(num_rows, num_columns, dtype=dtype)
    ids = logits.new_empty(num_rows, max_top_k if is_narrow else 1, dtype=torch.int64)
    blocks, num_blocks, next_offset = ids, 0, 0
    if is_narrow and vocab_size // PART > 2 * max_top_k:
        num_blocks, next_offset = max_top_k, vocab_size // PART * PART
        best = logits[:, :next_offset].unflatten(1, (-1, PART)).amax(dim=-1)
        _, blocks = shape(best, highest, temperature, None, max_top_k, True)
    lowest = temperature if min_p is None else min_p.log()  # PyTorch computes logarithms
    has_top_k, has_min_p = top_k is not None, min_p is not None
    tensors = output, ids, logits, blocks, highest, temperature, top_k if has_top_k else ids, lowest
    width = num_blocks * PART + vocab_size - next_offset
    numbers = width, num_columns, int(has_top_k), int(has_min_p), logits.stride(0)
    num_programs = 1 if is_narrow or has_top_k else -(-vocab_size // TILE)
    if num_rows:
        grid = num_rows, num_programs
        shape_launch(is_narrow, logits.dtype)(grid, *tensors, *numbers, num_blocks, next_offset)
    return output, ids if is_narrow else None


def apply_top_p(logits: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Apply top-p in place to the logits that `shape` returned."""
    probs, (num_rows, width) = logits.softmax(dim=-1), logits.shape
    is_narrow = logits.dtype == torch.float64
    if is_narrow and width > MAX_NARROW_COLUMNS:
        return sampling_constraints.apply_top_p(logits, top_p)
    if num_rows:
        top_p_launch(logits.dtype)((num_rows,), logits, probs, top_p, width)
    return logits


def sample_from_probs(probs: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    (num_rows, width), is_narrow = probs.shape, probs.dtype == torch.float64
    if is_narrow and width > MAX_NARROW_COLUMNS:
        return counter_random.sample_from_probs(probs, u)
    mass, tokens = block_mass(probs), torch.empty_like(u, dtype=torch.int64)
    if num_rows:
        launch = draw_launch(probs.dtype, mass.shape[1])
        launch((num_rows,), tokens, probs, mass, u, width, mass.shape[1])
    return tokens


def _with_rows(logits: torch.Tensor) -> torch.Tensor:
    """Return logits whose rows are contiguous. The stride between rows can be any."""
    return logits if logits.stride(1) == 1 else logits.contiguous()


_LIMITS = {name: limit for name, limit in IN_TORCH.limits.items() if name != "min_p"}
_LIMITS |= {"top_p": apply_top_p}
KERNELS = Rules(apply_penalties, shape, sample_from_probs, _LIMITS, fused=("min_p",))
