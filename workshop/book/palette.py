"""The colours of every figure in this book. A colour keeps its meaning from chapter to chapter.

Shades of a colour are variants of its meaning (`tint`). Marks without a meaning are drawn in `INK`.
Labels are next to their marks where there is space (`label_line`), and text is large enough to be
read at half the size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from common.events.page_colours import *  # noqa: F403
from common.events.page_colours import INK, PAPER

if TYPE_CHECKING:  # drawings do not need it, and the import takes a second
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colours without a meaning follow the reader's dark mode: light mode -> dark mode.
NEUTRAL = {
    "card": (PAPER, "#161b22"),
    "border": ("#d0d7de", "#30363d"),  # of the card
    "paper": (PAPER, "#0d1117"),
    "soft": ("#eef1f4", "#262c36"),
    "ink": (INK, "#e6edf3"),
    "muted": ("#57606a", "#9da7b3"),  # lines, and second texts
    "grid": ("#d8dee4", "#30363d"),
}
FONTS = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif'
FONT_SIZE = 14  # points; figures are at most 9 inches wide
_DARKEST = 0.06  # luminance of a shade


def tint(color: str, share: float) -> str:
    """`color` mixed with white: 1 is the colour itself, 0 is white."""
    return _hex(1 - share * (1 - part) for part in _parts(color))


def shade(color: str, share: float) -> str:
    """`color` mixed with black: 1 is the colour itself, 0 is black."""
    return _hex(share * part for part in _parts(color))


def luminance(color: str) -> float:
    """Return the luminance of `#rrggbb`, from 0 to 1."""
    parts = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in _parts(color)]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


def in_the_dark(color: str, is_text: bool = False) -> str:
    """Return a colour's dark mode variant. Neutral colours are swapped, white with the card. A
    colour with a meaning stays, but is mixed with white if a line or a text in it would be too dark
    to see. `#111111` and `#ffffff`, for text on a colour, stay."""
    if color in (PAPER, "#111111") and is_text:
        return color
    card = NEUTRAL["card"][1]
    if color == PAPER:
        return card
    parts = _parts(color)
    if max(parts) - min(parts) < 0.03:
        return tint("#000000", min(1.0, parts[1] - 0.06 if parts[1] > 0.06 else 0))
    contrast, share = (4.5 if is_text else 3), 1.0
    if luminance(color) < _DARKEST:  # a dark shade tells two lines apart: a light one does
        contrast = 8
    while luminance(tint(color, share)) + 0.05 < contrast * (luminance(card) + 0.05):
        share -= 0.02
    return tint(color, share)


def _parts(color: str) -> list[float]:
    return [part / 255 for part in bytes.fromhex(color[1:])]


def _hex(parts: Iterable[float]) -> str:
    return "#" + "".join(f"{round(255 * part):02x}" for part in parts)


def label_line(axis: Axes, x: float, y: float, text: str, color: str, **style: Any) -> None:
    """Write `text` next to a mark at `(x, y)`; `ha`, `va` and `offset` (points) set the side."""
    offset = style.pop("offset", (6, 0))
    look = {"ha": "left", "va": "center", "color": shade(color, 0.8), **style}
    axis.annotate(text, (x, y), xytext=offset, textcoords="offset points", **look)


def label_axes(axis: Axes, title: str, xlabel: str, ylabel: str, **scales: Any) -> None:
    """Set a panel's title and axis labels with units, and draw a grid."""
    axis.set(title=title, xlabel=xlabel, ylabel=ylabel, **scales)
    axis.grid()


def add_key(figure: Figure, colors: Mapping[str, str]) -> None:
    """Add the meaning of each fill, in a row below the panels."""
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=c, edgecolor=INK, label=meaning) for meaning, c in colors.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(colors))
