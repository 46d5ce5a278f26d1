"""`COURSE.md` says what is there: lines, tasks, exhibits, commands."""

from __future__ import annotations

import re
import runpy
import shlex
import subprocess
import sys
from argparse import ArgumentParser
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import pytest

from workshop.practice.museum.exhibits import EXHIBITS
from workshop.practice.source_patch import ROOT
from workshop.practice.tasks.course import EVENINGS, TASKS, task_numbered
from workshop.practice.tasks.reading import PAGES, counted, lines_of, sums

COURSE = (ROOT / "COURSE.md").read_text(encoding="utf-8")
PARTS = ["Predict", "Watch", "Read", "Do", "Break", "Measure"]
TASK_ROW = re.compile(
    r"^\| `make task N=([\d.]+)` \| ([^|]+) \| `([\w.]+)` \| (\d+) \| (\w+) \|$", re.MULTILINE
)
COMMAND = re.compile(
    r"""(?:^(?:\#\ +)?|`|\ {2,})(make\ [a-z]+(?:\ [A-Z]+=(?:"[^"`]*"|[^\s`]+))*)""", re.M | re.X
)
CHAPTER_ROW = r"^\| (\d\.\d) \| ([^|]+) \| (\d+) \| (\w+) \|$"


def evenings() -> dict[int, str]:
    """The text of each."""
    parts = re.split(r"^## (.+)$", COURSE, flags=re.MULTILINE)[1:]
    found = zip(parts[::2], parts[1::2], strict=True)
    return {int(title[8]): text for title, text in found if title.startswith("Evening ")}


EVERY_EVENING = pytest.mark.parametrize("number", EVENINGS)


@pytest.mark.parametrize("page", [page for page in PAGES if page.is_file()], ids=lambda p: p.name)
def test_the_lines_to_read_are_as_many_as_it_says(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert counted(text) == text, "python -m workshop.tasks --write"
    assert len(sums(text)) == 6
    assert all(400 <= number <= 600 for number in sums(text)), "about 500 lines an evening"


def test_lines_are_recounted_and_the_remaining_row_stays() -> None:
    path = "workshop/practice/tasks/reading.py"
    rows = [
        f"| [`reading.py`]({path}) | 1 | all of it |",
        f"| [`reading.py::sums`]({path}) | 9,999 | x |",
    ]
    text = "\n".join([*rows, "| **together** | **0** | |", "| other | 3 |"])
    lines = counted(text).splitlines()
    whole, part = lines_of(ROOT / path, None), lines_of(ROOT / path, "sums")
    assert part < 10 < whole
    assert lines[0] == rows[0].replace("| 1 |", f"| {whole} |")
    assert lines[1] == rows[1].replace("9,999", str(part))
    assert lines[2:] == [f"| **together** | **{whole + part}** | |", "| other | 3 |"]
    with pytest.raises(LookupError):
        lines_of(ROOT / path, "nothing")


def test_minutes_are_those_of_the_tasks_and_fit_their_sums() -> None:
    rows = ["| `make task N=3.1` | a | `b` | 1 | easy |", "| `make task N=3.2` | a | `b` | 1 | x |"]
    text = "\n".join([*rows, "| **together** | | | **1** | |", "| 1 | read | 60 | x |",
                      "| 4 | do | 1–2 | x |", "| | **together** | **1–2** | |"])  # fmt: skip
    lines = counted(text).splitlines()
    one, other = (task.minutes for task in TASKS if task.number in ("3.1", "3.2"))
    assert lines[:2] == [
        rows[0].replace("| 1 |", f"| {one} |"),
        rows[1].replace("1 | x", f"{other} | x"),
    ]
    assert lines[2] == f"| **together** | | | **{one + other}** | |"
    evenings = [sum(t.minutes for t in TASKS if t.evening == number) for number in EVENINGS]
    shortest, longest = min(evenings), max(evenings)
    assert lines[4] == f"| 4 | do | {shortest}–{longest} | x |"
    assert lines[5] == f"| | **together** | **{60 + shortest}–{60 + longest}** | |"


@pytest.mark.parametrize("page", [page for page in PAGES if page.is_file()], ids=lambda p: p.name)
def test_a_question_is_answered_and_the_answer_is_folded(page: Path) -> None:
    parts = re.split(r"^#{2,3} ", page.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    headings = [part for part in parts if part.startswith(("Break", "Measure", "弄坏", "测量"))]
    assert len(headings) == 2 * len(EVENINGS)
    for part in headings:
        outside = re.sub(r"<details>.*?</details>", "", part, flags=re.DOTALL)
        assert re.search("[?？]", outside) and part.count("<details>") == 1, part


def test_six_evenings_in_one_shape() -> None:
    assert list(evenings()) == list(EVENINGS)
    for text in evenings().values():
        assert re.findall(r"^### (.+)$", text, re.MULTILINE) == PARTS
        predict = text.partition("### Watch")[0]
        assert 2 <= predict.count("<details>") == predict.count("</summary>") <= 3


@EVERY_EVENING
def test_an_evening_has_its_tasks_as_they_are(number: int) -> None:
    rows = TASK_ROW.findall(evenings()[number])
    assert [row[0] for row in rows] == [t.number for t in TASKS if t.evening == number]
    for name, title, place, minutes, level in rows:
        task = task_numbered(name)
        assert task is not None
        assert (title, place, int(minutes)) == (task.title, task.place, task.minutes)
        assert level == task.difficulty
    (chapter,) = ROOT.glob(f"0{number}_*/README.md")
    listed = re.findall(CHAPTER_ROW, chapter.read_text(encoding="utf-8"), re.MULTILINE)
    assert listed == [(name, title, minutes, level) for name, title, _, minutes, level in rows]


@EVERY_EVENING
def test_an_evening_breaks_an_exhibit_by_its_number_and_title(number: int) -> None:
    text = evenings()[number].partition("### Break")[2]
    (bug,) = re.findall(r"make museum BUG=(\d+)", text)
    exhibit = EXHIBITS[int(bug) - 1]
    assert f"*{exhibit.title}.*" in text and exhibit.chapter.startswith(f"0{number}_")


@EVERY_EVENING
def test_an_evening_reads_its_chapter_and_watches_its_film(number: int) -> None:
    text = evenings()[number]
    (film,) = re.findall(r'make watch ARGS="--film (\d)"', text)
    assert int(film) == number
    (link,) = re.findall(r"\]\((\w+)/README\.md#1-a-question-and-a-number\)", text)
    assert link.startswith(f"0{number}_")
    chapter = (ROOT / link / "README.md").read_text(encoding="utf-8")
    assert "\n## 1. A question, and a number\n" in chapter and "\n## 3. " in chapter


def commands_of_make() -> list[str]:
    """Return the commands of the Makefile's head and of the pages that a reader types from first,
    in both languages."""
    texts = [(ROOT / "Makefile").read_text(encoding="utf-8").partition("\n\n")[0]]
    for page in ("README", "COURSE", "workshop/site/pages/FIRST_HOUR"):
        texts += [path.read_text(encoding="utf-8") for path in ROOT.glob(f"{page}*.md")]
    typed = "\n".join(texts).replace("\\\n", " ")
    return sorted({" ".join(found.split()) for found in COMMAND.findall(typed)})


class ParsedError(Exception):
    """The arguments are right; nothing is run."""


@pytest.mark.needs("make")
@pytest.mark.parametrize("command", commands_of_make())
def test_a_command_that_a_reader_types_first_is_known_and_takes_its_arguments(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (bug := re.search(r"BUG=(\d+) ARGS=--watch", command)) is not None:
        assert EXHIBITS[int(bug[1]) - 1].watch is not None, "there is nothing to watch"
    words = [*shlex.split(command), "-n"]
    run = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    programs = re.findall(r" ?\S*python\S* -m +([\w.]+)(.*?)(?: \|\|.*)?$", run.stdout, re.M)
    programs = [found for found in programs if found[0] not in ("pip", "venv", "pytest")]
    for module, arguments in programs:
        typed = shlex.split(arguments)
        if module == "workshop.tasks.mine":
            module, typed = typed[0], [one for one in typed[1:] if one != "--mine"]
        assert find_spec(module) is not None
        parse = ArgumentParser.parse_args

        def parse_only(parser: ArgumentParser, args: Any = None) -> NoReturn:
            parse(parser, args)
            raise ParsedError

        monkeypatch.setattr(sys, "argv", [module, *typed])
        monkeypatch.setattr(ArgumentParser, "parse_args", parse_only)
        with pytest.raises(ParsedError):
            runpy.run_module(module, run_name="__main__", alter_sys=True)


def test_the_readme_leads_to_the_course() -> None:
    assert "](COURSE.md)" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_program_to_measure_memory_runs_as_typed(capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = re.findall(r"^```python\n(.*?)^```", COURSE, re.MULTILINE | re.DOTALL)
    exec(program, {})
    reserved, filled = capsys.readouterr().out.splitlines()
    steps = [int(line.split()[1]) for line in (reserved, filled)]
    assert reserved.startswith("fcfs") and filled.startswith("two_phase") and steps[1] < steps[0]
    assert reserved.endswith(" 0 preemptions") and not filled.endswith(" 0 preemptions")
