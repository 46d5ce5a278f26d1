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
    return [tensor.view(BITS[tensor.dtype.itemsize]).clone() for tensor in tensors(cache)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_block_comes_back_bit_for_bit_and_alone(layout, dtype):
    source, target = make_cache(layout, dtype), make_cache(layout, dtype, seed=1)
    read_from, write_to = PagedBlockIO(source), PagedBlockIO(target)
    before, given = bits(target), bits(source)
    data = read_from.read_block(1)
    assert isinstance(data, bytes)
    assert len(data) == read_from.block_nbytes == source.kv_bytes_per_block
    write_to.write_block(2, data)
    for now, old, new in zip(bits(target), before, given, strict=True):
        assert torch.equal(now[2], new[1])
        assert torch.equal(now[:2], old[:2]) and torch.equal(now[3:], old[3:])
    assert write_to.read_block(2) == data
    assert all(map(torch.equal, bits(source), given)), "reading changed something"


def test_the_layout_is_keys_and_values_of_each_layer_in_turn():
    """Bytes in a pool outlive the process that wrote them: their order is part of the contract."""
    cache = PagedKVCache(2, 3, 2, 1, 2, dtype=torch.float32)
    for number, tensor in enumerate(
        [cache.key_cache[0], cache.value_cache[0], cache.key_cache[1], cache.value_cache[1]]
    ):
        tensor[1] = torch.arange(4.0).view(2, 1, 2) + 4 * number
        tensor[2] = -1
    data = PagedBlockIO(cache).read_block(1)
    assert torch.frombuffer(bytearray(data), dtype=torch.float32).tolist() == list(range(16))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_layout_does_not_depend_on_the_order_in_memory(layout, dtype):
    plain = make_cache(layout, dtype)
    cache = HeadMajorKVCache(*layout, dtype=dtype)
    for tensor, contents in zip(tensors(cache), tensors(plain), strict=True):
        tensor.copy_(contents)
    data = PagedBlockIO(cache).read_block(1)
    assert data == PagedBlockIO(plain).read_block(1)
    for target in (cache, plain):
        PagedBlockIO(target).write_block(2, data)
    for tensor, contents in zip(tensors(cache), tensors(plain), strict=True):
        kind = BITS[dtype.itemsize]
        assert torch.equal(tensor.contiguous().view(kind), contents.view(kind))


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_buffer_is_written_and_none_is_kept(kind):
    cache = make_cache(LAYOUTS[1], torch.float32)
    io = PagedBlockIO(cache)
    buffer = bytearray(io.read_block(1))
    io.write_block(3, kind(buffer))
    expected = bytes(buffer)
    buffer[:] = bytes(len(buffer))
    assert io.read_block(3) == expected


def test_read_only_bytes_are_copied_before_they_are_seen_as_a_tensor():
    """PyTorch warns otherwise: it knows no tensors that may not be written to."""
    io = PagedBlockIO(make_cache(LAYOUTS[1], torch.float32))
    data = io.read_block(1)
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            io.write_block(3, data)
    finally:
        torch.set_warn_always(always)


@pytest.mark.parametrize("block_id", [-1, 0, 5, 6])
def test_a_block_that_is_not_there_is_an_error(block_id):
    """Block 0 is the null block, and -1 would be the last one."""
    cache = make_cache(LAYOUTS[1], torch.float32)
    io, before = PagedBlockIO(cache), bits(cache)
    data = io.read_block(4)
    with pytest.raises(ValueError, match=rf"block_id must be in \[1, 5\), got {block_id}"):
        io.read_block(block_id)
    with pytest.raises(ValueError, match=rf"block_id must be in \[1, 5\), got {block_id}"):
        io.write_block(block_id, data)
    assert all(map(torch.equal, bits(cache), before))


@pytest.mark.parametrize("num_bytes", [0, 1, -1])
def test_data_of_another_length_is_an_error_and_writes_nothing(num_bytes):
    cache = make_cache(LAYOUTS[1], torch.float32)
    io, before = PagedBlockIO(cache), bits(cache)
    length = io.block_nbytes + num_bytes if num_bytes else 0
    with pytest.raises(ValueError, match=f"data must have {io.block_nbytes} bytes, got {length}"):
        io.write_block(1, bytes(length))
    assert all(map(torch.equal, bits(cache), before))
