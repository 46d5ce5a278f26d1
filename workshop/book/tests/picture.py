"""Read a drawing for its tests: cells and texts of a group, by its `id`."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import dataclass

from workshop.book.drawings import drawings


@dataclass(slots=True)
class Cell:
    """A rectangle or a circle, with the texts that follow in the file and lie inside."""

    fill: str  # its first class
    text: str
    x: float
    y: float
    width: float
    height: float

    def holds(self, x: float, y: float) -> bool:
        """With a tolerance of a pixel."""
        is_wide = self.x - 1 <= x <= self.x + self.width + 1
        return is_wide and self.y - 1 <= y <= self.y + self.height + 1


class Picture:
    def __init__(self, name: str) -> None:
        (path,) = (path for path in drawings() if path.stem == name)
        self.root = ET.parse(path).getroot()

    def marks(self, group: str) -> list[Cell | str]:
        """Cells, and texts outside of cells, in file order. With an empty `group`, those outside of
        all groups."""
        found: list[Cell | str] = []
        for mark in self.root.findall(f".//*[@id='{group}']/*" if group else "*"):
            tag = mark.tag.partition("}")[2]
            cells = [one for one in found if isinstance(one, Cell)]
            if tag in ("rect", "circle") and mark.get("class") != "card":
                found.append(_cell(mark))
            elif tag == "text":
                text = "\n".join(mark.itertext())
                if cells and cells[-1].holds(_number(mark, "x"), _number(mark, "y")):
                    cells[-1].text = f"{cells[-1].text}\n{text}".strip()
                else:
                    found.append(text)
        return found

    def cells(self, group: str) -> list[Cell]:
        return [mark for mark in self.marks(group) if isinstance(mark, Cell)]

    def shown(self, group: str) -> list[tuple[str, str]]:
        """Return fill and text of each cell."""
        return [(cell.fill, cell.text) for cell in self.cells(group)]

    def texts(self, group: str = "") -> list[str]:
        return [mark for mark in self.marks(group) if isinstance(mark, str)]

    def key(self) -> dict[str, str]:
        """Return the colour key: meaning -> fill."""
        fills = [cell.fill for cell in self.cells("key")]
        return dict(zip(self.texts("key"), fills, strict=True))


def _cell(mark: ET.Element) -> Cell:
    x, y, r = (_number(mark, name) for name in ("cx", "cy", "r"))
    place = [_number(mark, name) for name in ("x", "y", "width", "height")]
    place = [x - r, y - r, 2 * r, 2 * r] if r else place
    return Cell(mark.get("class", "").partition(" ")[0], "", *place)


def _number(mark: ET.Element, name: str) -> float:
    return float(mark.get(name, 0))
