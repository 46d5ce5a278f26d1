"""A plot that is read in the dark, and in Chinese."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
from matplotlib.figure import Figure

from workshop.book.figure_file import save
from workshop.book.figure_words import Words
from workshop.book.palette import (
    CACHED,
    DRAFT,
    INK,
    NEUTRAL,
    OTHER,
    PAPER,
    PROMPT,
    in_the_dark,
    luminance,
    shade,
)

DARK_CARD = NEUTRAL["card"][1]


def draw() -> Figure:
    figure, axis = plt.subplots()
    axis.plot([1, 2], [2, 1], "o-", color=INK)
    axis.set(title="much longer than\nit", xlabel="step 3 of 4")
    axis.text(1, 1, "left\naligned")
    return figure


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pairs = {
        "much longer than": "短",
        "it": "它",
        "step {} of {}": "{1} 步里的第 {0} 步",
        "left": "左",
        "aligned": "对齐",
    }
    lines = [f"{english}\n    {chinese}\n" for english, chinese in pairs.items()]
    (tmp_path / "zh.txt").write_text("# plot\n" + "".join(lines), encoding="utf-8")
    save({"plot": draw}, tmp_path, Words(tmp_path / "zh.txt"))
    return tmp_path


def test_a_colour_stands_out_in_the_dark_and_neutral_ones_change_places() -> None:
    def contrast(color: str) -> float:
        return (luminance(color) + 0.05) / (luminance(DARK_CARD) + 0.05)

    for color in (INK, PROMPT, DRAFT, OTHER, shade(CACHED, 0.4)):
        assert contrast(in_the_dark(color)) >= 3 and contrast(in_the_dark(color, True)) >= 4.5
    assert in_the_dark(PAPER) == DARK_CARD and in_the_dark(CACHED) == CACHED
    assert [in_the_dark(ink, True) for ink in ("#111111", PAPER)] == ["#111111", PAPER]


def test_every_colour_that_changes_has_a_rule(folder: Path) -> None:
    svg = (folder / "plot.svg").read_text(encoding="utf-8")
    ET.fromstring(svg)
    _, dark = svg.split("@media (prefers-color-scheme: dark)")
    rules, marks = dark.split("</style>")
    drawn = set(re.findall(r"(?:fill|stroke): #[0-9a-f]{6}", marks))
    assert f"stroke: {INK}" in drawn and 'class="card"' in marks
    for mark in drawn:
        changes = in_the_dark(mark[-7:]) != mark[-7:]
        assert changes == (f':not(text)[style*="{mark}"]' in rules), mark


def test_the_same_figure_makes_the_same_bytes(folder: Path) -> None:
    before = {path: path.read_bytes() for path in folder.glob("*.svg")}
    save({"plot": draw}, folder, Words(folder / "zh.txt"))
    assert len(before) == 2 and all(path.read_bytes() == old for path, old in before.items())


def test_lines_with_one_middle_keep_it_and_others_their_beginning(folder: Path) -> None:
    """What varies is where the Chinese has it."""

    def places(name: str, texts: list[str]) -> list[float]:
        svg = (folder / name).read_text(encoding="utf-8")
        return [
            float(x) for t in texts for x in re.findall(rf"translate\(([\d.]+) [^>]*>{t}<", svg)
        ]

    english, chinese = places("plot.svg", ["much longer than", "it"]), places("plot.zh.svg", "短它")
    assert english[1] - english[0] > 30 and abs(chinese[1] - chinese[0]) < 1
    assert places("plot.svg", ["left", "aligned"]) == places("plot.zh.svg", ["左", "对齐"])
    assert ">4 步里的第 3 步<" in (folder / "plot.zh.svg").read_text(encoding="utf-8")


def test_a_text_without_chinese_is_an_error(folder: Path) -> None:
    words = Words(folder / "zh.txt")
    for text in ("step by step", "step one of 4", "it is"):
        with pytest.raises(ValueError, match="no Chinese"):
            words(text)
    assert words("step 3 of num_tokens") == "num_tokens 步里的第 3 步"
    assert words("a = wait()") == "a = wait()"
