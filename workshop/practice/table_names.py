"""Write today's names into the tables of bugs, tasks and answers.

The rows apply without that (`renames.py`), so a rename in a function changes no table. `make sync`
says which names are older, and with `ARGS=--all` writes the new ones, so that the tables read like
the code."""

from __future__ import annotations

import re
from collections.abc import Callable

from workshop.practice import patch_table
from workshop.practice.patch_table import all_bugs, names_changed_in, read_place
from workshop.practice.renames import renamed, renamed_in_words
from workshop.practice.tasks import course
from workshop.practice.tasks.course import TASKS, task_numbered

_CODE = ("- ", "+ ", "| ")
_PARAMETERS = re.compile(r"(?<=\w)\([\w, ]+\)$", re.MULTILINE)
_HINT = re.compile(r"(?<=hint ).+(?=\n\w)")  # can be code
Names = dict[str, str]


def older_names() -> dict[str, Names]:
    """Return the names that changed, old -> new, by module and symbol."""
    places = {(bug.module, bug.symbol): bug.parameters for bug in all_bugs()}
    places |= {(task.module, task.place): task.parameters for task in TASKS}
    found = {f"{m} {s}": names_changed_in(m, s, given) for (m, s), given in places.items()}
    return {place: names for place, names in found.items() if names}


def write_names() -> None:
    in_step = {task.number for task in TASKS if task.english.text("en") == task.digest}
    texts = {
        patch_table.TABLE: _of_place,
        course.TABLE: _of_task,
        course.TABLE.with_name("answers.txt"): _of_task,
    }
    changed = {path: with_names(path.read_text("utf-8"), names) for path, names in texts.items()}
    for path, text in changed.items():
        path.write_text(text, encoding="utf-8")
    all_bugs.cache_clear()
    text = course.TABLE.read_text("utf-8")
    for task in course.read_tasks(course.TABLE):
        if task.number in in_step:  # nothing but names has changed
            text = text.replace(f"\nzh {task.english.text('en')} ", f"\nzh {task.digest} ")
    course.TABLE.write_text(text, encoding="utf-8")


def _of_place(head: str) -> Names:
    return names_changed_in(*read_place(head))


def _of_task(head: str) -> Names:
    task = task_numbered(head.partition(" ")[0])
    return {} if task is None else task.names_now()


def with_names(text: str, names_of: Callable[[str], Names]) -> str:
    """Return a table with the new names in code, in backticks and in lists of parameters.
    `names_of` gets the first line of a row."""
    parts, head = re.split(r"(\n\s*\n)", text), ""
    for i in range(0, len(parts), 2):
        lines = [line for line in parts[i].split("\n") if not line.startswith("#")]
        if lines and not lines[0].startswith(_CODE):
            head = lines[0]
        if lines and (names := names_of(head)):
            parts[i] = _renamed(parts[i], names)
    return "".join(parts)


def _renamed(row: str, names: Names) -> str:
    for mark in map(re.escape, _CODE):
        row = re.sub(rf"(?:^{mark}.*\n?)+", lambda match: _code(match[0], names), row, flags=re.M)
    row = _PARAMETERS.sub(lambda match: renamed(match[0], names), row)
    lines = re.split(rf"((?:^(?:{'|'.join(map(re.escape, _CODE))}).*\n?)+)", row, flags=re.M)
    lines[::2] = [renamed_in_words(part, names) for part in lines[::2]]
    return _HINT.sub(lambda match: renamed_in_words(match[0], names), "".join(lines))


def _code(lines: str, names: Names) -> str:
    mark = lines[:2]
    code = renamed("\n".join(line[2:] for line in lines.splitlines()), names)
    return "\n".join(mark + line for line in code.split("\n")) + "\n" * lines.endswith("\n")
