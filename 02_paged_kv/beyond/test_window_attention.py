"""Attention to a window, by chapter 2's contract, and the layout of layers that have one. What no
query sees is NaN, and no table names it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import paged_attention
from batch_layout import Queries, compose_in_order
from common.tests.tensor_attention import TensorAttentionBackend
from paged_attention import AttentionMetadata
from test_batch_layout import CPU, Query, in_columns, make_state
from test_compiled_attention import Compiled
from test_paged_attention import (  # noqa: F401
    BATCHES,
    LONG,
    WINDOWS,
    Attention,
    Case,
    Lengths,
    make_case,
    test_written_tokens_stand_in_their_slots_and_nothing_else_changes,
)
from window_attention import compose_windows, window_of_decodes

# -- blocks that no query sees are given up


def skip_blocks(whole: AttentionMetadata, block_size: int) -> AttentionMetadata:
    """The layout of sequences that begin with the first block that a query sees."""
    assert whole.window is not None
    starts = whole.query_start_loc
    tables = torch.zeros_like(whole.block_tables)
    skipped, seq_lens = [], []
    lengths = zip(starts.diff().tolist(), whole.seq_lens.tolist(), strict=True)
    for row, (query_len, seq_len) in enumerate(lengths):
        num_skipped = max(seq_len - query_len - whole.window + 1, 0) // block_size
        table = whole.block_tables[row, num_skipped:]
        tables[row, : len(table)] = table
        skipped.append(num_skipped * block_size)
        seq_lens.append(seq_len - skipped[-1])
    lens = torch.tensor(seq_lens, dtype=torch.int64, device=starts.device)
    return replace(
        whole,
        seq_lens=lens,
        block_tables=tables,
        max_seq_len=max(seq_lens, default=0),
        query_starts=starts.tolist(),
        host_seq_lens=seq_lens,
        skipped=skipped,
    )


def give_up_blocks(case: Case) -> Case:
    """They may hold another request's KV: NaN."""
    if case.metadata.window is not None:
        whole = case.metadata
        block_size = case.key_cache.shape[1]
        case.metadata = skip_blocks(whole, block_size)
        for table, num_skipped in zip(whole.block_tables, case.metadata.skipped, strict=True):
            block_ids = table[: num_skipped // block_size].long()
            case.key_cache[block_ids] = case.value_cache[block_ids] = math.nan
    return case


class Tensors(Attention):
    def make_case(self, lengths: Lengths, block_size: int, **options: Any) -> Case:
        """Decodes; numbers on the host are unusable."""
        decodes = [(min(query_len, 1), seq_len) for query_len, seq_len in lengths]
        case = super().make_case(decodes or [(0, 1)], block_size, **options)
        unknown: Any = {"max_query_len": "unknown", "max_seq_len": "unknown"}
        return replace(case, metadata=replace(case.metadata, **unknown))

    def make_backend(self, case: Case) -> TensorAttentionBackend:
        return TensorAttentionBackend()


KINDS = {"torch": Attention(), "compiled": Compiled(), "tensors": Tensors()}


class GivesUp(Attention):
    def __init__(self, attention: Attention) -> None:
        self.attention = attention
        self.make_backend = attention.make_backend

    def make_case(self, *arguments: Any, **options: Any) -> Case:
        return give_up_blocks(self.attention.make_case(*arguments, **options))


@pytest.mark.net
@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind in KINDS for name in (BATCHES if kind == "tensors" else WINDOWS)],
)
def test_a_query_sees_its_window(name, kind, monkeypatch):
    """Of the blocks before it nothing is read, and no table names them."""
    monkeypatch.setattr(paged_attention, "QUERY_TILE", 7)
    GivesUp(KINDS[kind]).check(**BATCHES[name])


@pytest.fixture
def attention() -> Attention:  # of the contract
    return Tensors()


# -- the layout


def laid_out(lengths: Lengths, block_size: int, num_groups: int):
    """A state in which every group has its own blocks, and a step of these sequences."""
    queries = [Query(row, n - q, q) for row, (q, n) in enumerate(lengths)]
    return make_state(len(lengths), block_size, num_groups), in_columns(queries)


def backwards(state, queries, block_size):
    """A batch may be reordered: rows of the metadata are in its order."""
    layout = compose_in_order(state, Queries(*(c[::-1] for c in queries)), block_size)
    return layout._replace(order=np.arange(len(queries.rows))[::-1])


@pytest.mark.net
@pytest.mark.parametrize("compose", [compose_in_order, backwards])
@pytest.mark.parametrize(("window", "block_size"), [(1, 3), (5, 1), (6, 4), (16, 16), (64, 3)])
def test_layers_with_a_window_are_laid_out_from_their_first_visible_block(
    window, block_size, compose
):
    lengths = [each for each in LONG if each[0]]
    state, queries = laid_out(lengths, block_size, num_groups=2)
    whole = compose(state, queries, block_size).on(CPU)
    layout = compose_windows(compose, [None, window], state, queries, block_size)
    every, found = layout.on(CPU).attention
    assert every.seq_lens.tolist() == whole.attention[0].seq_lens.tolist()
    expected = skip_blocks(replace(whole.attention[1], window=window), block_size)
    for name in ("query_start_loc", "seq_lens", "slot_mapping"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    for name in ("query_starts", "host_seq_lens", "skipped", "max_seq_len", "window"):
        assert getattr(found, name) == getattr(expected, name), name
    for row, seq_len in enumerate(expected.host_seq_lens):
        used = slice(-(-seq_len // block_size))
        assert torch.equal(found.block_tables[row, used], expected.block_tables[row, used])


@pytest.mark.parametrize("window", [1, 6, 40])
def test_decodes_are_laid_out_by_tensors_as_by_the_host(window):
    """In a graph, which has full-size tables and lengths, and unused rows."""
    decodes = [(1, 1), (1, 40), (1, 13), (1, 8)]
    block_size = 4
    state, queries = laid_out(decodes, block_size, num_groups=1)
    whole = compose_in_order(state, queries, block_size).on(CPU).attention[0]
    host = skip_blocks(replace(whole, window=window), block_size)
    shifted = window_of_decodes(whole, window, block_size)
    assert shifted.seq_lens.tolist() == host.seq_lens.tolist()
    assert shifted.max_seq_len >= host.max_seq_len
    for row, n in enumerate(shifted.seq_lens.tolist()):
        used = slice(-(-n // block_size))
        assert torch.equal(shifted.block_tables[row, used], host.block_tables[row, used])
    assert not shifted.query_starts, "in a graph, nothing is read on the host"
    idle = replace(whole, seq_lens=torch.zeros_like(whole.seq_lens))
    assert not window_of_decodes(idle, window, block_size).seq_lens.any()
