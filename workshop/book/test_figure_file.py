"""A plot that is read in the dark, and in Chinese."""

from __future__ import annotations

import re
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
from matplotlib.figure import Figure

from workshop.book.figure_file import save
from workshop.book.figure_words import Words
from workshop.book.palette import INK, in_the_dark

WORDS = "# plot\nmuch longer than\t短\nit\t它\nstep {} of {}\t{1} 步里的第 {0} 步\n"


def draw() -> Figure:
    figure, axis = plt.subplots()
    axis.plot([1, 2], [2, 1], "o-", color=INK)
    axis.set(title="much longer than\nit", xlabel="step 3 of 4")
    return figure


def test_a_plot_has_rules_for_the_dark_its_chinese_and_the_same_bytes_again(
    tmp_path: Path,
) -> None:
    (tmp_path / "zh.txt").write_text(WORDS, encoding="utf-8")
    words = Words(tmp_path / "zh.txt")
    save({"plot": draw}, tmp_path, words)
    svg, chinese = ((tmp_path / f"plot{end}").read_text("utf-8") for end in (".svg", ".zh.svg"))
    save({"plot": draw}, tmp_path, words)
    assert (tmp_path / "plot.svg").read_text("utf-8") == svg
    _, dark = svg.split("@media (prefers-color-scheme: dark)")
    rules, marks = dark.split("</style>")
    for mark in set(re.findall(r"(?:fill|stroke): #[0-9a-f]{6}", marks)):
        changes = in_the_dark(mark[-7:]) != mark[-7:]
        assert changes == (f':not(text)[style*="{mark}"]' in rules), mark
    assert ">短<" in chinese and ">它<" in chinese and ">4 步里的第 3 步<" in chinese
    for text in ("step by step", "step one of 4", "it is"):
        with pytest.raises(ValueError, match="no Chinese"):
            words(text)
    assert words("step 3 of num_tokens") == "num_tokens 步里的第 3 步"
