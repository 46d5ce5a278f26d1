"""Write a plot to a file: a card like the drawings, in both languages, that follows dark mode. A
style sheet maps each colour of the plot to its dark one (`palette.in_the_dark`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any
from xml.sax.saxutils import unescape

import matplotlib.pyplot as plt
from matplotlib import rc_context
from matplotlib.figure import Figure

from workshop.book import figure_words
from workshop.book.figure_words import Words
from workshop.book.palette import FONT_SIZE, FONTS, INK, NEUTRAL, in_the_dark

CARD, DARK_CARD = NEUTRAL["card"]
EDGE, DARK_EDGE = NEUTRAL["border"]
DARK_INK = NEUTRAL["ink"][1]
MARGIN = 8  # points
# Advance widths of DejaVu Sans in thousandths of the size, from the space to the tilde.
_WIDTHS = """
318 401 460 838 636 950 780 275 390 390 500 838 318 361 318 337 636 636 636 636 636 636 636 636 636
636 337 337 838 838 838 531 1000 684 686 698 770 632 575 775 752 295 295 656 557 863 748 787 603
787 695 635 611 732 684 989 685 611 685 390 337 390 838 500 500 613 635 550 635 615 352 635 634 278
278 579 278 974 634 612 635 635 411 521 392 634 592 818 592 592 525 636 337 636 838
"""
_WIDTH = {chr(32 + i): int(width) / 1000 for i, width in enumerate(_WIDTHS.split())}
NOTHING = {"Date": None, "Creator": None, "Format": None, "Type": None}
STYLE: dict[Any, Any] = {
    # Text stays text, and what varies from run to run (ids, the date) is fixed: no diff.
    "svg.hashsalt": "vllm-from-scratch",
    "svg.fonttype": "none",
    "font.size": FONT_SIZE,
    "axes.titlesize": FONT_SIZE,
    "figure.titlesize": FONT_SIZE,
    "figure.titleweight": "bold",
    "axes.labelsize": FONT_SIZE,
    "legend.fontsize": FONT_SIZE - 1,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    **dict.fromkeys(
        ("axes.edgecolor", "axes.labelcolor", "text.color", "xtick.color", "ytick.color"), INK
    ),
}


def save(
    figures: dict[str, Callable[[], Figure]], folder: Path, words: Words | None = None
) -> list[Path]:
    """Draw each figure and write `folder/NAME.svg`, with the same bytes for the same data. With
    `words`, also write `NAME.zh.svg`."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    with rc_context(STYLE):
        for name, make in figures.items():
            figure, text = make(), StringIO()
            figure.savefig(text, format="svg", metadata=NOTHING)
            plt.close(figure)
            paths.append(folder / f"{name}.svg")
            svg = as_card(text.getvalue())
            paths[-1].write_text(svg, encoding="utf-8")
            if words is not None:
                chinese = folder / f"{name}.zh.svg"
                chinese.write_text(in_chinese(svg, words), encoding="utf-8")
    return paths


def as_card(svg: str) -> str:
    """Return Matplotlib's file as a card, with coordinates to a hundredth of a point."""
    svg = re.sub(r" ?font-family: [^;\"]*;?", "", svg)
    svg = re.sub(r"(-?\d+\.\d{3,})(?!\d*e)", lambda number: f"{float(number[1]):.2f}", svg)
    svg = re.sub(r" transform=\"rotate\(-0 [^)]*\)\"", "", svg)
    svg = re.sub(r"\s*<metadata>.*</metadata>|<!--.*?-->|<!DOCTYPE[^>]*>", "", svg, flags=re.S)
    svg = re.sub(r"\n(?=[LCQMz\"])", "", re.sub(r"\n\s+", "\n", svg))
    svg = re.sub(r"<style[^>]*>[^<]*</style>", f"<style>{style_of(svg)}</style>", svg, count=1)
    svg = re.sub(
        r'(<g clip-path="[^"]*")>((?:\n<use [^>]*?( style="[^"]*")/>)(?:\n<use [^>]*\3/>)*)',
        _same,
        svg,
    )
    # The card is a little larger than the figure, whose texts reach its edge.
    found = re.search(r'width="([\d.]+)pt" height="([\d.]+)pt" viewBox="[^"]*"', svg)
    assert found is not None
    width, height = (float(size) + 2 * MARGIN for size in found.groups())
    box = f'x="{0.5 - MARGIN}" y="{0.5 - MARGIN}" width="{width - 1:g}" height="{height - 1:g}"'
    size = f'width="{width:g}pt" height="{height:g}pt"'
    svg = svg.replace(found[0], f'{size} viewBox="-{MARGIN} -{MARGIN} {width:g} {height:g}"', 1)
    card = f'<rect {box} rx="8" class="card"/>'
    return re.sub(r'<g id="patch_1">.*?</g>', card, svg, count=1, flags=re.S)


def _same(marks: re.Match[str]) -> str:
    """Write the attributes that all marks of a group share only once."""
    return f"{marks[1]}{marks[3]}>{marks[2].replace(marks[3], '')}"


def in_chinese(svg: str, words: Words) -> str:
    """Return the plot with Chinese words. Matplotlib positions each line of a multi-line text
    separately: if the positions differ, the lines share a centre, which is kept."""

    def say_lines(texts: re.Match[str]) -> str:
        places = {float(x) for x in re.findall(r"translate\(([\d.]+)", texts[0])}
        if len(places) < 2:
            return texts[0]
        return re.sub(
            r'(font-size: ([\d.]+)px[^>]*translate\()([\d.]+)( [\d.]+\)">)([^<]*)',
            say_line,
            texts[0],
        )

    def say_line(line: re.Match[str]) -> str:
        size, english = float(line[2]), unescape(line[5])
        moved = (text_width(english, size) - text_width(words(english), size)) / 2
        return f"{line[1]}{float(line[3]) + moved:.2f}{line[4]}{line[5]}"

    svg = re.sub(r'<g id="text_\d+">.*?</g>', say_lines, svg, flags=re.S)
    return figure_words.in_chinese(svg, words)


def text_width(text: str, size: float) -> float:
    """Return a line's width in pixels. A Chinese character is as wide as it is high."""
    return sum(_WIDTH.get(char, 1.0 if char > "\u2e80" else 0.84) for char in text) * size


def style_of(svg: str) -> str:
    """Return the dark mode rules for everything that is drawn in colours."""
    texts = set(re.findall(r"<(?:text|tspan)[^>]*?(fill: #[0-9a-f]{6})", svg))
    marks = set(re.findall(r"(?:fill|stroke): #[0-9a-f]{6}", svg))
    rules = [(f'text[style*="{mark}"]', mark, True) for mark in sorted(texts)]
    rules += [(f':not(text)[style*="{mark}"]', mark, False) for mark in sorted(marks)]
    dark = ""
    for selector, mark, is_text in rules:
        what, color = mark.split(": ")
        if (changed := in_the_dark(color, is_text)) != color:
            dark += f"{selector}{{{what}:{changed}!important}}"
    return (
        f"*{{stroke-linejoin:round;stroke-linecap:butt}}text{{font-family:{FONTS};fill:{INK}}}"
        f".card{{fill:{CARD};stroke:{EDGE}}}@media (prefers-color-scheme: dark){{"
        f"text{{fill:{DARK_INK}}}.card{{fill:{DARK_CARD};stroke:{DARK_EDGE}}}{dark}}}"
    )
