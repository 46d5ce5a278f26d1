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
from workshop.practice.trial import broken_copy, without_folder

FOLD = re.compile(r'<details id="(\w+-\d+)"><summary>[^\n]*</summary>(.*?)</details>', re.DOTALL)


def test_each_trap_is_cited_by_tests() -> None:
    tests = [path.read_text(encoding="utf-8") for path in ROOT.rglob("test_*.py")]
    tests += [path.read_text(encoding="utf-8") for path in ROOT.glob("[0-9]*/**/*.txt")]
    cited = {
        int(number)
        for text in tests
        for numbers in re.findall(r"[Tt]raps? (\d+(?:, \d+)*(?: and \d+)?)", text)
        for number in re.findall(r"\d+", numbers)
    }
    assert {exhibit.trap for exhibit in EXHIBITS} <= cited


def test_thirty_exhibits_to_watch_and_more_in_the_order_of_the_chapters() -> None:
    watched = [exhibit for exhibit in EXHIBITS if exhibit.watch is not None]
    assert len(watched) >= 30 and {exhibit.chapter for exhibit in watched} == set(TITLES)
    assert list(dict.fromkeys(exhibit.chapter for exhibit in EXHIBITS)) == list(TITLES)
    titles = sorted(bug.exhibit for bug in all_bugs() if bug.exhibit)
    assert titles == sorted({exhibit.title for exhibit in EXHIBITS})
    assert all(exhibit.tests for exhibit in EXHIBITS)


def test_only_the_copy_has_the_bug_and_it_is_deleted_afterwards() -> None:
    exhibit = EXHIBITS[0]
    before = exhibit.patch.text()
    with broken_copy(exhibit.patch) as swap:
        assert swap.file.read_text(encoding="utf-8") == exhibit.patch.apply() != before
        assert without_folder(f"../../{swap.file}:3") == f"(with the bug) {swap.file.name}:3"
    assert not swap.file.exists() and exhibit.patch.text() == before


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
