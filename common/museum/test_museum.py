"""The exhibits as they are written, the page that is made of them, and the command."""

from __future__ import annotations

import ast
import io
import re
import sys

import pytest

from common.museum import museum_command
from common.museum.exhibit import Exhibit
from common.museum.hall import EXHIBITS, TITLES
from common.museum.museum_command import clues, find, listed, main
from common.museum.museum_page import PAGE, linked, render, side_by_side
from common.museum.visit import broken_copy, without_folder
from common.tools.named_tests import TestRun
from common.tools.source_patch import ROOT, names_in

EVERY_EXHIBIT = pytest.mark.parametrize("exhibit", EXHIBITS, ids=lambda e: e.title)


@EVERY_EXHIBIT
def test_each_patch_applies_once(exhibit: Exhibit) -> None:
    ast.parse(exhibit.patch.apply())  # if it raises, the code has moved: say the patch anew
    assert exhibit.patch.diff()


@EVERY_EXHIBIT
def test_each_named_test_is_there(exhibit: Exhibit) -> None:
    for test in exhibit.tests:
        file, _, name = test.partition("::")
        assert name.partition("[")[0] in names_in(file)


def test_each_trap_is_cited_by_tests() -> None:
    """As the page promises to who looks for it."""
    tests = [path.read_text(encoding="utf-8") for path in ROOT.rglob("test_*.py")]
    cited = {
        int(number)
        for text in tests
        for numbers in re.findall(r"[Tt]raps? (\d+(?:, \d+)*(?: and \d+)?)", text)
        for number in re.findall(r"\d+", numbers)
    }
    assert {exhibit.trap for exhibit in EXHIBITS} <= cited


def test_thirty_exhibits_and_more_in_the_order_of_the_chapters() -> None:
    assert len(EXHIBITS) >= 30
    assert list(dict.fromkeys(exhibit.chapter for exhibit in EXHIBITS)) == list(TITLES)
    assert len({exhibit.title for exhibit in EXHIBITS}) == len(EXHIBITS)
    assert all(exhibit.wrong != exhibit.right for exhibit in EXHIBITS)


def test_the_page_is_made_of_the_exhibits() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == render(), "run: python -m common.museum --write"


def test_an_origin_links_to_its_reports() -> None:
    where = "https://github.com/vllm-project/vllm/issues/"
    assert linked("vLLM #1 #23, ours") == f"vLLM [#1]({where}1) [#23]({where}23), ours"
    assert linked("nano-vllm") == "nano-vllm"


def test_the_copy_alone_has_the_bug_and_is_gone_afterwards() -> None:
    exhibit = EXHIBITS[0]
    before = exhibit.patch.text()
    with broken_copy(exhibit) as swap:
        assert swap.file.read_text(encoding="utf-8") == exhibit.patch.apply() != before
        assert without_folder(f"x {swap.file}:3") == f"x (with the bug) {swap.file.name}:3"
        assert without_folder(f"../../{swap.file}:3") == f"(with the bug) {swap.file.name}:3"
    assert not swap.file.exists()
    assert exhibit.patch.text() == before


# -- the command


def test_the_list_names_every_exhibit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert all(f"{n:2}  {exhibit.title}" in shown for n, exhibit in enumerate(EXHIBITS, 1))
    assert shown.strip() == listed().strip()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["0"], "must be in [1, "),
        ([str(len(EXHIBITS) + 1)], "must be in [1, "),
        (["--find"], "wants a bug"),
        (["1", "--reveal"], "goes with --find"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert words in capsys.readouterr().err


@pytest.fixture
def without_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the processes answer, without them."""
    monkeypatch.setattr(museum_command, "show", lambda e, swap=None: e.wrong if swap else e.right)
    report = TestRun(("a",), "THE REPORT")
    monkeypatch.setattr(museum_command, "try_tests", lambda *_, **__: report)


def test_a_look_tells_all(without_processes: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["1"]) == 0
    exhibit, shown = EXHIBITS[0], capsys.readouterr().out
    for part in (exhibit.title, exhibit.origin, exhibit.wrong, exhibit.right, "THE REPORT"):
        assert part in shown
    assert exhibit.patch.new.strip() in shown


@pytest.mark.parametrize(
    ("keys", "num_clues"), [("", 1), ("q\n", 1), ("\n\nq\n", 3), ("\n" * 3, 4)]
)
def test_the_patch_is_hidden_until_it_is_asked_for(
    keys: str,
    num_clues: int,
    without_processes: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    exhibit = EXHIBITS[0]
    monkeypatch.setattr(sys, "stdin", io.StringIO(keys))
    find(1, exhibit, is_revealed=False)
    shown = capsys.readouterr().out
    secrets = ["What it does", "THE REPORT", exhibit.patch.place(), exhibit.patch.new.strip()]
    assert [secret in shown for secret in secrets] == [n < num_clues for n in range(4)]
    assert (exhibit.title in shown) == (num_clues == 4)
    assert exhibit.patch.file in shown and side_by_side(exhibit.wrong, exhibit.right) in shown


def test_all_clues_at_once(without_processes: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["1", "--find", "--reveal"]) == 0
    shown = capsys.readouterr().out
    with broken_copy(EXHIBITS[0]) as swap:
        assert all(clue in shown for clue in clues(EXHIBITS[0], swap))


def test_each_chapter_leads_to_its_hall() -> None:
    for chapter, title in TITLES.items():
        if chapter != "common":
            anchor = title.lower().replace(".", "").replace(" ", "-")
            text = (ROOT / chapter / "README.md").read_text(encoding="utf-8")
            assert f"](../MUSEUM.md#{anchor})" in text
