"""A drawing that a reader would trip over is refused, and the bytes depend on the calls alone."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Callable

import pytest
from matplotlib.textpath import TextPath

from workshop.book.draw import SIZE, Box, Drawing, ink_on, text_width
from workshop.book.draw_parts import Axes
from workshop.book.palette import DECODE, PROMPT, REJECTED


def make() -> Drawing:
    drawing = Drawing(400, 220, "Two boxes & an arrow", "One leads to the other.")
    first = drawing.box(20, 20, 100, 40, "first", fill=PROMPT)
    second = drawing.box(220, 20, 120, 60, "a <small> one", title="second")
    drawing.arrow(first.right, second.left)
    drawing.cells(20, 110, ["0", "1", "2"], DECODE)
    drawing.bracket(20, 128, 150, "three cells", above=False)
    drawing.key(200, 130, {"output": DECODE})
    return drawing


def test_the_same_calls_make_the_same_bytes() -> None:
    assert make().svg() == make().svg()


def test_it_is_xml_that_says_what_it_shows_and_follows_the_dark_mode() -> None:
    text = make().svg()
    root = ET.fromstring(text)
    space = "{http://www.w3.org/2000/svg}"
    assert root.findtext(f"{space}title") == "Two boxes & an arrow"
    assert root.findtext(f"{space}desc") == "One leads to the other."
    assert "a <small> one" in [element.text for element in root.iter(f"{space}text")]
    assert "prefers-color-scheme: dark" in text and 'class="card"' in text


FAULTS: dict[str, Callable[[Drawing], object]] = {
    "leaves its box": lambda d: d.box(150, 160, 60, 30, "much too long"),
    "leaves the card": lambda d: d.text(330, 200, "out of it"),
    "boxes overlap": lambda d: (d.box(190, 150, 60, 40), d.box(220, 160, 60, 40)),
    "' overlap": lambda d: (d.text(200, 180, "one"), d.text(215, 185, "other")),
    "the edge of": lambda d: d.text(200, 150, "x" * 3) and d.box(190, 150, 60, 40),
    "runs through": lambda d: (d.text(200, 180, "crossed"), d.line((190, 180), (300, 180))),
    "nobody reads it": lambda d: d.text(200, 180, "small", size=9),
}


@pytest.mark.parametrize(("says", "draw"), FAULTS.items(), ids=FAULTS)
def test_what_a_reader_would_trip_over_is_refused(says: str, draw) -> None:
    drawing = make()
    with pytest.raises(ValueError, match=says):
        draw(drawing)
        drawing.svg()


def test_a_card_is_no_wider_than_a_page() -> None:
    with pytest.raises(ValueError, match="at most 860"):
        Drawing(900, 100, "t", "d").svg()


@pytest.mark.parametrize("bold", [False, True])
@pytest.mark.parametrize("text", ["num_computed_tokens", "WWW mmm iii", "12 <= 26.6: in", "a → b"])
def test_a_text_is_measured_too_wide_rather_than_too_narrow(text: str, bold: bool) -> None:
    """Against the outlines of the font that is the widest of those named."""
    from matplotlib.font_manager import FontProperties

    font = FontProperties(family="DejaVu Sans", weight="bold" if bold else "normal")
    outline = TextPath((0, 0), text, size=SIZE, prop=font).get_extents()
    assert outline.x1 <= text_width(text, SIZE, bold=bold) + 0.5
    assert text_width(text, SIZE, bold=bold) < 1.25 * outline.x1


def test_text_on_a_colour_stands_out() -> None:
    assert (ink_on("#ffffff"), ink_on("#000000")) == ("#111111", "#ffffff")
    assert (ink_on(PROMPT), ink_on(REJECTED), ink_on(DECODE)) == ("#ffffff", "#111111", "#111111")


def test_numbers_have_their_places_on_axes() -> None:
    axes = Axes(Box(10, 20, 100, 50), (0, 4), (0, 2))
    assert (axes.x_of(1), axes.y_of(0), axes.y_of(2)) == (35, 70, 20)
