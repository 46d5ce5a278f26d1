"""The bytes of a block: there and back, bit for bit, and nothing else is touched."""

from __future__ import annotations

import warnings

import pytest
import torch

from compiled_attention import HeadMajorKVCache
from kv_block_io import PagedBlockIO
from paged_attention import PagedKVCache

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16}
LAYOUTS = ((1, 3, 1, 1, 1), (2, 5, 4, 2, 8), (3, 4, 7, 3, 5), (4, 6, 16, 1, 64))


def make_cache(layout: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> PagedKVCache:
    """Filled with random bits: NaN, infinities and negative zeros among them."""
    cache = PagedKVCache(*layout, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors(cache):
        random_bytes = torch.randint(
            0, 256, (tensor.numel() * dtype.itemsize,), generator=generator, dtype=torch.uint8
        )
        tensor.copy_(random_bytes.view(dtype).view(tensor.shape))
    return cache


def tensors(cache: PagedKVCache) -> list[torch.Tensor]:
    return [*cache.key_cache, *cache.value_cache]


def bits(cache: PagedKVCache) -> list[torch.Tensor]:
    """Comparable copies: a NaN does not equal itself."""
    return [t.contiguous().view(BITS[t.dtype.itemsize]).clone() for t in tensors(cache)]


@pytest.mark.net
@pytest.mark.sample
@pytest.mark.parametrize("kind", [PagedKVCache, HeadMajorKVCache])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_block_comes_back_bit_for_bit_and_alone(layout, dtype, kind):
    """Whatever the order in memory is. Any buffer is written, and none is kept."""
    source, target = make_cache(layout, dtype), make_cache(layout, dtype, seed=1)
    other = kind(*layout, dtype=dtype)
    for tensor, contents in zip(tensors(other), tensors(source), strict=True):
        tensor.copy_(contents)
    read_from, write_to = PagedBlockIO(other), PagedBlockIO(target)
    before, given = bits(target), bits(source)
    data = read_from.read_block(1)
    assert isinstance(data, bytes) and data == PagedBlockIO(source).read_block(1)
    assert len(data) == read_from.block_nbytes == source.kv_bytes_per_block
    for buffer_type in (bytes, bytearray, memoryview):
        buffer = bytearray(data)
        write_to.write_block(2, buffer_type(buffer))
        buffer[:] = bytes(len(buffer))
        for now, old, new in zip(bits(target), before, given, strict=True):
            assert torch.equal(now[2], new[1])
            assert torch.equal(now[:2], old[:2]) and torch.equal(now[3:], old[3:])
        write_to.write_block(2, bytes(len(data)))
    read_from.write_block(2, data)
    assert read_from.read_block(2) == data
    for now, old in zip(bits(other), given, strict=True):
        unchanged = [block_id for block_id in range(layout[1]) if block_id != 2]
        assert torch.equal(now[unchanged], old[unchanged])


def test_the_layout_is_keys_and_values_of_each_layer_in_turn():
    """Bytes in a pool outlive the process that wrote them: their order is part of the contract."""
    cache = PagedKVCache(2, 3, 2, 1, 2, dtype=torch.float32)
    for number, tensor in enumerate(tensors(cache)[i] for i in (0, 2, 1, 3)):
        tensor[1] = torch.arange(4.0).view(2, 1, 2) + 4 * number
        tensor[2] = -1
    data = PagedBlockIO(cache).read_block(1)
    assert torch.frombuffer(bytearray(data), dtype=torch.float32).tolist() == list(range(16))


def test_read_only_bytes_are_copied_before_they_are_seen_as_a_tensor():
    """PyTorch warns otherwise: it knows no tensors that may not be written to."""
    io = PagedBlockIO(make_cache(LAYOUTS[1], torch.float32))
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            io.write_block(3, io.read_block(1))
    finally:
        torch.set_warn_always(always)


def test_a_wrong_block_or_length_is_refused_and_writes_nothing():
    """Block 0 is the null block, and -1 would be the last one."""
    cache = make_cache(LAYOUTS[1], torch.float32)
    io, before = PagedBlockIO(cache), bits(cache)
    data = io.read_block(4)
    for block_id in (-1, 0, 5, 6):
        message = rf"block_id must be in \[1, 5\), got {block_id}"
        with pytest.raises(ValueError, match=message):
            io.read_block(block_id)
        with pytest.raises(ValueError, match=message):
            io.write_block(block_id, data)
    for wrong in (b"", data + b"\0", data[:-1]):
        with pytest.raises(ValueError, match=f"must have {len(data)} bytes, got {len(wrong)}"):
            io.write_block(1, wrong)
    assert all(map(torch.equal, bits(cache), before))
