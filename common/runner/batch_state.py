"""What the runner remembers of every request: chapter 3's columns, and what sampling asks of them.

A row is written when its request is admitted. A step adds the new tokens of all requests at once,
and the guesses that it verifies (chapter 5), which stand behind the known tokens for this step.

A step that is planned before the last one's tokens are read (`overlap.py`) has `PENDING` for them.
In its place stands -1 - i, for the token of row i of what was sampled last: on a GPU no host knows
it yet, and the model's input gets it there (`fill_in`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from common.sampling.sampler import UnreadStep
from common.sampling.sampling_columns import SamplingColumns
from kv_memory import SharingRunnerState
from scheduler_interface import NewRequestData, PlanMessage


class BatchState(SharingRunnerState):
    def __init__(
        self, max_num_seqs: int, max_blocks_per_request: int, eos_token_ids: Sequence[int] = ()
    ) -> None:
        self.sampling = SamplingColumns(max_num_seqs)
        self.eos_token_ids = tuple(eos_token_ids)
        self.sampled: UnreadStep | None = None  # by the last step
        self.has_pending = False  # tokens among those of this step
        super().__init__(max_num_seqs, max_blocks_per_request)

    def apply(self, plan: PlanMessage) -> None:
        super().apply(plan)
        self._place_pending(plan.scheduled_cached_reqs.pending_req_ids)
        if drafts := plan.scheduled_draft_token_ids:
            rows = self.rows_of(drafts)
            self.write_tokens(rows, self.num_tokens[rows], list(drafts.values()))

    def _place_pending(self, req_ids: list[str]) -> None:
        self.has_pending = bool(req_ids)
        if req_ids:
            assert self.sampled is not None
            row_of_sample = {req_id: i for i, req_id in enumerate(self.sampled.req_ids)}
            rows = self.rows_of(req_ids)
            places = np.fromiter(map(row_of_sample.__getitem__, req_ids), np.int64, len(rows))
            self.token_ids[rows, self.num_tokens[rows] - 1] = -1 - places

    def fill_in(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Token ids [N] int64 on the device, with the pending ones. A row without a token (`BAD`)
        gets another: nothing comes of its request."""
        if not self.has_pending:
            return token_ids
        assert self.sampled is not None
        tokens = self.sampled.tokens[(-1 - token_ids).clamp(min=0)].clamp(min=0)
        return torch.where(token_ids < 0, tokens, token_ids)

    def admit(self, new: NewRequestData) -> None:
        super().admit(new)
        self.sampling.write(self.row_of[new.req_id], new.sampling_params, self.eos_token_ids)

    def release(self, req_id: str) -> None:
        self.sampling.clear(self.row_of[req_id])
        super().release(req_id)

    def grow(self, num_rows: int) -> None:
        super().grow(num_rows)
        self.sampling.grow(num_rows)
