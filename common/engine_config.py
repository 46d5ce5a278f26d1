"""The engine's configuration (`EngineConfig`) and statistics (`EngineStats`). These arguments take
a name or an object:

    argument            names                           or
    scheduler           "two_phase", "prefill_first",   a function of `make_scheduler`'s keywords
                        "fcfs"
    policy              chapter 4's own two, or all     a SchedulePolicy
                        of `sglang_policies.POLICIES`,
                        or "module:Class" of yours
    prefix_cache        "hash", "radix", None           a function of pool, block_size, listener
    chunked_prefill     True, False, a number           a ChunkPolicy
    speculative         "ngram", "draft", in a dict     a Proposer
    attention_backend   "auto", "torch", "triton"       an AttentionBackend
    kv_connector        None                            a KVConnector

A part is imported only if its name is chosen.

See common/README.md"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    Protocol,
    get_type_hints,
    runtime_checkable,
)

import torch
from pydantic import AfterValidator, ConfigDict, Field, PositiveInt, TypeAdapter, ValidationError

from policies import POLICIES, SchedulePolicy, get_policy
from request import require

if TYPE_CHECKING:
    from base_scheduler import BaseScheduler
    from kv_connector import KVConnector
    from paged_attention import AttentionBackend
    from prefix_cache import PrefixCache
    from proposers import Proposer
    from tiered_cache import KVTierConfig
    from unchunked import ChunkPolicy

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
    parts = {
        "AttentionBackend": _part("paged_attention:AttentionBackend"),
        "BaseScheduler": Any,  # what a function makes
        "ChunkPolicy": _part("unchunked:ChunkPolicy"),
        "KVConnector": _part("kv_connector:KVConnector"),
        "KVTierConfig": _part("tiered_cache:KVTierConfig"),
        "PrefixCache": Any,
        "Proposer": _part("proposers:Proposer"),
    }
    hints = get_type_hints(kind, localns=parts, include_extras=True)
    config = ConfigDict(arbitrary_types_allowed=True)
    return {name: TypeAdapter(hint, config=config) for name, hint in hints.items()}


def _part(path: str) -> Any:
    """The annotation of an instance of the class at this path, which is imported to check one."""

    def check(value: object) -> object:
        if isinstance(value, type) or not isinstance(value, resolve_name(path)):
            raise ValueError(f"should be an instance of {path}")
        return value

    return Annotated[Any, AfterValidator(check)]


@runtime_checkable
class LearnsDurations(Protocol):
    """A `ChunkPolicy` that is notified of each step's duration."""

    def observe_step(
        self, starts: Sequence[int], num_tokens: Sequence[int], step_ms: float
    ) -> None: ...


def is_instance_arg(value: object) -> bool:
    """Whether `value` is an object given by the caller, not a name or a number."""
    return value is not None and not isinstance(value, str | int | float | dict)


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """The configuration of speculative decoding. `method` is `"ngram"` (look up what followed the
    last `max_ngram` to `min_ngram` tokens before), `"draft"` (run the draft model `model`, a
    directory or hub id with the same vocabulary; None: the shipped draft model) or a `Proposer`
    (chapter 5). At most `num_spec_tokens` draft tokens are proposed per step; with `adaptive`, only
    as many of them as pay off. Raises `ValueError` that names the field."""

    method: Literal["ngram", "draft"] | Proposer
    num_spec_tokens: PositiveInt = 4
    adaptive: bool = True
    model: PathLike | None = None
    max_ngram: PositiveInt = 4
    min_ngram: PositiveInt = 2

    @classmethod
    def make(cls, speculative: dict | Proposer) -> SpeculativeConfig:
        given: dict[str, Any] = (
            speculative if isinstance(speculative, dict) else {"method": speculative}
        )
        known = cls.__dataclass_fields__
        if unknown := given.keys() - known.keys():
            raise ValueError(f"speculative must have only {', '.join(known)}, got {unknown}")
        method = given.get("method")
        num_spec_tokens = getattr(method, "num_spec_tokens", 4)
        return cls(**{"method": method, "num_spec_tokens": num_spec_tokens} | given)

    def __post_init__(self) -> None:
        check_fields(self)
        require(self.min_ngram <= self.max_ngram, "min_ngram", self.min_ngram, "<= max_ngram")
        is_draft = self.model is None or self.method == "draft"
        require(is_draft, "model", self.model, "None without method 'draft'")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """All options of the engine. Raises `ValueError` that names the field, its value and the
    allowed values. Python's garbage collector is shared by the whole process, so a server
    configures it as the demo does (`common/requests/gc_utils.py`), before it makes an engine."""

    model: PathLike | None = None  # a directory or hub id; None: the shipped checkpoint
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
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
    scheduler: Literal["two_phase", "prefill_first", "fcfs"] | Callable[..., BaseScheduler] = (
        "two_phase"
    )
    # Orders the first two's waiting queue: "priority", "lof", "random", "lpm", "lpm-first",
    # "dfs-weight", or your own class as "module:Class".
    policy: str | SchedulePolicy = "fcfs"
    # Share of blocks that "two_phase" keeps for running requests.
    watermark: Annotated[float, Field(ge=0, lt=1)] = 0.01
    # Or "radix"; None: no prefix cache.
    prefix_cache: Literal["hash", "radix"] | Callable[..., PrefixCache] | None = "hash"
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
    attention_backend: Literal["auto", "torch", "triton"] | AttentionBackend = "auto"
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
    preempt_every: PositiveInt | None = None  # preempts a request every so many steps
    emulate_graphs: bool = False  # on a CPU: replays graphs from lists and checks them; slow

    def __post_init__(self) -> None:
        check_fields(self)
        if isinstance(self.policy, str) and self.policy not in POLICIES:
            import sglang_policies

            get_policy(self.policy, sglang_policies.POLICIES)
        self._check_what_goes_together()

    def _check_what_goes_together(self) -> None:
        scheduler = self.scheduler
        is_fcfs = scheduler == "fcfs"
        is_own_policy = is_instance_arg(self.chunked_prefill)
        is_own_backend = is_instance_arg(self.attention_backend)
        spec_config = self.speculation
        is_own_proposer = spec_config is not None and is_instance_arg(spec_config.method)
        is_uncached = self.prefix_cache is None
        has_stages = self.pipeline_parallel_size > 1
        is_fixed = self.batch_invariant
        has_tiles = is_own_backend or self.attention_backend == "triton"
        # A field that is not None, whether it is refused, and what it must be.
        rules = (
            ("preempt_every", is_fcfs, "None with scheduler 'fcfs'"),
            ("speculative", is_fcfs, "None with scheduler 'fcfs'"),
            ("policy", is_fcfs and self.policy != "fcfs", "'fcfs' with scheduler 'fcfs'"),
            (
                "chunked_prefill",
                is_fcfs and not isinstance(self.chunked_prefill, bool),
                "True or False with scheduler 'fcfs'",
            ),
            (
                "chunked_prefill",
                has_stages and isinstance(self.chunked_prefill, LearnsDurations),
                "without durations in a pipeline, where other steps are in flight",
            ),
            (
                "mixing",
                self.mixing and scheduler != "prefill_first",
                f"False with scheduler {scheduler!r}",
            ),
            ("target_step_ms", not self.cuts_prompts, "None if prompts are not cut"),
            ("target_step_ms", has_stages, "None in a pipeline, where other steps are in flight"),
            ("target_step_ms", is_own_policy, "None: this chunked_prefill has its own"),
            (
                "max_long_partial_prefills",
                scheduler != "two_phase" or self.chunk_size is None,
                "None unless scheduler is 'two_phase' and chunked_prefill a number",
            ),
            ("kv_tiers", is_uncached, "None without a prefix_cache"),
            ("kv_connector", is_uncached, "None without a prefix_cache"),
            ("kv_connector", self.kv_tiers is not None, "None with kv_tiers"),
            (
                "attention_backend",
                is_own_backend and self.has_workers,
                "a name, because the model is in other processes",
            ),
            (
                "speculative",
                is_own_proposer and self.has_workers,
                "a name, because the model is in other processes",
            ),
            ("attention_backend", is_fixed and has_tiles, "'torch' with batch_invariant=True"),
            (
                "tensor_parallel_size",
                is_fixed and self.tensor_parallel_size > 1,
                "1 with batch_invariant=True",
            ),
            ("compile", is_fixed and self.compile is True, "False with batch_invariant=True"),
            ("adapters", is_fixed, "None with batch_invariant=True"),
            ("max_loras", is_fixed, "None with batch_invariant=True"),
            ("pack_weights", is_fixed and not self.pack_weights, "True with batch_invariant=True"),
            ("emulate_graphs", self.emulate_graphs and self.enforce_eager, "False: enforce_eager"),
        )
        for name, is_refused, allowed in rules:
            value = getattr(self, name)
            require(value is None or not is_refused, name, value, allowed)

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
        return self.chunked_prefill is not False and self.scheduler != "fcfs"

    @property
    def needs_ends_of_steps(self) -> str | None:
        """The option that keeps a step from being planned while the previous one runs, or None."""
        if self.speculative is not None:
            return "speculative"
        if self.target_step_ms is not None:
            return "target_step_ms"
        return "this chunked_prefill" if isinstance(self.chunked_prefill, LearnsDurations) else None

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
        is_wanted = self.compile is True
        if self.compile == "auto":
            # The number of rows in a step decides what runs compiled, and so would change the bits.
            is_wanted = num_parameters >= COMPILE_FROM_PARAMETERS and not self.batch_invariant
        return is_wanted and device.type == "cpu"

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
        num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if self.device == "auto":
            return torch.device("cuda" if num_gpus else "cpu")
        device = torch.device(self.device)
        is_there = device.type == "cpu" or (device.index or 0) < num_gpus
        allowed = f"below 'cuda:{num_gpus}'" if num_gpus else "'cpu' without a CUDA device"
        require(is_there, "device", self.device, allowed)
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
