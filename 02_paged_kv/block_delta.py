"""Block tables on their way to the runner: both ends of the message.

    scheduler's side   BlockDeltaEncoder         the whole table of a request once, then new blocks
    runner's side      PagedRunnerState   columns with a row for each request:

          row   token_ids         num_prompt_tokens   num_tokens   block_tables   num_blocks
          0     7 1 4 4 9 9 2 .   4                   7            5 2 . .        2
          1     3 8 6 . . . . .   2                   3            9 . . .        1

Layers can be in groups with a block table each; here there is one group. So the message has a tuple
of tables per request, and the last two columns exist per group (`TableColumns`). Neither side needs
a tensor, so a scheduler can be imported, and tested, without PyTorch.

Invariant: after each plan, the runner's tokens and tables of a scheduled request equal the
scheduler's. vLLM keeps such arrays on the host, in `InputBatch`, and copies of some on the device.

See 02_paged_kv/README.md#tables-travel-and-become-columns"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain

import numpy as np

from base_scheduler import DeltaEncoder
from input_batch import RunnerRequest, RunnerState
from kv_cache_manager import KVCacheManager
from request import Request
from scheduler_interface import CachedRequestData, NewRequestData, SchedulerOutput


class BlockDeltaEncoder(DeltaEncoder):
    def __init__(self, kv_memory: KVCacheManager) -> None:
        super().__init__()
        self._kv_memory = kv_memory
        # Number of blocks that the runner knows, for each table.
        self._num_blocks: dict[str, list[int]] = {}

    def remove_request(self, request_id: str) -> None:
        super().remove_request(request_id)
        self._num_blocks.pop(request_id, None)

    def encode(self, plan: SchedulerOutput) -> None:
        super().encode(plan)
        cached = plan.scheduled_cached_reqs
        changed_ids = self._kv_memory.req_ids_with_new_blocks
        cached.new_block_ids = [
            self.new_block_ids(request_id) if request_id in changed_ids else ()
            for request_id in cached.req_ids
        ]

    def make_new_request_data(self, request: Request) -> NewRequestData:
        data = super().make_new_request_data(request)
        data.block_ids = self.new_block_ids(request.request_id)
        return data

    def new_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """The blocks of each of the request's tables that the runner does not know yet. Marks them
        as sent."""
        self._kv_memory.req_ids_with_new_blocks.discard(request_id)
        tables = self._kv_memory.get_tables(request_id)
        known = self._num_blocks.get(request_id) or [0] * len(tables)
        self._num_blocks[request_id] = list(map(len, tables))
        return tuple(list(ids[n:]) for ids, n in zip(tables, known, strict=True))


class RequestRow(RunnerRequest):
    """Chapter 1's copy of a request, read from the columns on access."""

    def __init__(self, state: PagedRunnerState, row: int, new: NewRequestData) -> None:
        self.req_id = new.req_id
        self.params = new.sampling_params
        self.state = state
        self.row = row

    @property
    def num_tokens(self) -> int:
        return int(self.state.num_tokens[self.row])

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.tokens(0, self.state.num_prompt_tokens[self.row])

    @property
    def output_token_ids(self) -> list[int]:
        return self.tokens(self.state.num_prompt_tokens[self.row], self.num_tokens)

    def tokens(self, start: int, stop: int) -> list[int]:
        return self.state.token_ids[self.row, start : min(stop, self.num_tokens)].tolist()


class TableColumns:
    """The block tables of one group of layers, with a row for each request."""

    def __init__(self, max_blocks_per_request: int) -> None:
        self.block_tables = np.zeros((0, max_blocks_per_request), dtype=np.int32)  # 0: null block
        self.num_blocks = np.zeros(0, dtype=np.int64)

    def admit(self, row: int, block_ids: Sequence[int]) -> None:
        self.num_blocks[row] = len(block_ids)
        self.block_tables[row, : len(block_ids)] = block_ids

    def append(
        self, rows: np.ndarray, is_new: Sequence[bool], block_ids: Sequence[Sequence[int]]
    ) -> None:
        """Append `block_ids[i]` to the table of row `rows[i]`, or replace the whole table if
        `is_new[i]` is false."""
        start_columns = self.num_blocks[rows] * is_new  # 0 if the whole table was sent
        self.num_blocks[rows] = _scatter_lists(self.block_tables, rows, start_columns, block_ids)

    def grow(self, num_rows: int) -> None:
        self.block_tables = _grow_rows(self.block_tables, num_rows)
        self.num_blocks = _grow_rows(self.num_blocks, num_rows)


class PagedRunnerState(RunnerState):
    """Chapter 1's state with block tables, stored in columns, so that all changes of a plan are
    written together. A request has an object only for callers that access a single request."""

    def __init__(self, max_num_seqs: int, max_blocks_per_request: int, num_groups: int = 1) -> None:
        super().__init__()
        self.row_of: dict[str, int] = {}
        self.token_ids = np.zeros((0, 0), dtype=np.int32)  # prompt, then outputs
        self.num_tokens, self.num_prompt_tokens = np.zeros((2, 0), dtype=np.int64)
        self.groups = tuple(TableColumns(max_blocks_per_request) for _ in range(num_groups))
        self._free_rows: list[int] = []
        self.grow(max_num_seqs)

    def rows_of(self, req_ids: Collection[str]) -> np.ndarray:
        return np.fromiter(map(self.row_of.__getitem__, req_ids), np.int64, len(req_ids))

    def block_ids(self, req_id: str, first: int = 0, group: int = 0) -> list[int]:
        """The request's block table in a group of layers, as it was sent, from entry `first` on."""
        row, columns = self.row_of[req_id], self.groups[group]
        return columns.block_tables[row, first : columns.num_blocks[row]].tolist()

    def admit(self, new: NewRequestData) -> None:
        if not self._free_rows:  # more requests than run at a time: some were preempted
            self.grow(2 * len(self.num_tokens))
        row = self.row_of[new.req_id] = self._free_rows.pop()
        self.requests[new.req_id] = RequestRow(self, row, new)
        num_tokens = len(new.prompt_token_ids)
        self.widen(num_tokens)
        self.token_ids[row, :num_tokens] = new.prompt_token_ids
        self.num_tokens[row] = self.num_prompt_tokens[row] = num_tokens
        tables = new.block_ids or [()] * len(self.groups)
        for group, block_ids in zip(self.groups, tables, strict=True):
            group.admit(row, block_ids)

    def append(self, changes: CachedRequestData) -> None:
        rows = self.rows_of(changes.req_ids)
        tokens = changes.new_token_ids
        stops = self.num_prompt_tokens[rows] + np.array(changes.num_output_tokens, dtype=np.int64)
        start_columns = stops - _lengths(tokens)  # some tokens may be known already and sent again
        self.num_tokens[rows] = self.write_tokens(rows, start_columns, tokens)
        changed = [i for i, tables in enumerate(changes.new_block_ids) if tables]
        if changed:
            is_new = [changes.req_ids[i] not in changes.resumed_req_ids for i in changed]
            of_groups = zip(*(changes.new_block_ids[i] for i in changed), strict=True)
            for group, block_ids in zip(self.groups, of_groups, strict=True):
                group.append(rows[changed], is_new, block_ids)

    def release(self, req_id: str) -> None:
        super().release(req_id)
        self._free_rows.append(self.row_of.pop(req_id))

    def reset(self) -> None:
        super().reset()
        self.row_of.clear()
        self._free_rows = list(reversed(range(len(self.num_tokens))))

    def write_tokens(
        self, rows: np.ndarray, start_columns: np.ndarray, token_ids: Sequence[Sequence[int]]
    ) -> np.ndarray:
        """Write `token_ids[i]` to row `rows[i]` from position `start_columns[i]` on. Returns the
        next positions."""
        self.widen((start_columns + _lengths(token_ids)).max(initial=0))
        return _scatter_lists(self.token_ids, rows, start_columns, token_ids)

    def grow(self, num_rows: int) -> None:
        """Grow to `num_rows` rows, at least as many as now. Existing rows stay."""
        num_before = len(self.num_tokens)
        self._free_rows += range(num_rows - 1, num_before - 1, -1)
        self.num_tokens = _grow_rows(self.num_tokens, num_rows)
        self.num_prompt_tokens = _grow_rows(self.num_prompt_tokens, num_rows)
        for group in self.groups:
            group.grow(num_rows)
        self.widen(self.token_ids.shape[1])

    def widen(self, num_tokens: int) -> None:
        """Widen the token columns to hold positions below `num_tokens`."""
        num_rows = len(self.num_tokens)
        width = self.token_ids.shape[1]
        if num_tokens > width:
            width = max(num_tokens, 2 * width)
        if (num_rows, width) != self.token_ids.shape:
            known = self.token_ids
            self.token_ids = np.zeros((num_rows, width), dtype=np.int32)
            for row in self.row_of.values():  # memory that was never written to costs nothing
                self.token_ids[row, : self.num_tokens[row]] = known[row, : self.num_tokens[row]]


def _grow_rows(column: np.ndarray, num_rows: int) -> np.ndarray:
    longer = np.zeros((num_rows, *column.shape[1:]), column.dtype)
    longer[: len(column)] = column
    return longer


def _lengths(lists: Sequence[Sequence[int]]) -> np.ndarray:
    return np.fromiter(map(len, lists), np.int64, len(lists))


def _scatter_lists(
    table: np.ndarray, rows: np.ndarray, start_columns: np.ndarray, lists: Sequence[Sequence[int]]
) -> np.ndarray:
    """Write `lists[i]` to `table[rows[i]]` from column `start_columns[i]` on. Returns the next
    columns."""
    lens = _lengths(lists)
    values = np.fromiter(chain.from_iterable(lists), table.dtype, lens.sum())
    columns = np.arange(len(values)) + np.repeat(start_columns + lens - lens.cumsum(), lens)
    table[np.repeat(rows, lens), columns] = values
    return start_columns + lens
