"""The hook alone, and in pytest, with and without xdist's workers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from workshop.practice.module_swap import PLUGIN, VARIABLE, ModuleSwap, swap_of

ROOT = Path(__file__).resolve().parents[2]
FLAT_TEST = "04_scheduler/test_policies.py::test_every_policy_has_its_name"
CONFTEST_TEST = "03_prefix_cache/test_prefix_cache.py::test_an_empty_cache_hits_nothing"


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def changed(source: str, folder: Path, end: str) -> Path:
    """A copy of a file of the repository with `end` behind it."""
    path = folder / Path(source).name
    path.write_text((ROOT / source).read_text(encoding="utf-8") + end, encoding="utf-8")
    return path


def test_modules_of_chapters_and_of_packages_come_from_the_other_file(tmp_path: Path) -> None:
    """And those that are not named do not. One process has one swap a module."""
    swapped = {
        "block_pool": "02_paged_kv/block_pool.py",
        "sglang_policies": "04_scheduler/beyond/sglang_policies.py",
        "workshop.practice.source_patch": "workshop/practice/source_patch.py",
    }
    before = {source: (ROOT / source).read_bytes() for source in swapped.values()}
    paths = {name: changed(source, tmp_path, "\nX = 1\n") for name, source in swapped.items()}
    code = """
import sys
from workshop.practice.module_swap import swap_of
swaps = [swap_of(text) for text in sys.argv[1:]]
for swap in swaps + swaps:
    swap.install()
import block_pool, request, sglang_policies
from workshop.practice import module_swap
from workshop.practice import source_patch
for swap in swaps:
    swap.check()
print(block_pool.X, sglang_policies.X, source_patch.X, source_patch.__name__)
print(hasattr(request, "X"), hasattr(module_swap, "X"))
"""
    done = run("-c", code, *(f"{name}={path}" for name, path in paths.items()))
    assert done.stdout.split() == [
        *"111",
        "workshop.practice.source_patch",
        "False",
        "False",
    ], done.stderr
    assert before == {source: (ROOT / source).read_bytes() for source in swapped.values()}


def test_a_module_that_is_there_already_is_not_swapped(tmp_path: Path) -> None:
    path = changed("workshop/practice/module_swap.py", tmp_path, "")
    with pytest.raises(RuntimeError, match="already imported"):
        ModuleSwap(PLUGIN, path).install()
    with pytest.raises(RuntimeError, match="must come from"):
        ModuleSwap(PLUGIN, path).check()
    assert not any(isinstance(finder, ModuleSwap) for finder in sys.meta_path)


@pytest.mark.parametrize("text", ["", "radix_cache", "=a.py", "radix_cache="])
def test_what_names_no_module_and_file_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="must be MODULE=FILE"):
        swap_of(text)


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must name a file"):
        ModuleSwap("nobody", tmp_path / "nobody.py").install()


# -- pytest


def pytest_with(swap: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", PLUGIN, *arguments]
    return run(*command, **{VARIABLE: swap})


@pytest.mark.slow  # the next test gets it in a worker of xdist
def test_tests_get_the_other_file(tmp_path: Path) -> None:
    path = changed("04_scheduler/policies.py", tmp_path, "\nPOLICIES['the other file'] = None\n")
    done = pytest_with(f"policies={path}", FLAT_TEST)
    assert done.returncode == 1 and "the other file" in done.stdout, done.stdout + done.stderr


def test_so_do_those_in_a_worker_of_xdist_and_its_conftest(tmp_path: Path) -> None:
    """Chapter 3's conftest.py imports the module, before any test does."""
    end = "\n\ndef refuse(*_):\n    raise LookupError('the other file')\n\n"
    path = changed("02_paged_kv/block_pool.py", tmp_path, end + "BlockPool.__init__ = refuse\n")
    done = pytest_with(f"block_pool={path}", "-n", "1", CONFTEST_TEST)
    assert done.returncode == 1 and "the other file" in done.stdout, done.stdout + done.stderr


def test_pytest_stops_with_a_sentence_if_there_is_nothing_to_run(tmp_path: Path) -> None:
    path = tmp_path / "policies.py"
    path.write_text("def f(:\n")
    done = pytest_with(f"policies={path}", FLAT_TEST)
    assert done.returncode == 4 and "SyntaxError" in done.stderr, done.stdout + done.stderr
    assert "INTERNALERROR" not in done.stdout + done.stderr
