"""The assembly of the chapters into one engine: `assemble` loads the models, `LocalRunner` makes
the parts around them, and `SchedulerParts` the others. Each is read from top to bottom.

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
    others           1 to 6   `scheduler_assembly.py`: memory, scheduler, the loop

Nothing is implemented here. To turn a chapter off, a plain part takes its role, and no output token
changes. A part that is not chosen is not imported. The code in this file runs in the process that
has the model: in a worker (`parallel/worker.py`) if there are several ranks.

See common/README.md#how-the-engine-imports-the-chapters"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING

import torch

from batch_layout import compose_in_order
from common.assembly.scheduler_assembly import (
    Limits,
    Namespace,
    RunnerHandle,
    SchedulerParts,
    find_limits,
)
from common.engine_config import (
    ATTENTION_BACKENDS,
    LAZY_PLUGINS,
    PROPOSERS,
    SHIPPED_CHECKPOINT,
    SHIPPED_DRAFT,
    EngineConfig,
)
from common.models.linear import ONEDNN, Packing, linear_layers, reason_not_packed
from common.models.loader import LoadedModel, load_model, read_checkpoint
from common.models.model import DecoderModel
from common.models.model_config import ModelFacts
from common.models.regions.regions import Regions
from common.requests.tokenizer import Tokenizer, load_tokenizer
from common.runner.batch_state import BatchState
from common.runner.kv_sizing import NO_PEERS, KVDemand, Peers, allocate_kv_cache, make_kv_cache
from common.runner.model_runner import Compose, PagedModelRunner
from common.runner.thread_count import set_threads
from common.sampling.runner_plugin import PluginContext, RunnerPlugin
from common.sampling.sampler import BatchSampler, Sampler
from common.sampling.sampling_columns import SamplingColumns
from paged_attention import AttentionBackend, PagedKVCache, TorchAttentionBackend
from scheduler_interface import ModelRunner

if TYPE_CHECKING:
    from common.features.adapters.adapter_slots import AdapterSlots
    from common.requests.output_processor import OutputProcessor
    from common.runner.graph_maker import GraphMaker
    from kv_connector import KVBlockIO
    from proposers import Proposer
    from speculating_runner import DraftLength, SpeculatingRunner

logger = logging.getLogger(__name__)


def assemble(
    config: EngineConfig,
    loaded: LoadedModel | None,
    draft: LoadedModel | None,
    tokenizer: Tokenizer | None,
    sequences: Mapping[str, OutputProcessor],
) -> tuple[SchedulerParts, Tokenizer | None]:
    """Load the models that are not given, choose and connect the parts of an engine. Raises
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
    weight = loaded.model.embed_weight
    num_parameters = loaded.model.num_parameters
    put_threads_back = set_threads(config.num_threads, num_parameters, weight.device)
    try:
        local = LocalRunner(config, loaded, draft, limits, tokenizer, sequences)
        return SchedulerParts(config, local.handle(put_threads_back)), tokenizer
    except BaseException:
        put_threads_back()
        raise


def load_draft(
    config: EngineConfig, target: LoadedModel, draft: LoadedModel | None = None
) -> LoadedModel | None:
    """Return `draft`, or load the draft model that `config` names, or None if it names none."""
    spec_config = config.speculation
    weight = target.model.embed_weight
    if spec_config is None or spec_config.method != "draft":
        return None
    path = spec_config.model or SHIPPED_DRAFT
    packing = partial(packing_of, config)
    return draft or load_model(path, weight.dtype, weight.device, packing_of=packing)


class LocalRunner:
    """The runner in this process and its parts, each made from those above it. `sequences` are the
    engine's, whose stop strings trim verified draft tokens; a worker has none. `wrap_length` wraps
    the part that chooses the number of draft tokens."""

    def __init__(
        self,
        config: EngineConfig,
        loaded: LoadedModel,
        draft: LoadedModel | None,
        limits: Limits,
        tokenizer: Tokenizer | None = None,  # None: the checkpoint's
        sequences: Mapping[str, OutputProcessor] | None = None,
        wrap_length: Callable[[DraftLength], DraftLength] | None = None,
        peers: Peers = NO_PEERS,
    ) -> None:
        self.config = config
        self.loaded = loaded
        self.draft = draft
        self.limits = limits
        self.model = loaded.model
        self.tokenizer = tokenizer
        self.is_last_stage = self.model.collectives.ranks.is_last_stage

        # The models: groups of layers with a block table each, attention, adapters, kernels.
        self.model.group_layers(limits.max_model_len)
        if draft is not None and draft.model is not self.model:  # the longest context it drafts for
            draft.model.group_layers(draft.config.num_unhidden)
        self.attention = attention = make_attention(config, loaded)
        self.adapters: AdapterSlots | None = None
        if config.takes_adapters:
            from common.features.adapters.adapter_slots import AdapterSlots

            self.adapters = AdapterSlots(self.model, config.max_adapters, config.max_lora_rank)
        prepare_models(self)

        # KV tensors, in the memory that everything else leaves: adapters, the sampler, graphs.
        self.make_graphs = make_graph_maker(self)
        demand = KVDemand(
            config=config,
            loaded=loaded,
            draft=draft,
            max_model_len=limits.max_model_len,
            vocab_size=limits.vocab_size,
            make_runner=self.make_trial_runner,
            kind=attention.kv_cache_kind,
        )
        self._make_runner(make_kv_cache(demand, peers), sequences, wrap_length)

    def make_trial_runner(self, kv_cache: PagedKVCache) -> ModelRunner:
        """Return a runner with parts of its own over another KV cache, to measure its memory."""
        trial = copy(self)
        trial._make_runner(kv_cache, sequences=None, wrap_length=None)
        return trial.outermost

    def _make_runner(
        self,
        kv_cache: PagedKVCache,
        sequences: Mapping[str, OutputProcessor] | None,
        wrap_length: Callable[[DraftLength], DraftLength] | None,
    ) -> None:
        # The runner's copy of the requests, and what samples and proposes their tokens.
        self.kv_cache = kv_cache
        self.state = make_state(self)
        self.proposer = make_proposer(self)
        self.sampler = make_sampler(self)

        # The runner, and the one around it that speculates.
        self.paged = make_paged_runner(self)
        self.speculation = make_speculation(self, sequences, wrap_length)
        self.outermost: ModelRunner = self.speculation or self.paged

    def handle(self, close: Callable[[], None] | None = None) -> RunnerHandle:
        """Return the scheduler's view of this runner."""
        speculation = self.speculation
        weight = self.model.embed_weight
        limits = self.limits
        model = ModelFacts(
            config=self.loaded.config,
            eos_token_ids=limits.eos_token_ids,
            device=weight.device,
            dtype=weight.dtype,
            num_parameters=self.model.num_parameters,
        )
        return RunnerHandle(
            runner=self.outermost,
            model=model,
            kv_cache=self.kv_cache,
            max_model_len=limits.max_model_len,
            vocab_size=limits.vocab_size,
            block_io=self.block_io,
            is_queued=self.paged.device.type != "cpu",  # by the device
            speculation=speculation,
            num_lookahead_tokens=speculation and speculation.proposer.num_lookahead_tokens,
            adapters=self.adapters,
            close=close,
        )

    def block_io(self) -> tuple[KVBlockIO, Namespace]:
        from kv_block_io import PagedBlockIO

        namespace = kv_namespace(self.loaded, self.kv_cache)
        if self.config.batch_invariant:  # its KV has other bits than other engines'
            namespace += (("numerics", "batch invariant"),)
        return PagedBlockIO(self.kv_cache), namespace


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
    is_mixed = config.cuts_prompts
    compose = compose_in_order
    device = loaded.model.embed_weight.device
    if is_mixed:
        from mixed_batch import compose as compose_mixed

        compose = partial(compose_mixed, decode_threshold=config.num_rows_per_request)
    if has_windows := loaded.model.groups.have_windows:
        from window_attention import WindowBackend, compose_windows

        compose = partial(compose_windows, compose, loaded.model.groups.windows)
    if config.batch_invariant:
        from invariant_attention import InvariantAttentionBackend

        return Attention(InvariantAttentionBackend(), compose)
    if config.compile is True and name not in ("auto", "torch"):
        logger.warning('compile=True does not compile attention: attention_backend is not "torch"')
    if not isinstance(name, str):
        return Attention(WindowBackend(name) if has_windows else name, compose)
    if name == "auto":
        name = "triton" if device.type == "cuda" else "torch"
    if name == "triton":
        try:
            backend = resolve_name(ATTENTION_BACKENDS[name][is_mixed])()
            backend.check(loaded.model.embed_weight.dtype, loaded.config.head_dim)
            return Attention(backend, compose, True)
        except (RuntimeError, ValueError) as error:
            if config.attention_backend == "triton":
                raise
            logger.warning("attention falls back from Triton to PyTorch: %s", error)
            name = "torch"
    backend = resolve_name(ATTENTION_BACKENDS[name][is_mixed])()
    if has_windows and not isinstance(backend, TorchAttentionBackend):
        backend = WindowBackend(backend)
    attention = Attention(backend, compose)
    if name == "torch" and config.wants_compiled(loaded.model.num_parameters, device):
        return make_compiled_attention(config, loaded, attention)
    return attention


def make_compiled_attention(
    config: EngineConfig, loaded: LoadedModel, attention: Attention
) -> Attention:
    """Return attention whose short queries are compiled, or the given one, after a warning, if
    nothing can be compiled."""
    if loaded.model.embed_weight.device.type != "cpu":
        logger.warning("compile=True has no effect: only attention on a CPU is compiled")
        return attention
    from compiled_attention import CompiledAttentionBackend, HeadMajorKVCache

    others = attention.backend
    num_heads = loaded.model.num_heads
    assert isinstance(others, TorchAttentionBackend)
    few_blocks = allocate_kv_cache(loaded, 3, config.block_size, HeadMajorKVCache)
    compiled = CompiledAttentionBackend.compiled_for(num_heads, few_blocks, others)
    if compiled is None:
        return attention
    return replace(attention, backend=compiled, kv_cache_kind=HeadMajorKVCache)


# -- the models, before they are used


def prepare_models(local: LocalRunner) -> None:
    """Apply all changes to the models that computing with them needs: regions, packing, kernels."""
    config = local.config
    model = local.model
    is_triton = local.attention.is_triton
    draft = None if local.draft is None else local.draft.model
    device = model.embed_weight.device
    set_regions(model, config.wants_compiled(model.num_parameters, device), is_triton)
    if draft is not None and draft is not model:
        set_regions(draft, False, is_triton)
    for layer in model.layers:
        layer.mlp.prepare(config.wants_graphs(device))
    for decoder in (model,) if draft is None else (model, draft):
        pack_weights(config, decoder)
    if config.batch_invariant:
        from batch_invariance import make_batch_invariant

        numbers = local.loaded.config
        make_batch_invariant(
            linear_layers(model),
            [layer.mlp for layer in model.layers],
            activation=numbers.activation,
            dtype=model.embed_weight.dtype,
            head_dim=numbers.head_dim,
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
    elif is_compiled and weight.device.type == "cpu":
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
    return ONEDNN if reason is None else None


def pack_weights(config: EngineConfig, model: DecoderModel) -> None:
    """Pack the matrices that are not packed yet."""
    if not config.pack_weights:
        return
    matrices = list(linear_layers(model))
    if not all(matrix.is_packed for matrix in matrices):
        if (packing := packing_of(config, model)) is not None:
            model.pack_weights(packing)
        else:
            weight = model.embed_weight
            reason = reason_not_packed(weight.dtype, weight.device)
            logger.info("weights are not packed: %s", reason)


# -- KV


def make_graph_maker(local: LocalRunner) -> GraphMaker | None:
    """Make the part that captures decode steps in graphs, or None without graphs."""
    config = local.config
    model = local.loaded.model
    attention = local.attention
    if not config.wants_graphs(model.embed_weight.device):
        return None
    from common.runner.graph_maker import GraphMaker

    return GraphMaker.of(
        config,
        model,
        backend=attention.backend,
        is_triton=attention.is_triton,
        max_model_len=local.limits.max_model_len,
        parts=[] if local.adapters is None else [local.adapters],
    )


def kv_namespace(loaded: LoadedModel, kv_cache: PagedKVCache) -> tuple[tuple[str, str], ...]:
    """Return what the bytes of a KV block depend on besides tokens. Reads every weight."""
    from weights_digest import weights_digest

    model = f"{weights_digest(loaded.model.named_weights())} {loaded.config.numerics}"
    shape = tuple(kv_cache.key_cache[0].shape[1:])
    layout = f"{kv_cache.key_cache[0].dtype} {len(kv_cache.key_cache)} x {shape}"
    return (("model", model), ("kv layout", layout), *loaded.model.namespace)


# -- the runner, its sampler and its draft tokens


def make_state(local: LocalRunner) -> BatchState:
    """Make the runner's copy of the requests, with its plugins in order."""
    config = local.config
    limits = local.limits
    plugins: list[RunnerPlugin] = []
    if local.adapters is not None:
        from common.features.adapters.adapter_columns import AdapterColumns

        plugins.append(AdapterColumns(local.adapters))
    # Without a reference to `local`, which has the state and is freed with its last reference.
    context = PluginContext(
        local.tokenizer, local.loaded.path, limits.vocab_size, limits.eos_token_ids
    )
    late = {name: partial(make_lazily, path, context) for name, path in LAZY_PLUGINS.items()}
    return BatchState(
        config.max_num_seqs,
        -(-limits.max_model_len // config.block_size),
        SamplingColumns(eos_token_ids=limits.eos_token_ids),
        plugins,
        local.model.num_groups,
        late if local.is_last_stage else {},  # these plugins need logits
    )


def make_lazily(path: str, context: PluginContext) -> RunnerPlugin:
    return resolve_name(path)(context)


def make_proposer(local: LocalRunner) -> Proposer | None:
    """Make the proposer of draft tokens, or None if this rank proposes none. Raises `ValueError` if
    the draft model's vocabulary size differs."""
    spec_config = local.config.speculation
    draft = local.draft
    if spec_config is None or not local.is_last_stage:
        return None
    if not isinstance(spec_config.method, str):
        return spec_config.method
    make = resolve_name(PROPOSERS[spec_config.method])
    num_tokens = spec_config.num_spec_tokens
    if spec_config.method == "ngram":
        return make(num_tokens, spec_config.max_ngram, spec_config.min_ngram)
    from common.sampling.speculative_sampler import ConstrainedDrafts

    assert draft is not None
    if draft.config.vocab_size != local.loaded.config.vocab_size:
        raise ValueError(
            "model of speculative must have the target's vocabulary of "
            f"{local.loaded.config.vocab_size} tokens, got {draft.config.vocab_size}"
        )
    state = local.state
    sampler = Sampler(local.limits.vocab_size)
    return make(
        draft.model,
        allocate_kv_cache(draft, local.kv_cache.num_blocks, local.kv_cache.block_size),
        local.attention.backend,
        state,
        num_tokens,
        max_model_len=min(local.limits.max_model_len, draft.config.num_unhidden),
        sampler=ConstrainedDrafts(sampler, state.sampling, state),
    )


def make_sampler(local: LocalRunner) -> BatchSampler:
    if not local.is_last_stage:
        from common.runner.stage import NoSampler

        return NoSampler()
    sampler = Sampler(local.limits.vocab_size)
    if local.proposer is None:
        return sampler
    return make_verifier(sampler, local.proposer, local.attention.is_triton)


def make_verifier(sampler: Sampler, proposer: Proposer, is_triton: bool) -> BatchSampler:
    """Make the sampler that verifies draft tokens: with kernels if attention is a Triton kernel."""
    from common.sampling.speculative_sampler import SpeculativeSampler

    if not is_triton:
        return SpeculativeSampler(sampler, proposer.draft_probs)
    import rejection_sampler_triton as kernels

    return SpeculativeSampler(
        sampler,
        proposer.draft_probs,
        reject=kernels.rejection_sample_triton,
        match=kernels.rejection_sampling_batched_triton,
    )


def make_paged_runner(local: LocalRunner) -> PagedModelRunner:
    config = local.config
    attention = local.attention
    make = PagedModelRunner
    graphs = None
    if config.pipeline_parallel_size > 1:
        from common.runner.stage import StageRunner

        make = StageRunner
    elif local.make_graphs is not None:
        graphs = local.make_graphs(local.kv_cache)
    if graphs is not None:
        from common.runner.graphs import GraphRunner

        make = partial(GraphRunner, graphs=graphs)
    return make(
        model=local.model,
        kv_cache=local.kv_cache,
        backend=attention.backend,
        state=local.state,
        sampler=local.sampler,
        compose=attention.compose,
        shuffle_seed=config.seed if config.shuffle_batch else None,
    )


def make_speculation(
    local: LocalRunner,
    sequences: Mapping[str, OutputProcessor] | None,
    wrap_length: Callable[[DraftLength], DraftLength] | None,
) -> SpeculatingRunner | None:
    """Make the runner that proposes and verifies draft tokens around the paged one, or None."""
    spec_config = local.config.speculation
    runner = local.paged
    proposer = local.proposer
    if spec_config is None or proposer is None:
        return None
    from common.runner.allowed_drafts import AllowedDrafts
    from speculating_runner import FixedLength, SpeculatingRunner

    if spec_config.adaptive:
        from adaptive_length import AdaptiveLength

        length = AdaptiveLength(spec_config.num_spec_tokens)
    else:
        length = FixedLength(spec_config.num_spec_tokens)
    if wrap_length is not None:
        length = wrap_length(length)
    if sequences is not None:
        from common.runner.trimming_runner import TrimmingRunner

        runner = TrimmingRunner(runner, sequences)
    drafts = AllowedDrafts(proposer, local.state)
    return SpeculatingRunner(runner, drafts, length, local.state)
