"""A default `LLM` loads only the modules that its configuration uses."""

from __future__ import annotations

from common.tests.budgets import LOADED_LINES
from workshop.book import path


def test_features_that_are_off_are_not_loaded() -> None:
    """Only the observer around the loop and the sizing of memory are loaded from outside the
    roots."""
    default = path.measure_default(path.ROOT)
    loaded = set(default.loaded)
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
    assert sampling == {f"common/sampling/{name}.py" for name in (*parts, "sampling_rules")}
    assert default.num_lines <= LOADED_LINES, "see common/tests/budgets.py"
