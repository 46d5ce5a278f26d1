"""Origins of workers: a script without a guard, standard input, torchrun."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, parse_args

from common import demo
from common.engine import EngineConfig, LLMEngine
from common.engine_config import THREADS_FROM_PARAMETERS
from common.llm import LLM
from common.parallel import remote_launch
from common.runner import thread_count
from common.tests.every_kind import PROMPTS
from common.tests.forked import Forked
from common.tests.remote_cases import is_there, one_process
from request import SamplingParams

# It has no `if __name__ == "__main__"`, and says so if it is run again. At its end rank 0 waits in
# a collective for rank 1, which has no plan. A fork of the driver has its sockets.
SCRIPT = """
import os, time
print("begun", flush=True)
from common.llm import LLM, SamplingParams
from common.parallel.message import pack
from scheduler_interface import NewRequestData, RunnerInput
llm = LLM(tensor_parallel_size=2, dtype="float64", block_size=4, num_blocks=100,
          worker_timeout_s=300.0)
links = llm.engine.core.runner.executor.links
print("pids", [link.process.pid for link in links], flush=True)
params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
outputs = llm.generate(%r, params, use_tqdm=False)
print("tokens", [output.outputs[0].token_ids for output in outputs], flush=True)
plan = RunnerInput([NewRequestData("x", [1], params, 0, ([5],))])
plan.num_scheduled_tokens = {"x": 1}
llm.engine.core.runner.executor._channel.send(
    0, pack("plan", number=99, plan=plan))
fork = os.fork()
if fork:
    print("fork", [fork], flush=True)
time.sleep(100)
os._exit(0)
"""
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def values_of(line: str, name: str) -> list:
    assert line.startswith(name), line
    return json.loads(line.removeprefix(name))


def test_a_script_is_not_run_again_and_a_killed_one_leaves_no_process(
    tmp_path, shipped_loaded, shipped_tokenizer
) -> None:
    """Without a guard, in a folder whose `request.py` is not ours."""
    engine = one_process(shipped_loaded, shipped_tokenizer)
    outputs = engine.generate_batch(PROMPTS, PARAMS).values()
    expected = [output.outputs[0].token_ids for output in outputs]
    (tmp_path / "request.py").write_text("raise SystemExit('this is not the module')\n")
    script = tmp_path / "scripts" / "script.py"
    script.parent.mkdir()
    script.write_text(SCRIPT % (PROMPTS,))
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, str(script)]
    driver = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    assert driver.stdout.readline() == "begun\n"
    pids = values_of(driver.stdout.readline(), "pids")
    assert values_of(driver.stdout.readline(), "tokens") == expected
    (fork,) = values_of(driver.stdout.readline(), "fork")
    try:
        assert all(map(is_there, pids))
        driver.kill()
        driver.wait()
        deadline = time.monotonic() + 30
        while any(map(is_there, pids)):
            assert time.monotonic() < deadline, "a worker stays behind"
            time.sleep(0.05)
    finally:
        os.kill(fork, signal.SIGKILL)
        driver.stdout.close()


# -- torchrun

DEMO = ["--dtype=float64", "--num-prompts=2", "--max-tokens=4", "--num-threads=1"]


def texts(printed: str) -> str:
    return printed[printed.index("--- ") : printed.index("=== Summary")]


def torchrun_demo(printed: Path) -> None:
    """As the command does, but that its processes are forked."""
    os.dup2(os.open(printed, os.O_CREAT | os.O_WRONLY | os.O_APPEND), 1)
    arguments = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--nproc-per-node=2"]
    settings, _, _ = config_from_args(parse_args([*arguments, "--rdzv-id=x", "demo"]))
    settings.start_method = "fork"
    elastic_launch(settings, demo.main)(DEMO)


def test_torchrun_runs_the_demo_on_all_its_processes(capsys, tmp_path) -> None:
    """The processes are the ranks of one engine, whose first process prints the output."""
    process = Forked(torchrun_demo, tmp_path / "printed", daemon=False)
    try:
        assert process.wait(240) == 0
    finally:
        process.kill()
    printed = (tmp_path / "printed").read_text()
    assert "2 ranks" in printed and printed.count("=== Summary") == 1
    assert demo.main(DEMO) == 0
    assert texts(printed) == texts(capsys.readouterr().out)


# -- what is wrong with the arguments


@pytest.mark.parametrize(
    ("num_processes", "wrong", "reason"),
    [
        (0, dict(tensor_parallel_size=0), "tensor_parallel_size must"),
        (0, dict(worker_timeout_s=0), "worker_timeout_s must"),
        (0, dict(tensor_parallel_size=2, model="/nowhere"), "model must .*/now"),
        (0, dict(tensor_parallel_size=2, max_model_len=10**6), "max_model_len must"),
        (0, dict(tensor_parallel_size=3), "tensor_parallel_size must"),
        (0, dict(pipeline_parallel_size=99), "pipeline_parallel_size must"),
        (6, dict(pipeline_parallel_size=4), "pipeline_parallel_size must divide the 6"),
        (6, dict(block_size=0), "block_size must"),
        (12, dict(), "torchrun must start all processes on one machine"),
        (6, dict(tensor_parallel_size=2), "tensor_parallel_size must be 6, .*got 2"),
    ],
)
def test_impossible_settings_are_refused_without_processes(
    num_processes, wrong, reason, monkeypatch
) -> None:
    monkeypatch.setattr(remote_launch, "start_process", None)
    if num_processes:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
        monkeypatch.setenv("WORLD_SIZE", str(num_processes))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "6")
        monkeypatch.setenv("RANK", "0")
    error = FileNotFoundError if "model" in wrong else ValueError
    with pytest.raises(error, match=reason):
        LLM(**wrong)
    if num_processes:  # the others have nothing to do
        monkeypatch.setenv("RANK", "1")
        with pytest.raises(SystemExit) as ended:
            LLM(**wrong)
        assert ended.value.code == 0


def test_each_worker_gets_its_share_of_the_threads_unless_told(monkeypatch):
    """A small model is computed by one thread, in one process as in several (Trap 89)."""
    monkeypatch.setattr(remote_launch, "start_process", lambda folder, rank: None)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    monkeypatch.setattr(thread_count, "_numbers", {None: 7})
    small = THREADS_FROM_PARAMETERS - 1
    large = THREADS_FROM_PARAMETERS
    each = [(1, large, None, 7), (2, large, None, 3), (3, large, None, 2), (9, large, None, 1)]
    each += [(1, small, None, 1), (2, small, None, 1), (2, small, 5, 5)]
    for num_ranks, num_parameters, told, expected in each:
        started = remote_launch.launch(num_ranks, torch.device("cpu"), num_parameters, told)
        assert started.num_threads == expected


def test_a_device_of_its_own_for_each_rank(monkeypatch):
    monkeypatch.setattr(EngineConfig, "resolve_device", lambda self: torch.device("cuda", 1))
    with pytest.raises(ValueError, match=r"device must .*, got 'cuda:1'"):
        LLM(tensor_parallel_size=2, device="cuda:1")
    monkeypatch.setattr(remote_launch.torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="2 ranks need a CUDA device each, got 1"):
        remote_launch.launch(2, torch.device("cuda"), 1)


def test_what_only_a_worker_finds_is_raised_as_in_one_process(shipped_loaded, monkeypatch):
    with pytest.raises(ValueError, match="cannot send a loaded model"):
        LLMEngine(EngineConfig(tensor_parallel_size=2), loaded=shipped_loaded)
    monkeypatch.setattr(EngineConfig, "has_workers", True)
    with pytest.raises(ValueError, match=r"^batch_invariant must .*no packing"):
        LLM(batch_invariant=True, dtype="float64", num_blocks=9)
