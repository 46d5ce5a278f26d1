"""A default `LLM` loads only the modules that its configuration uses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from common.tests.budgets import LOADED_LINES
from workshop.book.path import ROOT, count_lines

MEASURE = """
import json, sys
from common.llm import LLM

LLM()
print(json.dumps([getattr(module, "__file__", None) for module in list(sys.modules.values())]))
"""


@pytest.fixture(scope="module")
def default() -> dict[str, int]:
    """The modules that `LLM()` loads, in a separate process without a GPU, and their lines."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", MEASURE]
    said = subprocess.check_output(command, cwd=ROOT, env=environment, text=True)
    paths = [Path(name) for name in json.loads(said.splitlines()[-1]) if name]
    ours = [p for p in paths if p.is_relative_to(ROOT) and "site-packages" not in p.parts]
    return {p.relative_to(ROOT).as_posix(): count_lines(p) for p in ours if count_lines(p)}


def test_features_that_are_off_are_not_loaded(default: dict[str, int]) -> None:
    """Only the observer around the loop and the sizing of memory are loaded from outside the
    roots."""
    loaded = set(default)
    assert {"common/llm.py", "01_batching/engine_core.py", "04_scheduler/scheduler.py"} <= loaded
    assert {"03_prefix_cache/prefix_cache_local.py", "06_chunked_prefill/mixed_batch.py"} <= loaded
    assert {name for name in loaded if "/beyond/" in name or "/testing/" in name} == {
        "01_batching/beyond/step_record.py",
        "02_paged_kv/beyond/kv_budget.py",
    }
    others = ("radix_cache", "proposers", "speculating_runner", "rejection_sampler")
    others += ("runner/graphs", "graph_emulator", "kernel_launch", "tensor_attention")
    others += ("common/features/adapters/", "common/features/grammars/")
    assert not [name for name in loaded if any(other in name for other in others)]
    sampling = {name for name in loaded if name.startswith("common/sampling/")}
    parts = ("greedy_rows", "runner_plugin", "sampler", "sampling_columns", "sampling_defaults")
    parts += ("sampling_rules",)
    assert sampling == {f"common/sampling/{name}.py" for name in parts}


def test_loaded_lines_have_a_budget(default: dict[str, int]) -> None:
    num_lines = sum(default.values())
    found = f"LLM() loads {num_lines} lines, its budget is {LOADED_LINES}"
    assert num_lines <= LOADED_LINES, f"{found}; see common/tests/budgets.py"
