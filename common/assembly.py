"""Where the chapters become one engine: one function that chooses a part for every role.

    role            chapter   part
    KV tensors         2      PagedKVCache, sized by `kv_sizing` unless `num_blocks` says how many
    KV manager         2      KVCacheManager over a BlockPool
    scheduler          1      FCFSScheduler
    attention          2      TorchAttentionBackend or TritonAttentionBackend
    runner          common    PagedModelRunner
    sampler         common    Sampler
    the loop           1      EngineCore

Nothing is implemented here. To turn a chapter off, a plain part takes the role; no token changes by
it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from block_pool import BlockPool
from common.engine_config import EngineConfig
from common.kv_sizing import size_kv_cache
from common.loader import LoadedModel
from common.model_runner import PagedModelRunner
from common.sampler import Sampler
from engine_core import EngineCore, StepRecord
from fcfs_scheduler import FCFSScheduler
from kv_cache_manager import KVCacheManager
from paged_attention import (
    AttentionBackend,
    AttentionMetadata,
    PagedKVCache,
    TorchAttentionBackend,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineParts:
    """The parts of one engine. `vocab_size` is what may be sampled: padding lanes are left out."""

    core: EngineCore
    scheduler: FCFSScheduler
    kv_manager: KVCacheManager
    kv_cache: PagedKVCache
    max_model_len: int
    vocab_size: int


def assemble(
    config: EngineConfig,
    loaded: LoadedModel,
    num_tokens_in_tokenizer: int | None,
    on_step: Callable[[StepRecord], None],
) -> EngineParts:
    """Choose and connect the parts. Raises `ValueError` if the model or the memory does not allow
    it."""
    device = loaded.model.embed_weight.device
    max_model_len = resolve_max_model_len(config, loaded.config.max_position_embeddings)
    backend = make_attention_backend(config.attention_backend, device)
    kv_cache = make_kv_cache(config, loaded, backend, max_model_len, device)
    kv_manager = KVCacheManager(BlockPool(kv_cache.num_blocks), config.block_size)
    scheduler = FCFSScheduler(
        config.max_num_seqs, config.max_num_batched_tokens, max_model_len, kv_manager
    )
    runner = PagedModelRunner(
        loaded.model,
        kv_cache,
        backend,
        eos_token_ids=tuple(loaded.generation_eos_token_ids),
        max_num_seqs=config.max_num_seqs,
        max_model_len=max_model_len,
        shuffle_seed=config.seed if config.shuffle_batch else None,
    )
    # Checkpoints pad the vocabulary to a round number; a lane that no token has must never win.
    vocab_size = min(loaded.config.vocab_size, num_tokens_in_tokenizer or loaded.config.vocab_size)
    core = EngineCore(scheduler, runner, Sampler(vocab_size=vocab_size), on_step=on_step)
    return EngineParts(core, scheduler, kv_manager, kv_cache, max_model_len, vocab_size)


def resolve_max_model_len(config: EngineConfig, longest: int) -> int:
    """The configured limit, or the model's own. Raises `ValueError` if it asks for more than
    that."""
    if config.max_model_len is not None and config.max_model_len > longest:
        raise ValueError(
            f"max_model_len is {config.max_model_len}: the model was made for at most {longest}"
        )
    return config.max_model_len or longest


def make_attention_backend(name: str, device: torch.device) -> AttentionBackend:
    """`"auto"` is Triton on CUDA and PyTorch elsewhere. A fallback is announced.

    Raises `RuntimeError` if Triton is asked for by name and can not run here.
    """
    if name == "torch" or (name == "auto" and device.type != "cuda"):
        return TorchAttentionBackend()
    from paged_attention_triton import TritonAttentionBackend

    try:
        return TritonAttentionBackend()
    except RuntimeError as error:
        if name == "triton":
            raise
        logger.warning("attention falls back from Triton to PyTorch: %s", error)
        return TorchAttentionBackend()


def make_kv_cache(
    config: EngineConfig,
    loaded: LoadedModel,
    backend: AttentionBackend,
    max_model_len: int,
    device: torch.device,
) -> PagedKVCache:
    """KV tensors of `config.num_blocks` blocks, or of as many as the free memory holds."""
    model = loaded.config

    def make(num_blocks: int) -> PagedKVCache:
        return PagedKVCache(
            num_layers=model.num_hidden_layers,
            num_blocks=num_blocks,
            block_size=config.block_size,
            num_kv_heads=model.num_key_value_heads,
            head_dim=model.head_dim,
            dtype=loaded.model.embed_weight.dtype,
            device=device,
        )

    if config.num_blocks is not None:
        return make(config.num_blocks)
    on_gpu = device.type == "cuda"
    # On a GPU the largest step there can be, so that what is free afterwards is free for good; on a
    # CPU, where that could take half a minute, a short one.
    num_tokens = min(config.max_num_batched_tokens if on_gpu else 8, max_model_len)
    num_blocks = -(-num_tokens // config.block_size) + 1
    kv_cache = make(num_blocks)
    warm_up(loaded, kv_cache, backend, num_tokens, config.max_num_seqs if on_gpu else 1)
    budget = size_kv_cache(
        kv_cache.kv_bytes_per_block,
        config.block_size,
        config.max_num_seqs,
        max_model_len,
        device,
    )
    logger.info(budget.explanation)
    return make(budget.num_blocks)


@torch.inference_mode()
def warm_up(
    loaded: LoadedModel,
    kv_cache: PagedKVCache,
    backend: AttentionBackend,
    num_tokens: int,
    num_logit_rows: int,
) -> None:
    """One step of `num_tokens` tokens of one request, and as many rows of logits as a step may
    need."""
    device = loaded.model.embed_weight.device
    positions = torch.arange(num_tokens, device=device)
    num_blocks = -(-num_tokens // kv_cache.block_size)
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor([0, num_tokens], device=device),
        seq_lens=torch.tensor([num_tokens], device=device),
        block_tables=torch.arange(1, num_blocks + 1, dtype=torch.int32, device=device)[None],
        slot_mapping=positions + kv_cache.block_size,
        max_query_len=num_tokens,
        max_seq_len=num_tokens,
    )
    logit_indices = positions.new_zeros(num_logit_rows)
    ids = torch.zeros_like(positions)
    loaded.model(ids, positions, kv_cache, metadata, logit_indices, backend)
