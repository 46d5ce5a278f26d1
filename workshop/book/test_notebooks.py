"""Every demo script runs from beginning to end where only the wheel is, and the first cell of its
notebook says how to get the chapters. `make book` executes the notebooks."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from workshop.book.notebooks import ROOT, SETUP, demo_scripts


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """In which `python -S` finds installed packages and the wheel, but not the checkout, which is
    in a .pth file of an editable installation."""
    from hatchling.builders.wheel import WheelBuilder

    folder = tmp_path_factory.mktemp("wheel")
    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    packages = [p for p in sys.path if Path(p).name in ("site-packages", "dist-packages")]
    path = os.pathsep.join([str(folder), *packages])
    return {**os.environ, "PYTHONPATH": path, "TQDM_DISABLE": "1", "MPLBACKEND": "agg"}


@pytest.mark.sample(every=6, first=5)  # a quick one
@pytest.mark.parametrize("script", demo_scripts(), ids=lambda path: path.name)
def test_demo_runs(script: Path, environment: dict[str, str], tmp_path: Path) -> None:
    """Without what only a checkout has, such as the workshop or a helper of tests."""
    copy = tmp_path / script.name
    copy.write_bytes(script.read_bytes())
    command = [sys.executable, "-S", str(copy)]
    run = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout, "a demo that shows nothing"


def test_first_cell_says_how_to_get_the_chapters(tmp_path: Path) -> None:
    command = [sys.executable, "-S", "-c", SETUP]
    run = subprocess.run(command, cwd=tmp_path, env={}, capture_output=True, text=True)
    assert run.stderr.startswith("The modules of vllm-from-scratch are not installed.")
    assert run.returncode == 1 and "`make`" in run.stderr
