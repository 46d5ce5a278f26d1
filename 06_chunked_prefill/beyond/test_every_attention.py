"""Every way to attend to a group, in both groupings, with every window: against chapter 2's oracle,
with NaN in all that no query sees. Rows go to the plain `attend_rows`, which needs no compiler."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch

import attention_plan
import invariant_attention
import mixed_attention
import paged_attention
from batch_layout import compose_in_order
from compiled_attention import CompiledAttentionBackend
from decode_attention import attend_rows
from invariant_attention import InvariantAttentionBackend
from mixed_attention import MixedAttentionBackend
from mixed_batch import compose
from paged_attention import AttentionBackend, PagedKVCache, TorchAttentionBackend
from test_decode_attention import head_major
from test_mixed_attention import mixed_metadata
from test_paged_attention import TOLERANCE, make_case
from test_tiled_attention import LENGTHS as LONG
from test_tiled_attention import tiles
from test_window_attention import SEQUENCES, check_backend

__all__ = ["tiles"]

LENGTHS = [(1, 1), (1, 40), (1, 100), (2, 35), (3, 3), (7, 20), (40, 120), (33, 33)]


class PlainAttention(TorchAttentionBackend):
    """A new backend is one method, or more."""

    @staticmethod
    def attend_group(query, keys, values, attn_mask=None, is_causal=False, scale=None):
        scores = query @ keys.mT * scale
        if is_causal:
            attn_mask = torch.full_like(scores, -torch.inf).triu_(1)
        return (scores if attn_mask is None else scores + attn_mask).softmax(-1) @ values


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(paged_attention, "QUERY_TILE", 7)
    monkeypatch.setattr(mixed_attention, "KEY_TILE", 16)
    monkeypatch.setattr(mixed_attention, "QUERY_TILE", 16)
    monkeypatch.setattr(invariant_attention, "KEY_TILE", 4)
    monkeypatch.setattr(invariant_attention, "CHUNK_ROWS", 8)


def compiled(attend, num_heads: int, key_cache: torch.Tensor) -> CompiledAttentionBackend:
    return CompiledAttentionBackend(attend, num_heads, key_cache, MixedAttentionBackend())


@pytest.mark.parametrize("is_mixed", [False, True])
@pytest.mark.parametrize("kind", ["plain", "mixed", "compiled", "invariant"])
@pytest.mark.parametrize(
    ("window", "block_size", "dtype"),
    [
        *itertools.product([1, 2, 4, 5, 64], [3], [torch.float64]),
        (16, 16, torch.float32),
        (6, 1, torch.bfloat16),
    ],
)
def test_every_query_sees_what_it_should(window, block_size, dtype, kind, is_mixed):
    """In layers that see everything and in those with a window, of one batch. For invariant
    attention: spans in which some rows see nothing, and chunks that begin after the first one."""
    like = PagedKVCache(1, 1, block_size, 2, 8, dtype).key_cache[0]
    num_rows: list[int] = []

    def attend(query, key_cache, value_cache, rows, *rest):
        num_rows.append(len(rows.tokens))
        attend_rows(query, key_cache, value_cache, rows, *rest)

    backends: dict[str, AttentionBackend] = {
        "plain": PlainAttention(),
        "mixed": MixedAttentionBackend(),
        "compiled": compiled(attend, 4, like),
        "invariant": InvariantAttentionBackend(),
    }
    in_order = partial(compose, decode_threshold=3) if is_mixed else compose_in_order
    check_backend(backends[kind], in_order, window, block_size, dtype)
    if kind == "compiled":  # after the border and without one, only decodes; with a window, all
        short = [n for n, _ in SEQUENCES if n <= 8]
        full = [n for n in short if n <= (3 if is_mixed else 1)]
        assert num_rows == [sum(full), sum(short)]


@pytest.mark.sample
@pytest.mark.parametrize("decode_threshold", [None, 1, 3])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("block_size", [3, 16])
def test_short_queries_go_to_the_function_and_chunks_stay_with_the_others(
    block_size, dtype, decode_threshold, monkeypatch
):
    """One decode has more keys than a group may have: it is not attended in spans."""
    case = make_case(LENGTHS, block_size, dtype, num_padding_tokens=2)
    case.key_cache, case.value_cache = head_major(case.key_cache), head_major(case.value_cache)
    if decode_threshold is not None:
        case.metadata = mixed_metadata(case, decode_threshold)
    budget = 50 * case.key_cache[0, 0].nbytes
    monkeypatch.setitem(attention_plan.GROUP_KEY_BYTES, "cpu", budget)
    plan = case.check_backend(compiled(attend_rows, case.query.shape[1], case.key_cache))
    short = {None: [1, 1, 1], 1: [1, 1, 1], 3: [1, 1, 1, 2, 3]}[decode_threshold]
    assert len(plan.rows.tokens) == sum(short) and not plan.groups
    assert len(plan.long_queries) == len(LENGTHS) - len(short)


def test_long_queries_in_bfloat16_are_attended_in_tiles(tiles, monkeypatch):
    monkeypatch.setattr("tiled_attention.DTYPE", torch.float64)
    case = make_case(LONG, 16)
    case.key_cache, case.value_cache = head_major(case.key_cache), head_major(case.value_cache)
    case.check_backend(compiled(attend_rows, case.query.shape[1], case.key_cache))
    assert len(tiles) == 2 * 5
