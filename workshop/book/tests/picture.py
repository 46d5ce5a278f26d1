"""Read a drawing for its tests: cells, texts and points of a group, by its `id`."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import dataclass, replace

from workshop.book.drawings import drawings

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Cell:
    """A rectangle or a circle, with the texts that follow in the file and lie inside."""

    fill: str  # its first class
    text: str
    x: float
    y: float
    width: float
    height: float

    def holds(self, point: Point) -> bool:
        """Whether the cell holds the point, with a tolerance of a pixel."""
        is_wide = self.x - 1 <= point[0] <= self.x + self.width + 1
        return is_wide and self.y - 1 <= point[1] <= self.y + self.height + 1


class Picture:
    def __init__(self, name: str) -> None:
        (path,) = (path for path in drawings() if path.stem == name)
        self.root = ET.parse(path).getroot()
        for element in self.root.iter():
            element.tag = element.tag.partition("}")[2]

    def marks(self, group: str) -> list[Cell | str | list[Point]]:
        """Cells, texts outside cells, and the points of lines, in file order. With an empty
        `group`, those outside all groups."""
        found: list[Cell | str | list[Point]] = []
        for mark in self.root if not group else self._group(group):
            if mark.tag in ("rect", "circle") and mark.get("class") != "card":
                found.append(_cell(mark))
            elif mark.tag == "polyline":
                found.append([_point(pair) for pair in mark.get("points", "").split()])
            elif mark.tag == "text":
                text = "\n".join(mark.itertext())
                last = next((m for m in reversed(found) if isinstance(m, Cell)), None)
                if last and last.holds((_number(mark, "x"), _number(mark, "y"))):
                    text = f"{last.text}\n{text}" if last.text else text
                    found[found.index(last)] = replace(last, text=text)
                else:
                    found.append(text)
        return found

    def cells(self, group: str) -> list[Cell]:
        return [mark for mark in self.marks(group) if isinstance(mark, Cell)]

    def shown(self, group: str) -> list[tuple[str, str]]:
        """Return fill and text of each cell."""
        return [(cell.fill, cell.text) for cell in self.cells(group)]

    def labels(self, group: str) -> list[str]:
        return [cell.text for cell in self.cells(group)]

    def texts(self, group: str = "") -> list[str]:
        return [mark for mark in self.marks(group) if isinstance(mark, str)]

    def lines(self, group: str) -> list[list[Point]]:
        return [mark for mark in self.marks(group) if isinstance(mark, list)]

    def key(self) -> dict[str, str]:
        """Return the colour key: meaning -> fill."""
        fills = [cell.fill for cell in self.cells("key")]
        return dict(zip(self.texts("key"), fills, strict=True))

    def _group(self, name: str) -> ET.Element:
        (group,) = (group for group in self.root.iter("g") if group.get("id") == name)
        return group


def _cell(mark: ET.Element) -> Cell:
    fill = mark.get("class", "").partition(" ")[0]
    if mark.tag == "circle":
        x, y, r = (_number(mark, name) for name in ("cx", "cy", "r"))
        return Cell(fill, "", x - r, y - r, 2 * r, 2 * r)
    place = [_number(mark, name) for name in ("x", "y", "width", "height")]
    return Cell(fill, "", *place)


def _number(mark: ET.Element, name: str) -> float:
    return float(mark.get(name, 0))


def _point(pair: str) -> Point:
    x, y = map(float, pair.split(","))
    return x, y
