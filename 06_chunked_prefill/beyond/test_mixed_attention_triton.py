"""The kernels against the PyTorch version and float64: on a GPU if there is one, else in the
interpreter (`conftest.py` switches it on)."""

from __future__ import annotations

import importlib
import sys
from typing import Any
from unittest import mock

import pytest
import torch

import mixed_attention_triton as module
import paged_attention_triton
from mixed_attention_triton import MixedTritonAttentionBackend
from test_mixed_attention import mixed_metadata
from test_paged_attention import Case, Lengths, make_case
from test_paged_attention_triton import (
    Triton,
    check_refusals,
    clear_launches,
    poisoned_scratch,
    set_tiles,
)
from test_window_attention import give_up_blocks

__all__ = ["poisoned_scratch"]

TILE = 16  # the smallest that a kernel can multiply
LENGTHS = [(1, 1), (1, 70), (0, 5), (1, 33), (3, 18), (9, 40), (40, 40)]


def mix(case: Case, decode_threshold: int = 1) -> Case:
    """With what the host knows. The case must have its short queries in front."""
    case.metadata = mixed_metadata(case, decode_threshold, is_readable=True)
    return case


class MixedTriton(Triton):
    def __init__(self, device: torch.device, decode_threshold: int | None = 1) -> None:
        super().__init__(device, MixedTritonAttentionBackend)
        self.decode_threshold = decode_threshold

    def make_case(self, lengths: Lengths, block_size: int, **options: Any) -> Case:
        case = super().make_case(lengths, block_size, **options)
        return case if self.decode_threshold is None else mix(case, self.decode_threshold)


@pytest.fixture
def small_tiles(monkeypatch):
    """Two sizes: what belongs to the one side must not reach the other."""
    set_tiles(monkeypatch, short=TILE, long=2 * TILE)
    yield
    clear_launches()


@pytest.mark.net
@pytest.mark.sample(every=4)
@pytest.mark.parametrize(
    ("decode_threshold", "num_shared"), [(None, 1), (0, 1), (1, 3), (3, 1), (40, 3)]
)
@pytest.mark.usefixtures("small_tiles", "poisoned_scratch")
def test_the_border_is_a_matter_of_speed(decode_threshold, num_shared, device):
    """All on one side, draft tokens to be verified among the decodes (chapter 5), sequences without
    tokens on either side. Plain metadata has no border (None). Traps 28, 30 and 35: more borders of
    tiles, splits and blocks, of the same kernel: `test_paged_attention_triton.py`."""
    at = decode_threshold or 0
    lengths = sorted(LENGTHS, key=lambda lengths: lengths[0] > at)
    triton = MixedTriton(device, decode_threshold)
    triton.check(lengths, 4, num_kv_heads=1, num_shared=num_shared)
    triton.check([(0, 9), (0, 7)], 4)
    triton.check([], 4, num_padding_tokens=0)


@pytest.mark.net
@pytest.mark.sample(every=3, first=1)
@pytest.mark.parametrize("window", [5, 17, 64])
@pytest.mark.usefixtures("small_tiles", "poisoned_scratch")
def test_a_window_hides_its_left_on_either_side(window, device):
    """Draft tokens are among the decodes. Longer queries have a launch of their own: with a window
    from the first query that does not fit the smallest tile."""
    triton = MixedTriton(device, None)
    lengths = [(1, 1), (1, 40), (3, 20), (2, 33), (8, 8), (9, 41), (19, 30)]
    case = triton.make_case(lengths, 4, window=window)
    plan = triton.check_case(give_up_blocks(case))
    assert [items.rows.num_seqs for items in plan.items] == [5, 2]


def test_each_side_has_its_own_tile_and_no_item_too_many(monkeypatch):
    """64 decodes and a chunk of 512 with two heads to a KV head: 16 rows a decode, not 64. Where
    chapter 2 has a bound, sequences times splits of the longest, items are counted exactly."""
    monkeypatch.setattr(paged_attention_triton, "NUM_MULTIPROCESSORS", 8)
    for lengths, tiles, sizes in (
        ([(1, 100)] * 64 + [(512, 512)], [16, 64], [[1] * 64, [16]]),
        ([(1, 30)] * 4 + [(1, 10_000)] + [(1, 30)] * 4, [16], [[1] * 4 + [40] + [1] * 4]),
        ([(0, 5), (0, 9), (4, 8)], [16], [[1]]),  # a side without tokens is not launched
        # A short chunk with a long history does not keep one program busy: without it there are
        # tiles enough, and no sequence's keys are split.
        ([(64, 600)] * 8, [64], [[2] * 8]),
        ([(64, 600)] * 8 + [(64, 30_000)], [64], [[2] * 8 + [4]]),
    ):
        case = mix(make_case(lengths, 256, torch.bfloat16))
        plan = case.plan(MixedTritonAttentionBackend())
        assert [items.launch.constants["BLOCK_M"] for items in plan.items] == tiles
        assert [items.first_item.diff().tolist() for items in plan.items] == sizes
        assert [items.num_items for items in plan.items] == [sum(each) for each in sizes]


def test_unsupported_settings_are_refused_as_in_chapter_2(device):
    check_refusals(MixedTritonAttentionBackend(), device)


def test_importing_works_without_triton_and_selecting_it_is_explained():
    with mock.patch.dict(sys.modules, {"triton": None}):
        for name in ("mixed", "paged"):
            del sys.modules[f"{name}_attention_triton"]
        del sys.modules["triton_or_none"]
        again = importlib.import_module("mixed_attention_triton")
        with pytest.raises(RuntimeError, match="pip install triton"):
            again.MixedTritonAttentionBackend()
    assert sys.modules["mixed_attention_triton"] is module is not again
