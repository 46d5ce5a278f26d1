"""What the runner remembers of every request: chapter 3's columns, and what sampling asks of them.

A row is written when its request is admitted. A step adds the new tokens of all requests at once,
and the guesses that it verifies (chapter 5), which stand behind the known tokens for this step."""

from __future__ import annotations

from collections.abc import Sequence

from common.sampling.sampling_columns import SamplingColumns
from kv_memory import SharingRunnerState
from scheduler_interface import NewRequestData, SchedulerOutput


class BatchState(SharingRunnerState):
    def __init__(
        self, max_num_seqs: int, max_blocks_per_request: int, eos_token_ids: Sequence[int] = ()
    ) -> None:
        self.sampling = SamplingColumns(max_num_seqs)
        self.eos_token_ids = tuple(eos_token_ids)
        super().__init__(max_num_seqs, max_blocks_per_request)

    def apply(self, plan: SchedulerOutput) -> None:
        super().apply(plan)
        if drafts := plan.scheduled_draft_token_ids:
            rows = self.rows_of(drafts)
            self.write_tokens(rows, self.num_tokens[rows], list(drafts.values()))

    def admit(self, new: NewRequestData) -> None:
        super().admit(new)
        self.sampling.write(self.row_of[new.req_id], new.sampling_params, self.eos_token_ids)

    def release(self, req_id: str) -> None:
        self.sampling.clear(self.row_of[req_id])
        super().release(req_id)

    def grow(self, num_rows: int) -> None:
        super().grow(num_rows)
        self.sampling.grow(num_rows)
