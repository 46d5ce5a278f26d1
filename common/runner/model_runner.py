"""`PagedModelRunner`: turns a scheduler's plan into one forward pass over a paged KV cache.

    plan -> requests (`SharingRunnerState`) -> rows of tokens -> model -> logits -> sampler

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

from batch_layout import BlockTables, ComposedBatch, Query, compose_in_order, to_device
from common.model import DecoderModel
from common.sampling.sampling_columns import SamplingBatch, SamplingColumns
from input_batch import RunnerRequest
from kv_memory import SharingRunnerState
from paged_attention import AttentionBackend, AttentionMetadata, PagedKVCache
from scheduler_interface import FinishedStep, Laps, SchedulerOutput, StepOutput

Compose = Callable[[BlockTables, Sequence[Query], int, torch.device], ComposedBatch]


@dataclass(slots=True)
class PagedBatch:
    """One step's input. Tensors are on the model's device."""

    req_ids: list[str]
    input_ids: torch.Tensor  # [num_tokens] int64
    positions: torch.Tensor  # [num_tokens] int64
    attention: AttentionMetadata
    logit_indices: torch.Tensor  # [num_logit_rows] int64, into the tokens
    sampling: SamplingBatch = field(repr=False)  # a row for each of logits


class ListedTokens:
    """The lists of `state`, as columns. (For as long as it keeps lists.)"""

    def __init__(self, state: SharingRunnerState) -> None:
        self.state, self.row_of = state, state.rows
        self.drafts: dict[str, list[int]] = {}

    @property
    def num_tokens(self) -> np.ndarray:
        return self._column(lambda r: r.num_tokens)

    @property
    def num_prompt_tokens(self) -> np.ndarray:
        return self._column(lambda r: len(r.prompt_token_ids))

    @property
    def token_ids(self) -> np.ndarray:
        requests = self.state.requests
        tokens = {
            r: q.tokens(0, q.num_tokens) + self.drafts.get(r, []) for r, q in requests.items()
        }
        table = np.zeros((len(self.state.tables.ids), max(map(len, tokens.values()))), np.int32)
        for req_id, ids in tokens.items():
            table[self.row_of[req_id], : len(ids)] = ids
        return table

    def _column(self, value: Callable[[RunnerRequest], int]) -> np.ndarray:
        column = np.zeros(len(self.state.tables.ids), dtype=np.int64)
        for req_id, request in self.state.requests.items():
            column[self.row_of[req_id]] = value(request)
        return column


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
        state: SharingRunnerState,
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
        self.columns = SamplingColumns(len(state.tables.ids))
        self.tokens = ListedTokens(state)
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
        if len(self.state.tables.ids) > len(self.columns.needs):
            self.columns.grow(len(self.state.tables.ids))
        for new in plan.scheduled_new_reqs:
            row = self.state.rows[new.req_id]
            self.columns.write(row, new.sampling_params, self.eos_token_ids)
        return None if plan.is_empty else self._lay_out(plan)

    @torch.inference_mode()
    def forward(self, batch: PagedBatch) -> torch.Tensor:
        """Logits `[num_logit_rows, vocab_size]`. Writes keys and values into the cache."""
        ids, positions, rows = batch.input_ids, batch.positions, batch.logit_indices
        return self.model(ids, positions, self.kv_cache, batch.attention, rows, self.backend)

    def _lay_out(self, plan: SchedulerOutput) -> PagedBatch:
        cached = plan.scheduled_cached_reqs
        starts = {new.req_id: new.num_computed_tokens for new in plan.scheduled_new_reqs}
        starts |= zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        req_ids = list(starts)
        if self._shuffle is not None:
            self._shuffle.shuffle(req_ids)
        requests, rows = self.state.requests, self.state.rows
        drafts, num_tokens = plan.scheduled_draft_token_ids, plan.num_scheduled_tokens
        queries = []
        for req_id in req_ids:
            start, num_drafts = starts[req_id], len(drafts.get(req_id, ()))
            num_known = requests[req_id].num_tokens
            is_last = start + num_tokens[req_id] - num_drafts == num_known
            num_logit_rows = 1 + num_drafts if is_last else 0
            queries.append(Query(rows[req_id], start, num_tokens[req_id], num_logit_rows))
        batch = self.compose(self.state.tables, queries, self.kv_cache.block_size, self.device)
        input_ids: list[int] = []
        names, num_outputs = [], []
        for i in batch.order:
            request, query = requests[req_ids[i]], queries[i]
            own_drafts = drafts.get(request.req_id, [])
            stop = query.start + query.num_tokens - len(own_drafts)
            input_ids += request.tokens(query.start, stop) + own_drafts
            for num_before in range(query.num_logit_rows):
                names.append(request.req_id)
                num_outputs.append(len(request.output_token_ids) + num_before)
        self.tokens.drafts = drafts
        sampling = SamplingBatch(
            self.columns,
            names,
            np.array([rows[name] for name in names], dtype=np.int64),
            np.array(num_outputs, dtype=np.int64),
            self.tokens,  # pyright: ignore[reportArgumentType]
            drafts,
        )
        return PagedBatch(
            req_ids=[req_ids[i] for i in batch.order],
            input_ids=to_device(np.array(input_ids, dtype=np.int64), self.device),
            positions=batch.positions,
            attention=batch.attention,
            logit_indices=to_device(batch.logit_indices, self.device),
            sampling=sampling,
        )
