"""Reading and writing the bytes of a KV block, so that it can leave the engine's memory and return.

    keys of layer 0 | values of layer 0 | keys of layer 1 | ...   [block_size, kv_heads, head_dim]

Bytes can be compared, stored and checked whatever the dtype is. They are valid only for the same
model, dtype and block size, which a connector's namespace identifies. Invariant: `write_block(b,
read_block(a))` makes block b bitwise equal to block a.

See 03_prefix_cache/beyond/README.md"""

from __future__ import annotations

import torch

from paged_attention import PagedKVCache


class PagedBlockIO:
    """A `KVBlockIO` over chapter 2's KV tensors, on any device."""

    def __init__(self, kv_cache: PagedKVCache) -> None:
        self._tensors = [
            tensor
            for pair in zip(kv_cache.key_cache, kv_cache.value_cache, strict=True)
            for tensor in pair
        ]
        self.block_nbytes: int = kv_cache.kv_bytes_per_block

    @torch.inference_mode()
    def read_block(self, block_id: int) -> bytes:
        """Return `block_nbytes` bytes."""
        block = torch.stack([tensor[block_id] for tensor in self._tensors])
        return block.contiguous().view(torch.uint8).cpu().numpy().tobytes()

    @torch.inference_mode()
    def write_block(self, block_id: int, data: bytes | memoryview) -> None:
        """Overwrite a block with `block_nbytes` bytes."""
        first = self._tensors[0]
        shape = (len(self._tensors), *first.shape[1:])
        block = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(first.dtype).view(shape)
        for tensor, layer in zip(self._tensors, block, strict=True):
            tensor[block_id] = layer.to(tensor.device)
