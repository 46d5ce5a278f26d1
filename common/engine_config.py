"""The engine's configuration (`EngineConfig`) and statistics (`EngineStats`). These arguments take
a name or an object:

    argument            names                           or
    scheduler           SCHEDULERS                      a function of `make_scheduler`'s keywords
    policy              chapter 4's own two, or all     a SchedulePolicy
                        of `sglang_policies.POLICIES`,
                        or "module:Class" of yours
    prefix_cache        PREFIX_CACHES, None             a function of pool, block_size, listener
    chunked_prefill     True, False, a number           a ChunkPolicy
    speculative         PROPOSERS, in a dict            a Proposer
    attention_backend   ATTENTION_BACKENDS, "auto"      an AttentionBackend
    kv_connector        None                            a KVConnector

A table maps each name to a "module:attribute", which is imported only when the name is chosen.

See common/README.md"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    Protocol,
    TypeGuard,
    get_type_hints,
    runtime_checkable,
)

import torch
from pydantic import ConfigDict, Field, PositiveInt, TypeAdapter, ValidationError

from paged_attention import AttentionBackend
from policies import POLICIES, SchedulePolicy, get_policy
from unchunked import ChunkPolicy

if TYPE_CHECKING:
    from kv_connector import KVConnector
    from prefix_cache import PrefixCache
    from proposers import Proposer
    from scheduler_interface import SchedulerInterface
    from tiered_cache import KVTierConfig

SCHEDULERS = {
    # Chapter 4: fill the memory, and preempt when it runs out.
    "two_phase": "scheduler:Scheduler",
    "prefill_first": "prefill_first_scheduler:PrefillFirstScheduler",
    # Chapter 1, over KV blocks and a prefix cache: reserve everything at admission.
    "fcfs": "caching_fcfs_scheduler:CachingFCFSScheduler",
}
PREFIX_CACHES = {
    "hash": "prefix_cache_local:PrefixCacheLocal",
    "radix": "radix_cache:RadixCache",
}
PROPOSERS = {
    "ngram": "proposers:NgramProposer",
    "draft": "draft_model_proposer:DraftModelProposer",
}
# The first is for whole prompts, the second (or the same) for decodes and chunks in a batch. Only
# "triton" and classes that derive from `TorchAttentionBackend` get metadata with a window.
ATTENTION_BACKENDS = {
    "torch": (
        "paged_attention:TorchAttentionBackend",
        "mixed_attention:MixedAttentionBackend",
    ),
    "triton": (
        "paged_attention_triton:TritonAttentionBackend",
        "mixed_attention_triton:MixedTritonAttentionBackend",
    ),
}
# Plugins that are made when the first request has the feature: the runner's, and the engine's.
LAZY_PLUGINS = {
    "prompt_logprobs": "common.sampling.prompt_logprobs:make",
    "grammar": "common.features.grammars.grammar_masks:make",
}
LAZY_ENGINE_PLUGINS = {
    "grammar": "common.features.grammars.request_grammars:RequestGrammars",
}

CHECKPOINTS = Path(__file__).parent / "checkpoints"
SHIPPED_CHECKPOINT = CHECKPOINTS / "tiny"
SHIPPED_DRAFT = CHECKPOINTS / "tiny-draft"
SHIPPED_ADAPTER = CHECKPOINTS / "tiny-tests"
# For smaller models, compilation pays for its start-up time only after several thousand tokens:
# measured in `02_paged_kv/beyond/README.md`.
COMPILE_FROM_PARAMETERS = 100_000_000
# Smaller models are computed by one thread on a CPU. A second thread makes them up to 50% faster on
# an idle machine, but costs two thirds of the speed next to a program that keeps a core busy.
# Larger models lose as much then, but one thread is slow for them on an idle machine, too:
# measured there.
THREADS_FROM_PARAMETERS = 100_000_000
NO_CLOCK = "not depend on step durations in a pipeline, where other steps are in flight"
MAX_THREADS = max(64, 4 * (os.cpu_count() or 1))  # a process that cannot get them ends

PathLike = Annotated[str, Field(min_length=1)] | Path
# The null block and one other block; one prompt token and one output token.
AtLeastTwo = Annotated[int, Field(ge=2)]
Duration = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def check_fields(config: object) -> None:
    """Raise `ValueError` for the first field whose value is not what its annotation says. It names
    the field, the value and what is allowed."""
    for name, adapter in _adapters(type(config)).items():
        value = getattr(config, name)
        try:
            adapter.validate_python(value, strict=True)
        except ValidationError as error:
            told = [found["msg"].partition(" should ")[2] for found in error.errors()]
            allowed = " or ".join(dict.fromkeys(told))
            raise ValueError(f"{name} must {allowed}, got {value!r}") from None


@cache
def _adapters(kind: type) -> dict[str, TypeAdapter]:
    parts = ("KVConnector", "KVTierConfig", "PrefixCache", "Proposer", "SchedulerInterface")
    later: dict[str, Any] = {name: Any for name in parts}  # imported only where they are used
    hints = get_type_hints(kind, localns=later, include_extras=True)
    config = ConfigDict(arbitrary_types_allowed=True)
    return {name: TypeAdapter(hint, config=config) for name, hint in hints.items()}


def _check(config: object, *rules: tuple[str, object, str]) -> None:
    """Raise `ValueError` for the first `(field, is_right, rule)` whose `is_right` is false."""
    for name, is_right, rule in rules:
        if not is_right:
            raise ValueError(f"{name} must {rule}, got {getattr(config, name)!r}")


@runtime_checkable
class LearnsDurations(Protocol):
    """A `ChunkPolicy` that is notified of each step's duration."""

    def observe_step(
        self, starts: Sequence[int], num_tokens: Sequence[int], step_ms: float
    ) -> None: ...


def _check_policy(value: Any) -> None:
    if isinstance(value, str) and value in POLICIES:
        return
    policy: SchedulePolicy | type[SchedulePolicy]
    if isinstance(value, SchedulePolicy):
        policy = value
    else:
        import sglang_policies

        policy = get_policy(value, sglang_policies.POLICIES)
    has_key = getattr(policy.key, "__func__", policy.key) is not SchedulePolicy.key
    has_order = getattr(policy.order, "__func__", policy.order) is not SchedulePolicy.order
    if not has_key and not (has_order and policy.is_cache_aware):
        needed = "must define key, or set is_cache_aware and define order"
        raise ValueError(f"policy {needed}, got {value!r}")


def is_proposer(value: object) -> TypeGuard[Proposer]:
    if value is None or isinstance(value, str | dict):
        return False
    from proposers import Proposer

    return _is_made(value, Proposer)


def _is_backend(value: object) -> bool:
    return _is_made(value, AttentionBackend)


def is_instance_arg(value: object) -> bool:
    """Whether `value` is an object given by the caller, not a name or a number."""
    return value is not None and not isinstance(value, str | int | float | dict)


def _check_name(
    field: str, value: object, names: Iterable[str | None], is_one: bool, instead: str
) -> None:
    if value is None or isinstance(value, str):
        is_one = value in tuple(names)
    if not is_one:
        shown = ", ".join(map(repr, names))
        raise ValueError(f"{field} must be {instead}, or one of {shown}, got {value!r}")


def _is_made(value: object, protocol: type) -> bool:
    """Whether `value` is an instance of `protocol`. A class with its methods is not one."""
    return not isinstance(value, type) and isinstance(value, protocol)


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """The configuration of speculative decoding. `method` is `"ngram"` (look up what followed the
    last `max_ngram` to `min_ngram` tokens before), `"draft"` (run the draft model `model`, a
    directory or hub id with the same vocabulary; None: the shipped draft model) or a `Proposer`
    (chapter 5). At most `num_spec_tokens` draft tokens are proposed per step; with `adaptive`, only
    as many of them as pay off. Raises `ValueError` that names the field."""

    method: str | Proposer
    num_spec_tokens: PositiveInt = 4
    adaptive: bool = True
    model: PathLike | None = None
    max_ngram: PositiveInt = 4
    min_ngram: PositiveInt = 2

    @classmethod
    def make(cls, speculative: dict | Proposer) -> SpeculativeConfig:
        if is_proposer(speculative):
            speculative = {"method": speculative}
        if not isinstance(speculative, dict) or "method" not in speculative:
            raise ValueError(
                "speculative must be None, an instance of Proposer or a dict with a method, got "
                f"{speculative!r}"
            )
        known = list(cls.__dataclass_fields__)
        if unknown := [name for name in speculative if name not in known]:
            raise ValueError(f"speculative must have only {', '.join(known)}, got {unknown[0]!r}")
        if is_proposer(method := speculative["method"]):
            speculative = {"num_spec_tokens": method.num_spec_tokens} | speculative
        return cls(**speculative)

    def __post_init__(self) -> None:
        instead = "an instance of Proposer"
        _check_name("method", self.method, PROPOSERS, is_proposer(self.method), instead)
        check_fields(self)
        is_draft = self.model is None or self.method == "draft"
        _check(
            self,
            ("min_ngram", self.min_ngram <= self.max_ngram, "be <= max_ngram"),
            ("model", is_draft, "be None without method 'draft'"),
        )


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """All options of the engine. Raises `ValueError` that names the field, its value and the
    allowed values. Python's garbage collector is shared by the whole process, so a server
    configures it as the demo does (`common/requests/gc_utils.py`), before it makes an engine."""

    model: PathLike | None = None  # a directory or hub id; None: the shipped checkpoint
    device: str = "auto"
    dtype: str | torch.dtype = "auto"
    block_size: PositiveInt = 16
    # KV blocks, with the null block; None: as free memory allows.
    num_blocks: AtLeastTwo | None = None
    max_num_seqs: Annotated[int, Field(ge=1, le=1 << 20)] = 256
    max_num_batched_tokens: PositiveInt = 2048
    max_model_len: AtLeastTwo | None = None  # prompt plus outputs; None: the model's maximum
    # Instead of a name, each role takes your own part or a function that makes one.
    # "two_phase" and "prefill_first" (chapter 4) fill the memory, and preempt when it runs out.
    # "fcfs" (chapter 1) reserves everything at admission.
    scheduler: str | Callable[..., SchedulerInterface] = "two_phase"
    # Orders the first two's waiting queue: "priority", "lof", "random", "lpm", "lpm-first",
    # "dfs-weight", or your own class as "module:Class".
    policy: str | SchedulePolicy = "fcfs"
    # Share of blocks that "two_phase" keeps for running requests.
    watermark: Annotated[float, Field(ge=0, lt=1)] = 0.01
    # Or "radix"; None: no prefix cache.
    prefix_cache: str | Callable[..., PrefixCache] | None = "hash"
    kv_tiers: KVTierConfig | None = None  # evicted blocks go to host memory and disk
    # Shares KV blocks over a pool. One for each engine, and none with `kv_tiers`.
    kv_connector: KVConnector | None = None
    # Long prompts are computed in several steps, with chunks as large as the token budget allows
    # (True) or of at most this many tokens (an integer; with "prefill_first", the limit for all
    # prompts together). False: a prompt must fit into one step; "fcfs" always works that way.
    chunked_prefill: bool | PositiveInt | ChunkPolicy = True
    target_step_ms: Duration | None = None  # chunks as large as a step of this length allows
    # Limits concurrent prefills longer than a chunk.
    max_long_partial_prefills: PositiveInt | None = None
    mixing: bool = False  # puts decodes into the prefill batches of "prefill_first"
    # The fields of `SpeculativeConfig`, such as {"method": "ngram"}; or a `Proposer`.
    speculative: dict | Proposer | None = None
    attention_backend: str | AttentionBackend = "auto"  # or "torch", "triton"
    # Compiles decode attention, norms and rotary embedding for a CPU when the engine is made: some
    # 30 seconds, a few seconds once the result is cached on disk. "auto": for models of
    # `COMPILE_FROM_PARAMETERS` parameters and more.
    compile: bool | Literal["auto"] = "auto"
    # Plans step n + 1 while step n runs. "auto": on a GPU. Has no effect with `speculative` or
    # `target_step_ms`: accepted tokens, or the step's duration, are known only at its end.
    overlap_scheduling: bool | Literal["auto"] = "auto"
    # On a GPU, a step in which each request has one token is replayed from a graph captured at
    # start-up. True: its kernels are launched one by one, as in all other steps.
    enforce_eager: bool = False
    # On an x86 CPU, in float32 and bfloat16: reorders matrices for the processor, once.
    pack_weights: bool = True
    # On a CPU, in float32 and bfloat16: a request has the same bits alone and in any batch.
    batch_invariant: bool = False
    # torch's threads on a CPU, for the whole process, until the engine closes. None: 1 for models
    # below `THREADS_FROM_PARAMETERS`, and torch's default for larger ones, unless OMP_NUM_THREADS
    # has set a number (`runner/thread_count.py`).
    num_threads: Annotated[int, Field(ge=1, le=MAX_THREADS)] | None = None
    # Share that weights, activations and KV together may take.
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    # Ranks that split each layer, and stages that split the list of layers. With more than one rank
    # in total, each is a separate process, and this one computes nothing (`common/parallel`).
    tensor_parallel_size: PositiveInt = 1
    pipeline_parallel_size: PositiveInt = 1
    worker_timeout_s: Duration = 300.0  # a rank that needs longer for a step counts as lost
    events: PathLike | None = None  # file for the events of each step: `common/events`
    # LoRA adapters in PEFT's format, by name: {"tests": "directory"}. With this or `max_loras` (how
    # many different adapters fit in a batch: 4), more can be loaded later. Both None: no adapters.
    adapters: Mapping[str, str | Path] | None = None
    max_loras: PositiveInt | None = None
    max_lora_rank: PositiveInt = 16
    # "auto": requests without sampling parameters get those of the model's generation_config.json,
    # and its `max_new_tokens` as their limit; "vllm": `SamplingParams()`
    generation_config: Literal["auto", "vllm"] = "auto"
    seed: int = 0  # for requests without a seed
    # Debug switches. None of them may change any output.
    check_invariants: bool = False  # checks scheduler and KV manager after every step
    shuffle_batch: bool = False
    shuffle_waiting: bool = False
    preempt_every: PositiveInt | None = None  # preempts a request every so many steps
    emulate_graphs: bool = False  # on a CPU: replays graphs from lists and checks them; slow

    def __post_init__(self) -> None:
        for name, names, is_one, instead in (
            ("scheduler", SCHEDULERS, callable, "a class or function that makes a scheduler"),
            (
                "prefix_cache",
                (None, *PREFIX_CACHES),
                callable,
                "a function that makes a PrefixCache",
            ),
            (
                "attention_backend",
                ("auto", *ATTENTION_BACKENDS),
                _is_backend,
                "an AttentionBackend",
            ),
        ):
            value = getattr(self, name)
            _check_name(name, value, names, is_one(value), instead)
        _check_policy(self.policy)
        check_fields(self)
        self._check_own_parts()
        self._check_what_goes_together()

    def _check_what_goes_together(self) -> None:
        kind = self.scheduler
        may_preempt = self.may_preempt
        has_size = self.chunk_size is not None
        name = f"scheduler {kind!r}"
        no_cut = f"be None if prompts are not cut ({name}, {self.chunked_prefill!r})"
        has_stages = self.pipeline_parallel_size > 1
        no_clock = NO_CLOCK if has_stages else no_cut
        no_long = "be None unless scheduler is 'two_phase' and chunked_prefill a number"
        no_cache = "be None without a prefix_cache"
        is_fixed = self.batch_invariant
        tiles = "batch_invariant=True, which has its own tiles"
        no_adapters = f"be None with {tiles}"
        is_summed = is_fixed and self.tensor_parallel_size > 1
        order = "be 1 with batch_invariant=True, as the order of summation depends on the batch"
        refused = {  # checked only for fields that are not None
            "preempt_every": (not may_preempt, f"be None with {name}"),
            "speculative": (self.speculation and not may_preempt, f"be None with {name}"),
            "policy": (self.policy != "fcfs" and not may_preempt, f"be 'fcfs' with {name}"),
            "chunked_prefill": (has_size and kind == "fcfs", f"not be a number with {name}"),
            "mixing": (self.mixing and kind != "prefill_first", f"be False with {name}"),
            "target_step_ms": (not self.cuts_prompts or has_stages, no_clock),
            "max_long_partial_prefills": (kind != "two_phase" or not has_size, no_long),
            "kv_tiers": (self.prefix_cache is None, no_cache),
            "kv_connector": (self.prefix_cache is None, no_cache),
            "attention_backend": (
                is_fixed and self.attention_backend == "triton",
                f"be 'torch' with {tiles}",
            ),
            "tensor_parallel_size": (is_summed, order),
            "compile": (is_fixed and self.compile is True, f"be False with {tiles}"),
            "adapters": (is_fixed, no_adapters),
            "max_loras": (is_fixed, no_adapters),
            "pack_weights": (is_fixed and not self.pack_weights, f"be True with {tiles}"),
            "emulate_graphs": (
                self.emulate_graphs and self.enforce_eager,
                "be False with enforce_eager",
            ),
        }
        for field_name, (is_wrong, rule) in refused.items():
            _check(self, (field_name, getattr(self, field_name) is None or not is_wrong, rule))
        if self.kv_tiers is not None or self.kv_connector is not None:
            from kv_connector import KVConnector
            from tiered_cache import KVTierConfig

            is_tiers = isinstance(self.kv_tiers, KVTierConfig | None)
            is_connector = isinstance(self.kv_connector, KVConnector | None)
            has_one = self.kv_tiers is None or self.kv_connector is None
            _check(
                self,
                ("kv_tiers", is_tiers, "be None or an instance of KVTierConfig"),
                ("kv_connector", is_connector, "be None or an instance of KVConnector"),
                ("kv_connector", has_one, "be None with kv_tiers"),
            )

    def _check_own_parts(self) -> None:
        """Check which options are compatible with parts that were given instead of names."""
        has_policy = is_instance_arg(self.chunked_prefill)
        has_backend = is_instance_arg(self.attention_backend)
        spec_config = self.speculation
        has_proposer = spec_config is not None and is_instance_arg(spec_config.method)
        far = "be a name, because the model is in other processes"
        tiles = "be a name with batch_invariant=True, which has its own tiles"
        learns = self.learns_durations and self.pipeline_parallel_size > 1
        target = "be None if chunked_prefill is a ChunkPolicy, which has a target of its own"
        whole = f"be True or False with scheduler {self.scheduler!r}"
        _check(
            self,
            ("attention_backend", not has_backend or not self.has_workers, far),
            ("attention_backend", not has_backend or not self.batch_invariant, tiles),
            ("speculative", not has_proposer or not self.has_workers, far),
            (
                "chunked_prefill",
                not isinstance(self.chunked_prefill, type),
                "be made, a ChunkPolicy",
            ),
            ("chunked_prefill", not has_policy or self.may_preempt, whole),
            ("chunked_prefill", not has_policy or not learns, NO_CLOCK),
            ("target_step_ms", not has_policy or self.target_step_ms is None, target),
        )

    @property
    def num_ranks(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def has_workers(self) -> bool:
        """Whether the model is in other processes."""
        return self.num_ranks > 1

    @property
    def takes_adapters(self) -> bool:
        return self.adapters is not None or self.max_loras is not None

    @property
    def max_adapters(self) -> int:
        """The maximum number of different adapters in a batch."""
        return self.max_loras or 4

    @property
    def cuts_prompts(self) -> bool:
        return self.chunked_prefill is not False and self.may_preempt

    @property
    def may_preempt(self) -> bool:
        """Whether the scheduler can preempt. A scheduler of your own is assumed to."""
        return self.scheduler != "fcfs"

    @property
    def learns_durations(self) -> bool:
        """Whether the chunk policy needs each step's duration."""
        is_told = isinstance(self.chunked_prefill, LearnsDurations)
        return self.target_step_ms is not None or is_told

    @property
    def needs_ends_of_steps(self) -> str | None:
        """The option that keeps a step from being planned while the previous one runs, or None."""
        if self.speculative is not None:
            return "speculative"
        learning = "this chunked_prefill" if self.target_step_ms is None else "target_step_ms"
        return learning if self.learns_durations else None

    @property
    def chunk_size(self) -> int | None:
        """`chunked_prefill` if it is a number."""
        size = self.chunked_prefill
        return size if isinstance(size, int) and not isinstance(size, bool) else None

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """`speculative` as a `SpeculativeConfig`, or None."""
        return None if self.speculative is None else SpeculativeConfig.make(self.speculative)

    @property
    def num_rows_per_request(self) -> int:
        """The maximum number of rows of logits of a request in a step."""
        return 1 if self.speculation is None else 1 + self.speculation.num_spec_tokens

    def wants_compiled(self, num_parameters: int, device: torch.device) -> bool:
        """Whether to compile attention in PyTorch on `device`. (A GPU has kernels instead.)"""
        if self.compile == "auto":
            is_large = num_parameters >= COMPILE_FROM_PARAMETERS
            # The number of rows in a step decides what runs compiled, and so would change the bits.
            return device.type == "cpu" and is_large and not self.batch_invariant
        return self.compile is True

    def wants_overlap(self, device: torch.device) -> bool:
        is_requested = self.overlap_scheduling is True
        return is_requested or (self.overlap_scheduling == "auto" and device.type == "cuda")

    def num_in_flight_tokens(self, device: torch.device) -> int:
        """The maximum number of a request's tokens that are computed or planned, not published."""
        overlaps = self.wants_overlap(device) and self.needs_ends_of_steps is None
        num_steps = max(self.pipeline_parallel_size, 2 if overlaps else 1)
        return self.max_num_batched_tokens * (1 if self.prefix_cache is None else num_steps)

    def wants_graphs(self, device: torch.device) -> bool:
        return self.emulate_graphs or (device.type == "cuda" and not self.enforce_eager)

    def resolve_device(self) -> torch.device:
        """Return the device; `"auto"`: CUDA if available. Raises `ValueError` for a missing one."""
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            device = torch.device(self.device)
        except (RuntimeError, TypeError):
            device = None
        if device is None or device.type not in ("cpu", "cuda"):
            raise ValueError(f"device must be 'auto', 'cpu' or 'cuda[:N]', got {self.device!r}")
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"device must be 'cpu' without a CUDA device, got {self.device!r}")
        if device.type == "cuda" and (device.index or 0) >= (known := torch.cuda.device_count()):
            raise ValueError(f"device must be below 'cuda:{known}', got {self.device!r}")
        return device


@dataclass(slots=True)
class EngineStats:
    """Totals since the engine was made, and the current state. Times in seconds."""

    num_steps: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_finished: int = 0  # users' requests that finished without being aborted
    num_aborted: int = 0
    prompt_tokens: int = 0  # of admitted requests, each counted once
    output_tokens: int = 0
    scheduled_tokens: int = 0
    busy_time: float = 0.0
    kv_blocks_total: int = 0  # without the null block
    kv_blocks_in_use: int = 0  # by requests; blocks that are only cached do not count
    kv_blocks_cached: int = 0
    looked_up_tokens: int = 0  # prompt tokens of admitted requests, if there is a prefix cache
    cached_tokens: int = 0  # looked-up tokens that were found in the prefix cache
    prefix_cache_hit_rate: float = 0.0  # share of all prompt tokens of admitted requests
    recent_prefix_cache_hit_rate: float = 0.0  # for the last 1,000 requests, as vLLM logs it
    # Tokens a second over the last ten seconds. Prompts count at admission, cached tokens included.
    recent_prompt_throughput: float = 0.0
    recent_output_throughput: float = 0.0
    kv_blocks_peak: int = 0
    num_preemptions: int = 0
    discarded_tokens: int = 0  # of requests that ended one step earlier (`overlap_scheduling`)
    recomputed_tokens: int = 0  # lost by preemption, less those found in the prefix cache again
    # Counts each request in each step that yields tokens for it. Without drafts: output_tokens.
    num_passes: int = 0
    num_drafted_passes: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    acceptance_by_position: list[float] = field(default_factory=list)
    mean_accepted_length: float = 1.0  # tokens per pass that had drafts
    tokens_per_pass: float = 0.0
    kv_waste: float = 0.0  # share of the held slots that are not yet written, mean over steps
