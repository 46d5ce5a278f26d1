"""The cost of a step's tokens, counted.

Every token is multiplied with every weight once, so the linear layers cost the same for a prompt
token and for a decode. Attention depends on the token's position: at position p it attends to p + 1
keys. `count_work` counts both, and keeps the pairs of decodes apart from those of chunks: a chunk
reads each key once for all its tokens, a decode for one.

    request      start  tokens    pairs
    decode         999       1    1,000        read 1,000 keys for 1,000 pairs
    chunk        1,000     100    105,050      read 1,100 keys for 105,050 pairs

`count_bytes_and_flops` converts that into memory traffic and arithmetic. A decode step moves all
weights for a few tokens and is bound by memory; a chunk is bound by arithmetic. So a chunk of
moderate size costs less in a step with decodes than alone, because the weights are read anyway.
Which size is moderate depends on the machine; `adaptive_chunks.py` finds it by the clock.

See 06_chunked_prefill/beyond/README.md"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepWork:
    """The work of a step."""

    num_tokens: int = 0
    num_decode_pairs: int = 0  # pairs of a query and a key, where one query reads the keys
    num_chunk_pairs: int = 0  # pairs where several queries share the keys
    num_keys_read: int = 0


def count_work(starts: Sequence[int], query_lens: Sequence[int]) -> StepWork:
    """The work of requests that compute positions `[start, start + query_len)`."""
    num_decode_pairs = num_chunk_pairs = 0
    for start, query_len in zip(starts, query_lens, strict=True):
        num_pairs = query_len * start + query_len * (query_len + 1) // 2
        if query_len == 1:
            num_decode_pairs += num_pairs
        else:
            num_chunk_pairs += num_pairs
    num_keys_read = sum(starts) + sum(query_lens)
    return StepWork(sum(query_lens), num_decode_pairs, num_chunk_pairs, num_keys_read)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The properties of a model on which its costs depend."""

    num_weights: int  # weights that every token is multiplied with, without the embedding table
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    bytes_per_value: int = 2


@dataclass(frozen=True, slots=True)
class HardwareWork:
    flops: int
    bytes_moved: int

    @property
    def flops_per_byte(self) -> float:
        """Arithmetic intensity: below that of the machine, memory is the limit."""
        return self.flops / self.bytes_moved


def count_bytes_and_flops(work: StepWork, shape: ModelShape) -> HardwareWork:
    """Bytes and FLOPs: weights once, keys and values read and written; two FLOPs per
    multiplication, and two products (scores, weighted values) per pair."""
    width = shape.num_heads * shape.head_dim
    num_pairs = work.num_decode_pairs + work.num_chunk_pairs
    flops = 2 * shape.num_weights * work.num_tokens + 4 * shape.num_layers * width * num_pairs
    kv_values = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim
    num_values = shape.num_weights + kv_values * (work.num_keys_read + work.num_tokens)
    return HardwareWork(flops, num_values * shape.bytes_per_value)
