"""`make gpu`: every line that a GPU will meet has run here, and every name that it uses exists."""

from __future__ import annotations

import subprocess
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from workshop.measure.bench import gpu, gpu_work
from workshop.measure.bench.bench_record import ROOT, read_record

CANNOT = torch.cuda.is_available() or not gpu.find_spec("triton")


def test_every_test_of_a_kernel_and_every_package_is_named() -> None:
    """A later move cannot leave one out: no import sees strings."""
    assert [path for path in (*gpu.TESTS, *gpu.PAGES) if not (ROOT / path).is_file()] == []
    tests = {p.relative_to(ROOT).as_posix(): p for p in ROOT.glob("[0cw]*/**/test_*.py")}
    marked = {n for n, p in tests.items() if "@pytest.mark.gpu\n" in p.read_text("utf-8")}
    assert marked - {"common/tests/test_commands.py"} <= {*gpu.TESTS}
    for name in f"{gpu.NEEDED} {gpu.NEEDED_BY_TESTS}".split():
        assert gpu.find_spec(name) or name == "triton", name


@pytest.mark.skipif(CANNOT, reason="a rehearsal is of a CPU, with Triton")
@pytest.mark.parametrize(
    "parts",
    [["tests"], pytest.param(["tokens", "speed"], marks=pytest.mark.slow)],
)
def test_a_rehearsal_runs_to_its_end(
    parts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    assert gpu.main(["rehearse", "--only", *parts]) == 0
    assert "these numbers say nothing" in capsys.readouterr().out
    record = read_record(tmp_path / "gpu-rehearsal" / "rehearse.json")
    assert record["is_rehearsal"] and list(record["parts"]) == parts
    assert all(part["results"] and not part["errors"] for part in record["parts"].values())


def test_a_part_that_dies_or_hangs_is_recorded_and_leaves_nothing_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.touch(0o755)
    monkeypatch.setattr(gpu.sys, "executable", str(python))
    python.write_text("#!/bin/sh\necho illegal memory access >&2; exit 3\n")
    (error,) = gpu.run_part("tokens", tmp_path, 30, False)["errors"]
    assert error == "it ended with status 3: illegal memory access"
    python.write_text(f"#!/bin/sh\nsleep 99 & echo $! > {tmp_path}/pid; wait\n")
    (error,) = gpu.run_part("tokens", tmp_path, 2, False)["errors"]
    assert error.startswith("it was ended after 2 s")
    with suppress(psutil.NoSuchProcess):
        slept = psutil.Process(int((tmp_path / "pid").read_text()))
        assert any(slept.status() == psutil.STATUS_ZOMBIE or time.sleep(0.01) for _ in range(999))


def test_a_commit_is_recorded_as_given_and_one_that_is_not_checked_out_is_refused(
    tmp_path: Path,
) -> None:
    other = "0123456789" * 4
    assert gpu.checked_commit(other, tmp_path) == {"commit": other, "is_dirty": False}
    with pytest.raises(ValueError, match="must be 40 hexadecimal digits, got 'main'"):
        gpu.checked_commit("main", tmp_path)
    (tmp_path / "a.py").touch()
    who = "-c user.name=a -c user.email=a@b commit -qm all"
    for typed in ("init -q", "add .", who):
        subprocess.run(["git", "-C", str(tmp_path), *typed.split()], check=True)
    head = gpu.checked_commit(None, tmp_path)["commit"]
    with pytest.raises(ValueError, match=f"must be {head}, which is checked out"):
        gpu.checked_commit(other, tmp_path)


def test_a_token_or_a_log_probability_that_transformers_would_not_give_is_an_error() -> None:
    """Token 2 always follows, with a probability of nearly one."""

    def model(ids: torch.Tensor, logits_to_keep: int) -> SimpleNamespace:
        logits = torch.tensor([0.0, 0.0, 30.0, 0.0])
        return SimpleNamespace(logits=logits.expand(1, logits_to_keep, 4))

    model.device, model.dtype = torch.device("cpu"), torch.float32
    right, wrong, unsure = (
        SimpleNamespace(token_ids=[token], logprobs=[SimpleNamespace(logprob=told)])
        for token, told in ((2, 0.0), (1, 0.0), (2, -0.5))
    )
    assert gpu_work.against(model, [[7, 8]], [right])["others"] == 0
    for answer in (wrong, unsure):
        with pytest.raises(ValueError, match="more than rounding"):
            gpu_work.against(model, [[7, 8]], [answer])


def test_a_rehearsal_or_unknown_code_is_never_published() -> None:
    where = {"device": "NVIDIA H100", "commit": "0123456789abcdef", "is_dirty": False}
    record = {"command": "", "date": "", "is_rehearsal": False, "environment": where}
    record["parts"] = {"speed": {"results": {"x": {"tokens out/s": 11_000.0}}, "errors": []}}
    assert gpu.texts_of([record])["gpu"].startswith("11,000 output tokens a second on NVIDIA H100")
    changes = [{"environment": where | bad} for bad in ({"is_dirty": True}, {"commit": None})]
    for change in (*changes, {"is_rehearsal": True}):
        with pytest.raises(ValueError, match="cannot publish the record of NVIDIA H100"):
            gpu.texts_of([record | change])
