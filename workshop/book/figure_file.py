"""Write a plot to a file: a card like the drawings, in both languages, that follows dark mode. A
style sheet maps each colour of the plot to its dark one (`palette.in_the_dark`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

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
                chinese.write_text(figure_words.in_chinese(svg, words), encoding="utf-8")
    return paths


def as_card(svg: str) -> str:
    """Return Matplotlib's file as a card, with coordinates to a hundredth of a point."""
    svg = re.sub(r" ?font-family: [^;\"]*;?", "", svg)
    svg = re.sub(r"(-?\d+\.\d{3,})(?!\d*e)", lambda number: f"{float(number[1]):.2f}", svg)
    svg = re.sub(r" transform=\"rotate\(-0 [^)]*\)\"", "", svg)
    svg = re.sub(r"\s*<metadata>.*</metadata>|<!--.*?-->|<!DOCTYPE[^>]*>", "", svg, flags=re.S)
    svg = re.sub(r"\n(?=[LCQMz\"])", "", re.sub(r"\n\s+", "\n", svg))
    svg = re.sub(r"<style[^>]*>[^<]*</style>", f"<style>{style_of(svg)}</style>", svg, count=1)
    # The card is a little larger than the figure, whose texts reach its edge.
    found = re.search(r'width="([\d.]+)pt" height="([\d.]+)pt" viewBox="[^"]*"', svg)
    assert found is not None
    width, height = (float(size) + 2 * MARGIN for size in found.groups())
    box = f'x="{0.5 - MARGIN}" y="{0.5 - MARGIN}" width="{width - 1:g}" height="{height - 1:g}"'
    size = f'width="{width:g}pt" height="{height:g}pt"'
    svg = svg.replace(found[0], f'{size} viewBox="-{MARGIN} -{MARGIN} {width:g} {height:g}"', 1)
    card = f'<rect {box} rx="8" class="card"/>'
    return re.sub(r'<g id="patch_1">.*?</g>', card, svg, count=1, flags=re.S)


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
