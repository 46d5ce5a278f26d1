"""`PagedModelRunner`: turns a scheduler's plan into one forward pass over a paged KV cache.

    plan -> requests (`BatchState`) -> rows of tokens -> model -> logits -> sampler

The runner knows the requests only from the deltas in each plan, so it can run in another process.
The tokens of all requests of a step are concatenated in one row, without padding, in the order that
`compose` chooses. A request has logits if the step reaches its last known token: one row for that
token, and one for each draft after it (chapter 5). For the sampler, the history of a draft's row
includes the drafts before it.

See common/README.md"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from batch_layout import ComposedBatch, PagedRunnerState, Queries, StepLayout, compose_in_order
from common.models.model import DecoderModel
from common.models.model_config import SCORED
from common.runner.batch_state import BatchState
from common.sampling.runner_plugin import StepRows, UploadBuffer
from common.sampling.sampler import AsyncStepOutput, SampleArgs, Sampler
from common.sampling.sampling_columns import SamplingBatch
from paged_attention import AttentionBackend, PagedKVCache
from scheduler_interface import FinishedStep, RunnerInput, StepHandle, StepOutput, StepTimer

Compose = Callable[[PagedRunnerState, Queries, int], StepLayout]


@dataclass(slots=True)
class PagedBatch(ComposedBatch):
    """The input of one step."""

    sampling: SamplingBatch = field(repr=False, kw_only=True)  # one row for each row of logits
    sample_args: SampleArgs = field(repr=False, kw_only=True)
    step: StepRows = field(repr=False, kw_only=True)


class PagedModelRunner:
    """A `ModelRunner` (chapter 1) over chapter 2's paged KV cache.

    Plans are applied to `state` only here. `compose` is chapter 2's layout, or another one that
    `backend` can attend to. `shuffle_seed`, a debug switch, puts each batch in a random order: no
    output may depend on that order."""

    def __init__(
        self,
        model: DecoderModel,
        kv_cache: PagedKVCache,
        backend: AttentionBackend,
        state: BatchState,
        sampler: Sampler,
        compose: Compose = compose_in_order,
        shuffle_seed: int | None = None,
    ) -> None:
        self.model = model
        self.kv_cache = kv_cache
        self.backend = backend
        self.state = state
        self.sampler = sampler
        self.compose = compose
        self.device = model.embed_weight.device
        self._shuffle = None if shuffle_seed is None else random.Random(shuffle_seed)

    def execute(self, plan: RunnerInput) -> StepHandle:
        clock = StepTimer()
        batch = self.prepare(plan)
        clock.lap("prepare_ms")
        if batch is None:
            return FinishedStep(StepOutput(times=clock.ms))
        logits = self.forward(batch)
        clock.lap("forward_ms")
        pending_output = self.state.sampled = self.sample(batch, logits)
        clock.lap("sample_ms")
        pending_output.times = clock.ms
        return pending_output

    def prepare(self, plan: RunnerInput) -> PagedBatch | None:
        """Apply the plan to the requests and lay out the step's tokens. None: there are none."""
        self.state.apply(plan)
        return None if plan.is_empty else self._lay_out(plan)

    @torch.inference_mode()
    def forward(self, batch: PagedBatch) -> torch.Tensor:
        """Return logits `[num_logit_rows, vocab_size]`. Writes keys and values into the cache."""
        batch.plan_attention(self.backend, self.model.num_heads, self.kv_cache)
        return self.model(batch, self.kv_cache)

    @torch.inference_mode()
    def sample(self, batch: PagedBatch, logits: torch.Tensor) -> AsyncStepOutput:
        """Start sampling, without waiting for it. Plugins work while the device computes the
        forward pass."""
        for plugin in self.state.plugins:
            logits = plugin.before_sampling(batch.step, logits)
        pending_output = self.sampler.sample(logits, batch.sample_args)
        pending_output.missing_reason = partial(
            self.state.missing_reason, batch.sampling, self.state.sampled, self.sampler.vocab_size
        )
        if (scored := batch.staged.get(SCORED)) is not None:
            pending_output.add_more = scored.add_to
        return pending_output

    def _lay_out(self, plan: RunnerInput) -> PagedBatch:
        start_of = plan.starts()
        drafts = plan.scheduled_draft_token_ids
        if self._shuffle is not None:
            start_of = dict(self._shuffle.sample(list(start_of.items()), len(start_of)))
        req_ids = list(start_of)
        rows = self.state.rows_of(req_ids)
        starts = np.fromiter(start_of.values(), np.int64, len(req_ids))
        num_tokens = np.array([plan.num_scheduled_tokens[r] for r in req_ids], dtype=np.int64)
        num_drafts = np.array([len(drafts.get(r, ())) for r in req_ids], dtype=np.int64)
        is_last = starts + num_tokens - num_drafts == self.state.num_tokens[rows]
        num_logit_rows = np.where(is_last, 1 + num_drafts, 0)
        queries = Queries(rows, starts, num_tokens, num_logit_rows)
        layout = self.compose(self.state, queries, self.kv_cache.block_size)
        order = layout.order
        step = StepRows(
            state=self.state,
            req_ids=[req_ids[i] for i in order.tolist()],
            queries=Queries._make(column[order] for column in queries),
            drafts=drafts,
        )
        sampling = self._sampling_batch(step)
        sample_args = self.sampler.prepare(sampling)
        staged = self.stage(step)
        upload = UploadBuffer(self.device, layout.arrays)
        for args in (*staged.values(), sample_args):
            upload.fill(args)
        batch = layout.compose(upload.send())
        return PagedBatch(
            self.state.fill_in(batch.input_ids),
            batch.positions,
            batch.attention,
            batch.logit_indices,
            staged=staged,
            sampling=sampling,
            sample_args=sample_args,
            step=step,
        )

    def stage(self, step: StepRows) -> dict[str, Any]:
        """Return the plugins' part of the batch, by plugin name."""
        rows = step.queries.rows
        concerned = [p for p in self.state.plugins if p.is_in_forward and p.concerns(rows)]
        staged = {plugin.name: plugin.stage(step) for plugin in concerned}
        return {name: part for name, part in staged.items() if part is not None}

    def _sampling_batch(self, step: StepRows) -> SamplingBatch:
        """Return one row for each request's last known token that the step reaches, and one for
        each draft."""
        state = self.state
        num_rows = step.queries.num_logit_rows
        owner = np.repeat(np.arange(len(num_rows)), num_rows)  # query of each row
        rows = step.queries.rows[owner]
        index = np.arange(len(rows)) - (num_rows.cumsum() - num_rows)[owner]  # in its query
        return SamplingBatch(
            columns=state.sampling,
            req_ids=[step.req_ids[i] for i in owner.tolist()],
            rows=rows,
            num_outputs=state.num_tokens[rows] - state.num_prompt_tokens[rows] + index,
            state=state,
            drafts=step.drafts,
        )
