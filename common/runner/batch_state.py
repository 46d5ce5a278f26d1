"""The runner's state of every request: chapter 3's columns, and those of the runner's plugins.

A row is written when its request is admitted. A step adds the new tokens of all requests together,
and the draft tokens that it verifies (chapter 5), stored after the known tokens for this step only.
The sampling columns are one of the plugins (`runner_plugin.py`).

A step that is planned before the previous step's tokens are read (`overlap.py`) has `PENDING` for
them. The state stores -1 - i instead: the token of row i of the last sampled tokens. On a GPU the
host does not know that token yet, so it is put into the model's input on the device (`fill_in`).

See common/README.md"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from common.sampling.runner_plugin import RunnerPlugin, missing_reason
from common.sampling.sampler import AsyncStepOutput
from common.sampling.sampling_columns import SamplingBatch, SamplingColumns
from kv_memory import SharingRunnerState
from scheduler_interface import NewRequestData, RunnerInput


class BatchState(SharingRunnerState):
    """A runner state with plugins: `sampling` is the first one, `plugins` are the others, in order.
    Plugins of `late`, by name, are made when the first request with such a feature is admitted."""

    def __init__(
        self,
        max_num_seqs: int,
        max_blocks_per_request: int,
        sampling: SamplingColumns,
        plugins: Sequence[RunnerPlugin] = (),
        num_groups: int = 1,
        late: Mapping[str, Callable[[], RunnerPlugin]] | None = None,
    ) -> None:
        self.sampling = sampling
        self.plugins = [sampling, *plugins]
        self._late = dict(late or {})
        self.sampled: AsyncStepOutput | None = None  # by the last step
        self.has_pending = False  # whether this step has pending tokens
        super().__init__(max_num_seqs, max_blocks_per_request, num_groups)

    def apply(self, plan: RunnerInput) -> None:
        super().apply(plan)
        self._place_pending(plan.scheduled_cached_reqs.pending_req_ids)
        if drafts := plan.scheduled_draft_token_ids:
            rows = self.rows_of(drafts)
            self.write_tokens(rows, self.num_tokens[rows], list(drafts.values()))

    def reset(self) -> None:
        """Also release every row, used or not, and grow all columns to the same number of rows."""
        num_rows = len(self.num_tokens)
        self.grow(num_rows)
        for plugin in self.plugins:
            for row in range(num_rows):
                plugin.release(row)
        super().reset()

    def _place_pending(self, req_ids: list[str]) -> None:
        self.has_pending = bool(req_ids)
        if req_ids:
            assert self.sampled is not None
            row_of_sample = {req_id: i for i, req_id in enumerate(self.sampled.req_ids)}
            rows = self.rows_of(req_ids)
            places = np.fromiter(map(row_of_sample.__getitem__, req_ids), np.int64, len(rows))
            self.token_ids[rows, self.num_tokens[rows] - 1] = -1 - places

    def fill_in(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return token ids [N] int64 on the device, with pending ones filled in. A row without a
        token (`BAD`) gets some valid id, because its request fails anyway."""
        if not self.has_pending:
            return token_ids
        assert self.sampled is not None
        tokens = self.sampled.tokens[(-1 - token_ids).clamp(min=0)].clamp(min=0)
        return torch.where(token_ids < 0, tokens, token_ids)

    def known(self, token_id: int) -> int:
        if token_id >= 0:
            return token_id
        assert self.sampled is not None
        return int(self.sampled.read_tokens()[-1 - token_id])

    def num_possible(self, req_id: str, drafts: list[int]) -> int:
        """Return how many of these drafts, from the first one on, all plugins allow."""
        row = self.row_of[req_id]
        return min(plugin.num_possible(self, row, drafts) for plugin in self.plugins)

    def missing_reason(
        self, sampling: SamplingBatch, before: AsyncStepOutput | None, vocab_size: int, req_id: str
    ) -> str | None:
        """Return the rules that left no token for a request, or None if the rules are not the
        reason. Called when the step is read: by then the next step can have started, or the
        request can have finished. Tokens pending in the step were sampled in `before`."""
        row = self.row_of.get(req_id)
        num_outputs = sampling.num_outputs[sampling.req_ids.index(req_id)]
        if row is None or self.num_tokens[row] < self.num_prompt_tokens[row] + num_outputs:
            return None  # finished; a new request with the same id has fewer outputs
        first = self.num_prompt_tokens[row]
        outputs = self.token_ids[row, first : first + num_outputs].tolist()
        if before is not None and outputs and outputs[-1] < 0:
            outputs[-1] = int(before.read_tokens()[-1 - outputs[-1]])
        may_come: dict[str, np.ndarray] = {}
        for plugin in self.plugins:
            may_come |= plugin.may_come(row, outputs, vocab_size)
        return missing_reason(may_come)

    def admit(self, new: NewRequestData) -> None:
        for name in new.features:
            if name in self._late:
                plugin = self._late[name]()
                plugin.grow(len(self.num_tokens))
                self.plugins.append(plugin)
                del self._late[name]  # last: after a step that fails before, the next one tries
        super().admit(new)
        for plugin in self.plugins:
            plugin.admit(self.row_of[new.req_id], new)

    def release(self, req_id: str) -> None:
        for plugin in self.plugins:
            plugin.release(self.row_of[req_id])
        super().release(req_id)

    def grow(self, num_rows: int) -> None:
        super().grow(num_rows)
        for plugin in self.plugins:
            plugin.grow(num_rows)
