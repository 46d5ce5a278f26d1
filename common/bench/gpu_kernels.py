"""Every Triton kernel of this book, for the GPU report: what it should give, and what it costs.

`GROUPS` is the registry. A group is one kernel, or several versions that compute the same and are
timed in turn on the same inputs:

    check(lab)        what it gave and what it should have given, on fresh inputs, in every dtype
    cells(sizes)      where it is timed, the most telling first
    make(lab, cell)   what is timed there, by version: a call and its `Cost`

A new kernel is a line in `GROUPS` and these three functions. Numbers are compared with float64;
tokens, which are integers, must be those of the PyTorch version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from common.bench.gpu_arithmetic import (
    Cost,
    Heads,
    add_rms_norm_cost,
    attention_cost,
    matching_cost,
    merge_cost,
    rejection_cost,
    rotate_and_write_cost,
    silu_and_multiply_cost,
    write_kv_cost,
)
from common.bench.gpu_inputs import (
    BLOCK_SIZE,
    DTYPES,
    Cell,
    Lab,
    PagedInputs,
    Sizes,
    decode_lengths,
    make_caches,
    num_blocks_of,
    paged_inputs,
)
from common.kernels.layer_kernels import (
    add_rms_norm,
    add_rms_norm_in_torch,
    rotate_and_write,
    rotate_and_write_in_torch,
    silu_and_multiply,
    silu_and_multiply_in_torch,
)
from common.rotary import rotary_table
from mixed_attention_triton import MixedTritonAttentionBackend
from paged_attention_triton import TritonAttentionBackend
from rejection_sampler import rejection_sample, rejection_sampling_batched
from rejection_sampler_triton import rejection_sample_triton, rejection_sampling_batched_triton
from split_attention_triton import SplitPlan, SplitTritonAttentionBackend

# Of the whole result's size; the largest single error may be so large relative to the largest
# number of the result.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}
# Version 3 is what the engine uses.
VERSIONS: dict[str, type[TritonAttentionBackend]] = {
    "attention v1": TritonAttentionBackend,
    "attention v2": SplitTritonAttentionBackend,
    "attention v3": MixedTritonAttentionBackend,
}
IN_ENGINE = "attention v3"


@dataclass(frozen=True, slots=True)
class Comparison:
    """One result of a kernel. `expected` is float64, or integers, which have to be equal."""

    kernel: str
    dtype: torch.dtype
    what: str
    found: torch.Tensor
    expected: torch.Tensor

    def judge(self) -> dict[str, Any]:
        """`error`: the norm of the difference relative to the expected; of integers, how many are
        others. NaN where nothing is expected to be is an error of infinity, written as None."""
        row = {"kernel": self.kernel, "dtype": str(self.dtype)[6:], "what": self.what}
        if self.found.shape != self.expected.shape:
            shapes = f"{tuple(self.found.shape)}, not {tuple(self.expected.shape)}"
            return row | {"error": None, "tolerance": 0, "is_right": False, "why": shapes}
        if not self.expected.is_floating_point():
            num_others = int((self.found != self.expected).sum())
            return row | {"error": num_others, "tolerance": 0, "is_right": num_others == 0}
        if self.found.dtype != self.dtype:
            why = f"the result is {self.found.dtype}"
            return row | {"error": None, "tolerance": 0, "is_right": False, "why": why}
        difference = self.found.double() - self.expected
        norm = difference.norm().item() / max(self.expected.norm().item(), 1e-30)
        largest = max(self.expected.abs().max().item(), 1e-30)
        worst = difference.abs().max().item() / largest
        tolerance = TOLERANCE[self.dtype]
        is_number = norm == norm and norm != float("inf")
        return row | {
            "error": norm if is_number else None,
            "largest_error": worst if is_number else None,
            "tolerance": tolerance,
            "is_right": is_number and norm <= tolerance and worst <= 2 * tolerance,
        }


@dataclass(frozen=True, slots=True)
class Work:
    """`call` reads no value on the host, and can be repeated."""

    call: Callable[[], Any]
    cost: Cost
    check: Callable[[], Iterator[Comparison]] | None = None  # of a sample, before it is timed


Makes = Mapping[str, Work]


@dataclass(frozen=True, slots=True)
class Group:
    name: str
    check: Callable[[Lab], Iterator[Comparison]]
    cells: Callable[[Sizes], Sequence[Cell]]
    make: Callable[[Lab, Cell], Makes]
    num_bytes: Callable[[Lab, Cell], int] = lambda lab, cell: 0  # of memory that a cell takes
    describe: Callable[[Sizes, Cell], str] = lambda sizes, cell: str(cell)


# -- attention


def check_attention(lab: Lab) -> Iterator[Comparison]:
    """Decodes and chunks in one batch, NaN wherever no sequence has written."""
    lengths = lab.sizes.checked
    for dtype in DTYPES:
        inputs = paged_inputs(
            lab, lengths, make_caches(lab, num_blocks_of(lengths) + 3, dtype), poisoned=True
        )
        expected = torch.cat([inputs.in_float64(row) for row in range(len(lengths))])
        decodes = [length for length in lengths if length[0] == 1]
        for name, backend in VERSIONS.items():
            lab.poison(inputs.query.nbytes)
            yield Comparison(name, dtype, "decodes and chunks", attend(backend, inputs), expected)
            own = replace(inputs, lengths=decodes, query=inputs.query[: len(decodes)])
            lab.poison(own.query.nbytes)
            found = attend(backend, own)
            yield Comparison(name, dtype, "decodes", found, expected[: len(decodes)])


def attend(backend: type[TritonAttentionBackend], inputs: PagedInputs) -> torch.Tensor:
    arguments = inputs.key_cache, inputs.value_cache, inputs.metadata(), inputs.scale
    return backend().attend(inputs.query, *arguments)


def cache_bytes(lab: Lab, lengths: Sequence[tuple[int, int]]) -> int:
    return num_blocks_of(lengths) * BLOCK_SIZE * lab.heads.kv_bytes


def attention_works(lab: Lab, lengths: Sequence[tuple[int, int]]) -> Makes:
    """The versions on the same inputs. Before they are timed, the first and the last sequence are
    compared with float64: at the far end of a large cache offsets have more than 31 bits."""
    inputs = paged_inputs(lab, lengths, make_caches(lab, num_blocks_of(lengths), lab.dtype))
    cost = attention_cost(lab.heads, lengths, BLOCK_SIZE)
    num_first = lengths[0][0]

    def work(name: str, backend: TritonAttentionBackend) -> Work:
        metadata = inputs.metadata()
        arguments = inputs.key_cache, inputs.value_cache, metadata, inputs.scale
        call = partial(backend.attend, inputs.query, *arguments)

        def check() -> Iterator[Comparison]:
            found = call()
            yield Comparison(
                name, lab.dtype, "first sequence", found[:num_first], inputs.in_float64(0)
            )
            last = inputs.in_float64(len(lengths) - 1)
            yield Comparison(name, lab.dtype, "last sequence", found[-len(last) :], last)

        return Work(call, cost, check)

    return {name: work(name, backend()) for name, backend in VERSIONS.items()}


def mixed_lengths(sizes: Sizes, cell: Cell) -> tuple[tuple[int, int], ...]:
    """A cell of the mixed group has a batch's number in place of lengths."""
    return sizes.mixed[cell.num_seqs]


def mixed_cells(sizes: Sizes) -> list[Cell]:
    return [Cell(i) for i in range(len(sizes.mixed))]


def describe_batch(lengths: Sequence[tuple[int, int]]) -> str:
    """`256 x (1, 2,048) + 1 x (512, 2,048)`: sequences x (query tokens, keys)."""
    parts = {length: sum(other == length for other in lengths) for length in lengths}
    return " + ".join(f"{n} x ({q:,}, {k:,})" for (q, k), n in parts.items())


# -- merging of splits


def check_nothing(lab: Lab) -> Iterator[Comparison]:
    """Its numbers are those of attention of many splits, which is checked."""
    yield from ()


def merge_works(lab: Lab, cell: Cell) -> Makes:
    """Version 2's second kernel alone, on the partial results of its first."""
    lengths = decode_lengths(cell)
    inputs = paged_inputs(lab, lengths, make_caches(lab, num_blocks_of(lengths), lab.dtype))
    metadata = inputs.metadata()
    caches = inputs.key_cache, inputs.value_cache
    output = SplitTritonAttentionBackend().attend(inputs.query, *caches, metadata, inputs.scale)
    plan = metadata.plan
    assert isinstance(plan, SplitPlan)
    (items,) = plan.items
    num_splits = items.first_item.diff().tolist()
    merging = replace(items, launch=_no_launch)
    arguments = output, inputs.query, *caches, metadata, inputs.scale
    return {"merging of splits": Work(partial(merging.attend, *arguments),
                                      merge_cost(lab.heads, num_splits))}  # fmt: skip


def _no_launch(grid: tuple[int, ...], *arguments: Any) -> None:
    pass


# -- writing of keys and values


def write_kv_inputs(lab: Lab, num_tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Slices of a fused projection, caches of NaN, random slots."""
    heads = lab.heads
    num_heads = heads.num_heads + 2 * heads.num_kv_heads
    qkv = lab.normal(num_tokens, num_heads, heads.head_dim, dtype=dtype)
    _, key, value = qkv.split((heads.num_heads, heads.num_kv_heads, heads.num_kv_heads), dim=1)
    caches = [cache.fill_(torch.nan) for cache in make_caches(lab, num_tokens, dtype)]
    return qkv, key, value, *caches, random_slots(lab, num_tokens)


def random_slots(lab: Lab, num_tokens: int) -> torch.Tensor:
    """Different ones, anywhere in a cache of as many blocks; none in block 0."""
    where = {"device": lab.device.torch_device, "generator": lab.generator}
    return torch.randperm(num_tokens * BLOCK_SIZE, **where)[:num_tokens] + BLOCK_SIZE


def check_write_kv(lab: Lab) -> Iterator[Comparison]:
    for dtype in DTYPES:
        _, key, value, key_cache, value_cache, slots = write_kv_inputs(
            lab, lab.sizes.checked_rows, dtype
        )
        slots[1] = -1
        TritonAttentionBackend().write_kv(key, value, key_cache, value_cache, slots)
        for what, new, cache in (("keys", key, key_cache), ("values", value, value_cache)):
            expected = torch.full_like(cache, torch.nan, dtype=torch.float64)
            expected.flatten(0, 1)[slots[slots >= 0]] = new[slots >= 0].double()
            yield from compare_caches("write_kv", dtype, what, cache, expected)


def compare_caches(
    name: str, dtype: torch.dtype, what: str, cache: torch.Tensor, expected: torch.Tensor
) -> Iterator[Comparison]:
    """What was NaN and should have stayed so, and the rest."""
    yield Comparison(name, dtype, f"where {what} are", cache.isnan(), expected.isnan())
    yield Comparison(name, dtype, what, cache.nan_to_num(), expected.nan_to_num())


def write_kv_works(lab: Lab, cell: Cell) -> Makes:
    _, *arguments = write_kv_inputs(lab, cell.num_seqs, lab.dtype)
    cost = write_kv_cost(lab.heads, cell.num_seqs)
    return {"write_kv": Work(partial(TritonAttentionBackend().write_kv, *arguments), cost)}


def row_cells(sizes: Sizes) -> list[Cell]:
    return [Cell(n) for n in sizes.rows]


# -- the small operations of a layer


def check_add_rms_norm(lab: Lab) -> Iterator[Comparison]:
    shape = lab.sizes.checked_rows, lab.sizes.model.hidden_size
    eps = lab.sizes.model.rms_norm_eps
    for dtype in DTYPES:
        hidden, delta = lab.normal(*shape, dtype=dtype), lab.normal(*shape, dtype=dtype)
        weight = lab.normal(shape[1], dtype=dtype)
        total = hidden.double() + delta.double()
        lab.poison(hidden.nbytes)
        normed = add_rms_norm(hidden, delta, weight, eps)
        yield Comparison("add_rms_norm", dtype, "sum", hidden, total)
        expected = add_rms_norm_in_torch(total, torch.zeros_like(total), weight.double(), eps)
        yield Comparison("add_rms_norm", dtype, "normed", normed, expected)


def add_rms_norm_works(lab: Lab, cell: Cell) -> Makes:
    """The sum would grow from call to call: nothing is added."""
    model = lab.sizes.model
    hidden = lab.normal(cell.num_seqs, model.hidden_size)
    delta, weight = torch.zeros_like(hidden), lab.normal(model.hidden_size)
    cost = add_rms_norm_cost(model.hidden_size, lab.dtype.itemsize, cell.num_seqs)
    call = partial(add_rms_norm, hidden, delta, weight, model.rms_norm_eps)
    return {"add_rms_norm": Work(call, cost)}


def rotate_inputs(lab: Lab, num_tokens: int, dtype: torch.dtype) -> list[Any]:
    model, heads = lab.sizes.model, lab.heads
    qkv, _, _, *caches, slots = write_kv_inputs(lab, num_tokens, dtype)
    weight = lab.normal(heads.num_heads + heads.num_kv_heads, heads.head_dim, dtype=dtype)
    num_positions = lab.sizes.max_model_len
    table = rotary_table(model.rope, heads.head_dim, num_positions, dtype)
    positions = lab.integers(num_positions, num_tokens)
    return [qkv, weight, table.to(qkv.device), positions, *caches, slots, model.rms_norm_eps]


def check_rotate_and_write(lab: Lab) -> Iterator[Comparison]:
    for dtype in DTYPES:
        arguments = rotate_inputs(lab, lab.sizes.checked_rows, dtype)
        arguments[6][1] = -1
        in_float64 = [
            x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
            for x in arguments
        ]
        expected = rotate_and_write_in_torch(*in_float64)
        lab.poison(arguments[0].nbytes)
        query = rotate_and_write(*arguments)
        yield Comparison("rotate_and_write", dtype, "queries", query, expected)
        for i, what in ((4, "keys"), (5, "values")):
            yield from compare_caches(
                "rotate_and_write", dtype, what, arguments[i], in_float64[i]
            )


def rotate_and_write_works(lab: Lab, cell: Cell) -> Makes:
    call = partial(rotate_and_write, *rotate_inputs(lab, cell.num_seqs, lab.dtype))
    return {"rotate_and_write": Work(call, rotate_and_write_cost(lab.heads, cell.num_seqs))}


def check_silu_and_multiply(lab: Lab) -> Iterator[Comparison]:
    for dtype in DTYPES:
        shape = lab.sizes.checked_rows, 2 * lab.sizes.model.intermediate_size
        gate_up = 3 * lab.normal(*shape, dtype=dtype)
        expected = silu_and_multiply_in_torch(gate_up.double())
        lab.poison(gate_up.nbytes // 2)
        yield Comparison("silu_and_multiply", dtype, "", silu_and_multiply(gate_up), expected)


def silu_and_multiply_works(lab: Lab, cell: Cell) -> Makes:
    inner_size = lab.sizes.model.intermediate_size
    gate_up = lab.normal(cell.num_seqs, 2 * inner_size)
    cost = silu_and_multiply_cost(inner_size, lab.dtype.itemsize, cell.num_seqs)
    return {"silu_and_multiply": Work(partial(silu_and_multiply, gate_up), cost)}


# -- verification


def rejection_inputs(
    lab: Lab, drafts_of_each: Sequence[int], dtype: torch.dtype, is_one_hot: bool = False
) -> list[Any]:
    """Guesses that are right about as often as not: p is q and something else, half and half."""
    vocab_size, num_drafts = lab.sizes.model.vocab_size, sum(drafts_of_each)
    device, num_requests = lab.device.torch_device, len(drafts_of_each)
    cu_num_logits = torch.tensor([0, *(n + 1 for n in drafts_of_each)], device=device).cumsum(0)
    draft_probs = (2 * lab.normal(num_drafts, vocab_size, dtype=dtype)).softmax(-1)
    target_probs = (2 * lab.normal(num_drafts + num_requests, vocab_size, dtype=dtype)).softmax(-1)
    is_bonus = torch.zeros(len(target_probs), dtype=torch.bool, device=device)
    is_bonus[cu_num_logits[1:] - 1] = True
    target_probs[~is_bonus] = (target_probs[~is_bonus] + draft_probs) / 2
    drafts = torch.multinomial(draft_probs, 1, generator=lab.generator)[:, 0]
    numbers = lab.uniform(num_drafts), lab.uniform(len(target_probs))
    probs = None if is_one_hot else draft_probs
    return [target_probs, drafts, probs, cu_num_logits, max(drafts_of_each), *numbers]


def check_rejection(lab: Lab) -> Iterator[Comparison]:
    most = lab.sizes.num_drafts
    each = [i % (most + 1) for i in range(min(lab.sizes.checked_rows, 12))]
    for dtype in (torch.float32, torch.float64):
        for is_one_hot in (False, True):
            arguments = rejection_inputs(lab, each, dtype, is_one_hot)
            found, expected = rejection_sample_triton(*arguments), rejection_sample(*arguments)
            what = "look-ups" if is_one_hot else "drafts of a model"
            yield Comparison("rejection", dtype, what, found.token_ids, expected.token_ids)
            counts = found.num_sampled, expected.num_sampled
            yield Comparison("rejection", dtype, f"{what}, how many", *counts)


def rejection_works(lab: Lab, cell: Cell) -> Makes:
    each = [lab.sizes.num_drafts] * cell.num_seqs
    arguments = rejection_inputs(lab, each, torch.float32)
    num_sampled = rejection_sample_triton(*arguments).num_sampled
    num_rejecting = int((num_sampled <= lab.sizes.num_drafts).sum())
    vocab_size = lab.sizes.model.vocab_size
    cost = rejection_cost(vocab_size, 4, len(each), num_rejecting, sum(each))
    return {"rejection": Work(partial(rejection_sample_triton, *arguments), cost)}


def matching_inputs(lab: Lab, drafts_of_each: Sequence[int]) -> list[Any]:
    """Of three tokens, so that runs of some length are accepted."""
    device, num_requests = lab.device.torch_device, len(drafts_of_each)
    cu_num_logits = torch.tensor([0, *(n + 1 for n in drafts_of_each)], device=device).cumsum(0)
    num_drafts = sum(drafts_of_each)
    sampled = lab.integers(3, num_drafts + num_requests)
    return [sampled, lab.integers(3, num_drafts), cu_num_logits, max(drafts_of_each)]


def check_matching(lab: Lab) -> Iterator[Comparison]:
    each = [i % (lab.sizes.num_drafts + 1) for i in range(lab.sizes.checked_rows)]
    arguments = matching_inputs(lab, each)
    results = rejection_sampling_batched_triton(*arguments), rejection_sampling_batched(*arguments)
    for what, found, expected in zip(("tokens", "how many"), *results, strict=True):
        yield Comparison("matching", torch.int64, what, found, expected)


def matching_works(lab: Lab, cell: Cell) -> Makes:
    arguments = matching_inputs(lab, [lab.sizes.num_drafts] * cell.num_seqs)
    cost = matching_cost(cell.num_seqs, cell.num_seqs * lab.sizes.num_drafts)
    return {"matching": Work(partial(rejection_sampling_batched_triton, *arguments), cost)}


def request_cells(sizes: Sizes) -> list[Cell]:
    return [Cell(n) for n in sizes.num_requests]


def probs_bytes(lab: Lab, cell: Cell) -> int:
    """Of p and q, and of what softmax makes on the way."""
    rows = cell.num_seqs * (2 * lab.sizes.num_drafts + 1)
    return 3 * rows * lab.sizes.model.vocab_size * 4


def split_cells(sizes: Sizes) -> list[Cell]:
    """Where there is something to merge."""
    return [cell for cell in sizes.decode_cells if cell.context > 256]


GROUPS = [
    Group(
        "decode attention",
        check_attention,
        lambda sizes: sizes.decode_cells,
        lambda lab, cell: attention_works(lab, decode_lengths(cell)),
        lambda lab, cell: cache_bytes(lab, decode_lengths(cell)),
    ),
    Group(
        "attention with chunks",
        check_nothing,
        mixed_cells,
        lambda lab, cell: attention_works(lab, mixed_lengths(lab.sizes, cell)),
        lambda lab, cell: cache_bytes(lab, mixed_lengths(lab.sizes, cell)),
        lambda sizes, cell: describe_batch(mixed_lengths(sizes, cell)),
    ),
    Group(
        "merging",
        check_nothing,
        split_cells,
        merge_works,
        lambda lab, cell: cache_bytes(lab, decode_lengths(cell)),
    ),
    Group("write_kv", check_write_kv, row_cells, write_kv_works),
    Group("add_rms_norm", check_add_rms_norm, row_cells, add_rms_norm_works),
    Group("rotate_and_write", check_rotate_and_write, row_cells, rotate_and_write_works),
    Group("silu_and_multiply", check_silu_and_multiply, row_cells, silu_and_multiply_works),
    Group("rejection", check_rejection, request_cells, rejection_works, probs_bytes),
    Group("matching", check_matching, request_cells, matching_works),
]
