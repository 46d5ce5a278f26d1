"""The assembly of the chapters into one engine, as one recipe: read it from the top.
`load_runner` loads the models and calls `make_runner`, which makes what computes a step, in this
process or in a worker (`parallel/worker_rank.py`). `make_engine_parts` makes what plans a step,
around this runner or around that of other processes (`parallel/remote.py`).

    role            chapter   part
    KV tensors         2      PagedKVCache, sized by `kv_sizing` unless `num_blocks` is given
    batch            2, 6     compose_in_order; compose
    attention        2, 6     TorchAttentionBackend, CompiledAttentionBackend or
                              TritonAttentionBackend, or the mixed ones; InvariantAttentionBackend
    runner          common    PagedModelRunner over a BatchState; a GraphRunner, with DecodeGraphs
    sampler         common    Sampler; in a SpeculativeSampler with speculative decoding
    kernels         common    KernelRegions, if attention uses Triton
    adapters        common    AdapterSlots in the model's matrices, AdapterColumns
    grammars        common    GrammarMasks, once a request has a grammar
    draft tokens       5      a SpeculatingRunner with an NgramProposer or a DraftModelProposer
    external KV        3      TieredCache or a KVConnector, by a LoadingKVCacheManager
    steps in flight    1      an OverlapPlugin or a PipelinePlugin, and a QueuedRunner
    KV memory        2, 3     UncachedKVCacheManager or CachedKVCacheManager over a BlockPool; with
                              windows GroupedKVMemory
    prefix cache       3      PrefixCacheLocal or RadixCache
    chunks           4, 6     Unchunked; ChunkedPrefill or AdaptiveChunks
    scheduler        1 to 4   CachingFCFSScheduler; Scheduler or PrefillFirstScheduler with a policy
    the loop           1      EngineCore; an OverlappedEngineCore with several steps in flight

Nothing is implemented here. Every function takes what it needs and returns a part. To turn a
chapter off, a plain part takes its role, and no output token changes. A part that is not chosen is
not imported.

See common/README.md#how-the-engine-imports-the-chapters"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from base_scheduler import BaseScheduler
from batch_layout import compose_in_order
from block_pool import BlockPool
from chunk_policy import ChunkedPrefill
from common.engine_config import SHIPPED_CHECKPOINT, SHIPPED_DRAFT, EngineConfig, LearnsDurations
from common.models.layer_groups import deal_layers
from common.models.linear import OneDnnProduct, Packing, linear_layers, reason_not_packed
from common.models.loader import LoadedModel, load_model, read_checkpoint
from common.models.regions.regions import Regions
from common.requests.tokenizer import Tokenizer, load_tokenizer
from common.runner.batch_state import BatchState
from common.runner.kv_sizing import NO_PEERS, Peers, allocate_kv_cache, make_kv_cache
from common.runner.model_runner import Compose, PagedModelRunner
from common.runner.thread_count import set_threads
from common.sampling.runner_plugin import RunnerPlugin
from common.sampling.sampler import Sampler
from common.sampling.sampling_columns import SamplingColumns
from engine_core import EngineCore
from kv_memory import UncachedKVCacheManager
from paged_attention import AttentionBackend, PagedKVCache, TorchAttentionBackend
from policies import POLICIES, SchedulePolicy, get_policy
from prefix_cache import PrefixCache
from request import require
from scheduler_interface import ModelRunner
from step_record import StepRecord

if TYPE_CHECKING:
    from base_scheduler import SchedulerPlugin
    from cached_kv_cache_manager import CachedKVCacheManager
    from common.features.adapters.adapter_names import AdapterLoader, AdapterNames
    from common.features.adapters.adapter_slots import AdapterSlots
    from common.models.layer_groups import LayerGroups
    from common.models.loader import Checkpoint
    from common.models.model import DecoderModel
    from common.models.model_config import ModelConfig
    from common.requests.output_processor import OutputProcessor
    from common.runner.overlap import OverlappedEngineCore, QueuedRunner
    from draft_plugin import DraftPlugin
    from kv_connector import KVBlockIO, KVConnector
    from overlap_plugin import OverlapPlugin
    from pipeline_plugin import PipelinePlugin
    from proposers import Proposer
    from unchunked import ChunkPolicy

logger = logging.getLogger(__name__)
Namespace = Sequence[tuple[str, str]]


def load_runner(
    config: EngineConfig,
    loaded: LoadedModel | None,
    draft: LoadedModel | None,
    tokenizer: Tokenizer | None,
) -> RunnerParts:
    """Load the models that are not given, and make the runner of this process. Raises
    `ValueError` if the model or the available memory does not allow the configuration."""
    if loaded is None:
        device = config.resolve_device()
        if device.index is not None:
            torch.cuda.set_device(device)  # kernels and events use the current device
        # Raises for a bad checkpoint before reading weights.
        checkpoint = read_checkpoint(config.model or SHIPPED_CHECKPOINT)
        tokenizer = tokenizer or load_tokenizer(checkpoint.path)
        packing = partial(packing_of, config, is_loading=True)
        loaded = load_model(checkpoint, config.dtype, device, packing_of=packing)
    draft = load_draft(config, loaded, draft)
    limits = find_limits(config, loaded, tokenizer)
    device = loaded.model.embed_weight.device
    put_threads_back = set_threads(config.num_threads, loaded.model.num_parameters, device)
    try:
        return make_runner(
            config, loaded, draft, limits, tokenizer=tokenizer, close=put_threads_back
        )
    except BaseException:
        put_threads_back()
        raise


def load_draft(
    config: EngineConfig, target: LoadedModel, draft: LoadedModel | None = None
) -> LoadedModel | None:
    """Return `draft`, or load the draft model that `config` names, or None if it names none. Raises
    `ValueError` if its vocabulary size differs from the target's."""
    spec_config = config.speculation
    if spec_config is None or spec_config.method != "draft":
        return None
    if draft is None:
        weight = target.model.embed_weight
        packing = partial(packing_of, config)
        path = spec_config.model or SHIPPED_DRAFT
        draft = load_model(path, weight.dtype, weight.device, packing_of=packing)
    vocab_size = draft.config.vocab_size
    allowed = f"the target's vocabulary of {target.config.vocab_size} tokens"
    is_same = vocab_size == target.config.vocab_size
    require(is_same, "model of speculative", vocab_size, allowed)
    return draft


# -- the half that computes: a runner and its parts, each made from those above it


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerParts:
    """The runner, in this process or in others, and what the planning half needs to know of it.
    `block_io` gives access to KV blocks and returns everything that their bytes depend on besides
    tokens, which takes time."""

    runner: ModelRunner
    model_config: ModelConfig
    num_parameters: int
    device: torch.device
    dtype: torch.dtype
    limits: Limits
    tokenizer: Tokenizer | None
    kv_cache: Any  # `num_blocks`, `kv_bytes_per_block`; in this process, a PagedKVCache
    block_io: Callable[[], tuple[KVBlockIO, Namespace]]
    is_queued: bool  # `execute` returns when a step has started
    num_lookahead_tokens: int | None = None  # None: no draft tokens
    adapters: AdapterLoader | None = None  # None: no adapters
    close: Callable[[], object] = int  # nothing to close


def make_runner(
    config: EngineConfig,
    loaded: LoadedModel,
    draft: LoadedModel | None,
    limits: Limits,
    *,
    tokenizer: Tokenizer | None = None,
    peers: Peers = NO_PEERS,
    close: Callable[[], object] = int,
) -> RunnerParts:
    """Make the runner of this process. A worker has no `tokenizer` (plugins read the
    checkpoint's)."""
    model = loaded.model
    is_last_stage = model.collectives.ranks.is_last_stage

    # The models: groups of layers with a block table each, attention, adapters, kernels.
    model.group_layers(limits.max_model_len)
    attention = make_attention(config, loaded)
    adapters: AdapterSlots | None = None
    if config.takes_adapters:
        from common.features.adapters.adapter_slots import AdapterSlots

        adapters = AdapterSlots(model, config.max_adapters, config.max_lora_rank)
    prepare_model(config, loaded, is_triton=attention.is_triton)
    if draft is not None and draft.model is not model:
        draft.model.group_layers(draft.config.num_unhidden)  # the longest context it drafts for
        set_regions(draft.model, is_compiled=False, is_triton=attention.is_triton)
        pack_weights(config, draft.model)

    def make_over(kv_cache: PagedKVCache) -> RunnerParts:
        """Make the runner over KV tensors, with a state, a sampler and graphs of its own."""
        state = make_state(config, loaded, limits, adapters=adapters, tokenizer=tokenizer)
        proposer: Proposer | None = None
        if is_last_stage and config.speculation is not None:
            proposer = make_proposer(
                config, draft, limits, state=state, kv_cache=kv_cache, backend=attention.backend
            )
        sampler = Sampler(limits.vocab_size)
        if not is_last_stage:
            from common.runner.stage import NoSampler

            sampler = NoSampler(limits.vocab_size)
        elif proposer is not None:
            sampler = make_verifier(limits.vocab_size, proposer, attention.is_triton)
        make_paged = PagedModelRunner
        if config.pipeline_parallel_size > 1:
            from common.runner.stage import StageRunner

            make_paged = StageRunner
        elif config.wants_graphs(model.embed_weight.device):
            from common.runner.graph_maker import make_graphs
            from common.runner.graphs import GraphRunner

            graphs = make_graphs(
                config,
                model,
                kv_cache,
                backend=attention.backend,
                is_triton=attention.is_triton,
                max_model_len=limits.max_model_len,
                part=adapters,
            )
            if graphs is not None:
                make_paged = partial(GraphRunner, graphs=graphs)
        runner = paged = make_paged(
            model=model,
            kv_cache=kv_cache,
            backend=attention.backend,
            state=state,
            sampler=sampler,
            compose=attention.compose,
            shuffle_seed=config.seed if config.shuffle_batch else None,
        )
        if proposer is not None:
            from speculating_runner import SpeculatingRunner

            runner = SpeculatingRunner(paged, proposer, state, state.num_possible)
        return RunnerParts(
            runner=runner,
            model_config=loaded.config,
            num_parameters=model.num_parameters,
            device=paged.device,
            dtype=model.embed_weight.dtype,
            limits=limits,
            tokenizer=tokenizer,
            kv_cache=kv_cache,
            block_io=partial(make_block_io, config, loaded, kv_cache),
            is_queued=paged.device.type != "cpu",  # by the device
            num_lookahead_tokens=None if proposer is None else proposer.num_lookahead_tokens,
            adapters=adapters,
            close=close,
        )

    # KV tensors, in the memory that everything else leaves: adapters, the sampler, graphs.
    kv_cache = make_kv_cache(
        config,
        loaded,
        draft=draft,
        max_model_len=limits.max_model_len,
        vocab_size=limits.vocab_size,
        make_runner=lambda kv_cache: make_over(kv_cache).runner,  # on trial
        kind=attention.kv_cache_kind,
        peers=peers,
    )
    return make_over(kv_cache)


def make_state(
    config: EngineConfig,
    loaded: LoadedModel,
    limits: Limits,
    *,
    adapters: AdapterSlots | None,
    tokenizer: Tokenizer | None,
) -> BatchState:
    """Make the runner's copy of the requests, with its plugins in order. Those of `late` are made
    when the first request has their feature; they need logits, which the last stage has."""
    plugins: list[RunnerPlugin] = []
    if adapters is not None:
        from common.features.adapters.adapter_columns import AdapterColumns

        plugins.append(AdapterColumns(adapters))
    late: dict[str, Callable[[], RunnerPlugin]] = {}
    if loaded.model.collectives.ranks.is_last_stage:
        late["prompt_logprobs"] = partial(make_prompt_logprobs, limits)
        late["grammar"] = partial(make_grammar_masks, loaded, tokenizer, limits)
    return BatchState(
        config.max_num_seqs,
        -(-limits.max_model_len // config.block_size),
        SamplingColumns(eos_token_ids=limits.eos_token_ids),
        plugins,
        loaded.model.num_groups,
        late,
    )


# -- the numbers of a model that every part can rely on, known before any part is made


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
    allowed = f"<= {longest}, the model's maximum"
    require(max_model_len <= longest, "max_model_len", max_model_len, allowed)
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
        "an attention_backend of your own": not isinstance(config.attention_backend, str),
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


# -- attention


@dataclass(frozen=True, slots=True)
class Attention:
    """An attention backend and the batch layout that it needs."""

    backend: AttentionBackend
    compose: Compose
    is_triton: bool = False
    kv_cache_kind: type[PagedKVCache] = PagedKVCache


def make_attention(config: EngineConfig, loaded: LoadedModel) -> Attention:
    """Choose the attention backend. `"auto"` is Triton on CUDA and PyTorch elsewhere. With chunked
    prompts it is chapter 6's backend, for decodes and chunks in one batch, instead of chapter 2's.
    A fallback logs a warning.

    Raises `RuntimeError` if Triton is requested by name and cannot run here, and `ValueError` if
    its kernels do not support this dtype or head_dim."""
    name = config.attention_backend
    model = loaded.model
    device = model.embed_weight.device
    compose = compose_in_order
    if config.cuts_prompts:
        from mixed_batch import compose as compose_mixed

        compose = partial(compose_mixed, decode_threshold=config.num_rows_per_request)
    if model.groups.have_windows:
        from window_attention import compose_windows

        compose = partial(compose_windows, compose, model.groups.windows)
    if config.batch_invariant:
        from invariant_attention import InvariantAttentionBackend

        return Attention(InvariantAttentionBackend(), compose)
    if name == "triton" or (name == "auto" and device.type == "cuda"):
        from paged_attention_triton import TritonAttentionBackend

        try:
            backend = TritonAttentionBackend()
            backend.check(model.embed_weight.dtype, loaded.config.head_dim)
            return Attention(backend, compose, True)
        except (RuntimeError, ValueError) as error:
            if name == "triton":
                raise
            logger.warning("attention falls back from Triton to PyTorch: %s", error)
    if not isinstance(name, str):
        return Attention(name, compose)
    backend = TorchAttentionBackend()
    if config.cuts_prompts:
        from mixed_attention import MixedAttentionBackend

        backend = MixedAttentionBackend()
    if not config.wants_compiled(model.num_parameters, device):
        return Attention(backend, compose)
    from compiled_attention import CompiledAttentionBackend, HeadMajorKVCache

    few_blocks = allocate_kv_cache(loaded, 3, config.block_size, HeadMajorKVCache)
    compiled = CompiledAttentionBackend.compiled_for(model.num_heads, few_blocks, backend)
    if compiled is None:
        return Attention(backend, compose)
    return Attention(compiled, compose, kv_cache_kind=HeadMajorKVCache)


# -- the models, before they are used: adapters' places, regions, packing, kernels


def prepare_model(config: EngineConfig, loaded: LoadedModel, is_triton: bool) -> None:
    model = loaded.model
    device = model.embed_weight.device
    set_regions(model, config.wants_compiled(model.num_parameters, device), is_triton)
    for layer in model.layers:
        layer.mlp.prepare(config.wants_graphs(device))
    pack_weights(config, model)
    if config.batch_invariant:
        from batch_invariance import make_batch_invariant

        make_batch_invariant(
            linear_layers(model),
            [layer.mlp for layer in model.layers],
            activation=loaded.config.activation,
            dtype=model.embed_weight.dtype,
            head_dim=loaded.config.head_dim,
        )


def set_regions(model: DecoderModel, is_compiled: bool, is_triton: bool = False) -> None:
    """Set how `model` computes its regions: with kernels if attention is a Triton kernel, with code
    compiled for a CPU, or with the plain functions. Without a C++ compiler, the plain functions are
    used and a warning is logged. float64 never uses kernels."""
    regions = Regions()
    weight = model.embed_weight
    if is_triton and weight.dtype != torch.float64:
        from common.models.regions.kernel_regions import KernelRegions

        regions = KernelRegions()
    elif is_compiled:
        from common.models.regions.compiled_regions import compile_regions  # imports the compiler

        regions = compile_regions(model)
    model.regions = regions


def packing_of(
    config: EngineConfig, model: DecoderModel, is_loading: bool = False
) -> Packing | None:
    """Return how the matrices of a model are packed, or None if they stay plain. Adapters have to
    see the matrices before packing, so with adapters nothing is packed while a model is loaded."""
    if not config.pack_weights or (is_loading and config.takes_adapters):
        return None
    dtype = model.embed_weight.dtype
    device = model.embed_weight.device
    if dtype is torch.float32 and config.wants_compiled(model.num_parameters, device):
        from common.models.regions.compiled_linear import compile_packing

        if (compiled := compile_packing()) is not None:
            return compiled
    reason = reason_not_packed(dtype, device)
    if reason is not None and config.batch_invariant:
        raise ValueError(f"batch_invariant must be False, got True: no packing, {reason}")
    return OneDnnProduct if reason is None else None


def pack_weights(config: EngineConfig, model: DecoderModel) -> None:
    """Pack the matrices that are not packed yet."""
    if all(matrix.packed for matrix in linear_layers(model)):
        return
    if (packing := packing_of(config, model)) is not None:
        model.pack_weights(packing)
    elif config.pack_weights:
        weight = model.embed_weight
        logger.info("weights are not packed: %s", reason_not_packed(weight.dtype, weight.device))


# -- KV tensors


def make_block_io(
    config: EngineConfig, loaded: LoadedModel, kv_cache: PagedKVCache
) -> tuple[KVBlockIO, Namespace]:
    from kv_block_io import PagedBlockIO

    namespace = kv_namespace(loaded, kv_cache)
    if config.batch_invariant:  # its KV has other bits than other engines'
        namespace += (("numerics", "batch invariant"),)
    return PagedBlockIO(kv_cache), namespace


def kv_namespace(loaded: LoadedModel, kv_cache: PagedKVCache) -> tuple[tuple[str, str], ...]:
    """Return what the bytes of a KV block depend on besides tokens. Reads every weight."""
    from weights_digest import weights_digest

    model = f"{weights_digest(loaded.model.named_weights())} {loaded.config.numerics}"
    shape = tuple(kv_cache.key_cache[0].shape[1:])
    layout = f"{kv_cache.key_cache[0].dtype} {len(kv_cache.key_cache)} x {shape}"
    return (("model", model), ("kv layout", layout), *loaded.model.namespace)


# -- the runner, its sampler and its draft tokens


def make_prompt_logprobs(limits: Limits) -> RunnerPlugin:
    from common.sampling.prompt_logprobs import PromptLogprobs

    return PromptLogprobs(limits.vocab_size)


def make_grammar_masks(
    loaded: LoadedModel, tokenizer: Tokenizer | None, limits: Limits
) -> RunnerPlugin:
    from common.features.grammars.grammar_masks import GrammarMasks
    from common.features.grammars.vocabulary import Vocabulary

    if tokenizer is None:  # of a worker
        assert loaded.path is not None
        tokenizer = load_tokenizer(loaded.path)
    return GrammarMasks(Vocabulary.of(tokenizer, limits.vocab_size, limits.eos_token_ids))


def make_proposer(
    config: EngineConfig,
    draft: LoadedModel | None,
    limits: Limits,
    *,
    state: BatchState,
    kv_cache: PagedKVCache,
    backend: AttentionBackend,
) -> Proposer:
    """Make the proposer of draft tokens."""
    spec_config = config.speculation
    assert spec_config is not None
    num_tokens = spec_config.num_spec_tokens
    if not isinstance(spec_config.method, str):
        return spec_config.method
    if spec_config.method == "ngram":
        from proposers import NgramProposer

        return NgramProposer(num_tokens, spec_config.max_ngram, spec_config.min_ngram)
    assert draft is not None
    from common.sampling.speculative_sampler import ConstrainedDrafts
    from draft_model_proposer import DraftModelProposer

    return DraftModelProposer(
        draft.model,
        allocate_kv_cache(draft, kv_cache.num_blocks, kv_cache.block_size),
        backend,
        state,
        num_tokens,
        max_model_len=min(limits.max_model_len, draft.config.num_unhidden),
        sampler=ConstrainedDrafts(Sampler(limits.vocab_size), state),
    )


def make_verifier(vocab_size: int, proposer: Proposer, is_triton: bool) -> Sampler:
    """Make the sampler that verifies draft tokens: with kernels if attention is a Triton kernel."""
    from common.sampling.speculative_sampler import SpeculativeSampler

    if not is_triton:
        return SpeculativeSampler(vocab_size, proposer.draft_probs)
    import rejection_sampler_triton as kernels

    return SpeculativeSampler(
        vocab_size,
        proposer.draft_probs,
        reject=kernels.rejection_sample_triton,
        match=kernels.rejection_sampling_batched_triton,
    )


# -- the half that plans: memory, scheduler and loop around a runner


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """The parts of an engine. `core` is the loop; `multi_step_core` is the same, if several steps
    are in flight, and `in_flight_plans` keeps their plans."""

    runner: RunnerParts
    kv_memory: UncachedKVCacheManager | CachedKVCacheManager
    connector: KVConnector | None
    scheduler: BaseScheduler
    observers: list[Callable[[StepRecord], None]]  # called after every step
    core: EngineCore
    multi_step_core: OverlappedEngineCore | None
    in_flight_plans: OverlapPlugin | PipelinePlugin | None
    adapters: AdapterNames | None
    drafts: DraftPlugin | None


def make_engine_parts(
    config: EngineConfig, runner: RunnerParts, sequences: Mapping[str, OutputProcessor]
) -> EngineParts:
    """Make the parts around a runner. `sequences` are the engine's, by request id: their stop
    strings trim verified draft tokens. Raises `ValueError` if the runner's model does not allow the
    configuration, or if a user's function returns an unsuitable part."""
    # KV memory outside of this engine. It may refuse, so it comes before any thread.
    connector = make_connector(config, runner)

    # Several steps in flight: a plugin keeps their plans, and a runner their order.
    in_flight_plans = make_in_flight_plugin(config, runner.device)
    queued_runner: QueuedRunner | None = None
    wait_for_steps: Callable[[], object] = int
    if in_flight_plans is not None:
        from common.runner.overlap import QueuedRunner, ThreadedRunner

        kind = QueuedRunner if runner.is_queued else ThreadedRunner
        queued_runner = kind(runner.runner)
        wait_for_steps = queued_runner.wait_for_steps

    # KV blocks, with or without a prefix cache.
    kv_memory = make_kv_memory(config, runner, connector, wait_for_steps)

    # The scheduler, and its plugins in the order in which it calls them.
    chunk_policy = make_chunk_policy(config)
    drafts = None
    if runner.num_lookahead_tokens is not None:
        drafts = make_draft_plugin(config, runner.num_lookahead_tokens, sequences)
    plugins = make_plugins(config, in_flight_plans=in_flight_plans, drafts=drafts)
    scheduler = make_scheduler(
        config,
        kv_memory=kv_memory,
        max_model_len=runner.limits.max_model_len,
        chunk_policy=chunk_policy,
        plugins=plugins,
    )

    # The loop, and what is called after each of its steps.
    observers: list[Callable[[StepRecord], None]] = []
    if connector is not None:
        observers.append(partial(wait_for_loads, kv_memory))
    if isinstance(chunk_policy, LearnsDurations):
        observers.append(partial(tell_durations, chunk_policy))
    core = EngineCore(scheduler, runner.runner)
    multi_step_core: OverlappedEngineCore | None = None
    if queued_runner is not None:
        assert in_flight_plans is not None
        from common.runner.overlap import OverlappedEngineCore

        num_in_flight = max(2, config.pipeline_parallel_size)
        core = multi_step_core = OverlappedEngineCore(
            scheduler, queued_runner, in_flight_plans, num_in_flight
        )

    # The adapters' names, which requests use.
    adapters: AdapterNames | None = None
    if runner.adapters is not None:
        from common.features.adapters.adapter_names import AdapterNames

        adapters = AdapterNames(runner.adapters, wait_for_steps)
    return EngineParts(
        runner=runner,
        kv_memory=kv_memory,
        connector=connector,
        scheduler=scheduler,
        observers=observers,
        core=core,
        multi_step_core=multi_step_core,
        in_flight_plans=in_flight_plans,
        adapters=adapters,
        drafts=drafts,
    )


# -- several steps in flight


def make_in_flight_plugin(
    config: EngineConfig, device: torch.device
) -> OverlapPlugin | PipelinePlugin | None:
    """Make the plugin for several steps in flight, or None if each step ends before the next one is
    planned. If `overlap_scheduling` is requested but not possible, logs a warning."""
    if config.pipeline_parallel_size > 1:
        from pipeline_plugin import PipelinePlugin

        return PipelinePlugin(config.pipeline_parallel_size)
    if not config.wants_overlap(device):
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


# -- KV


def make_connector(config: EngineConfig, runner: RunnerParts) -> KVConnector | None:
    """Make the connector (tiers, or the configured one), bound to this engine's KV memory."""
    connector = config.kv_connector
    if config.kv_tiers is not None:
        from tiered_cache import TieredCache

        connector = TieredCache(config.kv_tiers)
    if connector is not None:
        io, namespace = runner.block_io()
        connector.bind(io, config.block_size, namespace)
    return connector


def make_kv_memory(
    config: EngineConfig,
    runner: RunnerParts,
    connector: KVConnector | None,
    wait_for_steps: Callable[[], object],
) -> UncachedKVCacheManager | CachedKVCacheManager:
    pool = BlockPool(runner.kv_cache.num_blocks)
    block_size = config.block_size
    groups = deal_layers(runner.model_config.layer_windows or (None,), runner.limits.max_model_len)
    if groups.have_windows:
        from grouped_kv_memory import GroupedKVMemory

        return GroupedKVMemory(
            pool=pool,
            block_size=block_size,
            windows=groups.windows,
            max_step_tokens=config.num_in_flight_tokens(runner.device),
            has_cache=config.prefix_cache is not None,
        )
    if config.prefix_cache is None:
        return UncachedKVCacheManager(pool, block_size)
    tiers = None if config.kv_tiers is None else connector  # they keep what leaves the cache
    cache = make_cache(config, pool, listener=tiers)
    if connector is None:
        from cached_kv_cache_manager import CachedKVCacheManager

        return CachedKVCacheManager(pool, block_size, cache)
    from loading_kv_cache_manager import LoadingKVCacheManager

    return LoadingKVCacheManager(pool, block_size, cache, connector, wait_for_steps)


def make_cache(config: EngineConfig, pool: BlockPool, listener: Any) -> PrefixCache:
    """Make the prefix cache. Raises `ValueError` if a user's function ignores the engine's pool."""
    kind = config.prefix_cache
    block_size = config.block_size
    if kind == "hash":
        from prefix_cache_local import PrefixCacheLocal

        return PrefixCacheLocal(pool=pool, block_size=block_size, listener=listener)
    if kind == "radix":
        from radix_cache import RadixCache

        return RadixCache(pool=pool, page_size=block_size, listener=listener)
    assert kind is not None
    cache = kind(pool=pool, block_size=block_size, listener=listener)
    is_ours = isinstance(cache, PrefixCache) and cache.pool is pool
    is_ours = is_ours and cache.block_size == block_size and cache.listener is listener
    allowed = "a function that makes a PrefixCache of the given pool, block_size and listener"
    require(is_ours, "prefix_cache", cache, allowed)
    return cache


# -- the scheduler


def make_chunk_policy(config: EngineConfig) -> ChunkPolicy | None:
    """Make the chunk policy, or None for whole prompts. For the prefill-first scheduler, a number
    is the chunk size for all prompts of a batch, not a limit for a single prompt."""
    if not isinstance(config.chunked_prefill, int):
        return config.chunked_prefill
    if not config.cuts_prompts:
        return None
    make = ChunkedPrefill
    if config.target_step_ms is not None:
        from adaptive_chunks import AdaptiveChunks

        make = partial(AdaptiveChunks, target_step_ms=config.target_step_ms)
    is_batch_limit = config.scheduler == "prefill_first"
    return make(
        long_prefill_token_threshold=None if is_batch_limit else config.chunk_size,
        max_long_partial_prefills=config.max_long_partial_prefills,
    )


def make_policy(
    config: EngineConfig, kv_memory: UncachedKVCacheManager | CachedKVCacheManager
) -> SchedulePolicy:
    """Chapter 4's main folder has two of the names, `sglang_policies` the rest."""
    policy = config.policy
    if isinstance(policy, SchedulePolicy):
        return policy
    if policy in POLICIES:
        return get_policy(policy)()
    from sglang_policies import policy_by_name

    return policy_by_name(policy, kv_memory, config.seed)


def make_draft_plugin(
    config: EngineConfig, num_lookahead_tokens: int, sequences: Mapping[str, OutputProcessor]
) -> DraftPlugin:
    from draft_plugin import DraftPlugin, FixedLength

    spec_config = config.speculation
    assert spec_config is not None
    length = FixedLength(spec_config.num_spec_tokens)
    if spec_config.adaptive:
        from adaptive_length import AdaptiveLength

        length = AdaptiveLength(spec_config.num_spec_tokens)
    return DraftPlugin(num_lookahead_tokens, length, sequences)


def make_plugins(
    config: EngineConfig,
    *,
    in_flight_plans: OverlapPlugin | PipelinePlugin | None,
    drafts: DraftPlugin | None,
) -> list[SchedulerPlugin]:
    """Make the scheduler's plugins, in the order in which it calls them."""
    plugins: list[SchedulerPlugin] = []
    if in_flight_plans is not None:
        plugins.append(in_flight_plans)
    if drafts is not None:
        plugins.append(drafts)
    if config.takes_adapters:
        from adapter_limit import MaxLoRAs

        plugins.append(MaxLoRAs(config.max_adapters))
    if config.preempt_every is not None:
        from forced_preemption import ForcedPreemption

        spares_pinned = config.scheduler == "prefill_first"
        plugins.append(ForcedPreemption(config.preempt_every, spares_pinned))
    return plugins


def make_scheduler(
    config: EngineConfig,
    *,
    kv_memory: UncachedKVCacheManager | CachedKVCacheManager,
    max_model_len: int,
    chunk_policy: ChunkPolicy | None,
    plugins: list[SchedulerPlugin],
) -> BaseScheduler:
    """Make the scheduler. Raises `ValueError` if a user's function returns an unsuitable one."""
    kind = config.scheduler
    sizes = {
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "max_model_len": max_model_len,
        "kv_memory": kv_memory,
        "plugins": plugins,
    }
    if kind == "fcfs":
        from caching_fcfs_scheduler import CachingFCFSScheduler

        return CachingFCFSScheduler(**sizes)
    order = {"policy": make_policy(config, kv_memory), "chunk_policy": chunk_policy}
    if kind == "two_phase":
        from scheduler import Scheduler

        return Scheduler(**sizes, **order, watermark=config.watermark)
    if kind == "prefill_first":
        from prefill_first_scheduler import PrefillFirstScheduler

        size = config.chunk_size or config.max_num_batched_tokens
        size = size if config.cuts_prompts else None
        return PrefillFirstScheduler(
            **sizes, **order, mixing=config.mixing, chunked_prefill_size=size
        )
    scheduler = kind(**sizes, **order)
    is_ours = getattr(scheduler, "kv_memory", None) is kv_memory
    is_ours = is_ours and isinstance(scheduler, BaseScheduler)
    allowed = "a function that makes a BaseScheduler over the given kv_memory"
    require(is_ours, "scheduler", scheduler, allowed)
    return scheduler


# -- what the loop does besides its steps


def wait_for_loads(kv_memory: Any, record: StepRecord) -> None:
    """Wait for KV loads if a step computed nothing while requests wait. An observer."""
    if not record.num_scheduled_tokens and record.num_waiting:
        kv_memory.wait_for_loads()


def tell_durations(policy: LearnsDurations, record: StepRecord) -> None:
    """Notify a chunk policy of a step's duration. An observer."""
    starts = record.start_positions
    num_tokens = record.num_scheduled_tokens
    policy.observe_step([starts[r] for r in num_tokens], list(num_tokens.values()), record.step_ms)
