"""From block tables to the tensors of a step: the position of each token, and the slot for its KV.

The tokens of all requests are concatenated, each request's at its own positions:

    tokens            | request A: 5 tokens | B: 1 | C: 1 | D: 3 tokens |
    query_start_loc   0                     5      6      7            10
    positions         | 0  1  2  3  4       | 17   | 9    | 4  5  6     |
    slot_mapping      table[position // block_size] * block_size + position % block_size

A `ComposedBatch` is the only input of the model in a step, besides the cache. Tokens and tables are
gathered from the columns in which the runner keeps them (`block_delta.py`), without looping over
lists.

See 02_paged_kv/README.md#a-step-laid-out"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from block_delta import PagedRunnerState
from paged_attention import AttentionBackend, AttentionMetadata, AttentionPlan, PagedKVCache


class Queries(NamedTuple):
    """The positions that each request computes in a step: `[start, start + num_tokens)`, at least
    one. Logits are needed for the last `num_logit_rows` of them. All arrays are [num_queries]
    int64."""

    rows: np.ndarray  # rows of the runner's state
    starts: np.ndarray
    num_tokens: np.ndarray
    num_logit_rows: np.ndarray


@dataclass(slots=True)
class ComposedBatch:
    """A step on the device: the input of the model. Layers that share block tables are a group;
    most models have one group."""

    input_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64
    attention: tuple[AttentionMetadata, ...]  # for each group of layers
    logit_indices: Tensor  # [num_logit_rows] int64, into the tokens
    plans: tuple[AttentionPlan, ...] = ()  # for each group
    # [num_tokens, hidden_size], if earlier layers were computed in another process.
    hidden: Tensor | None = None
    # Data of the runner's plugins, by plugin name.
    staged: dict[str, Any] = field(default_factory=dict)

    def plan_attention(
        self, backend: AttentionBackend, num_heads: int, kv_cache: PagedKVCache
    ) -> None:
        """Plan attention once per step, before the model computes. All layers have caches of the
        same shape."""
        key_cache = kv_cache.key_cache[0]
        self.plans = tuple(backend.plan(group, num_heads, key_cache) for group in self.attention)


class StepLayout(NamedTuple):
    """A step on the host: `arrays` to copy to the device, and `compose`, which turns the copies
    into a batch."""

    order: np.ndarray  # [num_queries] the given queries, in the order of the batch
    arrays: Sequence[np.ndarray]
    compose: Callable[[Sequence[Tensor]], ComposedBatch]  # takes a tensor for each array

    def on(self, device: torch.device) -> ComposedBatch:
        return self.compose(all_to_device(device, self.arrays))


def compose_in_order(state: PagedRunnerState, queries: Queries, block_size: int) -> StepLayout:
    """Lay out a step of at least one query, in the order given."""
    row, start, lens, num_logit_rows = queries
    stop = start + lens
    order = np.arange(len(row))
    query_start_loc = np.append(0, lens.cumsum())
    owner = np.repeat(order, lens)  # index of the query of each token
    positions = np.arange(query_start_loc[-1]) - query_start_loc[owner] + start[owner]
    entries = row[owner], positions // block_size  # indices into the block tables of any group
    max_query_len, max_seq_len = int(lens.max()), int(stop.max())
    arrays = [
        state.token_ids[row[owner], positions].astype(np.int64),
        positions,
        np.flatnonzero(positions >= (stop - num_logit_rows)[owner]),
        # In the order of AttentionMetadata's fields.
        query_start_loc,
        stop,
    ]
    for block_tables in state.block_tables:  # of each group of layers
        block_ids = block_tables[entries].astype(np.int64)
        arrays.append(block_tables[row, : -(-max_seq_len // block_size)])
        arrays.append(block_ids * block_size + positions % block_size)

    def compose(tensors: Sequence[Tensor]) -> ComposedBatch:
        input_ids, positions, logit_indices, starts, seq_lens, *group_tensors = tensors
        attention = tuple(
            AttentionMetadata(
                query_start_loc=starts,
                seq_lens=seq_lens,
                block_tables=tables,
                slot_mapping=slots,
                max_query_len=max_query_len,
                max_seq_len=max_seq_len,
                query_starts=query_start_loc.tolist(),
                host_seq_lens=stop.tolist(),
            )
            for tables, slots in zip(group_tensors[::2], group_tensors[1::2], strict=True)
        )
        return ComposedBatch(input_ids, positions, attention, logit_indices)

    return StepLayout(order, arrays, compose)


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy an array to the device, through fresh staging memory each time: reused memory could be
    overwritten while an asynchronous copy still reads it."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def all_to_device(device: torch.device, arrays: Sequence[np.ndarray]) -> list[Tensor]:
    """Copy several arrays to the device at once, concatenated. Each starts at a multiple of 16
    bytes, the alignment that GPU kernels prefer."""
    if device.type != "cuda":
        return [to_device(array, device) for array in arrays]
    parts = [part for a in arrays for part in (a.tobytes(), bytes(-a.nbytes % 16))]
    packed = to_device(np.frombuffer(bytearray().join(parts), dtype=np.uint8), device)
    segments = zip(arrays, packed.split(list(map(len, parts)))[::2], strict=True)
    return [segment.view(torch.from_numpy(a).dtype).view(a.shape) for a, segment in segments]
