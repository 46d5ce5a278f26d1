"""The benchmark measures what it says: all systems do the same work, and tables say what records
hold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from common.models.loader import LoadedModel
from common.tests.engine_oracle import Oracle, greedy
from workshop.measure.bench import bench, bench_table, vllm_system
from workshop.measure.bench.bench_models import BenchModels, make_twin
from workshop.measure.bench.bench_record import ROOT, read_record
from workshop.measure.bench.bench_systems import SYSTEMS
from workshop.measure.bench.bench_work import Limits, make_requests

SEED = 0
REQUESTS = make_requests(9, (1, 20), (1, 9), vocab_size=97, seed=SEED)
# Fewer seats than requests, so that every system has to bring requests in later.
LIMITS = Limits(
    max_num_seqs=4,
    max_num_batched_tokens=48,
    block_size=4,
    longest=max(r.num_positions for r in REQUESTS),
)


@pytest.fixture(scope="module")
def models(random_loaded: LoadedModel) -> BenchModels:
    return BenchModels(random_loaded, make_twin(random_loaded))


@pytest.fixture(scope="module")
def expected(random_oracle: Oracle) -> list[list[int]]:
    """By a model that `transformers` itself loaded, each request alone."""
    from transformers import Qwen3ForCausalLM

    model = Qwen3ForCausalLM.from_pretrained(random_oracle.path, dtype=torch.float64).eval()
    return [greedy(model, r.prompt_token_ids, r.max_tokens) for r in REQUESTS]


@pytest.mark.parametrize("name", [name for name in SYSTEMS if not name.startswith("vllm")])
def test_every_system_gives_each_request_the_tokens_of_transformers_alone(
    name: str, models: BenchModels, expected: list[list[int]]
) -> None:
    with SYSTEMS[name](models, LIMITS) as serve:
        warm_up = make_requests(2, (2, 5), (2, 3), vocab_size=97, seed=SEED + 1)
        assert [len(t) for t in serve(warm_up).token_ids] == [r.max_tokens for r in warm_up]
        served = serve(REQUESTS)
        described = served.details
    assert served.token_ids == expected, f"seed {SEED}"
    json.dumps(described)
    num_outputs = sum(r.max_tokens for r in REQUESTS)
    longest = max(r.max_tokens for r in REQUESTS)
    exact = {"one-at-a-time": num_outputs, "transformers-generate": longest}
    # Else a step gives at most one token to each of four requests.
    least = exact.get(name, max(longest, -(-num_outputs // 4)))
    assert described["num_steps"] == exact.get(name, described["num_steps"]) >= least


def test_the_command_measures_and_writes_a_record(
    random_oracle: Oracle,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transformers.utils import logging

    monkeypatch.setattr(logging, "set_verbosity_error", lambda: None)  # it would stay so
    argv = ["--smoke", "--models", str(random_oracle.path), "--records", str(tmp_path)]
    monkeypatch.setattr(vllm_system, "is_installed", lambda _: False)
    argv += ["--systems", "paged,vllm,static", "--repeats", "2"]
    assert bench.main(argv) == 0
    printed = capsys.readouterr().out
    (path,) = tmp_path.glob("bench_*.json")
    record = read_record(path)
    systems = record["systems"]
    assert [len(systems[name]["runs"]) for name in ("paged", "vllm", "static")] == [2, 0, 2]
    assert systems["vllm"]["error"].startswith("vLLM is not installed"), "the others go on"
    assert [run["place"] for run in systems["paged"]["runs"]] == [0, 2], "rounds begin in turn"
    for run in record["systems"]["paged"]["runs"]:
        num_tokens = run["useful_tokens_per_s"] * run["seconds"]
        assert 0 < run["ttft_ms"]["p50"] <= run["ttft_ms"]["p99"] < 1e3 * run["seconds"]
        assert 0 < run["inter_token_ms"]["p50"] < 1e3 * run["seconds"] < 1e4 * num_tokens
    run = record["systems"]["paged"]["runs"][0]
    useful = sum(record["config"]["workload"]["output_tokens"])
    assert run["useful_tokens_per_s"] == pytest.approx(useful / run["seconds"], rel=0.01)
    assert record["roofline"]["weight_bytes"] > 0
    machine = record["environment"]
    assert machine["torch"] in torch.__version__ and machine["memory_bytes"] > 1e8
    assert str(Path.home()) not in json.dumps(machine) and str(ROOT) not in json.dumps(machine)
    (table,) = bench.DRIVER.tables(tmp_path).values()
    assert table == bench_table.render(record) and table in printed
