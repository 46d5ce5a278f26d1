"""`PagedModelRunner`: turns a scheduler's plan into one forward pass over a paged KV cache.

The runner keeps its own copy of every running request, in its own process if need be, and brings it
up to date from the deltas in each `SchedulerOutput`. All requests of a step lie end to end in one
row of tokens, without padding:

    tokens            | request A: 5 tokens | B: 1 | C: 1 | D: 3 tokens |
    query_start_loc   0                     5      6      7            10
    positions         | 0  1  2  3  4       | 17   | 9    | 4  5  6     |
    slot_mapping      where each token's keys and values are written
    logit rows        |                 x   | x    | x    |       x     |    the last token of each

A request gets a row of logits only if its last known token is in this step: a prompt that is
computed in several steps (chapter 6) yields none until its last one."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import torch

from common.model import DecoderModel
from common.sampler import SamplingBatch
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
    logit_req_ids: list[str]
    sampling: SamplingBatch = field(repr=False)


class BlockTables:
    """The block tables of all requests in one array, a row each, so that a step's tables are one
    gather."""

    def __init__(self, num_rows: int, num_columns: int) -> None:
        self.ids = np.zeros((num_rows, num_columns), dtype=np.int32)  # 0: the null block
        self._free_rows = list(range(num_rows - 1, -1, -1))

    def take_row(self) -> int:
        if not self._free_rows:  # more requests remembered than run at once: some were preempted
            num_rows = len(self.ids)
            self.ids = np.concatenate([self.ids, np.zeros_like(self.ids)])
            self._free_rows = list(range(2 * num_rows - 1, num_rows - 1, -1))
        return self._free_rows.pop()

    def release_row(self, row: int) -> None:
        self._free_rows.append(row)


class PagedModelRunner:
    """A `ModelRunner` (chapter 1) over chapter 2's paged KV cache.

    `shuffle_seed`, a debug switch, puts each batch in a random order: no output may depend on it.
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
        self._shuffle = None if shuffle_seed is None else random.Random(shuffle_seed)

    def prepare(self, output: SchedulerOutput) -> PagedBatch | None:
        """Bring the requests up to date and lay out the step's tokens. None if nothing is
        scheduled."""
        starts = self._apply(output)
        return None if output.is_empty else self._lay_out(starts, output.num_scheduled_tokens)

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
            end = request.num_blocks + len(block_ids)
            self.tables.ids[request.row, request.num_blocks : end] = block_ids
            request.num_blocks = end

    # -- the batch

    def _lay_out(self, starts: dict[str, int], num_scheduled: dict[str, int]) -> PagedBatch:
        req_ids = list(starts)
        if self._shuffle is not None:
            self._shuffle.shuffle(req_ids)
        requests = [self.requests[r] for r in req_ids]
        start = np.array([starts[r] for r in req_ids])
        query_lens = np.array([num_scheduled[r] for r in req_ids])
        stop = start + query_lens
        rows = np.array([request.row for request in requests])
        query_start_loc = np.zeros(len(req_ids) + 1, dtype=np.int64)
        np.cumsum(query_lens, out=query_start_loc[1:])

        token_row = np.repeat(np.arange(len(req_ids)), query_lens)
        positions = np.arange(query_start_loc[-1]) - query_start_loc[token_row] + start[token_row]
        block_ids = self.tables.ids[rows[token_row], positions // self.block_size].astype(np.int64)
        slot_mapping = block_ids * self.block_size + positions % self.block_size
        input_ids: list[int] = []
        for request, first, last in zip(requests, start.tolist(), stop.tolist(), strict=True):
            input_ids += request.tokens(first, last)

        known = np.array([request.num_tokens for request in requests])
        logit_rows = np.flatnonzero(stop == known)
        max_seq_len = int(stop.max())
        max_blocks = -(-max_seq_len // self.block_size)
        attention = AttentionMetadata(
            query_start_loc=self._tensor(query_start_loc),
            seq_lens=self._tensor(stop),
            block_tables=self._tensor(self.tables.ids[rows, :max_blocks]),
            slot_mapping=self._tensor(slot_mapping),
            max_query_len=int(query_lens.max()),
            max_seq_len=max_seq_len,
        )
        chosen = logit_rows.tolist()
        return PagedBatch(
            req_ids=req_ids,
            input_ids=self._tensor(np.array(input_ids, dtype=np.int64)),
            positions=self._tensor(positions),
            attention=attention,
            logit_indices=self._tensor(query_start_loc[1:][logit_rows] - 1),
            logit_req_ids=[req_ids[i] for i in chosen],
            sampling=self._sampling([req_ids[i] for i in chosen]),
        )

    def _sampling(self, req_ids: list[str]) -> SamplingBatch:
        requests = [self.requests[r] for r in req_ids]
        return SamplingBatch(
            req_ids=req_ids,
            params=[request.params for request in requests],
            seeds=[request.params.seed or 0 for request in requests],
            prompt_token_ids=[request.prompt_token_ids for request in requests],
            output_token_ids=[request.output_token_ids for request in requests],
            eos_token_ids=[
                () if request.params.ignore_eos else self.eos_token_ids for request in requests
            ],
        )

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        """To the device. A fresh staging copy each time: a reused one could be overwritten while an
        asynchronous copy still reads it."""
        tensor = torch.from_numpy(array)
        if self.device.type == "cuda":
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor
