"""A plot as a file: a card like those of `draw.py`, in both languages, that follows the dark mode.

A style sheet says what each colour of the plot is in the dark. Neutral colours change places, white
with the card. A colour that has a meaning keeps it, and is mixed with white if it were too dark to
see. `#111111` and `#ffffff` are for text on a colour (`draw.ink_on`): they stay.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape, unescape

import matplotlib.pyplot as plt
from matplotlib import rc_context
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from workshop.book.draw import FONTS, NEUTRAL, luminance, text_width
from workshop.book.figure_words import LANGUAGE, Words
from workshop.book.palette import FONT_SIZE, INK, PAPER, tint

CARD, DARK_CARD = NEUTRAL["card", "fill"]
EDGE, DARK_EDGE = NEUTRAL["card", "stroke"]
MARGIN = 8  # points
DARK_INK = NEUTRAL["ink", "fill"][1]
DARKEST = 0.06  # luminance of a shade
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


def save(figures: dict[str, Callable[[], Figure]], folder: Path) -> list[Path]:
    """Draw each figure and write `folder/NAME.svg`, the same bytes for the same data; where the
    folder has Chinese words, `NAME.zh.svg` too."""
    folder.mkdir(parents=True, exist_ok=True)
    words = Words.beside(folder)
    paths = []
    with rc_context(STYLE):
        for name, make in figures.items():
            figure, text = make(), StringIO()
            figure.savefig(text, format="svg", metadata=NOTHING)
            plt.close(figure)
            paths.append(folder / f"{name}.svg")
            svg = as_card(text.getvalue())
            paths[-1].write_text(svg, encoding="utf-8")
            if words.path.exists():
                chinese = folder / f"{name}.zh.svg"
                chinese.write_text(in_chinese(svg, words), encoding="utf-8")
    return paths


def as_card(svg: str) -> str:
    """Matplotlib's file, with places to a hundredth of a point."""
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
    """What is the same of all marks of a group, once."""
    return f"{marks[1]}{marks[3]}>{marks[2].replace(marks[3], '')}"


def in_chinese(svg: str, words: Words) -> str:
    """The same plot with these words. Matplotlib gives each line of a text of several a place of
    its own: where those differ, the lines have one middle, which stays."""

    def say(text: re.Match[str]) -> str:
        return text[1] + escape(words(unescape(text[2])))

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
    svg = re.sub(r"(<text\b[^>]*>)([^<]*)(?=</text>)", say, svg)
    return svg.replace("<svg ", f'<svg lang="{LANGUAGE}" ', 1)


def style_of(svg: str) -> str:
    """Of all that is drawn in colours: how it looks in the dark."""
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


def in_the_dark(color: str, is_text: bool = False) -> str:
    if color in (PAPER, "#111111") and is_text:
        return color
    if color == PAPER:
        return DARK_CARD
    red, green, blue = to_rgb(color)
    if max(red, green, blue) - min(red, green, blue) < 0.03:
        return tint("#000000", min(1.0, green - 0.06 if green > 0.06 else 0))
    contrast, share = (4.5 if is_text else 3), 1.0
    if luminance(color) < DARKEST:  # a dark shade tells two lines apart: a light one does
        contrast = 8
    while luminance(tint(color, share)) + 0.05 < contrast * (luminance(DARK_CARD) + 0.05):
        share -= 0.02
    return tint(color, share)
