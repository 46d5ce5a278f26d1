"""Every drawing is what `make sync` makes of it, and can be read: in a browser, in both languages,
in the light and in the dark."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from workshop.book import drawings
from workshop.book.drawings import ROOT
from workshop.book.figure_words import TABLE, Words, in_chinese
from workshop.watch.conftest import browser_for_tests

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

browser = pytest.fixture(scope="module")(browser_for_tests)
DRAWINGS = drawings.drawings()
PLOTS = [p for place in drawings.PLACES for p in ROOT.glob(f"{place}/*.svg") if p not in DRAWINGS]


def test_derived_drawings_are_committed() -> None:
    """Drawings derive the Chinese file of each plot, whose own script draws the English one. Each
    text has its Chinese (`Words` raises), and no Chinese is unused."""
    words, made = Words(), dict[Path, str]()
    for path in DRAWINGS:
        made |= drawings.derived(path, words)
    for path in PLOTS:
        chinese = path.with_suffix(".zh.svg")
        if not path.name.endswith(".zh.svg") and drawings.is_shown(chinese.name):
            made[chinese] = in_chinese(path.read_text(encoding="utf-8"), words)
    for path, svg in made.items():
        assert path.read_text(encoding="utf-8") == svg, f"{path.relative_to(ROOT)}: `make sync`"
    of_none = {path for path in PLOTS if path.name.endswith(".zh.svg")} - made.keys()
    assert not of_none, "no English figure"
    assert not words.pairs.keys() - words.used, f"{TABLE.name}: no figure says so"


# Faults of the page's drawing: a list of sentences.
LOOK = """() => {
  const all = (selector) => [...document.querySelectorAll(selector)];
  const box = (r, name) => ({name, x: r.x, y: r.y, right: r.x + r.width, bottom: r.y + r.height});
  const meets = (a, b) => Math.min(a.right, b.right) - Math.max(a.x, b.x) > 0.1 &&
    Math.min(a.bottom, b.bottom) - Math.max(a.y, b.y) > 0.1;
  const holds = (a, b) => a.x <= b.x + 0.1 && a.y <= b.y + 0.1 &&
    b.right <= a.right + 0.1 && b.bottom <= a.bottom + 0.1;
  const linear = (c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const light = (color) => {
    const [r, g, b] = color.match(/[\\d.]+/g).map((c) => linear(c / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05;
  };
  const fill = (element) => getComputedStyle(element).fill;
  const card = box(document.querySelector(".card").getBoundingClientRect(), "the card");
  const inner = {x: card.x + 7, y: card.y + 5, right: card.right - 7, bottom: card.bottom - 5};
  const rects = all("rect:not(.card), circle").map(
    (element) => ({element, ...box(element.getBoundingClientRect(), element.outerHTML)}));
  const rows = [];
  for (const text of all("text")) {
    for (const node of text.childNodes) {
      if (!node.textContent.trim()) continue;
      const range = document.createRange();
      range.selectNodeContents(node);
      const size = parseFloat(getComputedStyle(text).fontSize);
      const r = range.getBoundingClientRect();  // of the font: what is above and below is left out
      const middle = r.y + r.height / 2;
      rows.push({text, size, ...box({x: r.x, y: middle - size / 2, width: r.width, height: size},
        node.textContent)});
    }
  }
  const faults = [];
  rows.forEach((row, i) => {
    if (row.size < 14) faults.push(`${row.name}: ${row.size} px cannot be read at half the size`);
    if (!holds(inner, row)) faults.push(`${row.name} leaves the card`);
    for (const other of rows.slice(i + 1)) {
      if (meets(row, other)) faults.push(`${row.name} and ${other.name} overlap`);
    }
    for (const rect of rects) {
      if (meets(row, rect) && !holds(rect, row)) {
        faults.push(`the edge of ${rect.name} runs through ${row.name}`);
      }
    }
    const under = rects.filter((rect) => holds(rect, row)).pop()?.element ??
      document.querySelector(".card");
    const [a, b] = [light(fill(row.text)), light(fill(under))];
    const contrast = Math.max(a, b) / Math.min(a, b);
    if (contrast < 4.5) faults.push(`${row.name} is hard to see: ${contrast.toFixed(1)}`);
  });
  return faults;
}"""


@pytest.fixture(scope="module")
def page(browser: Browser) -> Page:
    return browser.new_page(viewport={"width": 880, "height": 800})


@pytest.mark.parametrize("end", [".svg", ".zh.svg"])
def test_nothing_in_a_drawing_is_in_the_way(end: str, page: Page) -> None:
    """Texts are inside the card and their boxes, no edge runs through them, and they stand out from
    what is under them."""
    paths = [drawing.with_suffix(end) for drawing in DRAWINGS]
    paths = [path for path in paths if path.exists()]  # not where no Chinese page shows it
    assert len(paths) > 15
    for path in paths:
        page.goto(path.as_uri())
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            assert page.evaluate(LOOK) == [], (path.stem, scheme)
