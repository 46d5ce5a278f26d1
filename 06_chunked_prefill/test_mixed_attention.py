"""Mixed attention against a dense causal softmax in float64 that has no blocks, and against chapter
2's. Every slot that no test sequence owns is NaN, the null block and the tables' spare entries too.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import takewhile

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import attention_plan
import mixed_attention as module
from batch_layout import Queries
from block_delta import PagedRunnerState
from mixed_attention import MixedAttentionBackend, Partial, mixed_attention
from mixed_batch import MixedMetadata, compose, short_first
from request import SamplingParams
from scheduler_interface import NewRequestData
from test_paged_attention import (  # noqa: F401  the cases of chapter 2, with `backend_of`
    TOLERANCE,
    BackendOf,
    Case,
    make_case,
    test_a_query_sees_its_window,
    test_any_mix_of_query_lengths_through_shuffled_tables,
    test_batches_without_tokens_and_sequences_without_tokens,
    test_metadata_that_contradicts_itself_is_an_error,
    test_models_with_other_numbers_of_query_heads_share_metadata,
)

TILE = 4


def dense_attention(query, keys, values, scale):
    """query `[query_len, num_heads, head_dim]`, keys and values `[seq_len, num_kv_heads, head_dim]`
    of one sequence, all float64."""
    num_shared = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(num_shared, 1), values.repeat_interleave(num_shared, 1)
    scores = torch.einsum("qhd,khd->hqk", query, keys) * scale
    position = torch.arange(len(keys) - len(query), len(keys))
    hidden = torch.arange(len(keys)) > position[:, None]
    weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values)


def expected(case: Case) -> torch.Tensor:
    """Padding rows included."""
    output = torch.zeros_like(case.query, dtype=torch.float64, device="cpu")
    start = 0
    for query_len, keys, values in zip(case.query_lens, case.keys, case.values, strict=True):
        rows = slice(start, start + query_len)
        sequence = (case.query[rows], keys, values)
        output[rows] = dense_attention(*(t.double().cpu() for t in sequence), case.scale)
        start += query_len
    return output


def attend(case: Case, metadata=None) -> torch.Tensor:
    metadata = metadata or case.metadata
    return mixed_attention(case.query, case.key_cache, case.value_cache, metadata, case.scale)


def check(case: Case, output: torch.Tensor) -> None:
    assert output.dtype == case.query.dtype and output.shape == case.query.shape
    tolerance = TOLERANCE[output.dtype]
    torch.testing.assert_close(output.double(), expected(case), atol=tolerance, rtol=0)
    assert not output[sum(case.query_lens) :].any(), "rows of padding tokens are zero"
    torch.testing.assert_close(output, case.attend(), atol=tolerance, rtol=0)


def mixed_metadata(
    case: Case, decode_threshold: int = 1, *, is_readable: bool = False
) -> MixedMetadata:
    """The border follows the short queries in front, in any case a matter of speed only. The
    tensors on the device are nonsense, unless they have to be readable."""
    given = case.metadata
    is_short = list(takewhile(lambda query_len: query_len <= decode_threshold, case.query_lens))
    on_device = [given.query_start_loc, given.seq_lens]
    if not is_readable:
        on_device = [x.clone().fill_(10**6) for x in on_device]
    return MixedMetadata(
        *on_device,
        block_tables=given.block_tables,
        slot_mapping=given.slot_mapping,
        max_query_len=given.max_query_len,
        max_seq_len=given.max_seq_len,
        window=given.window,
        num_short=len(is_short),
        query_starts=given.query_start_loc.tolist(),
        host_seq_lens=given.seq_lens.tolist(),
    )


def every_length(tile: int, block_size: int) -> list[tuple[int, int]]:
    """(query_len, seq_len) around the borders of tiles and blocks, in a random order."""
    query_lens = {0, 1, 2, 3, tile - 1, tile, tile + 1}
    borders = (0, block_size, tile, 2 * tile)
    histories = {max(b + d, 0) for b in borders for d in (-1, 0, 1)}
    ends = [(q, q + h) for q in query_lens for h in histories]
    ends += [(q, 2 * block_size) for q in query_lens if 0 < q <= 2 * block_size]  # Trap 30
    return random.Random(block_size).sample(ends, len(ends))


@pytest.fixture
def small_tiles(monkeypatch):
    monkeypatch.setattr(module, "KEY_TILE", TILE)
    monkeypatch.setattr(module, "QUERY_TILE", TILE)


@pytest.fixture
def short_query() -> None:
    """Which queries are short is chapter 2's matter."""


@pytest.fixture(params=["plain metadata", "mixed metadata", "no private operator"])
def backend_of(request, small_tiles, monkeypatch) -> BackendOf:
    """The backend for chapter 2's tests."""
    if request.param == "no private operator":
        monkeypatch.setattr(module, "FUSED_ATTENTION", None)

    def make(case: Case) -> MixedAttentionBackend:
        if request.param == "mixed metadata":
            case.metadata = mixed_metadata(case, 3)
        return MixedAttentionBackend()

    return make


@pytest.fixture(params=["fused", "plain"])
def tile_attention(request, monkeypatch):
    """The two ways of attending to a tile: neither may be seen in the output."""
    if request.param == "plain":
        monkeypatch.setattr(module, "FUSED_ATTENTION", None)
    elif module.FUSED_ATTENTION is None:
        pytest.skip("this PyTorch has no fused attention that tells the log-sum-exp")


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.usefixtures("small_tiles", "tile_attention")
def test_every_query_length_and_history_around_tile_and_block_borders(block_size):
    """Trap 35: NaN in every unused slot reaches no output. Trap 28: a chunk sees its own end and
    nothing after it. Trap 30: chunks that end where a block ends. In any order."""
    lengths = every_length(TILE, block_size)
    case = make_case(lengths, block_size, num_padding_tokens=3, seed=block_size)
    check(case, attend(case))


@pytest.mark.parametrize("decode_threshold", [0, 1, 3, 20])
@pytest.mark.usefixtures("small_tiles", "tile_attention")
def test_mixed_metadata_is_attended_without_asking_the_device(decode_threshold, monkeypatch):
    """The lengths on the device are nonsense here, and reading a tensor's values is an error."""
    lengths = every_length(TILE, 3)
    order, _ = short_first([query_len for query_len, _ in lengths], decode_threshold)
    case = make_case([lengths[i] for i in order], 3, num_padding_tokens=2)
    metadata = mixed_metadata(case, decode_threshold)

    def forbidden(tensor, *_):
        raise AssertionError("a tensor was read on the host")

    with monkeypatch.context() as patch:
        for name in ("tolist", "item", "numpy", "cpu", "__int__", "__index__", "__float__"):
            patch.setattr(torch.Tensor, name, forbidden)
        output = attend(case, metadata)
    check(case, output)


def test_many_short_queries_are_attended_together(monkeypatch):
    """Up to the threshold in groups, whatever comes after it alone."""
    groups = []
    real = attention_plan.DecodeGroup.attend

    def spy(group, *rest):
        groups.append(group.num_seqs)
        return real(group, *rest)

    monkeypatch.setattr(attention_plan.DecodeGroup, "attend", spy)
    case = make_case([(1, 40), (3, 41), (1, 42), (2, 43), (5, 44), (1, 45)], 16)
    output = attend(case)
    assert groups == [3], "plain metadata: decodes are those of one token, wherever they stand"
    check(case, output)
    groups.clear()
    case = make_case([(1, 40), (3, 41), (1, 42), (2, 43), (1, 45), (5, 44)], 16)
    output = attend(case, mixed_metadata(case, 3))
    assert sorted(groups) == [2, 3], "one token and up to eight are two groups"
    check(case, output)
    tables, keys = torch.tensor([[1, 2], [3, 0]]), torch.zeros(4, 4, 1, 2)
    rows, starts, seq_lens = map(np.array, ([0, 1], [0, 3, 4], [6, 4]))
    group = attention_plan.DecodeGroup(rows, starts, seq_lens, tables, 1, keys)
    assert group.tokens.tolist() == [0, 1, 2, 3, 3, 3], "the one token of the second is repeated"
    assert group.mask is not None
    num_seen = (group.mask[:, 0] == 0).sum(dim=-1)
    assert num_seen.tolist() == [[4, 5, 6], [4, 4, 4]]


@pytest.mark.parametrize("head_dim", [8, 16, 80])
@pytest.mark.parametrize("num_kv_heads, num_shared", [(2, 1), (1, 2), (2, 4), (3, 2)])
@pytest.mark.usefixtures("small_tiles", "tile_attention")
def test_grouped_query_heads(num_kv_heads, num_shared, head_dim):
    lengths = [(1, 1), (5, 5), (1, 9), (7, 20), (2, 12)]
    shape = {"num_kv_heads": num_kv_heads, "num_shared": num_shared, "head_dim": head_dim}
    case = make_case(lengths, 4, **shape)
    check(case, attend(case))


@pytest.mark.usefixtures("small_tiles", "tile_attention")
def test_partial_results_are_merged_in_float32():
    """Fifty parts, each rounded to bfloat16, would be off by more than one rounding."""
    case = make_case([(3, 200)], 4, torch.bfloat16, head_dim=16)
    output = attend(case)
    rounded = expected(case).to(torch.bfloat16)
    torch.testing.assert_close(output, rounded, atol=1e-6, rtol=2**-7)
    one, other = (Partial(torch.full((2, 4), x), torch.full((2, 1), x)) for x in (1.0, 3.0))
    merged = one.output
    one.merge(other)
    assert one.output is merged and 1 < merged[0, 0] < 3, "in place"
    assert (other.output == 3).all() and (other.lse == 3).all()


@pytest.mark.usefixtures("small_tiles", "tile_attention")
def test_scores_of_any_size_neither_overflow_nor_vanish():
    """exp(1000) is not a number that float64 has: only differences of scores are exponentiated."""
    for factor in (1e-3, 300.0):
        case = make_case([(9, 30), (1, 25), (6, 6)], 4)
        case.scale *= factor
        output = attend(case)
        torch.testing.assert_close(output, expected(case), atol=1e-10, rtol=0)


@pytest.mark.parametrize("budget", [1, 2**10, 2**12, 2**30])
@pytest.mark.usefixtures("small_tiles", "tile_attention")
def test_decodes_longer_than_a_group_may_be_are_split_over_their_keys(budget, monkeypatch):
    monkeypatch.setitem(attention_plan.GROUP_KEY_BYTES, "cpu", budget)
    lengths = [(1, n) for n in (3, 100, 8, 60, 5, 1, 49, 32, 50, 100)]
    case = make_case([*lengths, (2, 60), (3, 3)], 4)
    check(case, attend(case))
    plan = replace(case, metadata=mixed_metadata(case, 3)).plan(MixedAttentionBackend())
    check(case, case.attend(plan))
    slot_bytes = case.key_cache[0, 0].nbytes
    for group in plan.groups:
        assert group.num_seqs * group.num_keys * slot_bytes <= budget, "a group keeps its budget"
    assert len(plan.long_queries) == sum(n * slot_bytes > budget for n in map(len, case.keys))


def test_each_key_is_gathered_once_in_tiles_and_only_for_queries_that_see_it(monkeypatch):
    """The memory of a chunk depends on the tiles alone, its work on what is seen."""
    attended, gathered = [], []
    case = make_case([(40, 120)], 16)
    plan = case.plan(MixedAttentionBackend())
    real_tile, real_gather = module._attend_tile, plan.gather

    def tile_spy(query, keys, values, scale, is_causal):
        attended.append((query.shape[2], keys.shape[2], is_causal))
        return real_tile(query, keys, values, scale, is_causal)

    def gather_spy(key_cache, value_cache, block_ids):
        gathered.append(len(block_ids))
        return real_gather(key_cache, value_cache, block_ids)

    monkeypatch.setattr(module, "_attend_tile", tile_spy)
    monkeypatch.setattr(plan, "gather", gather_spy)
    monkeypatch.setattr(module, "KEY_TILE", 32)
    monkeypatch.setattr(module, "QUERY_TILE", 16)
    check(case, case.attend(plan))
    history = [(n, keys, False) for keys in (32, 32, 16) for n in (16, 16, 8)]
    assert attended == [
        *history,
        (16, 16, True),
        (16, 16, False),
        (8, 16, False),
        (16, 16, True),
        (8, 16, False),
        (8, 8, True),
    ]
    assert gathered == [2, 2, 1, 1, 1, 1]
    assert len(plan.key_buffer) == 2
    attended.clear()
    case = make_case([(16, 16)], 16)
    check(case, attend(case))
    assert attended == [(16, 16, True)], "a chunk without history is one causal tile"


def test_the_backend_takes_a_composed_batch():
    """Rows of block tables, a step of two decodes and a chunk: written and attended."""
    torch.manual_seed(0)
    state = PagedRunnerState(3, 4)
    for row, block_ids in enumerate(([5, 1], [2, 6, 3], [4, 7])):
        params, prompt = SamplingParams(), [1] * 12
        state.admit(NewRequestData(str(row), prompt, params, 0, (block_ids,)))
    starts, lens = np.array([2, 9, 5]), np.array([4, 1, 1])
    queries = Queries(np.arange(3), starts, lens, np.array([0, 1, 1]))
    layout = compose(state, queries, 4)
    batch = layout.on(torch.device("cpu"))
    assert layout.order.tolist() == [1, 2, 0]
    key_cache, value_cache = torch.full((2, 8, 4, 2, 8), math.nan).double()
    past = [torch.randn(2, stop, 2, 8).double() for stop in starts + lens]
    for row, start in enumerate(starts):
        for position in range(start):
            slot = state.groups[0].block_tables[row, position // 4], position % 4
            key_cache[slot], value_cache[slot] = past[row][:, position]
    new = torch.cat([past[row][:, starts[row] :] for row in layout.order], dim=1)
    plan = MixedAttentionBackend().plan(batch.attention[0], 4, key_cache)
    plan.write_kv(*new, key_cache, value_cache)
    query = torch.randn(6, 4, 8).double()
    output = plan.attend(query, key_cache, value_cache, 0.3)
    parts = zip(query.split(lens[layout.order].tolist()), layout.order, strict=True)
    dense = torch.cat([dense_attention(rows, *past[row], 0.3) for rows, row in parts])
    torch.testing.assert_close(output, dense, atol=1e-12, rtol=0)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 40)), min_size=1, max_size=7),
    block_size=st.integers(1, 9),
    key_tile=st.integers(1, 17),
    query_tile=st.integers(1, 9),
    budget=st.sampled_from([1, 2**11, 2**20]),
    decode_threshold=st.integers(0, 12),
    is_fused=st.booleans(),
)
def test_any_batch_in_any_tiles(
    lengths, block_size, key_tile, query_tile, budget, decode_threshold, is_fused
):
    order, _ = short_first([query_len for query_len, _ in lengths], decode_threshold)
    lengths = [(q, q + history) for q, history in (lengths[i] for i in order)]
    case = make_case(lengths, block_size, num_padding_tokens=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "KEY_TILE", key_tile)
        patch.setattr(module, "QUERY_TILE", query_tile)
        patch.setitem(attention_plan.GROUP_KEY_BYTES, "cpu", budget)
        if not is_fused:
            patch.setattr(module, "FUSED_ATTENTION", None)
        check(case, attend(case))
        check(case, attend(case, mixed_metadata(case, decode_threshold)))
