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

from common.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class Cost:
    num_bytes: int
    num_flops: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.num_bytes + other.num_bytes, self.num_flops + other.num_flops)


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Measured. Units of 1e9 bytes and 1e12 operations a second."""

    gb_per_s: float
    tflop_per_s: float

    def floor_ms(self, cost: Cost) -> float:
        in_bytes = cost.num_bytes / (self.gb_per_s * 1e6)
        return max(in_bytes, cost.num_flops / (self.tflop_per_s * 1e9))

    def is_bound_by_memory(self, cost: Cost) -> bool:
        return cost.num_bytes * self.tflop_per_s * 1e3 >= cost.num_flops * self.gb_per_s

    def describe(self, cost: Cost) -> dict[str, Any]:
        """As a record has it."""
        return {
            "bytes": cost.num_bytes,
            "flops": cost.num_flops,
            "floor_ms": round(self.floor_ms(cost), 6),
            "is_bound_by_memory": self.is_bound_by_memory(cost),
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


def attention_cost(heads: Heads, lengths: Sequence[tuple[int, int]], block_size: int) -> Cost:
    """Of `(query tokens, keys)` of each sequence, causal. All keys and values, queries and outputs
    once, and a table entry a block."""
    num_tokens = sum(query_len for query_len, _ in lengths)
    num_keys = sum(seq_len for _, seq_len in lengths)
    num_blocks = sum(-(-seq_len // block_size) for _, seq_len in lengths)
    # Query i of q sees the keys up to its own: k - q + 1, ..., k.
    num_pairs = sum(q * k - q * (q - 1) // 2 for q, k in lengths)
    num_bytes = num_keys * heads.kv_bytes + 2 * num_tokens * heads.query_bytes + 4 * num_blocks
    # A score and a weighted value are head_dim multiplications each.
    return Cost(num_bytes, 4 * num_pairs * heads.num_heads * heads.head_dim)


def merge_cost(heads: Heads, num_splits: Sequence[int]) -> Cost:
    """Of decodes whose keys are in so many splits each: a partial result in float32 and its
    log-sum-exp for each head, the output. A sequence of one split is not merged."""
    merged = [n for n in num_splits if n > 1]
    partial = sum(merged) * heads.num_heads * (heads.head_dim + 1) * 4
    return Cost(partial + len(merged) * heads.query_bytes)


def write_kv_cost(heads: Heads, num_tokens: int) -> Cost:
    """Read and written, and a slot of 8 bytes."""
    return Cost(num_tokens * (2 * heads.kv_bytes + 8))


def add_rms_norm_cost(hidden_size: int, itemsize: int, num_tokens: int) -> Cost:
    """Two read and two written, and the weight."""
    return Cost((4 * num_tokens + 1) * hidden_size * itemsize)


def rotate_and_write_cost(heads: Heads, num_tokens: int) -> Cost:
    """All heads read and written, a row of cosines and sines, a position, a slot; the weight."""
    all_heads = heads.query_bytes + heads.kv_bytes
    row = heads.head_dim * heads.itemsize
    weight = (heads.num_heads + heads.num_kv_heads) * row
    return Cost(num_tokens * (2 * all_heads + row + 16) + weight)


def silu_and_multiply_cost(inner_size: int, itemsize: int, num_tokens: int) -> Cost:
    return Cost(3 * num_tokens * inner_size * itemsize)


def rejection_cost(
    vocab_size: int, itemsize: int, num_requests: int, num_rejecting: int, num_drafts: int
) -> Cost:
    """A row of p for each request and one of q for each that rejects a draft; of all drafts the
    id, p, q and a number; the tokens."""
    rows = (num_requests + num_rejecting) * vocab_size * itemsize
    each_draft = 8 + 2 * itemsize + 8
    # Places of rows, numbers of their own, how many tokens, and the tokens.
    each_request = 8 + 8 + 8 + 8
    return Cost(rows + num_drafts * (each_draft + 8) + num_requests * each_request)


def matching_cost(num_requests: int, num_drafts: int) -> Cost:
    """Ids of samples and drafts read, places of rows; tokens and how many of them written."""
    num_rows = num_requests + num_drafts
    return Cost(8 * (num_rows + num_drafts + num_requests + num_rows + num_requests))


def sampling_cost(vocab_size: int, itemsize: int, num_rows: int) -> Cost:
    """Each row of logits once, its uniform number, its token."""
    return Cost(num_rows * (vocab_size * itemsize + 16))


# -- a whole decode step


def num_matrix_weights(config: ModelConfig) -> int:
    """Of all matrices that a step multiplies with: those of the layers, and the head."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size = config.num_attention_heads * config.head_dim
    kv_size = config.num_key_value_heads * config.head_dim
    qkv_and_o = hidden * (q_size + 2 * kv_size) + q_size * hidden
    layer = qkv_and_o + hidden * 2 * inner + inner * hidden
    return config.num_hidden_layers * layer + config.vocab_size * hidden


def decode_cost(config: ModelConfig, itemsize: int, seq_lens: Sequence[int]) -> Cost:
    """One token for each sequence: every matrix once, all keys and values, the new ones included,
    and the rows of the embedding. `seq_lens` count the new token. Left out because they are small
    or need not leave the chip: norms, activations, logits, tables."""
    heads, num_seqs = Heads.of(config, itemsize), len(seq_lens)
    num_weights = num_matrix_weights(config)
    num_bytes = num_weights * itemsize + num_seqs * config.hidden_size * itemsize
    num_bytes += config.num_hidden_layers * heads.kv_bytes * sum(seq_lens)
    attention = 4 * heads.num_heads * heads.head_dim * sum(seq_lens)
    num_flops = 2 * num_seqs * num_weights + config.num_hidden_layers * attention
    return Cost(num_bytes, num_flops)


def kv_bytes_per_token(config: ModelConfig, itemsize: int) -> int:
    """In all layers."""
    return config.num_hidden_layers * Heads.of(config, itemsize).kv_bytes
