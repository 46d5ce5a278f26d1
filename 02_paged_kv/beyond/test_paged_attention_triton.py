"""The kernels against float64: on a GPU if there is one, else in the interpreter (`conftest.py`
switches it on)."""

from __future__ import annotations

import importlib
import math
import random
import sys
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

import paged_attention_triton as module
from paged_attention_triton import TritonAttentionBackend
from test_compiled_attention import TOLERANCE as PRECISE
from test_compiled_attention import head_major
from test_paged_attention import (  # noqa: F401  of the contract
    BATCHES,
    Attention,
    Case,
    Lengths,
    decode_alone,
    make_case,
    test_written_tokens_stand_in_their_slots_and_nothing_else_changes,
)
from test_window_attention import give_up_blocks

F32 = torch.float32
TILE = 16  # the smallest that a kernel can multiply


class Triton(Attention):
    """The kernels on a device, with what a graph knows of the lengths, or with what the host
    knows: short queries, in front, are those of at most `decode_threshold` tokens (0: it is not
    said)."""

    def __init__(self, device: torch.device | str, decode_threshold: int | None = None) -> None:
        self.device = device
        self.decode_threshold = decode_threshold

    def make_case(self, lengths: Lengths, block_size: int, **options: Any) -> Case:
        options = {"dtype": F32, "device": self.device} | options
        case = super().make_case(lengths, block_size, **options)
        return case if self.decode_threshold is None else on_host(case, self.decode_threshold)

    def make_backend(self, case: Case) -> TritonAttentionBackend:
        case.tolerance = PRECISE
        return TritonAttentionBackend()

    def attend(self, case: Case) -> torch.Tensor:
        return case.attend(case.plan(TritonAttentionBackend()))

    def check(self, lengths: Lengths, block_size: int, **options: Any) -> Any:
        return self.check_case(give_up_blocks(self.make_case(lengths, block_size, **options)))

    def check_case(self, case: Case) -> Any:
        """One layer: a kernel takes long here."""
        plan = case.plan(self.make_backend(case))
        case.check(case.attend(plan))
        return plan


def on_host(case: Case, decode_threshold: int = 0) -> Case:
    is_long = [query_len > decode_threshold for query_len in case.query_lens]
    case.metadata = replace(
        case.metadata,
        num_short=[*is_long, True].index(True) if decode_threshold else None,
        query_starts=case.metadata.query_start_loc.tolist(),
        host_seq_lens=case.metadata.seq_lens.tolist(),
    )
    return case


@pytest.fixture
def attention(device) -> Triton:  # of the contract
    return Triton(device)


def set_tiles(monkeypatch, short: int = TILE, long: int = TILE, keys: int = TILE) -> None:
    """Small ones, which the interpreter is not slow with, and splits of two of them."""

    def choose(shape, is_short):
        return (short if is_short else long), keys, 4

    clear_launches()
    monkeypatch.setattr(module, "choose_tile", choose)
    monkeypatch.setattr(module, "SPLIT_KEYS", 2 * keys)


def clear_launches() -> None:
    module.attention_launch.cache_clear()
    module.merge_launch.cache_clear()


@pytest.fixture
def small_tiles(monkeypatch):
    set_tiles(monkeypatch)
    yield
    clear_launches()


@pytest.fixture
def poisoned_scratch(monkeypatch):
    """Scratch memory is NaN until it is written."""
    real = torch.Tensor.new_empty

    def poisoned(tensor, *args, **kwargs):
        fresh = real(tensor, *args, **kwargs)
        return fresh.fill_(math.nan) if fresh.is_floating_point() else fresh

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)


@pytest.mark.net
@pytest.mark.sample(every=2)
@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.usefixtures("small_tiles", "poisoned_scratch")
def test_each_query_attends_to_what_it_sees(name, attention):
    """Of the contract's batches each third sequence: the interpreter is slow."""
    chosen = dict(BATCHES[name])
    chosen["lengths"] = chosen["lengths"][:: 3 if attention.device.type == "cpu" else 1]
    attention.check(**chosen)


@pytest.mark.net
@pytest.mark.sample(every=3, first=1)
@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.usefixtures("small_tiles", "poisoned_scratch")
def test_every_query_length_and_history_around_tile_split_and_block_borders(block_size, attention):
    """Trap 35: NaN in every unused slot is never read. Trap 28: a chunk sees its own end and
    nothing after it. Trap 30: chunks that end where a block, a tile or a split ends."""
    tile_tokens = TILE // 2  # two heads share a KV head
    query_lens = (0, 1, 2, tile_tokens - 1, tile_tokens, tile_tokens + 1)
    histories = (0, 1, TILE - 1, TILE, 2 * TILE - 1, 2 * TILE, 2 * TILE + 1)
    lengths = [(q, q + h) for q in query_lens for h in histories]
    lengths += [(q, 2 * TILE) for q in query_lens]
    random.Random(block_size).shuffle(lengths)
    if attention.device.type == "cpu":
        lengths = lengths[::3]
    for chosen in (lengths, [(min(q, 1), n) for q, n in lengths]):  # long queries; decodes
        attention.check(chosen, block_size, num_kv_heads=1)


@pytest.mark.usefixtures("small_tiles", "poisoned_scratch")
def test_a_row_may_see_nothing_of_the_splits_that_are_merged_first(attention, monkeypatch):
    monkeypatch.setattr(module, "SPLITS_AT_ONCE", 1)
    attention.check([(40, 44)], 4, window=5, num_kv_heads=1, num_shared=1)


def test_programs_take_one_split_after_the_other(attention, monkeypatch):
    """Where a bound says that there could be many more, as in a graph of a step."""
    monkeypatch.setattr(module, "MAX_PROGRAMS", 24)
    monkeypatch.setattr(module, "SPLIT_KEYS", 96)  # not a multiple of a tile
    case = attention.make_case([(1, 300), (0, 9), (1, 20), (1, 1)], 16, head_dim=16)
    case.metadata.max_seq_len = 2048
    (part,) = attention.check_case(case).ranges
    assert part.grid == (8, 3) and part.max_splits == 22


@pytest.mark.sample(every=2, first=1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("small_tiles")
def test_a_decode_has_the_same_bits_alone_and_in_any_crowd(dtype, attention):
    """The length of a split depends on no other sequence."""
    lengths = [(1, 90), (1, 3), (1, 33)]
    case = attention.make_case(lengths, 4, dtype=dtype, num_kv_heads=1, num_padding_tokens=0)
    together = attention.attend(case)
    for row in range(len(lengths)):
        assert torch.equal(attention.attend(decode_alone(case, row))[0], together[row])


@pytest.mark.usefixtures("small_tiles")
def test_memory_may_lie_in_either_order_and_a_query_in_a_projection(attention):
    case = attention.make_case([(1, 33), (3, 18)], 4, num_padding_tokens=0)
    expected = attention.attend(case)
    case.key_cache, case.value_cache = head_major(case.key_cache), head_major(case.value_cache)
    assert torch.equal(attention.attend(case), expected)
    case.query = torch.cat([case.query, case.query * math.nan], 1)[:, :4]
    assert torch.equal(attention.attend(case), expected)


@pytest.mark.usefixtures("small_tiles")
def test_offsets_beyond_32_bits():
    """A cache of 2**31 elements and more, most of them untouched: the operating system allocates
    memory page by page."""
    triton = Triton(torch.device("cpu"))
    case = triton.make_case([(1, 40), (5, 21)], 16, dtype=torch.float16)
    expected = triton.attend(case)
    (num_small, *shape) = case.key_cache.shape
    num_blocks = 2**31 // math.prod(shape) + num_small
    first = num_blocks - num_small
    for name in ("key_cache", "value_cache"):
        large = untouched_memory(num_blocks * math.prod(shape)).view(num_blocks, *shape)
        large[first:] = getattr(case, name)
        setattr(case, name, large)
    case.metadata.block_tables += first
    assert torch.equal(triton.attend(case), expected)
    case.metadata.slot_mapping = torch.tensor([num_blocks * 16 - 1, first * 16])
    key = torch.ones(2, *shape[1:], dtype=torch.float16)
    case.plan(TritonAttentionBackend()).write_kv(key, 2 * key, case.key_cache, case.value_cache)
    assert torch.equal(case.key_cache[-1, -1], key[0])
    assert torch.equal(case.value_cache[first, 0], 2 * key[0])


def untouched_memory(num_elements: int) -> torch.Tensor:
    import mmap

    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    return torch.frombuffer(mmap.mmap(-1, 2 * num_elements, flags=flags), dtype=torch.float16)


def test_a_long_sequence_is_divided_without_waiting_for_the_device(monkeypatch):
    """A sequence in one split is not merged."""
    lengths = [(1, 30)] * 4 + [(1, 10_000)] + [(1, 30)] * 4
    long, short = (make_case(n, 256, torch.float32) for n in (lengths, [(1, 256)] * 3))
    with monkeypatch.context() as patch:
        for name in ("item", "tolist", "cpu", "__bool__", "__int__", "__index__"):
            patch.setattr(torch.Tensor, name, lambda *_: pytest.fail("waits for the device"))
        plan = long.plan(TritonAttentionBackend())
    assert [part.max_splits for part in plan.ranges] == [40]
    (part,) = short.plan(TritonAttentionBackend()).ranges
    assert part.max_splits == 1 and part.partial.numel() == 0


# -- two launches: short queries, long queries

LENGTHS = [(1, 1), (1, 70), (0, 5), (1, 33), (3, 18), (9, 40), (40, 40)]


@pytest.fixture
def two_tiles(monkeypatch):
    """What belongs to the one side must not reach the other."""
    set_tiles(monkeypatch, short=TILE, long=2 * TILE)
    yield
    clear_launches()


@pytest.mark.net
@pytest.mark.sample(every=3)
@pytest.mark.parametrize(("decode_threshold", "num_shared"), [(0, 1), (1, 3), (3, 1), (40, 3)])
@pytest.mark.usefixtures("two_tiles", "poisoned_scratch")
def test_the_border_is_a_matter_of_speed(decode_threshold, num_shared, device):
    """All on one side, draft tokens to be verified among the decodes (chapter 5), sequences without
    tokens on either side."""
    lengths = sorted(LENGTHS, key=lambda lengths: lengths[0] > decode_threshold)
    triton = Triton(device, decode_threshold)
    triton.check(lengths, 4, num_kv_heads=1, num_shared=num_shared)
    triton.check([(0, 9), (0, 7)], 4)
    triton.check([], 4, num_padding_tokens=0)


@pytest.mark.net
@pytest.mark.sample(every=3, first=1)
@pytest.mark.parametrize("window", [5, 17, 64])
@pytest.mark.usefixtures("two_tiles", "poisoned_scratch")
def test_a_window_hides_its_left_on_either_side(window, device):
    """Long queries begin with the first that does not fit the smallest tile."""
    triton = Triton(device, 0)
    lengths = [(1, 1), (1, 40), (3, 20), (2, 33), (8, 8), (9, 41), (19, 30)]
    plan = triton.check(lengths, 4, window=window)
    assert [part.rows.num_seqs for part in plan.ranges] == [5, 2]


def test_each_side_has_its_own_tile_and_no_more_splits_than_it_needs(monkeypatch):
    """64 decodes and a chunk of 512 with two heads to a KV head: 16 rows a decode, not 64."""
    monkeypatch.setattr(module, "NUM_MULTIPROCESSORS", 8)
    for lengths, tiles, splits in (
        ([(1, 100)] * 64 + [(512, 512)], [16, 64], [1, 1]),
        ([(1, 30)] * 4 + [(1, 10_000)] + [(1, 30)] * 4, [16], [40]),
        ([(0, 5), (0, 9), (4, 8)], [16], [1]),  # a side without tokens is not launched
        # A short chunk with a long history does not keep one program busy: without it there are
        # tiles enough, and no sequence's keys are split.
        ([(64, 600)] * 8, [64], [1]),
        ([(64, 600)] * 8 + [(64, 30_000)], [64], [2]),
    ):
        case = on_host(make_case(lengths, 256, torch.bfloat16), 1)
        plan = case.plan(TritonAttentionBackend())
        assert [part.launch.constants["BLOCK_M"] for part in plan.ranges] == tiles
        assert [part.max_splits for part in plan.ranges] == splits


def test_what_the_kernels_cannot_do_is_refused(device):
    backend = TritonAttentionBackend()
    case, wide = (make_case([(1, 4)], 4, F32, head_dim=n, device=device) for n in (8, 300))
    turned = replace(case, key_cache=case.key_cache.transpose(0, 1))
    for message, call in (
        ("float64", lambda: replace(case, key_cache=case.key_cache.double()).plan(backend)),
        ("head_dim 300", lambda: wide.plan(backend)),
        ("contiguous", lambda: turned.attend(turned.plan(backend))),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_what_is_missing_is_said_with_what_to_do(monkeypatch):
    """Without CUDA and the interpreter; and without Triton."""
    compiled = module.triton.runtime.JITFunction(make_case)
    monkeypatch.setattr(module, "_attention_kernel", compiled)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for match in ("attention_backend='torch'.*TRITON_INTERPRET=1", "pip install triton.*='torch'"):
        with pytest.raises(RuntimeError, match=match):
            TritonAttentionBackend()
        monkeypatch.setattr(module, "HAS_TRITON", False)


def test_importing_works_without_triton_and_selecting_it_is_explained():
    with mock.patch.dict(sys.modules, {"triton": None}):
        for name in ("paged_attention_triton", "triton_or_none"):
            del sys.modules[name]
        again = importlib.import_module("paged_attention_triton")
        with pytest.raises(RuntimeError, match="pip install triton"):
            again.TritonAttentionBackend()
    assert sys.modules["paged_attention_triton"] is module is not again
