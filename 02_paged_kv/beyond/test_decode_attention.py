"""Decode attention over splits against the oracle of `test_paged_attention.py`: score by score, in
float64, every slot that nobody owns NaN. Once as plain PyTorch, once compiled."""

from __future__ import annotations

import logging
import math
import os
import random
import shutil

import pytest
import torch

import decode_attention as module
from decode_attention import (
    MAX_BLOCKS,
    DecodeSplits,
    compile_decode_attention,
    decode_attention,
    split_sequences,
)
from test_paged_attention import Case, make_case

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1.5e-2}
NUM_KV_HEADS, NUM_SHARED, HEAD_DIM, BLOCK_SIZE = 2, 2, 24, 4  # of the one small compilation


def needs_compiler(test):
    """Skipped where there is no C++ compiler. The CI has to have one: there, the test fails."""
    is_required = os.environ.get("VLLM_FS_REQUIRE_COMPILER") or os.environ.get("CI")
    is_there = any(map(shutil.which, ("g++", "clang++")))
    return pytest.mark.skipif(not (is_there or is_required), reason="no C++ compiler")(test)


def head_major(cache: torch.Tensor) -> torch.Tensor:
    """The same view of memory that is `[num_blocks, num_kv_heads, block_size, head_dim]`."""
    return cache.transpose(1, 2).contiguous().transpose(1, 2)


def split(case: Case) -> DecodeSplits:
    where = case.metadata
    return split_sequences(where.seq_lens, where.block_tables, case.key_cache.shape[1])


def run(case: Case, function=decode_attention) -> torch.Tensor:
    caches = head_major(case.key_cache), head_major(case.value_cache)
    return function(case.query, *caches, split(case), case.scale)


def check(case: Case, function=decode_attention) -> None:
    output, expected = run(case, function), case.expected()
    assert output.dtype == case.query.dtype
    tolerance = TOLERANCE[output.dtype]
    torch.testing.assert_close(output.double(), expected, atol=tolerance, rtol=0)


def decodes(*seq_lens: int) -> list[tuple[int, int]]:
    return [(1, seq_len) for seq_len in seq_lens]


@pytest.mark.parametrize("block_size", [1, 2, 3, 16, 33])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_it_is_attention_through_shuffled_tables(block_size, dtype):
    check(make_case(decodes(1, 70, 5, 16, 129, 3), block_size, dtype, seed=block_size))


@pytest.mark.parametrize("num_kv_heads, num_shared", [(1, 1), (1, 8), (4, 1), (2, 3)])
@pytest.mark.parametrize("head_dim", [1, 24, 80])
def test_heads_of_any_number_and_size(num_kv_heads, num_shared, head_dim):
    check(
        make_case(
            decodes(40, 7),
            2,
            torch.float32,
            num_kv_heads=num_kv_heads,
            num_shared=num_shared,
            head_dim=head_dim,
        )
    )


@pytest.mark.parametrize("seq_len", [1, 4, 5, 31, 32, 33, 64, 65])
def test_one_sequence_around_the_borders_of_blocks_and_splits(seq_len):
    check(make_case(decodes(seq_len), 4))


def test_scores_far_beyond_what_exp_can_represent():
    case = make_case(decodes(50, 9), 4, torch.float32)
    case.scale = 1e4
    check(case)


def test_random_lengths():
    for seed in range(20):
        rng = random.Random(seed)
        lengths = [rng.choice([1, 2, 9, 40, 100]) for _ in range(rng.randint(1, 9))]
        check(make_case(decodes(*lengths), rng.randint(1, 5), seed=seed))


@pytest.mark.parametrize("num_more, num_calls", [(0, 1), (1, 2), (513, 3)])
def test_more_blocks_than_one_call_takes(num_more, num_calls):
    lengths = [3, 40] * 40 + [4] * (MAX_BLOCKS - 440 + num_more)  # 440 blocks, and one each
    case = make_case(decodes(*lengths), 4, seed=num_more)
    assert len(split(case).calls) == num_calls
    check(case)


def test_what_is_read_and_who_merges_what(monkeypatch):
    """The picture at the head of the module, cut into two calls."""
    monkeypatch.setattr(module, "FAN_IN", 3)
    tables = torch.tensor([[7, 2, 8, 3], [6, 5, 0, 0]])
    splits = split_sequences(torch.tensor([14, 8]), tables, block_size=4)
    (call,) = splits.calls
    assert call.block_ids.tolist() == [2, 3, 5, 6, 7, 8]
    assert call.owners.tolist() == [0, 0, 1, 1, 0, 0]
    assert call.num_keys.tolist() == [10, 2, 4, 8, 14, 6]
    assert call.of_split.tolist() == [[4, 0, 5], [1, -1, -1], [3, 2, -1]]
    assert [places.tolist() for places in splits.merges] == [[[0, 1, -1], [2, -1, -1]]]
    monkeypatch.setattr(module, "MAX_BLOCKS", 3)
    first, second = split_sequences(torch.tensor([14, 8]), tables, block_size=4).calls
    assert first.block_ids.tolist() == [2, 3, 7, 8] and second.block_ids.tolist() == [5, 6]
    assert first.of_split.tolist() == [[2, 0, 3], [1, -1, -1]]
    assert second.owners.tolist() == [1, 1] and second.of_split.tolist() == [[1, 0, -1]]


def test_slots_in_front_of_a_window_are_hidden():
    """Of 14 keys the last 11; all 8 of a shorter sequence; and nobody's mate sees its own."""
    tables = torch.tensor([[7, 2, 8, 3], [6, 5, 0, 0]])
    (call,) = split_sequences(torch.tensor([14, 8]), tables, 4, window=11).calls
    assert call.block_ids.tolist() == [2, 3, 5, 6, 7, 8]
    assert call.num_hidden.tolist() == [0, 0, 0, 0, 3, 0]
    (call,) = split_sequences(torch.tensor([4]), tables[:1], 4, window=1).calls
    assert call.num_hidden.tolist() == [3, 0] and call.num_keys.tolist() == [4, 1]


def test_splits_are_merged_until_there_is_one_for_each_sequence(monkeypatch):
    """One long sequence does not make many merges for short ones."""
    monkeypatch.setattr(module, "FAN_IN", 2)
    tables = torch.arange(14).view(2, 7)
    splits = split_sequences(torch.tensor([1, 7]), tables, block_size=1)
    assert [places.tolist() for places in splits.merges] == [
        [[0, -1], [1, 2], [3, 4]],
        [[0, -1], [1, 2]],
    ]
    check(make_case(decodes(3, 75, 40, 1, 200), 3))


def test_nobody_is_alone():
    tables = torch.tensor([[7, 2, 9, 0]], dtype=torch.int32)
    splits = split_sequences(torch.tensor([4], dtype=torch.int32), tables, block_size=4)
    (call,) = splits.calls
    assert call.block_ids.tolist() == [7, 7] and call.num_keys.tolist() == [4, 1]
    assert {tensor.dtype for tensor in call} == {torch.int64}, "another dtype is compiled anew"
    assert not splits.merges, "one split is the sequence"


@pytest.mark.parametrize("row", [0, 1, 2])
@pytest.mark.parametrize("name", ["key_cache", "value_cache"])
def test_numbers_of_one_sequence_that_are_not_finite_stay_its_own(row, name):
    """What others do not have is looked up where its partial results may be."""
    case = make_case(decodes(3, 90, 40), 4, torch.float32)
    own, expected = case.metadata.block_tables[row, : -(-[3, 90, 40][row] // 4)], run(case)
    getattr(case, name)[own] = math.nan
    output, others = run(case), [i for i in range(3) if i != row]
    assert output[row].isnan().all()
    assert torch.equal(output[others], expected[others])


def test_sequences_that_share_blocks():
    """A cached prefix, in tables of different length, and at other places of them."""
    case = make_case(decodes(40, 7, 30), 4, torch.float32)
    tables = case.metadata.block_tables
    tables[1, :2] = tables[0, 3:5]
    tables[2, :7] = tables[0, :7]
    together = run(case)
    for row in range(3):
        alone = split_sequences(case.metadata.seq_lens[row : row + 1], tables[row : row + 1], 4)
        caches = head_major(case.key_cache), head_major(case.value_cache)
        own = decode_attention(case.query[row : row + 1], *caches, alone, case.scale)
        assert torch.equal(own[0], together[row])


# -- compiled


@pytest.fixture(scope="module")
def compiled():
    """Compiled once, and never again: whatever sizes come, `error_on_recompile` is on."""
    shape = (3, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    caches = torch.zeros(shape).transpose(1, 2), torch.zeros(shape).transpose(1, 2)
    function = compile_decode_attention(NUM_KV_HEADS * NUM_SHARED, *caches)
    assert function is not None
    return torch._dynamo.config.patch(error_on_recompile=True)(function)


def small_case(*seq_lens: int, seed: int = 0) -> Case:
    return make_case(
        decodes(*seq_lens),
        BLOCK_SIZE,
        torch.float32,
        num_kv_heads=NUM_KV_HEADS,
        num_shared=NUM_SHARED,
        head_dim=HEAD_DIM,
        seed=seed,
    )


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize(
    "seq_lens", [[1], [40], [1, 1], [7, 100, 31, 32, 33], [5] * 300, [40] * 60]
)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_compiled_once_for_any_number_of_sequences_splits_and_blocks(compiled, seq_lens, mode):
    """Caches are made outside of inference mode, as the engine makes them."""
    check(small_case(*seq_lens), mode()(compiled))


@pytest.mark.slow
@needs_compiler
def test_compiled_windows_are_those_of_the_specification(compiled):
    case = small_case(40, 33, 7, 41)
    caches = head_major(case.key_cache), head_major(case.value_cache)
    where = case.metadata
    splits = split_sequences(where.seq_lens, where.block_tables, BLOCK_SIZE, window=38)
    found, right = (
        f(case.query, *caches, splits, case.scale) for f in (compiled, decode_attention)
    )
    torch.testing.assert_close(found, right, atol=1e-6, rtol=0)
    assert (found - run(case, compiled)).abs().amax((1, 2)).gt(1e-3).tolist() == [1, 0, 0, 1]


@pytest.mark.slow
@needs_compiler
def test_a_result_does_not_depend_on_the_batch_mates_bit_for_bit(compiled):
    """Alone, in any company, in any row, in other blocks: the same bits."""
    rng = random.Random(0)
    for seed in range(10):
        lengths = [rng.choice([1, 5, 33, 64, 300]) for _ in range(rng.randint(2, 12))]
        case = small_case(*lengths, seed=seed)
        together = run(case, compiled)
        for row in rng.sample(range(len(lengths)), 2):
            alone = moved(case, row, small_case(lengths[row]))
            assert torch.equal(run(alone, compiled)[0], together[row])


def moved(case: Case, row: int, alone: Case) -> Case:
    """`alone`, with what one sequence of `case` has, in blocks of its own."""
    alone.query, block_size = case.query[row : row + 1], alone.key_cache.shape[1]
    for position in range(int(alone.metadata.seq_lens[0])):
        block, offset = divmod(position, block_size)
        place = int(alone.metadata.block_tables[0, block])
        alone.key_cache[place, offset] = case.keys[row][position]
        alone.value_cache[place, offset] = case.values[row][position]
    return alone


@pytest.mark.slow
@needs_compiler
def test_compiled_for_bfloat16_in_the_shape_of_a_real_model():
    shape = (3, 8, 16, 128)
    caches = [torch.zeros(shape, dtype=torch.bfloat16).transpose(1, 2) for _ in range(2)]
    function = compile_decode_attention(16, *caches)
    assert function is not None
    function = torch._dynamo.config.patch(error_on_recompile=True)(function)
    heads = dict(num_kv_heads=8, num_shared=2, head_dim=128)
    case = make_case(decodes(300, 17, 129, 1), 16, torch.bfloat16, **heads)
    check(case, function)
    together = run(case, function)
    for row, seq_len in enumerate([300, 17, 129, 1]):
        alone = moved(case, row, make_case(decodes(seq_len), 16, torch.bfloat16, **heads))
        assert torch.equal(run(alone, function)[0], together[row])


def test_without_a_compiler_it_says_so(monkeypatch, caplog):
    def fail(*arguments, **options):
        raise RuntimeError("no C++ compiler\nand more lines")

    monkeypatch.setattr(module, "_first_call", fail)
    cache = torch.zeros(2, 4, 2, 8)
    with caplog.at_level(logging.WARNING):
        assert compile_decode_attention(4, cache, cache) is None
    assert "RuntimeError: no C++ compiler" in caplog.text and "more lines" not in caplog.text
