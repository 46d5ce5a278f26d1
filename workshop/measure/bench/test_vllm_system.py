"""vLLM as a system, without vLLM: a module of its name and manner stands in for it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from workshop.measure.bench import vllm_system
from workshop.measure.bench.bench_work import CannotRunError, make_requests
from workshop.measure.bench.vllm_system import VllmServer, read_answer, variables

# An engine that admits two at a time, prints to standard output, and answers with the sum of the
# prompt and the number of tokens so far. Like the newer ones it gives requests names of its own.
FAKE = """
from types import SimpleNamespace as Space

__version__ = "9.9"

class SamplingParams(Space):
    pass

class LLM:
    def __init__(self, *, max_num_seqs, **settings):
        if max_num_seqs == 0:
            raise ValueError("max_num_seqs is 0")
        print("loading", settings)
        self.llm_engine, self.requests = self, []

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
            made = Space(token_ids=list(tokens))
            outputs.append(Space(request_id=name, outputs=[made]))
        self.requests = [r for r in self.requests if len(r[2]) < r[3]]
        return outputs
"""
REQUESTS = make_requests(5, (1, 4), (1, 6), vocab_size=97, seed=0)
EXPECTED = [[sum(r.prompt_token_ids) + i for i in range(r.max_tokens)] for r in REQUESTS]


@pytest.fixture
def make_server(tmp_path: Path) -> Callable[..., VllmServer]:
    """Servers of an environment in which vLLM seems to be installed."""
    folder = tmp_path / "environment"
    python = folder / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    (tmp_path / "vllm.py").write_text(FAKE)
    outside = variables(1, 3, environment=folder)
    outside.pop("LD_PRELOAD", None)  # the system may have tcmalloc: nothing for this Python
    outside["PYTHONPATH"] = str(tmp_path)

    def make(**settings: int) -> VllmServer:
        chosen = {"model": "nowhere", "max_num_seqs": 4, **settings}
        return VllmServer(chosen, outside, folder, tmp_path / "work")

    return make


def test_requests_go_to_the_process_and_tokens_come_back(
    make_server: Callable[..., VllmServer],
) -> None:
    server = make_server()
    assert server.version == "9.9"
    for _ in range(2):  # it serves again and again
        answer = server.serve(REQUESTS)
        served = read_answer(answer, {"version": "9.9"})
        assert served.token_ids == EXPECTED and served.details["cpu_seconds"] > 0
        for times, request in zip(answer["token_times"], REQUESTS, strict=True):
            assert times == sorted(times) and len(times) == request.max_tokens
            assert times[-1] <= answer["seconds"] == served.seconds
    server.close()


def test_what_vllm_says_last_is_the_reason(make_server: Callable[..., VllmServer]) -> None:
    with pytest.raises(CannotRunError, match="vLLM ended: ValueError: max_num_seqs is 0"):
        make_server(max_num_seqs=0)
    bad = make_requests(1, (1, 1), (1, 1), vocab_size=1, seed=0)
    bad[0].prompt_token_ids[:] = [666]
    with pytest.raises(CannotRunError, match="vLLM ended: ValueError: BadError: 666"):
        make_server().serve(bad)


def test_where_it_is_not_installed_it_says_what_to_do(
    tmp_path: Path,
) -> None:
    with pytest.raises(CannotRunError, match="vLLM is not installed"):
        VllmServer({}, {}, tmp_path, tmp_path)


def test_the_runner_needs_nothing_of_ours() -> None:
    """It runs in an environment that has none of this repository."""
    script = f"import sys, runpy; sys.argv = ['x']; runpy.run_path({str(vllm_system.RUNNER)!r})"
    subprocess.run([sys.executable, "-S", "-E", "-c", script], check=True)
