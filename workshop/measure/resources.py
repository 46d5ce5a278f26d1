"""The gate: every kernel, compiled for GPUs that are not there, fits them.

    python -m workshop.resources

Triton compiles for any GPU on any machine, down to machine code, and `cuobjdump`, which comes with
Triton, reads registers and spills from that code. Checked: kernels of 16 bits on sm_90 spill
nothing to memory, the others a few values; shared memory fits the smallest GPU of a kind; products
of 16 bits and tf32x3 use the tensor cores; kernels that promise bitwise equality with their
specification have no operation that could round otherwise. Whether a kernel is fast needs a GPU.
Must run without TRITON_INTERPRET."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from common.engine_config import EngineConfig
from common.runner.launch_configurations import attention_shape, launch_configurations
from kernel_launch import DEFAULT_ARCHITECTURE, Launch
from paged_attention_triton import write_kv_launch
from workshop.measure.bench.random_weights import QWEN3_0_6B, shape_of

# Hidden and inner size, heads, KV heads, head size, vocabulary.
_SIZES = {
    "Qwen2.5-7B": (3584, 18944, 28, 4, 128, 152064),
    "Llama-3.2-1B": (2048, 8192, 32, 8, 64, 128256),
    "Mistral-7B-v0.1": (4096, 14336, 32, 8, 128, 32000),
}
FAMILIES = {
    "Qwen3-0.6B": QWEN3_0_6B,
    "Qwen3-32B": shape_of(28, 5120, 25600, 64, 8, 128, 151936),
    **{name: shape_of(28, *sizes, has_qk_norm=False) for name, sizes in _SIZES.items()},
}
_WINDOWS = {"Mistral-7B-v0.1": (None, 4096)}
# For a program, on the smallest GPU of a kind: sm_86 and sm_120 have as much as sm_89.
SHARED_BYTES = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
TENSOR_CORES = ("wgmma.mma_async", "tcgen05.mma", "mma.sync")
# Operations that IEEE 754 does not define, or that round once where PyTorch rounds twice.
INEXACT = re.compile(r"\b(?:(?:fma|rcp|rsqrt|ex2|lg2)\.|\w+\.(?:full|approx)\.)\S*f(?:32|64)")
KINDS = ("bfloat16", "float16", "float32", "float32 as tf32x3")
# Bytes of stack a thread: a few values. The kernels that have them differ with Triton's version.
FEW_STACK_BYTES = 64
CHUNKED = EngineConfig(speculative={"method": "draft"})
WHOLE = EngineConfig(chunked_prefill=False)
Wanted = tuple[str, str, int, EngineConfig]  # family, kind, architecture


@dataclass(frozen=True, slots=True)
class Resources:
    """The resources of one compiled kernel."""

    name: str
    kind: str
    architecture: int
    stack_bytes: int  # of a thread, in memory: spilled registers
    shared_bytes: int  # of a program
    has_product: bool
    tensor_cores: str  # the instruction
    inexact: str = ""  # an inexact operation, where none is allowed

    def complaints(self) -> Iterator[str]:
        is_main = self.architecture == DEFAULT_ARCHITECTURE and not self.kind.startswith("float32")
        if self.stack_bytes > (0 if is_main else FEW_STACK_BYTES):
            yield f"{self.name} has {self.stack_bytes} bytes of stack a thread"
        if self.shared_bytes > SHARED_BYTES[self.architecture]:
            yield f"{self.name} wants {self.shared_bytes} bytes of shared memory"
        if self.has_product and self.kind != "float32" and not self.tensor_cores:
            yield f"{self.name} does not use the tensor cores"
        if self.inexact:
            yield f"{self.name} has {self.inexact}, which its specification does not have"


def compile_launch(launch: Launch, family: str, kind: str, architecture: int) -> Resources:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = list(launch.kernel.arg_names)
    assert {*names} == {*launch.arguments, *launch.constants}, launch
    signature = {name: launch.arguments.get(name, "constexpr") for name in names}
    constants = {(names.index(name),): value for name, value in launch.constants.items()}
    # PyTorch's memory begins at multiples of 16 bytes and more.
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if signature[name][0] == "*" and name not in launch.unaligned
    }
    source = ASTSource(launch.kernel, signature, constexprs=constants, attrs=aligned)
    target = GPUTarget("cuda", architecture, 32)
    compiled = triton.compile(source, target=target, options=launch.options)
    ptx, tile = compiled.asm["ptx"], launch.constants.get("BLOCK_M")
    kernel = launch.kernel.__name__.strip("_")
    return Resources(
        f"{kernel}, {family}, {kind}, sm_{architecture}, {tile} rows",
        kind,
        architecture,
        stack_bytes(compiled.asm["cubin"]),
        compiled.metadata.shared,
        tile is not None and "merge" not in kernel,
        next((name for name in TENSOR_CORES if name in ptx), ""),
        "" if launch.enable_fp_fusion else next(iter(INEXACT.findall(ptx)), ""),
    )


def stack_bytes(cubin: bytes) -> int:
    import triton

    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [cuobjdump, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (found,) = re.findall(r"REG:\d+ STACK:(\d+)", text)
    return int(found)


def launches_of(family: str, kind: str, architecture: int, engine: EngineConfig) -> list[Launch]:
    """An engine's launches, and `write_kv` of a backend of chapter 2 or 6 by itself, which the
    engine replaces by another kernel."""
    dtype, model = getattr(torch, kind.partition(" ")[0]), FAMILIES[family]
    precision = kind.partition(" as ")[2] or "ieee"
    shape = attention_shape(model, engine, dtype, architecture, precision, False)
    windows = _WINDOWS.get(family, (None,))
    launches = launch_configurations(
        model, engine, dtype, architecture, float32_precision=precision, windows=windows
    )
    sizes = shape.num_kv_heads, shape.head_dim, shape.block_size, dtype
    strides = (shape.head_dim * (shape.num_heads + n * shape.num_kv_heads) for n in (1, 2))
    return [*launches, write_kv_launch(*sizes, *strides, shape.cache_strides)]


def wanted() -> Iterator[Wanted]:
    """sm_90 every family, every dtype once; sm_80 and sm_100 every kernel once."""
    first = "Qwen3-0.6B"
    for architecture in (80, 90, 100):
        yield first, "bfloat16", architecture, WHOLE
        yield first, "bfloat16", architecture, CHUNKED
    yield from ((first, kind, 90, CHUNKED) for kind in KINDS[1:])
    yield from ((family, "bfloat16", 90, CHUNKED) for family in FAMILIES if family != first)


def compile_all(every: int = 1) -> list[Resources]:
    """Compile each machine code once, though several engines launch it: one in `every`, and the
    first of each kernel, family, dtype and architecture."""
    launches: dict[str, tuple[Launch, str, str, int]] = {}
    for family, kind, architecture, engine in wanted():
        for launch in launches_of(family, kind, architecture, engine):
            name = f"{launch.kernel.__name__} {architecture} {launch}"
            launches.setdefault(name, (launch, family, kind, architecture))
    known: set[object] = set()
    found = []
    for i, one in enumerate(launches.values()):
        new = {one[0].kernel.__name__, *one[1:]}
        if i % every == 0 or not known.issuperset(new):
            known |= new
            found.append(compile_launch(*one))
    return found


def main(arguments: Sequence[str]) -> None:
    found = compile_all(int(arguments[0]) if arguments else 1)
    print(f"{len(found)} compiled, for {sorted({one.architecture for one in found})}")
    if complaints := [complaint for one in found for complaint in one.complaints()]:
        raise SystemExit("\n".join(complaints))


if __name__ == "__main__":
    main(sys.argv[1:])
