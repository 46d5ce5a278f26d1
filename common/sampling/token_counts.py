"""Token counts of each request's prompt and output, for the penalties, updated incrementally.

A penalty needs, for every token of the vocabulary, whether the token is in the prompt or the
output, and how often. A history only grows, so a step adds only its new tokens:

    table [num_rows, vocab_size] int32     2 * (times in the output) + (1 if in the prompt)

The rows are those of the columns. A row that now belongs to another request, or whose history has
become shorter, is counted again. Drafts, and a last token that is still pending (`BatchState`), are
added to the step's copy of the rows, never to the table.

See common/README.md#what-a-request-may-ask-for"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from common.sampling.runner_plugin import HasTokens, UploadBuffer
from common.sampling.sampling_columns import SamplingBatch, flat_index


@dataclass(eq=False)
class CountArgs:
    """A batch to be counted once: arrays until the upload, then tensors."""

    table: TokenCounts
    fill_in: Callable[[torch.Tensor], torch.Tensor]  # of pending ids
    counted: list[np.ndarray]  # rows, their `num_writes` and number of tokens: for the host
    new: Any  # rows to be counted from the beginning
    lanes: Any  # [R]: the table's rows
    # Flat indices: of new tokens in prompts and outputs into the table, of drafts into the batch.
    prompts: Any
    outputs: Any
    drafts: Any
    pending_lanes: Any  # index of the first column of each row with a pending token
    pending_ids: Any

    def count(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return which tokens are in each row's prompt, output or drafts, bool [R, vocab_size], and
        their counts in its output and drafts, int32 [R, vocab_size]."""
        self.table.add(self)
        counts = self.table.rows(self.lanes)
        _add(counts, self.drafts)
        if len(self.pending_ids):
            _add(counts, self.pending_lanes + self.fill_in(self.pending_ids))
        return counts > 0, counts >> 1


class TokenCounts:
    """Counts of the rows with penalties, for one vocabulary on one device at a time."""

    def __init__(self) -> None:
        self._table = torch.zeros(0, 0, dtype=torch.int32)
        self._num_writes = np.zeros(0, dtype=np.int64)  # of the row when counted; 0: never counted
        self._num_counted = np.zeros(0, dtype=np.int64)  # counted tokens of the row

    def prepare(self, batch: SamplingBatch, upload: UploadBuffer, vocab_size: int) -> CountArgs:
        """Collect the new tokens. Ids beyond the vocabulary are left out. O(new tokens), and R rows
        are copied. The table changes only in `count`, so a step that fails earlier leaves the table
        unchanged."""
        columns = batch.columns
        state = batch.state
        rows = np.unique(batch.rows)
        self._grow_table(int(rows.max(initial=0)) + 1, vocab_size, upload.device)
        num_prompt = state.num_prompt_tokens[rows]
        num_tokens = state.num_tokens[rows] - (_last_ids(state, rows) < 0)
        num_writes = columns.num_writes[rows]
        is_new = self._num_writes[rows] != num_writes
        is_new |= num_tokens < self._num_counted[rows]
        counted = np.where(is_new, 0, self._num_counted[rows])
        if batch.are_counted:
            is_new = np.zeros_like(is_new)
            counted = num_tokens

        def flat(
            into: np.ndarray, rows: np.ndarray, start: np.ndarray, stop: np.ndarray
        ) -> np.ndarray:
            """Return the indices of tokens `[start, stop)` of `rows` in rows `into` of a table."""
            lens = stop - start
            index = np.repeat(np.arange(len(rows)), lens)
            positions = np.arange(len(index)) + (start - np.cumsum(lens) + lens)[index]
            ids = state.token_ids[rows[index], positions].astype(np.int64)
            return flat_index(into[index], ids, vocab_size)[0]

        known = state.num_tokens[batch.rows]
        first_output = np.where(is_new, num_prompt, counted)
        ends = state.num_prompt_tokens[batch.rows] + batch.num_outputs if batch.drafts else known
        last_ids = _last_ids(state, batch.rows)
        pending = np.flatnonzero(last_ids < 0)
        args = CountArgs(
            table=self,
            fill_in=state.fill_in,
            counted=[rows, num_writes, num_tokens],
            new=rows[is_new],
            lanes=batch.rows,
            prompts=flat(rows, rows, counted, first_output),
            outputs=flat(rows, rows, first_output, num_tokens),
            drafts=flat(np.arange(len(batch.rows)), batch.rows, known, ends),
            pending_lanes=pending * vocab_size,
            pending_ids=last_ids[pending].astype(np.int64),
        )
        upload.fill(args)
        return args

    def add(self, args: CountArgs) -> None:
        """Add the new tokens to the table."""
        rows, num_writes, num_tokens = args.counted
        self._num_writes[rows] = num_writes
        self._num_counted[rows] = num_tokens
        self._table.index_fill_(0, args.new, 0)
        self._table.view(-1).index_fill_(0, args.prompts, 1)
        _add(self._table, args.outputs)

    def rows(self, lanes: torch.Tensor) -> torch.Tensor:
        return self._table[lanes]

    def _grow_table(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        """Grow the table and keep its counts, because several batches can be staged before one of
        them is counted."""
        is_other = self._table.shape[1] != vocab_size or self._table.device != device
        num_kept = 0 if is_other else len(self._table)
        if num_kept < num_rows:
            capacity = max(num_rows, 2 * num_kept)
            table = self._table
            known = self._num_writes[:num_kept], self._num_counted[:num_kept]
            self._num_writes, self._num_counted = np.zeros((2, capacity), dtype=np.int64)
            self._num_writes[:num_kept], self._num_counted[:num_kept] = known
            with torch.inference_mode(False):  # inference tensors are read-only outside of it
                self._table = torch.zeros(capacity, vocab_size, dtype=torch.int32, device=device)
                if num_kept:
                    self._table[:num_kept] = table


def _last_ids(state: HasTokens, rows: np.ndarray) -> np.ndarray:
    return state.token_ids[rows, state.num_tokens[rows] - 1]


def _add(table: torch.Tensor, index: torch.Tensor) -> None:
    table.view(-1).scatter_add_(0, index, torch.full_like(index, 2, dtype=table.dtype))
