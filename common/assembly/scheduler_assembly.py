"""The assembly of the scheduler's half of an engine: `SchedulerParts`, to be read from the top.

    role            chapter   part
    steps in flight    1      an OverlapPlugin or a PipelinePlugin, and a QueuedRunner
    external KV        3      TieredCache, any KVConnector, or both, by a LoadingKVCacheManager
    KV memory         2, 3    UncachedKVCacheManager or CachedKVCacheManager over a BlockPool; with
                              windows GroupedKVMemory or CachedGroupedMemory
    prefix cache       3      PrefixCacheLocal or RadixCache
    chunks           4, 6     Unchunked; ChunkedPrefill or AdaptiveChunks
    plugins          1 to 5   made by `make_plugins`: steps in flight, drafts, forced preemption
    scheduler        1 to 4   CachingFCFSScheduler; Scheduler or PrefillFirstScheduler with a policy
    records            1      a RecordedScheduler around it, with observers that need the clock
    the loop           1      EngineCore; with several steps in flight an OverlappedEngineCore or a
                              PipelinedEngineCore

The runner is a `RunnerHandle`: in this process (`assembly.py`) or in others (`parallel/remote.py`).
The code here is the same for both. A part that is not chosen is not imported.

See common/README.md#how-the-engine-imports-the-chapters"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from base_scheduler import BaseScheduler
from block_pool import BlockPool
from common.engine_config import PREFIX_CACHES, SCHEDULERS, EngineConfig, LearnsDurations
from common.models.layer_groups import deal_layers
from common.models.model_config import ModelFacts
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
    from common.models.layer_groups import LayerGroups
    from common.models.loader import Checkpoint, LoadedModel
    from common.requests.tokenizer import Tokenizer
    from common.runner.overlap import OverlappedEngineCore, QueuedRunner
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


class SchedulerParts:
    """The parts of an engine around its runner, each made from those above it. A function in
    `LLM(scheduler=...)` gets this object, in which every part above the scheduler is made."""

    def __init__(self, config: EngineConfig, runner_handle: RunnerHandle) -> None:
        self.config = config
        self.runner_handle = runner_handle
        self.max_model_len = runner_handle.max_model_len

        # KV memory outside of this engine. It may refuse, so it comes before any thread.
        self.connector, listener = make_connector(self)

        # Several steps in flight: a plugin keeps their plans, and a runner their order.
        self.in_flight_plans = make_in_flight_plugin(self)
        self.queued_runner: QueuedRunner | None = None
        self.wait_for_steps: Callable[[], object] = int
        if self.in_flight_plans is not None:
            from common.runner.overlap import QueuedRunner, ThreadedRunner

            kind = QueuedRunner if runner_handle.is_queued else ThreadedRunner
            self.queued_runner = kind(runner_handle.runner)
            self.wait_for_steps = self.queued_runner.wait_for_steps

        # KV blocks, with or without a prefix cache.
        self.kv_memory = make_kv_memory(self, listener)

        # The scheduler, and its plugins in the order in which it calls them.
        self.chunk_policy = make_chunk_policy(config)
        self.plugins = make_plugins(self)
        self.scheduler = make_scheduler(self)

        # The loop, over the scheduler with a recorder around it.
        self.recorder = RecordedScheduler(self.scheduler, [*make_observers(self)])
        self.multi_step_core = make_multi_step_core(self)
        self.core = self.multi_step_core or EngineCore(self.recorder, runner_handle.runner)

        # The adapters' names, which requests use.
        self.adapters: AdapterNames | None = None
        if runner_handle.adapters is not None:
            from common.features.adapters.adapter_names import AdapterNames

            self.adapters = AdapterNames(runner_handle.adapters, self.wait_for_steps)

    @property
    def policy(self) -> SchedulePolicy:
        """Chapter 4's main folder has two of the names, `sglang_policies` the rest."""
        policy = self.config.policy
        if isinstance(policy, SchedulePolicy):
            return policy
        if policy in POLICIES:
            return get_policy(policy)()
        from sglang_policies import policy_over

        return policy_over(self.kv_memory, policy, self.config.seed)

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


# -- several steps in flight


def make_in_flight_plugin(parts: SchedulerParts) -> OverlapPlugin | PipelinePlugin | None:
    """Make the plugin for several steps in flight, or None if each step ends before the next one is
    planned. If `overlap_scheduling` is requested but not possible, logs a warning."""
    config = parts.config
    num_stages = parts.config.pipeline_parallel_size
    if num_stages > 1:
        if config.overlap_scheduling is True:
            logger.warning(
                "overlap_scheduling has no effect with pipeline_parallel_size: each stage has a "
                "step in flight anyway, and no step is planned after a token that is not known"
            )
        from pipeline_plugin import PipelinePlugin

        return PipelinePlugin(num_stages)
    if not config.wants_overlap(parts.runner_handle.model.device):
        return None
    if (name := config.needs_ends_of_steps) is not None:
        logger.warning(
            "overlap_scheduling has no effect with %s: each step ends before the next one is "
            "planned",
            name,
        )
        return None
    from overlap_plugin import OverlapPlugin

    return OverlapPlugin()


def make_multi_step_core(parts: SchedulerParts) -> OverlappedEngineCore | None:
    """Make the engine loop for several steps in flight, or None for chapter 1's."""
    runner = parts.queued_runner
    plans = parts.in_flight_plans
    if runner is None or plans is None:
        return None
    if (num_stages := parts.config.pipeline_parallel_size) > 1:
        from common.runner.pipeline import PipelinedEngineCore

        return PipelinedEngineCore(parts.recorder, runner, plans, num_stages)
    from common.runner.overlap import OverlappedEngineCore

    return OverlappedEngineCore(parts.recorder, runner, plans)


# -- KV


def make_connector(parts: SchedulerParts) -> tuple[KVConnector | None, CacheListener | None]:
    """Make the connector (tiers, or the configured one), bound to this engine's KV memory, and the
    listener that is notified of cached blocks."""
    config = parts.config
    connector = config.kv_connector
    tiers = None
    if config.kv_tiers is not None:
        from tiered_cache import TieredCache

        connector = tiers = TieredCache(config.kv_tiers)
    if connector is None:
        return None, None
    io, namespace = parts.runner_handle.block_io()
    connector.bind(io, config.block_size, namespace)
    return connector, tiers


def make_kv_memory(
    parts: SchedulerParts, listener: CacheListener | None
) -> UncachedKVCacheManager | CachedKVCacheManager:
    config = parts.config
    model = parts.runner_handle.model
    pool = BlockPool(parts.runner_handle.kv_cache.num_blocks)
    block_size = config.block_size
    groups = deal_layers(model.config.layer_windows or (None,), parts.max_model_len)
    if groups.have_windows:
        from cached_grouped_memory import CachedGroupedMemory
        from grouped_kv_memory import GroupedKVMemory

        kind = GroupedKVMemory if config.prefix_cache is None else CachedGroupedMemory
        return kind(pool, block_size, groups.windows, config.num_in_flight_tokens(model.device))
    if config.prefix_cache is None:
        return UncachedKVCacheManager(pool, block_size)
    cache = make_cache(config, pool, listener)
    if parts.connector is None:
        from cached_kv_cache_manager import CachedKVCacheManager

        return CachedKVCacheManager(pool, block_size, cache)
    from loading_kv_cache_manager import LoadingKVCacheManager

    return LoadingKVCacheManager(pool, block_size, cache, parts.connector, parts.wait_for_steps)


def make_cache(config: EngineConfig, pool: BlockPool, listener: CacheListener | None) -> Any:
    """Make the prefix cache. Raises `ValueError` if a user's function ignores the engine's pool."""
    kind = config.prefix_cache
    block_size = config.block_size
    if isinstance(kind, str):
        size = {"page_size" if kind == "radix" else "block_size": block_size}
        return resolve_name(PREFIX_CACHES[kind])(pool=pool, listener=listener, **size)
    assert kind is not None
    cache = kind(pool=pool, block_size=block_size, listener=listener)
    is_ours = isinstance(cache, PrefixCache) and cache.pool is pool
    if not is_ours or cache.block_size != block_size or cache.listener is not listener:
        raise ValueError(
            "prefix_cache must make a PrefixCache over the given pool, block_size and listener, "
            f"got {cache!r}"
        )
    return cache


# -- the scheduler


def make_chunk_policy(config: EngineConfig) -> ChunkPolicy | None:
    """Make the chunk policy, or None for whole prompts. For the prefill-first scheduler, a number
    is the chunk size for all prompts of a batch, not a limit for a single prompt."""
    if not isinstance(config.chunked_prefill, int):
        return config.chunked_prefill
    if not config.cuts_prompts:
        return None
    threshold = None if config.scheduler == "prefill_first" else config.chunk_size
    if config.target_step_ms is None:
        from chunk_policy import ChunkedPrefill

        return ChunkedPrefill(
            long_prefill_token_threshold=threshold,
            max_long_partial_prefills=config.max_long_partial_prefills,
        )
    from adaptive_chunks import AdaptiveChunks

    return AdaptiveChunks(
        target_step_ms=config.target_step_ms,
        long_prefill_token_threshold=threshold,
        max_long_partial_prefills=config.max_long_partial_prefills,
    )


def make_plugins(parts: SchedulerParts) -> list[SchedulerPlugin]:
    """Make the scheduler's plugins, in the order in which it calls them."""
    config = parts.config
    num_lookahead_tokens = parts.runner_handle.num_lookahead_tokens
    plugins: list[SchedulerPlugin] = []
    if parts.in_flight_plans is not None:
        plugins.append(parts.in_flight_plans)
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


def make_scheduler(parts: SchedulerParts) -> SchedulerInterface:
    """Make the scheduler. Raises `ValueError` if a user's function returns an unsuitable one."""
    config = parts.config
    kind = parts.config.scheduler
    if not isinstance(kind, str):
        scheduler = kind(parts)
        is_ours = getattr(scheduler, "kv_memory", None) is parts.kv_memory
        if not is_ours or not isinstance(scheduler, BaseScheduler):
            raise ValueError(
                f"scheduler must make a BaseScheduler over the given kv_memory, got {scheduler!r}"
            )
        return scheduler
    make = resolve_name(SCHEDULERS[kind])
    max_num_seqs, max_num_batched_tokens = parts.limits
    make = partial(make, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
    if kind == "fcfs":
        return make(
            kv_memory=parts.kv_memory, max_model_len=parts.max_model_len, plugins=parts.plugins
        )
    if kind == "two_phase":
        return make(policy=parts.policy, watermark=config.watermark, **parts.options)
    size = config.chunk_size or config.max_num_batched_tokens
    return make(
        policy=parts.policy,
        mixing=config.mixing,
        chunked_prefill_size=size if config.cuts_prompts else None,
        **parts.options,
    )


# -- what the loop does besides its steps


def make_observers(parts: SchedulerParts) -> Iterator[Observer]:
    if parts.connector is not None:
        yield partial(wait_for_loads, parts.kv_memory)
    if isinstance(parts.chunk_policy, LearnsDurations):
        yield partial(tell_durations, parts.chunk_policy)


def wait_for_loads(kv_memory: Any, record: StepRecord) -> None:
    """Wait for KV loads if a step computed nothing while requests wait. An observer."""
    if not record.num_scheduled_tokens and record.num_waiting:
        kv_memory.wait_for_loads()


def tell_durations(policy: LearnsDurations, record: StepRecord) -> None:
    """Notify a chunk policy of a step's duration. An observer of the recorder."""
    starts = record.start_positions
    num_tokens = record.num_scheduled_tokens
    policy.observe_step([starts[r] for r in num_tokens], list(num_tokens.values()), record.step_ms)


# -- the limits, known before any part is made


class Limits(NamedTuple):
    """Numbers of a model that every part can rely on."""

    max_model_len: int
    vocab_size: int  # the tokens that can be sampled
    eos_token_ids: tuple[int, ...]  # every id that ends a text


def find_limits(
    config: EngineConfig, model: Checkpoint | LoadedModel, tokenizer: Tokenizer | None
) -> Limits:
    """Return the limits of an engine over `model`. Checkpoints pad the vocabulary to a round
    number, and a padding lane must never be sampled. A text ends at the ids of the model's files
    and at the tokenizer's, as in vLLM and SGLang, because many chat fine-tunes set only the
    tokenizer's to the token that ends a turn. Raises `ValueError` if the model does not allow the
    configuration."""
    longest = model.config.max_position_embeddings
    max_model_len = config.max_model_len or longest
    if max_model_len > longest:
        raise ValueError(
            f"max_model_len must be <= {longest}, the model's maximum, got {max_model_len}"
        )
    check_windows(config, deal_layers(model.config.layer_windows or (None,), max_model_len))
    vocab_size = model.config.vocab_size
    ends = list(model.generation_eos_token_ids)
    if tokenizer is not None:
        vocab_size = min(vocab_size, tokenizer.vocab_size)
        eos = tokenizer.eos_token_id
        ends += [] if eos is None or eos >= vocab_size else [eos]
    return Limits(max_model_len, vocab_size, tuple(dict.fromkeys(ends)))


def check_windows(config: EngineConfig, groups: LayerGroups) -> None:
    """Raise `ValueError` for options that are not supported for layers with a window."""
    if not groups.have_windows:
        return
    spec_config = config.speculation
    refused = {
        # A draft model's keys use the slots of layers with full attention.
        'speculative other than "ngram", where no layer sees everything,': (
            spec_config is not None and spec_config.method != "ngram" and None not in groups.windows
        ),
        "kv_tiers": config.kv_tiers is not None,
        "kv_connector": config.kv_connector is not None,
        f"prefix_cache={config.prefix_cache!r}": config.prefix_cache not in (None, "hash"),
        f"scheduler={config.scheduler!r}": config.scheduler != "two_phase",
    }
    window = min(window for window in groups.windows if window is not None)
    for name, is_asked in refused.items():
        if is_asked:
            raise ValueError(
                f"{name} is not supported for layers with a window; set max_model_len={window}, "
                "with which no layer has one"
            )
    logger.info(
        "%d groups of layers have block tables of their own; of %d places for a layer %d are "
        "unused",
        len(groups.windows),
        len(groups.windows) * groups.num_tensors,
        groups.num_unused,
    )
