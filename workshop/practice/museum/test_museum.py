"""The exhibits as they are written, and the page that is made of them. Commands:
`transcripts.txt`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from workshop.practice.museum.exhibits import EXHIBITS, TITLES
from workshop.practice.museum.museum_page import PAGE
from workshop.practice.patch_table import all_bugs, broken_lines
from workshop.practice.source_patch import ROOT

FOLD = re.compile(r'<details id="(\w+-\d+)"><summary>[^\n]*</summary>(.*?)</details>', re.DOTALL)


def test_each_trap_is_cited_by_tests() -> None:
    paths = [*ROOT.rglob("test_*.py"), *ROOT.glob("[0-9]*/**/*.txt")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in paths)
    cited = " ".join(re.findall(r"[Tt]raps? (\d+(?:, \d+)*(?: and \d+)?)", text))
    assert {str(exhibit.trap) for exhibit in EXHIBITS} <= {*re.findall(r"\d+", cited)}


def test_thirty_exhibits_to_watch_and_more_in_the_order_of_the_chapters() -> None:
    watched = [exhibit for exhibit in EXHIBITS if exhibit.watch is not None]
    assert len(watched) >= 30 and {exhibit.chapter for exhibit in watched} == set(TITLES)
    assert list(dict.fromkeys(exhibit.chapter for exhibit in EXHIBITS)) == list(TITLES)
    titles = sorted(bug.exhibit for bug in all_bugs() if bug.exhibit)
    assert titles == sorted({exhibit.title for exhibit in EXHIBITS})
    assert all(exhibit.tests for exhibit in EXHIBITS)


@pytest.mark.parametrize("page", [PAGE, PAGE.with_suffix(".zh.md")], ids=lambda p: p.name)
def test_the_page_spoils_no_clue(page: Path) -> None:
    """It has titles, in folds, but neither cause nor effect nor patch."""
    text = page.read_text(encoding="utf-8")
    folds = dict(FOLD.findall(text))
    for number, exhibit in enumerate(EXHIBITS, 1):
        titles = exhibit.title, exhibit.chinese.text("title")
        assert any(title in folds[f"bug-{number}"] for title in titles)
        clues = [exhibit.patch.diff(), *(t.split("::")[1] for t in exhibit.tests)]
        clues += [exhibit.english.text("cause"), exhibit.chinese.text("cause")]
        assert not [clue for clue in clues if clue in text]
    assert not [bug for bug in broken_lines() if bug.diff() in text]
