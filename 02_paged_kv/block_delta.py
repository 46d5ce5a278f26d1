"""Block tables on their way to the runner: both ends of the message.

    scheduler's side   BlockDeltaEncoder         the whole table of a request once, then new blocks
    runner's side      PagedRunnerState   columns with a row for each request:

          row   token_ids         num_prompt_tokens   num_tokens   block_tables   num_blocks
          0     7 1 4 4 9 9 2 .   4                   7            5 2 . .        2
          1     3 8 6 . . . . .   2                   3            9 . . .        1

Layers can be in groups with a block table each; here there is one group. So the message has a tuple
of tables per request, and the last two columns exist per group. Neither side needs
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


class PagedRunnerState(RunnerState):
    """Chapter 1's state with block tables, stored in columns, so that all changes of a plan are
    written together. A request has an object only for callers that access a single request."""

    def __init__(self, max_num_seqs: int, max_blocks_per_request: int, num_groups: int = 1) -> None:
        super().__init__()
        self.row_of: dict[str, int] = {}
        self.token_ids = np.zeros((0, 0), dtype=np.int32)  # prompt, then outputs
        self.num_tokens = np.zeros(0, dtype=np.int64)
        self.num_prompt_tokens = np.zeros(0, dtype=np.int64)
        # By group of layers and row; 0 is the null block.
        self.block_tables = np.zeros((num_groups, 0, max_blocks_per_request), dtype=np.int32)
        self.num_blocks = np.zeros((num_groups, 0), dtype=np.int64)
        self._free_rows: list[int] = []
        self.grow(max_num_seqs)

    def rows_of(self, req_ids: Collection[str]) -> np.ndarray:
        return np.fromiter(map(self.row_of.__getitem__, req_ids), np.int64, len(req_ids))

    def block_ids(self, req_id: str, first: int = 0, group: int = 0) -> list[int]:
        """The request's block table in a group of layers, as it was sent, from entry `first` on."""
        row = self.row_of[req_id]
        return self.block_tables[group, row, first : self.num_blocks[group, row]].tolist()

    def admit(self, new: NewRequestData) -> None:
        if not self._free_rows:  # more requests than run at a time: some were preempted
            self.grow(2 * len(self.num_tokens))
        row = self.row_of[new.req_id] = self._free_rows.pop()
        self.requests[new.req_id] = RequestRow(self, row, new)
        num_tokens = len(new.prompt_token_ids)
        self.widen(num_tokens)
        self.token_ids[row, :num_tokens] = new.prompt_token_ids
        self.num_tokens[row] = num_tokens
        self.num_prompt_tokens[row] = num_tokens
        self.num_blocks[:, row] = 0
        for group, block_ids in enumerate(new.block_ids):
            self.append_blocks(group, np.array([row]), [False], [block_ids])

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
            for group, block_ids in enumerate(of_groups):
                self.append_blocks(group, rows[changed], is_new, block_ids)

    def append_blocks(
        self,
        group: int,
        rows: np.ndarray,
        is_new: Sequence[bool],
        block_ids: Sequence[Sequence[int]],
    ) -> None:
        """Append `block_ids[i]` to the table of row `rows[i]`, or replace the whole table if
        `is_new[i]` is false."""
        start_columns = self.num_blocks[group, rows] * is_new  # 0 if the whole table was sent
        stops = _scatter_lists(self.block_tables[group], rows, start_columns, block_ids)
        self.num_blocks[group, rows] = stops

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
        num_groups, _, max_blocks = self.block_tables.shape
        self.num_tokens = _grown(self.num_tokens, num_rows)
        self.num_prompt_tokens = _grown(self.num_prompt_tokens, num_rows)
        self.token_ids = _grown(self.token_ids, num_rows, self.token_ids.shape[1])
        self.num_blocks = _grown(self.num_blocks, num_groups, num_rows)
        self.block_tables = _grown(self.block_tables, num_groups, num_rows, max_blocks)

    def widen(self, num_tokens: int) -> None:
        """Widen the token columns to hold positions below `num_tokens`."""
        num_rows, width = self.token_ids.shape
        if num_tokens > width:
            self.token_ids = _grown(self.token_ids, num_rows, max(num_tokens, 2 * width))


def _grown(array: np.ndarray, *shape: int) -> np.ndarray:
    """A copy in a larger shape. The new entries are 0."""
    grown = np.zeros(shape, array.dtype)
    grown[tuple(map(slice, array.shape))] = array
    return grown


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
