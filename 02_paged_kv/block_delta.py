"""Block tables on their way to the runner: both ends of the message.

    scheduler's side   BlockDelta         the whole table of a request once, then new blocks
    runner's side      PagedRunnerState   columns with a row for each request:

          row   token_ids         num_prompt_tokens   num_tokens   block_tables   num_blocks
          0     7 1 4 4 9 9 2 .   4                   7            5 2 . .        2
          1     3 8 6 . . . . .   2                   3            9 . . .        1

Neither needs a tensor: a scheduler can be imported, and tested, without PyTorch.

Invariant: after each plan the runner's tokens and table of a scheduled request are the scheduler's.

vLLM keeps such arrays on the host, in `InputBatch`, and copies of some on the device.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from input_batch import RunnerRequest, RunnerState
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


class RequestRow(RunnerRequest):
    """Chapter 1's copy of a request, read out of the columns when somebody asks."""

    def __init__(self, state: PagedRunnerState, row: int, new: NewRequestData) -> None:
        self.req_id, self.params = new.req_id, new.sampling_params
        self.state, self.row = state, row

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
    """What chapter 1's keeps in lists, and the block tables, in columns: the news of a plan are
    written all at once. A request has an object only for those who ask about a single one."""

    def __init__(self, max_num_seqs: int, max_blocks_per_request: int) -> None:
        super().__init__()
        self.row_of: dict[str, int] = {}
        self.token_ids = np.zeros((0, 0), dtype=np.int32)  # prompt, then outputs
        self.block_tables = np.zeros((0, max_blocks_per_request), dtype=np.int32)  # 0: null block
        self.num_tokens, self.num_prompt_tokens, self.num_blocks = np.zeros((3, 0), dtype=np.int64)
        self._free_rows: list[int] = []
        self.grow(max_num_seqs)

    def rows_of(self, req_ids: Collection[str]) -> np.ndarray:
        return np.fromiter(map(self.row_of.__getitem__, req_ids), np.int64, len(req_ids))

    def block_ids(self, req_id: str, first: int = 0) -> list[int]:
        """The request's block table, as it was sent, from entry `first` on."""
        row = self.row_of[req_id]
        return self.block_tables[row, first : self.num_blocks[row]].tolist()

    def admit(self, new: NewRequestData) -> None:
        if not self._free_rows:  # more requests remembered than run at once: some were preempted
            self.grow(2 * len(self.num_tokens))
        row = self.row_of[new.req_id] = self._free_rows.pop()
        self.requests[new.req_id] = RequestRow(self, row, new)
        num_tokens = len(new.prompt_token_ids)
        self.widen(num_tokens)
        self.token_ids[row, :num_tokens] = new.prompt_token_ids
        self.num_tokens[row] = self.num_prompt_tokens[row] = num_tokens
        self.num_blocks[row] = len(new.block_ids)
        self.block_tables[row, : len(new.block_ids)] = new.block_ids

    def append(self, changes: CachedRequestData) -> None:
        rows, tokens = self.rows_of(changes.req_ids), changes.new_token_ids
        stops = self.num_prompt_tokens[rows] + np.array(changes.num_output_tokens, dtype=np.int64)
        firsts = stops - _lengths(tokens)  # it may be known, and is sent again
        self.num_tokens[rows] = self.write_tokens(rows, firsts, tokens)
        grown = [i for i, block_ids in enumerate(changes.new_block_ids) if block_ids]
        if grown:
            rows, block_ids = rows[grown], [changes.new_block_ids[i] for i in grown]
            is_new = [changes.req_ids[i] not in changes.resumed_req_ids for i in grown]
            firsts = self.num_blocks[rows] * is_new  # else the whole table is sent
            self.num_blocks[rows] = _write(self.block_tables, rows, firsts, block_ids)

    def release(self, req_id: str) -> None:
        super().release(req_id)
        self._free_rows.append(self.row_of.pop(req_id))

    def write_tokens(
        self, rows: np.ndarray, firsts: np.ndarray, token_ids: Sequence[Sequence[int]]
    ) -> np.ndarray:
        """Put `token_ids[i]` into row `rows[i]` from position `firsts[i]` on. Returns the ends."""
        self.widen((firsts + _lengths(token_ids)).max(initial=0))
        return _write(self.token_ids, rows, firsts, token_ids)

    def grow(self, num_rows: int) -> None:
        """To `num_rows`, as many as now or more. The rows that there are stay."""
        num_before = len(self.num_tokens)
        self._free_rows += range(num_rows - 1, num_before - 1, -1)
        for name in ("num_tokens", "num_prompt_tokens", "num_blocks", "block_tables"):
            column = getattr(self, name)
            larger = np.zeros((num_rows, *column.shape[1:]), column.dtype)
            larger[: len(column)] = column
            setattr(self, name, larger)
        self.widen(self.token_ids.shape[1])

    def widen(self, num_tokens: int) -> None:
        """Make room for tokens at positions below `num_tokens`."""
        num_rows, width = len(self.num_tokens), self.token_ids.shape[1]
        if num_tokens > width:
            width = max(num_tokens, 2 * width)
        if (num_rows, width) != self.token_ids.shape:
            known, self.token_ids = self.token_ids, np.zeros((num_rows, width), dtype=np.int32)
            for row in self.row_of.values():  # memory that nobody has written to costs nothing
                self.token_ids[row, : self.num_tokens[row]] = known[row, : self.num_tokens[row]]


def _lengths(lists: Sequence[Sequence[int]]) -> np.ndarray:
    return np.fromiter(map(len, lists), np.int64, len(lists))


def _write(
    table: np.ndarray, rows: np.ndarray, firsts: np.ndarray, lists: Sequence[Sequence[int]]
) -> np.ndarray:
    """`table[rows[i]]` gets `lists[i]` from column `firsts[i]` on. Returns the columns behind."""
    lens = _lengths(lists)
    values = np.fromiter(chain.from_iterable(lists), table.dtype, lens.sum())
    columns = np.arange(len(values)) + np.repeat(firsts + lens - lens.cumsum(), lens)
    table[np.repeat(rows, lens), columns] = values
    return firsts + lens
