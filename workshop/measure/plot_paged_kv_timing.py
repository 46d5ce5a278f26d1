"""The times of chapter 2's record. `plot_paged_kv.py --record` runs this module; alone it does
nothing.

Calls that do the same work are made in turn, each round starting with another, on one thread; every
repeat is kept. Times are processor time, which other programs disturb less than wall time. The
chapter shows ratios of medians.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
from torch.nn.functional import scaled_dot_product_attention

from paged_attention import AttentionMetadata, TorchAttentionBackend
from workshop.measure.plot_paged_kv_workloads import BLOCK_SIZE, BLOCK_SIZES

# A decode step of 32 sequences of 256 tokens in layers of Qwen3-0.6B's shape.
NUM_SEQS, SEQ_LEN, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, NUM_LAYERS = 32, 256, 16, 8, 128, 4


def time_in_turn(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Return milliseconds of processor time of each call. Each of the `repeats` rounds starts with
    a different one."""
    names = list(calls)
    times: dict[str, list[float]] = {name: [] for name in names}
    for name in names:
        calls[name]()
    for r in range(repeats):
        for name in names[r % len(names) :] + names[: r % len(names)]:
            start = time.process_time()
            calls[name]()
            times[name].append(round((time.process_time() - start) * 1e3, 4))
    return times


def decode_metadata(block_size: int, seed: int = 0) -> AttentionMetadata:
    """Scatter every sequence's blocks over the memory; no sequence uses block 0."""
    num_blocks = NUM_SEQS * SEQ_LEN // block_size
    ids = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed)) + 1
    tables = ids.view(NUM_SEQS, -1)
    last = tables[:, -1] * block_size + block_size - 1
    starts, lens = torch.arange(NUM_SEQS + 1), torch.full((NUM_SEQS,), SEQ_LEN)
    return AttentionMetadata(starts, lens, tables.int(), last, 1, SEQ_LEN)


def measure_time(repeats: int) -> dict:
    """Time gathering and decode attention, in milliseconds for `NUM_LAYERS` layers."""
    torch.manual_seed(0)
    num_slots = NUM_SEQS * SEQ_LEN + max(BLOCK_SIZES)
    flat = [torch.randn(2, num_slots, NUM_KV_HEADS, HEAD_DIM) for _ in range(NUM_LAYERS)]
    query = torch.randn(NUM_SEQS, NUM_HEADS, HEAD_DIM)
    buffer = torch.empty(NUM_SEQS * SEQ_LEN, NUM_KV_HEADS, HEAD_DIM)
    scale = HEAD_DIM**-0.5

    def as_blocks(tensor: torch.Tensor, block_size: int) -> torch.Tensor:
        return tensor.view(-1, block_size, NUM_KV_HEADS, HEAD_DIM)

    def gather_blocks(block_size: int) -> None:
        ids = decode_metadata(block_size).block_tables.flatten()
        out = as_blocks(buffer, block_size)
        for layer in flat:
            for cache in layer:
                torch.index_select(as_blocks(cache, block_size), 0, ids, out=out)

    def index_anew(block_size: int) -> None:
        ids = decode_metadata(block_size).block_tables.flatten().long()
        for layer in flat:
            for cache in layer:
                as_blocks(cache, block_size)[ids]

    def select_anew(block_size: int) -> None:
        ids = decode_metadata(block_size).block_tables.flatten()
        for layer in flat:
            for cache in layer:
                torch.index_select(as_blocks(cache, block_size), 0, ids)

    def only_fill() -> None:
        for _ in range(2 * NUM_LAYERS):
            torch.empty_like(buffer).fill_(0)

    def attend_paged(block_size: int) -> None:
        layers = [[as_blocks(kv, block_size) for kv in layer] for layer in flat]
        plan = TorchAttentionBackend().plan(decode_metadata(block_size), NUM_HEADS, layers[0][0])
        for keys, values in layers:
            plan.attend(query, keys, values, scale)

    def attend_contiguous() -> None:
        rows = query.view(NUM_SEQS, NUM_KV_HEADS, -1, HEAD_DIM)
        for layer in flat:
            kv = layer[:, : NUM_SEQS * SEQ_LEN]
            key, value = kv.view(2, NUM_SEQS, SEQ_LEN, NUM_KV_HEADS, HEAD_DIM).transpose(2, 3)
            scaled_dot_product_attention(rows, key, value, scale=scale)

    gathers: dict[str, Callable[[], object]] = {
        str(size): partial(gather_blocks, size) for size in BLOCK_SIZES
    }
    for size in (1, BLOCK_SIZE):
        gathers[f"anew {size}"] = partial(index_anew, size)
        gathers[f"select {size}"] = partial(select_anew, size)
    gathers["fill"] = only_fill
    attends: dict[str, Callable[[], object]] = {
        str(size): partial(attend_paged, size) for size in BLOCK_SIZES
    }
    attends["contiguous"] = attend_contiguous
    return {
        "gather_ms": time_in_turn(gathers, repeats),
        "attend_ms": time_in_turn(attends, repeats),
    }
