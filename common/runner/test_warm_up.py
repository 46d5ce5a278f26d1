"""Warm-up compiles everything: later launches find their machine code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from common.assembly import assembly
from common.engine import EngineConfig, LLMEngine
from common.engine_config import SHIPPED_CHECKPOINT
from common.models.loader import load_model
from common.runner import warm_up
from common.runner.launch_configurations import launch_configurations
from workshop.measure.bench.bench_record import ROOT

CPU = torch.device("cpu")
pytestmark = pytest.mark.needs("triton")

# In a process of its own, without the interpreter, and with a driver of a GPU that is not there:
# Triton's own cache says what it would have to compile.
PROGRAM = """
import json
import sys
from dataclasses import replace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import MockTensor

from workshop.measure.bench.random_weights import QWEN3_0_6B
from common.engine_config import EngineConfig
from common.runner import warm_up
from common.runner.launch_configurations import launch_configurations


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
triton.compiler.CompiledKernel._init_handles = lambda self: loaded.append(self.name)
torch.cuda.device = lambda device: __import__("contextlib").nullcontext()
loaded = []
engine = EngineConfig(speculative={"method": "draft"})
launches = launch_configurations(QWEN3_0_6B, engine, torch.bfloat16, draft=QWEN3_0_6B)
names = [f"{one.kernel.__name__} {one.constants} {one.arguments}" for one in launches]
sample = list(dict.fromkeys(names))[:: int(sys.argv[1])]
launches = [one for one, name in zip(launches, names) if name in sample]
number = warm_up.warm_up(launches, torch.device("cuda"))


def num_compiled():
    kernels = {launch.kernel for launch in launches}
    return sum(len(caches[0]) for k in kernels for caches in k.device_caches.values())


after_warm_up, later = num_compiled(), []
# Lengths of 1, 16 and others; views that begin anywhere, where a launch says that they may.
for value, address in ((1, 0), (16, 48), (7, 8), (100_003, 8)):
    for launch in launches:
        arguments = []
        for name in launch.kernel.arg_names:
            kind = launch.arguments.get(name)
            if kind is None:
                continue
            if kind[0] == "*":
                dtype = warm_up._DTYPES[kind[1:]]
                arguments.append(At(dtype, address if name in launch.unaligned else 16 * value))
            else:
                arguments.append(0.37 * value if kind[0] == "f" else value)
        constants = {**launch.constants, **launch.options}
        launch.kernel.warmup(*arguments, grid=(value,), **constants)
    later.append(num_compiled())
print(json.dumps([len(launches), len(sample), number, len(loaded), after_warm_up, *later]))
"""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("every", [6, pytest.param(1, marks=pytest.mark.slow)])
def test_nothing_is_compiled_after_the_warm_up(every: int) -> None:
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
    num_launches, num_distinct, number, num_loaded, compiled, *later = json.loads(
        result.stdout.splitlines()[-1]
    )
    assert number == num_loaded == num_launches
    assert compiled == num_distinct < num_launches, "what two models share is compiled once"
    assert later == [compiled] * 4, "a launch would have waited for the compiler"


def test_an_engine_compiles_all_of_its_launches_and_only_on_a_gpu(monkeypatch) -> None:
    found = []
    monkeypatch.setattr(warm_up, "warm_up", lambda *arguments: found.append(arguments))
    loaded, draft = (load_model(SHIPPED_CHECKPOINT, torch.float32, CPU) for _ in range(2))
    config = EngineConfig(num_blocks=9, attention_backend="triton", speculative={"method": "draft"})
    LLMEngine(config, loaded=loaded, draft=draft)
    assert not found, "the interpreter compiles nothing"
    monkeypatch.setattr(loaded.model, "groups", replace(loaded.model.groups, windows=(None, 7)))
    assembly.compile_kernels(config, loaded.model, draft.model, 4000)
    options = {"draft": draft.config, "vocab_size": 4000, "windows": (None, 7)}
    launches = launch_configurations(loaded.config, config, torch.float32, **options)
    assert found == [(launches, CPU)]
