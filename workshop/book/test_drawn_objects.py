"""The tree of `engine_objects.svg` shows the objects that `LLM()` builds."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path

from common.llm import LLM
from workshop.book.path import ROOT
from workshop.book.picture import Cell, Picture


def test_llm_builds_the_objects_that_are_drawn() -> None:
    """A line goes from an object to what its attribute holds; the number is the chapter."""
    picture = Picture("engine_objects")
    cells, key = picture.cells("objects"), picture.key()
    with closing(LLM(num_blocks=50)) as llm:
        objects: dict[str, object] = {"LLM": llm}
        for line in picture.lines("holds"):
            holder, held = (
                _cell_at(cells, point).text.split("\n") for point in (line[0], line[-1])
            )
            found = getattr(objects[holder[0]], held[1].removeprefix("."))
            assert objects.setdefault(held[0], found) is found, f"{held[0]} is another object"
            assert type(found).__name__ == held[0]
    assert objects.keys() == {cell.text.split("\n")[0] for cell in cells}
    for cell in cells:
        name, *others = cell.text.split("\n")
        folder = Path(str(sys.modules[type(objects[name]).__module__].__file__))
        chapter = folder.relative_to(ROOT).parts[0].removeprefix("0")[:1]
        number = others[1] if len(others) == 2 else "c"
        assert chapter == number, name
        is_chapter = cell.fill == key["the chapter with this number"]
        assert is_chapter == (number != "c"), name


def _cell_at(cells: list[Cell], point: tuple[float, float]) -> Cell:
    (found,) = (cell for cell in cells if cell.holds(point))
    return found
