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

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard, runtime_checkable

import torch

from paged_attention import AttentionBackend
from policies import POLICIES, SchedulePolicy, get_policy
from request import check_integers
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


def _check(config: object, *rules: tuple[str, object, str]) -> None:
    """Raise `ValueError` for the first `(field, is_right, rule)` whose `is_right` is false."""
    for name, is_right, rule in rules:
        if not is_right:
            raise ValueError(f"{name} must {rule}, got {getattr(config, name)!r}")


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, Real) and not isinstance(value, bool)


@runtime_checkable
class LearnsDurations(Protocol):
    """A `ChunkPolicy` that is notified of each step's duration."""

    def observe_step(
        self, starts: Sequence[int], num_tokens: Sequence[int], step_ms: float
    ) -> None: ...


def _check_scheduler(value: object) -> None:
    instead = "a class or function that makes a BaseScheduler"
    _check_name("scheduler", value, SCHEDULERS, callable(value), instead)


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


def _check_prefix_cache(value: object) -> None:
    instead = "a function of pool, block_size and listener that makes a PrefixCache"
    _check_name("prefix_cache", value, (None, *PREFIX_CACHES), callable(value), instead)


def _check_chunked_prefill(value: object) -> None:
    is_size = isinstance(value, int) and (isinstance(value, bool) or value >= 1)
    if not is_size and not _is_made(value, ChunkPolicy):
        raise ValueError(
            "chunked_prefill must be True, False, an integer >= 1 or an instance of ChunkPolicy, "
            f"got {value!r}"
        )


def _check_attention_backend(value: object) -> None:
    names = ("auto", *ATTENTION_BACKENDS)
    is_one = _is_made(value, AttentionBackend)
    _check_name("attention_backend", value, names, is_one, "an instance of AttentionBackend")


def _check_method(value: object) -> None:
    _check_name("method", value, PROPOSERS, is_proposer(value), "an instance of Proposer")


def is_proposer(value: object) -> TypeGuard[Proposer]:
    if value is None or isinstance(value, str | dict):
        return False
    from proposers import Proposer

    return _is_made(value, Proposer)


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
    num_spec_tokens: int = 4
    adaptive: bool = True
    model: str | Path | None = None
    max_ngram: int = 4
    min_ngram: int = 2

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
        for name in ("num_spec_tokens", "min_ngram", "max_ngram"):
            check_integers(1, **{name: getattr(self, name)})
        is_path = isinstance(self.model, str | Path) and str(self.model)
        is_model = self.model is None or (self.method == "draft" and is_path)
        _check_method(self.method)
        _check(
            self,
            ("min_ngram", self.min_ngram <= self.max_ngram, "be <= max_ngram"),
            ("adaptive", isinstance(self.adaptive, bool), "be True or False"),
            ("model", is_model, "be a directory or hub id, for method 'draft'"),
        )


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """All options of the engine. Raises `ValueError` that names the field, its value and the
    allowed values. Python's garbage collector is shared by the whole process, so a server
    configures it as the demo does (`common/requests/gc_utils.py`), before it makes an engine."""

    model: str | Path | None = None  # a directory or hub id; None: the shipped checkpoint
    device: str = "auto"
    dtype: str | torch.dtype = "auto"
    block_size: int = 16
    num_blocks: int | None = None  # KV blocks, with the null block; None: as free memory allows
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int | None = None  # prompt plus outputs; None: the model's maximum
    # Instead of a name, each role takes your own part or a function that makes one.
    # "two_phase" and "prefill_first" (chapter 4) fill the memory, and preempt when it runs out.
    # "fcfs" (chapter 1) reserves everything at admission.
    scheduler: str | Callable[..., SchedulerInterface] = "two_phase"
    # Orders the first two's waiting queue: "priority", "lof", "random", "lpm", "lpm-first",
    # "dfs-weight", or your own class as "module:Class".
    policy: str | SchedulePolicy = "fcfs"
    watermark: float = 0.01  # share of blocks that "two_phase" keeps for running requests
    # Or "radix"; None: no prefix cache.
    prefix_cache: str | Callable[..., PrefixCache] | None = "hash"
    kv_tiers: KVTierConfig | None = None  # evicted blocks go to host memory and disk
    # Shares KV blocks over a pool. One for each engine, and none with `kv_tiers`.
    kv_connector: KVConnector | None = None
    # Long prompts are computed in several steps, with chunks as large as the token budget allows
    # (True) or of at most this many tokens (an integer; with "prefill_first", the limit for all
    # prompts together). False: a prompt must fit into one step; "fcfs" always works that way.
    chunked_prefill: bool | int | ChunkPolicy = True
    target_step_ms: float | None = None  # chunks as large as a step of this length allows
    max_long_partial_prefills: int | None = None  # limits concurrent prefills longer than a chunk
    mixing: bool = False  # puts decodes into the prefill batches of "prefill_first"
    # The fields of `SpeculativeConfig`, such as {"method": "ngram"}; or a `Proposer`.
    speculative: dict | Proposer | None = None
    attention_backend: str | AttentionBackend = "auto"  # or "torch", "triton"
    # Compiles decode attention, norms and rotary embedding for a CPU when the engine is made: some
    # 30 seconds, a few seconds once the result is cached on disk. "auto": for models of
    # `COMPILE_FROM_PARAMETERS` parameters and more.
    compile: bool | str = "auto"
    # Plans step n + 1 while step n runs. "auto": on a GPU. Has no effect with `speculative` or
    # `target_step_ms`: accepted tokens, or the step's duration, are known only at its end.
    overlap_scheduling: bool | str = "auto"
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
    num_threads: int | None = None
    gpu_memory_utilization: float = 0.9  # share that weights, activations and KV together may take
    # Ranks that split each layer, and stages that split the list of layers. With more than one rank
    # in total, each is a separate process, and this one computes nothing (`common/parallel`).
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    worker_timeout_s: float = 300.0  # a rank that needs longer for a step counts as lost
    events: str | Path | None = None  # file for the events of each step: `common/events`
    # LoRA adapters in PEFT's format, by name: {"tests": "directory"}. With this or `max_loras` (how
    # many different adapters fit in a batch: 4), more can be loaded later. Both None: no adapters.
    adapters: Mapping[str, str | Path] | None = None
    max_loras: int | None = None
    max_lora_rank: int = 16
    # "auto": requests without sampling parameters get those of the model's generation_config.json,
    # and its `max_new_tokens` as their limit; "vllm": `SamplingParams()`
    generation_config: str = "auto"
    seed: int = 0  # for requests without a seed
    # Debug switches. None of them may change any output.
    check_invariants: bool = False  # checks scheduler and KV manager after every step
    shuffle_batch: bool = False
    shuffle_waiting: bool = False
    preempt_every: int | None = None  # preempts a request every so many steps
    emulate_graphs: bool = False  # on a CPU: replays graphs from lists and checks them; slow

    def __post_init__(self) -> None:
        lowest = {"block_size": 1, "max_num_seqs": 1, "max_num_batched_tokens": 1}
        lowest |= {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "max_lora_rank": 1}
        optional = {"preempt_every": 1, "max_long_partial_prefills": 1, "num_threads": 1}
        optional |= {"max_loras": 1}
        # The null block and one other block; one prompt token and one output token.
        optional |= {"num_blocks": 2, "max_model_len": 2}
        for name, low in (lowest | optional).items():
            value = getattr(self, name)
            if value is not None or name not in optional:
                check_integers(low, **{name: value})
        check_integers(seed=self.seed)
        _check(self, ("max_num_seqs", self.max_num_seqs <= 1 << 20, "be from 1 to 2**20"))
        few = self.num_threads is None or self.num_threads <= MAX_THREADS
        _check(self, ("num_threads", few, f"be None or from 1 to {MAX_THREADS}"))
        flags = ["mixing", "pack_weights", "enforce_eager", "emulate_graphs", "batch_invariant"]
        flags += ["check_invariants", "shuffle_batch", "shuffle_waiting"]
        for name in flags:
            _check(self, (name, isinstance(getattr(self, name), bool), "be one of False, True"))
        for name in ("compile", "overlap_scheduling"):
            value = getattr(self, name)
            is_one = isinstance(value, bool) or (isinstance(value, str) and value == "auto")
            _check(self, (name, is_one, "be one of 'auto', False, True"))
        _check_scheduler(self.scheduler)
        _check_policy(self.policy)
        _check_prefix_cache(self.prefix_cache)
        _check_chunked_prefill(self.chunked_prefill)
        _check_attention_backend(self.attention_backend)
        model = self.model
        ms = self.target_step_ms
        events = self.events
        left = self.watermark
        share = self.gpu_memory_utilization
        adapters = self.adapters or {}
        are_paths = isinstance(adapters, Mapping) and all(
            isinstance(path, str | Path) for path in adapters.values()
        )
        is_model = model is None or (isinstance(model, str | Path) and str(model))
        is_file = events is None or (isinstance(events, str | Path) and str(events))
        is_share = _is_number(share) and 0 < share <= 1
        is_time = ms is None or (_is_number(ms) and 0 < ms < math.inf)
        patience = self.worker_timeout_s
        is_patience = _is_number(patience) and 0 < patience < math.inf
        _check(
            self,
            ("model", is_model, "be a directory, a hub id or None"),
            ("events", is_file, "be a file to be written, or None"),
            ("adapters", are_paths, "be None or {name: directory}"),
            (
                "generation_config",
                self.generation_config in ("auto", "vllm"),
                "be 'auto' or 'vllm'",
            ),
            ("watermark", _is_number(left) and 0 <= left < 1, "be in [0, 1)"),
            ("gpu_memory_utilization", is_share, "be in (0, 1]"),
            ("target_step_ms", is_time, "be None or > 0, and finite"),
            ("worker_timeout_s", is_patience, "be > 0, and finite"),
        )
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


STEP_SIZES = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


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
    # Steps by their number of tokens: up to each of `STEP_SIZES`, and more than that.
    steps_by_tokens: list[int] = field(default_factory=lambda: [0] * (len(STEP_SIZES) + 1))
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
    accepted_by_position: list[int] = field(default_factory=list)
    acceptance_by_position: list[float] = field(default_factory=list)
    mean_accepted_length: float = 1.0  # tokens per pass that had drafts
    tokens_per_pass: float = 0.0
    running_adapters: list[str] = field(default_factory=list)  # names, of running sequences
    waiting_adapters: list[str] = field(default_factory=list)
    kv_waste: float = 0.0  # share of the held slots that are not yet written, mean over steps
