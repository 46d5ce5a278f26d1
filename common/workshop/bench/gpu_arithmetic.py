"""What a kernel or a decode step has to move and to multiply at least, counted.

    bytes    every input read once, every output written once, nothing in between
    flops    a multiplication and an addition are two

The larger of bytes / bandwidth and flops / matrix rate is the floor: no version is faster. A share
of the roofline is floor / measured time. Both rates are measured in the same run, by a large copy,
which counts what it reads and what it writes, and by a large matrix product in bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from common.model_config import ModelConfig

Lengths = Sequence[tuple[int, int]]  # (query tokens, keys) of each sequence


@dataclass(frozen=True, slots=True)
class Cost:
    num_bytes: int
    num_flops: int = 0


def moved(*tensors: torch.Tensor) -> Cost:
    """Of a kernel that only reads and writes: each of these once, whole."""
    return Cost(sum(tensor.nbytes for tensor in tensors))


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Measured. Units of 1e9 bytes and 1e12 operations a second."""

    gb_per_s: float
    tflop_per_s: float

    def describe(self, cost: Cost) -> dict[str, Any]:
        """As a record has it."""
        reading = cost.num_bytes / (self.gb_per_s * 1e6)
        multiplying = cost.num_flops / (self.tflop_per_s * 1e9)
        return {
            "bytes": cost.num_bytes,
            "flops": cost.num_flops,
            "floor_ms": round(max(reading, multiplying), 6),
            "is_bound_by_memory": reading >= multiplying,
        }


@dataclass(frozen=True, slots=True)
class Heads:
    """Of one layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    itemsize: int

    @classmethod
    def of(cls, config: ModelConfig, itemsize: int) -> Heads:
        heads = config.num_attention_heads, config.num_key_value_heads
        return cls(*heads, config.head_dim, itemsize)

    @property
    def query_bytes(self) -> int:
        """Of a token."""
        return self.num_heads * self.head_dim * self.itemsize

    @property
    def kv_bytes(self) -> int:
        """Of a token: its key and its value."""
        return 2 * self.num_kv_heads * self.head_dim * self.itemsize


def attention_cost(heads: Heads, lengths: Lengths, block_size: int) -> Cost:
    """Causal. All keys and values, queries and outputs once, and a table entry a block."""
    num_tokens = sum(query_len for query_len, _ in lengths)
    num_keys = sum(seq_len for _, seq_len in lengths)
    num_blocks = sum(-(-seq_len // block_size) for _, seq_len in lengths)
    # Query i of q sees the keys up to its own: k - q + 1, ..., k.
    num_pairs = sum(q * k - q * (q - 1) // 2 for q, k in lengths)
    num_bytes = num_keys * heads.kv_bytes + 2 * num_tokens * heads.query_bytes + 4 * num_blocks
    # A score and a weighted value are head_dim multiplications each.
    return Cost(num_bytes, 4 * num_pairs * heads.num_heads * heads.head_dim)


def decode_cost(
    config: ModelConfig, num_weights: int, itemsize: int, seq_lens: Sequence[int]
) -> Cost:
    """One token for each sequence: every matrix once (`num_weights` in all), all keys and values,
    the new ones included, and the rows of the embedding. `seq_lens` count the new token. Left out
    because they are small or need not leave the chip: norms, activations, logits, tables."""
    heads, num_seqs = Heads.of(config, itemsize), len(seq_lens)
    num_bytes = num_weights * itemsize + num_seqs * config.hidden_size * itemsize
    num_bytes += config.num_hidden_layers * heads.kv_bytes * sum(seq_lens)
    attention = 4 * heads.num_heads * heads.head_dim * sum(seq_lens)
    num_flops = 2 * num_seqs * num_weights + config.num_hidden_layers * attention
    return Cost(num_bytes, num_flops)
