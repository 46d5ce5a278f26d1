"""How many KV blocks there are: `num_blocks`, or as many as fit in memory, and what the log says.

On a GPU the process owns its share of the memory, and what it needs besides KV is measured: one of
the largest steps that can come is run, its sampler included, and the peak is read.

    total x gpu_memory_utilization | weights | activations | not PyTorch's | KV blocks |
                                     before    peak - before  free on the device is neither

On a CPU, where such a step could take half a minute and the rest of the computer lives in the same
memory, half of what is free becomes KV blocks. Never more than `max_num_seqs` requests of
`max_model_len` could fill. vLLM measures in the same way (`determine_available_memory`)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import psutil
import torch

from common.engine_config import EngineConfig
from common.loader import LoadedModel
from common.sampling.sampler import Sampler, SamplingBatch
from input_batch import RunnerRequest
from paged_attention import AttentionBackend, AttentionMetadata, PagedKVCache
from request import SamplingParams

logger = logging.getLogger(__name__)

_SHARE_OF_FREE = 0.5  # on a CPU
_CPU_WARM_UP_TOKENS = 8
_GIB = 1 << 30


# -- arithmetic


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """A GPU, in bytes. `reserved` is PyTorch's, blocks that it only keeps for later included;
    `free` is nobody's."""

    total: int
    free: int
    reserved: int
    peak_reserved: int  # since the last `reset`


@dataclass(frozen=True, slots=True)
class BytesForKV:
    num_bytes: int
    explanation: str  # where they come from


@dataclass(frozen=True, slots=True)
class KVBudget:
    """The outcome. One block more than is usable: block 0 is the null block."""

    num_blocks: int
    explanation: str


def remaining_bytes(
    before: MemoryReading, after: MemoryReading, warm_up_kv_bytes: int, utilization: float
) -> BytesForKV:
    """What a GPU has for KV, by readings before and after the warm-up. Its own KV cache, of
    `warm_up_kv_bytes`, was there in both, and is gone later. What is neither free nor PyTorch's is
    the CUDA context, its libraries' and other processes'."""
    weights = before.reserved - warm_up_kv_bytes
    activations = after.peak_reserved - before.reserved
    others = after.total - after.free - after.reserved
    num_bytes = int(after.total * utilization) - weights - activations - others
    explanation = (
        f"{after.total / _GIB:.2f} GiB x {utilization:.0%} - {weights / _GIB:.2f} weights - "
        f"{activations / _GIB:.2f} activations - {others / _GIB:.2f} not PyTorch's"
    )
    return BytesForKV(max(0, num_bytes), explanation)


def share_of_free(free_bytes: int) -> BytesForKV:
    """What a CPU has for KV."""
    explanation = f"{free_bytes / _GIB:.2f} GiB free x {_SHARE_OF_FREE:.0%}"
    return BytesForKV(int(free_bytes * _SHARE_OF_FREE), explanation)


def size_kv_cache(
    kv_bytes_per_block: int,
    block_size: int,
    max_num_seqs: int,
    max_model_len: int,
    available: BytesForKV,
) -> KVBudget:
    """Raises `ValueError` if not even one request of `max_model_len` fits."""
    blocks_per_request = -(-max_model_len // block_size)
    num_affordable = available.num_bytes // kv_bytes_per_block
    num_useful = max_num_seqs * blocks_per_request + 1
    num_blocks = min(num_affordable, num_useful)
    if num_blocks < blocks_per_request + 1:
        raise ValueError(
            f"max_model_len is {max_model_len}: one such request needs {blocks_per_request} KV "
            f"blocks of {kv_bytes_per_block:,} bytes, and there is room for "
            f"{max(num_affordable - 1, 0)} ({available.explanation}); lower max_model_len"
        )
    explanation = (
        f"KV cache: {available.explanation} / {kv_bytes_per_block / 1024:.1f} KiB "
        f"a block of {block_size} tokens = {num_affordable:,} blocks; {max_num_seqs} requests of "
        f"{max_model_len} tokens can use {num_useful:,}; taking {num_blocks:,} "
        f"({num_blocks * kv_bytes_per_block / _GIB:.2f} GiB, "
        f"{(num_blocks - 1) * block_size:,} tokens)"
    )
    return KVBudget(num_blocks, explanation)


# -- measuring


class MemoryReader(Protocol):
    def reset(self) -> None:
        """Give back what PyTorch keeps unused, and count the peak from here."""

    def read(self) -> MemoryReading: ...


class CudaMemory:
    """A `MemoryReader`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def reset(self) -> None:
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)

    def read(self) -> MemoryReading:
        torch.cuda.synchronize(self.device)
        free, total = torch.cuda.mem_get_info(self.device)
        reserved = torch.cuda.memory_reserved(self.device)
        return MemoryReading(total, free, reserved, torch.cuda.max_memory_reserved(self.device))


def free_memory_bytes() -> int:
    """Bytes that an allocation on the CPU could still take."""
    return psutil.virtual_memory().available


# -- making


def make_kv_cache(
    config: EngineConfig,
    loaded: LoadedModel,
    draft: LoadedModel | None,
    backend: AttentionBackend,
    max_model_len: int,
    vocab_size: int,
    memory: MemoryReader | None = None,
) -> PagedKVCache:
    """KV tensors of `config.num_blocks` blocks, or of as many as fit, those of a draft model
    included. `memory` reads the model's device; None: CUDA's own reader, if it is a GPU."""
    if config.num_blocks is not None:
        return allocate_kv_cache(loaded, config.num_blocks, config.block_size)
    device = loaded.model.embed_weight.device
    if memory is None and device.type == "cuda":
        memory = CudaMemory(device)
    if memory is None:
        num_tokens = min(_CPU_WARM_UP_TOKENS, max_model_len)
        kv_cache = _allocate_for([num_tokens], loaded, config)
        run_forward(loaded, kv_cache, backend, [num_tokens], 1)
        available = share_of_free(free_memory_bytes())
    else:
        available = _measure(config, loaded, draft, backend, max_model_len, vocab_size, memory)
    kv_bytes_per_block = allocate_kv_cache(loaded, 1, config.block_size).kv_bytes_per_block
    if draft is not None:
        kv_bytes_per_block += allocate_kv_cache(draft, 1, config.block_size).kv_bytes_per_block
    budget = size_kv_cache(
        kv_bytes_per_block, config.block_size, config.max_num_seqs, max_model_len, available
    )
    logger.info(budget.explanation)
    return allocate_kv_cache(loaded, budget.num_blocks, config.block_size)


def allocate_kv_cache(loaded: LoadedModel, num_blocks: int, block_size: int) -> PagedKVCache:
    model, weight = loaded.config, loaded.model.embed_weight
    return PagedKVCache(
        num_layers=model.num_hidden_layers,
        num_blocks=num_blocks,
        block_size=block_size,
        num_kv_heads=model.num_key_value_heads,
        head_dim=model.head_dim,
        dtype=weight.dtype,
        device=weight.device,
    )


def _allocate_for(seq_lens: list[int], loaded: LoadedModel, config: EngineConfig) -> PagedKVCache:
    num_blocks = sum(-(-n // config.block_size) for n in seq_lens) + 1
    return allocate_kv_cache(loaded, num_blocks, config.block_size)


# -- the largest step


def _measure(
    config: EngineConfig,
    loaded: LoadedModel,
    draft: LoadedModel | None,
    backend: AttentionBackend,
    max_model_len: int,
    vocab_size: int,
    memory: MemoryReader,
) -> BytesForKV:
    """Run the largest step twice: what the sampler keeps from step to step is there in the
    second."""
    num_tokens = min(config.max_num_batched_tokens, config.max_num_seqs * max_model_len)
    seq_lens = _parts_of(num_tokens, max_model_len)
    kv_cache = _allocate_for(seq_lens, loaded, config)
    num_rows = min(config.max_num_seqs * config.num_rows_per_request, num_tokens)
    batch = SamplerWarmUp.of(_parts_of(num_rows, config.num_rows_per_request), vocab_size)
    sampler = Sampler(vocab_size)
    memory.reset()
    before = memory.read()
    if draft is not None:
        from common.sampling.speculative_sampler import SpeculativeSampler

        sampler = SpeculativeSampler(sampler, batch.make_draft_probs(loaded, vocab_size))
    for _ in range(2):
        logits = run_forward(loaded, kv_cache, backend, seq_lens, num_rows)
        sampler.sample(logits, batch)
        del logits
    after = memory.read()
    kv_bytes = kv_cache.num_blocks * kv_cache.kv_bytes_per_block
    del sampler, kv_cache
    memory.reset()
    return remaining_bytes(before, after, kv_bytes, config.gpu_memory_utilization)


def _parts_of(total: int, largest: int) -> list[int]:
    rest = total % largest
    return [largest] * (total // largest) + [rest] * (rest > 0)


@dataclass(frozen=True, slots=True)
class SamplerWarmUp:
    """The largest batch that a sampler gets: every row asks for everything."""

    sampling: SamplingBatch
    draft_token_ids: dict[str, list[int]]

    @classmethod
    def of(cls, rows_per_request: Sequence[int], vocab_size: int) -> SamplerWarmUp:
        most = 1 << 20
        params = SamplingParams(
            temperature=0.5,
            top_k=max(1, vocab_size - 1),
            top_p=0.9,
            min_p=1e-6,
            repetition_penalty=1.1,
            presence_penalty=0.1,
            frequency_penalty=0.1,
            seed=0,
            max_tokens=most,
            min_tokens=most,
            stop_token_ids=(0,),
            logprobs=min(20, vocab_size),
        )
        sampling, drafts = SamplingBatch(), {}
        for i, num_rows in enumerate(rows_per_request):
            request = RunnerRequest(str(i), params, [0], [0])
            for row in range(num_rows):
                sampling.add(request, [0] * row, ())
            if num_rows > 1:
                drafts[str(i)] = [0] * (num_rows - 1)
        return cls(sampling, drafts)

    def make_draft_probs(
        self, loaded: LoadedModel, vocab_size: int
    ) -> Callable[[str], torch.Tensor]:
        """What a draft model keeps of its guesses until they are verified."""
        weight = loaded.model.embed_weight
        dtype = torch.promote_types(weight.dtype, torch.float32)
        probs = {
            req_id: torch.full((len(ids), vocab_size), 1 / vocab_size, dtype=dtype).to(
                weight.device
            )
            for req_id, ids in self.draft_token_ids.items()
        }
        return probs.__getitem__


@torch.inference_mode()
def run_forward(
    loaded: LoadedModel,
    kv_cache: PagedKVCache,
    backend: AttentionBackend,
    seq_lens: Sequence[int],
    num_logit_rows: int,
) -> torch.Tensor:  # [num_logit_rows, vocab_size]
    """One step in which prompts of `seq_lens` tokens are computed whole."""
    device, block_size = loaded.model.embed_weight.device, kv_cache.block_size
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
    logit_indices = positions.new_zeros(num_logit_rows)
    ids = torch.zeros_like(positions)
    return loaded.model(ids, positions, kv_cache, metadata, logit_indices, backend)
