"""The exhibits as they are written, the page that is made of them, and the command."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path

import pytest

from common.events.frames import VERSION
from workshop.practice import command
from workshop.practice.command import clues, find, list_exhibits
from workshop.practice.command import museum as main
from workshop.practice.module_swap import ModuleSwap
from workshop.practice.museum import two_films
from workshop.practice.museum.exhibits import EXHIBITS, TITLES, Exhibit, Workload
from workshop.practice.museum.museum_page import PAGE, linked, side_by_side
from workshop.practice.museum.watched_run import RunOnFilm
from workshop.practice.named_tests import Failure, TestRun
from workshop.practice.patch_table import all_bugs, broken_lines
from workshop.practice.source_patch import ROOT
from workshop.practice.trial import broken_copy, without_folder
from workshop.watch.replay.film import Film

FOLD = re.compile(r'<details id="(\w+-\d+)"><summary>.*?</summary>(.*?)</details>', re.DOTALL)
RUN_LINE = (
    f'{{"kind":"run","version":{VERSION},"started_at":0.0,"scheduler":"two_phase","policy":"fcfs",'
    '"prefix_cache":"hash","block_size":4,"num_blocks":9,"max_num_seqs":4,"overlaps":false,'
    '"max_num_batched_tokens":64,"config":{},"model":{},"versions":{}}\n'
)


@pytest.fixture(autouse=True)
def english(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the terminal speaks."""
    monkeypatch.setenv("LANGUAGE", "en")


def test_each_trap_is_cited_by_tests() -> None:
    """The page promises it to its readers."""
    tests = [path.read_text(encoding="utf-8") for path in ROOT.rglob("test_*.py")]
    tests += [path.read_text(encoding="utf-8") for path in ROOT.glob("[0-9]*/**/*.txt")]
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
    titles = sorted(bug.exhibit for bug in all_bugs() if bug.exhibit)
    assert titles == sorted({exhibit.title for exhibit in EXHIBITS})
    assert all(exhibit.tests for exhibit in EXHIBITS)
    assert all(e.wrong != e.right or e.watch is not None for e in EXHIBITS)


def test_an_origin_links_to_its_reports() -> None:
    issues = "https://github.com/vllm-project/vllm/issues/"
    assert linked("vLLM #1 #23, ours") == f"vLLM [#1]({issues}1) [#23]({issues}23), ours"
    assert linked("nano-vllm") == "nano-vllm"


def test_only_the_copy_has_the_bug_and_it_is_deleted_afterwards() -> None:
    exhibit = EXHIBITS[0]
    before = exhibit.patch.text()
    with broken_copy(exhibit.patch) as swap:
        assert swap.file.read_text(encoding="utf-8") == exhibit.patch.apply() != before
        assert without_folder(f"x {swap.file}:3") == f"x (with the bug) {swap.file.name}:3"
        assert without_folder(f"../../{swap.file}:3") == f"(with the bug) {swap.file.name}:3"
    assert not swap.file.exists()
    assert exhibit.patch.text() == before


def test_there_is_a_chinese_line_for_each() -> None:
    assert all(bool(bug.line) == bool(bug.chinese_line) for bug in all_bugs())


@pytest.mark.parametrize("page", [PAGE, PAGE.with_suffix(".zh.md")], ids=lambda p: p.name)
def test_the_page_spoils_no_clue(page: Path) -> None:
    """Text outside of folds gives neither effect nor place nor reason; a fold gives only the
    reason."""
    text = page.read_text(encoding="utf-8")
    folds, shown = dict(FOLD.findall(text)), FOLD.sub("", text)
    for number, exhibit in enumerate(EXHIBITS, 1):
        inside = folds[f"bug-{number}"]
        causes = exhibit.english.text("cause"), exhibit.chinese.text("cause")
        clues = [exhibit.patch.diff(), *(t.split("::")[1] for t in exhibit.tests)]
        clues += [exhibit.wrong] if exhibit.wrong else []
        assert not [clue for clue in (*causes, *clues) if clue in shown]
        assert not [clue for clue in clues if clue in inside]
        assert any(cause in inside for cause in causes)
    assert not [bug for bug in broken_lines() if bug.diff() in text]


# -- the command


def test_the_list_names_every_exhibit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert all(f"{n:2}  {exhibit.title}" in shown for n, exhibit in enumerate(EXHIBITS, 1))
    assert shown.strip() == list_exhibits().strip()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["0"], "must be in [1, "),
        ([str(len(EXHIBITS) + 1)], "must be in [1, "),
        (["--find"], "needs a bug"),
        (["1", "--reveal"], "needs --find"),
        (["--watch"], "needs a bug"),
        (["1", "--out", "page.html"], "need --watch"),
        (["1", "--open"], "need --watch"),
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
    """The answers of the processes, without processes."""
    monkeypatch.setattr(Exhibit, "show", lambda e, swap=None: e.wrong if swap else e.right)
    report = TestRun(("a",), "THE REPORT")
    monkeypatch.setattr(command, "try_tests", lambda *_, **__: report)

    def make_film(workload: Workload, path: Path, swap: ModuleSwap | None = None) -> RunOnFilm:
        row = {"number": 0, "prompt": [1], "prompt_pieces": [], "max_tokens": 1, "priority": 0}
        changes = {"requests": {"FIRST": [row]}, "free": [[8, 7] if swap is not None else [8], []]}
        line = {"at": "between", "time": 0.0, "changes": changes}
        path.write_text(f"{RUN_LINE}{json.dumps(line)}\n", encoding="utf-8")
        return RunOnFilm(Film.read(path))

    monkeypatch.setattr(two_films, "make_film", make_film)


def test_a_look_tells_all(without_processes: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["1"]) == 0
    exhibit, shown = EXHIBITS[0], capsys.readouterr().out
    for part in (exhibit.title, exhibit.origin, "in the free blocks", "[8, 7]", "THE REPORT"):
        assert part in shown
    assert exhibit.patch.new.strip() in shown


def test_a_chinese_terminal_gets_chinese_text(
    without_processes: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LANGUAGE", "zh_CN:en")
    words = EXHIBITS[0].chinese
    assert main([]) == main(["1"]) == main(["1", "--find", "--reveal"]) == 0
    shown = capsys.readouterr().out
    counts = [shown.count(words.text(word)) for word in ("title", "symptom", "lesson")]
    assert counts == [3, 2, 2]


@pytest.mark.parametrize(
    ("message", "printed"),
    [
        ("AssertionError: two\nassert 1 == 2", "AssertionError: two"),
        ("assert [3, ...] == [3, ...]\n  \n  At index 9 diff: 1 != 2\n  Use -v",
         "assert [3, ...] == [3, ...] (At index 9 diff: 1 != 2)"),
    ],
)  # fmt: skip
def test_the_failing_test_is_printed_in_two_lines(
    message: str,
    printed: str,
    without_processes: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    failure = Failure("test_x.py::test_a", message, "x.py", 3, None, "")
    report = TestRun(("a",), "THE REPORT", first=failure)
    monkeypatch.setattr(command, "try_tests", lambda *_, **__: report)
    assert main(["1"]) == 0
    shown = capsys.readouterr().out
    assert f"Caught by test_x.py::test_a\n    {printed}\n\n" in shown
    assert "THE REPORT" not in shown


@pytest.mark.parametrize(
    ("keys", "num_clues"), [("", 1), ("q\n", 1), ("\n\nq\n", 3), ("\n" * 3, 4), ("\n" * 4, 5)]
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
    secrets = ["difference is in step 0, in the free blocks", "THE REPORT", "[8, 7]"]
    secrets += [exhibit.patch.symbol, exhibit.patch.new.strip()]
    assert [secret in shown for secret in secrets] == [n < num_clues for n in range(5)]
    assert (exhibit.title in shown) == (num_clues == 5)
    assert exhibit.patch.file in shown and "What it does" in shown


def test_all_clues_at_once(without_processes: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["1", "--find", "--reveal"]) == 0
    shown = capsys.readouterr().out
    with broken_copy(EXHIBITS[0].patch) as swap:
        assert all(clue in shown for clue in clues(EXHIBITS[0], swap))


def test_without_anything_to_watch_the_other_clues_are_there(
    without_processes: None, capsys: pytest.CaptureFixture[str]
) -> None:
    number, exhibit = next((n, e) for n, e in enumerate(EXHIBITS, 1) if e.watch is None)
    assert main([str(number), "--find", "--reveal"]) == 0
    shown = capsys.readouterr().out
    assert side_by_side(exhibit.wrong, exhibit.right) in shown
    assert "THE REPORT" in shown and exhibit.title in shown and "recorded" not in shown


# -- the page of an exhibit


def test_a_page_has_the_run_with_the_bug_and_beside_it_the_right_one(
    without_processes: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, exhibit = tmp_path / "page.html", EXHIBITS[0]
    assert main(["1", "--watch", "--out", str(page)]) == 0
    text, shown = page.read_text(encoding="utf-8"), capsys.readouterr().out
    labels = re.findall(r'data-label="(.*?)"', text)
    assert labels == ["The run with the bug", "The run without it"]
    assert text.index("[[8, 7], []]") < text.index("[[8], []]")
    assert f"Exhibit 1. {exhibit.title}" in text and '"step=0"' in text
    assert exhibit.title in shown and str(page) in shown and "difference is in step 0" in shown


def test_a_page_to_look_for_the_bug_does_not_name_it(
    without_processes: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    page, exhibit = tmp_path / "page.html", EXHIBITS[0]
    monkeypatch.setattr(sys, "stdin", io.StringIO("q\n"))
    assert main(["1", "--find", "--watch", "--out", str(page)]) == 0
    everything = page.read_text(encoding="utf-8") + capsys.readouterr().out
    assert "Exhibit 1." in everything
    for secret in (
        exhibit.title,
        exhibit.english.text("cause")[:40],
        exhibit.patch.new.strip(),
        exhibit.english.text("watch"),
    ):
        assert secret not in everything


def test_where_there_is_nothing_to_watch_no_page_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    number, exhibit = next((n, e) for n, e in enumerate(EXHIBITS, 1) if e.watch is None)
    assert main([str(number), "--watch", "--out", str(tmp_path / "page.html")]) == 0
    assert exhibit.english.text("nothing") in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_in_each_hall_there_is_something_to_watch() -> None:
    watched = [exhibit for exhibit in EXHIBITS if exhibit.watch is not None]
    assert len(watched) >= 30
    assert {exhibit.chapter for exhibit in watched} == set(TITLES)


def test_each_chapter_leads_to_its_hall() -> None:
    for chapter, title in TITLES.items():
        if chapter != "common":
            anchor = title.lower().replace(".", "").replace(" ", "-")
            text = (ROOT / chapter / "README.md").read_text(encoding="utf-8")
            assert f"](../MUSEUM.md#{anchor})" in text
