"""A reader's file with one function to try; the other functions are ours.

    my/kv_cache_manager.py     slot_mapping (task 2.1)     _grow_table_to (task 2.3)
    to grade task 2.1          the reader's                ours
    to serve, 2.1 passed       the reader's                ours
    2.3 again                  the reader's                the blank

A file has a hole for each of its tasks, and the reader fills them one after the other. An unwritten
function must not make a written one fail. Two tasks can share a function (5.3 and 5.4). Then the
reader's function is used, with our code only where it still raises `NotImplementedError`."""

from __future__ import annotations

import ast
from collections.abc import Collection
from dataclasses import dataclass

from workshop.practice.tasks.blank import function_at, lines_of_function
from workshop.practice.tasks.course import Task, blank_of, blank_text, tasks_of


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    moved: tuple[tuple[int, int], ...] = ()  # (line, shift): lines of `text` after it are shifted

    def line(self, number: int) -> int:
        """Return the line number in the reader's file for line `number` of `text`."""
        return number - sum(by for behind, by in self.moved if number > behind)


def answer_to(text: str, kept: Collection[Task], module: str) -> Answer:
    """Return the reader's `text` with the functions of the `kept` tasks, and our functions for the
    other tasks. Raises `SyntaxError` for a text that is not Python."""
    places = {task.place for task in kept}
    answer = Answer(text)
    for task in tasks_of(module):
        if task.place not in places:
            answer = _with_function(answer, task.place, task.source())
        elif task not in kept:
            answer = _filled(answer, task)
    return answer


def emptied(text: str, task: Task) -> str | None:
    """Return `text` with the task's function blanked. None: the text has no such function."""
    try:
        changed = _with_function(Answer(text), task.place, blank_text(task.module)).text
        tree = ast.parse(changed)
    except SyntaxError:
        return None
    return changed if function_at(tree, task.place) is not None else None


def is_blank(text: str, task: Task) -> bool:
    """Whether the function is still the blank that was written for the reader."""
    blanks = blank_of(task).text, blank_text(task.module)  # alone, and with the others' holes
    try:
        dumped = _dumped(text, task.place)
    except (SyntaxError, ValueError):  # and a byte that is 0
        return False
    return dumped is not None and dumped in [_dumped(blank, task.place) for blank in blanks]


def _dumped(text: str, place: str) -> str | None:
    function = function_at(ast.parse(text), place)
    return None if function is None else ast.dump(function)


def _with_function(answer: Answer, place: str, source: str) -> Answer:
    """Return the answer with the function of `source`, if `source` has the function."""
    function, ours = (function_at(ast.parse(text), place) for text in (answer.text, source))
    if function is None or ours is None:
        return answer
    (first, stop), (begin, end) = map(lines_of_function, (function, ours))
    return _replaced(answer, first, stop, source.splitlines(keepends=True)[begin:end])


def _filled(answer: Answer, task: Task) -> Answer:
    """Return the answer with our lines where the task's hole still raises."""
    blank, lines = blank_of(task), answer.text.splitlines(keepends=True)
    raised = blank.stub.splitlines()[-1].strip()
    found = [number for number, line in enumerate(lines) if line.strip() == raised]
    if not found:
        return answer
    return _replaced(answer, found[0], found[0] + 1, blank.solution.splitlines(keepends=True))


def _replaced(answer: Answer, first: int, stop: int, new: list[str]) -> Answer:
    lines = answer.text.splitlines(keepends=True)
    by = len(new) - (stop - first)
    moved = [(behind + (by if behind >= stop else 0), n) for behind, n in answer.moved]
    return Answer("".join([*lines[:first], *new, *lines[stop:]]), (*moved, (stop + by, by)))
