"""The shared parts of `make gpu`: its record, sizes, random inputs, floors and a clock.

The floor of a call is the longer of two times: its bytes, each input read once and each output
written once, at the bandwidth of a large copy, which reads and writes; and its operations, two for
a multiplication and an addition, at the rate of a large product in bfloat16. Both ceilings are
measured in the same process. A share of the roofline is floor / measured time. The clock is
Triton's, of calls in a replayed graph: a launch from Python takes longer than many a kernel runs.
Nothing flushes the cache of the GPU, so inputs are larger than the cache."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from common.models.linear import linear_layers
from common.models.loader import LoadedModel
from common.models.model_config import ModelConfig
from workshop.measure.bench.bench_record import describe_environment, read_record, write_record
from workshop.measure.bench.random_weights import QWEN3_0_6B, random_model, shape_of

BLOCK_SIZE = 16
Cost = tuple[int, int]  # minimum bytes, of 16 bits a number, and minimum operations


@dataclass
class Part:
    """The steps of a part: `results[section][step]` is the result of a step."""

    name: str
    record: Path
    deadline: float  # of time.monotonic()
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # about omitted steps
    errors: list[str] = field(default_factory=list)
    is_over: bool = False

    def attempt(self, section: str, step: str, work: Callable[[], Any], needed_s: float = 1) -> Any:
        """Return the result of `work`, or None if it raised or if time or memory is short."""
        what, found, start = f"{section}, {step}", None, time.perf_counter()
        try:
            if self.deadline - time.monotonic() < needed_s:
                raise TimeoutError("no time is left")
            found = work()
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()  # an error of the device is this step's
            self.results.setdefault(section, {})[step] = found
        except (torch.OutOfMemoryError, MemoryError, TimeoutError) as error:
            self.notes.append(f"{what} is left out: {str(error).partition('. ')[0][:120]}")
        except Exception as error:
            self.fail(what, error)
        print(f"-- {what}: {time.perf_counter() - start:.1f} s: {str(found)[:220]}", flush=True)
        self.keep()
        return found

    def fail(self, what: str, why: object) -> None:
        if isinstance(why, Exception):
            traceback.print_exception(why)
            why = f"{type(why).__name__}: {why}"
        self.errors.append(" ".join(f"{what}: {why}".split())[:600])

    def keep(self, **environment: Any) -> None:
        record, names = read_record(self.record), ("is_over", "notes", "errors", "results")
        record["parts"][self.name] = {name: getattr(self, name) for name in names}
        record["environment"] = environment | record["environment"]  # which may have a given commit
        write_record(self.record, record)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the work, the most telling first: the last ones are cut if time is short."""

    model: ModelConfig
    ceilings: tuple[int, int]  # numbers that are copied, size of the matrices
    prompts: tuple[int, int, int]  # number, longest, tokens out: what answers are compared
    cells: tuple[tuple[int, int], ...]  # of decode steps: sequences, keys of each
    workloads: dict[str, tuple[int, tuple[int, int], tuple[int, int]]]  # requests, in, out
    engine: dict[str, Any]  # options


FULL = Sizes(
    QWEN3_0_6B,
    ceilings=(1 << 30, 8192),
    prompts=(24, 700, 48),
    cells=((64, 2048), (64, 256), (256, 1024), (1, 256), (256, 256), (64, 1024), (128, 2048)),
    workloads={
        "nano-vllm's: 256 requests, 100-1,024 tokens in and out": (256, (100, 1024), (100, 1024)),
        "512 requests, 512 tokens in, 128 out": (512, (512, 512), (128, 128)),
        "prefill: 32 prompts of 1,024 tokens": (32, (1024, 1024), (1, 1)),
    },
    engine={"max_num_seqs": 256, "max_num_batched_tokens": 8192, "max_model_len": 4224},
)
REHEARSAL = Sizes(
    shape_of(1, 32, 48, 4, 2, 16, 33, eos_token_ids=(2,)),
    ceilings=(1 << 15, 32),
    prompts=(2, 9, 3),
    cells=((2, 20), (3, 20)),  # and one that does not fit
    workloads={"2 requests, 3-6 tokens in, 2-3 out": (2, (3, 6), (2, 3))},
    engine={"max_num_seqs": 2, "max_num_batched_tokens": 64, "max_model_len": 64, "num_blocks": 65},
)


def attention_cost(model: ModelConfig, num_seqs: int, context: int) -> Cost:
    """The cost of decodes in one layer: all keys and values, queries and outputs once; a score and
    a weighted value are head_dim products each."""
    width = model.num_attention_heads * model.head_dim
    num_keys, kv_width = num_seqs * context, model.num_key_value_heads * model.head_dim
    return 4 * (num_keys * kv_width + num_seqs * width), 4 * num_keys * width


def decode_cost(model: ModelConfig, num_weights: int, num_seqs: int, context: int) -> Cost:
    """The cost of one token for each sequence: every matrix once (`num_weights` in all), the rows
    of the embedding, attention in every layer. Norms, activations and logits need not leave the
    chip."""
    attention = [model.num_hidden_layers * n for n in attention_cost(model, num_seqs, context)]
    num_bytes = 2 * num_weights + 2 * num_seqs * model.hidden_size + attention[0]
    return num_bytes, 2 * num_seqs * num_weights + attention[1]


@dataclass
class Lab:
    device: torch.device
    sizes: Sizes
    seed: int

    def __post_init__(self) -> None:
        self.generator = torch.Generator(self.device).manual_seed(self.seed)

    @classmethod
    def of(cls, is_rehearsal: bool, seed: int) -> Lab:
        if is_rehearsal:
            return cls(torch.device("cpu"), REHEARSAL, seed)
        if not torch.cuda.is_available():
            raise RuntimeError(
                f"torch {torch.__version__}, built for CUDA {torch.version.cuda}, finds no CUDA "
                "device; run this where there is one, or try it here: make gpu ARGS=rehearse"
            )
        return cls(torch.device("cuda", 0), FULL, seed)

    @property
    def is_rehearsal(self) -> bool:
        return self.device.type == "cpu"

    @cached_property
    def loaded(self) -> LoadedModel:
        """The model with random weights, which take the same time as trained ones."""
        return random_model(self.sizes.model, self.seed, torch.bfloat16, self.device)

    @cached_property
    def num_weights(self) -> int:
        """Weights of all matrices that a step multiplies with: those of the layers, and the
        head."""
        return sum(m.plain_weight().numel() for m in linear_layers(self.loaded.model))

    def normal(self, *shape: int) -> torch.Tensor:
        values = torch.empty(shape, dtype=torch.bfloat16, device=self.device)
        return values.normal_(generator=self.generator)

    def prompts(self, *lengths: int) -> list[list[int]]:
        how = {"device": self.device, "generator": self.generator}
        return [torch.randint(self.sizes.model.vocab_size, (n,), **how).tolist() for n in lengths]

    @cached_property
    def ceilings(self) -> dict[str, list[float]]:
        """Median, lowest, highest of 1e9 bytes and of 1e12 operations a second, with random
        numbers, because zeros are faster."""
        num_copied, n = self.sizes.ceilings
        source, (a, b) = self.normal(num_copied), self.normal(2, n, n)
        target = torch.empty_like(source)
        copied = self.time(partial(target.copy_, source))
        multiplied = self.time(partial(torch.mm, a, b, out=torch.empty_like(a)))
        assert torch.equal(source, target), "the copy differs from its source"
        gb = [float(f"{2 * source.nbytes / copied[i] / 1e6:.5g}") for i in (0, 2, 1)]
        tflop = [float(f"{2 * n**3 / multiplied[i] / 1e9:.5g}") for i in (0, 2, 1)]
        return {"copy_gb_per_s": gb, "matrix_tflop_per_s": tflop}

    def beside_floor(self, ms: list[float], cost: Cost) -> dict[str, Any]:
        reading = cost[0] / (self.ceilings["copy_gb_per_s"][0] * 1e6)
        multiplying = cost[1] / (self.ceilings["matrix_tflop_per_s"][0] * 1e9)
        floor, by = max((reading, "memory"), (multiplying, "arithmetic"))
        return {"ms": ms, "floor_ms": round(floor, 6), "share": round(floor / ms[0], 4), "by": by}

    def time(self, call: Callable[[], Any]) -> list[float]:
        """Return median, lowest, highest milliseconds. `call` must not read a value on the host."""
        if self.is_rehearsal:
            start = time.perf_counter()
            call()
            return [round(1e3 * (time.perf_counter() - start), 5)] * 3
        from triton.testing import do_bench_cudagraph

        found: Any = do_bench_cudagraph(call, rep=50, quantiles=[0.5, 0.0, 1.0])
        return [round(ms, 5) for ms in found]


def describe_here(lab: Lab, part: Part) -> None:
    """Record device, versions and processor."""
    found, device = describe_environment(), {"name": "rehearsal"}
    if not lab.is_rehearsal:
        it = torch.cuda.get_device_properties(lab.device)
        device = {"name": it.name, "memory_bytes": it.total_memory, "cuda": torch.version.cuda}
    part.keep(**found, device=device)
    versions = {name: found[name] for name in ("python", "torch", "triton", "transformers")}
    part.attempt("here", str(device["name"]), lambda: versions)
