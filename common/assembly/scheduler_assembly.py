"""The assembly of the scheduler's half of an engine: scheduler, KV memory and engine loop.

    role            chapter   part
    KV memory         2, 3    UncachedKVCacheManager or CachedKVCacheManager over a BlockPool
    prefix cache       3      PrefixCacheLocal or RadixCache
    external KV        3      TieredCache, any KVConnector, or both, by a LoadingKVCacheManager
    scheduler        1 to 4   CachingFCFSScheduler; Scheduler or PrefillFirstScheduler with a policy
    plugins          1 to 5   made by `make_plugins`: steps in flight, drafts, forced preemption
    chunks           4, 6     Unchunked; ChunkedPrefill or AdaptiveChunks
    records            1      a RecordedScheduler around it, with observers that need the clock
    the loop           1      EngineCore; with several steps in flight an OverlappedEngineCore or a
                              PipelinedEngineCore, over a QueuedRunner

The runner is a `RunnerHandle`: in this process (`assembly.py`) or in others (`parallel/remote.py`).
The code here is the same for both."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Protocol

import torch

from base_scheduler import BaseScheduler
from block_pool import BlockPool
from common.engine_config import PREFIX_CACHES, SCHEDULERS, EngineConfig, LearnsDurations
from common.models.layer_groups import deal_layers
from common.models.model_config import ModelConfig, ModelFacts
from engine_core import EngineCore
from kv_memory import UncachedKVCacheManager
from policies import POLICIES, SchedulePolicy, get_policy
from prefix_cache import PrefixCache
from scheduler_interface import ModelRunner, SchedulerInterface
from step_record import Observer, RecordedScheduler, StepRecord

if TYPE_CHECKING:
    from acceptance import SpecDecodeStats
    from base_scheduler import SchedulerPlugin
    from cached_kv_cache_manager import CachedKVCacheManager
    from common.features.adapters.adapter_names import AdapterLoader, AdapterNames
    from common.requests.tokenizer import Tokenizer
    from common.runner.overlap import InFlightPlans, OverlappedEngineCore, QueuedRunner
    from kv_connector import KVBlockIO, KVConnector
    from overlap_plugin import OverlapPlugin
    from pipeline_plugin import PipelinePlugin
    from preemptive_scheduler import SchedulerOptions
    from prefix_cache import CacheListener
    from unchunked import ChunkPolicy

logger = logging.getLogger(__name__)
Namespace = Sequence[tuple[str, str]]


class KVCacheSize(Protocol):
    """The KV tensors' size, as the scheduler's side sees it."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def kv_bytes_per_block(self) -> int: ...


class Speculation(Protocol):
    """The runner's part that proposes draft tokens, as the engine sees it."""

    stats: SpecDecodeStats

    def reset_stats(self) -> None: ...


@dataclass(frozen=True, slots=True)
class RunnerHandle:
    """The runner, in this process or elsewhere. `vocab_size` counts the tokens that can be sampled,
    without padding lanes. `block_io` gives access to KV blocks and returns everything that their
    bytes depend on besides tokens, which takes time."""

    runner: ModelRunner
    model: ModelFacts
    kv_cache: KVCacheSize
    max_model_len: int
    vocab_size: int
    block_io: Callable[[], tuple[KVBlockIO, Namespace]]
    is_queued: bool  # `execute` returns when a step has started
    speculation: Speculation | None = None
    num_lookahead_tokens: int | None = None  # None: no draft tokens
    adapters: AdapterLoader | None = None  # None: no adapters
    close: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class EngineParts:
    """The parts of one engine."""

    core: EngineCore
    recorder: RecordedScheduler  # the scheduler, as the loop sees it
    runner_handle: RunnerHandle
    kv_memory: UncachedKVCacheManager | CachedKVCacheManager
    connector: KVConnector | None
    adapters: AdapterNames | None = None
    # Set if several steps can be in flight.
    close_loop: Callable[[], None] | None = None
    give_up: Callable[[], None] | None = None
    in_flight_plans: InFlightPlans | None = None


def find_max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    longest = model.max_position_embeddings
    max_model_len = config.max_model_len or longest
    if max_model_len > longest:
        raise ValueError(
            f"max_model_len must be <= {longest}, the model's maximum, got {max_model_len}"
        )
    return max_model_len


def find_vocab_size(model: ModelConfig, num_tokens_in_tokenizer: int | None) -> int:
    """Return the number of tokens that can be sampled. Checkpoints pad the vocabulary to a round
    number, and a padding lane must never be sampled."""
    return min(model.vocab_size, num_tokens_in_tokenizer or model.vocab_size)


def find_eos_token_ids(
    listed: Sequence[int], tokenizer: Tokenizer | None, vocab_size: int
) -> tuple[int, ...]:
    """Return every id that ends a text: those of the model's files and the tokenizer's, as in vLLM
    and SGLang. Many chat fine-tunes set only the tokenizer's to the token that ends a turn."""
    eos = None if tokenizer is None else tokenizer.eos_token_id
    ends = listed if eos is None or eos >= vocab_size else [*listed, eos]
    return tuple(dict.fromkeys(ends))


def assemble_around(config: EngineConfig, runner_handle: RunnerHandle) -> EngineParts:
    """Make scheduler, KV memory and engine loop for a runner."""
    connector, listener = make_connector(config, runner_handle)
    overlaps = is_overlapped(config, runner_handle.model.device)
    in_flight = make_in_flight_plugin(config, overlaps)
    queued = None if in_flight is None else make_queued_runner(runner_handle)
    wait_for_steps = None if queued is None else queued.wait_for_steps
    num_blocks = runner_handle.kv_cache.num_blocks
    windows = runner_handle.model.config.layer_windows
    if windows and (groups := deal_layers(windows, runner_handle.max_model_len)).have_windows:
        from common.assembly.windows import make_grouped_memory

        kv_memory = make_grouped_memory(
            config, num_blocks, groups.windows, runner_handle.model.device
        )
    else:
        kv_memory = make_kv_memory(config, num_blocks, connector, listener, wait_for_steps)
    chunk_policy = make_chunk_policy(config)
    plugins = make_plugins(config, in_flight, runner_handle.num_lookahead_tokens)
    parts = SchedulerParts(config, runner_handle.max_model_len, kv_memory, chunk_policy, plugins)
    scheduler = make_scheduler(parts)
    observers: list[Observer] = []
    if connector is not None:
        observers.append(partial(wait_for_loads, kv_memory))
    if isinstance(chunk_policy, LearnsDurations):
        observers.append(partial(tell_durations, chunk_policy))
    recorder = RecordedScheduler(scheduler, observers)
    if in_flight is None or queued is None:
        core = EngineCore(recorder, runner_handle.runner)
        return EngineParts(
            core, recorder, runner_handle, kv_memory, connector, make_adapter_names(runner_handle)
        )
    core = make_multi_step_core(config, recorder, queued, in_flight)
    ends, adapters = (core.close, core.give_up), make_adapter_names(runner_handle, queued)
    return EngineParts(
        core, recorder, runner_handle, kv_memory, connector, adapters, *ends, in_flight
    )


def make_adapter_names(
    runner_handle: RunnerHandle, queued: QueuedRunner | None = None
) -> AdapterNames | None:
    if runner_handle.adapters is None:
        return None
    from common.features.adapters.adapter_names import AdapterNames

    return AdapterNames(runner_handle.adapters, int if queued is None else queued.wait_for_steps)


# -- the scheduler


@dataclass(frozen=True, slots=True)
class SchedulerParts:
    """The parts that a scheduler is made of; the argument of a function in `LLM(scheduler=...)`."""

    config: EngineConfig
    max_model_len: int
    kv_memory: UncachedKVCacheManager | CachedKVCacheManager
    chunk_policy: ChunkPolicy | None
    plugins: Sequence[SchedulerPlugin] = ()

    @property
    def policy(self) -> SchedulePolicy:
        return make_policy(self.config, self.kv_memory)

    @property
    def limits(self) -> tuple[int, int]:
        return self.config.max_num_seqs, self.config.max_num_batched_tokens

    @property
    def options(self) -> SchedulerOptions:
        """The keyword arguments of every scheduler of chapter 4."""
        return {
            "max_model_len": self.max_model_len,
            "kv_memory": self.kv_memory,
            "chunk_policy": self.chunk_policy,
            "shuffle_waiting": self.config.shuffle_waiting,
            "seed": self.config.seed,
            "plugins": self.plugins,
        }


def make_scheduler(parts: SchedulerParts) -> SchedulerInterface:
    """Make the scheduler. Raises `ValueError` if a user's function returns an unsuitable one."""
    name_or_factory = parts.config.scheduler
    if isinstance(name_or_factory, str):
        return resolve_name(SCHEDULERS[name_or_factory])(parts)
    scheduler = name_or_factory(parts)
    is_ours = getattr(scheduler, "kv_memory", None) is parts.kv_memory
    if not is_ours or not isinstance(scheduler, BaseScheduler):
        raise ValueError(
            f"scheduler must make a BaseScheduler over the given kv_memory, got {scheduler!r}"
        )
    return scheduler


def make_two_phase(parts: SchedulerParts) -> SchedulerInterface:
    from scheduler import Scheduler

    watermark = parts.config.watermark
    return Scheduler(*parts.limits, policy=parts.policy, watermark=watermark, **parts.options)


def make_prefill_first(parts: SchedulerParts) -> SchedulerInterface:
    from prefill_first_scheduler import PrefillFirstScheduler

    config = parts.config
    size = config.chunk_size or config.max_num_batched_tokens
    return PrefillFirstScheduler(
        *parts.limits,
        policy=parts.policy,
        chunked_prefill_size=size if config.cuts_prompts else None,
        mixing=config.mixing,
        **parts.options,
    )


def make_fcfs(parts: SchedulerParts) -> SchedulerInterface:
    from caching_fcfs_scheduler import CachingFCFSScheduler

    return CachingFCFSScheduler(parts.kv_memory, *parts.limits, parts.max_model_len, parts.plugins)


def make_in_flight_plugin(
    config: EngineConfig, overlaps: bool
) -> OverlapPlugin | PipelinePlugin | None:
    """Make the plugin for several steps in flight, or None if steps do not overlap."""
    if config.pipeline_parallel_size > 1:
        from pipeline_plugin import PipelinePlugin

        return PipelinePlugin(config.pipeline_parallel_size)
    if not overlaps:
        return None
    from overlap_plugin import OverlapPlugin

    return OverlapPlugin()


def make_plugins(
    config: EngineConfig, in_flight: SchedulerPlugin | None, num_lookahead_tokens: int | None
) -> list[SchedulerPlugin]:
    """Make the scheduler's plugins, in the order in which it calls them. `num_lookahead_tokens` is
    None without speculative decoding."""
    plugins = [] if in_flight is None else [in_flight]
    if num_lookahead_tokens is not None:
        from draft_plugin import DraftPlugin

        plugins.append(DraftPlugin(num_lookahead_tokens))
    if config.takes_adapters:
        from adapter_limit import MaxLoRAs

        plugins.append(MaxLoRAs(config.max_adapters))
    if config.preempt_every is not None:
        from forced_preemption import ForcedPreemption

        spares_pinned = config.scheduler == "prefill_first"
        plugins.append(ForcedPreemption(config.preempt_every, spares_pinned))
    return plugins


def make_policy(config: EngineConfig, kv_memory: UncachedKVCacheManager) -> SchedulePolicy:
    """Make the policy. Chapter 4's main folder has two of the names, `sglang_policies` the rest."""
    if isinstance(config.policy, SchedulePolicy):
        return config.policy
    if config.policy in POLICIES:
        return get_policy(config.policy)()
    from sglang_policies import policy_over

    return policy_over(kv_memory, config.policy, config.seed)


def make_chunk_policy(config: EngineConfig) -> ChunkPolicy | None:
    """Make the chunk policy, or None for whole prompts. For the prefill-first scheduler, a number
    is the chunk size for all prompts of a batch, not a limit for a single prompt."""
    if not isinstance(config.chunked_prefill, int):
        return config.chunked_prefill
    if not config.cuts_prompts:
        return None
    threshold = None if config.scheduler == "prefill_first" else config.chunk_size
    limits = (threshold, config.max_long_partial_prefills)
    if config.target_step_ms is None:
        from chunk_policy import ChunkedPrefill

        return ChunkedPrefill(*limits)
    from adaptive_chunks import AdaptiveChunks

    return AdaptiveChunks(config.target_step_ms, *limits)


def tell_durations(policy: LearnsDurations, record: StepRecord) -> None:
    """Notify a chunk policy of a step's duration. An observer of the recorder."""
    starts, num_tokens = record.start_positions, record.num_scheduled_tokens
    policy.observe_step([starts[r] for r in num_tokens], list(num_tokens.values()), record.step_ms)


# -- the loop


def is_overlapped(config: EngineConfig, device: torch.device) -> bool:
    """Whether a step is planned while the previous one runs. If that is requested but not possible,
    logs a warning, and each step ends before the next one is planned."""
    if config.pipeline_parallel_size > 1:
        if config.overlap_scheduling is True:
            logger.warning(
                "overlap_scheduling has no effect with pipeline_parallel_size: each stage has a "
                "step in flight anyway, and no step is planned after a token that is not known"
            )
        return False
    if not config.wants_overlap(device):
        return False
    if (name := config.needs_ends_of_steps) is not None:
        logger.warning(
            "overlap_scheduling has no effect with %s: each step ends before the next one is "
            "planned",
            name,
        )
    return name is None


def make_queued_runner(runner_handle: RunnerHandle) -> QueuedRunner:
    """Make a runner for a loop that starts a step while another one is in flight."""
    from common.runner.overlap import QueuedRunner, ThreadedRunner

    return (QueuedRunner if runner_handle.is_queued else ThreadedRunner)(runner_handle.runner)


def make_multi_step_core(
    config: EngineConfig,
    recorder: RecordedScheduler,
    runner: QueuedRunner,
    scheduler: InFlightPlans,
) -> OverlappedEngineCore:
    """Make the engine loop for several steps in flight. `scheduler` keeps their plans."""
    if config.pipeline_parallel_size > 1:
        from common.runner.pipeline import PipelinedEngineCore

        return PipelinedEngineCore(recorder, runner, scheduler, config.pipeline_parallel_size)
    from common.runner.overlap import OverlappedEngineCore

    return OverlappedEngineCore(recorder, runner, scheduler)


# -- KV


def make_kv_memory(
    config: EngineConfig,
    num_blocks: int,
    connector: KVConnector | None,
    listener: CacheListener | None,
    wait_for_steps: Callable[[], object] | None = None,
) -> UncachedKVCacheManager | CachedKVCacheManager:
    """Make the KV memory. `wait_for_steps` is the runner's, if steps can be in flight."""
    pool, block_size = BlockPool(num_blocks), config.block_size
    if config.prefix_cache is None:
        return UncachedKVCacheManager(pool, block_size)
    cache = make_cache(config.prefix_cache, pool, block_size, listener)
    if connector is None:
        from cached_kv_cache_manager import CachedKVCacheManager

        return CachedKVCacheManager(pool, block_size, cache)
    from loading_kv_cache_manager import LoadingKVCacheManager

    return LoadingKVCacheManager(pool, block_size, cache, connector, wait_for_steps)


def make_cache(
    name_or_factory: str | Callable[..., PrefixCache],
    pool: BlockPool,
    block_size: int,
    listener: CacheListener | None,
) -> PrefixCache:
    """Make the prefix cache. Raises `ValueError` if a user's function ignores the engine's pool."""
    if isinstance(name_or_factory, str):
        return resolve_name(PREFIX_CACHES[name_or_factory])(pool, block_size, listener)
    cache = name_or_factory(pool=pool, block_size=block_size, listener=listener)
    is_ours = isinstance(cache, PrefixCache) and cache.pool is pool
    if not is_ours or cache.block_size != block_size or cache.listener is not listener:
        raise ValueError(
            "prefix_cache must make a PrefixCache over the given pool, block_size and listener, "
            f"got {cache!r}"
        )
    return cache


def make_hash_cache(
    pool: BlockPool, block_size: int, listener: CacheListener | None
) -> PrefixCache:
    from prefix_cache_local import PrefixCacheLocal

    return PrefixCacheLocal(pool=pool, block_size=block_size, listener=listener)


def make_radix_cache(
    pool: BlockPool, block_size: int, listener: CacheListener | None
) -> PrefixCache:
    from radix_cache import RadixCache

    return RadixCache(page_size=block_size, pool=pool, listener=listener)


def make_connector(
    config: EngineConfig, runner_handle: RunnerHandle
) -> tuple[KVConnector | None, CacheListener | None]:
    """Make the connector (tiers and configured connector), bound to this engine's KV memory, and
    the listener that is notified of cached blocks."""
    tiers = None
    if config.kv_tiers is not None:
        from tiered_cache import TieredCache

        tiers = TieredCache(config.kv_tiers)
    connectors = [part for part in (tiers, config.kv_connector) if part is not None]
    if not connectors:
        return None, None
    from kv_connector import ConnectorChain

    connector = connectors[0] if len(connectors) == 1 else ConnectorChain(connectors)
    io, namespace = runner_handle.block_io()
    connector.bind(io, config.block_size, namespace)
    return connector, tiers


def wait_for_loads(kv_memory: Any, record: StepRecord) -> None:
    """Wait for KV loads if a step computed nothing while requests wait. An observer."""
    if not record.num_scheduled_tokens and record.num_waiting:
        kv_memory.wait_for_loads()
