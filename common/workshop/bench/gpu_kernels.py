"""Every Triton kernel of this book, for the GPU report: attention, the layer's, and the registry.

A group is one kernel, or several versions that compute the same on the same inputs:

    make(lab, place, dtype)   of each version a `Call`: its call, its `Cost`, what it should give
    checked                   where and in which dtypes it is compared on its own
    timed                     where it is timed, the most telling first; compared there, too

A new kernel is a line in `GROUPS` and such a function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from common.kernels.layer_kernels import (
    add_rms_norm,
    add_rms_norm_in_torch,
    rotate_and_write,
    rotate_and_write_in_torch,
    silu_and_multiply,
    silu_and_multiply_in_torch,
)
from common.rotary import rotary_table
from common.workshop.bench.gpu_arithmetic import Cost, attention_cost, moved
from common.workshop.bench.gpu_inputs import (
    BLOCK_SIZE,
    DTYPES,
    Batch,
    Call,
    Lab,
    Sizes,
    make_caches,
    num_blocks_of,
    paged_inputs,
    spoil_unused,
)
from common.workshop.bench.gpu_sampling import (
    make_matching,
    make_rejection,
    make_sampling,
)
from mixed_attention_triton import MixedTritonAttentionBackend
from paged_attention_triton import TritonAttentionBackend, write_kv_triton
from split_attention_triton import SplitTritonAttentionBackend

Calls = dict[str, Call]  # by version
# Version 3 is what the engine uses.
VERSIONS: dict[str, type[TritonAttentionBackend]] = {
    "attention v1": TritonAttentionBackend,
    "attention v2": SplitTritonAttentionBackend,
    "attention v3": MixedTritonAttentionBackend,
}
FEW = 16  # sequences: of more, the first and the last are compared


# -- attention


def make_attention(lab: Lab, lengths: Batch, dtype: torch.dtype) -> Calls:
    """The versions. At the far end of a large cache offsets have more than 31 bits. NaN wherever
    no sequence has written."""
    inputs = paged_inputs(lab, lengths, make_caches(lab, num_blocks_of(lengths) + 3, dtype))
    spoil_unused(inputs)
    rows = range(len(lengths)) if len(lengths) <= FEW else (0, len(lengths) - 1)
    starts = [sum(n for n, _ in lengths[:row]) for row in rows]
    compared = [slice(start, start + lengths[row][0]) for row, start in zip(rows, starts)]
    cost = attention_cost(lab.heads, lengths, BLOCK_SIZE)

    def work(backend: TritonAttentionBackend) -> Call:
        plan = backend.plan(inputs.metadata(), inputs.query.shape[1], inputs.key_cache)

        def call() -> list[torch.Tensor]:
            caches = inputs.key_cache, inputs.value_cache
            found = plan.attend(inputs.query, *caches, inputs.scale)
            return [found[tokens] for tokens in compared]

        return Call(call, cost, lambda: {f"sequence {row}": inputs.in_float64(row) for row in rows})

    return {name: work(backend()) for name, backend in VERSIONS.items()}


# -- the other kernels of a decoder layer: small, and all bound by memory


def in_float64(arguments: Sequence[Any]) -> list[Any]:
    """Copies of what is a tensor of numbers."""
    return [
        x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for x in arguments
    ]


def fused_inputs(lab: Lab, num_tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """A fused projection, caches of NaN, and different random slots, of which one is none."""
    heads = lab.heads
    qkv = lab.normal(
        num_tokens, heads.num_heads + 2 * heads.num_kv_heads, heads.head_dim, dtype=dtype
    )
    caches = [cache.fill_(torch.nan) for cache in make_caches(lab, num_tokens, dtype)]
    slots = lab.order(num_tokens * BLOCK_SIZE)[:num_tokens] + BLOCK_SIZE
    slots[num_tokens // 2] = -1
    return qkv, *caches, slots


def make_write_kv(lab: Lab, num_tokens: int, dtype: torch.dtype) -> Calls:
    qkv, *caches, slots = fused_inputs(lab, num_tokens, dtype)
    heads = lab.heads.num_heads, lab.heads.num_kv_heads, lab.heads.num_kv_heads
    _, key, value = qkv.split(heads, dim=1)
    written = slots >= 0

    def expected() -> dict[str, torch.Tensor]:
        found = {}
        for name, new, cache in zip(("keys", "values"), (key, value), caches):
            found[name] = cache.clone()
            found[name].flatten(0, 1)[slots[written]] = new[written]
        return found

    def call() -> list[torch.Tensor]:
        write_kv_triton(key, value, caches[0], caches[1], slots)
        return caches

    cost = Cost(2 * (key.numel() + value.numel()) * key.itemsize + slots.nbytes)
    return {"write_kv": Call(call, cost, expected)}


def make_rotate_and_write(lab: Lab, num_tokens: int, dtype: torch.dtype) -> Calls:
    model, heads = lab.sizes.model, lab.heads
    qkv, *caches, slots = fused_inputs(lab, num_tokens, dtype)
    weight = lab.normal(heads.num_heads + heads.num_kv_heads, heads.head_dim, dtype=dtype)
    table = rotary_table(model.rope, heads.head_dim, lab.sizes.max_model_len, dtype)
    positions = lab.integers(len(table), num_tokens)
    arguments = [qkv, weight, table.to(qkv.device), positions, *caches, slots, model.rms_norm_eps]

    def expected() -> dict[str, torch.Tensor]:
        doubles = in_float64(arguments)
        query = rotate_and_write_in_torch(*doubles)
        return {"queries": query, "keys": doubles[4], "values": doubles[5]}

    # All heads in and out, and of the table a row each.
    cost = moved(qkv, qkv, weight, table[:1].expand(num_tokens, -1), positions, slots)
    return {
        "rotate_and_write": Call(lambda: [rotate_and_write(*arguments), *caches], cost, expected)
    }


def make_add_rms_norm(lab: Lab, num_tokens: int, dtype: torch.dtype) -> Calls:
    hidden, delta, weight = (
        lab.normal(*shape, lab.sizes.model.hidden_size, dtype=dtype)
        for shape in ((num_tokens,), (num_tokens,), ())
    )
    arguments = hidden, delta, weight, lab.sizes.model.rms_norm_eps

    def expected() -> dict[str, torch.Tensor]:
        doubles = in_float64(arguments)
        return {"normed": add_rms_norm_in_torch(*doubles), "sum": doubles[0]}

    cost = moved(hidden, delta, hidden, hidden, weight)  # read; the sum and the normed, written
    return {"add_rms_norm": Call(lambda: [add_rms_norm(*arguments), hidden], cost, expected)}


def make_silu_and_multiply(lab: Lab, num_tokens: int, dtype: torch.dtype) -> Calls:
    gate_up = 3 * lab.normal(num_tokens, 2 * lab.sizes.model.intermediate_size, dtype=dtype)
    cost = moved(gate_up, gate_up[:, ::2])

    def expected() -> dict[str, torch.Tensor]:
        return {"all": silu_and_multiply_in_torch(gate_up.double())}

    return {"silu_and_multiply": Call(lambda: [silu_and_multiply(gate_up)], cost, expected)}


# -- the registry


@dataclass(frozen=True, slots=True)
class KernelGroup:
    name: str
    covers: tuple[str, ...]  # functions of Triton that run in it: none of the book's is forgotten
    make: Callable[[Lab, Any, torch.dtype], Calls]
    checked: Callable[[Sizes], Sequence[Any]]
    timed: Callable[[Sizes], Sequence[Any]]
    dtypes: tuple[torch.dtype, ...] = DTYPES  # where it is checked


def checked_batches(sizes: Sizes) -> Sequence[Batch]:
    """Decodes and chunks, and the decodes alone."""
    return sizes.checked, tuple(length for length in sizes.checked if length[0] == 1)


def batches(sizes: Sizes) -> Sequence[Batch]:
    return (*sizes.decodes, *sizes.mixed)


# Attention; the layer; verification and sampling, whose results have to be equal.
few_rows = attrgetter("checked_rows")
small = partial(KernelGroup, checked=few_rows, timed=attrgetter("rows"))
drawn = partial(
    KernelGroup, checked=few_rows, timed=attrgetter("num_requests"), dtypes=(torch.float32,)
)
OF_PROBABILITIES = (torch.float32, torch.float64)
GROUPS = [
    KernelGroup(
        "attention",
        (
            "_paged_attention_kernel",
            "_plan_items_kernel",
            "_split_attention_kernel",
            "_merge_splits_kernel",
        ),
        make_attention,
        checked_batches,
        batches,
    ),
    small("write_kv", ("_write_kv_kernel",), make_write_kv),
    small("add_rms_norm", ("_add_rms_norm_kernel",), make_add_rms_norm),
    small("rotate_and_write", ("_rotate_and_write_kernel",), make_rotate_and_write),
    small("silu_and_multiply", ("_silu_and_multiply_kernel",), make_silu_and_multiply),
    drawn("rejection", ("_rejection_kernel",), make_rejection, dtypes=OF_PROBABILITIES),
    drawn("matching", ("_matching_kernel",), make_matching),
    drawn(
        "sampling",
        ("_penalties_kernel", "_shape_kernel", "_top_p_kernel", "_draw_kernel"),
        make_sampling,
    ),
]
