"""How large everything in the GPU report is, and fresh inputs for it.

`FULL` is for a GPU, `REHEARSAL` for the interpreter on a CPU: the same code with other numbers.
Inputs are drawn anew in every run (`--seed` repeats one). Those of attention lie as the engine has
them: blocks in random order, read through tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple

import torch

from common.model_config import ModelConfig
from common.workshop.bench.gpu_arithmetic import Ceilings, Heads
from common.workshop.bench.gpu_device import Device
from common.workshop.bench.random_weights import QWEN3_0_6B
from mixed_batch import MixedMetadata
from paged_attention import AttentionMetadata

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BLOCK_SIZE = 16


class Cell(NamedTuple):
    """A place in a grid: so many sequences (or tokens, or requests), keys of each."""

    num_seqs: int
    context: int = 0

    def __str__(self) -> str:
        return f"{self.num_seqs} x {self.context:,}" if self.context else f"{self.num_seqs:,}"


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of cells the most telling come first: a section that runs out of time leaves out the last."""

    model: ModelConfig
    repeats: int
    copy_bytes: int
    matrix_size: int
    checked: tuple[tuple[int, int], ...]  # (query tokens, keys) of each sequence, decodes in front
    checked_rows: int
    decode_cells: tuple[Cell, ...]
    mixed: tuple[tuple[tuple[int, int], ...], ...]  # lengths of batches with chunks
    rows: tuple[int, ...]  # tokens of the small kernels
    num_requests: tuple[int, ...]  # of verification and sampling
    num_drafts: int
    forward_cells: tuple[Cell, ...]  # the model alone, and the engine
    num_decode_steps: int
    workload: tuple[int, tuple[int, int], tuple[int, int]]  # requests, tokens in, tokens out
    num_runs: int  # of the workload, if there is time
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int  # of decode steps
    workload_model_len: int


def grid(batches: Sequence[int], contexts: Sequence[int]) -> tuple[Cell, ...]:
    """All pairs, those that an aim speaks of first."""
    cells = [Cell(n, context) for n in batches for context in contexts]
    return tuple(sorted(cells, key=lambda c: (c.context != 2048, c.num_seqs < 64)))


FULL = Sizes(
    model=QWEN3_0_6B,
    repeats=15,
    copy_bytes=2 << 30,
    matrix_size=8192,
    checked=(
        *((1, n) for n in (1, 17, 300, 2049, 6000)),
        *((5, 5), (70, 70), (33, 290), (257, 1500)),
    ),
    checked_rows=67,
    decode_cells=grid((1, 4, 16, 64, 128, 256, 512), (256, 1024, 2048, 4096, 8192)),
    mixed=(
        ((2048, 2048),),
        ((1, 2048),) * 256 + ((512, 2048),),
        ((512, 512),) * 4,
        ((2048, 8192),),
        ((512, 8192),),
    ),
    rows=(64, 256, 512, 1, 2048, 8192),
    num_requests=(64, 256, 512, 1),
    num_drafts=4,
    forward_cells=grid((1, 8, 64, 128, 256, 512), (256, 2048, 8192)),
    num_decode_steps=24,
    workload=(256, (100, 1024), (100, 1024)),
    num_runs=3,
    max_num_seqs=512,
    max_num_batched_tokens=16384,
    max_model_len=8448,
    workload_model_len=4096,
)
TINY_MODEL = replace(
    QWEN3_0_6B,
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=128,
    eos_token_ids=(2,),
)
REHEARSAL = Sizes(
    model=TINY_MODEL,
    repeats=2,
    copy_bytes=1 << 16,
    matrix_size=32,
    checked=((1, 1), (1, 17), (1, 300), (5, 5), (3, 20)),
    checked_rows=3,
    decode_cells=(Cell(2, 20), Cell(1, 300)),
    mixed=(((1, 20), (5, 20)),),
    rows=(2,),
    num_requests=(2,),
    num_drafts=2,
    forward_cells=(Cell(2, 20), Cell(1 << 20, 20)),  # and one that does not fit
    num_decode_steps=2,
    workload=(2, (3, 6), (2, 3)),
    num_runs=1,
    max_num_seqs=2,
    max_num_batched_tokens=64,
    max_model_len=64,
    workload_model_len=64,
)


@dataclass(slots=True)
class Lab:
    """Where and how large everything is measured."""

    device: Device
    sizes: Sizes
    seed: int
    dtype: torch.dtype = torch.bfloat16  # of what is timed
    ceilings: Ceilings | None = None  # when they have been measured
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.generator = torch.Generator(self.device.torch_device).manual_seed(self.seed)

    @property
    def heads(self) -> Heads:
        return Heads.of(self.sizes.model, self.dtype.itemsize)

    @property
    def measured(self) -> Ceilings:
        """Raises `RuntimeError` if the section that measures them has failed."""
        if self.ceilings is None:
            raise RuntimeError("the ceilings were not measured, so nothing can be set beside them")
        return self.ceilings

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        values = torch.empty(shape, dtype=dtype or self.dtype, device=self.device.torch_device)
        return values.normal_(generator=self.generator)

    def integers(self, high: int, *shape: int) -> torch.Tensor:
        """int64 in [0, high)."""
        where = {"device": self.device.torch_device, "generator": self.generator}
        return torch.randint(high, shape, **where)

    def uniform(self, *shape: int) -> torch.Tensor:
        """float64 in [0, 1)."""
        where = {"device": self.device.torch_device, "generator": self.generator}
        return torch.rand(*shape, dtype=torch.float64, **where)

    def poison(self, num_bytes: int) -> None:
        """Memory that is handed out next is likely to be NaN: an output that a kernel does not
        write shows."""
        nan = torch.full((num_bytes // 4,), math.nan, device=self.device.torch_device)
        del nan


# -- attention


@dataclass(frozen=True, slots=True)
class PagedInputs:
    """A batch over paged keys and values, decodes in front."""

    lengths: list[tuple[int, int]]
    query: torch.Tensor  # [num_tokens, num_heads, head_dim]
    key_cache: torch.Tensor  # [num_blocks, block_size, num_kv_heads, head_dim]
    value_cache: torch.Tensor
    tables: torch.Tensor  # [num_seqs, max_blocks] int32

    @property
    def scale(self) -> float:
        return self.query.shape[2] ** -0.5

    @property
    def slot_mapping(self) -> torch.Tensor:  # [num_tokens] int64
        block_size = self.key_cache.shape[1]
        slots = []
        for row, (query_len, seq_len) in enumerate(self.lengths):
            positions = torch.arange(seq_len - query_len, seq_len, device=self.tables.device)
            blocks = self.tables[row, positions // block_size].long()
            slots.append(blocks * block_size + positions % block_size)
        return torch.cat(slots)

    def metadata(self) -> AttentionMetadata:
        query_lens = [query_len for query_len, _ in self.lengths]
        seq_lens = [seq_len for _, seq_len in self.lengths]
        starts, device = [0, *accumulate(query_lens)], self.query.device
        return MixedMetadata(
            query_start_loc=torch.tensor(starts, device=device),
            seq_lens=torch.tensor(seq_lens, device=device),
            block_tables=self.tables,
            slot_mapping=self.slot_mapping,
            max_query_len=max(query_lens),
            max_seq_len=max(seq_lens),
            num_short=sum(query_len == 1 for query_len in query_lens),
            query_starts=starts,
            host_seq_lens=seq_lens,
        )

    def in_float64(self, row: int) -> torch.Tensor:
        """Attention of one sequence [query_len, num_heads, head_dim], by the definition."""
        query_len, seq_len = self.lengths[row]
        first = sum(query_len for query_len, _ in self.lengths[:row])
        block_ids = self.tables[row, : -(-seq_len // self.key_cache.shape[1])].long()
        keys, values = (
            cache[block_ids].flatten(0, 1)[:seq_len].double()
            for cache in (self.key_cache, self.value_cache)
        )
        query = self.query[first : first + query_len].double()
        query = query.unflatten(1, (keys.shape[1], -1))
        scores = torch.einsum("qksd,nkd->ksqn", query, keys) * self.scale
        positions = torch.arange(seq_len, device=query.device)
        is_hidden = positions > positions[seq_len - query_len :, None]
        weights = scores.masked_fill_(is_hidden, -math.inf).softmax(-1)
        return torch.einsum("ksqn,nkd->qksd", weights, values).flatten(1, 2)


def decode_lengths(cell: Cell) -> list[tuple[int, int]]:
    return [(1, cell.context)] * cell.num_seqs


def num_blocks_of(lengths: Sequence[tuple[int, int]]) -> int:
    return sum(-(-seq_len // BLOCK_SIZE) for _, seq_len in lengths)


def make_caches(lab: Lab, num_blocks: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of one layer, random, block 0 included."""
    heads = lab.heads
    shape = num_blocks + 1, BLOCK_SIZE, heads.num_kv_heads, heads.head_dim
    return lab.normal(*shape, dtype=dtype), lab.normal(*shape, dtype=dtype)


def paged_inputs(
    lab: Lab,
    lengths: Sequence[tuple[int, int]],
    caches: tuple[torch.Tensor, torch.Tensor],  # of at least as many blocks, and block 0
    poisoned: bool = False,  # NaN in every slot that is no sequence's
) -> PagedInputs:
    key_cache, value_cache = caches
    num_blocks = [-(-seq_len // BLOCK_SIZE) for _, seq_len in lengths]
    device = key_cache.device
    order = torch.randperm(len(key_cache) - 1, generator=lab.generator, device=device).int() + 1
    tables = torch.zeros(len(lengths), max(num_blocks), dtype=torch.int32, device=device)
    for row, (start, n) in enumerate(zip(accumulate(num_blocks, initial=0), num_blocks)):
        tables[row, :n] = order[start : start + n]
    if poisoned:
        unused = torch.ones(key_cache.shape[:2], dtype=torch.bool, device=device)
        for row, (_, seq_len) in enumerate(lengths):
            positions = torch.arange(seq_len, device=device)
            unused[tables[row, positions // BLOCK_SIZE].long(), positions % BLOCK_SIZE] = False
        for cache in caches:
            cache[unused] = math.nan
    num_tokens = sum(query_len for query_len, _ in lengths)
    heads = lab.heads
    # As in the engine, queries and keys are slices of one tensor.
    num_heads = heads.num_heads + heads.num_kv_heads
    qk = lab.normal(num_tokens, num_heads, heads.head_dim, dtype=key_cache.dtype)
    query = qk[:, : heads.num_heads]
    return PagedInputs(list(lengths), query, key_cache, value_cache, tables)
