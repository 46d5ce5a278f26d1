"""`make gpu`: every line that a GPU will meet has run here, and every name that it uses exists."""

from __future__ import annotations

import inspect
import os
import subprocess
import time
from argparse import Namespace
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from workshop.measure.bench import gpu, gpu_engine, gpu_kernels, gpu_lab, gpu_table
from workshop.measure.bench.bench_record import ROOT, read_record, write_record
from workshop.measure.bench.gpu_lab import Part

MODULES = [gpu, gpu_lab, gpu_kernels, gpu_engine, gpu_table]
CANNOT = torch.cuda.is_available() or not gpu.find_spec("triton")
interpreted = pytest.mark.skipif(CANNOT, reason="a rehearsal is of a CPU, with Triton")


@pytest.fixture
def part(tmp_path: Path) -> Part:
    write_record(tmp_path / "record.json", {"environment": {"commit": None}, "parts": {}})
    return Part("p", tmp_path / "record.json", time.monotonic() + 100)


# -- names


def test_every_module_path_and_test_that_is_named_exists() -> None:
    """A later move cannot leave one out: no import sees strings."""
    modules = {module.__name__.rpartition(".")[2]: module for module in MODULES}
    for name in gpu.PARTS.values():
        module, _, function = name.partition(".")
        signature = inspect.signature(getattr(modules[module], function))
        assert list(signature.parameters) == ["lab", "part"]
    assert gpu.PARTS.keys() == {name for plan in gpu.COMMANDS.values() for name in plan}
    for path in (*gpu_kernels.TESTS, *gpu_table.PAGES):
        assert (ROOT / path).is_file(), path
    tests = {p.relative_to(ROOT).as_posix(): p for p in ROOT.glob("[0cw]*/**/test_*.py")}
    marked = {n for n, p in tests.items() if "@pytest.mark.gpu\n" in p.read_text("utf-8")}
    assert marked - {"common/tests/test_commands.py"} <= {*gpu_kernels.TESTS}
    for name in f"{gpu.NEEDED} {gpu.NEEDED_BY_TESTS}".split():
        assert gpu.find_spec(name) or name == "triton", name


# -- the whole of it, and a sample


def rehearse(folder: Path, *options: str) -> dict:
    run = subprocess.run(
        [gpu.sys.executable, "-m", "workshop.bench.gpu", "rehearse", *options],
        cwd=ROOT,
        **{"env": os.environ | {"OUT": str(folder), "PYTHONPATH": "", "OMP_NUM_THREADS": "1"}},
        **{"capture_output": True, "text": True},
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "these numbers say nothing" in run.stdout
    record = read_record(folder / "gpu-rehearsal" / "rehearse.json")
    assert record["is_rehearsal"] and record["command"] == "make gpu ARGS=rehearse"
    assert {error for one in record["parts"].values() for error in one["errors"]} == set()
    return record


@interpreted
def test_a_rehearsal_of_one_part_runs_to_its_end(tmp_path: Path) -> None:
    record = rehearse(tmp_path, "--only", "tune")
    assert list(record["parts"]) == ["here", "tune"]
    assert len(record["parts"]["tune"]["results"]["tuned"]) == 2
    assert record["environment"]["device"]["name"] == "rehearsal"


@interpreted
@pytest.mark.slow
def test_a_rehearsal_runs_every_part_to_its_end(tmp_path: Path) -> None:
    record = rehearse(tmp_path)
    assert list(record["parts"]) == list(gpu.PARTS)
    sections = gpu_table.sections_of(record)
    for mode in gpu_engine.MODES:
        assert sections["tokens"][f"torch.float32, {mode}"]["others"] == 0
        assert sections[f"{mode}: steps"]["2 x 20"]["share"] >= 0
        assert len(sections[f"{mode}: workload"]) == 1 and sections["hidden waits"][mode] == "none"
        assert sections[f"{mode}: profile"]["2 x 20"]["launches"] > 0


# -- a part, from outside


def args_of(folder: Path, limit_s: float = 30) -> Namespace:
    args = Namespace(command="look", plan={"right": limit_s}, out=folder, seed=1)
    args.record, args.is_rehearsal = folder / "look.json", False
    write_record(args.record, {"environment": {}, "parts": {}})
    return args


def test_a_part_that_dies_or_hangs_is_recorded_and_leaves_nothing_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.touch(0o755)
    monkeypatch.setattr(gpu.sys, "executable", str(python))
    python.write_text("#!/bin/sh\necho illegal memory access >&2; exit 3\n")
    (error,) = gpu.run_part(args_of(tmp_path), "right")["parts"]["right"]["errors"]
    assert error == "it ended with status 3: illegal memory access"
    python.write_text(f"#!/bin/sh\nsleep 99 & echo $! > {tmp_path}/pid; wait\n")
    (error,) = gpu.run_part(args_of(tmp_path, 2), "right")["parts"]["right"]["errors"]
    assert error.startswith("it was ended after 2 s")
    with suppress(psutil.NoSuchProcess):
        slept = psutil.Process(int((tmp_path / "pid").read_text()))
        assert any(slept.status() == psutil.STATUS_ZOMBIE or time.sleep(0.01) for _ in range(999))


def test_a_commit_is_recorded_as_given_and_one_that_is_not_checked_out_is_refused(
    tmp_path: Path,
) -> None:
    def commit(given: str | None) -> dict:
        return gpu.checked_commit(Namespace(plan={}, commit=given), tmp_path)

    other = "0123456789" * 4
    assert commit(other) == {"commit": other, "is_dirty": False}
    assert commit(None) == {"commit": None, "is_dirty": None}
    with pytest.raises(ValueError, match="must be 40 hexadecimal digits, got 'main'"):
        commit("main")
    (tmp_path / "a.py").touch()
    who = "-c user.name=a -c user.email=a@b commit -qm all"
    for typed in ("init -q", "add .", who):
        subprocess.run(["git", "-C", str(tmp_path), *typed.split()], check=True)
    head = commit(None)["commit"]
    assert commit(head) == {"commit": head, "is_dirty": False}
    with pytest.raises(ValueError, match=f"must be {head}, which is checked out"):
        commit(other)
    (tmp_path / "a.py").write_text("x = 1\n")
    with pytest.raises(ValueError, match="modules differ from it"):
        commit(head)


# -- a part, from inside


def test_a_step_that_raises_keeps_its_error_and_the_next_one_goes_on(part: Part) -> None:
    def out_of_memory() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate much")

    assert part.attempt("s", "a", lambda: 1 / 0) is None and part.attempt("s", "b", lambda: 5) == 5
    part.attempt("s", "c", out_of_memory)
    part.deadline = time.monotonic() + 1
    assert part.attempt("s", "d", lambda: 6, needed_s=9) is None
    kept = read_record(part.record)["parts"]["p"]
    assert kept["errors"] == ["s, a: ZeroDivisionError: division by zero"]
    assert kept["notes"][0] == "s, c is left out: CUDA out of memory"
    assert "no time is left" in kept["notes"][1] and kept["results"] == {"s": {"b": 5}}


@pytest.mark.parametrize(
    ("token", "told", "is_right"), [(2, 0.0, True), (1, 0.0, False), (2, -0.5, False)]
)
def test_a_token_or_a_log_probability_that_transformers_would_not_give_is_an_error(
    part: Part, token: int, told: float, is_right: bool
) -> None:
    """Token 2 always follows, with a probability of nearly one."""

    class Model:
        device, dtype = torch.device("cpu"), torch.float32

        def __call__(self, ids: torch.Tensor, logits_to_keep: int) -> SimpleNamespace:
            assert ids.tolist() == [[7, 8, token]]
            logits = torch.zeros(1, logits_to_keep, 4)
            logits[..., 2] = 30.0
            return SimpleNamespace(logits=logits)

    answer = SimpleNamespace(token_ids=[token], logprobs=[SimpleNamespace(logprob=told)])
    found = gpu_engine.against(part, Model(), [[7, 8]], [answer])
    assert found["tokens"] == 1 and found["others"] == (token != 2)
    assert bool(part.errors) is not is_right


# -- the tables


def a_record() -> dict:
    row = {"cell": [64, 2048], "ms": [2.0, 1.0, 3.0], "floor_ms": 1.0, "share": 0.74}
    name = "512 requests, 512 tokens in, 128 out"
    runs = [{"in/s": 40_000.0, "out/s": speed, "requests/s": 90.25} for speed in (9000.0, 11_000.0)]
    results = {"overlap: steps": {"64 x 2,048": row}, "overlap: workload": {name: runs}}
    where = {"device": {"name": "NVIDIA H100"}, "torch": "2.11", "triton": "3.6", "python": "3.12"}
    return {
        "command": "make gpu ARGS=record", "date": "2027-01-02", "is_rehearsal": False, "seed": 1,
        "environment": {**where, "commit": "0123456789abcdef", "is_dirty": False},
        "parts": {"engine": {"results": results, "errors": ["a | b"], "notes": ["c"]}},
    }  # fmt: skip


def test_each_cell_has_its_aim_and_none_is_a_minimum_over_cells() -> None:
    aims = {(64, 2048): 0.75, (256, 1024): 0.70, (64, 256): 0.45, (1, 256): 0.50, (8, 256): None}
    assert {cell: gpu_table.aim_of(*cell) for cell in aims} == aims
    text = gpu_table.render(a_record())
    assert "| 64 x 2,048: 75% missed | 1.00 ms |  |  | 2.00 ms, 74% |" in text
    assert "tokens in, 128 out | overlap | 40,000.0 | 11,000.0 | 90.2 |" in text
    assert "* engine: a / b\n* engine: c\n" in text


def test_a_rehearsal_or_unknown_code_is_never_published() -> None:
    texts = gpu_table.texts_of([a_record()])
    assert texts["gpu"].startswith("11,000 output tokens a second on NVIDIA H100 with ")
    assert "11,000" in texts["gpu_zh"]
    for change in ({"is_dirty": True}, {"commit": None}, {"is_rehearsal": True}):
        record = a_record()
        where = record if "is_rehearsal" in change else record["environment"]
        where |= change
        with pytest.raises(ValueError, match="cannot publish the record of NVIDIA H100"):
            gpu_table.texts_of([record])
