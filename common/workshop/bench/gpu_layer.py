"""The other kernels of a decoder layer, for the GPU report: small, and all bound by memory."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
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
from common.workshop.bench.gpu_arithmetic import (
    add_rms_norm_cost,
    rotate_and_write_cost,
    silu_and_multiply_cost,
    write_kv_cost,
)
from common.workshop.bench.gpu_inputs import BLOCK_SIZE, DTYPES, Cell, Lab, Sizes, make_caches
from common.workshop.bench.gpu_work import Comparison, Makes, TimedCall
from paged_attention_triton import write_kv_triton


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
        write_kv_triton(key, value, key_cache, value_cache, slots)
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
    return {"write_kv": TimedCall(partial(write_kv_triton, *arguments), cost)}


def row_cells(sizes: Sizes) -> list[Cell]:
    return [Cell(n) for n in sizes.rows]


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
    return {"add_rms_norm": TimedCall(call, cost)}


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
        in_float64: list[Any] = [
            x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
            for x in arguments
        ]
        expected = rotate_and_write_in_torch(*in_float64)
        lab.poison(arguments[0].nbytes)
        query = rotate_and_write(*arguments)
        yield Comparison("rotate_and_write", dtype, "queries", query, expected)
        for i, what in ((4, "keys"), (5, "values")):
            yield from compare_caches("rotate_and_write", dtype, what, arguments[i], in_float64[i])


def rotate_and_write_works(lab: Lab, cell: Cell) -> Makes:
    call = partial(rotate_and_write, *rotate_inputs(lab, cell.num_seqs, lab.dtype))
    return {"rotate_and_write": TimedCall(call, rotate_and_write_cost(lab.heads, cell.num_seqs))}


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
    return {"silu_and_multiply": TimedCall(partial(silu_and_multiply, gate_up), cost)}
