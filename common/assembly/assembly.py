"""The assembly of the chapters into one engine: `assemble` chooses a part for every role.

    role            chapter   part
    KV tensors         2      PagedKVCache, sized by `kv_sizing` unless `num_blocks` is given
    batch            2, 6     compose_in_order; compose
    attention        2, 6     TorchAttentionBackend, CompiledAttentionBackend or
                              TritonAttentionBackend, or the mixed ones; InvariantAttentionBackend
    runner          common    PagedModelRunner over a BatchState; a GraphRunner, with DecodeGraphs
    sampler         common    Sampler; in a SpeculativeSampler with speculative decoding
    kernels         common    KernelRegions and the sampler's Rules, if attention uses Triton
    adapters        common    AdapterSlots in the model's matrices, AdapterColumns
    grammars        common    GrammarMasks, once a request has a grammar
    draft tokens       5      a SpeculatingRunner with an NgramProposer or a DraftModelProposer
    others           1 to 6   `scheduler_assembly.py`: memory, scheduler, the loop

Nothing is implemented here. To turn a chapter off, a plain part takes its role, and no output token
changes. A part that is not chosen is not imported. The code in this file runs in the process that
has the model: in a worker (`parallel/worker.py`) if there are several ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING

import torch

from batch_layout import compose_in_order
from common.assembly.registry import LAZY_PLUGINS
from common.assembly.scheduler_assembly import (
    EngineParts,
    Namespace,
    RunnerHandle,
    assemble_around,
    find_eos_token_ids,
    find_max_model_len,
    find_vocab_size,
)
from common.engine_config import (
    ATTENTION_BACKENDS,
    COMPILE_FROM_PARAMETERS,
    PROPOSERS,
    EngineConfig,
    SpeculativeConfig,
)
from common.models.huge_pages import move_to_huge_pages
from common.models.linear import ONEDNN, Packing, linear_layers, reason_not_packed
from common.models.loader import LoadedModel
from common.models.model import DecoderModel
from common.models.model_config import ModelFacts
from common.models.regions.regions import Regions
from common.requests.tokenizer import Tokenizer
from common.runner.batch_state import BatchState
from common.runner.kv_sizing import NO_PEERS, KVDemand, Peers, allocate_kv_cache, make_kv_cache
from common.runner.model_runner import Compose, PagedModelRunner
from common.sampling.runner_plugin import RunnerPlugin
from common.sampling.sampler import BatchSampler, Sampler
from common.sampling.sampling_columns import SamplingColumns
from paged_attention import AttentionBackend, PagedKVCache, TorchAttentionBackend
from scheduler_interface import ModelRunner

if TYPE_CHECKING:
    from common.features.adapters.adapter_slots import AdapterSlots
    from common.requests.output_processor import OutputProcessor
    from common.runner.graph_maker import GraphMaker
    from common.runner.graphs import DecodeGraphs, GraphPart
    from common.sampling.distributions import Rules
    from kv_connector import KVBlockIO
    from proposers import Proposer
    from speculating_runner import DraftLength, SpeculatingRunner

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Attention:
    """An attention backend and the batch layout that it needs."""

    backend: AttentionBackend
    compose: Compose
    is_triton: bool = False
    kv_cache_kind: type[PagedKVCache] = PagedKVCache

    @property
    def rules(self) -> Rules | None:
        """The sampling kernels if attention is a Triton kernel, else None."""
        if not self.is_triton:
            return None
        from common.sampling.sampler_kernel import KERNELS

        return KERNELS


@dataclass(frozen=True, slots=True)
class RunnerSpec:
    """The inputs from which a runner's parts are made."""

    config: EngineConfig
    loaded: LoadedModel
    draft: LoadedModel | None
    attention: Attention
    max_model_len: int
    vocab_size: int
    tokenizer: Tokenizer | None = None

    def kv_demand(self, make_graphs: GraphMaker | None, adapters: AdapterSlots | None) -> KVDemand:
        attention = self.attention
        return KVDemand(
            self.config,
            self.loaded,
            self.draft,
            attention.backend,
            self.max_model_len,
            self.vocab_size,
            attention.kv_cache_kind,
            attention.rules,
            make_graphs,
            adapters,
        )


@dataclass(frozen=True, slots=True)
class LocalRunner:
    """The runner in this process. `speculation`, if any, wraps `paged`."""

    paged: PagedModelRunner
    kv_cache: PagedKVCache
    speculation: SpeculatingRunner | None
    adapters: AdapterSlots | None = None

    @property
    def outermost(self) -> ModelRunner:
        return self.speculation or self.paged


def assemble(
    config: EngineConfig,
    loaded: LoadedModel,
    draft: LoadedModel | None,
    tokenizer: Tokenizer | None,
    sequences: Mapping[str, OutputProcessor],
) -> EngineParts:
    """Choose and connect the parts of an engine. Raises `ValueError` if the model or the available
    memory does not allow the configuration."""
    max_model_len = find_max_model_len(config, loaded.config)
    num_tokens = None if tokenizer is None else tokenizer.vocab_size
    vocab_size = find_vocab_size(loaded.config, num_tokens)
    eos = find_eos_token_ids(loaded.generation_eos_token_ids, tokenizer, vocab_size)
    loaded = replace(loaded, generation_eos_token_ids=eos)

    def trim(runner: ModelRunner) -> ModelRunner:
        from common.runner.trimming_runner import TrimmingRunner

        return TrimmingRunner(runner, sequences)

    local = make_runner(config, loaded, draft, max_model_len, vocab_size, trim, tokenizer=tokenizer)
    speculation = local.speculation
    runner_handle = RunnerHandle(
        local.outermost,
        model_facts(loaded),
        local.kv_cache,
        max_model_len,
        vocab_size,
        partial(make_block_io, config, loaded, local.kv_cache),
        is_queued=local.paged.device.type != "cpu",  # by the device
        speculation=speculation,
        num_lookahead_tokens=None
        if speculation is None
        else speculation.proposer.num_lookahead_tokens,
        adapters=local.adapters,
    )
    return assemble_around(config, runner_handle)


def model_facts(loaded: LoadedModel) -> ModelFacts:
    weight, eos_token_ids = loaded.model.embed_weight, tuple(loaded.generation_eos_token_ids)
    num_parameters = loaded.model.num_parameters
    return ModelFacts(loaded.config, eos_token_ids, weight.device, weight.dtype, num_parameters)


def make_runner(
    config: EngineConfig,
    loaded: LoadedModel,
    draft: LoadedModel | None,
    max_model_len: int,
    vocab_size: int,
    trim: Callable[[ModelRunner], ModelRunner] | None = None,
    make_length: Callable[[SpeculativeConfig], DraftLength] | None = None,
    peers: Peers = NO_PEERS,
    tokenizer: Tokenizer | None = None,
) -> LocalRunner:
    """Make the runner. `trim` wraps a runner that verifies draft tokens; `make_length` makes the
    part that chooses their number. `tokenizer` defaults to the checkpoint's."""
    loaded.model.group_layers(max_model_len)
    if loaded.model.groups.have_windows:
        from common.assembly.windows import check_windows

        check_windows(config, loaded.model.groups)
    if draft is not None and draft.model is not loaded.model:  # the longest context it drafts for
        draft.model.group_layers(draft.config.num_unhidden)
    attention = make_attention(config, loaded)
    given = RunnerSpec(config, loaded, draft, attention, max_model_len, vocab_size, tokenizer)
    adapters = make_adapter_slots(given)  # KV gets the memory they leave
    prepare_models(given)
    parts = [] if adapters is None else [adapters]
    make_graphs = make_graph_maker(config, loaded, attention, max_model_len, parts)
    kv_cache = make_kv_cache(given.kv_demand(make_graphs, adapters), peers)
    state = make_state(given, adapters)
    proposer = make_proposer(given, kv_cache, state)
    sampler = make_sampler(given, proposer)
    graphs = None if make_graphs is None else make_graphs(kv_cache)
    paged = make_paged_runner(given, kv_cache, state, sampler, graphs)
    if proposer is None or config.speculation is None:
        return LocalRunner(paged, kv_cache, None, adapters)
    from common.runner.allowed_drafts import AllowedDrafts
    from speculating_runner import SpeculatingRunner

    length = (make_length or make_draft_length)(config.speculation)
    verifying = paged if trim is None else trim(paged)
    speculation = SpeculatingRunner(verifying, AllowedDrafts(proposer, state), length, state)
    return LocalRunner(paged, kv_cache, speculation, adapters)


def make_state(given: RunnerSpec, adapters: AdapterSlots | None = None) -> BatchState:
    """Make the runner's copy of the requests, with its plugins in order."""
    config = given.config
    sampling = SamplingColumns(eos_token_ids=given.loaded.generation_eos_token_ids)
    plugins: list[RunnerPlugin] = []
    if adapters is not None:
        from common.features.adapters.adapter_columns import AdapterColumns

        plugins.append(AdapterColumns(adapters))
    max_blocks = -(-given.max_model_len // config.block_size)
    num_groups = given.loaded.model.num_groups
    late = {name: partial(make_lazily, qualname, given) for name, qualname in LAZY_PLUGINS.items()}
    if not given.loaded.model.collectives.ranks.is_last_stage:
        late = {}  # these plugins need logits
    return BatchState(config.max_num_seqs, max_blocks, sampling, plugins, num_groups, late)


def make_lazily(qualname: str, given: RunnerSpec) -> RunnerPlugin:
    return resolve_name(qualname)(given)


def make_paged_runner(
    given: RunnerSpec,
    kv_cache: PagedKVCache,
    state: BatchState,
    sampler: BatchSampler,
    graphs: DecodeGraphs | None,
) -> PagedModelRunner:
    config, model, attention = given.config, given.loaded.model, given.attention
    parts = model, kv_cache, attention.backend, state, sampler, attention.compose
    shuffle_seed = config.seed if config.shuffle_batch else None
    if config.pipeline_parallel_size > 1:
        from common.runner.stage import StageRunner

        return StageRunner(*parts, shuffle_seed)
    if graphs is not None:
        from common.runner.graphs import GraphRunner

        return GraphRunner(*parts, shuffle_seed, graphs=graphs)
    return PagedModelRunner(*parts, shuffle_seed)


# -- the model, before it is used


def make_adapter_slots(given: RunnerSpec) -> AdapterSlots | None:
    config = given.config
    if not config.takes_adapters:
        return None
    from common.features.adapters.adapter_slots import AdapterSlots

    return AdapterSlots(given.loaded.model, config.max_adapters, config.max_lora_rank)


def prepare_models(given: RunnerSpec) -> None:
    """Apply all changes to the models that computing with them needs: regions, packing, kernels."""
    config, model, draft = given.config, given.loaded.model, given.draft
    is_compiled = config.wants_compiled(model.num_parameters, model.embed_weight.device)
    set_regions(model, is_compiled, given.attention.is_triton)
    if draft is not None and draft.model is not model:
        set_regions(draft.model, False, given.attention.is_triton)
    for layer in model.layers:
        layer.mlp.prepare(config.wants_graphs(model.embed_weight.device))
    for decoder in (model,) if draft is None else (model, draft.model):
        pack_weights(config, decoder)
    if config.batch_invariant:
        from batch_invariance import make_batch_invariant

        dtype, head_dim = model.embed_weight.dtype, given.loaded.config.head_dim
        mlps = [layer.mlp for layer in model.layers]
        activation = given.loaded.config.activation
        make_batch_invariant(linear_layers(model), mlps, activation, dtype, head_dim)
    if given.attention.is_triton and model.embed_weight.is_cuda:
        compile_kernels(given)


def set_regions(model: DecoderModel, is_compiled: bool, is_triton: bool = False) -> None:
    """Set how `model` computes its regions: with kernels if attention is a Triton kernel, with code
    compiled for a CPU, or with the plain functions. Without a C++ compiler, the plain functions are
    used and a warning is logged. float64 never uses kernels."""
    regions, weight = Regions(), model.embed_weight
    if is_triton and weight.dtype != torch.float64:
        from common.models.regions.kernel_regions import KernelRegions

        regions = KernelRegions()
    elif is_compiled and weight.device.type == "cpu":
        from common.models.regions.compiled_regions import compile_regions  # imports the compiler

        regions = compile_regions(model)
    model.regions = regions


def packing_of(config: EngineConfig, model: DecoderModel) -> Packing | None:
    """Return how the matrices of a model are packed, or None if they stay plain."""
    if not config.pack_weights:
        return None
    dtype, device = model.embed_weight.dtype, model.embed_weight.device
    if dtype is torch.float32 and config.wants_compiled(model.num_parameters, device):
        from common.models.regions.compiled_linear import compile_packing

        if (compiled := compile_packing()) is not None:
            return compiled
    reason = reason_not_packed(dtype, device)
    if reason is not None and config.batch_invariant:
        raise ValueError(f"batch_invariant must be False, got True: no packing, {reason}")
    return ONEDNN if reason is None else None


def packing_while_loading(config: EngineConfig, model: DecoderModel) -> Packing | None:
    """As `packing_of`, but None with adapters, which have to see the matrices before packing."""
    return None if config.takes_adapters else packing_of(config, model)


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
    if matrices[0].is_packed and matrices[0].packing is ONEDNN:
        move_to_huge_pages(matrix.packed_memory for matrix in matrices)
        if model.num_parameters >= COMPILE_FROM_PARAMETERS and not config.batch_invariant:
            from common.models.row_padding import pad_slow_counts

            matrices = [matrix for layer in model.layers for matrix in linear_layers(layer)]
            pad_slow_counts(matrices, model.embed_weight.dtype)


def compile_kernels(given: RunnerSpec) -> None:
    """Compile all kernels that the engine can launch on its GPU, so that no step has to wait."""
    from common.runner.launch_configurations import launch_configurations
    from common.runner.warm_up import warm_up
    from kernel_launch import architecture_of

    model, draft = given.loaded.model, given.draft
    launches = launch_configurations(
        model.rank_config,
        given.config,
        model.embed_weight.dtype,
        architecture_of(model.embed_weight.device),
        draft=None if draft is None else draft.model.rank_config,
        vocab_size=given.vocab_size,
        windows=model.groups.windows,
    )
    warm_up(launches, model.embed_weight.device)


# -- access to KV blocks


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


# -- the model's side


def make_attention(config: EngineConfig, loaded: LoadedModel) -> Attention:
    """Choose the attention backend. `"auto"` is Triton on CUDA and PyTorch elsewhere. With chunked
    prompts it is chapter 6's backend, for decodes and chunks in one batch, instead of chapter 2's.
    A fallback logs a warning.

    Raises `RuntimeError` if Triton is requested by name and cannot run here, and `ValueError` if
    its kernels do not support this dtype or head_dim."""
    name, is_mixed, compose = config.attention_backend, config.cuts_prompts, compose_in_order
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

    others, num_heads = attention.backend, loaded.model.num_heads
    assert isinstance(others, TorchAttentionBackend)
    few_blocks = allocate_kv_cache(loaded, 3, config.block_size, HeadMajorKVCache)
    compiled = CompiledAttentionBackend.compiled_for(num_heads, few_blocks, others)
    if compiled is None:
        return attention
    return replace(attention, backend=compiled, kv_cache_kind=HeadMajorKVCache)


def make_graph_maker(
    config: EngineConfig,
    loaded: LoadedModel,
    attention: Attention,
    max_model_len: int,
    parts: Sequence[GraphPart] = (),
) -> GraphMaker | None:
    """Make the part that captures decode steps in graphs, or None without graphs."""
    if not config.wants_graphs(loaded.model.embed_weight.device):
        return None
    from common.runner.graph_maker import GraphMaker

    backend = attention.backend, attention.is_triton
    return GraphMaker.of(config, loaded.model, *backend, max_model_len, parts)


# -- sampling and draft tokens


def make_sampler(given: RunnerSpec, proposer: Proposer | None) -> BatchSampler:
    if not given.loaded.model.collectives.ranks.is_last_stage:
        from common.runner.stage import NoSampler

        return NoSampler()
    sampler = Sampler(given.vocab_size, given.attention.rules)
    if proposer is None:
        return sampler
    return make_verifier(sampler, proposer, given.attention.is_triton)


def make_verifier(sampler: Sampler, proposer: Proposer, is_triton: bool) -> BatchSampler:
    """Make the sampler that verifies draft tokens: with kernels if attention is a Triton kernel."""
    from common.sampling.speculative_sampler import SpeculativeSampler

    if not is_triton:
        return SpeculativeSampler(sampler, proposer.draft_probs)
    import rejection_sampler_triton as kernels

    rules = kernels.rejection_sample_triton, kernels.rejection_sampling_batched_triton
    return SpeculativeSampler(sampler, proposer.draft_probs, *rules)


def make_draft_length(spec_config: SpeculativeConfig) -> DraftLength:
    from speculating_runner import FixedLength

    if not spec_config.adaptive:
        return FixedLength(spec_config.num_spec_tokens)
    from adaptive_length import AdaptiveLength

    return AdaptiveLength(spec_config.num_spec_tokens)


def make_proposer(given: RunnerSpec, kv_cache: PagedKVCache, state: BatchState) -> Proposer | None:
    """Make the proposer of draft tokens, or None if this rank proposes none."""
    spec_config = given.config.speculation
    if spec_config is None or not given.loaded.model.collectives.ranks.is_last_stage:
        return None
    if isinstance(spec_config.method, str):
        return resolve_name(PROPOSERS[spec_config.method])(spec_config, given, kv_cache, state)
    return spec_config.method


def make_ngram(spec_config: SpeculativeConfig, *_: object) -> Proposer:
    from ngram_index import BulkNgramProposer

    return BulkNgramProposer(
        spec_config.num_spec_tokens, spec_config.max_ngram, spec_config.min_ngram
    )


def make_draft_model(
    spec_config: SpeculativeConfig, given: RunnerSpec, kv_cache: PagedKVCache, state: BatchState
) -> Proposer:
    """Make the draft model's proposer. Raises `ValueError` if its vocabulary size differs."""
    from common.sampling.speculative_sampler import ConstrainedDrafts
    from draft_model_proposer import DraftModelProposer

    loaded, draft = given.loaded, given.draft
    assert draft is not None
    if draft.config.vocab_size != loaded.config.vocab_size:
        raise ValueError(
            "model of speculative must have the target's vocabulary of "
            f"{loaded.config.vocab_size} tokens, got {draft.config.vocab_size}"
        )
    sampler = Sampler(given.vocab_size, given.attention.rules)
    return DraftModelProposer(
        draft.model,
        allocate_kv_cache(draft, kv_cache.num_blocks, kv_cache.block_size),
        given.attention.backend,
        state,
        spec_config.num_spec_tokens,
        max_model_len=min(given.max_model_len, draft.config.num_unhidden),
        sampler=ConstrainedDrafts(sampler, state.sampling, state),
    )
