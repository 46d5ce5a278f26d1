"""Where the book's code is: the repository's root, and the modules of a folder."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def count_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def modules_in(folder: Path) -> list[Path]:
    """The modules of a folder, without its tests, demos and fixtures."""
    return [
        path
        for path in sorted(folder.glob("*.py"))
        if not path.name.startswith("test_")
        and not path.name.endswith("_demo.py")
        and path.name != "conftest.py"
    ]
