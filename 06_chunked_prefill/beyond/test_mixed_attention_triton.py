"""The kernels against the PyTorch version: on a GPU if there is one, else in the interpreter
(`conftest.py` switches it on)."""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys

import pytest
import torch

import mixed_attention_triton as module
from mixed_attention_triton import MixedTritonAttentionBackend, choose_num_splits
from paged_attention import paged_attention
from paged_attention_triton import TritonAttentionBackend
from test_paged_attention import Case, make_case
from test_paged_attention_triton import check_refusals

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 3e-2}
TILE = 16  # the smallest that a kernel can multiply
LENGTHS = [(1, 1), (9, 40), (0, 5), (3, 18), (1, 33)]


def attend(case: Case) -> torch.Tensor:
    return MixedTritonAttentionBackend().attend(
        case.query, case.key_cache, case.value_cache, case.metadata, case.scale
    )


def check(case: Case) -> None:
    output = attend(case)
    expected = paged_attention(
        case.query, case.key_cache, case.value_cache, case.metadata, case.scale
    )
    assert output.dtype == case.query.dtype
    torch.testing.assert_close(output, expected, atol=TOLERANCE[output.dtype], rtol=0)
    assert not output[sum(case.query_lens) :].any(), "rows of padding tokens are zero"


@pytest.fixture
def small_tiles(monkeypatch):
    monkeypatch.setattr(module, "TILE_ROWS", TILE)
    monkeypatch.setattr(module, "TILE_KEYS", TILE)


@pytest.fixture
def set_num_splits(monkeypatch):
    """Any number of them, and scratch memory that is NaN until it is written."""
    real = torch.Tensor.new_empty

    def poisoned(tensor, *args, **kwargs):
        fresh = real(tensor, *args, **kwargs)
        return fresh.fill_(math.nan) if fresh.is_floating_point() else fresh

    def set_to(num_splits):
        monkeypatch.setattr(module, "choose_num_splits", lambda *_: num_splits)
        monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)

    return set_to


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.usefixtures("small_tiles")
def test_every_query_length_and_history_around_tile_and_block_borders(block_size, device):
    """Trap 35: NaN in every unused slot is never read. Trap 28: a chunk sees its own end and
    nothing behind it. Trap 30: chunks that end where a block or a tile ends."""
    tile_tokens = TILE // 2  # two heads share a KV head
    query_lens = (0, 1, 2, 3, tile_tokens - 1, tile_tokens, tile_tokens + 1)
    lengths = [(q, q + h) for q in query_lens for h in (0, 1, TILE - 1, TILE, TILE + 1)]
    lengths += [(q, 2 * TILE) for q in query_lens]
    random.Random(block_size).shuffle(lengths)
    case = make_case(
        lengths, block_size, torch.float32, num_kv_heads=1, num_padding_tokens=2, device=device
    )
    check(case)


@pytest.mark.parametrize("num_splits", [1, 2, 3, 7])
@pytest.mark.usefixtures("small_tiles")
def test_any_number_of_splits(num_splits, set_num_splits, device):
    """With 7, most sequences have fewer key tiles than splits; the chunk of 9 that ends at 40 has
    rows that see nothing of the last split. Scratch that nobody writes reaches no output."""
    set_num_splits(num_splits)
    case = make_case(LENGTHS, 4, torch.float32, num_kv_heads=1, num_padding_tokens=2, device=device)
    check(case)


@pytest.mark.parametrize(
    "num_kv_heads, num_shared, head_dim, num_splits",
    [(1, 1, 80, 1), (2, 2, 16, 2), (1, 4, 8, 1), (2, 3, 24, 3), (1, 32, 8, 1), (1, 1, 256, 1)],
)
@pytest.mark.usefixtures("small_tiles")
def test_heads_of_any_number_and_size(
    num_kv_heads, num_shared, head_dim, num_splits, set_num_splits, device
):
    set_num_splits(num_splits)
    shape = {"num_kv_heads": num_kv_heads, "num_shared": num_shared, "head_dim": head_dim}
    check(make_case([(1, 20), (9, 19), (2, 2)], 4, torch.float32, **shape, device=device))


@pytest.mark.parametrize("num_splits", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype, num_splits, set_num_splits, device):
    set_num_splits(num_splits)
    check(make_case(LENGTHS, 16, dtype, num_kv_heads=1, head_dim=16, device=device))


def test_tiles_of_their_normal_size(device):
    lengths = [(70, 70), (40, 150), (1, 200), (64, 65), (33, 128)]
    check(make_case(lengths, 16, torch.float32, num_kv_heads=1, device=device))


@pytest.mark.usefixtures("small_tiles")
def test_batches_without_tokens_and_sequences_without_tokens(set_num_splits, device):
    assert attend(make_case([], 4, torch.float32, device=device)).shape == (0, 4, 8)
    for num_splits in (1, 2):
        set_num_splits(num_splits)
        case = make_case([(0, 9), (0, 7)], 4, torch.float32, num_padding_tokens=2, device=device)
        check(case)
        case = make_case([(0, 9), (1, 5), (0, 3), (4, 6), (0, 1)], 4, torch.float32, device=device)
        check(case)


class LaunchSpy:
    """In place of a kernel: what it would be launched with."""

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]):
        return lambda *_, **__: self.grids.append(grid)


@pytest.mark.parametrize(
    "lengths, num_tiles",
    [
        ([(1, 100)] * 256, 256),  # decodes alone: no program too many
        ([(1, 100)] * 256 + [(512, 512)], (768 + 257 * 31) // 32),
        ([(512, 512)], (512 + 31) // 32),
    ],
    ids=["decodes", "mixed", "chunk"],
)
def test_the_grid_is_flat(lengths, num_tiles, monkeypatch):
    """Chapter 2 would launch 257 x 16 tiles for the mixed batch. At most one tile for each sequence
    has no work."""
    spy = LaunchSpy()
    monkeypatch.setattr(module, "_mixed_attention_kernel", spy)
    monkeypatch.setattr(module, "NUM_MULTIPROCESSORS", 1)
    attend(make_case(lengths, 256, torch.float32, num_kv_heads=3))
    assert spy.grids == [(num_tiles, 3, 1)]
    needed = sum(-(-query_len // 32) for query_len, _ in lengths)
    assert needed <= num_tiles <= needed + len(lengths)


def test_few_tiles_with_long_histories_are_split(monkeypatch):
    """As many programs as multiprocessors, if each has 256 keys at least."""
    monkeypatch.setattr(module, "NUM_MULTIPROCESSORS", 132)
    monkeypatch.setattr(module, "MAX_SPLITS", 32)
    assert choose_num_splits(132, 10**6) == 1
    assert choose_num_splits(131, 10**6) == 2
    assert choose_num_splits(8, 10**6) == 17
    assert choose_num_splits(1, 10**6) == 32
    assert choose_num_splits(8, 2048) == 8
    assert choose_num_splits(8, 511) == choose_num_splits(8, 1) == 1
    kernel, merge = LaunchSpy(), LaunchSpy()
    monkeypatch.setattr(module, "_mixed_attention_kernel", kernel)
    monkeypatch.setattr(module, "_merge_splits_kernel", merge)
    attend(make_case([(1, 1024)], 256, torch.float32, num_padding_tokens=1))
    assert kernel.grids == [(2, 2, 4)] and merge.grids == [(2, 4)]
    kernel.grids.clear(), merge.grids.clear()
    attend(make_case([(1, 511)], 256, torch.float32))
    assert kernel.grids == [(1, 2, 1)] and not merge.grids


def test_what_the_kernels_cannot_do_is_refused_as_in_chapter_2(device):
    assert MixedTritonAttentionBackend.write_kv is TritonAttentionBackend.write_kv
    check_refusals(MixedTritonAttentionBackend(), device)


def test_importing_works_without_triton_and_asking_for_it_says_what_to_do():
    environment = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    code = (
        "import sys; sys.modules['triton'] = None; "
        "import mixed_attention_triton as module; module.MixedTritonAttentionBackend()"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )
    assert result.returncode != 0
    assert "RuntimeError" in result.stderr and "pip install triton" in result.stderr
