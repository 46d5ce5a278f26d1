"""From block tables to the tensors of a step: where each token stands, and where its KV goes.

The tokens of all requests lie end to end, each request's at its own positions:

    tokens            | request A: 5 tokens | B: 1 | C: 1 | D: 3 tokens |
    query_start_loc   0                     5      6      7            10
    positions         | 0  1  2  3  4       | 17   | 9    | 4  5  6     |
    slot_mapping      table[position // block_size] * block_size + position % block_size

Whoever runs a model over the paged cache needs this. Tables are kept in one array, a row for each
request, so that a step's tables are one gather and no list is walked.

vLLM keeps such an array on the host and its copy on the device, as `InputBatch` and `BlockTable`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from input_batch import RunnerState
from paged_attention import AttentionMetadata
from scheduler_interface import CachedRequestData, NewRequestData


class BlockTables:
    """The block tables of all requests in one array, a row each. Grows when rows run out."""

    def __init__(self, num_rows: int, num_columns: int) -> None:
        self.ids = np.zeros((num_rows, num_columns), dtype=np.int32)  # 0: the null block
        self._free_rows = list(range(num_rows - 1, -1, -1))

    def take_row(self) -> int:
        if not self._free_rows:  # more requests remembered than run at once: some were preempted
            num_rows = len(self.ids)
            self.ids = np.concatenate([self.ids, np.zeros_like(self.ids)])
            self._free_rows = list(range(2 * num_rows - 1, num_rows - 1, -1))
        return self._free_rows.pop()

    def release_row(self, row: int) -> None:
        self._free_rows.append(row)

    def write(self, row: int, first_column: int, block_ids: Sequence[int]) -> None:
        if block_ids:
            self.ids[row, first_column : first_column + len(block_ids)] = block_ids


class PagedRunnerState(RunnerState):
    """Chapter 1's copies of the requests, and a row of `tables` for each."""

    def __init__(self, max_num_seqs: int, max_blocks_per_request: int) -> None:
        super().__init__()
        self.tables = BlockTables(max_num_seqs, max_blocks_per_request)
        self.rows: dict[str, int] = {}
        self._num_blocks: dict[str, int] = {}  # of its table that are known

    def admit(self, new: NewRequestData) -> None:
        super().admit(new)
        self.rows[new.req_id] = self.tables.take_row()
        self._write(new.req_id, 0, new.block_ids)

    def append(self, req_id: str, changes: CachedRequestData, index: int) -> None:
        super().append(req_id, changes, index)
        block_ids = changes.new_block_ids[index]
        if block_ids:
            is_sent_whole = req_id in changes.resumed_req_ids
            self._write(req_id, 0 if is_sent_whole else self._num_blocks[req_id], block_ids)

    def release(self, req_id: str) -> None:
        super().release(req_id)
        self.tables.release_row(self.rows.pop(req_id))
        del self._num_blocks[req_id]

    def block_ids(self, req_id: str) -> list[int]:
        """The request's block table, as it was sent."""
        return self.tables.ids[self.rows[req_id], : self._num_blocks[req_id]].tolist()

    def _write(self, req_id: str, first: int, block_ids: Sequence[int]) -> None:
        self.tables.write(self.rows[req_id], first, block_ids)
        self._num_blocks[req_id] = first + len(block_ids)


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """Tensors on the device, and what the host still has to know of them."""

    positions: torch.Tensor  # [num_tokens] int64
    attention: AttentionMetadata
    query_start_loc: np.ndarray  # [num_requests + 1] int64


def lay_out(
    tables: BlockTables,
    rows: Sequence[int],
    starts: Sequence[int],
    query_lens: Sequence[int],
    block_size: int,
    device: torch.device,
) -> BatchLayout:
    """Positions `[starts[i], starts[i] + query_lens[i])` of the request in row `rows[i]`, for each
    i. There is at least one request, and each query has at least one token."""
    start, lens, row = np.array(starts), np.array(query_lens), np.array(rows)
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
    return BatchLayout(to_device(positions, device), attention, query_start_loc)


@dataclass(frozen=True, slots=True)
class Query:
    """What a request computes in a step: positions `[start, start + num_tokens)`. Logits are wanted
    of the last `num_logit_rows` of them."""

    row: int  # in the block tables
    start: int
    num_tokens: int
    num_logit_rows: int = 1


@dataclass(frozen=True, slots=True)
class ComposedBatch:
    order: list[int]  # the queries as they were given, in the order of the batch
    positions: torch.Tensor  # [num_tokens] int64
    attention: AttentionMetadata
    query_start_loc: np.ndarray  # [num_queries + 1] int64
    logit_indices: np.ndarray  # [num_logit_rows] int64, into the tokens


def compose_in_order(
    tables: BlockTables, queries: Sequence[Query], block_size: int, device: torch.device
) -> ComposedBatch:
    """Lay out a step of at least one query, in the order given."""
    starts, lens = [q.start for q in queries], [q.num_tokens for q in queries]
    layout = lay_out(tables, [q.row for q in queries], starts, lens, block_size, device)
    ends = layout.query_start_loc[1:].tolist()
    indices = [np.arange(end - q.num_logit_rows, end) for q, end in zip(queries, ends, strict=True)]
    return ComposedBatch(
        list(range(len(queries))),
        layout.positions,
        layout.attention,
        layout.query_start_loc,
        np.concatenate(indices),
    )


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy in fresh staging memory each time: a reused one could be overwritten while an
    asynchronous copy still reads it."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor
