"""Decode attention written with tensors only: it depends on nothing that a host knows.

`paged_attention.py` plans on the host: which sequences are attended together, how long the longest
one is. A graph of a step (`common/runner/graphs.py`) keeps such decisions as they were at capture,
for every step that replays it. Here every sequence is as wide as its table, and lengths are masks:

    table of 3 blocks of 4     | 7       | 2       | 0       |     0: unused, the null block
    keys that are gathered     x x x x   x x . .   . . . .         seq_len 6: the rest is hidden
    a padding row              . . . .   . . . .   . . . .         seq_len 0: all is hidden

So it reads far more than it needs, and computes in float64: it is for testing replays, not for
serving. Invariants: hidden keys reach no output, not even NaN; a slot of -1 is written to the null
block, which no request uses.

See common/README.md#graphs"""

from __future__ import annotations

import math

import torch

from paged_attention import AttentionMetadata


class TensorPlan:
    """The plan of a step in which no sequence has more than one query token. It reads no number of
    the metadata, and waits for no device."""

    def __init__(
        self, metadata: AttentionMetadata, num_heads: int, key_cache: torch.Tensor
    ) -> None:
        self.metadata = metadata
        self.slot_mapping = metadata.slot_mapping

    def write_kv(
        self,
        key: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
        value: torch.Tensor,  # the same
        key_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim], written
        value_cache: torch.Tensor,  # the same
    ) -> None:
        slots = self.slot_mapping.clamp(min=0)
        block_size = key_cache.shape[1]
        places = slots // block_size, slots % block_size
        key_cache.index_put_(places, key)
        value_cache.index_put_(places, value)

    def attend(
        self,
        query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
        key_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
        value_cache: torch.Tensor,  # the same
        scale: float,
    ) -> torch.Tensor:  # [num_tokens, num_heads, head_dim], zero for padding
        metadata = self.metadata
        tables = metadata.block_tables
        starts = metadata.query_start_loc
        num_tokens, num_heads, head_dim = query.shape
        block_size, num_kv_heads, _ = key_cache.shape[1:]
        # The sequence of each token; tokens after the last sequence are padding.
        token = torch.arange(num_tokens, dtype=starts.dtype, device=query.device)
        seq = torch.searchsorted(starts[1:], token, right=True)
        is_real = seq < tables.shape[0]
        seq = seq.clamp(max=tables.shape[0] - 1)
        seq_len = metadata.seq_lens.index_select(0, seq) * is_real
        position = torch.arange(tables.shape[1] * block_size, device=query.device)
        is_seen = position < seq_len[:, None]
        if metadata.window is not None:
            is_seen &= position >= seq_len[:, None] - metadata.window
        is_seen = is_seen[:, None, :, None]  # [num_tokens, 1, keys, 1]

        def gather(cache: torch.Tensor) -> torch.Tensor:  # [num_tokens, num_kv_heads, keys, dim]
            gathered = cache[tables.index_select(0, seq)].flatten(1, 2).transpose(1, 2)
            return torch.where(is_seen, gathered, 0).double()

        shape = num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim
        scores = query.double().view(shape) @ gather(key_cache).transpose(2, 3) * scale
        weights = scores.masked_fill(~is_seen.transpose(2, 3), -math.inf).softmax(-1)
        output = (weights @ gather(value_cache)).view(query.shape)
        return torch.where(is_real[:, None, None], output, 0).to(query.dtype)


class TensorAttentionBackend:
    """An `AttentionBackend` for decodes, on any device, in any dtype."""

    plan = staticmethod(TensorPlan)
