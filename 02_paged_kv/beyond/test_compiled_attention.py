"""The backend with rows in plain PyTorch and in machine code, by the contract of
`test_paged_attention.py`."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

import compiled_attention
import tiled_attention
from attention_plan import SHORT_QUERIES
from compiled_attention import CompiledAttentionBackend, HeadMajorKVCache
from decode_attention import CompiledRows, QueryRows
from paged_attention import PagedKVCache, TorchAttentionBackend
from test_paged_attention import (  # noqa: F401  the contract, with `attention`
    MIXED,
    Attention,
    Case,
    Lengths,
    decode_alone,
    make_case,
    test_each_query_attends_to_what_it_sees,
    test_models_with_other_numbers_of_query_heads_share_metadata,
    test_written_tokens_stand_in_their_slots_and_nothing_else_changes,
)
from tiled_attention import attend_in_tiles, is_for_tiles

# The largest error against float64 that is allowed; outputs are about 1 in size.
TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 1.5e-2,
}


def head_major(cache: torch.Tensor) -> torch.Tensor:
    """The same view of memory that is `[num_blocks, num_kv_heads, block_size, head_dim]`."""
    return cache.transpose(1, 2).contiguous().transpose(1, 2)


def in_head_major(case: Case) -> Case:
    case.key_cache = head_major(case.key_cache)
    case.value_cache = head_major(case.value_cache)
    return case


def attend_rows(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    rows: QueryRows,
    scale: float,
    output: torch.Tensor,
) -> None:
    """What the machine code computes, in PyTorch."""
    block_size = key_cache.shape[1]
    num_shared = query.shape[1] // key_cache.shape[2]
    wide = torch.promote_types(query.dtype, torch.float32)
    for token, sequence, num_keys in zip(rows.tokens, rows.sequences, rows.num_keys, strict=True):
        table = rows.tables[sequence, : -(-num_keys // block_size)].long()
        seen = slice(max(num_keys - rows.window, 0), num_keys)
        keys, values = (
            cache[table].flatten(0, 1)[seen].to(wide).repeat_interleave(num_shared, 1)
            for cache in (key_cache, value_cache)
        )
        scores = (keys * query[token].to(wide)).sum(-1) * scale  # [keys, num_heads]
        weights = scores.softmax(0)[:, :, None]
        output[token] = (weights * values).sum(0).to(output.dtype)


class Compiled(Attention):
    """`num_rows`: the rows that came to its function, call by call. It is the plain one, which
    needs no compiler, or machine code."""

    def __init__(self, make_function: Callable[..., CompiledRows] | None = None) -> None:
        self.make_function = make_function
        self.num_rows: list[int] = []

    def make_case(self, lengths: Lengths, block_size: int, **options: Any) -> Case:
        return in_head_major(super().make_case(lengths, block_size, **options))

    def make_backend(self, case: Case, others: TorchAttentionBackend | None = None):
        others = others or TorchAttentionBackend()
        num_heads = case.query.shape[1]
        function = attend_rows
        if self.make_function is not None:
            case.tolerance = TOLERANCE
            function = self.make_function(num_heads, case.key_cache)

        def attend(query, key_cache, value_cache, rows, *rest):
            self.num_rows.append(len(rows.tokens))
            function(query, key_cache, value_cache, rows, *rest)

        return CompiledAttentionBackend(attend, num_heads, case.key_cache, others)


# Query and sequence lengths: around the borders of blocks and splits, and rows of one sequence.
LENGTHS: Lengths = [(1, 1), (1, 255), (1, 256), (1, 257), (1, 5), (3, 70), (16, 16), (5, 513)]
LENGTHS += [(2, 260)]


@pytest.mark.net
@pytest.mark.needs("C++ compiler")
@pytest.mark.parametrize(
    ("block_size", "dtype", "num_kv_heads", "num_shared", "head_dim"),
    [
        (16, torch.bfloat16, 2, 8, 64),
        (4, torch.float32, 2, 12, 128),
        (3, torch.float64, 2, 3, 24),
        (1, torch.bfloat16, 1, 1, 80),
        (33, torch.float32, 1, 7, 1),
        (2, torch.float16, 4, 5, 40),
        (32, torch.float64, 2, 1, 256),
    ],
)
def test_machine_code_is_attention(block_size, dtype, num_kv_heads, num_shared, head_dim) -> None:
    """With blocks, heads and head sizes that vectors divide and do not divide; with windows, and
    scores that overflow exp."""
    options = dict(num_kv_heads=num_kv_heads, num_shared=num_shared, head_dim=head_dim)
    compiled = Compiled(CompiledRows)
    for more in ({}, {"window": 1}, {"window": 16}, {"window": 300}, {"scale": 1e4}):
        compiled.check(LENGTHS, block_size, dtype=dtype, **options, **more)
    assert compiled.num_rows == [31] * 2 * 5


@pytest.mark.needs("C++ compiler")
def test_a_result_depends_on_nothing_but_its_row_bit_for_bit() -> None:
    """Alone, in any company, in any row, with any number of threads."""
    compiled = Compiled(CompiledRows)
    rng = random.Random(0)
    threads = torch.get_num_threads()
    for seed in range(10):
        lengths = [(1, rng.choice([1, 5, 33, 64, 300, 700])) for _ in range(rng.randint(2, 12))]
        options = {"dtype": torch.float32, "seed": seed, "num_padding_tokens": 0}
        case = compiled.make_case(lengths, 4, **options)
        backend = compiled.make_backend(case)
        together = case.attend(case.plan(backend))
        for row in range(len(lengths)):
            alone = decode_alone(case, row)
            assert torch.equal(alone.attend(alone.plan(backend))[0], together[row])
        try:
            for num_threads in (1, 2, 3):
                torch.set_num_threads(num_threads)
                assert torch.equal(case.attend(case.plan(backend)), together)
        finally:
            torch.set_num_threads(threads)


def test_without_a_compiler_it_says_so(monkeypatch, caplog) -> None:
    missing = mock.Mock(side_effect=RuntimeError("no C++ compiler"))
    monkeypatch.setattr(compiled_attention, "CompiledRows", missing)
    cache = HeadMajorKVCache(1, 2, 4, 2, 8)
    with caplog.at_level(logging.WARNING):
        others = TorchAttentionBackend()
        assert CompiledAttentionBackend.compiled_for(4, cache, others) is None
    assert "keys are gathered: no C++ compiler" in caplog.text


@pytest.fixture
def attention() -> Compiled:
    return Compiled()


@pytest.mark.parametrize(
    "lengths", [[*MIXED, (18, 30), (1, 8), (31, 31)], [(25, 25), (1, 9)], [(27, 27)]], ids=str
)
def test_short_queries_go_to_the_function_and_all_others_the_usual_way(lengths, attention):
    plan = attention.check(lengths, 4)
    short = [query_len for query_len, _ in lengths if query_len <= max(SHORT_QUERIES)]
    assert attention.num_rows == [sum(short)] * 2 * bool(short)
    assert not plan.groups and len(plan.long_queries) == len(lengths) - len(short)


OTHERS: list[dict[str, Any]] = [{"num_kv_heads": 1, "num_shared": 4}, {"num_shared": 4}, {}]
OTHERS += [{"head_dim": 6}, {"dtype": torch.float32}, {"block_size": 8}]


@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_another_model_is_attended_to_the_usual_way(other, attention):
    """A draft model shares backend and metadata, and the function is not made for it. Nor for
    memory of the other order."""
    backend = attention.make_backend(attention.make_case(MIXED, 4))
    for make in (make_case, attention.make_case) if other else (make_case,):
        case = make(MIXED, **{"block_size": 4} | other)
        assert case.check_backend(backend).groups
    assert attention.num_rows == []


def test_memory_is_head_major_without_a_visible_difference():
    cache, plain = (kind(3, 5, 4, 2, 8, torch.float32) for kind in (HeadMajorKVCache, PagedKVCache))
    assert cache.kv_bytes_per_block == plain.kv_bytes_per_block
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

    monkeypatch.setattr(compiled_attention, "attend_in_tiles", spy)
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
    query = torch.zeros(2, 2, 20, 8, dtype=dtype)
    limit = tiled_attention.MAX_KEYS
    assert is_for_tiles(query, limit) and not is_for_tiles(query, limit + 1)
