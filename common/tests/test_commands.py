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


def run(*command: str, folder: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, **environment}
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=240, env=variables
    )


# -- make


LAYERS = ["grammar,chapters", "server", "test", "mooncake browser", "notebooks,dev"]
INSTALLS = {  # number of layers: targets
    1: "demo watch bench ladder",
    2: "serve",
    3: "matrix museum task demo:--mine watch:--mine",
    4: "check test",
    5: "lint format notebooks figures sync",
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
    time.sleep(2.5)
"""
BESIDE_A_GPU = """
import subprocess, sys
import pytest, torch

torch.cuda.is_available = lambda: True  # before it is imported that asks for it
torch.cuda.init = torch.cuda.device_count = lambda: 1

from common.engine_config import EngineConfig
from common.tests.kernel_device import device
from kernel_launch import Launch

def test_of_a_kernel(device, request):
    assert device.type == "cuda" and request.node.get_closest_marker("gpu")

@pytest.mark.gpu
def test_of_an_engine_there():
    assert EngineConfig(device="cuda").resolve_device().type == "cuda"

def test_of_an_engine(request):
    assert EngineConfig().resolve_device().type == "cpu"
    assert not request.node.get_closest_marker("gpu")
    code = "import os; print(repr(os.environ['CUDA_VISIBLE_DEVICES']))"
    assert subprocess.check_output([sys.executable, "-c", code]) == b"''\\n"

def test_of_an_interpreted_kernel():
    Launch(None, {}, {})((1,), torch.zeros(1))
"""
OUR_PYTEST: dict[str, tuple[str, list[str], list[str]]] = {
    # a test, options, what is said
    "trap 62: one that hangs fails, and the others go on": (
        HANGS,
        ["-n1"],
        ["Timeout", "1 failed, 1 passed"],
    ),
    # The GPU is pretended. Before, each engine whose test names no device was CUDA's.
    "beside a GPU kernels are tested there and the engine on the CPU": (
        BESIDE_A_GPU,
        ["-v", "-rs"],
        ["3 passed, 1 skipped", "of_an_interpreted_kernel SKIPPED", "take no CPU tensor"],
    ),
}


@pytest.mark.parametrize("case", OUR_PYTEST)
def test_pytest_with_our_settings(case: str, tmp_path: Path) -> None:
    text, options, expected = OUR_PYTEST[case]
    (tmp_path / "test_it.py").write_text(text)
    shutil.copy(ROOT / "conftest.py", tmp_path)
    marks = "".join(f"    {mark}: m\n" for mark in ("gpu", "slow", "book"))
    (tmp_path / "pytest.ini").write_text(f"[pytest]\ntimeout = 1\nmarkers =\n{marks}")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--import-mode=importlib"]
    said = run(*command, *options, str(tmp_path), folder=tmp_path).stdout
    assert [part for part in expected if part not in said] == [], said


NEEDY = """
import pytest

@pytest.mark.needs("browser")
def test_marked(): ...

@pytest.fixture
def peft():
    import peft

def test_by_its_fixture(peft): ...

def test_broken(): import httpx

@pytest.mark.sample(seed=2)
@pytest.mark.parametrize("kind", "abc")
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("low, high", [(1, 2), (3, 4)])
def test_grid(kind, seed, low, high): print("case", kind, seed, low)
"""


@pytest.mark.parametrize("is_required", [False, True], ids=["a reader", "the CI"])
def test_pytest_says_what_was_not_found_and_left_out(tmp_path: Path, is_required: bool) -> None:
    """Only what the table of conftest.py names is optional, and a failure has its name at once. Of
    a sample each value is tested once."""
    (tmp_path / "test_a.py").write_text(NEEDY, encoding="utf-8")
    (tmp_path / "test_b.py").write_text("import xgrammar\n", encoding="utf-8")
    code = "import sys; sys.modules |= dict.fromkeys(('peft', 'xgrammar', 'httpx'))\n"
    code += "import pytest; sys.exit(pytest.main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "-p", "conftest", "-c", str(ROOT / "pyproject.toml")]
    command += ["-s", "--rootdir", str(tmp_path), "--continue-on-collection-errors", str(tmp_path)]
    said = run(*command, PATH="", VLLM_FS_REQUIRE_ALL="1" * is_required).stdout
    assert "\nfailed: test_a.py::test_broken\n" in said, said
    missing = re.findall(r"^not tried: (.*)", said, re.MULTILINE)
    assert missing == [] if is_required else "browser (apt" in missing[0] and "; peft" in missing[0]
    outcome = "errors" if is_required else "skipped"
    assert "1 failed, 3 passed" in said and f"3 {outcome}" in said, said
    kept = re.findall(r"case (\w) (\d) (\d)", said)
    assert [sorted(set(values)) for values in zip(*kept)] == [["a", "b", "c"], ["0", "1"], [*"13"]]
    assert len(kept) == 3 and "left out: 45 cases of large grids; to run them: -m slow" in said


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
