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

# Only the fields that kernels depend on are those of the model.
_PLAIN = {"has_qk_norm": False}
_WINDOWS = {"layer_windows": (None, 4096)}
FAMILIES = {
    "Qwen3-0.6B": QWEN3_0_6B,
    "Llama-3.1-8B": shape_of(28, 4096, 14336, 32, 8, 128, 128256, **_PLAIN),
    "Qwen3-32B": shape_of(28, 5120, 25600, 64, 8, 128, 151936),
    "Qwen2.5-7B": shape_of(28, 3584, 18944, 28, 4, 128, 152064, **_PLAIN),
    "Qwen2.5-0.5B": shape_of(28, 896, 4864, 14, 2, 64, 151936, **_PLAIN),
    "Llama-3.2-1B": shape_of(28, 2048, 8192, 32, 8, 64, 128256, **_PLAIN),
    "Mistral-7B-v0.1": shape_of(28, 4096, 14336, 32, 8, 128, 32000, **_PLAIN, **_WINDOWS),
}
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
    if missing := set(names) ^ (set(launch.arguments) | set(launch.constants)):
        raise ValueError(f"{launch.kernel}: {sorted(missing)} must be in both kernel and launch")
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
    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return Resources(
        f"{kernel}, {family}, {kind}, sm_{architecture}, {tile} rows",
        kind,
        architecture,
        stack_bytes(compiled.asm["cubin"], cuobjdump),
        compiled.metadata.shared,
        tile is not None and "merge" not in kernel,
        next((name for name in TENSOR_CORES if name in ptx), ""),
        "" if launch.enable_fp_fusion else next(iter(INEXACT.findall(ptx)), ""),
    )


def stack_bytes(cubin: bytes, cuobjdump: Path) -> int:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [cuobjdump, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:\d+ STACK:(\d+)", text)
    if found is None:
        raise RuntimeError(f"cuobjdump returned no registers: {text}")
    return int(found.group(1))


def launches_of(family: str, kind: str, architecture: int, engine: EngineConfig) -> list[Launch]:
    """An engine's launches, and `write_kv` of a backend of chapter 2 or 6 by itself, which the
    engine replaces by another kernel."""
    (dtype, precision), model = KINDS[kind], FAMILIES[family]
    shape = attention_shape(model, engine, dtype, architecture, precision, False)
    how = {"float32_precision": precision, "windows": model.layer_windows or (None,)}
    launches = launch_configurations(model, engine, dtype, architecture, **how)
    heads = shape.num_kv_heads, shape.head_dim, shape.block_size, dtype
    num_heads = shape.num_heads + shape.num_kv_heads
    strides = num_heads * shape.head_dim, (num_heads + shape.num_kv_heads) * shape.head_dim
    return [*launches, write_kv_launch(*heads, *strides, shape.cache_strides)]


def wanted() -> list[Wanted]:
    """sm_90 every family, every dtype once; sm_80 and sm_100 every kernel once."""
    first, others = "Qwen3-0.6B", [kind for kind in KINDS if kind != "bfloat16"]
    found: list[Wanted] = [(family, "bfloat16", 90, CHUNKED) for family in FAMILIES]
    found += [(first, kind, 90, CHUNKED) for kind in others]
    found += [(first, "bfloat16", architecture, CHUNKED) for architecture in (80, 100)]
    return found + [(first, "bfloat16", architecture, WHOLE) for architecture in (80, 90, 100)]


def compile_all(every: int = 1) -> list[Resources]:
    """Compile each machine code once, though several engines launch it: one in `every`, and the
    first of each kernel, family, dtype and architecture."""
    launches = {
        f"{launch.kernel.__name__} {one[2]} {launch}": (launch, one)
        for one in reversed(wanted())
        for launch in launches_of(*one)
    }
    known: set[object] = set()
    found = []
    for i, (launch, (family, kind, architecture, _)) in enumerate(reversed(launches.values())):
        new = {family, kind, architecture, launch.kernel.__name__}
        if i % every == 0 or not known.issuperset(new):
            known |= new
            found.append(compile_launch(launch, family, kind, architecture))
    return found


def main(arguments: Sequence[str]) -> None:
    found = compile_all(int(arguments[0]) if arguments else 1)
    print(f"{len(found)} compiled, for {sorted({one.architecture for one in found})}")
    if complaints := [complaint for one in found for complaint in one.complaints()]:
        raise SystemExit("\n".join(complaints))


if __name__ == "__main__":
    main(sys.argv[1:])
