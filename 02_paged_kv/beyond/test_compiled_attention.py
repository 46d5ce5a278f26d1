"""The backend with compiled rows against the oracle of `test_paged_attention.py`. The function is
the plain `attend_rows` here, which needs no compiler."""

from __future__ import annotations

import random

import pytest
import torch

import compiled_attention as module
from attention_plan import SHORT_QUERIES
from compiled_attention import CompiledAttentionBackend, HeadMajorKVCache, write_kv_anywhere
from decode_attention import attend_rows
from paged_attention import PagedKVCache, TorchAttentionBackend, write_kv
from test_decode_attention import head_major
from test_paged_attention import (  # noqa: F401  the cases of chapter 2, with `backend_of`
    MIXED,
    BackendOf,
    Case,
    make_case,
    test_a_query_sees_its_window,
    test_any_mix_of_query_lengths_through_shuffled_tables,
    test_batches_without_tokens_and_sequences_without_tokens,
    test_metadata_that_contradicts_itself_is_an_error,
    test_models_with_other_numbers_of_query_heads_share_metadata,
)


def make_backend(
    case: Case, others: TorchAttentionBackend | None = None
) -> CompiledAttentionBackend:
    """`num_rows` of it: that came to its function, call by call."""

    def attend(query, key_cache, value_cache, rows, *rest):
        backend.num_rows.append(len(rows.tokens))
        attend_rows(query, key_cache, value_cache, rows, *rest)

    backend = CompiledAttentionBackend(attend, case.query.shape[1], case.key_cache, others)
    backend.num_rows = []
    return backend


class Counting(TorchAttentionBackend):
    num_groups = 0

    def attend_group(self, *arguments, **options):
        self.num_groups += 1
        return super().attend_group(*arguments, **options)


def count_short(lengths: list[tuple[int, int]]) -> int:
    return sum(query_len for query_len, _ in lengths if query_len <= max(SHORT_QUERIES))


def make_head_major_case(*arguments, **options) -> Case:
    case = make_case(*arguments, **options)
    case.key_cache, case.value_cache = head_major(case.key_cache), head_major(case.value_cache)
    return case


def attend(case: Case, backend: CompiledAttentionBackend) -> torch.Tensor:
    return case.attend(case.plan(backend))


@pytest.fixture
def short_query() -> None:
    """The function gets the queries that are short, which a test counts."""


@pytest.fixture
def backend_of() -> BackendOf:
    """The backend for chapter 2's tests."""

    def make(case: Case) -> CompiledAttentionBackend:
        case.key_cache, case.value_cache = head_major(case.key_cache), head_major(case.value_cache)
        return make_backend(case)

    return make


@pytest.mark.parametrize(
    "lengths",
    [
        [*MIXED, (18, 30), (1, 8), (31, 31)],
        [(1, 9)],
        [(1, 9), (1, 3), (25, 25)],
        [(25, 25), (1, 9)],
        [(27, 27)],
    ],
    ids=str,
)
def test_short_queries_go_to_the_function_and_all_others_the_usual_way(lengths):
    case = make_head_major_case(lengths, 4)
    backend, num_rows = make_backend(case), count_short(lengths)
    plan = case.check_backend(backend)
    assert backend.num_rows == [num_rows] * 2 * (num_rows > 0)
    num_long = sum(query_len > max(SHORT_QUERIES) for query_len, _ in lengths)
    assert not plan.groups and len(plan.long_queries) == num_long


@pytest.mark.parametrize(
    "other",
    [
        {"num_kv_heads": 1, "num_shared": 4},
        {"num_shared": 4},
        {"head_dim": 6},
        {"dtype": torch.float32},
        {"block_size": 8},
    ],
    ids=str,
)
def test_another_model_is_attended_to_the_usual_way(other):
    """A draft model shares backend and metadata, and the function is not made for it."""
    others = Counting()
    backend = make_backend(make_head_major_case(MIXED, 4), others)
    for make in (make_case, make_head_major_case):
        case = make(MIXED, **{"block_size": 4} | other)
        others.num_groups = 0
        case.check(attend(case, backend))
        assert others.num_groups == len(case.plan(backend).groups) > 0
    case = make_case(MIXED, 4)
    case.check(attend(case, backend))
    assert backend.num_rows == [], "memory of the other order is not for it either"


def test_memory_is_head_major_without_a_visible_difference():
    arguments = 3, 5, 4, 2, 8, torch.float32
    cache, plain = HeadMajorKVCache(*arguments), PagedKVCache(*arguments)
    assert cache.kv_bytes_per_block == plain.kv_bytes_per_block
    assert (cache.num_blocks, cache.block_size) == (5, 4)
    assert len(cache.key_cache) == len(cache.value_cache) == 3
    tensors, plain_tensors = ((*c.key_cache, *c.value_cache) for c in (cache, plain))
    for tensor, plain_tensor in zip(tensors, plain_tensors, strict=True):
        assert torch.equal(tensor, plain_tensor)
        assert tensor.stride() == (64, 8, 32, 1), "a head's keys of a block are one run"


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_tokens_are_written_to_the_slots_of_the_plain_function(block_size):
    cache, plain = (kind(1, 6, block_size, 2, 3) for kind in (HeadMajorKVCache, PagedKVCache))
    slots = random.Random(0).sample(range(6 * block_size), 5)
    mapping = torch.tensor([slots[0], -1, *slots[1:], -1])
    key, value = torch.randn(2, 7, 2, 3)
    write_kv(key, value, plain.key_cache[0], plain.value_cache[0], mapping)
    for target in (cache, PagedKVCache(1, 6, block_size, 2, 3)):
        write_kv_anywhere(key, value, target.key_cache[0], target.value_cache[0], mapping)
        assert torch.equal(target.key_cache[0], plain.key_cache[0])
        assert torch.equal(target.value_cache[0], plain.value_cache[0])


def test_without_a_compiler_there_is_no_backend(monkeypatch):
    monkeypatch.setattr(module, "compile_rows", lambda *arguments: None)
    assert CompiledAttentionBackend.compiled_for(4, HeadMajorKVCache(1, 3, 4, 2, 8)) is None
