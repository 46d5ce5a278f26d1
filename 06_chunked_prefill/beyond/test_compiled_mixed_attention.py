"""Mixed batches with compiled rows against chapter 2's oracle. The function is the plain
`attend_rows`, which needs no compiler."""

from __future__ import annotations

import pytest
import torch

import attention_plan
import mixed_attention
from compiled_mixed_attention import CompiledMixedAttentionBackend
from decode_attention import attend_rows
from mixed_attention import MixedPlan
from test_decode_attention import head_major
from test_mixed_attention import mixed_metadata
from test_paged_attention import TOLERANCE, make_case

LENGTHS = [(1, 1), (1, 40), (1, 100), (2, 35), (3, 3), (7, 20), (40, 120), (33, 33)]


def make_head_major_case(block_size: int, dtype: torch.dtype, decode_threshold: int | None):
    case = make_case(LENGTHS, block_size, dtype, num_padding_tokens=2)
    case.key_cache, case.value_cache = head_major(case.key_cache), head_major(case.value_cache)
    if decode_threshold is not None:
        case.metadata = mixed_metadata(case, decode_threshold)
    return case


@pytest.mark.sample
@pytest.mark.parametrize("decode_threshold", [None, 1, 3])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("block_size", [3, 16])
def test_short_queries_go_to_the_function_and_chunks_stay_with_the_plan(
    block_size, dtype, decode_threshold, monkeypatch
):
    """One decode has more keys than a group may have: it is not attended in spans."""
    monkeypatch.setattr(mixed_attention, "KEY_TILE", 16)
    monkeypatch.setattr(mixed_attention, "QUERY_TILE", 16)
    case = make_head_major_case(block_size, dtype, decode_threshold)
    budget = 50 * case.key_cache[0, 0].nbytes
    monkeypatch.setitem(attention_plan.GROUP_KEY_BYTES, "cpu", budget)
    seen = []

    def attend(query, key_cache, value_cache, rows, *rest):
        seen.append(len(rows.tokens))
        attend_rows(query, key_cache, value_cache, rows, *rest)

    backend = CompiledMixedAttentionBackend(attend, case.query.shape[1], case.key_cache)
    plan = case.plan(backend)
    for _ in range(2):  # layers
        case.check(case.attend(plan))
    short = {None: [1, 1, 1], 1: [1, 1, 1], 3: [1, 1, 1, 2, 3]}[decode_threshold]
    assert seen == [sum(short)] * 2
    assert isinstance(plan, MixedPlan) and not plan.groups
    assert len(plan.long_queries) == len(LENGTHS) - len(short)
