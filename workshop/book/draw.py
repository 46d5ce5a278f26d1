"""Drawings for the pages: boxes, strips of cells, arrows, brackets and small charts, as plain SVG.

A drawing is a card with its own background, so it can be read on any page. The neutral colours
follow the reader's dark mode; the palette's keep their meaning, and with it the ink on them.

What a reader would trip over is an error where it is drawn. `Drawing.svg` raises `ValueError` if

    a text leaves its box, or the card
    two texts overlap, or two boxes of which neither holds the other
    the edge of a box, or a line, runs through a text
    a text is too small to be read at half the size

How wide a text is, nobody can know: every reader has another font. It is measured in DejaVu Sans,
which is wider than the others that `FONTS` names. The bytes depend on nothing but the calls.

A script has its drawings in `DRAWINGS`, by the names of their files, and ends in `save_all`:
`make figures` runs it, and `test_drawings.py` compares what it draws with what is committed. Of
each there is a `NAME.zh.svg`, with the words of `figure_words.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, pairwise
from math import hypot
from pathlib import Path
from xml.sax.saxutils import escape

from workshop.book.figure_words import LANGUAGE, Words
from workshop.book.palette import INK, PAPER, PROMPT

FONTS = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif'
MONO = 'ui-monospace, "SF Mono", Menlo, Consolas, monospace'
SIZE, SMALL, LARGE = 16.0, 14.0, 18.0  # of text, in pixels; a card is at most 860 wide
MAX_WIDTH = 860
MUTED, LINE, SOFT = "#57606a", "#57606a", "#eef1f4"  # second text; lines; a box without a meaning
# The neutral colours: in the light, in the dark.
NEUTRAL = {
    ("card", "fill"): (PAPER, "#161b22"),
    ("card", "stroke"): ("#d0d7de", "#30363d"),
    ("paper", "fill"): (PAPER, "#0d1117"),
    ("soft", "fill"): (SOFT, "#262c36"),
    ("ink", "fill"): (INK, "#e6edf3"),
    ("muted", "fill"): (MUTED, "#9da7b3"),
    ("edge", "stroke"): (LINE, "#9da7b3"),
    ("strong", "stroke"): (INK, "#e6edf3"),
    ("prompt", "stroke"): (PROMPT, "#3d9bd6"),  # a thin line needs more light than a fill
    ("head", "fill"): (LINE, "#9da7b3"),
    ("grid", "stroke"): ("#d8dee4", "#30363d"),
}
# Advance widths of DejaVu Sans in thousandths of the size, from the space to the tilde.
_WIDTHS = """
318 401 460 838 636 950 780 275 390 390 500 838 318 361 318 337 636 636 636 636 636 636 636 636 636
636 337 337 838 838 838 531 1000 684 686 698 770 632 575 775 752 295 295 656 557 863 748 787 603
787 695 635 611 732 684 989 685 611 685 390 337 390 838 500 500 613 635 550 635 615 352 635 634 278
278 579 278 974 634 612 635 635 411 521 392 634 592 818 592 592 525 636 337 636 838
"""
_WIDTH = {chr(32 + i): int(width) / 1000 for i, width in enumerate(_WIDTHS.split())}

Point = tuple[float, float]


def text_width(text: str, size: float = SIZE, *, bold: bool = False, mono: bool = False) -> float:
    """Pixels that a line takes, rather too many than too few. A Chinese character is as wide as
    high."""
    latin = dict.fromkeys(_WIDTH, 0.602) if mono else _WIDTH
    widths = (latin.get(char, 1.0 if char > "\u2e80" else 0.84) for char in text)
    return sum(widths) * size * (1.13 if bold and not mono else 1)


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle. `left`, `right`, `top`, `bottom` are the middles of its sides."""

    x: float
    y: float
    width: float
    height: float

    @property
    def left(self) -> Point:
        return self.x, self.y + self.height / 2

    @property
    def right(self) -> Point:
        return self.x + self.width, self.y + self.height / 2

    @property
    def top(self) -> Point:
        return self.x + self.width / 2, self.y

    @property
    def bottom(self) -> Point:
        return self.x + self.width / 2, self.y + self.height

    @property
    def middle(self) -> Point:
        return self.x + self.width / 2, self.y + self.height / 2

    def holds(self, other: Box) -> bool:
        is_wide = self.x <= other.x and other.x + other.width <= self.x + self.width
        return is_wide and self.y <= other.y and other.y + other.height <= self.y + self.height

    def meets(self, other: Box) -> bool:
        """In more than an edge."""
        wide = min(self.x + self.width, other.x + other.width) - max(self.x, other.x)
        high = min(self.y + self.height, other.y + other.height) - max(self.y, other.y)
        return min(wide, high) > 1e-6

    def is_crossed(self, start: Point, end: Point) -> bool:
        """By the line between the two points."""
        steps = max(2, round(hypot(end[0] - start[0], end[1] - start[1])))
        points = [
            (start[0] + (end[0] - start[0]) * i / steps, start[1] + (end[1] - start[1]) * i / steps)
            for i in range(steps + 1)
        ]
        return any(
            self.x < x < self.x + self.width and self.y < y < self.y + self.height
            for x, y in points
        )


@dataclass(frozen=True, slots=True)
class Row:
    """A line of text, and the room that it takes."""

    text: str
    is_bold: bool
    room: Box


@dataclass(frozen=True, slots=True)
class Text:
    """Around the height `y`, further lines below; in a box, in its middle, `title` above `text`."""

    x: float
    y: float
    text: str
    title: str = ""
    size: float = SIZE
    anchor: str = "start"
    bold: bool = False
    mono: bool = False
    muted: bool = False
    ink: str | None = None  # for what stands on a colour
    box: Box | None = None

    def rows(self) -> list[Row]:
        lines = [(line, True) for line in self.title.split("\n") if line]
        lines += [(line, self.bold) for line in self.text.split("\n")]
        y = self.y - (0 if self.box is None else (len(lines) - 1) * self.size * 0.64)
        rows = []
        for i, (line, is_bold) in enumerate(lines):
            width = text_width(line, self.size, bold=is_bold, mono=self.mono)
            left = self.x - width * {"start": 0, "middle": 0.5, "end": 1}[self.anchor]
            top = y + (i * 1.28 - 0.5) * self.size
            rows.append(Row(line, is_bold, Box(left, top, width, self.size)))
        return rows

    def svg(self) -> list[str]:
        look = f'fill="{self.ink}"' if self.ink else f'class="{"muted" if self.muted else "ink"}"'
        look += f' font-size="{_n(self.size)}"'
        look += f' text-anchor="{self.anchor}"' if self.anchor != "start" else ""
        weight = {True: ' font-weight="600"', False: ""}
        family = f" font-family='{MONO}'" if self.mono else ""
        return [
            f'<text x="{_n(self.x)}" y="{_n(row.room.y + row.room.height * 0.85)}" '
            f"{look}{weight[row.is_bold]}{family}>{escape(row.text)}</text>"
            for row in self.rows()
        ]


@dataclass(slots=True)
class Drawing:
    """A card of so many pixels. `title` says what it shows, `desc` tells it to whoever cannot see
    it. Boxes and lines are drawn in the order of the calls, then the keys, texts above them."""

    width: float
    height: float
    title: str
    desc: str
    shapes: list[str] = field(default_factory=list)
    boxes: list[Box] = field(default_factory=list)
    texts: list[Text] = field(default_factory=list)
    keys: list[tuple[float, float, Mapping[str, str]]] = field(default_factory=list)
    lines: list[tuple[Point, Point]] = field(default_factory=list)

    # -- marks

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        label: str = "",
        *,
        fill: str = SOFT,
        size: float = SIZE,
        bold: bool = False,
        mono: bool = False,
        title: str = "",
        radius: float = 6,
        dashed: bool = False,
    ) -> Box:
        """With a bold `title` above its label. `fill` is a palette's colour, or SOFT or PAPER."""
        box = Box(x, y, width, height)
        neutral = {SOFT: "soft", PAPER: "paper"}.get(fill)
        look = f'class="{neutral} edge"' if neutral else f'fill="{fill}" class="edge"'
        if dashed:
            look += ' stroke-dasharray="5 4"'
        self.shapes.append(
            f'<rect x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}" '
            f'rx="{_n(radius)}" {look}/>'
        )
        self.boxes.append(box)
        if label or title:
            ink = None if neutral else ink_on(fill)
            self.texts.append(
                Text(*box.middle, label, title, size, "middle", bold, mono, ink=ink, box=box)
            )
        return box

    def cells(
        self,
        x: float,
        y: float,
        labels: Sequence[str],
        fills: Sequence[str] | str = SOFT,
        *,
        width: float = 36,
        height: float = 34,
    ) -> list[Box]:
        """A strip of equal cells, from left to right."""
        colors = [fills] * len(labels) if isinstance(fills, str) else fills
        return [
            self.box(x + i * width, y, width, height, label, fill=fill, radius=0)
            for i, (label, fill) in enumerate(zip(labels, colors, strict=True))
        ]

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = SIZE,
        anchor: str = "start",
        bold: bool = False,
        mono: bool = False,
        muted: bool = False,
    ) -> Box:
        """Returns the room that the first line takes."""
        if size < SMALL:
            raise ValueError(f"{text!r} has size {size}: at half the size nobody reads it")
        self.texts.append(Text(x, y, text, "", size, anchor, bold, mono, muted))
        return self.texts[-1].rows()[0].room

    def line(
        self, *points: Point, dashed: bool = False, color: str | None = None, width: float = 1.6
    ) -> None:
        """Through all points; in a palette's colour, if it has a meaning, or in INK."""
        path = " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
        look = f'stroke="{color}"' if color else 'class="edge"'
        look = {INK: 'class="strong"', PROMPT: 'class="prompt"'}.get(color or "", look)
        dashes = ' stroke-dasharray="5 4"' if dashed else ""
        self.shapes.append(
            f'<polyline points="{path}" fill="none" {look} stroke-width="{_n(width)}"{dashes}/>'
        )
        self.lines += pairwise(points)

    def arrow(
        self, *points: Point, dashed: bool = False, color: str | None = None, width: float = 1.6
    ) -> None:
        """A line with a head at its last point."""
        self.line(*points, dashed=dashed, color=color, width=width)
        (x0, y0), (x1, y1) = points[-2:]
        length = hypot(x1 - x0, y1 - y0) or 1
        dx, dy = (x1 - x0) / length, (y1 - y0) / length
        back, side = (x1 - 10 * dx, y1 - 10 * dy), (4.5 * -dy, 4.5 * dx)
        head = [(x1, y1)]
        head += [(back[0] + sign * side[0], back[1] + sign * side[1]) for sign in (1, -1)]
        path = " ".join(f"{_n(x)},{_n(y)}" for x, y in head)
        look = f'fill="{color}"' if color else 'class="head"'
        self.shapes.append(f'<polygon points="{path}" {look}/>')

    def grid(self, x0: float, y0: float, x1: float, y1: float) -> None:
        """A line that texts may cross."""
        ends = f'x1="{_n(x0)}" y1="{_n(y0)}" x2="{_n(x1)}" y2="{_n(y1)}"'
        self.shapes.append(f'<line class="grid" {ends}/>')

    def bracket(self, x0: float, x1: float, y: float, label: str, *, above: bool = True) -> None:
        """Over (or under) what stands between `x0` and `x1`, with a label in its middle."""
        up = -1 if above else 1
        self.line((x0, y), (x0, y + up * 7), (x1, y + up * 7), (x1, y))
        rows = label.split("\n")
        first = y + up * (7 + SMALL * 0.75)
        if above:
            first -= (len(rows) - 1) * SMALL * 1.28
        self.text((x0 + x1) / 2, first, label, size=SMALL, anchor="middle")

    def key(self, x: float, y: float, meanings: Mapping[str, str]) -> None:
        """What each fill means, in a row: meaning -> colour."""
        self.keys.append((x, y, meanings))

    # -- the file

    def check(self) -> None:
        """Raise `ValueError` for what a reader would trip over."""
        card = Box(8, 8, self.width - 16, self.height - 16)
        if self.width > MAX_WIDTH:
            raise ValueError(f"the card is {self.width} wide: at most {MAX_WIDTH}")
        rows = [(row.text, row.room, text.box) for text in self.texts for row in text.rows()]
        for text, room, own in rows:
            if own is not None and not own.holds(room):
                raise ValueError(f"{text!r} leaves its box: {room} of {own}")
            if not card.holds(room):
                raise ValueError(f"{text!r} leaves the card: {room}")
            for box in self.boxes:
                if box.meets(room) and not box.holds(room):
                    raise ValueError(f"the edge of {box} runs through {text!r} at {room}")
            for start, end in self.lines:
                if room.is_crossed(start, end):
                    raise ValueError(f"the line {start} - {end} runs through {text!r}")
        for first, second in combinations(self.boxes, 2):
            if first.meets(second) and not (first.holds(second) or second.holds(first)):
                raise ValueError(f"two boxes overlap: {first}, {second}")
        for (one, first, _), (other, second, _) in combinations(rows, 2):
            if first.meets(second):
                raise ValueError(f"{one!r} and {other!r} overlap")

    def svg(self, words: Words | None = None) -> str:
        """In English, or with those words."""
        say = words or str
        card = replace(self, shapes=[*self.shapes], boxes=[*self.boxes], texts=[])
        for text in self.texts:
            if words:
                said = {"text": words(text.text, text.mono), "title": words(text.title)}
                text = replace(text, **said)
            card.texts.append(text)
        for x, y, meanings in self.keys:
            for meaning, fill in meanings.items():
                card.box(x, y - 8, 16, 16, fill=fill, radius=2)
                room = card.text(x + 23, y, say(meaning), size=SMALL)
                x = room.x + room.width + 22
        card.check()
        size = f'width="{_n(self.width)}" height="{_n(self.height)}"'
        language = f' lang="{LANGUAGE}"' if words else ""
        head = [
            f'<svg xmlns="http://www.w3.org/2000/svg"{language} {size} '
            f'viewBox="0 0 {_n(self.width)} {_n(self.height)}" role="img" '
            f"font-family='{FONTS}' aria-labelledby=\"title desc\">",
            f'<title id="title">{escape(say(self.title))}</title>',
            f'<desc id="desc">{escape(say(self.desc))}</desc>',
            _style(),
            f'<rect class="card" x="0.5" y="0.5" width="{_n(self.width - 1)}" '
            f'height="{_n(self.height - 1)}" rx="10"/>',
        ]
        rows = [row for text in card.texts for row in text.svg()]
        return "\n".join([*head, *card.shapes, *rows, "</svg>"]) + "\n"


def ink_on(fill: str) -> str:
    """The colour of text on this one: white or black, whichever stands out more."""
    light = luminance(fill) + 0.05
    return "#ffffff" if 1.05 / light > light / 0.055 else "#111111"


def luminance(color: str) -> float:
    """Of `#rrggbb`, from 0 to 1."""
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _style() -> str:
    light = "".join(f".{name}{{{what}:{NEUTRAL[name, what][0]}}}" for name, what in NEUTRAL)
    dark = "".join(f".{name}{{{what}:{NEUTRAL[name, what][1]}}}" for name, what in NEUTRAL)
    return f"<style>{light}@media (prefers-color-scheme: dark){{{dark}}}</style>"


def _n(number: float) -> str:
    return f"{round(number, 1):g}"


def save_all(drawings: Mapping[str, Callable[[], Drawing]], script: str) -> None:
    """Write each to the `figures/` beside the folder of `script`, its `__file__`, in both
    languages."""
    folder = Path(script).resolve().parents[1] / "figures"
    words = Words.beside(folder)
    for name, make in drawings.items():
        drawing = make()
        (folder / f"{name}.svg").write_text(drawing.svg(), encoding="utf-8")
        (folder / f"{name}.zh.svg").write_text(drawing.svg(words), encoding="utf-8")
