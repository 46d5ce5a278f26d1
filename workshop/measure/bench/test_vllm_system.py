"""vLLM as a system, without vLLM: a module of its name and manner stands in for it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from workshop.measure.bench import bench, vllm_system
from workshop.measure.bench.bench import TITLES, Bench, run_rounds
from workshop.measure.bench.bench_work import CannotRunError, Limits, make_requests
from workshop.measure.bench.vllm_install import python_of
from workshop.measure.bench.vllm_system import VllmServer, read_answer, request_list, variables

# An engine that admits two at a time, prints to standard output, and answers with the sum of the
# prompt and the number of tokens so far. Like the newer ones it gives requests names of its own.
FAKE = """
import os
import sys

__version__ = "9.9"

class SamplingParams:
    def __init__(self, *, temperature, max_tokens, ignore_eos, detokenize):
        assert temperature == 0 and ignore_eos is True and detokenize is False
        self.max_tokens = max_tokens

class Output:
    def __init__(self, request_id, token_ids):
        self.request_id = request_id
        self.outputs = [type("Completion", (), {"token_ids": token_ids})()]

class Engine:
    def __init__(self):
        self.requests = []

    def add_request(self, name, prompt, params):
        total = sum(prompt["prompt_token_ids"])
        if total == 666:
            raise ValueError("BadError: 666")
        self.requests.append((f"{name}-x", total, [], params.max_tokens))
        return f"{name}-x"

    def has_unfinished_requests(self):
        return bool(self.requests)

    def step(self):
        print("vLLM says hello")
        outputs = []
        for name, total, tokens, most in self.requests[:2]:
            tokens.append(total + len(tokens))
            outputs.append(Output(name, list(tokens)))
        self.requests = [r for r in self.requests if len(r[2]) < r[3]]
        return outputs

class LLM:
    def __init__(self, *, model, skip_tokenizer_init, disable_log_stats, **settings):
        assert skip_tokenizer_init
        if settings.get("max_num_seqs") == 0:
            raise ValueError("max_num_seqs is 0")
        print("loading", settings, os.environ["VLLM_CPU_KVCACHE_SPACE"])
        self.llm_engine = Engine()
"""
REQUESTS = make_requests(5, (1, 4), (1, 6), vocab_size=97, seed=0)
EXPECTED = [[sum(r.prompt_token_ids) + i for i in range(r.max_tokens)] for r in REQUESTS]


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """One in which vLLM seems to be installed."""
    folder = tmp_path / "environment"
    python = python_of(folder)
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    (folder / "vllm-version.txt").write_text("9.9\n")
    return folder


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The variables of a server, and the module where they point."""
    for name in ("VLLM_CPU_KVCACHE_SPACE", "VLLM_LOGGING_LEVEL"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "vllm.py").write_text(FAKE)
    found = variables(1, 3, environment=tmp_path / "environment")
    found.pop("LD_PRELOAD", None)  # the system may have tcmalloc: nothing for this Python
    return found | {"PYTHONPATH": str(tmp_path / "modules")}


def make_server(environment: Path, outside: dict[str, str], **settings: int) -> VllmServer:
    chosen = {"model": "nowhere", "max_num_seqs": 4, **settings}
    return VllmServer(chosen, outside, environment, environment.parent / "work")


def test_requests_go_to_the_process_and_tokens_come_back(
    environment: Path, outside: dict[str, str]
) -> None:
    server = make_server(environment, outside)
    assert server.version == "9.9"
    for _ in range(2):  # it serves again and again
        answer = server.serve(REQUESTS)
        served = read_answer(answer, {"version": "9.9"})
        assert served.token_ids == EXPECTED
        assert served.seconds == answer["seconds"] > 0
        told = served.details
        assert told["num_steps"] == answer["num_steps"] >= max(r.max_tokens for r in REQUESTS)
        assert told["vllm"] == {"version": "9.9"}
        assert 0 < told["cpu_seconds"] < 5, "of that process"
        for times, request in zip(answer["token_times"], REQUESTS, strict=True):
            assert times == sorted(times) and len(times) == request.max_tokens
            assert times[-1] <= answer["seconds"]
    written = json.loads((environment.parent / "work" / "requests.json").read_text())
    assert written == request_list(REQUESTS)
    assert written[0]["prompt_token_ids"] == REQUESTS[0].prompt_token_ids
    server.close()


def test_what_vllm_says_last_is_the_reason(environment: Path, outside: dict[str, str]) -> None:
    with pytest.raises(CannotRunError, match="vLLM ended: ValueError: max_num_seqs is 0"):
        make_server(environment, outside, max_num_seqs=0)
    server = make_server(environment, outside)
    bad = make_requests(1, (1, 1), (1, 1), vocab_size=1, seed=0)
    bad[0].prompt_token_ids[:] = [666]
    with pytest.raises(CannotRunError, match="vLLM ended: ValueError: BadError: 666"):
        server.serve(bad)


def test_where_it_is_not_installed_it_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CannotRunError, match="bench --install-vllm"):
        VllmServer({}, {}, tmp_path, tmp_path)
    monkeypatch.setattr(vllm_system, "is_installed", lambda: False)
    monkeypatch.setattr(bench, "is_installed", lambda: False)
    assert not [name for name in bench.default_systems() if name.startswith("vllm")]
    models = SimpleNamespace(servers={})
    entries = {
        name: {"title": TITLES[name], "num_requests": 5, "error": None, "runs": []}
        for name in TITLES
        if name.startswith("vllm")
    }
    assert list(entries) == ["vllm", "vllm-eager"]
    measured = Bench(models, Limits(), REQUESTS, [], {"systems": entries})
    list(run_rounds(measured, repeats=1))
    for entry in entries.values():
        assert entry["is_unavailable"] and entry["error"].startswith("vLLM is not installed")
    monkeypatch.setattr(bench, "is_installed", lambda: True)
    assert bench.default_systems() == list(TITLES)


# -- installing


def test_the_runner_needs_nothing_of_ours() -> None:
    """It runs in an environment that has none of this repository."""
    script = f"import sys, runpy; sys.argv = ['x']; runpy.run_path({str(vllm_system.RUNNER)!r})"
    subprocess.run([sys.executable, "-S", "-E", "-c", script], check=True)
