"""`PagedModelRunner`: turns a scheduler's plan into one forward pass over a paged KV cache.

The runner keeps its own copy of every running request, in its own process if need be, and brings it
up to date from the deltas in each `SchedulerOutput`. All requests of a step lie end to end in one
row of tokens, without padding; chapter 6's `mixed_batch.py` lays them out and says which rows yield
logits. A request has one row for its last known token and one for each draft behind it (chapter 5),
whose history for the sampler includes the drafts before it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import torch

from batch_layout import BlockTables, to_device
from common.model import DecoderModel
from common.sampling.sampler import SamplingBatch
from mixed_batch import Query, compose
from paged_attention import AttentionBackend, AttentionMetadata, PagedKVCache
from request import SamplingParams
from scheduler_interface import SchedulerOutput


@dataclass(slots=True)
class RunnerRequest:
    """The runner's copy of a request. `row` is its row in the block tables."""

    params: SamplingParams
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    row: int
    num_blocks: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    def tokens(self, start: int, stop: int) -> list[int]:
        num_prompt = len(self.prompt_token_ids)
        if start >= num_prompt:
            return self.output_token_ids[start - num_prompt : stop - num_prompt]
        head = self.prompt_token_ids[start:stop]
        return head + self.output_token_ids[: stop - num_prompt] if stop > num_prompt else head


@dataclass(slots=True)
class PagedBatch:
    """One step's input. Tensors are on the model's device."""

    req_ids: list[str]
    input_ids: torch.Tensor  # [num_tokens] int64
    positions: torch.Tensor  # [num_tokens] int64
    attention: AttentionMetadata
    logit_indices: torch.Tensor  # [num_logit_rows] int64, into the tokens
    logit_req_ids: list[str]  # of each row of logits; with drafts, a request has several
    sampling: SamplingBatch = field(repr=False)
    draft_token_ids: dict[str, list[int]] = field(default_factory=dict)  # what is to be verified


class PagedModelRunner:
    """A `ModelRunner` (chapter 1) over chapter 2's paged KV cache.

    Requests with up to `decode_threshold` tokens stand in front of each batch. `shuffle_seed`, a
    debug switch, puts each batch in a random order: no output may depend on it.
    """

    def __init__(
        self,
        model: DecoderModel,
        kv_cache: PagedKVCache,
        backend: AttentionBackend,
        *,
        eos_token_ids: tuple[int, ...] = (),
        max_num_seqs: int = 256,
        max_model_len: int = 2048,
        decode_threshold: int = 1,
        shuffle_seed: int | None = None,
    ) -> None:
        self.model = model
        self.kv_cache = kv_cache
        self.backend = backend
        self.eos_token_ids = tuple(eos_token_ids)
        self.device = model.embed_weight.device
        self.block_size = kv_cache.block_size
        self.requests: dict[str, RunnerRequest] = {}
        self.tables = BlockTables(max_num_seqs, -(-max_model_len // self.block_size))
        self.decode_threshold = decode_threshold
        self._shuffle = None if shuffle_seed is None else random.Random(shuffle_seed)

    def prepare(self, output: SchedulerOutput) -> PagedBatch | None:
        """Bring the requests up to date and lay out the step's tokens. None if nothing is
        scheduled."""
        starts = self._apply(output)
        return None if output.is_empty else self._lay_out(starts, output)

    @torch.inference_mode()
    def forward(self, batch: PagedBatch) -> torch.Tensor:
        """Logits `[num_logit_rows, vocab_size]`. Writes the batch's keys and values into the
        cache."""
        return self.model(
            batch.input_ids,
            batch.positions,
            self.kv_cache,
            batch.attention,
            batch.logit_indices,
            self.backend,
        )

    # -- the delta

    def _apply(self, output: SchedulerOutput) -> dict[str, int]:
        """Take over what changed. Returns the first position each scheduled request computes."""
        for req_id in output.finished_req_ids:
            # Unknown if the step that was to admit it failed before the runner heard of it.
            if (request := self.requests.pop(req_id, None)) is not None:
                self.tables.release_row(request.row)
        starts: dict[str, int] = {}
        for new in output.scheduled_new_reqs:
            row = self.tables.take_row()
            request = RunnerRequest(new.sampling_params, new.prompt_token_ids, [], row)
            self.requests[new.req_id] = request
            self._append_blocks(request, new.block_ids)
            starts[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for i, req_id in enumerate(cached.req_ids):
            request = self.requests[req_id]
            if req_id in cached.resumed_req_ids:
                request.output_token_ids.clear()
                request.num_blocks = 0
                outputs = cached.new_token_ids[i][len(request.prompt_token_ids) :]
                request.output_token_ids.extend(outputs)
            else:
                request.output_token_ids.extend(cached.new_token_ids[i])
            self._append_blocks(request, cached.new_block_ids[i])
            starts[req_id] = cached.num_computed_tokens[i]
        if output.block_copies:
            copies = [(copy.src_block_id, copy.dst_block_id) for copy in output.block_copies]
            self.kv_cache.copy_blocks([(src, dst) for src, dst in copies if src != dst])
            for copy in output.block_copies:
                row = self.requests[copy.request_id].row
                self.tables.ids[row, copy.block_index] = copy.dst_block_id
        return starts

    def _append_blocks(self, request: RunnerRequest, block_ids: list[int]) -> None:
        if block_ids:
            self.tables.write(request.row, request.num_blocks, block_ids)
            request.num_blocks += len(block_ids)

    # -- the batch

    def _lay_out(self, starts: dict[str, int], output: SchedulerOutput) -> PagedBatch:
        req_ids = list(starts)
        if self._shuffle is not None:
            self._shuffle.shuffle(req_ids)
        drafts = output.scheduled_draft_token_ids
        queries = [
            Query(
                row=self.requests[req_id].row,
                start=starts[req_id],
                num_tokens=output.num_scheduled_tokens[req_id],
                num_known=self.requests[req_id].num_tokens,
                num_drafts=len(drafts.get(req_id, ())),
            )
            for req_id in req_ids
        ]
        batch = compose(self.tables, queries, self.block_size, self.device, self.decode_threshold)
        req_ids = [req_ids[i] for i in batch.order]
        input_ids: list[int] = []
        rows: list[tuple[str, RunnerRequest, list[int]]] = []  # with the drafts before its token
        for req_id, i in zip(req_ids, batch.order, strict=True):
            request, query = self.requests[req_id], queries[i]
            own_drafts = drafts.get(req_id, [])
            stop = query.start + query.num_tokens - query.num_drafts
            input_ids += request.tokens(query.start, stop)
            input_ids += own_drafts
            rows += [(req_id, request, own_drafts[:i]) for i in range(query.num_logit_rows)]
        sampling = self._sampling(rows)
        return PagedBatch(
            req_ids=req_ids,
            input_ids=to_device(np.array(input_ids, dtype=np.int64), self.device),
            positions=batch.positions,
            attention=batch.attention,
            logit_indices=to_device(batch.logit_indices, self.device),
            logit_req_ids=sampling.req_ids,
            sampling=sampling,
            draft_token_ids=drafts,
        )

    def _sampling(self, rows: list[tuple[str, RunnerRequest, list[int]]]) -> SamplingBatch:
        requests = [request for _, request, _ in rows]
        params = [request.params for request in requests]
        return SamplingBatch(
            req_ids=[req_id for req_id, _, _ in rows],
            params=params,
            seeds=[p.seed or 0 for p in params],
            prompt_token_ids=[request.prompt_token_ids for request in requests],
            output_token_ids=[request.output_token_ids for request in requests],
            draft_token_ids=[drafts for _, _, drafts in rows],
            eos_token_ids=[() if p.ignore_eos else self.eos_token_ids for p in params],
        )
