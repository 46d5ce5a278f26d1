"""Attention in its three versions, for the GPU report, and the merging of splits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from common.workshop.bench.gpu_arithmetic import attention_cost, merge_cost
from common.workshop.bench.gpu_inputs import (
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
from common.workshop.bench.gpu_work import Comparison, Makes, TimedCall
from mixed_attention_triton import MixedTritonAttentionBackend
from paged_attention_triton import TritonAttentionBackend, TritonPlan
from split_attention_triton import SplitPlan, SplitTritonAttentionBackend

# Version 3 is what the engine uses.
VERSIONS: dict[str, type[TritonAttentionBackend]] = {
    "attention v1": TritonAttentionBackend,
    "attention v2": SplitTritonAttentionBackend,
    "attention v3": MixedTritonAttentionBackend,
}
IN_ENGINE = "attention v3"


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
    plan = plan_of(backend(), inputs)
    return plan.attend(inputs.query, inputs.key_cache, inputs.value_cache, inputs.scale)


def plan_of(backend: TritonAttentionBackend, inputs: PagedInputs) -> TritonPlan:
    return backend.plan(inputs.metadata(), inputs.query.shape[1], inputs.key_cache)


def cache_bytes(lab: Lab, lengths: Sequence[tuple[int, int]]) -> int:
    return num_blocks_of(lengths) * BLOCK_SIZE * lab.heads.kv_bytes


def attention_works(lab: Lab, lengths: Sequence[tuple[int, int]]) -> Makes:
    """The versions on the same inputs. Before they are timed, the first and the last sequence are
    compared with float64: at the far end of a large cache offsets have more than 31 bits."""
    inputs = paged_inputs(lab, lengths, make_caches(lab, num_blocks_of(lengths), lab.dtype))
    cost = attention_cost(lab.heads, lengths, BLOCK_SIZE)
    num_first = lengths[0][0]

    def work(name: str, backend: TritonAttentionBackend) -> TimedCall:
        caches = inputs.key_cache, inputs.value_cache
        call = partial(plan_of(backend, inputs).attend, inputs.query, *caches, inputs.scale)

        def check() -> Iterator[Comparison]:
            found = call()
            yield Comparison(
                name, lab.dtype, "first sequence", found[:num_first], inputs.in_float64(0)
            )
            last = inputs.in_float64(len(lengths) - 1)
            yield Comparison(name, lab.dtype, "last sequence", found[-len(last) :], last)

        return TimedCall(call, cost, check)

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


def merge_works(lab: Lab, cell: Cell) -> Makes:
    """Version 2's second kernel alone, on the partial results of its first."""
    lengths = decode_lengths(cell)
    inputs = paged_inputs(lab, lengths, make_caches(lab, num_blocks_of(lengths), lab.dtype))
    plan, caches = (
        plan_of(SplitTritonAttentionBackend(), inputs),
        (inputs.key_cache, inputs.value_cache),
    )
    output = plan.attend(inputs.query, *caches, inputs.scale)
    assert isinstance(plan, SplitPlan)
    (items,) = plan.items
    num_splits = items.first_item.diff().tolist()
    merging = replace(items, launch=_no_launch)
    arguments = output, inputs.query, *caches, plan.metadata, inputs.scale
    call = partial(merging.attend, *arguments)
    return {"merging of splits": TimedCall(call, merge_cost(lab.heads, num_splits))}


def _no_launch(grid: tuple[int, ...], *arguments: Any) -> None:
    pass


def split_cells(sizes: Sizes) -> list[Cell]:
    """Where there is something to merge."""
    return [cell for cell in sizes.decode_cells if cell.context > 256]
