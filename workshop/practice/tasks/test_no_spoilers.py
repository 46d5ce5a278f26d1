"""A page that quotes the body of a task has it folded, under a summary that names the task."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from workshop.book.quoted import BLOCK, code_lines, find_quote
from workshop.book.sync import pages
from workshop.practice.source_patch import ROOT
from workshop.practice.tasks.course import TASKS, blank_of

PAGES = [page for page in pages() if BLOCK.search(page.read_text(encoding="utf-8"))]


@cache  # not made while tests are collected: every process would
def bodies() -> dict[str, dict[str, set[int]]]:
    """By file, then by task: the lines of its body."""
    found: dict[str, dict[str, set[int]]] = {}
    for task in TASKS:
        blank, source = blank_of(task), task.source()
        body = range(blank.first_line, blank.first_line + blank.solution.count("\n"))
        found.setdefault(task.path.name, {})[task.number] = code_lines(source) & set(body)
    return found


def summary_for(numbers: list[str], is_chinese: bool = False) -> str:
    """Summary of a fold: the functions whose bodies are tasks, and the numbers of the tasks."""
    tasks = [task for task in TASKS if task.number in numbers]
    places = dict.fromkeys(f"<code>{task.place}</code>" for task in tasks)
    if is_chinese:
        return (
            f"<summary>{'、'.join(places)}：函数体就是任务 {'、'.join(numbers)}，先自己写</summary>"
        )
    task, it = ("task", "it") if len(numbers) == 1 else ("tasks", "them")
    summary = f"The body is {task} {' and '.join(numbers)}: try {it} first"
    return f"<summary>{', '.join(places)}. {summary}</summary>"


def spoilers(text: str, is_chinese: bool = False) -> Iterator[str]:
    """A sentence for each block with (a part of) a task's body that is not folded as it should."""
    for block in BLOCK.finditer(text):
        name = Path(block["file"]).name
        source = next((task.source() for task in TASKS if task.path.name == name), "")
        quoted = find_quote(source, block["code"]) or set()
        shown = [number for number, lines in bodies().get(name, {}).items() if lines & quoted]
        _, _, inner = text[: block.start()].rpartition("<details>")
        summary = summary_for(shown, is_chinese)
        if shown and ("</details>" in inner or not inner.strip().startswith(summary)):
            yield f"{name}, {block['code'].splitlines()[0].strip()!r}: put it under {summary}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_bodies_that_are_tasks_are_folded(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert not list(spoilers(text, page.name.endswith(".zh.md")))


def test_a_body_that_is_shown_is_found() -> None:
    task = TASKS[0]
    body = "".join(blank_of(task).solution.splitlines(keepends=True)[-2:])
    block = f"```python file={task.path.name}\n{body}```\n"
    folded = f"<details>\n{summary_for([task.number])}\n\n{block}</details>\n"
    assert not list(spoilers(folded)) and list(spoilers(folded, is_chinese=True))
    assert len(list(spoilers(block))) == len(list(spoilers(folded + block))) == 1
    assert list(spoilers(folded.replace(task.number, "9.9")))
    assert {number for found in bodies().values() for number in found} == {t.number for t in TASKS}
    assert all(lines for found in bodies().values() for lines in found.values())


def test_pages_quote_bodies() -> None:
    """Else nothing above could fail."""
    assert {"README.md", "README.zh.md"} <= {page.name for page in PAGES}
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert re.search(r"The body is tasks? [\d.]+", text) and "就是任务" in text
