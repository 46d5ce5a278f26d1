"""Drawings: figures that show an idea and not a measurement. Each is an SVG that is edited by hand.

Its first tag has the class `drawing`. Classes replace colours and fonts:

    prompt, cached-30     a fill with a colour of the palette, or with that share of it in white
    line-prompt           a line in that colour; head-prompt: the head of such an arrow
    soft, paper           a fill without a meaning
    heading, small        a text's size; bold, muted, code, mid and end: its look
    on-light, on-dark     a text on a colour
    dashed, thick, lane   a line's look; grid: a line that texts may cross
    data                  a group in the units of what it shows, scaled by its `transform`

`make sync` derives two things: the rules between `<style>` and `</style>`, for the classes that the
drawing uses, in light and dark mode; and `NAME.zh.svg`, with the words of `figures.zh.tsv`, if a
Chinese page shows it.
`test_drawings.py` checks each in a browser; for six, `test_drawn_states.py` checks that the
code's classes behave as drawn.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from workshop.book import palette
from workshop.book.figure_words import Words, in_chinese
from workshop.book.translation import chinese_pages

ROOT = Path(__file__).resolve().parents[2]
PLACES = ("[0-9][0-9]_*/figures", "common/**/figures", "workshop/**/figures")
_STYLE = re.compile(r" *<style>.*?</style>", re.S)
_COLOUR = re.compile(r"(line-|head-)?([a-z]+)(?:-(\d+))?")
# `$ink` is a neutral colour of the palette.
_RULES = """
svg { font: 16px $fonts }
text { fill: $ink }
rect { stroke: $muted }
circle { stroke: $muted }
line { stroke: $muted; stroke-width: 1.6px }
polyline { fill: none; stroke: $muted; stroke-width: 1.6px }
.drawing { stroke-linejoin: round }
.card { fill: $card; stroke: $border }
.soft { fill: $soft }
.paper { fill: $paper }
.head { fill: $muted }
.heading { font-size: 18px; font-weight: 600 }
.small { font-size: 14px }
.bold { font-weight: 600 }
.code { font-family: ui-monospace, "SF Mono", Menlo, Consolas, monospace }
.mid { text-anchor: middle }
.end { text-anchor: end }
.muted { fill: $muted }
.on-light { fill: #111111 }
.on-dark { fill: #ffffff }
.halo { paint-order: stroke; stroke: $card; stroke-width: 6px }
.dashed { stroke-dasharray: 5 4 }
.thick { stroke-width: 2.4px }
.lane { stroke-width: 1px; stroke-dasharray: 5 4 }
.grid { stroke: $grid; stroke-width: 1px }
.data > * { vector-effect: non-scaling-stroke }
""".strip().splitlines()


def drawings() -> list[Path]:
    """The paths of the English drawings."""
    paths = sorted(path for place in PLACES for path in ROOT.glob(f"{place}/*.svg"))
    return [p for p in paths if not p.name.endswith(".zh.svg") and _is_drawing(p)]


def _is_drawing(path: Path) -> bool:
    return ' class="drawing"' in path.read_text(encoding="utf-8").partition(">")[0]


def derived(path: Path, words: Words) -> dict[Path, str]:
    """Return the files that `make sync` writes. Raises `ValueError` for an unknown class, and for a
    text without Chinese."""
    svg = path.read_text(encoding="utf-8")
    try:
        styled, number = _STYLE.subn(lambda _: style_of(svg), svg)
        if number != 1:
            raise ValueError(f"the drawing must have one <style></style>, got {number}")
        twin = path.with_suffix(".zh.svg")
        files = {path: styled}
        return files | {twin: in_chinese(styled, words)} if is_shown(twin.name) else files
    except ValueError as error:
        raise ValueError(f"{path.relative_to(ROOT)}: {error}") from None


@cache
def _chinese_text() -> str:
    return "".join(page.read_text(encoding="utf-8") for page in chinese_pages())


def is_shown(name: str) -> bool:
    """Whether a Chinese page shows the figure."""
    return f"figures/{name}" in _chinese_text()


def style_of(svg: str) -> str:
    """Return the style rules of the classes and tags that the drawing uses."""
    classes = {name for found in re.findall(r'class="([^"]*)"', svg) for name in found.split()}
    named = {f".{name}" for name in classes}
    selectors = named | set(re.findall(r"<(\w+)", svg))
    light, dark = [], []
    for rule in _RULES:
        if rule.split()[0] in selectors:
            named.discard(rule.split()[0])
            in_light, in_dark = (_filled(rule, index) for index in (0, 1))
            light.append(in_light)
            if in_dark != in_light:
                dark.append(_colours_of(in_dark))
    for name in sorted(named):
        what, color = _colour(name[1:])
        light.append(f"{name} {{ {what}: {color} }}")
        if name.startswith((".line-", ".head-")) and palette.in_the_dark(color) != color:
            dark.append(f"{name} {{ {what}: {palette.in_the_dark(color)} }}")
    lines = [*light, "@media (prefers-color-scheme: dark) {", *(f"  {x}" for x in dark), "}"]
    return "\n".join(["  <style>", *(f"    {line}" for line in lines), "  </style>"])


def _filled(rule: str, index: int) -> str:
    colors = {name: pair[index] for name, pair in palette.NEUTRAL.items()}
    return re.sub(r"\$(\w+)", lambda name: {"fonts": palette.FONTS, **colors}[name[1]], rule)


def _colours_of(rule: str) -> str:
    """The rule without declarations that are the same in dark mode."""
    selector, _, looks = rule.partition(" { ")
    kept = [look for look in looks.removesuffix(" }").split("; ") if "#" in look]
    return f"{selector} {{ {'; '.join(kept)} }}"


def _colour(name: str) -> tuple[str, str]:
    found = _COLOUR.fullmatch(name)
    color = getattr(palette, found[2].upper(), None) if found else None
    if found is None or not isinstance(color, str) or not color.startswith("#"):
        raise ValueError(f"class {name!r} must be a colour of the palette or a look")
    what = "stroke" if found[1] == "line-" else "fill"
    return what, palette.tint(color, int(found[3] or 100) / 100)
