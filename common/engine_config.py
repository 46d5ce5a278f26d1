"""What the engine can be told, and what it tells about itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from kv_connector import KVConnector
from policies import POLICIES
from tiered_cache import KVTierConfig

# Does it preempt, and take a policy?
SCHEDULERS = {"two_phase": True, "prefill_first": True, "fcfs": False}
SHIPPED_CHECKPOINT = Path(__file__).parent / "checkpoints" / "tiny"


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything the engine can be told. Raises `ValueError` that names field, value and what is
    allowed.

    `model=None` is the checkpoint that ships with the repository. `num_blocks` counts KV blocks,
    the null block included; None sizes the pool from free memory. `max_model_len` bounds prompt
    plus outputs; None: what the model was made for. `seed` seeds requests that bring no seed of
    their own.

    `prefix_cache` keeps computed prefixes: `"hash"`, `"radix"` or None. `kv_tiers` lets evicted
    blocks go to host memory and disk; `kv_connector` shares them with other engines.

    `scheduler` is `"two_phase"` or `"prefill_first"` (chapter 4: both fill the memory, and preempt
    when it runs out) or `"fcfs"` (chapter 1: reserves everything at admission). `policy` orders
    the waiting queue of the former two: `"fcfs"`, `"priority"`, `"lpm"`, `"dfs-weight"`, `"lof"`,
    `"random"`. `watermark` is the share of the blocks that an admission of the two-phase scheduler
    leaves to those who run.

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
    chunked_prefill: bool | int = False
    speculative: dict | None = None
    attention_backend: str = "auto"
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
            if value is None and name in optional:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise ValueError(f"{name} is {value!r}: it must be an integer >= {low}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ValueError(f"seed is {self.seed!r}: it must be an integer")
        if not (self.model is None or (isinstance(self.model, str | Path) and str(self.model))):
            raise ValueError(f"model is {self.model!r}: it must be a directory, a hub id or None")
        choices = {
            "scheduler": tuple(SCHEDULERS),
            "policy": tuple(POLICIES) if SCHEDULERS.get(self.scheduler) else ("fcfs",),
            "prefix_cache": (None, "hash", "radix"),
            "chunked_prefill": (False,),
            "speculative": (None,),
            "attention_backend": ("auto", "torch", "triton"),
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
        if self.preempt_every is not None and not SCHEDULERS[self.scheduler]:
            raise ValueError(
                f"preempt_every is {self.preempt_every!r}: it must be None, since scheduler "
                f"{self.scheduler!r} never preempts"
            )
        parts = {"kv_tiers": KVTierConfig, "kv_connector": KVConnector}
        for name, kind in parts.items():
            value = getattr(self, name)
            if value is None:
                continue
            if not isinstance(value, kind):
                raise ValueError(f"{name} is {value!r}: it must be None or a {kind.__name__}")
            if self.prefix_cache is None:
                raise ValueError(f"{name} is {value!r}: it needs a prefix_cache, which is None")

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
    kv_waste: float = 0.0  # share of the held slots in which nothing is written, mean over steps
