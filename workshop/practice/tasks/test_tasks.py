"""The tasks as they are written, their blanks, and the workbench. Commands: `transcripts.txt`."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

from workshop.practice.source_patch import ROOT
from workshop.practice.tasks.answer import answer_to, is_blank
from workshop.practice.tasks.blank import function_at
from workshop.practice.tasks.course import EVENINGS, TASKS, Task, blank_of, blank_text
from workshop.practice.tasks.test_answers import the
from workshop.practice.tasks.workbench import Workbench

EVERY_TASK = pytest.mark.parametrize("task", TASKS, ids=lambda task: task.number)


def test_three_tasks_an_evening_and_more_from_easy_to_hard() -> None:
    found = [task.number for task in TASKS]
    numbers = Counter(task.evening for task in TASKS)
    assert found == [f"{evening}.{i + 1}" for evening in EVENINGS for i in range(numbers[evening])]
    assert min(numbers.values()) >= 3
    assert {the(f"{evening}.1").difficulty for evening in EVENINGS} == {"easy"}


@EVERY_TASK
def test_a_task_has_its_texts_and_blank_and_solution_are_the_source(task: Task) -> None:
    assert "Keep this:" in task.english.text("write")
    assert 2 <= len(task.english.said["hint"]) <= 4 and 5 <= task.minutes <= 30
    (page,) = ROOT.glob(f"0{task.evening}_*/README.zh.md")
    row = f"| {task.number} | {task.chinese.text('title')} |"
    assert row in page.read_text(encoding="utf-8")
    blank = blank_of(task)
    assert blank.before + blank.solution + blank.after == task.source()
    assert blank.solution.strip() and blank.solution not in blank.text
    # each mistake is another program, and is in what the reader writes
    texts = [task.source(), *(mistake.apply() for mistake in task.mistakes)]
    assert {mistake.module for mistake in task.mistakes} == {task.module}
    assert len({ast.dump(ast.parse(text)) for text in texts}) == len(texts)
    for text in texts:
        assert text.startswith(blank.before) and text.endswith(blank.after)


@EVERY_TASK
def test_a_task_is_tried_with_our_lines_in_the_other_holes(task: Task) -> None:
    blank, text = blank_of(task), blank_text(task.module)
    solved = text.replace(blank.stub, blank.solution)
    assert answer_to(text, (), task.module).text == task.source()
    for given, expected in ((text, blank.text), (solved, task.source())):
        tried = answer_to(given, [task], task.module)
        assert ast.dump(function_of(tried.text, task)) == ast.dump(function_of(expected, task))
        assert is_blank(given, task) == (given is text)
    answer = answer_to(f"{text}# the end\n", (), task.module)
    line = answer.line(answer.text.split("\n").index("# the end") + 1)
    assert line == text.count("\n") + 1, "lines are counted in the reader's file"


def function_of(text: str, task: Task) -> ast.FunctionDef:
    function = function_at(ast.parse(text), task.place)
    assert isinstance(function, ast.FunctionDef)
    return function


def test_of_two_functions_in_a_file_each_is_begun_again_tried_and_passed_alone(
    tmp_path: Path,
) -> None:
    bench = Workbench(tmp_path / "my")
    one, other = (task for task in TASKS if task.module == "kv_cache_manager")
    bench.open([one])
    bench.file(one).write_text(one.source().replace("is None", "== None"))
    bench.start_over(one)
    text = bench.file(one).read_text(encoding="utf-8")
    assert bench.is_blank(one) and not bench.is_blank(other) and "blocks == None" in text
    wrong = blank_text(one.module).replace(blank_of(other).stub, "        return 1 / 0\n")
    assert "1 / 0" not in answer_to(wrong, [one], one.module).text
    bench.file(one).write_text(one.source())
    bench.passed(one)
    bench.file(one).write_text(one.source().replace("if blocks is None:", "if not blocks:"))
    assert Workbench(bench.folder).has_passed(one) and not bench.has_passed(other)
    bench.file(one).write_text(one.source().replace("pos % size", "pos & size"))
    assert not bench.has_passed(one), "an answer that has changed"
