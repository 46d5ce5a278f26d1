"""The gate: every kernel, compiled for GPUs that are not there, fits them.

    python -m workshop.resources

Kernels of 16 bits on sm_90 spill nothing to memory, the others a few values; shared memory fits the
smallest GPU of a kind; products of 16 bits use the tensor cores; kernels that promise
bitwise equality have no operation that could round otherwise. Must run without TRITON_INTERPRET."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from common.engine_config import EngineConfig
from kernel_launch import DEFAULT_ARCHITECTURE, Launch
from workshop.measure.bench.random_weights import QWEN3_0_6B, shape_of
from workshop.measure.launch_configurations import launch_configurations

FAMILIES = {
    "Qwen3-0.6B": QWEN3_0_6B,
    "Qwen3-32B": shape_of(28, 5120, 25600, 64, 8, 128, 151936),
    "Qwen2.5-7B": shape_of(28, 3584, 18944, 28, 4, 128, 152064, has_qk_norm=False),
    "Llama-3.2-1B": shape_of(28, 2048, 8192, 32, 8, 64, 128256, has_qk_norm=False),
    "Mistral-7B-v0.1": shape_of(28, 4096, 14336, 32, 8, 128, 32000, has_qk_norm=False),
}
_WINDOWS = {"Mistral-7B-v0.1": (None, 4096)}
# For a program, on the smallest GPU of a kind: sm_86 and sm_120 have as much as sm_89.
SHARED_BYTES = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
TENSOR_CORES = ("wgmma.mma_async", "tcgen05.mma", "mma.sync")
# Operations that IEEE 754 does not define, that round once where PyTorch rounds twice, or that make
# small numbers 0.
INEXACT = re.compile(
    r"\b(?:(?:fma|rcp|rsqrt|ex2|lg2)\.|\w+\.(?:full|approx)\.|[\w.]+\.ftz\.)\S*f(?:32|64)"
)
# Bytes of stack a thread: a few values. The kernels that have them differ with Triton's version.
FEW_BYTES = 64
ENGINE = EngineConfig(speculative={"method": "draft"})
# sm_90 every family, every dtype once; sm_80 and sm_100 every kernel once.
WANTED = [("Qwen3-0.6B", "bfloat16", sm) for sm in (80, 90, 100)]
WANTED += [("Qwen3-0.6B", kind, 90) for kind in ("float16", "float32")]
WANTED += [(family, "bfloat16", 90) for family in FAMILIES]


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

    def complaints(self) -> list[str]:
        is_main = self.architecture == DEFAULT_ARCHITECTURE and self.kind != "float32"
        needs_cores = self.has_product and self.kind != "float32"
        few, room = FEW_BYTES * (not is_main), SHARED_BYTES[self.architecture]
        found = {
            f"has {self.stack_bytes} bytes of stack": self.stack_bytes > few,
            f"wants {self.shared_bytes} bytes of shared memory": self.shared_bytes > room,
            "does not use the tensor cores": needs_cores and not self.tensor_cores,
            f"has {self.inexact}, which its specification has not": self.inexact,
        }
        return [f"{self.name} {complaint}" for complaint, is_so in found.items() if is_so]


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
    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [cuobjdump, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (stack_bytes,) = re.findall(r"REG:\d+ STACK:(\d+)", text)
    return Resources(
        f"{kernel}, {family}, {kind}, sm_{architecture}, {tile} rows",
        kind,
        architecture,
        int(stack_bytes),
        compiled.metadata.shared,
        tile is not None and "merge" not in kernel,
        next((name for name in TENSOR_CORES if name in ptx), ""),
        "" if launch.enable_fp_fusion else next(iter(INEXACT.findall(ptx)), ""),
    )


def launches_of(family: str, kind: str, architecture: int) -> list[Launch]:
    """An engine's launches."""
    windows = _WINDOWS.get(family, (None,))
    return launch_configurations(
        FAMILIES[family], ENGINE, getattr(torch, kind), architecture, windows=windows
    )


def compile_all(every: int = 1) -> list[Resources]:
    """Compile each machine code once, though several engines launch it: one in `every`, and the
    first of each kernel, family, dtype and architecture."""
    launches: dict[str, tuple[Launch, str, str, int]] = {}
    for family, kind, architecture in WANTED:
        for launch in launches_of(family, kind, architecture):
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


def main(every: int = 1) -> None:
    found = compile_all(every)
    print(f"{len(found)} compiled, for {sorted({one.architecture for one in found})}")
    if complaints := [complaint for one in found for complaint in one.complaints()]:
        raise SystemExit("\n".join(complaints))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
