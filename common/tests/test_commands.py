"""What `make`, pytest and the build say and leave out: each test starts one of them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from common.tests.house import House

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str, folder: Path = ROOT, **changes: str) -> subprocess.CompletedProcess[str]:
    how = dict(cwd=folder, capture_output=True, text=True, timeout=240)
    return subprocess.run(command, env={**os.environ, **changes}, **how)  # type: ignore


# -- make


LAYERS = ["grammar,chapters", "server", "test", "mooncake browser", "notebooks,dev"]
INSTALLS = {  # number of layers: targets
    1: "demo watch bench ladder",
    2: "serve",
    3: "matrix museum task demo:--mine watch:--mine",
    4: "check test",
    5: "lint format notebooks figures records sync",
}


@pytest.mark.needs("make")
def test_each_target_installs_what_it_needs_and_no_more(tmp_path: Path) -> None:
    """By a dry run in a bare clone: serving waits for no notebooks, tests or Mooncake."""
    for name in ("Makefile", "pyproject.toml", "requirements.lock"):
        shutil.copy(ROOT / name, tmp_path)

    def extras(target: str) -> list[str]:
        name, _, arguments = target.partition(":")
        dry = run("make", "-n", name, f"ARGS={arguments}", folder=tmp_path)
        assert dry.returncode == 0 and '"torch==' in dry.stdout and '"triton==' in dry.stdout
        return re.findall(r"-e '\.\[([\w,]+)\]'", dry.stdout)

    for number, targets in INSTALLS.items():
        expected = [extra for layer in LAYERS[:number] for extra in layer.split()]
        assert {t: extras(t) for t in targets.split()} == dict.fromkeys(targets.split(), expected)
    assert extras("book") == [*LAYERS[:3], "book"]
    assert extras("book:--check") == [*LAYERS[:3], "book", *LAYERS[3].split()]
    assert "pip" not in run("make", "-n", "gpu", folder=tmp_path).stdout


# -- pytest, with our conftest.py


HANGS = """
import time, pytest

def test_hangs():
    while True:
        pass

@pytest.mark.slow
def test_may_take_its_time():
    time.sleep(1.2)
"""


def test_one_that_hangs_fails_and_the_others_go_on(tmp_path: Path) -> None:
    """Trap 62."""
    (tmp_path / "test_it.py").write_text(HANGS)
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "-p", "conftest"]
    command += ["-n1", "-m", "", "-o", "timeout=1", "--rootdir", str(tmp_path), str(tmp_path)]
    said = run(*command).stdout
    assert "Timeout" in said and "1 failed, 1 passed" in said, said


NEEDY = """
import pytest

@pytest.mark.needs("browser")
def test_marked(): ...

def test_broken(): import httpx

@pytest.mark.sample(seed=2)
@pytest.mark.parametrize("kind", "abc")
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("low, high", [(1, 2), (3, 4)])
def test_grid(kind, seed, low, high): print("case", kind, seed, low)
"""


@pytest.mark.parametrize("is_required", [False, True], ids=["a reader", "the CI"])
def test_pytest_says_what_was_not_found(tmp_path: Path, is_required: bool) -> None:
    """Only what the table of conftest.py names is optional, and a failure has its name at once. Of
    a sample each value is tested once."""
    (tmp_path / "test_a.py").write_text(NEEDY, encoding="utf-8")
    (tmp_path / "test_b.py").write_text("import xgrammar\n", encoding="utf-8")
    code = "import sys; sys.modules |= dict.fromkeys(('xgrammar', 'httpx'))\n"
    code += "import pytest; sys.exit(pytest.main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "-p", "conftest", "-c", str(ROOT / "pyproject.toml")]
    command += ["-s", "--rootdir", str(tmp_path), "--continue-on-collection-errors", str(tmp_path)]
    said = run(*command, PATH="", VLLM_FS_REQUIRE_ALL="1" * is_required).stdout
    assert "\nfailed: test_a.py::test_broken\n" in said, said
    missing = re.findall(r"^not tried: (.*)", said, re.MULTILINE)
    assert missing == [] if is_required else "browser (apt" in missing[0] and "xgr" in missing[0]
    outcome = "errors" if is_required else "skipped"
    assert "1 failed, 3 passed" in said and f"2 {outcome}" in said, said
    kept = re.findall(r"case (\w) (\d) (\d)", said)
    assert [sorted(set(values)) for values in zip(*kept)] == [["a", "b", "c"], ["0", "1"], [*"13"]]
    assert len(kept) == 3 and "45 deselected" in said


# -- the wheel


def test_wheel_holds_flat_modules_and_nothing_else(tmp_path: Path) -> None:
    """Every module of the engine under its flat name, `common` without what works in a checkout
    only, and no test, helper of tests or text."""
    house = House(ROOT)
    built = run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path))
    assert built.returncode == 0, built.stdout + built.stderr
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        inside = {name for name in wheel.namelist() if ".dist-info/" not in name}
    flat = {p.name for p in house.chapter_modules()}
    flat |= {p.name for kind in ("cpp", "h") for p in ROOT.glob(f"0*/beyond/*.{kind}")}
    packaged = {
        house.name(p)
        for p in house.files
        if house.name(p).startswith("common/")
        and not house.name(p).startswith("common/serve/fleet/")
        and not house.is_aside(p)
        and p.suffix not in (".md", ".svg")
    }
    assert flat and packaged and inside == flat | packaged
