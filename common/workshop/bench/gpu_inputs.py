"""How large everything in the GPU report is, and fresh inputs for it.

`FULL` is for a GPU, `REHEARSAL` for the interpreter on a CPU: the same code with other numbers.
Inputs are drawn anew in every run (`--seed` repeats one). Those of attention lie as the engine has
them: blocks in random order, read through tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch.nn import functional as F

from common.linear import linear_layers
from common.loader import LoadedModel
from common.model_config import ModelConfig
from common.workshop.bench.gpu_arithmetic import Ceilings, Cost, Heads, Lengths
from common.workshop.bench.random_weights import QWEN3_0_6B, random_model
from mixed_batch import MixedMetadata
from paged_attention import AttentionMetadata

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BLOCK_SIZE = 16
Batch = tuple[tuple[int, int], ...]  # (query tokens, keys) of each sequence, decodes in front


@dataclass(frozen=True, slots=True)
class Sizes:
    """The most telling come first: a section that runs out of time leaves out the last."""

    model: ModelConfig
    copy_bytes: int
    matrix_size: int
    checked: Batch
    checked_rows: tuple[int, ...]
    decodes: tuple[Batch, ...]
    mixed: tuple[Batch, ...]  # batches with chunks
    rows: tuple[int, ...]  # tokens of the small kernels
    num_requests: tuple[int, ...]  # of verification and sampling
    num_drafts: int
    steps: tuple[Batch, ...]  # of the model alone, and the engine
    num_decode_steps: int
    workload: tuple[int, tuple[int, int], tuple[int, int]]  # requests, tokens in, tokens out
    num_runs: int  # of the workload, if there is time
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int


def decodes(num_seqs: int, context: int) -> Batch:
    return ((1, context),) * num_seqs


def grid(batches: Sequence[int], contexts: Sequence[int]) -> tuple[Batch, ...]:
    """All pairs, those that an aim speaks of first."""
    pairs = [(n, context) for n in batches for context in contexts]
    pairs.sort(key=lambda pair: (pair[1] != 2048, pair[0] < 64))
    return tuple(decodes(*pair) for pair in pairs)


def describe_batch(lengths: Lengths) -> str:
    """`256 x (1, 2,048) + 1 x (512, 2,048)`: sequences x (query tokens, keys)."""
    parts = {length: sum(other == length for other in lengths) for length in lengths}
    return " + ".join(f"{n} x ({q:,}, {k:,})" for (q, k), n in parts.items())


FULL = Sizes(
    model=QWEN3_0_6B,
    copy_bytes=2 << 30,
    matrix_size=8192,
    checked=(
        *((1, n) for n in (1, 17, 300, 2049, 6000)),
        *((5, 5), (70, 70), (33, 290), (257, 1500)),
    ),
    checked_rows=(67,),
    decodes=grid((1, 4, 16, 64, 128, 256, 512), (256, 1024, 2048, 4096, 8192)),
    mixed=(
        ((2048, 2048),),
        (*decodes(256, 2048), (512, 2048)),
        ((512, 512),) * 4,
        ((2048, 8192),),
        ((512, 8192),),
    ),
    rows=(64, 256, 512, 1, 2048, 8192),
    num_requests=(64, 256, 512, 1),
    num_drafts=4,
    steps=grid((1, 8, 64, 128, 256, 512), (256, 2048, 8192)),
    num_decode_steps=24,
    workload=(256, (100, 1024), (100, 1024)),
    num_runs=3,
    max_num_seqs=512,
    max_num_batched_tokens=16384,
    max_model_len=8448,
)
TINY_MODEL = replace(
    QWEN3_0_6B,
    vocab_size=33,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=128,
    eos_token_ids=(2,),
)
REHEARSAL = Sizes(
    model=TINY_MODEL,
    copy_bytes=1 << 16,
    matrix_size=32,
    checked=((1, 1), (3, 20)),
    checked_rows=(3,),
    decodes=(decodes(2, 20), decodes(1, 300)),
    mixed=(((1, 20), (5, 20)),),
    rows=(2,),
    num_requests=(2,),
    num_drafts=2,
    steps=(decodes(2, 20), decodes(3, 20)),  # and one that does not fit
    num_decode_steps=2,
    workload=(2, (3, 6), (2, 3)),
    num_runs=1,
    max_num_seqs=2,
    max_num_batched_tokens=64,
    max_model_len=64,
)


@dataclass
class Lab:
    """Where and how large everything is measured. `sections` are the record's."""

    device: torch.device
    sizes: Sizes
    seed: int
    sections: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.bfloat16  # of what is timed

    def __post_init__(self) -> None:
        self.generator = torch.Generator(self.device).manual_seed(self.seed)

    @property
    def is_rehearsal(self) -> bool:
        return self.device.type == "cpu"

    @property
    def heads(self) -> Heads:
        return Heads.of(self.sizes.model, self.dtype.itemsize)

    @property
    def ceilings(self) -> Ceilings:
        """Raises `RuntimeError` if the section that measures them has failed."""
        found = self.sections.get("ceilings", {}).get("results", {})
        if "matrix_tflop_per_s" not in found:
            raise RuntimeError("the ceilings were not measured, so nothing can be set beside them")
        return Ceilings(found["copy_gb_per_s"][0], found["matrix_tflop_per_s"][0])

    @cached_property
    def loaded(self) -> LoadedModel:
        """Random weights, which take the same time as trained ones."""
        return random_model(self.sizes.model, self.seed, self.dtype, self.device)

    @cached_property
    def num_weights(self) -> int:
        """Of all matrices that a step multiplies with: those of the layers, and the head."""
        matrices = linear_layers(self.loaded.model)
        return sum(matrix.plain_weight().numel() for matrix in matrices)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        values = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        return values.normal_(generator=self.generator)

    def integers(self, high: int, *shape: int) -> torch.Tensor:
        """int64 in [0, high)."""
        return torch.randint(high, shape, device=self.device, generator=self.generator)

    def uniform(self, *shape: int) -> torch.Tensor:
        """float64 in [0, 1)."""
        kind: dict[str, Any] = {"device": self.device, "generator": self.generator}
        return torch.rand(*shape, dtype=torch.float64, **kind)

    def order(self, n: int) -> torch.Tensor:
        return torch.randperm(n, device=self.device, generator=self.generator)


@dataclass(frozen=True, slots=True)
class Call:
    """A kernel's call on some inputs, what it costs at least, and what it should give, by name:
    float64, or numbers in the dtype of the kernel, which have to be equal. `call` can be repeated,
    and reads no value on the host; `expected` is asked before the first call."""

    call: Callable[[], Sequence[torch.Tensor]]
    cost: Cost
    expected: Callable[[], dict[str, torch.Tensor]]


# -- attention


@dataclass(frozen=True, slots=True)
class PagedInputs:
    """A batch over paged keys and values, decodes in front."""

    lengths: Batch
    query: torch.Tensor  # [num_tokens, num_heads, head_dim]
    key_cache: torch.Tensor  # [num_blocks, block_size, num_kv_heads, head_dim]
    value_cache: torch.Tensor
    tables: torch.Tensor  # [num_seqs, max_blocks] int32

    @property
    def scale(self) -> float:
        return self.query.shape[2] ** -0.5

    def slots(self, row: int, first: int = 0) -> torch.Tensor:
        """int64, of a sequence's positions from `first` on."""
        positions = torch.arange(first, self.lengths[row][1], device=self.tables.device)
        blocks = self.tables[row, positions // BLOCK_SIZE].long()
        return blocks * BLOCK_SIZE + positions % BLOCK_SIZE

    def metadata(self) -> AttentionMetadata:
        query_lens, seq_lens = map(list, zip(*self.lengths))
        starts, device = [0, *accumulate(query_lens)], self.query.device
        slots = [self.slots(row, seq_len - n) for row, (n, seq_len) in enumerate(self.lengths)]
        return MixedMetadata(
            query_start_loc=torch.tensor(starts, device=device),
            seq_lens=torch.tensor(seq_lens, device=device),
            block_tables=self.tables,
            slot_mapping=torch.cat(slots),
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
        query = self.query[first : first + query_len].double()
        keys, values = (
            cache.flatten(0, 1)[self.slots(row)].double()
            for cache in (self.key_cache, self.value_cache)
        )
        query, keys, values = (x.transpose(0, 1)[None] for x in (query, keys, values))
        is_seen = torch.ones(query_len, seq_len, dtype=torch.bool, device=query.device)
        is_seen = is_seen.tril(seq_len - query_len)
        out = F.scaled_dot_product_attention(
            query, keys, values, attn_mask=is_seen, scale=self.scale, enable_gqa=True
        )
        return out[0].transpose(0, 1)


def num_blocks_of(lengths: Lengths) -> int:
    return sum(-(-seq_len // BLOCK_SIZE) for _, seq_len in lengths)


def make_caches(lab: Lab, num_blocks: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Keys and values of one layer, random, block 0 included."""
    shape = num_blocks + 1, BLOCK_SIZE, lab.heads.num_kv_heads, lab.heads.head_dim
    return [lab.normal(*shape, dtype=dtype) for _ in range(2)]


def paged_inputs(lab: Lab, lengths: Batch, caches: Sequence[torch.Tensor]) -> PagedInputs:
    """Caches of at least as many blocks, and block 0."""
    counts = [-(-seq_len // BLOCK_SIZE) for _, seq_len in lengths]
    order = lab.order(len(caches[0]) - 1).int() + 1
    tables = torch.zeros(len(lengths), max(counts), dtype=torch.int32, device=lab.device)
    for row, (start, n) in enumerate(zip(accumulate(counts, initial=0), counts)):
        tables[row, :n] = order[start : start + n]
    # As in the engine, queries and keys are slices of one tensor.
    num_heads = lab.heads.num_heads + lab.heads.num_kv_heads
    num_tokens = sum(query_len for query_len, _ in lengths)
    qk = lab.normal(num_tokens, num_heads, lab.heads.head_dim, dtype=caches[0].dtype)
    query, (keys, values) = qk[:, : lab.heads.num_heads], caches
    return PagedInputs(lengths, query, keys, values, tables)


def spoil_unused(inputs: PagedInputs) -> None:
    """NaN in every slot that is no sequence's."""
    used = torch.cat([inputs.slots(row) for row in range(len(inputs.lengths))])
    for cache in (inputs.key_cache, inputs.value_cache):
        slots = cache.flatten(0, 1)
        kept = slots[used]
        slots.fill_(math.nan)[used] = kept
