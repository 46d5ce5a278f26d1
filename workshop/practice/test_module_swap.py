"""The import hook: which imports get the other file, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from workshop.practice.module_swap import ModuleSwap

ROOT = Path(__file__).resolve().parents[2]


def changed(source: str, folder: Path, end: str) -> Path:
    """A copy of a file of the repository with `end` appended."""
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
    paths = {name: changed(source, tmp_path, "\nX = 1\n") for name, source in swapped.items()}
    code = """
import sys
from pathlib import Path
from workshop.practice.module_swap import ModuleSwap
swaps = [ModuleSwap(name, Path(path)) for name, path in zip(sys.argv[1::2], sys.argv[2::2])]
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
    named = [text for pair in paths.items() for text in map(str, pair)]
    command = [sys.executable, "-c", code, *named]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    shown = "1 1 1 workshop.practice.source_patch\nFalse False\n"
    assert done.stdout == shown, done.stderr


def test_a_module_that_is_there_already_is_not_swapped(tmp_path: Path) -> None:
    path = changed("workshop/practice/module_swap.py", tmp_path, "")
    with pytest.raises(RuntimeError, match="already imported"):
        ModuleSwap("workshop.practice.module_swap", path).install()
    with pytest.raises(RuntimeError, match="must come from"):
        ModuleSwap("workshop.practice.module_swap", path).check()
