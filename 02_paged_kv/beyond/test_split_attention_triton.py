"""Both versions of the kernels against float64: on a GPU if there is one, else in the interpreter
(`conftest.py` switches it on)."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

import paged_attention_triton as version_1
import split_attention_triton as module
from kernel_launch import DecodeTuning
from paged_attention_triton import TritonAttentionBackend, write_kv_triton
from split_attention_triton import SplitTritonAttentionBackend
from test_compiled_attention import TOLERANCE as PRECISE
from test_compiled_attention import head_major
from test_paged_attention import (  # noqa: F401  of the contract
    Attention,
    Case,
    Lengths,
    decode_alone,
    make_case,
    test_each_query_attends_to_what_it_sees,
    test_written_tokens_stand_in_their_slots_and_nothing_else_changes,
)
from test_window_attention import give_up_blocks

F32 = torch.float32
TILE = 16  # the smallest that a kernel can multiply
BOTH = pytest.mark.parametrize("backend", [TritonAttentionBackend, SplitTritonAttentionBackend])


class Triton(Attention):
    """A kernel, on a device."""

    def __init__(self, backend: type[TritonAttentionBackend], device: torch.device | str) -> None:
        self.backend = backend
        self.device = device

    def make_case(self, lengths: Lengths, block_size: int, **options: Any) -> Case:
        options = {"dtype": F32, "device": self.device} | options
        return super().make_case(lengths, block_size, **options)

    def make_backend(self, case: Case) -> TritonAttentionBackend:
        case.tolerance = PRECISE
        return self.backend()

    def attend(self, case: Case) -> torch.Tensor:
        return case.attend(case.plan(self.backend()))

    def check(self, lengths: Lengths, block_size: int, **options: Any) -> Any:
        return self.check_case(give_up_blocks(self.make_case(lengths, block_size, **options)))

    def check_case(self, case: Case) -> Any:
        """One layer: a kernel takes long here."""
        plan = case.plan(self.make_backend(case))
        case.check(case.attend(plan))
        return plan


@pytest.fixture
def split(device) -> Triton:
    return Triton(SplitTritonAttentionBackend, device)


class Thinned(Triton):
    def check(self, lengths: Lengths, block_size: int, **options: Any) -> Any:
        """The interpreter is too slow for every sequence of the contract's batches."""
        every = 3 if torch.device(self.device).type == "cpu" else 1
        return super().check(lengths[::every], block_size, **options)


@pytest.fixture(params=[TritonAttentionBackend, SplitTritonAttentionBackend])
def attention(request, device, small_tiles, poisoned_scratch) -> Triton:  # of the contract
    return Thinned(request.param, device)


def set_tiles(monkeypatch, short: int = TILE, long: int = TILE, keys: int = TILE) -> None:
    """Small ones, which the interpreter is not slow with, and splits of two of them."""

    def choose(shape, is_short):
        return (short if is_short else long), keys, 4

    clear_launches()
    monkeypatch.setattr(module, "PLANNED_AT_ONCE", 16)
    monkeypatch.setattr(version_1, "choose_tile", choose)
    monkeypatch.setattr(TritonAttentionBackend, "tuning", DecodeTuning(split_keys=2 * keys))


def clear_launches() -> None:
    version_1.attention_launch.cache_clear()
    module.plan_launch.cache_clear()


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
@pytest.mark.sample(every=3, first=1)
@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.usefixtures("small_tiles", "poisoned_scratch")
def test_every_query_length_and_history_around_tile_split_and_block_borders(block_size, split):
    """Trap 35: NaN in every unused slot is never read. Trap 28: a chunk sees its own end and
    nothing after it. Trap 30: chunks that end where a block, a tile or a split ends."""
    tile_tokens = TILE // 2  # two heads share a KV head
    query_lens = (0, 1, 2, tile_tokens - 1, tile_tokens, tile_tokens + 1)
    histories = (0, 1, TILE - 1, TILE, 2 * TILE - 1, 2 * TILE, 2 * TILE + 1)
    lengths = [(q, q + h) for q in query_lens for h in histories]
    lengths += [(q, 2 * TILE) for q in query_lens]
    random.Random(block_size).shuffle(lengths)
    if split.device.type == "cpu":
        lengths = lengths[::2]
    for chosen in (lengths, [(min(q, 1), n) for q, n in lengths]):  # long queries; decodes
        split.check(chosen, block_size, num_kv_heads=1)


@pytest.mark.usefixtures("small_tiles", "poisoned_scratch")
def test_a_row_may_see_nothing_of_the_splits_that_are_merged_first(split, monkeypatch):
    monkeypatch.setattr(module, "SPLITS_AT_ONCE", 1)
    split.check([(40, 44)], 4, window=5, num_kv_heads=1, num_shared=1)


@pytest.mark.sample(every=2, first=1)
@pytest.mark.parametrize(
    "tuning",
    [
        DecodeTuning(split_keys=512, tile_keys=128, num_warps=8, num_stages=5),
        DecodeTuning(split_keys=64, tile_keys=128, heads_fastest=False, num_programs=6),
        DecodeTuning(split_keys=1024, tile_keys=32, num_stages=4),
        DecodeTuning(split_keys=96, tile_keys=64, heads_fastest=False),
    ],
)
def test_any_tuning_is_correct(tuning, split, monkeypatch):
    """Splits that are not a multiple of a tile included; programs that take one item after the
    other, where a bound says that there could be many more, as in a graph of a step."""
    monkeypatch.setattr(TritonAttentionBackend, "tuning", tuning)
    case = split.make_case([(1, 700), (0, 9), (1, 20), (1, 129), (1, 1)], 16, head_dim=16)
    case.metadata.max_seq_len = 2048
    (items,) = split.check_case(case).items
    assert items.launch.constants["BLOCK_N"] == tuning.tile_keys
    assert items.launch.constants["LOOPS"] == (tuning.num_programs == 6)


@pytest.mark.sample(every=2, first=1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("small_tiles")
def test_a_decode_has_the_same_bits_alone_and_in_any_crowd(dtype, split):
    """The length of a split depends on no other sequence."""
    lengths = [(1, 90), (1, 3), (1, 200), (1, 33)]
    case = split.make_case(lengths, 4, dtype=dtype, num_padding_tokens=0)
    together = split.attend(case)
    for row in range(len(lengths)):
        assert torch.equal(split.attend(decode_alone(case, row))[0], together[row])


@BOTH
@pytest.mark.usefixtures("small_tiles")
def test_memory_may_lie_in_either_order_and_a_query_in_a_projection(backend, device):
    triton = Triton(backend, device)
    case = triton.make_case([(1, 33), (9, 40), (3, 18)], 4, num_padding_tokens=0)
    expected = triton.attend(case)
    case.key_cache, case.value_cache = head_major(case.key_cache), head_major(case.value_cache)
    assert torch.equal(triton.attend(case), expected)
    case.query = torch.cat([case.query, case.query * math.nan], 1)[:, :4]
    assert torch.equal(triton.attend(case), expected)


@BOTH
@pytest.mark.usefixtures("small_tiles")
def test_offsets_beyond_32_bits(backend):
    """A cache of 2**31 elements and more, most of them untouched: the operating system allocates
    memory page by page."""
    triton = Triton(backend, torch.device("cpu"))
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
    slots = torch.tensor([num_blocks * 16 - 1, first * 16])
    key = torch.ones(2, *shape[1:], dtype=torch.float16)
    write_kv_triton(key, 2 * key, case.key_cache, case.value_cache, slots)
    assert torch.equal(case.key_cache[-1, -1], key[0])
    assert torch.equal(case.value_cache[first, 0], 2 * key[0])


def untouched_memory(num_elements: int) -> torch.Tensor:
    import mmap

    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    return torch.frombuffer(mmap.mmap(-1, 2 * num_elements, flags=flags), dtype=torch.float16)


def test_a_long_sequence_is_divided_without_waiting_for_the_device(monkeypatch):
    """Version 1 has one program a KV head for its 10,000 keys. A sequence in one split is not
    merged."""
    lengths = [(1, 30)] * 4 + [(1, 10_000)] + [(1, 30)] * 4
    long, short = (make_case(n, 256, torch.float32) for n in (lengths, [(1, 256)] * 3))
    with monkeypatch.context() as patch:
        for name in ("item", "tolist", "cpu", "__bool__", "__int__", "__index__"):
            patch.setattr(torch.Tensor, name, lambda *_: pytest.fail("waits for the device"))
        plan = long.plan(SplitTritonAttentionBackend())
    (items,) = plan.items
    assert items.first_item.diff().tolist() == [1] * 4 + [40] + [1] * 4
    assert items.item_seq[:48].tolist() == [0, 1, 2, 3, *[4] * 40, 5, 6, 7, 8]
    assert short.plan(SplitTritonAttentionBackend()).items[0].partial.numel() == 0


@BOTH
def test_what_the_kernels_cannot_do_is_refused(backend, device):
    check_refusals(backend(), device)
    with pytest.raises(ValueError, match=r"float32_precision must .*'ieee' .*'tf32x3', got 'tf32'"):
        SplitTritonAttentionBackend("tf32")


def check_refusals(backend: TritonAttentionBackend, device: str) -> None:
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
    compiled = version_1.triton.runtime.JITFunction(make_case)
    monkeypatch.setattr(version_1, "_write_kv_kernel", compiled)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for match in ("attention_backend='torch'.*TRITON_INTERPRET=1", "pip install triton.*='torch'"):
        with pytest.raises(RuntimeError, match=match):
            TritonAttentionBackend()
        monkeypatch.setattr(version_1, "HAS_TRITON", False)
