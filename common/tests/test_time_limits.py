"""Wrong code is reported soon: no test may hang, and no search for a smaller example is made."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import Phase, settings

ROOT = Path(__file__).parents[2]
HANGS = """
import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

def test_hangs():
    while True:
        pass

@pytest.mark.slow
def test_may_take_its_time():
    import time
    time.sleep(2.5)

calls = []

@settings(max_examples=50, database=None)
@given(st.lists(st.integers()))
def test_finds_a_large_one(xs):
    calls.append(xs)
    assert sum(xs) < 10**6

def test_did_not_look_for_a_smaller_one():
    first = next(i for i, xs in enumerate(calls) if sum(xs) >= 10**6)
    assert len(calls) - first < 55
"""

GRID = """
import pytest

@pytest.fixture(params="xy")
def cache(request):
    return request.param

@pytest.mark.sample(seed=2)
@pytest.mark.parametrize("kind", "abc")
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("low, high", [(1, 2), (3, 4)])
def test_a_grid(kind, seed, low, high, cache):
    pass
"""

STARTS_A_PROCESS = """
import subprocess
import pytest

def test_starts_one():
    subprocess.run(["true"])

def test_starts_none():
    pass

@pytest.mark.slow
def test_is_slow():
    pass
"""

BESIDE_A_GPU = """
import subprocess
import sys

import pytest
import torch

torch.cuda.is_available = lambda: True  # before it is imported that asks for it
torch.cuda.init = torch.cuda.device_count = lambda: 1

from common.engine_config import EngineConfig
from common.tests.kernel_device import device
from kernel_launch import Launch

def is_gpu(request):
    return request.node.get_closest_marker("gpu") is not None

def test_of_a_kernel(device, request):
    assert device.type == "cuda" and is_gpu(request)

@pytest.mark.parametrize("device", ["cpu"])
def test_of_both(device, request):
    assert not is_gpu(request)

@pytest.mark.gpu
def test_of_an_engine_there():
    assert EngineConfig(device="cuda").resolve_device().type == "cuda"

def test_of_an_engine(request):
    assert EngineConfig().resolve_device().type == "cpu" and not is_gpu(request)
    code = "import os; print(repr(os.environ['CUDA_VISIBLE_DEVICES']))"
    assert subprocess.check_output([sys.executable, "-c", code]) == b"''\\n"

def test_of_an_interpreted_kernel():
    Launch(None, {}, {})((1,), torch.zeros(1))
"""
WITHOUT_A_GPU = """
import pytest

@pytest.mark.gpu
def test_of_an_engine_there():
    pass
"""


@pytest.mark.parametrize("jobs", [pytest.param([], marks=pytest.mark.slow), ["-n1"]])
def test_a_test_that_hangs_fails_and_the_others_go_on(jobs: list[str], tmp_path: Path) -> None:
    """Trap 62. With this repository's settings, but for the limit: 1 s."""
    (tmp_path / "conftest.py").write_text((ROOT / "conftest.py").read_text(encoding="utf-8"))
    (tmp_path / "test_hangs.py").write_text(HANGS)
    (tmp_path / "pytest.ini").write_text("[pytest]\ntimeout = 1\nmarkers =\n    slow: slow\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-v", *jobs, str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    said = done.stdout
    assert "Timeout" in said and "2 failed, 2 passed" in said, said
    assert "@reproduce_failure" in said, "how to repeat it"


def run_with_our_conftest(folder: Path, test_files: Iterable[str], code: str, marks: str) -> str:
    """What pytest says of files with that code."""
    for test_file in test_files:
        path = folder / test_file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code)
    (folder / "conftest.py").write_text((ROOT / "conftest.py").read_text(encoding="utf-8"))
    (folder / "pytest.ini").write_text(
        "[pytest]\nmarkers =\n    slow: s\n    sample: s\n    check: c\n    gpu: g\n"
    )
    options = ["-p", "no:cacheprovider", "--import-mode=importlib", "-v", "-rs", "-m", marks]
    command = [sys.executable, "-m", "pytest", *options, str(folder)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240).stdout


def test_of_a_sample_each_value_is_tested_once_and_the_rest_is_slow(tmp_path: Path) -> None:
    kept = run_with_our_conftest(tmp_path, ["test_grid.py"], GRID, "not slow")
    assert "3 passed, 93 deselected" in kept, kept
    for case in ("[x-1-2-0-a]", "[y-3-4-1-b]", "-c]"):
        assert case in kept and "-2-a]" not in kept


def test_a_check_is_of_roots_and_engine_and_starts_no_process(tmp_path: Path) -> None:
    checked = {"common/tests/test_it.py", "01_batching/test_it.py"}
    others = {"workshop/watch/test_it.py", "01_batching/testing/test_it.py"}
    said = run_with_our_conftest(tmp_path, checked | others, STARTS_A_PROCESS, "check")
    for test, outcome in (("test_starts_one", "SKIPPED"), ("test_starts_none", "PASSED")):
        found = re.findall(rf"(\S+)::{test} {outcome}", said)
        assert set(found) == checked and len(found) == 2, said
    assert "2 passed, 2 skipped" in said, said


def test_beside_a_gpu_kernels_are_tested_there_and_the_engine_on_the_cpu(tmp_path: Path) -> None:
    """The GPU is pretended. Before, each engine whose test names no device was CUDA's."""
    there = run_with_our_conftest(tmp_path / "gpu", ["test_it.py"], BESIDE_A_GPU, "not slow")
    assert "4 passed, 1 skipped" in there, there
    assert "test_of_an_interpreted_kernel SKIPPED" in there and "take no CPU tensor" in there
    without = run_with_our_conftest(tmp_path / "none", ["test_it.py"], WITHOUT_A_GPU, "gpu")
    assert "1 skipped" in without and "needs a CUDA device" in without, without


def test_single_settings_keep_what_the_profile_says(pytestconfig: pytest.Config) -> None:
    assert float(pytestconfig.getini("timeout")) > 0
    own = settings(max_examples=7)
    assert own.print_blob and own.deadline is None
    is_asked_for = pytestconfig.getoption("--hypothesis-profile") == "shrink"
    assert (Phase.shrink in own.phases) == is_asked_for != own.derandomize
