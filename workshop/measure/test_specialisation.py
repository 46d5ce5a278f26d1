"""No kernel is specialised to lengths: a launch with other ones finds its machine code."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from workshop.measure.bench.bench_record import ROOT

pytestmark = pytest.mark.needs("triton")

# In a process of its own, without the interpreter, and with a driver of a GPU that is not there:
# Triton's own cache says what it would have to compile.
PROGRAM = """
import json
import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import MockTensor

from workshop.measure.bench.random_weights import QWEN3_0_6B
from common.engine_config import EngineConfig
from kernel_launch import TRITON_TYPES
from workshop.measure.launch_configurations import attention_shape, launch_configurations


class Driver:
    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


class At(MockTensor):
    def __init__(self, dtype, address):
        super().__init__(dtype)
        self.data_ptr = lambda: address


triton.runtime.driver.set_active(Driver())
DTYPES = {name: dtype for dtype, name in TRITON_TYPES.items()}
engine = EngineConfig(speculative={"method": "draft"})
shape = attention_shape(QWEN3_0_6B, engine, torch.bfloat16)
launches = 2 * launch_configurations(QWEN3_0_6B, engine, shape)  # two models
names = [f"{one.kernel.__name__} {one.constants} {one.arguments}" for one in launches]
sample = list(dict.fromkeys(names))[:: int(sys.argv[1])]
launches = [one for one, name in zip(launches, names) if name in sample]


def stand_in(kind):  # Triton replaces a dtype by an aligned tensor
    if kind[0] == "*":
        return DTYPES[kind[1:]]
    return 1.0 if kind[0] == "f" else 1


for launch in launches:
    names = launch.kernel.arg_names
    arguments = [stand_in(launch.arguments[name]) for name in names if name in launch.arguments]
    launch.kernel.warmup(*arguments, grid=(1,), **launch.constants, **launch.options)


def num_compiled():
    kernels = {launch.kernel for launch in launches}
    return sum(len(caches[0]) for k in kernels for caches in k.device_caches.values())


first, later = num_compiled(), []
# Lengths of 1, 16 and others; views that begin anywhere, where a launch says that they may.
for value, address in ((1, 0), (16, 48), (7, 8), (100_003, 8)):
    for launch in launches:
        arguments = []
        for name in launch.kernel.arg_names:
            kind = launch.arguments.get(name)
            if kind is None:
                continue
            if kind[0] == "*":
                dtype = DTYPES[kind[1:]]
                arguments.append(At(dtype, address if name in launch.unaligned else 16 * value))
            else:
                arguments.append(0.37 * value if kind[0] == "f" else value)
        constants = {**launch.constants, **launch.options}
        launch.kernel.warmup(*arguments, grid=(value,), **constants)
    later.append(num_compiled())
print(json.dumps([len(launches), len(sample), first, *later]))
"""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("every", [6, pytest.param(1, marks=pytest.mark.slow)])
def test_nothing_is_compiled_again(every: int) -> None:
    """With one launch in `every`."""
    environment = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *sys.path])
    environment["TRITON_CACHE_DIR"] = str(ROOT / "build" / "triton")
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(every)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    num_launches, num_distinct, compiled, *later = json.loads(result.stdout.splitlines()[-1])
    assert compiled == num_distinct < num_launches, "what two models share is compiled once"
    assert later == [compiled] * 4, "a launch would have waited for the compiler"
