"""`COURSE.md` says what is there: tasks, exhibits, commands."""

from __future__ import annotations

import re
import runpy
import shlex
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from workshop.book.quoted import BLOCK, code_lines, find_quote
from workshop.book.sync import pages
from workshop.practice.museum.exhibits import EXHIBITS
from workshop.practice.source_patch import ROOT
from workshop.practice.tasks.course import EVENINGS, TASKS, blank_of, minutes_of

COURSE = (ROOT / "COURSE.md").read_text(encoding="utf-8")
PARTS = ["Predict", "Watch", "Read", "Do", "Break", "Measure"]
COMMAND = re.compile(
    r"""(?:^(?:\#\ +)?|`|\ {2,})(make\ [a-z]+(?:\ [A-Z]+=(?:"[^"`]*"|[^\s`]+))*)""", re.M | re.X
)
CHAPTER_ROW = r"^\| (\d\.\d) \| ([^|]+) \| (\d+) \| (\w+) \|$"


QUOTING = [page for page in pages() if BLOCK.search(page.read_text(encoding="utf-8"))]
EVERY_EVENING = pytest.mark.parametrize("number", EVENINGS)


@EVERY_EVENING
def test_an_evening_has_its_tasks_as_they_are(number: int) -> None:
    tasks = [task for task in TASKS if task.evening == number]
    (minutes,) = re.findall(rf"(\d+) minutes in all: `make task EVENING={number}`", COURSE)
    assert int(minutes) == minutes_of(number)
    (chapter,) = ROOT.glob(f"0{number}_*/README.md")
    listed = re.findall(CHAPTER_ROW, chapter.read_text(encoding="utf-8"), re.MULTILINE)
    assert listed == [(t.number, t.title, str(t.minutes), t.difficulty) for t in tasks]


@EVERY_EVENING
def test_an_evening_watches_its_film_and_breaks_an_exhibit_of_its_chapter(number: int) -> None:
    (text,) = re.findall(rf"^## Evening {number}\b.+?(?=^## )", COURSE, re.MULTILINE | re.DOTALL)
    assert re.findall(r"^### (.+)$", text, re.MULTILINE) == PARTS
    (film,) = re.findall(r'make watch ARGS="--film (\d)"', text)
    assert int(film) == number
    (bug,) = re.findall(r"make museum BUG=(\d+)", text.partition("### Break")[2])
    exhibit = EXHIBITS[int(bug) - 1]
    assert f"*{exhibit.title}.*" in text and exhibit.chapter.startswith(f"0{number}_")


def commands_of_make() -> list[str]:
    """Return the commands of the Makefile's head and of the pages that a reader types from first,
    in both languages."""
    texts = [(ROOT / "Makefile").read_text(encoding="utf-8").partition("\n\n")[0]]
    for page in ("README", "COURSE", "FIRST_HOUR"):
        texts += [path.read_text(encoding="utf-8") for path in ROOT.glob(f"{page}*.md")]
    typed = "\n".join(texts).replace("\\\n", " ")
    return sorted({" ".join(found.split()) for found in COMMAND.findall(typed)})


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

        def parse_only(parser: ArgumentParser, args: Any = None) -> None:
            parse(parser, args)
            raise InterruptedError  # the arguments are right; nothing is run

        monkeypatch.setattr(sys, "argv", [module, *typed])
        monkeypatch.setattr(ArgumentParser, "parse_args", parse_only)
        with pytest.raises(InterruptedError):
            runpy.run_module(module, run_name="__main__", alter_sys=True)


def test_the_program_to_measure_memory_runs_as_typed(capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = re.findall(r"^```python\n(.*?)^```", COURSE, re.MULTILINE | re.DOTALL)
    exec(program, {})
    reserved, filled = capsys.readouterr().out.splitlines()
    steps = [int(line.split()[1]) for line in (reserved, filled)]
    assert reserved.startswith("fcfs") and filled.startswith("two_phase") and steps[1] < steps[0]
    assert reserved.endswith(" 0 preemptions") and not filled.endswith(" 0 preemptions")


@cache  # not made while tests are collected: every process would
def bodies() -> dict[str, dict[str, set[int]]]:
    """By file, then by task: the lines of its body."""
    found: dict[str, dict[str, set[int]]] = {}
    for task in TASKS:
        blank, source = blank_of(task), task.source()
        body = range(blank.first_line, blank.first_line + blank.solution.count("\n"))
        found.setdefault(task.path.name, {})[task.number] = code_lines(source) & set(body)
    return found


def spoilers(text: str) -> Iterator[str]:
    """The blocks with (a part of) a task's body that is in no fold whose summary names it."""
    for block in BLOCK.finditer(text):
        name = Path(block["file"]).name
        source = next((task.source() for task in TASKS if task.path.name == name), "")
        quoted = find_quote(source, block["code"]) or set()
        shown = [number for number, lines in bodies().get(name, {}).items() if lines & quoted]
        _, _, inner = text[: block.start()].rpartition("<details>")
        summary = inner.partition("</summary>")[0]
        if shown and ("</details>" in inner or not {*shown} <= {*re.findall(r"\d\.\d", summary)}):
            yield block["code"]


@pytest.mark.parametrize("page", QUOTING, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_bodies_that_are_tasks_are_folded(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert not list(spoilers(text))
