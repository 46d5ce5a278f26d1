"""Graphs: record a decode step once, and replay it with one call.

The device computes a decode step of a small model faster than the host launches its kernels, about
a dozen per layer. A graph stores the launches of a whole step, including everything that the host
decided: grids, tiles, addresses, sizes. Only the static inputs can differ from step to step:

    step of 3 requests, bucket 4          rows 0-2          row 3: padding
    input_ids, positions                  the requests'     0
    seq_lens                              the requests'     0: nothing is read
    query_start_loc                       0 1 2 3           3: a sequence without query tokens
    logit_indices                         rows that sample  0: computed and discarded
    slot_mapping, of each group           the requests'     -1: nothing is written
    block_tables, of each group           the requests'     0: the null block

The inputs are gathered from the columns of `BatchState`, uploaded in one copy, and then copied to
the static memory. The second copy is queued after the previous replay, which still reads that
memory; the upload uses fresh memory each time. So a step can start while the previous one runs
(`overlap.py`), and a pending token is filled in on the device, before the replay. All buckets share
the memory of the logits, which the next replay overwrites.

A step uses the smallest bucket that holds it. A step with more than one token for a request (prompt
chunks, draft tokens to verify) is computed without graphs. Where adapters are allowed, the graphs
read one more column: the slot of each row's adapter.

Invariants: a replay reads only the static inputs, the weights and the KV cache; no row of a request
depends on padding; the largest bucket holds `max_num_seqs` (Trap 33).

nano-vllm captures the same buckets, mini-sglang every 8; both for decodes only. vLLM also captures
the parts between attention layers, for any batch.

See common/README.md#graphs"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from batch_layout import ComposedBatch, PagedRunnerState, Queries, StepLayout, compose_in_order
from common.models.model import DecoderModel
from common.runner.model_runner import Compose, PagedBatch, PagedModelRunner
from common.sampling.runner_plugin import StepRows
from paged_attention import AttentionBackend, AttentionMetadata, PagedKVCache
from window_attention import window_of_decodes


class CannotCapture(Exception):
    """Raised at capture if a step waits for the device or reads host memory. Names the place."""


def graph_buckets(max_num_seqs: int) -> list[int]:
    """Return the bucket sizes: 1, 2, 4, 8, then every 16, and always `max_num_seqs`."""
    sizes = {1, 2, 4, 8, *range(16, max_num_seqs, 16), max_num_seqs}
    return sorted(size for size in sizes if size <= max_num_seqs)


def bucket_of(num_rows: int, buckets: Sequence[int]) -> int | None:
    """Return the smallest of the ascending `buckets` that holds `num_rows`, or None."""
    return next((bucket for bucket in buckets if bucket >= num_rows), None)


# -- inputs of a replay


@dataclass(frozen=True, slots=True)
class StaticInputs:
    """The inputs of one bucket, at addresses that never change."""

    input_ids: torch.Tensor  # [bucket] int64
    positions: torch.Tensor  # [bucket] int64
    seq_lens: torch.Tensor  # [bucket] int64
    query_start_loc: torch.Tensor  # [bucket + 1] int64
    logit_indices: torch.Tensor  # [bucket] int64
    slot_mapping: torch.Tensor  # [num_groups, bucket] int64
    block_tables: torch.Tensor  # [num_groups, bucket, blocks of the longest request] int32


NUM_COLUMNS = 5  # and one of slots for each group of layers


class StaticMemory:
    """Memory for the largest bucket, shared by the others, which start at the same addresses."""

    def __init__(
        self, max_num_rows: int, table_width: int, device: torch.device, num_groups: int = 1
    ) -> None:
        # Each column, and each group's tables, start at a multiple of 16 bytes.
        width = (max_num_rows + 2) // 2 * 2
        shape = (NUM_COLUMNS + num_groups, width)
        self.columns = torch.zeros(shape, dtype=torch.int64, device=device)
        size = max_num_rows * table_width
        tables = torch.zeros(num_groups, -(-size // 4) * 4, dtype=torch.int32, device=device)
        self.block_tables = tables[:, :size].view(num_groups, max_num_rows, table_width)

    def inputs(self, bucket: int) -> StaticInputs:
        columns = self.columns
        return StaticInputs(
            input_ids=columns[0, :bucket],
            positions=columns[1, :bucket],
            seq_lens=columns[2, :bucket],
            query_start_loc=columns[3, : bucket + 1],
            logit_indices=columns[4, :bucket],
            slot_mapping=columns[NUM_COLUMNS:, :bucket],
            block_tables=self.block_tables[:, :bucket],
        )

    def fill(self, columns: torch.Tensor, block_tables: torch.Tensor) -> None:
        """Copy the arrays of `pad_step`, already on the device, into the static memory. Later
        columns of the tables are left unchanged."""
        _, bucket, width = block_tables.shape
        self.columns[:, : bucket + 1].copy_(columns)
        self.block_tables[:, :bucket, :width].copy_(block_tables)


def pad_step(
    state: PagedRunnerState, queries: Queries, block_size: int, bucket: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the padded inputs of a step of up to `bucket` queries of one token each, on the host:
    `[NUM_COLUMNS + num_groups, bucket + 1]` int64, and `[num_groups, bucket, blocks of the
    longest]` int32."""
    rows = queries.rows
    positions = queries.starts
    n = len(queries.rows)
    num_groups = len(state.groups)
    sampled = np.flatnonzero(queries.num_logit_rows)
    columns = np.zeros((NUM_COLUMNS + num_groups, bucket + 1), dtype=np.int64)
    ids, places, seq_lens, starts, logit_indices, *slots_of = columns
    ids[:n] = state.token_ids[rows, positions]
    places[:n] = positions
    seq_lens[:n] = positions + 1
    starts[:n] = np.arange(n)
    starts[n:] = n
    logit_indices[: len(sampled)] = sampled
    width = -(-int(seq_lens.max()) // block_size)
    tables = np.zeros((num_groups, bucket, width), dtype=np.int32)
    for group, slots, table in zip(state.groups, slots_of, tables, strict=True):
        block_ids = group.block_tables[rows, positions // block_size].astype(np.int64)
        slots[:n] = block_ids * block_size + positions % block_size
        slots[n:] = -1
        table[:n] = group.block_tables[rows, :width]
    return columns, tables


# -- captured functions of tensors at fixed addresses, by bucket


class CudaGraphs:
    """CUDA graphs, which share one pool of scratch memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool = torch.cuda.graph_pool_handle()
        # One stream for all: cuBLAS keeps a workspace (32 MiB on Hopper) for each stream it used.
        self._side = torch.cuda.Stream(device)
        self._captured: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}

    @torch.inference_mode()
    def capture(self, bucket: int, function: Callable[[], torch.Tensor]) -> None:
        """Capture `function`, which is called several times on padding inputs. Raises
        `CannotCapture`."""
        with torch.cuda.device(self.device):
            self._side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._side):  # compiles kernels, libraries allocate memory
                for _ in range(2):
                    function()
            torch.cuda.current_stream().wait_stream(self._side)
            graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
            try:
                # Other threads can continue their work.
                with torch.cuda.graph(graph, self._pool, capture_error_mode="thread_local"):
                    output = function()
            except RuntimeError as error:
                self._leave_capture(stream)
                # Ending the capture fails too, with a less useful message than the cause.
                first = error.__context__ or error
                if isinstance(first, torch.OutOfMemoryError | KeyboardInterrupt):
                    raise first from None
                raise CannotCapture(str(first).partition("\n")[0]) from error
        self._captured[bucket] = graph, output

    def _leave_capture(self, stream: torch.cuda.Stream) -> None:
        """Clean up after `torch.cuda.graph` if ending a capture fails: the capture's stream is
        still the current one, and up to PyTorch 2.11 the allocator still records for the pool, so
        that `empty_cache` fails. Later versions end the recording, and refuse to end it twice."""
        torch.cuda.set_stream(stream)
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)
            torch._C._cuda_releasePool(torch.cuda.current_device(), self._pool)

    def replay(self, bucket: int, num_rows: int) -> torch.Tensor:
        """Return the result of `function` for the current inputs, of which `num_rows` are not
        padding. The next replay of any bucket overwrites the result."""
        graph, output = self._captured[bucket]
        graph.replay()
        return output


# -- decode steps of a model


class DecodeGraphs:
    """One graph for each bucket, over one KV cache. The largest is captured first, so that smaller
    ones reuse its scratch memory. Raises `CannotCapture`. `part` makes what a runner plugin of its
    name stages, from that plugin's column (`AdapterSlots.in_graph`)."""

    def __init__(
        self,
        graphs: CudaGraphs,
        model: DecoderModel,
        kv_cache: PagedKVCache,
        backend: AttentionBackend,
        max_num_seqs: int,
        max_model_len: int,
        part: Any = None,
    ) -> None:
        self.graphs = graphs
        self.model = model
        self.kv_cache = kv_cache
        self.backend = backend
        self.part = part
        self.buckets = graph_buckets(max_num_seqs)
        table_width = -(-max_model_len // kv_cache.block_size)
        self.max_seq_len = table_width * kv_cache.block_size
        device = model.embed_weight.device
        self.memory = StaticMemory(max_num_seqs, table_width, device, model.num_groups)
        self.column = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)  # the part's
        self.logits = model.embed_weight.new_empty(max_num_seqs, model.config.vocab_size)
        self.inputs = {bucket: self.memory.inputs(bucket) for bucket in self.buckets}
        self.attention = {bucket: self._metadata(bucket) for bucket in self.buckets}
        self.num_replays = 0
        for bucket in reversed(self.buckets):
            self._clear(bucket)
            graphs.capture(bucket, partial(self._compute, bucket))

    def _clear(self, bucket: int) -> None:
        """Set the inputs of a step without requests."""
        self.memory.columns.zero_()
        self.column.zero_()
        self.inputs[bucket].slot_mapping.fill_(-1)
        self.memory.block_tables[:, :bucket, :1] = 0

    def _compute(self, bucket: int) -> torch.Tensor:
        """Return logits [bucket, vocab_size], in the memory that all buckets share."""
        x = self.inputs[bucket]
        groups = zip(self.attention[bucket], self.model.groups.windows, strict=True)
        size = self.kv_cache.block_size
        attention = tuple(m if w is None else window_of_decodes(m, w, size) for m, w in groups)
        batch = ComposedBatch(x.input_ids, x.positions, attention, x.logit_indices)
        if self.part is not None:
            staged = self.part.in_graph(self.column[:bucket], x.logit_indices)
            batch.staged[self.part.name] = staged
        batch.plan_attention(self.backend, self.model.num_heads, self.kv_cache)
        return self.model(batch, self.kv_cache, self.logits[:bucket])

    def _metadata(self, bucket: int) -> tuple[AttentionMetadata, ...]:
        """Return the metadata of a replay by group. Its integers are upper bounds, and the plan
        that a backend makes with the metadata is part of the graph."""
        x = self.inputs[bucket]
        return tuple(
            AttentionMetadata(
                query_start_loc=x.query_start_loc,
                seq_lens=x.seq_lens,
                block_tables=block_tables,
                slot_mapping=slot_mapping,
                max_query_len=1,
                max_seq_len=self.max_seq_len,
            )
            for block_tables, slot_mapping in zip(x.block_tables, x.slot_mapping, strict=True)
        )

    def bucket_for(self, queries: Queries) -> int | None:
        """Return the bucket of a step. None: the step is computed without a graph."""
        if queries.num_tokens.max() > 1:
            return None
        return bucket_of(len(queries.rows), self.buckets)

    def compose(
        self,
        state: PagedRunnerState,
        queries: Queries,
        block_size: int,
        bucket: int,
        column: np.ndarray | None = None,  # [num_queries] int64: the part's, if there is one
    ) -> StepLayout:
        """Lay the step out for the static inputs, in the order given."""
        x = self.inputs[bucket]
        n = len(queries.rows)
        num_logit_rows = np.count_nonzero(queries.num_logit_rows)
        arrays = list(pad_step(state, queries, block_size, bucket))
        if column is not None:
            arrays.append(np.pad(column, (0, bucket - n)))

        def compose(tensors: Sequence[torch.Tensor]) -> ComposedBatch:
            columns, block_tables, *part_column = tensors
            self.memory.fill(columns, block_tables)
            for values in part_column:
                self.column[:bucket].copy_(values)
            rows = x.logit_indices[:num_logit_rows]
            return ComposedBatch(x.input_ids[:n], x.positions[:n], self.attention[bucket], rows)

        return StepLayout(np.arange(n), arrays, compose)

    @torch.inference_mode()
    def replay(self, bucket: int, num_rows: int, num_logit_rows: int) -> torch.Tensor:
        """Return logits `[num_logit_rows, vocab_size]` of the step that was laid out."""
        self.num_replays += 1
        return self.graphs.replay(bucket, num_rows)[:num_logit_rows]


class GraphRunner(PagedModelRunner):
    """A `PagedModelRunner` that replays a graph for a step with one token per request."""

    def __init__(
        self, *, graphs: DecodeGraphs, compose: Compose = compose_in_order, **parts: Any
    ) -> None:
        super().__init__(compose=self._compose_for_replay, **parts)
        self.graphs = graphs
        self._compose_eager = compose
        self._bucket: int | None = None  # of the step that was laid out last; None: no graph

    def _compose_for_replay(
        self, state: PagedRunnerState, queries: Queries, block_size: int
    ) -> StepLayout:
        self._bucket = self.graphs.bucket_for(queries)
        column = None
        for plugin in self.state.plugins:
            if self.graphs.part is not None and plugin.name == self.graphs.part.name:
                column = plugin.column(queries.rows)
            elif plugin.is_in_forward and plugin.concerns(queries.rows):
                self._bucket = None
        if self._bucket is None:
            return self._compose_eager(state, queries, block_size)
        return self.graphs.compose(state, queries, block_size, self._bucket, column)

    def stage(self, step: StepRows) -> dict[str, Any]:
        return {} if self._bucket is not None else super().stage(step)

    def forward(self, batch: PagedBatch) -> torch.Tensor:
        bucket = self._bucket
        if bucket is None:
            return super().forward(batch)
        num_rows = len(batch.input_ids)
        if self.state.has_pending:  # they were filled in in a copy
            self.graphs.inputs[bucket].input_ids[:num_rows].copy_(batch.input_ids)
        return self.graphs.replay(bucket, num_rows, len(batch.logit_indices))
