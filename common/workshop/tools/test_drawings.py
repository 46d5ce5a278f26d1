"""The committed figures are what their scripts draw, in both languages."""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from common.workshop.tools.figure_words import Words

ROOT = Path(__file__).resolve().parents[3]
PLACES = ("[0-9][0-9]_*/lab/plot_*.py", "common/workshop/*/plot_*.py")  # as `make figures` has them
SCRIPTS = sorted(
    path
    for place in PLACES
    for path in ROOT.glob(place)
    if "from common.workshop.tools.draw import" in path.read_text(encoding="utf-8")
)


@cache
def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"drawn_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_what_is_committed_is_what_is_drawn(script: Path) -> None:
    drawings = load(script).DRAWINGS
    assert drawings
    folder = script.parents[1] / "figures"
    for name, draw in drawings.items():
        drawing = draw()
        for suffix, words in ((".svg", None), (".zh.svg", Words.beside(folder))):
            path = folder / (name + suffix)
            drawn = drawing.svg(words)
            assert path.read_text(encoding="utf-8") == drawn, f"{path.name}: run {script.name}"


def test_there_are_scripts_and_no_two_draw_one_file() -> None:
    names = [(script.parents[1], name) for script in SCRIPTS for name in load(script).DRAWINGS]
    assert len(SCRIPTS) > 1 and len(set(names)) == len(names)
