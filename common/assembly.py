"""Where the chapters become one engine: one function that chooses a part for every role.

    role            chapter   part
    KV tensors         2      PagedKVCache, sized by `kv_sizing` unless `num_blocks` says how many
    KV memory         2, 3    UncachedKVCacheManager or CachedKVCacheManager over a BlockPool
    prefix cache       3      PrefixCacheLocal or RadixCache
    KV from elsewhere  3      TieredCache, any KVConnector, or both, by a LoadingKVCacheManager
    scheduler        1 to 5   CachingFCFSScheduler; Scheduler or PrefillFirstScheduler, with a
                              policy; the latter two's speculative kind
    chunks           4, 6     WholePrompts; ChunkedPrefill or AdaptiveChunks
    batch            2, 6     compose_in_order; compose
    attention        2, 6     TorchAttentionBackend, CompiledAttentionBackend or
                              TritonAttentionBackend, or the mixed ones; InvariantAttentionBackend
    runner          common    PagedModelRunner over a BatchState; a GraphRunner, with DecodeGraphs
    sampler         common    Sampler; in a SpeculativeSampler if somebody guesses
    guesses            5      a SpeculatingRunner with an NgramProposer or a DraftModelProposer
    the loop           1      RecordingEngineCore, with those as observers who learn from the clock

Nothing is implemented here. To turn a chapter off, a plain part takes the role; no token changes by
it. A part that is not chosen is not imported either."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from batch_layout import compose_in_order
from block_pool import BlockPool
from common.engine_config import EngineConfig, SpeculativeConfig
from common.kernels.regions import set_regions
from common.kv_sizing import allocate_kv_cache, make_kv_cache
from common.linear import linear_layers
from common.loader import LoadedModel
from common.runner.batch_state import BatchState
from common.runner.model_runner import Compose, PagedModelRunner
from common.sampling.sampler import BatchSampler, Sampler
from kv_memory import KVMemory, UncachedKVCacheManager
from paged_attention import AttentionBackend, PagedKVCache, TorchAttentionBackend
from scheduler_interface import SchedulerInterface
from step_record import Observer, RecordingEngineCore, StepRecord

if TYPE_CHECKING:
    from cached_kv_cache_manager import CachedKVCacheManager
    from common.model import DecoderModel
    from common.outputs import OutputProcessor
    from common.runner.graphs import DecodeGraphs
    from kv_connector import KVConnector
    from policies import SchedulePolicy
    from prefix_cache import CacheListener
    from proposers import Proposer
    from speculating_runner import SpeculatingRunner
    from whole_prompts import ChunkPolicy

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineParts:
    """The parts of one engine. `vocab_size` is what may be sampled: padding lanes are left out."""

    core: RecordingEngineCore
    kv_memory: UncachedKVCacheManager | CachedKVCacheManager
    kv_cache: PagedKVCache
    max_model_len: int
    vocab_size: int
    connector: KVConnector | None
    speculation: SpeculatingRunner | None


@dataclass(frozen=True, slots=True)
class Attention:
    """How KV is attended to, and the layout of batches that goes with it."""

    backend: AttentionBackend
    compose: Compose
    is_triton: bool = False
    kv_cache_kind: type[PagedKVCache] = PagedKVCache


def assemble(
    config: EngineConfig,
    loaded: LoadedModel,
    draft: LoadedModel | None,
    num_tokens_in_tokenizer: int | None,
    members: Mapping[str, OutputProcessor],
) -> EngineParts:
    """Choose and connect the parts. Raises `ValueError` if the model or the memory does not allow
    it."""
    longest = loaded.config.max_position_embeddings
    max_model_len = config.max_model_len or longest
    if max_model_len > longest:
        raise ValueError(
            f"max_model_len is {max_model_len}: the model was made for at most {longest}"
        )
    attention = make_attention(config, loaded)
    model = loaded.model
    set_regions(model, config.wants_compiled(model.num_parameters, model.embed_weight.device))
    if config.pack_weights:
        for part in (loaded,) if draft is None else (loaded, draft):
            if (reason := part.model.pack_weights()) is not None:
                if config.batch_invariant:
                    raise ValueError(f"batch_invariant is True: no weights are packed, {reason}")
                logger.info("weights are not packed: %s", reason)
    if config.batch_invariant:
        from batch_invariance import make_batch_invariant

        dtype, head_dim = model.embed_weight.dtype, loaded.config.head_dim
        make_batch_invariant(linear_layers(model), model.layers, dtype, head_dim)
    # Checkpoints pad the vocabulary to a round number; a lane that no token has must never win.
    vocab_size = min(loaded.config.vocab_size, num_tokens_in_tokenizer or loaded.config.vocab_size)
    kv_cache = make_kv_cache(
        config,
        loaded,
        draft,
        attention.backend,
        max_model_len,
        vocab_size,
        kind=attention.kv_cache_kind,
        make_graphs=(make_graphs := GraphMaker.of(config, loaded, attention, max_model_len)),
    )
    connector, listener = make_connector(config, loaded, kv_cache)
    kv_memory = make_kv_memory(config, kv_cache.num_blocks, connector, listener)
    chunk_policy = make_chunk_policy(config)

    max_blocks = -(-max_model_len // config.block_size)
    state = BatchState(config.max_num_seqs, max_blocks, loaded.generation_eos_token_ids)
    sampler: BatchSampler = Sampler(vocab_size)
    how, proposer = config.speculation, None
    if how is not None:
        proposer = make_proposer(
            how, loaded, draft, kv_cache, attention.backend, state, max_model_len, vocab_size
        )
        sampler = make_verifier(vocab_size, proposer, attention.is_triton)
    runner_kind = PagedModelRunner
    if make_graphs is not None and (graphs := make_graphs(kv_cache)) is not None:
        from common.runner.graphs import GraphRunner

        runner_kind = partial(GraphRunner, graphs=graphs)
    runner = runner_kind(
        loaded.model,
        kv_cache,
        attention.backend,
        state,
        sampler,
        compose=attention.compose,
        shuffle_seed=config.seed if config.shuffle_batch else None,
    )
    speculation = num_lookahead_tokens = None
    if how is not None and proposer is not None:
        speculation = make_speculation(how, proposer, runner, state, members)
        num_lookahead_tokens = proposer.num_lookahead_tokens
    overlaps = is_overlapped(config, runner.device)
    scheduler = make_scheduler(
        config, max_model_len, kv_memory, chunk_policy, num_lookahead_tokens, overlaps
    )
    observers: list[Observer] = []
    if connector is not None:
        observers.append(partial(wait_for_loads, kv_memory))
    if config.target_step_ms is not None:
        observers.append(partial(tell_durations, chunk_policy))
    if overlaps:
        has_loads = connector is not None
        core = make_overlapped_core(scheduler, runner, observers, kv_memory, has_loads)
    else:
        core = RecordingEngineCore(scheduler, speculation or runner, observers)
    return EngineParts(core, kv_memory, kv_cache, max_model_len, vocab_size, connector, speculation)


# -- who computes what


def make_scheduler(
    config: EngineConfig,
    max_model_len: int,
    kv_memory: KVMemory,
    chunk_policy: ChunkPolicy | None,
    num_lookahead_tokens: int | None,
    overlaps: bool = False,
) -> SchedulerInterface:
    """`num_lookahead_tokens` is None if nobody guesses."""
    limits = (config.max_num_seqs, config.max_num_batched_tokens)
    if config.scheduler == "fcfs":
        from caching_fcfs_scheduler import CachingFCFSScheduler

        return _kind(CachingFCFSScheduler, overlaps)(kv_memory, *limits, max_model_len)
    options: dict[str, Any] = {
        "policy": make_policy(config, kv_memory),
        "max_model_len": max_model_len,
        "kv_memory": kv_memory,
        "chunk_policy": chunk_policy,
        "preempt_every": config.preempt_every,
        "shuffle_waiting": config.shuffle_waiting,
        "seed": config.seed,
    }
    if num_lookahead_tokens is not None:
        options["num_lookahead_tokens"] = num_lookahead_tokens
    if config.scheduler == "prefill_first":
        size = config.chunk_size or config.max_num_batched_tokens
        options["chunked_prefill_size"] = size if config.cuts_prompts else None
        options["mixing"] = config.mixing
        if num_lookahead_tokens is None:
            from prefill_first_scheduler import PrefillFirstScheduler as Chosen
        else:
            from speculative_prefill_first_scheduler import (
                SpeculativePrefillFirstScheduler as Chosen,
            )
    else:
        options["watermark"] = config.watermark
        if num_lookahead_tokens is None:
            from scheduler import Scheduler as Chosen
        else:
            from speculative_scheduler import SpeculativeScheduler as Chosen
    return _kind(Chosen, overlaps)(*limits, **options)


def _kind(scheduler: type, overlaps: bool) -> Callable[..., Any]:
    if not overlaps:
        return scheduler
    from overlapped_books import overlapped

    return overlapped(scheduler)


def make_policy(config: EngineConfig, kv_memory: KVMemory) -> str | SchedulePolicy:
    """Chapter 4's root knows its own two by name."""
    if config.policy in ("fcfs", "priority"):
        return config.policy
    from sglang_policies import policy_over

    return policy_over(kv_memory, config.policy, config.seed)


def make_chunk_policy(config: EngineConfig) -> ChunkPolicy | None:
    """None: whole prompts. For the prefill-first scheduler a number is a size that its adder cuts
    to, and no limit of a single prompt."""
    if not config.cuts_prompts:
        return None
    threshold = config.chunk_size if config.scheduler == "two_phase" else None
    limits = (threshold, config.max_long_partial_prefills)
    if config.target_step_ms is None:
        from chunk_policy import ChunkedPrefill

        return ChunkedPrefill(*limits)
    from adaptive_chunks import AdaptiveChunks

    return AdaptiveChunks(config.target_step_ms, *limits)


def tell_durations(policy: Any, record: StepRecord) -> None:
    """An observer for chunks that learn what steps take."""
    starts, num_tokens = record.start_positions, record.num_scheduled_tokens
    policy.observe_step([starts[r] for r in num_tokens], num_tokens.values(), record.step_ms)


# -- the loop


def is_overlapped(config: EngineConfig, device: torch.device) -> bool:
    """Whether a step is planned while the one before it runs. Where that is not possible, each is
    over first, which is announced."""
    if not config.wants_overlap(device):
        return False
    for name in ("speculative", "target_step_ms"):
        if getattr(config, name) is not None:
            logger.warning(
                "overlap_scheduling has no effect with %s: each step is over before the next one "
                "is planned",
                name,
            )
            return False
    return True


def make_overlapped_core(
    scheduler: Any,
    runner: PagedModelRunner,
    observers: list[Observer],
    kv_memory: Any,
    has_loads: bool,
) -> RecordingEngineCore:
    from common.runner.overlap import OverlappedEngineCore, ThreadedRunner

    is_queued = runner.device.type != "cpu"  # by itself
    begun = runner if is_queued else ThreadedRunner(runner)
    core = OverlappedEngineCore(scheduler, begun, observers)
    if has_loads:
        kv_memory.wait_for_steps = core.wait_for_steps
    return core


# -- KV


def make_kv_memory(
    config: EngineConfig,
    num_blocks: int,
    connector: KVConnector | None,
    listener: CacheListener | None,
) -> UncachedKVCacheManager | CachedKVCacheManager:
    pool, block_size = BlockPool(num_blocks), config.block_size
    if config.prefix_cache is None:
        return UncachedKVCacheManager(pool, block_size)
    if config.prefix_cache == "hash":
        from prefix_cache_local import PrefixCacheLocal

        cache = PrefixCacheLocal(pool=pool, block_size=block_size, listener=listener)
    else:
        from radix_cache import RadixCache

        cache = RadixCache(page_size=block_size, pool=pool, listener=listener)
    if connector is None:
        from cached_kv_cache_manager import CachedKVCacheManager

        return CachedKVCacheManager(pool, block_size, cache)
    from loading_kv_cache_manager import LoadingKVCacheManager

    return LoadingKVCacheManager(pool, block_size, cache, connector)


def make_connector(
    config: EngineConfig, loaded: LoadedModel, kv_cache: PagedKVCache
) -> tuple[KVConnector | None, CacheListener | None]:
    """The tiers and the configured connector, bound to this engine's KV memory; and who is to hear
    of what is cached."""
    tiers = None
    if config.kv_tiers is not None:
        from tiered_cache import TieredCache

        tiers = TieredCache(config.kv_tiers)
    connectors = [part for part in (tiers, config.kv_connector) if part is not None]
    if not connectors:
        return None, None
    from kv_block_io import PagedBlockIO
    from kv_connector import ConnectorChain

    connector = connectors[0] if len(connectors) == 1 else ConnectorChain(connectors)
    namespace = kv_namespace(loaded, kv_cache)
    if config.batch_invariant:  # KV with other bits is another engine's
        namespace += (("numerics", "batch invariant"),)
    connector.bind(PagedBlockIO(kv_cache), config.block_size, namespace)
    return connector, tiers


def kv_namespace(loaded: LoadedModel, kv_cache: PagedKVCache) -> tuple[tuple[str, str], ...]:
    """What the bytes of a KV block depend on besides tokens. Reads every weight."""
    from weights_digest import weights_digest

    model = f"{weights_digest(loaded.model.named_weights())} eps {loaded.config.rms_norm_eps}"
    shape = tuple(kv_cache.key_cache[0].shape[1:])
    layout = f"{kv_cache.key_cache[0].dtype} {len(kv_cache.key_cache)} x {shape}"
    return (("model", model), ("kv layout", layout))


def wait_for_loads(kv_memory: Any, record: StepRecord) -> None:
    """An observer: where a step computed nothing while requests wait, their KV is on its way."""
    if not record.num_scheduled_tokens and record.num_waiting:
        kv_memory.wait_for_loads()


# -- the model's side


def make_attention(config: EngineConfig, loaded: LoadedModel) -> Attention:
    """`"auto"` is Triton on CUDA and PyTorch elsewhere. Where prompts are cut it is chapter 6's,
    for decodes and chunks in one batch, instead of chapter 2's. A fallback is announced.

    Raises `RuntimeError` if Triton is asked for by name and can not run here.
    """
    name, is_mixed, compose = config.attention_backend, config.cuts_prompts, compose_in_order
    device = loaded.model.embed_weight.device
    if is_mixed:
        from mixed_batch import compose as compose_mixed

        compose = partial(compose_mixed, decode_threshold=config.num_rows_per_request)
    if config.batch_invariant:
        from invariant_attention import InvariantAttentionBackend

        return Attention(InvariantAttentionBackend(), compose)
    if name == "triton" or (name == "auto" and device.type == "cuda"):
        if is_mixed:
            from mixed_attention_triton import MixedTritonAttentionBackend as Kernels
        else:
            from paged_attention_triton import TritonAttentionBackend as Kernels
        try:
            return Attention(Kernels(), compose, is_triton=True)
        except RuntimeError as error:
            if name == "triton":
                raise
            logger.warning("attention falls back from Triton to PyTorch: %s", error)
    if config.wants_compiled(loaded.model.num_parameters, device):
        compiled = make_compiled_attention(config, loaded, compose)
        if compiled is not None:
            return compiled
    if not is_mixed:
        return Attention(TorchAttentionBackend(), compose)
    from mixed_attention import MixedAttentionBackend

    return Attention(MixedAttentionBackend(), compose)


def make_compiled_attention(
    config: EngineConfig, loaded: LoadedModel, compose: Compose
) -> Attention | None:
    """None, and a warning, where nothing can be compiled."""
    if loaded.model.embed_weight.device.type != "cpu":
        logger.warning("compile=True has no effect: what is compiled is attention on a CPU")
        return None
    from compiled_attention import HeadMajorKVCache

    if config.cuts_prompts:
        from compiled_mixed_attention import CompiledMixedAttentionBackend as Backend
    else:
        from compiled_attention import CompiledAttentionBackend as Backend
    few_blocks = allocate_kv_cache(loaded, 3, config.block_size, HeadMajorKVCache)
    backend = Backend.compiled_for(loaded.config.num_attention_heads, few_blocks)
    return None if backend is None else Attention(backend, compose, kv_cache_kind=HeadMajorKVCache)


# -- graphs


@dataclass(slots=True)
class GraphMaker:
    """Captures the decode steps over a KV cache; None, and a warning, where that is impossible."""

    config: EngineConfig
    model: DecoderModel
    backend: AttentionBackend
    max_model_len: int
    is_possible: bool = True

    @classmethod
    def of(
        cls, config: EngineConfig, loaded: LoadedModel, attention: Attention, max_model_len: int
    ) -> GraphMaker | None:
        model, backend = loaded.model, attention.backend
        device = model.embed_weight.device
        if not config.wants_graphs(device):
            return None
        why_not = None
        if config.batch_invariant:
            why_not = "batch_invariant=True computes on the host's plan"
        elif device.type == "cpu" and config.wants_compiled(model.num_parameters, device):
            why_not = "compiled code is nothing that PyTorch sees"
        elif not attention.is_triton and device.type == "cuda":
            why_not = "attention in PyTorch is planned on the host"
        if why_not is not None:
            logger.warning("decode steps run without graphs: %s", why_not)
            return None
        if config.speculative is not None:
            logger.warning("steps with guesses run without graphs: they are no decode steps")
        if not attention.is_triton:
            from tensor_attention import TensorAttentionBackend

            backend = TensorAttentionBackend()
        return cls(config, model, backend, max_model_len)

    def __call__(self, kv_cache: PagedKVCache) -> DecodeGraphs | None:
        from common.runner.graphs import CannotCapture, CudaGraphs, DecodeGraphs

        if not self.is_possible:
            return None
        if self.config.emulate_graphs:
            from common.tools.graph_emulator import EmulatedGraphs

            graphs = EmulatedGraphs()
        else:
            graphs = CudaGraphs(self.model.embed_weight.device)
        sizes = self.config.max_num_seqs, self.max_model_len
        try:
            return DecodeGraphs(graphs, self.model, kv_cache, self.backend, *sizes)
        except CannotCapture as error:
            logger.warning("decode steps run without graphs: %s", error)
            self.is_possible = False
            return None


# -- guesses


def make_verifier(vocab_size: int, proposer: Proposer, is_triton: bool) -> BatchSampler:
    """A sampler that verifies guesses: with kernels where attention is one."""
    from common.sampling.speculative_sampler import SpeculativeSampler

    rules: dict[str, Any] = {}
    if is_triton:
        import rejection_sampler_triton as kernels

        rules["reject"] = kernels.rejection_sample_triton
        rules["match"] = kernels.rejection_sampling_batched_triton
    return SpeculativeSampler(Sampler(vocab_size), proposer.draft_probs, **rules)


def make_speculation(
    how: SpeculativeConfig,
    proposer: Proposer,
    runner: PagedModelRunner,
    state: BatchState,
    members: Mapping[str, OutputProcessor],
) -> SpeculatingRunner:
    from common.runner.trimming_runner import TrimmingRunner
    from speculating_runner import FixedLength, SpeculatingRunner

    length = FixedLength(how.num_spec_tokens)
    if how.adaptive:
        from adaptive_length import AdaptiveLength

        length = AdaptiveLength(how.num_spec_tokens)
    return SpeculatingRunner(TrimmingRunner(runner, members), proposer, length, state)


def make_proposer(
    how: SpeculativeConfig,
    loaded: LoadedModel,
    draft: LoadedModel | None,
    kv_cache: PagedKVCache,
    backend: AttentionBackend,
    state: BatchState,
    max_model_len: int,
    vocab_size: int,
) -> Proposer:
    """Who guesses. Raises `ValueError` if the draft model has other tokens."""
    if how.method == "ngram":
        from ngram_index import BulkNgramProposer

        return BulkNgramProposer(how.num_spec_tokens, how.max_ngram, how.min_ngram)
    from common.sampling.speculative_sampler import ConstrainedDrafts
    from draft_model_proposer import DraftModelProposer

    assert draft is not None
    if draft.config.vocab_size != loaded.config.vocab_size:
        raise ValueError(
            f"model of speculative has a vocabulary of {draft.config.vocab_size} tokens: it "
            f"must be the target's, {loaded.config.vocab_size}"
        )
    return DraftModelProposer(
        draft.model,
        allocate_kv_cache(draft, kv_cache.num_blocks, kv_cache.block_size),
        backend,
        state,
        how.num_spec_tokens,
        max_model_len=min(max_model_len, draft.config.max_position_embeddings),
        sampler=ConstrainedDrafts(Sampler(vocab_size), state.sampling, state),
    )
