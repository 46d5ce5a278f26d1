"""Attention to a window against a dense mask in float64. What no query sees is NaN,
and no table names it."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

import paged_attention
import split_attention_triton
from batch_layout import ComposedBatch, Queries, compose_in_order
from block_delta import PagedRunnerState
from compiled_attention import CompiledAttentionBackend
from decode_attention import attend_rows
from paged_attention import AttentionBackend, PagedKVCache, TorchAttentionBackend, write_kv
from paged_attention_triton import TritonAttentionBackend
from split_attention_triton import SplitTritonAttentionBackend
from test_compiled_attention import count_short
from test_paged_attention import TOLERANCE
from test_split_attention_triton import poisoned_scratch, small_tiles
from window_attention import Compose, WindowBackend, compose_windows, window_of_decodes

__all__ = ["poisoned_scratch", "small_tiles"]

CPU = torch.device("cpu")
# (query_len, seq_len): decodes, draft tokens after them, chunks, whole prompts
Lengths = list[tuple[int, int]]
SEQUENCES: Lengths = [(1, 1), (1, 40), (1, 13), (3, 20), (8, 8), (2, 33)]
SEQUENCES += [(25, 25), (19, 41), (30, 33)]


def state_of(sequences: Lengths, block_size: int, windows: list[int | None], seed: int):
    """A state in which every group has its own blocks, and has given up what it may."""
    num_blocks = sum(-(-n // block_size) for _, n in sequences) * len(windows)
    ids = (np.random.default_rng(seed).permutation(num_blocks) + 1).tolist()
    longest = max(-(-n // block_size) for _, n in sequences)
    state = PagedRunnerState(len(sequences), longest, len(windows))
    state.widen(max(n for _, n in sequences))
    for row, (query_len, seq_len) in enumerate(sequences):
        for group, window in zip(state.groups, windows, strict=True):
            table = [ids.pop() for _ in range(-(-seq_len // block_size))]
            if window is not None:
                num_gone = max(0, seq_len - query_len - window + 1) // block_size
                table[:num_gone] = [0] * num_gone
            group.admit(row, table)
    return state, num_blocks + 1


def dense_attention(query, keys, values, scale, window) -> torch.Tensor:
    """Attend the last queries `[query_len, num_heads, head_dim]` of a sequence to its keys
    `[seq_len, num_kv_heads, head_dim]` in float64."""
    shared = query.shape[1] // keys.shape[1]
    keys, values = (x.double().repeat_interleave(shared, 1) for x in (keys, values))
    position = torch.arange(len(keys), device=keys.device)
    rows = position[-len(query) :, None]
    hidden = (position > rows) | (position <= rows - (window or len(keys)))
    scores = torch.einsum("qhd,khd->hqk", query.double(), keys) * scale
    weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values)


def queries_of(sequences: Lengths) -> Queries:
    query_lens, seq_lens = np.array(sequences).T
    rows = np.arange(len(sequences))
    return Queries(rows, seq_lens - query_lens, query_lens, np.ones_like(rows))


@pytest.mark.parametrize(
    ("window", "block_size", "dtype", "kind"),
    [
        *itertools.product([1, 2, 5, 16, 64], [1, 3, 16], [torch.float64], ["torch", "compiled"]),
        *itertools.product([5], [4], [torch.float32, torch.bfloat16], ["torch", "compiled", "own"]),
    ],
)
def test_a_query_sees_its_window(window, block_size, dtype, kind, monkeypatch):
    monkeypatch.setattr(paged_attention, "QUERY_TILE", 7)
    like = PagedKVCache(1, 1, block_size, 2, 8, dtype).key_cache[0]
    num_rows = []

    def attend(query, key_cache, value_cache, rows, *rest):
        num_rows.append(len(rows.tokens))
        attend_rows(query, key_cache, value_cache, rows, *rest)

    backend = {
        "torch": TorchAttentionBackend(),
        "compiled": CompiledAttentionBackend(attend, 4, like),
        "own": WindowBackend(KnowsNoWindow()),
    }[kind]
    batch = check_backend(backend, compose_in_order, window, block_size, dtype)
    assert [plan.window for plan in batch.plans] == [None, window]
    assert num_rows == [count_short(SEQUENCES)] * 2 * (kind == "compiled")


class KnowsNoWindow(TorchAttentionBackend):
    def plan(self, metadata, num_heads, key_cache):
        assert metadata.window is None
        return super().plan(metadata, num_heads, key_cache)


@pytest.mark.sample(every=10, first=3)
@pytest.mark.parametrize(
    ("window", "block_size", "backend"),
    [
        *itertools.product([1, 2, 5, 15, 16, 17, 64], [1, 3, 16], [SplitTritonAttentionBackend]),
        *itertools.product([1, 5, 16, 17], [3], [TritonAttentionBackend]),
    ],
)
@pytest.mark.usefixtures("small_tiles", "poisoned_scratch")
def test_the_kernels_see_it_too(window, block_size, backend, device):
    """Windows around a tile of keys."""
    check_backend(backend(), compose_in_order, window, block_size, torch.float32, device)


@pytest.mark.usefixtures("small_tiles", "poisoned_scratch")
def test_a_row_may_see_nothing_of_the_splits_that_are_merged_first(device, monkeypatch):
    monkeypatch.setattr(split_attention_triton, "SPLITS_AT_ONCE", 1)
    shape = 5, 4, torch.float32, device, [(44, 49)]
    check_backend(SplitTritonAttentionBackend(), compose_in_order, *shape)


@pytest.mark.parametrize("window", [1, 6, 40])
def test_decodes_are_laid_out_by_tensors_as_by_the_host(window):
    """In a graph, which has full-size tables and lengths, and unused rows."""
    decodes, block_size = [(1, 1), (1, 40), (1, 13), (1, 8)], 4
    state, _ = state_of(decodes, block_size, [window], seed=0)
    queries = queries_of(decodes)
    whole = compose_in_order(state, queries, block_size).on(CPU).attention[0]
    layout = compose_windows(compose_in_order, [window], state, queries, block_size)
    (host,) = layout.on(CPU).attention
    shifted = window_of_decodes(whole, window, block_size)
    for found, expected in zip(shifted.seq_lens.tolist(), host.seq_lens.tolist(), strict=True):
        assert found == expected <= shifted.max_seq_len
    for row, n in enumerate(shifted.seq_lens.tolist()):
        used = -(-n // block_size)
        assert shifted.block_tables[row, :used].tolist() == host.block_tables[row, :used].tolist()
    with pytest.raises(ValueError, match=r"seq_lens \(4 .*query_starts \(0 .*contradict"):
        TorchAttentionBackend().plan(shifted, 4, PagedKVCache(1, 1, block_size, 2, 8).key_cache[0])
    idle = replace(whole, seq_lens=torch.zeros_like(whole.seq_lens))
    assert not window_of_decodes(idle, window, block_size).seq_lens.any()


def check_backend(
    backend: AttentionBackend,
    compose: Compose,
    window: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device = CPU,
    lengths: Lengths = SEQUENCES,
) -> ComposedBatch:
    """A group that sees everything and one with a window."""
    windows, queries = [None, window], queries_of(lengths)
    state, num_blocks = state_of(lengths, block_size, windows, seed=window)
    layout = compose_windows(compose, windows, state, queries, block_size)
    cache = PagedKVCache(2, num_blocks, block_size, 2, 8, dtype, device)
    for tensor in (*cache.key_cache, *cache.value_cache):
        tensor.fill_(math.nan)
    batch = layout.on(device)
    batch.plan_attention(backend, 4, cache)
    generator = torch.Generator().manual_seed(block_size)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype)

    sequences = [lengths[row] for row in layout.order]
    starts = [seq_len - query_len for query_len, seq_len in sequences]
    for group, plan in enumerate(batch.plans):
        caches = cache.key_cache[group], cache.value_cache[group]
        first_seen = [0 if group == 0 else max(0, start - window + 1) for start in starts]
        keys, values = [], []
        for row, (_, seq_len) in enumerate(sequences):
            whole = draw(2, seq_len, 2, 8)
            seen = torch.arange(first_seen[row] // block_size * block_size, seq_len)
            table = state.groups[group].block_tables[layout.order[row]]
            table = torch.from_numpy(table).long()
            slots = (table[seen // block_size] * block_size + seen % block_size).to(device)
            write_kv(whole[0][seen], whole[1][seen], *caches, slots)
            keys.append(whole[0])
            values.append(whole[1])
        query = draw(len(batch.input_ids), 4, 8)
        output = plan.attend(query, *caches, 0.3)
        parts = query.split([n for n, _ in sequences]), keys, values
        expected = [
            dense_attention(*tensors, 0.3, windows[group]) for tensors in zip(*parts, strict=True)
        ]
        atol = TOLERANCE[dtype]
        torch.testing.assert_close(output.double(), torch.cat(expected), atol=atol, rtol=0)
    return batch


def test_the_bytes_read_depend_on_the_window_and_not_on_the_length():
    window, sequences = 6, [(1, 400), (2, 9), (1, 3)]
    state, num_blocks = state_of(sequences, 4, [window], seed=0)
    queries = queries_of(sequences)
    cache = PagedKVCache(1, num_blocks, 4, 1, 2, torch.float64)
    batch = compose_windows(compose_in_order, [window], state, queries, 4).on(CPU)
    batch.plan_attention(TorchAttentionBackend(), 1, cache)
    (plan,) = batch.plans
    # 399 sees from 394 on, in a block that begins at 392: two blocks. 7 sees 2 to 7: three.
    assert sorted(len(group.block_ids) for group in plan.groups) == [1, 2, 3]
    assert batch.attention[0].seq_lens.tolist() == [8, 9, 3]


def test_a_batch_may_be_reordered():
    """Rows of the metadata are in the order of the batch."""
    sequences = [(5, 30), (1, 30), (4, 20)]
    state, _ = state_of(sequences, 2, [3], seed=1)

    def backwards(state, queries, block_size):
        turned = Queries(*(column[::-1] for column in queries))
        return compose_in_order(state, turned, block_size)._replace(order=np.arange(3)[::-1])

    queries = queries_of(sequences)
    batch = partial(compose_windows, backwards, [3])(state, queries, 2).on(CPU)
    (found,) = batch.attention
    # First tokens at 16, 29 and 25 see from 14, 27 and 23 on: blocks that begin at 14, 26, 22.
    assert found.seq_lens.tolist() == [6, 4, 8]
    tables = [
        state.groups[0].block_tables[row, [a, a + 1]].tolist() for row, a in ((2, 7), (1, 13))
    ]
    assert [row[:2].tolist() for row in found.block_tables[:2]] == tables


def test_a_tile_reads_only_the_keys_it_sees_and_repeats_are_equal(monkeypatch):
    monkeypatch.setattr(paged_attention, "QUERY_TILE", 4)
    window, sequences = 4, [(40, 40), (2, 30), (4, 30)]
    state, num_blocks = state_of(sequences, 2, [window], seed=2)
    cache = PagedKVCache(1, num_blocks, 2, 1, 4, torch.float64)
    batch = compose_windows(compose_in_order, [window], state, queries_of(sequences), 2).on(CPU)
    batch.plan_attention(TorchAttentionBackend(), 1, cache)
    (plan,) = batch.plans
    (group,) = plan.groups
    assert group.mask is not None
    rows = dict(zip(group.tokens.tolist(), group.mask.flatten(0, 2), strict=True))
    for token, row in zip(group.tokens.tolist(), group.mask.flatten(0, 2), strict=True):
        assert torch.equal(row, rows[token]) and int((row == 0).sum()) == window
    sizes = [len(tile.block_ids) for tile in plan.long_queries]
    assert len(sizes) == 10 and max(sizes) == 4, "4 queries, and 3 tokens before the first"
