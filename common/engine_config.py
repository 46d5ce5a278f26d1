"""What the engine can be told, and what it tells about itself."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from policies import POLICIES
from request import check_integers

if TYPE_CHECKING:
    from kv_connector import KVConnector
    from tiered_cache import KVTierConfig

# Does it preempt, and take a policy?
SCHEDULERS = {"two_phase": True, "prefill_first": True, "fcfs": False}
CHECKPOINTS = Path(__file__).parent / "checkpoints"
SHIPPED_CHECKPOINT = CHECKPOINTS / "tiny"
SHIPPED_DRAFT = CHECKPOINTS / "tiny-draft"


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """`method` is `"ngram"` (look up what followed the last `max_ngram` to `min_ngram` tokens
    before) or `"draft"` (ask the model `model`, a directory or hub id of the same vocabulary; None:
    the shipped draft model). At most `num_spec_tokens` are guessed at a time; `adaptive`: as many
    of these as pay. Raises `ValueError` that names the field."""

    method: str
    num_spec_tokens: int = 4
    adaptive: bool = True
    model: str | Path | None = None
    max_ngram: int = 4
    min_ngram: int = 2

    @classmethod
    def make(cls, speculative: dict) -> SpeculativeConfig:
        known = list(cls.__dataclass_fields__)
        if not isinstance(speculative, dict) or "method" not in speculative:
            raise ValueError(
                f"speculative is {speculative!r}: it must be None or a dict with a method"
            )
        for name in speculative:
            if name not in known:
                raise ValueError(f"speculative has {name!r}: it may have {', '.join(known)}")
        return cls(**speculative)

    def __post_init__(self) -> None:
        if self.method not in ("ngram", "draft"):
            raise ValueError(f"method is {self.method!r}: it must be 'ngram' or 'draft'")
        for name in ("num_spec_tokens", "min_ngram", "max_ngram"):
            check_integers(1, **{name: getattr(self, name)})
        if self.min_ngram > self.max_ngram:
            raise ValueError(
                f"min_ngram is {self.min_ngram}: it must be <= max_ngram, which is {self.max_ngram}"
            )
        if not isinstance(self.adaptive, bool):
            raise ValueError(f"adaptive is {self.adaptive!r}: it must be True or False")
        if self.model is not None and (self.method != "draft" or not str(self.model)):
            raise ValueError(
                f"model is {self.model!r}: it must be a directory or hub id, for method 'draft'"
            )


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything the engine can be told. Raises `ValueError` that names field, value and what is
    allowed.

    `model=None` is the checkpoint that ships with the repository. `num_blocks` counts KV blocks,
    the null block included; None sizes the pool from free memory. `max_model_len` bounds prompt
    plus outputs; None: what the model was made for. `gpu_memory_utilization` is the share of a
    GPU's memory that weights, activations and KV together may take. `seed` seeds requests that
    bring no seed of their own.

    `prefix_cache` keeps computed prefixes: `"hash"`, `"radix"` or None. `kv_tiers` lets evicted
    blocks go to host memory and disk; `kv_connector` shares them with other engines.

    `speculative`: None, or what `SpeculativeConfig` takes, such as `{"method": "ngram"}` or
    `{"method": "draft", "num_spec_tokens": 3}`.

    `chunked_prefill` computes long prompts in several steps: as much as a step has room for (True),
    or at most so many tokens of a prompt in a step (an integer; with `"prefill_first"`, of all
    prompts together). False: whole, and a prompt must
    fit one step; so it is with scheduler `"fcfs"` always. `target_step_ms`: chunks are as large as
    a step of this length allows. `max_long_partial_prefills`: so many prompts longer than a chunk
    are under way at once. `mixing` puts decodes into the prefill batches of `"prefill_first"`.

    `scheduler` is `"two_phase"` or `"prefill_first"` (chapter 4: both fill the memory, and preempt
    when it runs out) or `"fcfs"` (chapter 1: reserves everything at admission). `policy` orders
    the waiting queue of the former two: `"fcfs"`, `"priority"`, `"lpm"`, `"dfs-weight"`, `"lof"`,
    `"random"`. `watermark` is the share of the blocks that an admission of the two-phase scheduler
    leaves to those who run.

    `pack_weights`: on an x86 CPU, in float32 and bfloat16, matrices are reordered for the processor
    once (`linear.py`). False: read as the checkpoint has them.

    Debug switches: `check_invariants` verifies scheduler and KV manager after every step;
    `shuffle_batch` puts every batch in a random order, `shuffle_waiting` the queue; every
    `preempt_every`-th step preempts somebody. None of them may change any output."""

    model: str | Path | None = None
    device: str = "auto"
    dtype: str | torch.dtype = "auto"
    block_size: int = 16
    num_blocks: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int | None = None
    scheduler: str = "two_phase"
    policy: str = "fcfs"
    watermark: float = 0.01
    prefix_cache: str | None = "hash"
    kv_tiers: KVTierConfig | None = None
    kv_connector: KVConnector | None = None
    chunked_prefill: bool | int = True
    target_step_ms: float | None = None
    max_long_partial_prefills: int | None = None
    mixing: bool = False
    speculative: dict | None = None
    attention_backend: str = "auto"
    pack_weights: bool = True
    gpu_memory_utilization: float = 0.9
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    seed: int = 0
    check_invariants: bool = False
    shuffle_batch: bool = False
    shuffle_waiting: bool = False
    preempt_every: int | None = None

    def __post_init__(self) -> None:
        lowest = {"block_size": 1, "max_num_seqs": 1, "max_num_batched_tokens": 1}
        # The null block and one more; one token in and one out.
        optional = {"num_blocks": 2, "max_model_len": 2, "preempt_every": 1}
        for name, low in (lowest | optional).items():
            value = getattr(self, name)
            if value is not None or name not in optional:
                check_integers(low, **{name: value})
        check_integers(seed=self.seed)
        if not (self.model is None or (isinstance(self.model, str | Path) and str(self.model))):
            raise ValueError(f"model is {self.model!r}: it must be a directory, a hub id or None")
        choices = {
            "scheduler": tuple(SCHEDULERS),
            "policy": tuple(POLICIES) if SCHEDULERS.get(self.scheduler) else ("fcfs",),
            "prefix_cache": (None, "hash", "radix"),
            "mixing": (False, True),
            "attention_backend": ("auto", "torch", "triton"),
            "pack_weights": (True, False),
            "tensor_parallel_size": (1,),
            "pipeline_parallel_size": (1,),
        }
        for name, allowed in choices.items():
            value = getattr(self, name)
            if not any(value is a or (type(value) is type(a) and value == a) for a in allowed):
                shown = ", ".join(repr(a) for a in allowed)
                raise ValueError(f"{name} is {value!r}: this version of the book allows {shown}")
        if isinstance(self.watermark, bool) or not 0 <= self.watermark < 1:
            raise ValueError(f"watermark is {self.watermark!r}: it must be in [0, 1)")
        share = self.gpu_memory_utilization
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            raise ValueError(f"gpu_memory_utilization is {share!r}: it must be in (0, 1]")
        if self.preempt_every is not None and not SCHEDULERS[self.scheduler]:
            raise ValueError(
                f"preempt_every is {self.preempt_every!r}: it must be None, since scheduler "
                f"{self.scheduler!r} never preempts"
            )
        if self.speculation is not None and not SCHEDULERS[self.scheduler]:
            raise ValueError(
                f"speculative is {self.speculative!r}: it must be None, since scheduler "
                f"{self.scheduler!r} does not speculate"
            )
        self._check_chunks()
        if self.kv_tiers is not None or self.kv_connector is not None:
            self._check_connectors()

    def _check_connectors(self) -> None:
        from kv_connector import KVConnector
        from tiered_cache import KVTierConfig

        for name, kind in (("kv_tiers", KVTierConfig), ("kv_connector", KVConnector)):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise ValueError(f"{name} is {value!r}: it must be None or a {kind.__name__}")
            if value is not None and self.prefix_cache is None:
                raise ValueError(f"{name} is {value!r}: it needs a prefix_cache, which is None")

    def _check_chunks(self) -> None:
        size = self.chunked_prefill
        if not isinstance(size, int) or (not isinstance(size, bool) and size < 1):
            raise ValueError(
                f"chunked_prefill is {size!r}: it must be True, False or an integer >= 1"
            )
        chunks = f"scheduler {self.scheduler!r} with chunked_prefill={size!r}"
        if self.chunk_size is not None and self.scheduler == "fcfs":
            raise ValueError(f"chunked_prefill is {size}: scheduler 'fcfs' computes prompts whole")
        if self.mixing and self.scheduler != "prefill_first":
            raise ValueError(
                f"mixing is True: it is for scheduler 'prefill_first', and {self.scheduler!r} has "
                "no other batches"
            )
        target = self.target_step_ms
        if target is not None:
            is_number = isinstance(target, int | float) and not isinstance(target, bool)
            if not (is_number and 0 < target < math.inf):
                raise ValueError(
                    f"target_step_ms is {target!r}: it must be None or > 0, and finite"
                )
            if not self.cuts_prompts:
                raise ValueError(f"target_step_ms is {target!r}: {chunks} does not cut prompts")
        most = self.max_long_partial_prefills
        if most is not None:
            check_integers(1, max_long_partial_prefills=most)
            if self.scheduler != "two_phase" or self.chunk_size is None:
                raise ValueError(
                    f"max_long_partial_prefills is {most}: it needs scheduler 'two_phase' and a "
                    "number as chunked_prefill, which says what is long"
                )

    @property
    def cuts_prompts(self) -> bool:
        return self.chunked_prefill is not False and SCHEDULERS[self.scheduler]

    @property
    def chunk_size(self) -> int | None:
        """`chunked_prefill` if it is a number."""
        return None if isinstance(self.chunked_prefill, bool) else self.chunked_prefill

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """`speculative` as its fields, with their defaults."""
        return None if self.speculative is None else SpeculativeConfig.make(self.speculative)

    @property
    def num_rows_per_request(self) -> int:
        """Rows of logits that a request can have in a step."""
        return 1 if self.speculation is None else 1 + self.speculation.num_spec_tokens

    def resolve_device(self) -> torch.device:
        """`"auto"` is CUDA if there is one. Raises `ValueError` for a device that is not there."""
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            device = torch.device(self.device)
        except (RuntimeError, TypeError):
            device = None
        if device is None or device.type not in ("cpu", "cuda"):
            raise ValueError(f"device is {self.device!r}: it must be 'auto', 'cpu' or 'cuda[:N]'")
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"device is {self.device!r}: this build of torch sees no CUDA device")
        return device


@dataclass(slots=True)
class EngineStats:
    """Totals since the engine was made, and the state right now. Times in seconds."""

    num_steps: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_finished: int = 0  # user's requests that came to their own end
    num_aborted: int = 0
    prompt_tokens: int = 0  # of requests that were admitted, each once
    output_tokens: int = 0
    scheduled_tokens: int = 0
    busy_time: float = 0.0
    kv_blocks_total: int = 0  # usable ones
    kv_blocks_in_use: int = 0  # by requests; what is only cached is not in use
    kv_blocks_cached: int = 0
    cached_tokens: int = 0  # prompt tokens that were found in the prefix cache
    prefix_cache_hit_rate: float = 0.0  # of all prompt tokens of admitted requests
    kv_blocks_peak: int = 0
    num_preemptions: int = 0
    recomputed_tokens: int = 0  # lost by preemption, less what was then found in the prefix cache
    num_passes: int = 0  # a request in a step that yields tokens: output_tokens, if nobody guesses
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    acceptance_by_position: list[float] = field(default_factory=list)
    mean_accepted_length: float = 1.0  # tokens of a pass that had drafts
    tokens_per_pass: float = 0.0
    kv_waste: float = 0.0  # share of the held slots in which nothing is written, mean over steps
