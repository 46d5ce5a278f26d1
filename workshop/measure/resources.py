"""The needs of every kernel on a GPU that is not there: registers, shared memory, spills.

Triton compiles for any GPU on any machine, down to machine code, and `cuobjdump`, which comes with
Triton, reads the needs from that code. A kernel that is right but slow for want of registers is
found here and not on the first rented GPU.

    python -m workshop.resources
                          what `make test` checks: sm_90 every family, sm_80 and sm_100 once
        --all             every architecture and dtype

Checked, with Triton 3.6 and 3.9: kernels of 16 bits on sm_90 spill nothing to memory, the others a
few values, except the ones in `ALLOWED_STACK_BYTES`; shared memory fits the smallest GPU of a kind;
products of 16 bits and tf32x3 use the tensor cores; kernels that promise bitwise equality with
their specification have no operation that could round otherwise. Not checked, because it needs a
GPU: whether the kernel is fast. Must run without TRITON_INTERPRET.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch

from common.engine_config import EngineConfig
from common.runner.launch_configurations import attention_shape, launch_configurations
from kernel_launch import DEFAULT_ARCHITECTURE, DecodeTuning, Launch
from paged_attention_triton import write_kv_launch
from split_attention_triton import split_launch
from workshop.measure.bench.random_weights import QWEN3_0_6B, shape_of

# Only the fields that kernels depend on are those of the model.
_PLAIN = {"has_qk_norm": False}
FAMILIES = {
    "Qwen3-0.6B": QWEN3_0_6B,
    "Llama-3.1-8B": shape_of(28, 4096, 14336, 32, 8, 128, 128256, **_PLAIN),
    "Qwen3-32B": shape_of(28, 5120, 25600, 64, 8, 128, 151936),
    "Qwen2.5-7B": shape_of(28, 3584, 18944, 28, 4, 128, 152064, **_PLAIN),
    "Qwen2.5-0.5B": shape_of(28, 896, 4864, 14, 2, 64, 151936, **_PLAIN),
    "Llama-3.2-1B": shape_of(28, 2048, 8192, 32, 8, 64, 128256, **_PLAIN),
    "Mistral-7B-v0.1": shape_of(
        28, 4096, 14336, 32, 8, 128, 32000, **_PLAIN, layer_windows=(None, 4096)
    ),
}
LARGE_HEADS = {
    "head_dim 256": shape_of(28, 4096, 8192, 16, 8, 256, 151936),
    "Gemma-3-4B": shape_of(28, 2560, 10240, 8, 4, 256, 262208, layer_windows=(None, 1024)),
}
ARCHITECTURES = (80, 89, 90, 100, 120)
# For a program, on the smallest GPU of a kind: sm_86 and sm_120 have as much as sm_89.
SHARED_BYTES = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
TENSOR_CORES = ("wgmma.mma_async", "tcgen05.mma", "mma.sync")
# Operations that IEEE 754 does not define, or that round once where PyTorch rounds twice.
INEXACT = re.compile(r"\b(?:(?:fma|rcp|rsqrt|ex2|lg2)\.|\w+\.(?:full|approx)\.)\S*f(?:32|64)")
KINDS = {
    "bfloat16": (torch.bfloat16, "ieee"),
    "float16": (torch.float16, "ieee"),
    "float32": (torch.float32, "ieee"),
    "float32 as tf32x3": (torch.float32, "tf32x3"),
}
# Bytes of stack a thread: a few values. The kernels that have them differ with Triton's version.
FEW_STACK_BYTES = 64
# Higher limits, by (kernel, kind, family, architecture, tile): a vocabulary of 262,208 in one row.
ALLOWED_STACK_BYTES: dict[tuple[str, str, str, int, str], int] = {
    ("draw_kernel", "bfloat16", "Gemma-3-4B", 120, ""): 112,
}
# Decode attention, in addition to the default: constants that `make gpu ARGS=tune` may try, with
# splits of any length and either order of the grid. Four stages give the machine code of three.
TUNINGS = tuple(
    DecodeTuning(tile_keys=keys, num_warps=warps, num_stages=stages)
    for keys, warps, stages in (
        (32, 4, 3), (32, 4, 5), (32, 4, 7), (64, 4, 5), (64, 4, 7), (64, 8, 3),
        (128, 4, 3), (128, 4, 5), (128, 4, 7),
    )
)  # fmt: skip
CHUNKED = EngineConfig(speculative={"method": "draft"})
WHOLE = EngineConfig(chunked_prefill=False)


@dataclass(frozen=True, slots=True)
class Resources:
    """The resources of one compiled kernel."""

    kernel: str
    family: str
    kind: str
    architecture: int
    tile: str  # query rows x keys; "": the kernel has none
    num_warps: int
    registers: int  # of a thread
    stack_bytes: int  # of a thread, in memory: spilled registers
    shared_bytes: int  # of a program
    tensor_cores: str  # the instruction
    inexact: str = ""  # an inexact operation, where none is allowed

    @property
    def has_product(self) -> bool:
        return self.tile != "" and "merge" not in self.kernel

    def complaints(self) -> Iterator[str]:
        where = (self.kernel, self.kind, self.family, self.architecture, self.tile)
        is_main = self.architecture == DEFAULT_ARCHITECTURE and not self.kind.startswith("float32")
        allowed = ALLOWED_STACK_BYTES.get(where, 0 if is_main else FEW_STACK_BYTES)
        if self.stack_bytes > allowed:
            yield f"{where} has {self.stack_bytes} bytes of stack a thread"
        if self.shared_bytes > SHARED_BYTES[self.architecture]:
            yield f"{where} wants {self.shared_bytes} bytes of shared memory"
        if self.has_product and self.kind != "float32" and not self.tensor_cores:
            yield f"{where} does not use the tensor cores"
        if self.inexact:
            yield f"{where} has {self.inexact}, which its specification does not have"


def compile_launch(launch: Launch, architecture: int, family: str, kind: str) -> Resources:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = launch.kernel
    names = list(kernel.arg_names)
    missing = set(names) ^ (set(launch.arguments) | set(launch.constants))
    if missing:
        raise ValueError(f"{kernel.__name__}: {sorted(missing)} must be in both kernel and launch")
    signature = {name: launch.arguments.get(name, "constexpr") for name in names}
    constants = {(names.index(name),): value for name, value in launch.constants.items()}
    # PyTorch's memory begins at multiples of 16 bytes and more.
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if signature[name][0] == "*" and name not in launch.unaligned
    }
    source = ASTSource(kernel, signature, constexprs=constants, attrs=aligned)
    target = GPUTarget("cuda", architecture, 32)
    compiled = triton.compile(source, target=target, options=launch.options)
    registers, stack_bytes = read_usage(compiled.asm["cubin"])
    ptx = compiled.asm["ptx"]
    rows, keys = (launch.constants.get(name) for name in ("BLOCK_M", "BLOCK_N"))
    how = ", looping" if launch.constants.get("LOOPS") else ""
    how += ", window" if launch.constants.get("WINDOW") else ""
    return Resources(
        kernel.__name__.strip("_"),
        family,
        kind,
        architecture,
        f"{rows} x {keys}{how}" if rows else "",
        launch.num_warps,
        registers,
        stack_bytes,
        compiled.metadata.shared,
        next((name for name in TENSOR_CORES if name in ptx), ""),
        "" if launch.enable_fp_fusion else next(iter(INEXACT.findall(ptx)), ""),
    )


def read_usage(cubin: bytes) -> tuple[int, int]:
    """Return registers and bytes of stack, of a thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [find_cuobjdump(), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if found is None:
        raise RuntimeError(f"cuobjdump returned no registers: {text}")
    return int(found.group(1)), int(found.group(2))


@cache
def find_cuobjdump() -> str:
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not path.exists():
        raise RuntimeError(
            f"this Triton ({triton.__version__}) has no backends/nvidia/bin/{path.name}"
        )
    return str(path)


@dataclass(frozen=True, slots=True)
class Wanted:
    """The launches of one engine."""

    family: str
    kind: str
    architecture: int
    engine: EngineConfig = CHUNKED
    tuning: DecodeTuning | None = None  # only decode attention, with these constants

    def launches(self) -> list[Launch]:
        """The engine's launches, and `write_kv` of a backend of chapter 2 or 6 by itself, which the
        engine replaces by another kernel."""
        dtype, precision = KINDS[self.kind]
        model = (FAMILIES | LARGE_HEADS)[self.family]
        shape = attention_shape(model, self.engine, dtype, self.architecture, precision, False)
        if self.tuning is not None:
            tuned = shape._replace(tuning=self.tuning)
            return [split_launch(tuned, is_short=True, loops=True)]
        launches = launch_configurations(
            model,
            self.engine,
            dtype,
            self.architecture,
            float32_precision=precision,
            windows=model.layer_windows or (None,),
        )
        heads = shape.num_kv_heads, shape.head_dim, shape.block_size, dtype
        num_heads = shape.num_heads + shape.num_kv_heads
        strides = num_heads * shape.head_dim, (num_heads + shape.num_kv_heads) * shape.head_dim
        return [*launches, write_kv_launch(*heads, *strides, shape.cache_strides)]


def quick() -> list[Wanted]:
    """sm_90 every family, every dtype once; sm_80 and sm_100 every kernel once; every tuning."""
    first = next(iter(FAMILIES))
    wanted = [Wanted(family, "bfloat16", 90) for family in FAMILIES]
    wanted += [Wanted(first, kind, 90) for kind in KINDS if kind != "bfloat16"]
    wanted += [Wanted(first, "bfloat16", architecture) for architecture in (80, 100)]
    wanted += [Wanted(first, "bfloat16", architecture, WHOLE) for architecture in (80, 90, 100)]
    return wanted + [Wanted(first, "bfloat16", 90, tuning=tuning) for tuning in TUNINGS]


def everything() -> list[Wanted]:
    """Every architecture: bfloat16 of every family, other dtypes of each head_dim."""
    first_of_each_size = ["Qwen3-0.6B", "Qwen2.5-0.5B", *LARGE_HEADS]
    tuned = [Wanted("Qwen3-0.6B", "bfloat16", 90, tuning=tuning) for tuning in TUNINGS]
    return tuned + [
        Wanted(family, kind, architecture, engine)
        for architecture in ARCHITECTURES
        for kind in KINDS
        for family in (FAMILIES | LARGE_HEADS if kind == "bfloat16" else first_of_each_size)
        for engine in (CHUNKED, WHOLE)
    ]


def compile_all(wanted: list[Wanted], every: int = 1) -> list[Resources]:
    """Compile each machine code once, though several engines launch it: one in `every`, and the
    first of each kernel, family, dtype and architecture."""
    launches: dict[str, tuple[Wanted, Launch]] = {}
    for one in wanted:
        for launch in one.launches():
            key = f"{launch.kernel.__name__} {one.architecture} {launch.arguments} "
            launches.setdefault(key + f"{launch.constants} {launch.options}", (one, launch))
    known: set[object] = set()
    found = []
    for i, (one, launch) in enumerate(launches.values()):
        where = one.architecture, one.family, one.kind
        if i % every == 0 or not known.issuperset({*where, launch.kernel.__name__}):
            known.update((*where, launch.kernel.__name__))
            found.append(compile_launch(launch, *where))
    return found


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description="What the kernels take of a GPU")
    parser.add_argument("--all", action="store_true", help="half an hour of one core")
    parser.add_argument("--every", type=int, default=1, help="a sample: one in so many")
    parser.add_argument("--json", action="store_true", help="print what was found as JSON")
    options = parser.parse_args(arguments)
    found = compile_all(everything() if options.all else quick(), options.every)
    if options.json:
        print(json.dumps([asdict(one) for one in found]))
    else:
        for one in found:
            print(*asdict(one).values())
    if complaints := [complaint for one in found for complaint in one.complaints()]:
        raise SystemExit("\n".join(complaints))


if __name__ == "__main__":
    main(sys.argv[1:])
