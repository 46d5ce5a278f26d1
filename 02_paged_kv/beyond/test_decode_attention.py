"""Rows in plain PyTorch and in machine code, against the oracle of `test_paged_attention.py`."""

from __future__ import annotations

import logging
import math
import random
from functools import cache
from unittest import mock

import numpy as np
import pytest
import torch

import decode_attention as module
from decode_attention import (
    SPLIT_KEYS,
    AttendRows,
    CompiledRows,
    QueryRows,
    attend_rows,
    compile_rows,
    split_rows,
)
from test_paged_attention import Case, make_case

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


def rows_of(case: Case, **options: int) -> QueryRows:
    """All query tokens of a case, each a row."""
    metadata = case.metadata
    starts, seq_lens = metadata.query_start_loc.numpy(), metadata.seq_lens.numpy()
    lens = np.diff(starts)
    sequences, tokens = np.repeat(np.arange(len(lens)), lens), np.arange(starts[-1])
    num_keys = tokens + 1 + (seq_lens - starts[1:])[sequences]
    tables = metadata.block_tables
    return QueryRows(case.key_cache.shape[1], tables, tokens, sequences, num_keys, **options)


def run(case: Case, function: AttendRows, rows: QueryRows | None = None) -> torch.Tensor:
    output = torch.full_like(case.query, 7)
    caches = head_major(case.key_cache), head_major(case.value_cache)
    function(case.query, *caches, rows or rows_of(case), case.scale, output)
    return output


def check(case: Case, function: AttendRows) -> None:
    output, expected = run(case, function), case.expected()
    assert output.dtype == case.query.dtype
    torch.testing.assert_close(output.double(), expected, atol=TOLERANCE[output.dtype], rtol=0)


def compiled_for(case: Case) -> CompiledRows:
    return CompiledRows(case.query.shape[1], head_major(case.key_cache))


def decodes(*seq_lens: int) -> list[tuple[int, int]]:
    return [(1, seq_len) for seq_len in seq_lens]


# Query and sequence lengths: around the borders of blocks and splits, and rows of one sequence.
LENGTHS = [*decodes(1, 255, 256, 257, 5), (3, 70), (16, 16), (5, 513), (1, 16), (2, 260)]


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
def test_machine_code_is_attention(
    block_size: int, dtype: torch.dtype, num_kv_heads: int, num_shared: int, head_dim: int
) -> None:
    """As its specification is, with blocks, heads and head sizes that vectors divide and do not
    divide; and with windows, for which the specification is the oracle."""
    sizes = dict(num_kv_heads=num_kv_heads, num_shared=num_shared, head_dim=head_dim)
    case = make_case(LENGTHS, block_size, dtype, seed=block_size, **sizes)
    compiled = compiled_for(case)
    for function in (attend_rows, compiled):
        check(case, function)
    for window in (1, 16, 300):
        rows = rows_of(case, window=window)
        found, right = (run(case, f, rows).double() for f in (compiled, attend_rows))
        torch.testing.assert_close(found, right, atol=2 * TOLERANCE[dtype], rtol=0)
        assert not torch.allclose(found, run(case, attend_rows).double(), atol=0.05)


# -- both, on small cases of one shape


def small_case(*lengths: tuple[int, int], seed: int = 0) -> Case:
    return make_case(list(lengths), 4, torch.float32, seed=seed)


@cache
def compiled_for_small_cases() -> CompiledRows:
    return compiled_for(small_case((1, 1)))


@pytest.fixture(params=["plain", pytest.param("compiled", marks=pytest.mark.needs("C++ compiler"))])
def function(request: pytest.FixtureRequest) -> AttendRows:
    return attend_rows if request.param == "plain" else compiled_for_small_cases()


def test_only_the_rows_tokens_are_written(function: AttendRows) -> None:
    case = small_case((1, 9), (3, 30), (2, 12))
    rows, expected = rows_of(case), case.expected()
    for some in ([1, 4, 5], []):
        arrays = (a[some] for a in (rows.tokens, rows.sequences, rows.num_keys))
        output = run(case, function, QueryRows(4, rows.tables, *arrays))
        torch.testing.assert_close(output[some].double(), expected[some], atol=1e-5, rtol=0)
        assert (output[[i for i in range(6) if i not in some]] == 7).all()


def test_queries_may_be_a_part_of_something_larger(function: AttendRows) -> None:
    case = small_case((1, 9), (3, 30))
    expected, query = run(case, function), case.query
    for dim in (1, 3):
        case.query = torch.stack((query, query), dim).select(dim, 0)
        assert torch.equal(run(case, function), expected)


def test_scores_that_overflow_exp_and_non_finite_values_of_another_sequence(function) -> None:
    case = small_case(*decodes(3, 290, 40))
    case.scale = 1e4
    check(case, function)
    expected = run(case, function)
    for memory in (case.key_cache, case.value_cache):
        saved = memory.clone()
        memory[case.metadata.block_tables[1, :-1].long()] = math.nan
        output = run(case, function)
        assert output[1].isnan().all() and torch.equal(output[[0, 2]], expected[[0, 2]])
        memory.copy_(saved)


# -- compiled


@pytest.mark.needs("C++ compiler")
def test_a_result_depends_on_nothing_but_its_row_bit_for_bit() -> None:
    """Alone, in any company, in any row, with any number of threads."""
    compiled, rng, threads = compiled_for_small_cases(), random.Random(0), torch.get_num_threads()
    for seed in range(10):
        seq_lens = [rng.choice([1, 5, 33, 64, 300, 700]) for _ in range(rng.randint(2, 12))]
        case = small_case(*decodes(*seq_lens), seed=seed)
        together, rows = run(case, compiled), rows_of(case)
        for row in range(len(seq_lens)):
            alone = (a[[row]] for a in (rows.tokens, rows.sequences, rows.num_keys))
            output = run(case, compiled, QueryRows(4, rows.tables, *alone))
            assert torch.equal(output[row], together[row])
        try:
            for num_threads in (1, 2, 3):
                torch.set_num_threads(num_threads)
                assert torch.equal(run(case, compiled), together)
        finally:
            torch.set_num_threads(threads)


def test_rows_with_a_common_prefix_read_it_one_after_another() -> None:
    """The picture at the head of the module."""
    splits = split_rows(np.array([600, 100, 400]), SPLIT_KEYS)
    assert splits.first_splits.tolist() == [0, 3, 4, 6]
    assert splits.owners.tolist() == [0, 1, 2, 0, 2, 0]
    assert splits.numbers.tolist() == [0, 0, 0, 1, 1, 2]


def test_without_a_compiler_it_says_so(monkeypatch, caplog) -> None:
    missing = mock.Mock(side_effect=RuntimeError("no C++ compiler"))
    monkeypatch.setattr(module, "load_library", missing)
    with caplog.at_level(logging.WARNING):
        assert compile_rows(4, torch.zeros(2, 4, 2, 8)) is None
    assert "keys are gathered: no C++ compiler" in caplog.text
