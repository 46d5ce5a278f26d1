"""From block tables to the tensors of a step: where each token stands, and where its KV goes.

The tokens of all requests lie end to end, each request's at its own positions:

    tokens            | request A: 5 tokens | B: 1 | C: 1 | D: 3 tokens |
    query_start_loc   0                     5      6      7            10
    positions         | 0  1  2  3  4       | 17   | 9    | 4  5  6     |
    slot_mapping      table[position // block_size] * block_size + position % block_size

Whoever runs a model over the paged cache needs this. A step's tables are one gather from the array
in which the runner keeps them (`block_delta.py`); no list is walked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from block_delta import BlockTables
from paged_attention import AttentionMetadata


@dataclass(frozen=True, slots=True)
class Query:
    """What a request computes in a step: positions `[start, start + num_tokens)`, at least one.
    Logits are wanted of the last `num_logit_rows` of them."""

    row: int  # in the block tables
    start: int
    num_tokens: int
    num_logit_rows: int = 1


@dataclass(frozen=True, slots=True)
class ComposedBatch:
    """Tensors on the device, and what the host still has to know of them."""

    order: list[int]  # the queries as they were given, in the order of the batch
    positions: torch.Tensor  # [num_tokens] int64
    attention: AttentionMetadata
    query_start_loc: np.ndarray  # [num_queries + 1] int64
    logit_indices: np.ndarray  # [num_logit_rows] int64, into the tokens


def compose_in_order(
    tables: BlockTables, queries: Sequence[Query], block_size: int, device: torch.device
) -> ComposedBatch:
    """Lay out a step of at least one query, in the order given."""
    row, start, lens, num_logit_rows = np.array(
        [(q.row, q.start, q.num_tokens, q.num_logit_rows) for q in queries]
    ).T
    stop = start + lens
    query_start_loc = np.zeros(len(row) + 1, dtype=np.int64)
    np.cumsum(lens, out=query_start_loc[1:])

    owner = np.repeat(np.arange(len(row)), lens)  # of each token
    positions = np.arange(query_start_loc[-1]) - query_start_loc[owner] + start[owner]
    block_ids = tables.ids[row[owner], positions // block_size].astype(np.int64)
    max_seq_len = int(stop.max())
    attention = AttentionMetadata(
        query_start_loc=to_device(query_start_loc, device),
        seq_lens=to_device(stop, device),
        block_tables=to_device(tables.ids[row, : -(-max_seq_len // block_size)], device),
        slot_mapping=to_device(block_ids * block_size + positions % block_size, device),
        max_query_len=int(lens.max()),
        max_seq_len=max_seq_len,
    )
    return ComposedBatch(
        order=list(range(len(queries))),
        positions=to_device(positions, device),
        attention=attention,
        query_start_loc=query_start_loc,
        logit_indices=np.flatnonzero(positions >= (stop - num_logit_rows)[owner]),
    )


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy in fresh staging memory each time: a reused one could be overwritten while an
    asynchronous copy still reads it."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor
