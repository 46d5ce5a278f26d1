"""Where the chapters become one engine: one function that chooses a part for every role.

    role            chapter   part
    KV tensors         2      PagedKVCache, sized by `kv_sizing` unless `num_blocks` says how many
    batch            2, 6     compose_in_order; compose
    attention        2, 6     TorchAttentionBackend, CompiledAttentionBackend or
                              TritonAttentionBackend, or the mixed ones; InvariantAttentionBackend
    runner          common    PagedModelRunner over a BatchState; a GraphRunner, with DecodeGraphs
    sampler         common    Sampler; in a SpeculativeSampler if somebody guesses
    kernels         common    KernelRegions and the sampler's Rules, where attention is Triton's
    guesses            5      a SpeculatingRunner with an NgramProposer or a DraftModelProposer
    the rest         1 to 6   `scheduler_assembly.py`: memory, scheduler, the loop

Nothing is implemented here. To turn a chapter off, a plain part takes the role; no token changes by
it. A part that is not chosen is not imported either. What is in this file runs wherever the model
is: in a worker (`runner/worker.py`) if there are several ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from batch_layout import compose_in_order
from common.engine_config import EngineConfig, SpeculativeConfig
from common.kernels.regions import set_regions
from common.kv_sizing import allocate_kv_cache, make_kv_cache
from common.linear import linear_layers
from common.loader import LoadedModel
from common.runner.batch_state import BatchState
from common.runner.model_runner import Compose, PagedModelRunner
from common.sampling.sampler import BatchSampler, Sampler
from common.scheduler_assembly import (
    EngineParts,
    ModelFacts,
    Namespace,
    RunnerSide,
    assemble_around,
    find_max_model_len,
    find_vocab_size,
)
from paged_attention import AttentionBackend, PagedKVCache, TorchAttentionBackend
from scheduler_interface import ModelRunner

if TYPE_CHECKING:
    from common.outputs import OutputProcessor
    from common.runner.graph_maker import GraphMaker
    from common.sampling.distributions import Rules
    from kv_connector import KVBlockIO
    from proposers import Proposer
    from speculating_runner import DraftLength, SpeculatingRunner

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Attention:
    """How KV is attended to, and the layout of batches that goes with it."""

    backend: AttentionBackend
    compose: Compose
    is_triton: bool = False
    kv_cache_kind: type[PagedKVCache] = PagedKVCache

    @property
    def rules(self) -> Rules | None:
        """What is sampled with: kernels where attention is one."""
        if not self.is_triton:
            return None
        from common.kernels.sampler_kernel import KERNELS

        return KERNELS


@dataclass(frozen=True, slots=True)
class LocalRunner:
    """What computes, in this process. `speculation`, if any, stands around `paged`."""

    paged: PagedModelRunner
    kv_cache: PagedKVCache
    speculation: SpeculatingRunner | None

    @property
    def outermost(self) -> ModelRunner:
        return self.speculation or self.paged


def assemble(
    config: EngineConfig,
    loaded: LoadedModel,
    draft: LoadedModel | None,
    num_tokens_in_tokenizer: int | None,
    members: Mapping[str, OutputProcessor],
) -> EngineParts:
    """Choose and connect the parts. Raises `ValueError` if the model or the memory does not allow
    it."""
    max_model_len = find_max_model_len(config, loaded.config)
    vocab_size = find_vocab_size(loaded.config, num_tokens_in_tokenizer)

    def trim(runner: ModelRunner) -> ModelRunner:
        from common.runner.trimming_runner import TrimmingRunner

        return TrimmingRunner(runner, members)

    local = make_runner(config, loaded, draft, max_model_len, vocab_size, trim)
    guesses = local.speculation
    side = RunnerSide(
        local.outermost,
        model_facts(loaded),
        local.kv_cache,
        max_model_len,
        vocab_size,
        partial(make_block_io, config, loaded, local.kv_cache),
        is_queued=local.paged.device.type != "cpu",  # by itself
        speculation=guesses,
        num_lookahead_tokens=None if guesses is None else guesses.proposer.num_lookahead_tokens,
    )
    return assemble_around(config, side, members)


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
    make_length: Callable[[DraftLength], DraftLength] | None = None,
    least: Callable[[int], int] | None = None,
    num_neighbours: int = 1,
) -> LocalRunner:
    """What computes. `trim` wraps a runner that verifies guesses, `make_length` the choice of their
    number; `least` agrees with other ranks on a number of blocks, of which `num_neighbours` share
    the memory of this machine."""
    attention = make_attention(config, loaded)
    model = loaded.model
    is_compiled = config.wants_compiled(model.num_parameters, model.embed_weight.device)
    set_regions(model, is_compiled, attention.is_triton)
    if draft is not None and draft.model is not model:
        set_regions(draft.model, False, attention.is_triton)
    if config.pack_weights:
        for part in (loaded,) if draft is None else (loaded, draft):
            if (reason := part.model.pack_weights()) is not None:
                if config.batch_invariant:
                    raise ValueError(f"batch_invariant is True: no weights are packed, {reason}")
                logger.info("weights are not packed: %s", reason)
    if config.batch_invariant:
        from batch_invariance import make_batch_invariant

        dtype, head_dim = model.embed_weight.dtype, loaded.config.head_dim
        mlps = [layer.mlp for layer in model.layers]
        make_batch_invariant(linear_layers(model), mlps, dtype, head_dim)
    if attention.is_triton and model.embed_weight.is_cuda:
        compile_kernels(config, loaded, draft, vocab_size)
    kv_cache = make_kv_cache(
        config,
        loaded,
        draft,
        attention.backend,
        max_model_len,
        vocab_size,
        kind=attention.kv_cache_kind,
        least=least,
        num_neighbours=num_neighbours,
        rules=attention.rules,
        make_graphs=(make_graphs := make_graph_maker(config, loaded, attention, max_model_len)),
    )
    max_blocks = -(-max_model_len // config.block_size)
    state = BatchState(config.max_num_seqs, max_blocks, loaded.generation_eos_token_ids)
    sampler = Sampler(vocab_size, attention.rules)
    batch_sampler: BatchSampler = sampler
    how, proposer, kind = config.speculation, None, PagedModelRunner
    if config.pipeline_parallel_size > 1:
        from common.parallel.stage import NoSampler
        from common.parallel.stage import StageRunner as kind

        if not model.collectives.ranks.is_last_stage:
            batch_sampler, how = NoSampler(), None
    if how is not None:
        proposer = make_proposer(
            how, loaded, draft, kv_cache, attention, state, max_model_len, vocab_size
        )
        batch_sampler = make_verifier(sampler, proposer, attention.is_triton)
    if make_graphs is not None and (graphs := make_graphs(kv_cache)) is not None:
        from common.runner.graphs import GraphRunner

        kind = partial(GraphRunner, graphs=graphs)
    runner = kind(
        loaded.model,
        kv_cache,
        attention.backend,
        state,
        batch_sampler,
        compose=attention.compose,
        shuffle_seed=config.seed if config.shuffle_batch else None,
    )
    speculation = None
    if how is not None and proposer is not None:
        length = make_draft_length(how)
        speculation = make_speculation(
            proposer,
            runner if trim is None else trim(runner),
            state,
            length if make_length is None else make_length(length),
        )
    return LocalRunner(runner, kv_cache, speculation)


# -- KV blocks on their way


def make_block_io(
    config: EngineConfig, loaded: LoadedModel, kv_cache: PagedKVCache
) -> tuple[KVBlockIO, Namespace]:
    from kv_block_io import PagedBlockIO

    namespace = kv_namespace(loaded, kv_cache)
    if config.batch_invariant:  # KV with other bits is another engine's
        namespace += (("numerics", "batch invariant"),)
    return PagedBlockIO(kv_cache), namespace


def kv_namespace(loaded: LoadedModel, kv_cache: PagedKVCache) -> tuple[tuple[str, str], ...]:
    """What the bytes of a KV block depend on besides tokens. Reads every weight."""
    from weights_digest import weights_digest

    model = f"{weights_digest(loaded.model.named_weights())} eps {loaded.config.rms_norm_eps}"
    shape = tuple(kv_cache.key_cache[0].shape[1:])
    layout = f"{kv_cache.key_cache[0].dtype} {len(kv_cache.key_cache)} x {shape}"
    return (("model", model), ("kv layout", layout), *loaded.model.namespace)


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
    backend = Backend.compiled_for(loaded.model.num_heads, few_blocks)
    return None if backend is None else Attention(backend, compose, kv_cache_kind=HeadMajorKVCache)


def compile_kernels(
    config: EngineConfig, loaded: LoadedModel, draft: LoadedModel | None, vocab_size: int
) -> None:
    """Everything that the engine can launch on its GPU, so that no step waits for a compiler."""
    from common.kernels.launch_configurations import launch_configurations
    from common.kernels.warm_up import warm_up
    from kernel_launch import architecture_of

    weight = loaded.model.embed_weight
    launches = launch_configurations(
        loaded.model.rank_config,
        config,
        weight.dtype,
        architecture_of(weight.device),
        draft=None if draft is None else draft.model.rank_config,
        vocab_size=vocab_size,
    )
    warm_up(launches, weight.device)


def make_graph_maker(
    config: EngineConfig, loaded: LoadedModel, attention: Attention, max_model_len: int
) -> GraphMaker | None:
    """Who captures decode steps, if they are to be and can be."""
    if not config.wants_graphs(loaded.model.embed_weight.device):
        return None
    from common.runner.graph_maker import GraphMaker

    return GraphMaker.of(
        config, loaded.model, attention.backend, attention.is_triton, max_model_len
    )


# -- guesses


def make_verifier(sampler: Sampler, proposer: Proposer, is_triton: bool) -> BatchSampler:
    """A sampler that verifies guesses: with kernels where attention is one."""
    from common.sampling.speculative_sampler import SpeculativeSampler

    rules: dict[str, Any] = {}
    if is_triton:
        import rejection_sampler_triton as kernels

        rules["reject"] = kernels.rejection_sample_triton
        rules["match"] = kernels.rejection_sampling_batched_triton
    return SpeculativeSampler(sampler, proposer.draft_probs, **rules)


def make_draft_length(how: SpeculativeConfig) -> DraftLength:
    from speculating_runner import FixedLength

    if not how.adaptive:
        return FixedLength(how.num_spec_tokens)
    from adaptive_length import AdaptiveLength

    return AdaptiveLength(how.num_spec_tokens)


def make_speculation(
    proposer: Proposer, runner: ModelRunner, state: BatchState, length: DraftLength
) -> SpeculatingRunner:
    from speculating_runner import SpeculatingRunner

    return SpeculatingRunner(runner, proposer, length, state)


def make_proposer(
    how: SpeculativeConfig,
    loaded: LoadedModel,
    draft: LoadedModel | None,
    kv_cache: PagedKVCache,
    attention: Attention,
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
        attention.backend,
        state,
        how.num_spec_tokens,
        max_model_len=min(max_model_len, draft.config.max_position_embeddings),
        sampler=ConstrainedDrafts(Sampler(vocab_size, attention.rules), state.sampling, state),
    )
