"""The backend with compiled rows, by chapter 2's contract. The function is the plain `attend_rows`
here, which needs no compiler."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import compiled_attention as module
import tiled_attention
from attention_plan import SHORT_QUERIES
from compiled_attention import CompiledAttentionBackend, HeadMajorKVCache
from decode_attention import attend_rows
from paged_attention import PagedKVCache, TorchAttentionBackend
from test_decode_attention import head_major
from test_paged_attention import (  # noqa: F401  the contract, with `attention`
    MIXED,
    Attention,
    Case,
    Lengths,
    make_case,
    test_each_query_attends_to_what_it_sees,
    test_metadata_that_contradicts_itself_is_an_error,
    test_models_with_other_numbers_of_query_heads_share_metadata,
    test_written_tokens_stand_in_their_slots_and_nothing_else_changes,
)
from tiled_attention import attend_in_tiles, is_for_tiles


def in_head_major(case: Case) -> Case:
    case.key_cache, case.value_cache = head_major(case.key_cache), head_major(case.value_cache)
    return case


class Compiled(Attention):
    """`num_rows`: the rows that came to its function, call by call."""

    def __init__(self) -> None:
        self.num_rows: list[int] = []

    def make_case(self, lengths: Lengths, block_size: int, **options: Any) -> Case:
        return in_head_major(super().make_case(lengths, block_size, **options))

    def make_backend(self, case: Case, others: TorchAttentionBackend | None = None):
        def attend(query, key_cache, value_cache, rows, *rest):
            self.num_rows.append(len(rows.tokens))
            attend_rows(query, key_cache, value_cache, rows, *rest)

        return CompiledAttentionBackend(attend, case.query.shape[1], case.key_cache, others)


@pytest.fixture
def attention() -> Compiled:
    return Compiled()


class Counting(TorchAttentionBackend):
    num_groups = 0

    def attend_group(self, *arguments, **options):
        self.num_groups += 1
        return super().attend_group(*arguments, **options)


@pytest.mark.parametrize(
    "lengths", [[*MIXED, (18, 30), (1, 8), (31, 31)], [(25, 25), (1, 9)], [(27, 27)]], ids=str
)
def test_short_queries_go_to_the_function_and_all_others_the_usual_way(lengths, attention):
    plan = attention.check(lengths, 4)
    is_long = [query_len > max(SHORT_QUERIES) for query_len, _ in lengths]
    num_rows = sum(q for (q, _), long in zip(lengths, is_long, strict=True) if not long)
    assert attention.num_rows == [num_rows] * 2 * (num_rows > 0)
    assert not plan.groups and len(plan.long_queries) == sum(is_long)


OTHERS: list[dict[str, Any]] = [{"num_kv_heads": 1, "num_shared": 4}, {"num_shared": 4}, {}]
OTHERS += [{"head_dim": 6}, {"dtype": torch.float32}, {"block_size": 8}]


@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_another_model_is_attended_to_the_usual_way(other, attention):
    """A draft model shares backend and metadata, and the function is not made for it."""
    others = Counting()
    backend = attention.make_backend(in_head_major(make_case(MIXED, 4)), others)
    for make in (make_case, attention.make_case) if other else (make_case,):
        case = make(MIXED, **{"block_size": 4} | other)
        others.num_groups = 0
        case.check(case.attend(case.plan(backend)))
        assert others.num_groups == len(case.plan(backend).groups) > 0
    assert attention.num_rows == [], "memory of the other order is not for it either"


def test_memory_is_head_major_without_a_visible_difference():
    arguments = 3, 5, 4, 2, 8, torch.float32
    cache, plain = HeadMajorKVCache(*arguments), PagedKVCache(*arguments)
    for name in ("kv_bytes_per_block", "num_blocks", "block_size"):
        assert getattr(cache, name) == getattr(plain, name)
    for tensor in (*cache.key_cache, *cache.value_cache):
        assert torch.equal(tensor, plain.key_cache[0])
        assert tensor.stride() == (64, 8, 32, 1), "a head's keys of a block are one run"


# -- long queries by tiles

TILED: Lengths = [(17, 17), (20, 41), (1, 9), (33, 33), (48, 50), (17, 70)]


@pytest.fixture
def tiles(monkeypatch) -> list[tuple[int, int]]:
    """Query and key lengths of each call. Tiles of 16 end within, at and after the queries'."""
    calls: list[tuple[int, int]] = []

    def spy(query, keys, values, scale):
        calls.append((query.shape[2], len(keys)))
        return attend_in_tiles(query, keys, values, scale)

    monkeypatch.setattr(module, "attend_in_tiles", spy)
    monkeypatch.setattr(tiled_attention, "QUERY_TILE", 16)
    return calls


@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_long_queries_are_attended_in_tiles(block_size, dtype, tiles, attention, monkeypatch):
    """In one dtype, without a window, and if they have not too many keys."""
    monkeypatch.setattr(tiled_attention, "DTYPE", dtype)
    attention.check(TILED, block_size, dtype=dtype)
    assert sorted(tiles) == sorted(2 * [pair for pair in TILED if pair[0] > 16])
    for options in ({"dtype": torch.float32}, {"dtype": dtype, "window": 5}):
        attention.check(TILED, block_size, **options)
    assert len(tiles) == 2 * 5
    query, limit = torch.zeros(2, 2, 20, 8, dtype=dtype), tiled_attention.MAX_KEYS
    assert is_for_tiles(query, limit) and not is_for_tiles(query, limit + 1)


def test_in_bfloat16_it_is_as_exact_as_its_inputs():
    """Against float64 on the same bfloat16 numbers: an error of the size of bfloat16's steps."""
    torch.manual_seed(0)
    inputs = torch.randn(2, 2, 300, 64).bfloat16(), *torch.randn(2, 333, 2, 64).bfloat16()
    expected = attend_in_tiles(*(t.double() for t in inputs), 64**-0.5)
    error = (attend_in_tiles(*inputs, 64**-0.5).double() - expected).abs()
    assert error.max() < 0.04 and error.mean() < 0.0015
