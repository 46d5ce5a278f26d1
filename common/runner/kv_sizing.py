"""Size the KV cache: `num_blocks`, or as many blocks as fit in memory, with a log message.

`kv_budget.py` of chapter 2 has the arithmetic. On a GPU it starts from the peak of the largest
possible step, which is built and run here; on a CPU from the free memory.

See common/README.md#on-a-gpu"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import accumulate
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import psutil
import torch

from batch_layout import ComposedBatch
from common.engine_config import EngineConfig
from common.models.loader import LoadedModel
from common.models.model_config import SCORED
from common.runner.batch_state import BatchState
from common.sampling.sampler import Sampler
from common.sampling.sampling_columns import SamplingBatch, SamplingColumns
from common.sampling.sampling_rules import SAMPLING_RULES
from kv_budget import (
    BytesForKV,
    CudaMemory,
    MemoryReader,
    free_memory_bytes,
    remaining_bytes,
    share_of_free,
    size_kv_cache,
)
from paged_attention import AttentionBackend, AttentionMetadata, PagedKVCache
from request import SamplingParams
from scheduler_interface import NewRequestData

logger = logging.getLogger(__name__)
_CPU_WARM_UP_TOKENS = 8


class Adapters(Protocol):
    def of_largest_step(self, num_tokens: int, num_logit_rows: int) -> Mapping[str, object]:
        """Return the adapters' staged part of the largest step."""
        ...


@dataclass(frozen=True, slots=True)
class KVDemand:
    """The models and settings that need KV, and everything else that needs memory next to KV."""

    config: EngineConfig
    loaded: LoadedModel
    draft: LoadedModel | None
    backend: AttentionBackend
    max_model_len: int
    vocab_size: int
    kind: type[PagedKVCache] = PagedKVCache
    # Captures the later graphs, because their memory is not available for KV.
    make_graphs: Callable[[PagedKVCache], object] | None = None
    adapters: Adapters | None = None  # their additional products need memory too


@dataclass(frozen=True, slots=True)
class Peers:
    """The other ranks. `min_across` returns the smallest number of all ranks; `num_here` ranks,
    including this one, share this machine's memory."""

    min_across: Callable[[int], int] = int
    num_here: int = 1


NO_PEERS = Peers()


def make_kv_cache(
    demand: KVDemand, peers: Peers = NO_PEERS, memory: MemoryReader | None = None
) -> PagedKVCache:
    """Return KV tensors of `config.num_blocks` blocks, or of as many as fit together with a draft
    model's. `memory` reads the model's device; None: `CudaMemory`, if the device is a GPU."""
    config = demand.config
    loaded = demand.loaded
    draft = demand.draft
    if config.num_blocks is not None:
        return allocate_kv_cache(
            loaded,
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            kind=demand.kind,
            num_here=peers.num_here,
        )
    device = loaded.model.embed_weight.device
    if memory is None and device.type == "cuda":
        memory = CudaMemory(device)
    if memory is None:
        seq_lens = [min(_CPU_WARM_UP_TOKENS, demand.max_model_len)]
        run_forward(loaded, _allocate_for(seq_lens, demand), demand.backend, seq_lens, 1)
        available = share_of_free(free_memory_bytes() // peers.num_here)
    else:
        available = _measure(memory, demand)
    kv_bytes_per_block = allocate_kv_cache(loaded, 1, config.block_size).kv_bytes_per_block
    if draft is not None:
        kv_bytes_per_block += allocate_kv_cache(draft, 1, config.block_size).kv_bytes_per_block
    blocks_per_request = None
    if (groups := loaded.model.groups).have_windows:
        from grouped_kv_memory import max_blocks

        blocks_per_request = max_blocks(
            num_tokens=demand.max_model_len,
            block_size=config.block_size,
            windows=groups.windows,
            max_step_tokens=config.num_in_flight_tokens(device),
        )
    budget = size_kv_cache(
        kv_bytes_per_block=kv_bytes_per_block,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_model_len=demand.max_model_len,
        available=available,
        blocks_per_request=blocks_per_request,
    )
    logger.info(budget.explanation)
    num_blocks = peers.min_across(budget.num_blocks)
    kv_cache = allocate_kv_cache(loaded, num_blocks, config.block_size, demand.kind)
    if device.type == "cpu":
        logger.info(
            "KV cache: up to %.2f GiB, used as blocks fill; this process uses %.2f GiB now",
            num_blocks * kv_cache.kv_bytes_per_block / 2**30,
            psutil.Process().memory_info().rss / 2**30,
        )
    return kv_cache


def allocate_kv_cache(
    loaded: LoadedModel,
    num_blocks: int,
    block_size: int,
    kind: type[PagedKVCache] = PagedKVCache,
    num_here: int = 1,
) -> PagedKVCache:
    """Allocate a KV cache. Raises `ValueError` if a CPU has too little memory for `num_here` of
    them, because writing to memory that was only reserved would kill the process. (Memory that
    another engine has reserved but not written counts as free: add up `num_blocks` if you create
    several engines.)"""
    model = loaded.model
    weight = loaded.model.embed_weight
    num_values = 2 * model.groups.num_tensors * num_blocks * block_size * model.num_kv_heads
    num_bytes = num_values * model.config.head_dim * weight.dtype.itemsize
    if weight.device.type == "cpu" and num_here * num_bytes > (free := free_memory_bytes()):
        ranks = f" on each of {num_here} ranks" if num_here > 1 else ""
        raise ValueError(
            f"num_blocks={num_blocks} with block_size={block_size} needs {num_bytes / 2**30:,.2f} "
            f"GiB of KV cache{ranks}, but only {free / 2**30:,.2f} GiB are free"
        )
    return kind(
        num_layers=model.groups.num_tensors,
        num_blocks=num_blocks,
        block_size=block_size,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.config.head_dim,
        dtype=weight.dtype,
        device=weight.device,
    )


def _allocate_for(seq_lens: list[int], demand: KVDemand) -> PagedKVCache:
    block_size = demand.config.block_size
    num_blocks = sum(-(-n // block_size) for n in seq_lens) + 1
    return allocate_kv_cache(demand.loaded, num_blocks, block_size)


# -- the largest step


def _measure(memory: MemoryReader, demand: KVDemand) -> BytesForKV:
    """Measure the memory of the largest step. Runs it twice, because memory that the sampler keeps
    between steps exists only in the second run. Only the last stage samples, with a grammar mask on
    every row: the mask's bits are expanded to 32-bit numbers, two for each token, and the logits
    exist twice during sampling. The memory of graphs is separate. It is added, and measured
    separately, because PyTorch frees the step's cached memory before it captures a graph."""
    config = demand.config
    loaded = demand.loaded
    vocab_size = demand.vocab_size
    max_step_tokens = min(config.max_num_batched_tokens, config.max_num_seqs * demand.max_model_len)
    seq_lens = _parts_of(max_step_tokens, demand.max_model_len)
    kv_cache = _allocate_for(seq_lens, demand)
    num_rows = min(config.max_num_seqs * config.num_rows_per_request, sum(seq_lens))
    batch = SamplerWarmUp.of(_parts_of(num_rows, config.num_rows_per_request), vocab_size)
    sampler = Sampler(vocab_size)
    from common.sampling.scored_prompts import ScoredPrompts

    device = loaded.model.embed_weight.device
    memory.reset()
    before = memory.read()
    if demand.draft is not None:
        from common.sampling.speculative_sampler import SpeculativeSampler

        weight = loaded.model.embed_weight  # only the sampler holds these probabilities
        probs_of = batch.make_draft_probs(weight, vocab_size).__getitem__
        sampler = SpeculativeSampler(sampler, probs_of)
        del probs_of
    staged: dict[str, object] = {}
    if demand.adapters is not None:
        staged |= demand.adapters.of_largest_step(sum(seq_lens), num_rows)
    cut = _grammars_of_all(num_rows, vocab_size, device)
    for _ in range(2):
        staged[SCORED] = ScoredPrompts.of_many(sum(seq_lens), vocab_size, device)
        logits = run_forward(loaded, kv_cache, demand.backend, seq_lens, num_rows, staged)
        if loaded.model.collectives.ranks.is_last_stage:
            sampler.sample(cut(logits), batch)
        del logits
    after = memory.read()
    if demand.make_graphs is not None:
        memory.reset()
        without = memory.read()
        graphs = demand.make_graphs(kv_cache)
        memory.reset()
        together = memory.read()
        peak = after.peak_reserved + together.reserved - without.reserved
        after = replace(together, peak_reserved=peak)
        del graphs
    kv_bytes = kv_cache.num_blocks * kv_cache.kv_bytes_per_block
    del sampler, kv_cache, cut
    memory.reset()
    return remaining_bytes(before, after, kv_bytes, config.gpu_memory_utilization)


def _grammars_of_all(
    num_rows: int, vocab_size: int, device: torch.device
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the function that masks the logits as if each row had a grammar. Without llguidance
    installed, no request can have a grammar, and the function changes nothing."""
    if find_spec("llguidance") is None:
        return lambda logits: logits
    from common.sampling.sampling_constraints import forbid

    at = torch.arange(num_rows, device=device)
    num_words = -(-vocab_size // 32)
    bits = torch.full((num_rows, num_words), -1, dtype=torch.int32, device=device)
    return lambda logits: forbid(logits, at, bits)


def _parts_of(total: int, largest: int) -> list[int]:
    remainder = total % largest
    return [largest] * (total // largest) + [remainder] * (remainder > 0)


@dataclass(slots=True)
class SamplerWarmUp:
    """The largest batch of a sampler, in which every row uses all sampling parameters."""

    sampling: SamplingBatch

    @classmethod
    def of(cls, rows_per_request: Sequence[int], vocab_size: int) -> SamplerWarmUp:
        max_tokens = 1 << 20
        numbers: dict[str, Any] = {rule.name: rule.example for rule in SAMPLING_RULES}
        numbers["top_k"] = max(1, vocab_size - 1)  # whose tensors are the widest
        params = SamplingParams(
            **numbers,
            seed=0,
            max_tokens=max_tokens,
            min_tokens=max_tokens,
            stop_token_ids=(0,),
            logprobs=min(20, vocab_size),
        )
        rules = {"allowed": None, "biased": [0], "bias": [0.0], "bad_words": []}
        lens = np.array(rows_per_request)
        state = BatchState(len(lens), 0, SamplingColumns())
        for i in range(len(lens)):
            state.admit(NewRequestData(str(i), [0], params, features={"token_rules": rules}))
        state.num_tokens += 1  # an output
        state.widen(2 + lens.max())
        owner = np.repeat(np.arange(len(lens)), lens)
        names = list(map(str, owner))
        num_outputs = 1 + np.arange(len(owner))
        num_outputs -= (np.cumsum(lens) - lens)[owner]
        rows = state.rows_of(names)
        drafts = {str(i): [0] * (n - 1) for i, n in enumerate(rows_per_request) if n > 1}
        return cls(SamplingBatch(state.sampling, names, rows, num_outputs, state, drafts))

    def make_draft_probs(self, weight: torch.Tensor, vocab_size: int) -> dict[str, torch.Tensor]:
        """Return the draft probabilities that a draft model keeps until verification."""
        dtype = torch.promote_types(weight.dtype, torch.float32)
        device = weight.device
        return {
            req_id: torch.full((len(ids), vocab_size), 1 / vocab_size, dtype=dtype, device=device)
            for req_id, ids in self.sampling.drafts.items()
        }


@torch.inference_mode()
def run_forward(
    loaded: LoadedModel,
    kv_cache: PagedKVCache,
    backend: AttentionBackend,
    seq_lens: Sequence[int],
    num_logit_rows: int,
    staged: Mapping[str, object] = MappingProxyType({}),  # by plugins
) -> torch.Tensor:  # [num_logit_rows, vocab_size], or a stage's hidden states
    """Run one step that computes whole prompts of `seq_lens` tokens."""
    device = loaded.model.embed_weight.device
    block_size = kv_cache.block_size
    num_blocks = [-(-n // block_size) for n in seq_lens]
    first_blocks = torch.tensor(list(accumulate(num_blocks, initial=1))[:-1])
    positions = torch.cat([torch.arange(n) for n in seq_lens])
    first_slots = first_blocks.repeat_interleave(torch.tensor(seq_lens)) * block_size
    columns = torch.arange(max(num_blocks), dtype=torch.int32)
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor([0, *accumulate(seq_lens)]).to(device),
        seq_lens=torch.tensor(seq_lens).to(device),
        block_tables=(first_blocks[:, None] + columns).int().to(device),
        slot_mapping=(positions + first_slots).to(device),
        max_query_len=max(seq_lens),
        max_seq_len=max(seq_lens),
    )
    positions = positions.to(device)
    rows = positions.new_zeros(num_logit_rows)
    hidden = loaded.model.blank_hidden(len(positions))
    ids = torch.zeros_like(positions)
    # All groups use the same blocks, because the output is not used.
    attention = (metadata,) * loaded.model.num_groups
    batch = ComposedBatch(ids, positions, attention, rows, hidden=hidden, staged=dict(staged))
    batch.plan_attention(backend, loaded.model.num_heads, kv_cache)
    return loaded.model(batch, kv_cache)
