"""Size the KV cache: `num_blocks`, or as many blocks as fit in memory, with a log message.

`kv_budget.py` of chapter 2 has the arithmetic. On a GPU it starts from the peak of the largest
possible steps, which the engine's own runner computes here; on a CPU from the free memory.

See common/README.md#on-a-gpu"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil

from common.engine_config import EngineConfig
from common.models.loader import LoadedModel
from common.requests.input_processor import DrawnSeedParams
from common.sampling.sampling_rules import SAMPLING_RULES
from kv_budget import (
    CudaMemory,
    free_memory_bytes,
    remaining_bytes,
    share_of_free,
    size_kv_cache,
)
from paged_attention import PagedKVCache
from request import SamplingParams
from scheduler_interface import CachedRequestData, ModelRunner, NewRequestData, RunnerInput

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Peers:
    """The other ranks. `min_across` returns the smallest number of all ranks; `num_here` ranks,
    including this one, share this machine's memory."""

    min_across: Callable[[int], int] = int
    num_here: int = 1


NO_PEERS = Peers()


def make_kv_cache(
    config: EngineConfig,
    loaded: LoadedModel,
    *,
    draft: LoadedModel | None,
    max_model_len: int,
    vocab_size: int,
    make_runner: Callable[[PagedKVCache], ModelRunner],  # with its sampler, proposer and graphs
    kind: type[PagedKVCache] = PagedKVCache,
    peers: Peers = NO_PEERS,
    memory: CudaMemory | None = None,
) -> PagedKVCache:
    """Return KV tensors of `config.num_blocks` blocks, or of as many as fit together with a draft
    model's. `memory` reads the model's device; None: `CudaMemory`, if the device is a GPU."""
    block_size = config.block_size
    if config.num_blocks is not None:
        return allocate_kv_cache(loaded, config.num_blocks, block_size, kind, peers.num_here)
    device = loaded.model.embed_weight.device
    if memory is None and device.type == "cuda":
        memory = CudaMemory(device)
    if memory is None:
        available = share_of_free(free_memory_bytes() // peers.num_here)
    else:
        longest = max(1, max_model_len - config.num_rows_per_request)
        plans, num_blocks = largest_steps(config, longest, vocab_size, loaded.model.num_groups)
        memory.reset()
        kv_cache = allocate_kv_cache(loaded, num_blocks, block_size, kind)
        before = memory.read()
        runner = make_runner(kv_cache)
        for plan in plans:
            runner.execute(plan).wait()
        after = memory.read()
        kv_bytes = num_blocks * kv_cache.kv_bytes_per_block
        del runner, kv_cache
        memory.reset()
        available = remaining_bytes(before, after, kv_bytes, config.gpu_memory_utilization)
    models = [loaded] if draft is None else [loaded, draft]
    bytes_of = [allocate_kv_cache(model, 1, block_size).kv_bytes_per_block for model in models]
    blocks_per_request = None
    if (groups := loaded.model.groups).have_windows:
        from grouped_kv_memory import max_blocks

        blocks_per_request = max_blocks(
            num_tokens=max_model_len,
            block_size=block_size,
            windows=groups.windows,
            max_step_tokens=config.num_in_flight_tokens(device),
        )
    num_blocks = size_kv_cache(
        kv_bytes_per_block=sum(bytes_of),
        block_size=block_size,
        max_num_seqs=config.max_num_seqs,
        max_model_len=max_model_len,
        available=available,
        blocks_per_request=blocks_per_request,
    )
    num_blocks = peers.min_across(num_blocks)
    kv_cache = allocate_kv_cache(loaded, num_blocks, block_size, kind)
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


def largest_steps(
    config: EngineConfig, longest: int, vocab_size: int, num_groups: int
) -> tuple[list[RunnerInput], int]:
    """Return the steps that need the most memory besides KV, and the number of blocks for them: one
    of as many prompt tokens as possible, each prompt up to `longest`; one that continues all of
    them, with draft tokens; and one that ends them. All requests share the blocks, because the
    tokens are not read."""
    num_drafts = config.num_rows_per_request - 1
    left = min(config.max_num_batched_tokens, config.max_num_seqs * longest)
    lens: list[int] = []
    for num_after in reversed(range(min(config.max_num_seqs, left))):
        lens.append(min(longest, left - num_after))
        left -= lens[-1]
    names = [f"largest {i}" for i in range(len(lens))]
    num_blocks = -(-(lens[0] + 1 + num_drafts) // config.block_size)
    tables = tuple(list(range(1, num_blocks + 1)) for _ in range(num_groups))
    params = largest_params(vocab_size)
    news = [NewRequestData(name, [0] * n, params, 0, tables) for name, n in zip(names, lens)]
    news[0].features["prompt_logprobs"] = params.logprobs
    prompts = RunnerInput(
        scheduled_new_reqs=news,
        num_scheduled_tokens=dict(zip(names, lens)),
        num_spec_tokens=num_drafts,
    )
    decodes = RunnerInput(
        scheduled_cached_reqs=CachedRequestData(
            req_ids=names,
            new_token_ids=[[0]] * len(names),
            num_computed_tokens=lens,
            num_output_tokens=[1] * len(names),
            new_block_ids=[()] * len(names),
        ),
        num_scheduled_tokens=dict.fromkeys(names, 1 + num_drafts),
        scheduled_draft_token_ids={name: [0] * num_drafts for name in names if num_drafts},
    )
    return [prompts, decodes, RunnerInput(finished_req_ids=set(names))], num_blocks + 1


def largest_params(vocab_size: int) -> SamplingParams:
    """Return parameters with an effect of every rule. Their draft tokens have probabilities."""
    numbers: dict[str, Any] = {rule.name: rule.example for rule in SAMPLING_RULES}
    numbers["top_k"] = max(1, vocab_size - 1)  # whose tensors are the widest
    return DrawnSeedParams(
        **numbers,
        seed=0,
        max_tokens=1 << 20,
        min_tokens=1 << 20,
        stop_token_ids=(0,),
        logprobs=min(20, vocab_size),
    )
