"""The committed figures are what their scripts draw, in both languages."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from workshop.book.draw import Drawing
from workshop.book.figure_file import in_chinese
from workshop.book.figure_words import Words

ROOT = Path(__file__).resolve().parents[2]
PLACES = ("[0-9][0-9]_*/lab/plot_*.py", "workshop/*/plot_*.py")  # as `make figures` has them
SCRIPTS = sorted(
    path
    for place in PLACES
    for path in ROOT.glob(place)
    if "\nDRAWINGS = " in path.read_text(encoding="utf-8")
)


@cache
def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"drawn_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


FOLDERS = sorted(path.parent for path in ROOT.glob("*[0-9a-z]*/**/figures/zh.txt"))


def drawings_of(folder: Path) -> dict[str, Callable[[], Drawing]]:
    """By the names of their files. No two scripts draw one file."""
    found = {}
    for script in SCRIPTS:
        if script.parents[1] / "figures" == folder:
            drawings = load(script).DRAWINGS
            assert drawings and not found.keys() & drawings.keys(), script.name
            found |= drawings
    return found


def test_there_are_folders() -> None:
    assert {script.parents[1] / "figures" for script in SCRIPTS} <= set(FOLDERS)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.parent.name)
def test_what_is_committed_is_what_is_drawn(folder: Path) -> None:
    """A plot is compared with its own file in English: who draws it anew needs matplotlib's
    version. Each text has its Chinese (`Words` raises), and no Chinese is left over."""
    words = Words.beside(folder)
    drawings = drawings_of(folder)
    for path in sorted(folder.glob("*.svg")):
        name = path.name.removesuffix(".svg")
        if name.endswith(".zh"):
            assert (folder / f"{name.removesuffix('.zh')}.svg").exists(), path
            continue
        svg, chinese = (
            (folder / f"{name}{end}.svg").read_text(encoding="utf-8") for end in ("", ".zh")
        )
        if name in drawings:
            drawing = drawings[name]()
            assert svg == drawing.svg(), f"{path.name}: run its script"
            assert chinese == drawing.svg(words), f"{name}.zh.svg: run its script"
        else:
            assert chinese == in_chinese(svg, words), f"{name}.zh.svg: run its script"
    assert not words.pairs.keys() - words.used, "no figure says so"
