"""Every command of `make` that README, COURSE and the first hour show ends well, as typed, in a
copy of the repository. What runs for long, or wants a GPU or a client, is started elsewhere."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from workshop.practice.source_patch import ROOT
from workshop.practice.tasks.test_course_page import commands_of_make

# The CI runs these targets themselves, or `test_commands.py` and the tests of what they start do.
ELSEWHERE = re.compile(
    r"make (help|check|test|test-book|lint|format|notebooks|figures|bench|ladder|gpu|book|sync|"
    r"lock|clean|serve|matrix)\b(?!.*--mine)|.*--model"
)
LIMIT_S = 240  # on a busy machine


def commands() -> list[str]:
    """Without `--open`, of which one is kept."""
    found = [one for one in commands_of_make() if not ELSEWHERE.match(one)]
    bare = {one.replace(' --open"', '"') for one in found}
    return sorted(one.replace("--seconds 60", "--seconds 5") for one in bare)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("copy")
    listed = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True)
    for name in listed.rstrip("\0").split("\0"):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)
    return folder


@pytest.mark.needs("make")
@pytest.mark.needs("git")
@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize("command", commands())
def test_a_command_of_a_page_ends_well(command: str, copy: Path) -> None:
    """With the packages of this Python, and a browser that shows nothing."""
    typed = [*shlex.split(command), "-n", "--no-print-directory"]
    shown = subprocess.run(typed, cwd=copy, capture_output=True, text=True, check=True).stdout
    shell = shown.rpartition("touch .venv/")[2].partition("\n")[2] or shown
    environment = {**os.environ, "BROWSER": "true", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        ["bash", "-c", shell.replace(".venv/bin/python", shlex.quote(sys.executable))],
        cwd=copy, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=LIMIT_S,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout and "Traceback" not in run.stderr
