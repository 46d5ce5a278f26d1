"""The bytes of a block: there and back, bit for bit, and nothing else is touched."""

from __future__ import annotations

import pytest
import torch

from compiled_attention import HeadMajorKVCache
from kv_block_io import PagedBlockIO
from paged_attention import PagedKVCache

BITS = {torch.float64: torch.int64, torch.float32: torch.int32, torch.bfloat16: torch.int16}
LAYOUTS = ((2, 5, 4, 2, 8), (3, 4, 7, 3, 5), (1, 3, 1, 1, 1))


def make_cache(kind: type[PagedKVCache], layout, dtype: torch.dtype, seed: int) -> PagedKVCache:
    """Filled with random bits: NaN, infinities and negative zeros among them."""
    cache = kind(*layout, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    for tensor in (*cache.key_cache, *cache.value_cache):
        size = (tensor.numel() * dtype.itemsize,)
        random_bytes = torch.randint(0, 256, size, generator=generator, dtype=torch.uint8)
        tensor.copy_(random_bytes.view(dtype).view(tensor.shape))
    return cache


def bits(cache: PagedKVCache) -> torch.Tensor:
    """A comparable copy, by block: a NaN does not equal itself."""
    tensors = [t.contiguous().view(BITS[t.dtype]) for t in (*cache.key_cache, *cache.value_cache)]
    return torch.stack(tensors).transpose(0, 1)


@pytest.mark.net
@pytest.mark.sample
@pytest.mark.parametrize("kind", [PagedKVCache, HeadMajorKVCache])
@pytest.mark.parametrize("dtype", BITS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_block_comes_back_bit_for_bit_and_alone(layout, dtype, kind):
    """Whatever the order in memory is. Any buffer is written, and none is kept."""
    source = make_cache(kind, layout, dtype, 0)
    target = make_cache(PagedKVCache, layout, dtype, 1)
    read_from = PagedBlockIO(source)
    write_to = PagedBlockIO(target)
    before = bits(target)
    data = read_from.read_block(1)
    assert len(data) == read_from.block_nbytes == source.kv_bytes_per_block
    for buffer_type in (bytes, bytearray, memoryview):
        buffer = bytearray(data)
        write_to.write_block(2, buffer_type(buffer))
        buffer[:] = bytes(len(buffer))
        before[2] = bits(source)[1]
        assert torch.equal(bits(target), before)
    assert write_to.read_block(2) == data
    read_from.write_block(2, data)
    assert read_from.read_block(2) == data


def test_the_layout_is_keys_and_values_of_each_layer_in_turn():
    """Bytes in a pool outlive the process that wrote them: their order is part of the contract."""
    cache = PagedKVCache(2, 3, 2, 1, 2, dtype=torch.float32)
    tensors = [tensor for pair in zip(cache.key_cache, cache.value_cache) for tensor in pair]
    for number, tensor in enumerate(tensors):
        tensor[1] = torch.arange(4.0).view(2, 1, 2) + 4 * number
    data = PagedBlockIO(cache).read_block(1)
    assert torch.frombuffer(bytearray(data), dtype=torch.float32).tolist() == list(range(16))
