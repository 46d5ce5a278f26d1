"""Block tables on their way to the runner: both ends of the message.

    scheduler's side   BlockDelta         the whole table of a request once, then new blocks
    runner's side      PagedRunnerState   a row for each request: a step's tables are one gather

Neither needs a tensor: a scheduler can be imported, and tested, without PyTorch.

Invariant: after each plan the runner's table of a scheduled request is the scheduler's.

vLLM keeps such an array on the host and its copy on the device, as `InputBatch` and `BlockTable`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from input_batch import RunnerState
from kv_cache_manager import BlockMemory
from request import Request
from scheduler_books import RunnerDelta
from scheduler_interface import CachedRequestData, NewRequestData, SchedulerOutput


@dataclass(slots=True)
class _SentTable:
    block_ids: Sequence[int]  # the request's table itself, which grows
    num_blocks: int = 0  # of it that the runner knows


class BlockDelta(RunnerDelta):
    def __init__(self, kv_memory: BlockMemory) -> None:
        super().__init__()
        self._kv_memory = kv_memory
        self._tables: dict[str, _SentTable] = {}

    def forget(self, request_id: str) -> None:
        super().forget(request_id)
        self._tables.pop(request_id, None)

    def encode(self, plan: SchedulerOutput) -> None:
        super().encode(plan)
        cached, grown, none = plan.scheduled_cached_reqs, self._kv_memory.grown, []
        cached.new_block_ids = [
            self._new_block_ids(request_id) if request_id in grown else none
            for request_id in cached.req_ids
        ]

    def describe(self, request: Request) -> NewRequestData:
        data = super().describe(request)
        data.block_ids = self._new_block_ids(request.request_id)
        return data

    def _new_block_ids(self, request_id: str) -> list[int]:
        self._kv_memory.grown.discard(request_id)
        sent = self._tables.get(request_id)
        if sent is None:
            sent = self._tables[request_id] = _SentTable(self._kv_memory.get_block_ids(request_id))
        new = list(sent.block_ids[sent.num_blocks :])
        sent.num_blocks += len(new)
        return new


class BlockTables:
    """The block tables of all requests in one array, a row each."""

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

    def block_ids(self, req_id: str, first: int = 0) -> list[int]:
        """The request's block table, as it was sent, from entry `first` on."""
        return self.tables.ids[self.rows[req_id], first : self._num_blocks[req_id]].tolist()

    def _write(self, req_id: str, first: int, block_ids: Sequence[int]) -> None:
        self.tables.write(self.rows[req_id], first, block_ids)
        self._num_blocks[req_id] = first + len(block_ids)
