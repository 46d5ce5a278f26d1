"""`INCIDENTS.md`: twelve tickets in one shape, with commands that exist, listed by `make task`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from workshop.practice.command import tasks as main
from workshop.practice.museum.exhibits import EXHIBITS
from workshop.practice.source_patch import ROOT
from workshop.practice.tasks.course import EVENINGS
from workshop.practice.tasks.tickets import PAGES, read_tickets
from workshop.practice.tasks.workbench import Workbench

EACH_PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
FOUR = (("Cause", "Number", "Fix", "Guard"), ("原因", "数字", "修复", "(预防|监控)"))
NO_BUG = ("Not a bug.", "不是 bug。")


def parts_of(page: Path) -> list[str]:
    """The text of each ticket."""
    return re.split(r"^### .+$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]


@EACH_PAGE
def test_two_tickets_an_evening_each_with_four_folded_lines(page: Path) -> None:
    parts, lines = parts_of(page), FOUR[PAGES.index(page)]
    assert list(read_tickets(page)) == [*range(1, 13)] and len(parts) == 2 * len(EVENINGS)
    for part in parts:
        shown, _, folded = part.partition("<details>")
        found = re.findall(r"^\* \*\*(\w+)。?\.?\*\*", folded, re.MULTILINE)
        assert re.fullmatch(" ".join(lines), " ".join(found))
        assert folded.count("</details>") == 1 and shown.count("**") == 4
        assert "\n> " in shown and "```" in shown and re.search(r"\d", folded)
    assert sum(NO_BUG[PAGES.index(page)] in part for part in parts) >= 2


@EACH_PAGE
def test_commands_that_can_be_run_exist(page: Path) -> None:
    text, makefile = page.read_text(encoding="utf-8"), (ROOT / "Makefile").read_text("utf-8")
    for target in re.findall(r"make (\w+) ARGS=|`make (\w+)`", text):
        assert f"\n{''.join(target)}: " in makefile
    bugs = re.findall(r"make museum BUG=(\d+)", text)
    assert len(bugs) == 3 and all(1 <= int(bug) <= len(EXHIBITS) for bug in bugs)


def test_make_task_lists_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LANGUAGE", "en")
    assert main([], Workbench(tmp_path)) == 0
    output = capsys.readouterr().out
    for number, title in read_tickets(PAGES[0]).items():
        assert f"ticket {number:2}" in output and title in output
    assert "INCIDENTS.md" in output
