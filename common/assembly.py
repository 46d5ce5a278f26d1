"""Where the chapters become one engine: one function that chooses a part for every role.

    role            chapter   part
    KV tensors         2      PagedKVCache, sized by `kv_sizing` unless `num_blocks` says how many
    KV manager         2      KVCacheManager over a BlockPool
    prefix cache       3      PrefixCacheLocal or RadixCache, in a CachedKVCacheManager
    KV from elsewhere  3      TieredCache, any KVConnector, or both in a ConnectorChain
    scheduler        1, 4     FCFSScheduler; Scheduler or PrefillFirstScheduler, with a policy
    chunks           4, 6    WholePrompts; ChunkedPrefill or AdaptiveChunks
    attention        2, 6    TorchAttentionBackend or TritonAttentionBackend, or the mixed ones
    runner          common    PagedModelRunner
    proposer           5      NgramProposer or DraftModelProposer, in a Speculator; or nobody
    sampler         common    Sampler; in a SpeculativeSampler if somebody guesses
    the loop           1      EngineCore

Nothing is implemented here. To turn a chapter off, a plain part takes the role; no token changes by
it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from adaptive_chunks import AdaptiveChunks
from block_pool import BlockPool
from cached_kv_cache_manager import CachedKVCacheManager
from chunk_policy import ChunkedPrefill
from common.engine_config import EngineConfig
from common.kv_sizing import allocate_kv_cache, make_kv_cache
from common.loader import LoadedModel, weights_digest
from common.runner.model_runner import PagedModelRunner
from common.sampling.sampler import Sampler
from common.sampling.speculative_sampler import ConstrainedDrafts, SpeculativeSampler
from draft_length import AdaptiveLength, FixedLength
from draft_model_proposer import DraftModelProposer
from engine_core import EngineCore, StepRecord
from fcfs_scheduler import FCFSScheduler
from kv_block_io import PagedBlockIO
from kv_cache_manager import KVCacheManager
from kv_connector import ConnectorChain, KVConnector
from mixed_attention import MixedAttentionBackend
from paged_attention import (
    AttentionBackend,
    PagedKVCache,
    TorchAttentionBackend,
)
from prefill_first_scheduler import PrefillFirstScheduler
from prefix_cache import PrefixCache
from prefix_cache_local import PrefixCacheLocal
from proposers import NgramProposer, Proposer
from radix_cache import RadixCache
from scheduler import Scheduler
from scheduler_base import SchedulerBase
from speculator import Speculator
from tiered_cache import TieredCache
from whole_prompts import ChunkPolicy, WholePrompts

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineParts:
    """The parts of one engine. `vocab_size` is what may be sampled: padding lanes are left out."""

    core: EngineCore
    scheduler: FCFSScheduler | SchedulerBase
    kv_manager: KVCacheManager
    kv_cache: PagedKVCache
    max_model_len: int
    vocab_size: int
    connector: KVConnector | None
    speculator: Speculator | None


def assemble(
    config: EngineConfig,
    loaded: LoadedModel,
    draft: LoadedModel | None,
    num_tokens_in_tokenizer: int | None,
    on_step: Callable[[StepRecord], None],
    num_wanted: Callable[[str, list[int]], int],
) -> EngineParts:
    """Choose and connect the parts. Raises `ValueError` if the model or the memory does not allow
    it."""
    device = loaded.model.embed_weight.device
    max_model_len = resolve_max_model_len(config, loaded.config.max_position_embeddings)
    backend = make_attention_backend(config.attention_backend, device, config.cuts_prompts)
    # Checkpoints pad the vocabulary to a round number; a lane that no token has must never win.
    vocab_size = min(loaded.config.vocab_size, num_tokens_in_tokenizer or loaded.config.vocab_size)
    kv_cache = make_kv_cache(config, loaded, draft, backend, max_model_len, vocab_size)
    connector = make_connector(config, loaded, kv_cache)
    kv_manager = make_kv_manager(config, kv_cache.num_blocks, connector)
    scheduler = make_scheduler(config, max_model_len, kv_manager)
    runner = PagedModelRunner(
        loaded.model,
        kv_cache,
        backend,
        eos_token_ids=tuple(loaded.generation_eos_token_ids),
        max_num_seqs=config.max_num_seqs,
        max_model_len=max_model_len,
        decode_threshold=config.num_rows_per_request,
        shuffle_seed=config.seed if config.shuffle_batch else None,
    )
    on_step = watch_steps(getattr(scheduler, "chunk_policy", None), on_step)
    core = EngineCore(scheduler, runner, Sampler(vocab_size=vocab_size), on_step=on_step)
    speculator = make_speculator(config, loaded, draft, kv_cache, kv_manager, backend, vocab_size)
    if speculator is not None:
        scheduler.num_lookahead_tokens = speculator.proposer.num_lookahead_tokens
        core.propose = speculator.propose
        core.sampler = SpeculativeSampler(
            core.sampler, speculator.draft_probs, num_wanted, **verification_rules(backend)
        )
    return EngineParts(
        core, scheduler, kv_manager, kv_cache, max_model_len, vocab_size, connector, speculator
    )


def make_scheduler(
    config: EngineConfig, max_model_len: int, kv_manager: KVCacheManager
) -> FCFSScheduler | SchedulerBase:
    limits = (config.max_num_seqs, config.max_num_batched_tokens)
    if config.scheduler == "fcfs":
        return FCFSScheduler(*limits, max_model_len, kv_manager)
    options = {
        "policy": config.policy,
        "max_model_len": max_model_len,
        "kv_memory": kv_manager,
        "preempt_every": config.preempt_every,
        "shuffle_waiting": config.shuffle_waiting,
        "seed": config.seed,
    }
    options["chunk_policy"] = make_chunk_policy(config)
    if config.scheduler == "prefill_first":
        size = config.chunk_size or config.max_num_batched_tokens
        options["chunked_prefill_size"] = size if config.cuts_prompts else None
        return PrefillFirstScheduler(*limits, mixing=config.mixing, **options)
    return Scheduler(*limits, watermark=config.watermark, **options)


def make_chunk_policy(config: EngineConfig) -> ChunkPolicy:
    """For the prefill-first scheduler a number is a size that its adder cuts to, and no limit of a
    single prompt."""
    if not config.cuts_prompts:
        return WholePrompts()
    threshold = config.chunk_size if config.scheduler == "two_phase" else None
    limits = (threshold, config.max_long_partial_prefills)
    if config.target_step_ms is None:
        return ChunkedPrefill(*limits)
    return AdaptiveChunks(config.target_step_ms, *limits)


def watch_steps(
    policy: ChunkPolicy | None, on_step: Callable[[StepRecord], None]
) -> Callable[[StepRecord], None]:
    """`on_step`, and a policy that learns what steps take is told."""
    if not isinstance(policy, AdaptiveChunks):
        return on_step

    def observe(record: StepRecord) -> None:
        starts, num_tokens = record.start_positions, record.num_scheduled_tokens
        policy.observe_step([starts[r] for r in num_tokens], num_tokens.values(), record.step_ms)
        on_step(record)

    return observe


def make_kv_manager(
    config: EngineConfig, num_blocks: int, connector: KVConnector | None
) -> KVCacheManager:
    pool, block_size = BlockPool(num_blocks), config.block_size
    if config.prefix_cache is None:
        return KVCacheManager(pool, block_size)
    cache: PrefixCache
    if config.prefix_cache == "hash":
        cache = PrefixCacheLocal(pool=pool, block_size=block_size)
    else:
        cache = RadixCache(page_size=block_size, pool=pool)
    connectors = connector.connectors if isinstance(connector, ConnectorChain) else [connector]
    for tiers in connectors:
        if isinstance(tiers, TieredCache):
            cache.listener = tiers
    return CachedKVCacheManager(pool, block_size, cache, connector)


def make_connector(
    config: EngineConfig, loaded: LoadedModel, kv_cache: PagedKVCache
) -> KVConnector | None:
    """The tiers and the configured connector, bound to this engine's KV memory."""
    connectors: list[KVConnector] = []
    if config.kv_tiers is not None:
        connectors.append(TieredCache(config.kv_tiers))
    if config.kv_connector is not None:
        connectors.append(config.kv_connector)
    if not connectors:
        return None
    connector = connectors[0] if len(connectors) == 1 else ConnectorChain(connectors)
    connector.bind(PagedBlockIO(kv_cache), config.block_size, kv_namespace(loaded, kv_cache))
    return connector


def kv_namespace(loaded: LoadedModel, kv_cache: PagedKVCache) -> tuple[tuple[str, str], ...]:
    """What the bytes of a KV block depend on besides tokens. Reads every weight."""
    model = f"{weights_digest(loaded.model)} eps {loaded.config.rms_norm_eps}"
    shape = tuple(kv_cache.key_cache[0].shape[1:])
    layout = f"{kv_cache.key_cache[0].dtype} {len(kv_cache.key_cache)} x {shape}"
    return (("model", model), ("kv layout", layout))


def resolve_max_model_len(config: EngineConfig, longest: int) -> int:
    """The configured limit, or the model's own. Raises `ValueError` if it asks for more than
    that."""
    if config.max_model_len is not None and config.max_model_len > longest:
        raise ValueError(
            f"max_model_len is {config.max_model_len}: the model was made for at most {longest}"
        )
    return config.max_model_len or longest


def make_attention_backend(
    name: str, device: torch.device, is_mixed: bool = False
) -> AttentionBackend:
    """`"auto"` is Triton on CUDA and PyTorch elsewhere; `is_mixed`: chapter 6's, for decodes and
    chunks in one batch, instead of chapter 2's. A fallback is announced.

    Raises `RuntimeError` if Triton is asked for by name and can not run here.
    """
    plain = MixedAttentionBackend if is_mixed else TorchAttentionBackend
    if name == "torch" or (name == "auto" and device.type != "cuda"):
        return plain()
    from mixed_attention_triton import MixedTritonAttentionBackend
    from paged_attention_triton import TritonAttentionBackend

    try:
        return MixedTritonAttentionBackend() if is_mixed else TritonAttentionBackend()
    except RuntimeError as error:
        if name == "triton":
            raise
        logger.warning("attention falls back from Triton to PyTorch: %s", error)
        return plain()


def make_speculator(
    config: EngineConfig,
    loaded: LoadedModel,
    draft: LoadedModel | None,
    kv_cache: PagedKVCache,
    kv_manager: KVCacheManager,
    backend: AttentionBackend,
    vocab_size: int,
) -> Speculator | None:
    """Who guesses, if anybody. Raises `ValueError` if the draft model has other tokens."""
    how = config.speculation
    if how is None:
        return None
    proposer: Proposer
    if how.method == "ngram":
        proposer = NgramProposer(how.num_spec_tokens, how.max_ngram, how.min_ngram)
    else:
        assert draft is not None
        if draft.config.vocab_size != loaded.config.vocab_size:
            raise ValueError(
                f"model of speculative has a vocabulary of {draft.config.vocab_size} tokens: it "
                f"must be the target's, {loaded.config.vocab_size}"
            )
        proposer = DraftModelProposer(
            draft.model,
            allocate_kv_cache(draft, kv_cache.num_blocks, config.block_size),
            backend,
            kv_manager,
            how.num_spec_tokens,
            max_model_len=resolve_draft_len(config, loaded, draft),
            max_num_seqs=config.max_num_seqs,
            sampler=ConstrainedDrafts(Sampler(vocab_size), loaded.generation_eos_token_ids),
        )
    length = AdaptiveLength if how.adaptive else FixedLength
    return Speculator(proposer, length(how.num_spec_tokens))


def verification_rules(backend: AttentionBackend) -> dict[str, Callable]:
    """Kernels where attention is one, else PyTorch."""
    if isinstance(backend, TorchAttentionBackend | MixedAttentionBackend):
        return {}
    from rejection_sampler_triton import (
        rejection_sample_triton,
        rejection_sampling_batched_triton,
    )

    return {"reject": rejection_sample_triton, "match": rejection_sampling_batched_triton}


def resolve_draft_len(config: EngineConfig, loaded: LoadedModel, draft: LoadedModel) -> int:
    """Positions that target and draft model both know."""
    longest = resolve_max_model_len(config, loaded.config.max_position_embeddings)
    return min(longest, draft.config.max_position_embeddings)
