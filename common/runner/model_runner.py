"""`PagedModelRunner`: turns a scheduler's plan into one forward pass over a paged KV cache.

    plan -> requests (`BatchState`) -> rows of tokens -> model -> logits -> sampler

The runner knows the requests from the deltas in each plan and from nothing else, so it may be in
another process. All requests of a step lie end to end in one row of tokens, without padding;
`compose` says in which order. A request has logits if the step reaches its last known token: a row
for that one, and one for each draft behind it (chapter 5), whose history for the sampler includes
the drafts before it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from batch_layout import ComposedBatch, PagedRunnerState, Queries, compose_in_order
from common.model import DecoderModel
from common.runner.batch_state import BatchState
from common.sampling.sampling_columns import SamplingBatch
from paged_attention import AttentionBackend, AttentionMetadata, PagedKVCache
from scheduler_interface import FinishedStep, Laps, SchedulerOutput, StepOutput

Compose = Callable[[PagedRunnerState, Queries, int, torch.device], ComposedBatch]


@dataclass(slots=True)
class PagedBatch:
    """One step's input. Tensors are on the model's device."""

    req_ids: list[str]
    input_ids: torch.Tensor  # [num_tokens] int64
    positions: torch.Tensor  # [num_tokens] int64
    attention: AttentionMetadata
    logit_indices: torch.Tensor  # [num_logit_rows] int64, into the tokens
    sampling: SamplingBatch = field(repr=False)  # a row for each of logits
    draft_token_ids: dict[str, list[int]] = field(default_factory=dict)  # what is to be verified


class BatchSampler(Protocol):
    def sample(self, logits: torch.Tensor, batch: PagedBatch) -> StepOutput:
        """What becomes of the rows of `logits`: the tokens, log-probabilities and errors of the
        batch's requests."""
        ...


class PagedModelRunner:
    """A `ModelRunner` (chapter 1) over chapter 2's paged KV cache.

    `state` takes over each plan here, and nowhere else. `compose` is chapter 2's layout, or another
    that `backend` can attend to. `shuffle_seed`, a debug switch, puts each batch in a random order:
    no output may depend on it."""

    def __init__(
        self,
        model: DecoderModel,
        kv_cache: PagedKVCache,
        backend: AttentionBackend,
        state: BatchState,
        sampler: BatchSampler,
        *,
        compose: Compose = compose_in_order,
        eos_token_ids: Sequence[int] = (),
        shuffle_seed: int | None = None,
    ) -> None:
        self.model, self.kv_cache, self.backend = model, kv_cache, backend
        self.state, self.sampler, self.compose = state, sampler, compose
        self.eos_token_ids = tuple(eos_token_ids)
        self.device = model.embed_weight.device
        self._shuffle = None if shuffle_seed is None else random.Random(shuffle_seed)

    def execute(self, plan: SchedulerOutput) -> FinishedStep:
        clock, output = Laps(), StepOutput()
        batch = self.prepare(plan)
        clock.lap("prepare_ms")
        if batch is not None:
            logits = self.forward(batch)
            clock.lap("forward_ms")
            output = self.sampler.sample(logits, batch)
            clock.lap("sample_ms")
        output.times = clock.ms
        return FinishedStep(output)

    def prepare(self, plan: SchedulerOutput) -> PagedBatch | None:
        """Bring the requests up to date and lay out the step's tokens, if there are any."""
        self.state.apply(plan)
        return None if plan.is_empty else self._lay_out(plan)

    @torch.inference_mode()
    def forward(self, batch: PagedBatch) -> torch.Tensor:
        """Logits `[num_logit_rows, vocab_size]`. Writes keys and values into the cache."""
        ids, positions, rows = batch.input_ids, batch.positions, batch.logit_indices
        return self.model(ids, positions, self.kv_cache, batch.attention, rows, self.backend)

    def _lay_out(self, plan: SchedulerOutput) -> PagedBatch:
        cached, state = plan.scheduled_cached_reqs, self.state
        drafts, num_tokens = plan.scheduled_draft_token_ids, plan.num_scheduled_tokens
        req_ids = [new.req_id for new in plan.scheduled_new_reqs] + cached.req_ids
        starts = [new.num_computed_tokens for new in plan.scheduled_new_reqs]
        starts = np.array(starts + cached.num_computed_tokens, dtype=np.int64)
        if self._shuffle is not None:
            order = list(range(len(req_ids)))
            self._shuffle.shuffle(order)
            req_ids, starts = [req_ids[i] for i in order], starts[order]
        rows, num_queries = state.rows_of(req_ids), len(req_ids)
        lens = np.fromiter(map(num_tokens.__getitem__, req_ids), np.int64, num_queries)
        num_drafts = np.zeros(num_queries, dtype=np.int64)
        if drafts:
            num_drafts[:] = [len(drafts.get(req_id, ())) for req_id in req_ids]
        is_last = starts + lens - num_drafts == state.num_tokens[rows]
        queries = Queries(rows, starts, lens, np.where(is_last, 1 + num_drafts, 0))
        batch = self.compose(state, queries, self.kv_cache.block_size, self.device)
        sampling = self._sampling_batch(req_ids, queries, batch.order, drafts)
        return PagedBatch(
            req_ids=[req_ids[i] for i in batch.order.tolist()],
            input_ids=batch.input_ids,
            positions=batch.positions,
            attention=batch.attention,
            logit_indices=batch.logit_indices,
            sampling=sampling,
            draft_token_ids=drafts,
        )

    def _sampling_batch(
        self,
        req_ids: list[str],
        queries: Queries,
        order: np.ndarray,
        drafts: dict[str, list[int]],
    ) -> SamplingBatch:
        """A row for each of logits: the request's, and how many drafts stand before its token."""
        num_rows, state = queries.num_logit_rows[order], self.state
        owner = np.repeat(order, num_rows)
        rows = queries.rows[owner]
        num_drafts_before = np.arange(len(owner)) - np.repeat(
            num_rows.cumsum() - num_rows, num_rows
        )
        num_outputs = (state.num_tokens - state.num_prompt_tokens)[rows] + num_drafts_before
        names = [req_ids[i] for i in owner.tolist()]
        return as_before(SamplingBatch(state.sampling, names, rows, num_outputs, state, drafts))


def as_before(batch: SamplingBatch):
    from common.sampling.sampler import SamplingBatch as Old

    old, state = Old(), batch.state
    num_known = state.num_tokens - state.num_prompt_tokens
    for req_id, row, num in zip(batch.req_ids, batch.rows.tolist(), batch.num_outputs.tolist()):
        drafts = batch.drafts.get(req_id, [])[: num - num_known[row]]
        old.add(state.requests[req_id], drafts, state.eos_token_ids)
    return old
