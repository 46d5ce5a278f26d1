"""Mixed attention by chapter 2's contract, and a composed batch against the plainest way to say it:
one token after the other."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import attention_plan
import mixed_attention as module
from mixed_attention import MixedAttentionBackend
from mixed_batch import compose, short_first
from paged_attention import AttentionMetadata
from test_batch_layout import check_layout, in_columns, make_state, steps
from test_paged_attention import (  # noqa: F401  the contract, with `attention`
    Attention,
    Case,
    make_case,
    test_each_query_attends_to_what_it_sees,
    test_models_with_other_numbers_of_query_heads_share_metadata,
)

TILE = 4


def mixed_metadata(case: Case) -> AttentionMetadata:
    """With the lengths on the host. Those on the device are nonsense."""
    given = case.metadata
    on_device = [x.clone().fill_(10**6) for x in (given.query_start_loc, given.seq_lens)]
    return AttentionMetadata(
        *on_device,
        block_tables=given.block_tables,
        slot_mapping=given.slot_mapping,
        max_query_len=given.max_query_len,
        max_seq_len=given.max_seq_len,
        window=given.window,
        query_starts=given.query_start_loc.tolist(),
        host_seq_lens=given.seq_lens.tolist(),
    )


class Mixed(Attention):
    """With the lengths on the host, or on the device only."""

    def __init__(self, is_on_host: bool = True) -> None:
        self.is_on_host = is_on_host

    def make_backend(self, case: Case) -> MixedAttentionBackend:
        if self.is_on_host and not case.metadata.query_starts:
            case.metadata = mixed_metadata(case)
        return MixedAttentionBackend()


@pytest.fixture
def small_tiles(monkeypatch):
    monkeypatch.setattr(attention_plan, "SHORT_QUERIES", (1,))
    monkeypatch.setattr(module, "KEY_TILE", TILE)
    monkeypatch.setattr(module, "QUERY_TILE", TILE)


@pytest.fixture(params=[False, True], ids=["plain metadata", "mixed metadata"])
def attention(request, small_tiles) -> Mixed:
    return Mixed(request.param)


@pytest.fixture(params=["fused", "plain"])
def tile_attention(request, monkeypatch):
    """The two ways of attending to a tile: neither may be seen in the output."""
    if request.param == "plain":
        monkeypatch.setattr(module, "FUSED_ATTENTION", None)
    elif module.FUSED_ATTENTION is None:
        pytest.skip("this PyTorch has no fused attention that tells the log-sum-exp")


@pytest.mark.net
@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 40)), min_size=1, max_size=7),
    block_size=st.integers(1, 9),
    key_tile=st.integers(1, 17),
    query_tile=st.integers(1, 9),
    budget=st.sampled_from([1, 2**11, 2**20]),
    longest_short=st.integers(0, 12),
    is_fused=st.booleans(),
)
def test_any_batch_in_any_tiles(
    lengths, block_size, key_tile, query_tile, budget, longest_short, is_fused
):
    """Traps 28, 30 and 35: chunks that end where a block or a tile ends see their own end, nothing
    after it, and no unused slot. Without asking the device: its lengths are nonsense here."""
    lengths = [(q, q + history) for q, history in lengths]
    case = make_case(lengths, block_size, num_padding_tokens=1, num_kv_heads=1)

    def forbidden(tensor, *_):
        raise AssertionError("a tensor was read on the host")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_plan, "SHORT_QUERIES", (longest_short,))
        patch.setattr(module, "KEY_TILE", key_tile)
        patch.setattr(module, "QUERY_TILE", query_tile)
        patch.setitem(attention_plan.GROUP_KEY_BYTES, "cpu", budget)
        if not is_fused:
            patch.setattr(module, "FUSED_ATTENTION", None)
        case.check(case.attend(case.plan(MixedAttentionBackend())))
        case.metadata = mixed_metadata(case)
        for name in ("tolist", "item", "numpy", "cpu", "__int__", "__index__", "__float__"):
            patch.setattr(torch.Tensor, name, forbidden)
        output = case.attend(case.plan(MixedAttentionBackend()))
    case.check(output)


def test_many_short_queries_are_attended_together():
    """Those of one token, and those of up to eight. Longer ones are attended alone."""
    plan = Mixed().check([(1, 40), (3, 41), (1, 42), (2, 43), (17, 44), (1, 45)], 16)
    assert sorted(group.num_seqs for group in plan.groups) == [2, 3]
    assert [long.query_len for long in plan.long_queries] == [17]
    tables = torch.tensor([[1, 2], [3, 0]])
    keys = torch.zeros(4, 4, 1, 2)
    rows, starts, seq_lens = map(np.array, ([0, 1], [0, 3, 4], [6, 4]))
    group = attention_plan.DecodeGroup(rows, starts, seq_lens, tables, 1, keys)
    assert group.tokens.tolist() == [0, 1, 2, 3, 3, 3], "the one token of the second is repeated"
    num_seen = (group.mask[:, 0] == 0).sum(dim=-1)
    assert num_seen.tolist() == [[4, 5, 6], [4, 4, 4]]


@pytest.mark.usefixtures("small_tiles", "tile_attention")
def test_partial_results_are_merged_in_float32():
    """Fifty parts, each rounded to bfloat16, would be off by more than one rounding."""
    case = make_case([(3, 200)], 4, torch.bfloat16, head_dim=16)
    output = case.attend(case.plan(MixedAttentionBackend()))
    rounded = case.expected().to(torch.bfloat16)
    torch.testing.assert_close(output, rounded, atol=1e-6, rtol=2**-7)


@pytest.mark.parametrize("budget", [1, 2**10, 2**12])
@pytest.mark.usefixtures("small_tiles", "tile_attention")
def test_decodes_longer_than_a_group_may_be_are_split_over_their_keys(budget, monkeypatch):
    monkeypatch.setattr(attention_plan, "SHORT_QUERIES", (3,))
    monkeypatch.setitem(attention_plan.GROUP_KEY_BYTES, "cpu", budget)
    lengths = [(1, n) for n in (3, 100, 8, 60, 5, 1, 49, 32, 50, 100)]
    case = make_case([*lengths, (2, 60), (3, 3)], 4)
    case.metadata = mixed_metadata(case)
    plan = case.plan(MixedAttentionBackend())
    case.check(case.attend(plan))
    slot_bytes = case.key_cache[0, 0].nbytes
    for group in plan.groups:
        assert group.num_seqs * group.num_keys * slot_bytes <= budget, "a group keeps its budget"
    assert len(plan.long_queries) == sum(n * slot_bytes > budget for n in map(len, case.keys))


def test_each_key_is_gathered_once_in_tiles_and_only_for_queries_that_see_it(monkeypatch):
    """The memory of a chunk depends on the tiles alone."""
    gathered = []
    case = make_case([(40, 120)], 16)
    plan = case.plan(MixedAttentionBackend())
    real = plan.gather

    def gather(key_cache, value_cache, block_ids):
        gathered.append(len(block_ids))
        return real(key_cache, value_cache, block_ids)

    monkeypatch.setattr(plan, "gather", gather)
    monkeypatch.setattr(module, "KEY_TILE", 32)
    monkeypatch.setattr(module, "QUERY_TILE", 16)
    case.check(case.attend(plan))
    assert gathered == [2, 2, 1, 1, 1, 1] and len(plan.key_buffer) == 2


# -- the batch


@pytest.mark.net
@settings(max_examples=60, deadline=None)
@given(steps(), st.integers(1, 4))
def test_every_token_stands_once_at_its_place_and_the_short_ones_in_front(step, threshold):
    """Each request has positions of its own, not one counter for the batch (Trap 32)."""
    block_size, queries = step
    state = make_state(len(queries), block_size)
    layout = compose(state, in_columns(queries), block_size, threshold)
    short = [i for i in range(len(queries)) if queries[i].num_tokens <= threshold]
    long = [i for i in range(len(queries)) if queries[i].num_tokens > threshold]
    assert layout.order.tolist() == short + long  # each side in the order it was given
    (meta,) = check_layout(layout, state, queries, block_size).attention
    assert list(meta.query_starts) == meta.query_start_loc.tolist()
    assert list(meta.host_seq_lens) == meta.seq_lens.tolist()


def test_the_short_ones_in_front_keep_their_order_in_a_large_batch():
    order = short_first([9, 1] * 50)  # a sort that is stable for small batches only
    assert order.tolist() == [*range(1, 100, 2), *range(0, 100, 2)]
