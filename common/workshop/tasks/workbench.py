"""The folder with a reader's answers, and what is remembered of them.

    my/block_pool.py               the module that is being worked on, for the task that is open
    my/answers/2.2_block_pool.py   set aside when another task wants the same file
    my/progress.json               which task a file is for, hints given, tasks passed

Invariant: nothing that a reader has written is ever lost. What stands in the way is moved, and the
reader is told where to.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from common.workshop.tasks.course import blank_of, task_numbered
from common.workshop.tasks.task import Task
from common.workshop.tools.source_patch import ROOT

FOLDER = ROOT / "my"


@dataclass
class Progress:
    open: dict[str, str] = field(default_factory=dict)  # file name -> number of the task
    hints: dict[str, int] = field(default_factory=dict)  # number -> how many were given
    passed: list[str] = field(default_factory=list)


class Workbench:
    def __init__(self, folder: Path = FOLDER) -> None:
        self.folder = folder
        self._path = folder / "progress.json"
        self.progress = Progress()
        if self._path.is_file():
            try:
                self.progress = Progress(**json.loads(self._path.read_text(encoding="utf-8")))
            except (ValueError, TypeError) as error:
                raise ValueError(f"{self.name(self._path)} can not be read: {error}") from None

    def save(self) -> None:
        self.folder.mkdir(exist_ok=True)
        self._path.write_text(json.dumps(vars(self.progress), indent=1) + "\n", encoding="utf-8")

    def file(self, task: Task) -> Path:
        return self.folder / Path(task.file).name

    def name(self, path: Path) -> str:
        return path.relative_to(self.folder.parent).as_posix()

    def is_open(self, task: Task) -> bool:
        """Is the file there, and is it for this task?"""
        file = self.file(task)
        return file.is_file() and self.progress.open.get(file.name) == task.number

    def is_blank(self, task: Task) -> bool:
        try:
            return self.file(task).read_text(encoding="utf-8-sig") == blank_of(task).text
        except UnicodeDecodeError:
            return False

    def open(self, task: Task, anew: bool = False) -> list[str]:
        """Make the file be for this task: the answer that was set aside, or the blank. `anew`: the
        blank in any case. Returns what to tell the reader."""
        file = self.file(task)
        told = []
        if file.is_file():
            told += self._set_aside(file)
        answer = self._answer(task)
        if answer.is_file() and not anew:
            answer.replace(file)
            told.append(f"Your answer to task {task.number} is back in {self.name(file)}.")
        else:
            self.folder.mkdir(exist_ok=True)
            file.write_text(blank_of(task).text, encoding="utf-8")
            told.append(f"Written: {self.name(file)}, which is {task.file} without the answer.")
        self.progress.open[file.name] = task.number
        self.save()
        return told

    def _answer(self, task: Task) -> Path:
        return self.folder / "answers" / f"{task.number}_{Path(task.file).name}"

    def _set_aside(self, file: Path) -> list[str]:
        number = self.progress.open.get(file.name, "unknown")
        task = task_numbered(number)
        if task is not None and self.file(task) == file and self.is_blank(task):
            return []  # nothing was written into it
        wanted = self.folder / "answers" / f"{number}_{file.name}"
        wanted.parent.mkdir(parents=True, exist_ok=True)
        told = []
        if wanted.exists():  # an older answer: the one that comes back is the newest
            places = (wanted.with_stem(f"{wanted.stem}_{n}") for n in count(2))
            older = next(p for p in places if not p.exists())
            wanted.rename(older)
            told.append(f"The older {self.name(wanted)} is now {self.name(older)}.")
        file.rename(wanted)
        told.append(f"What was in {self.name(file)} (task {number}) is now {self.name(wanted)}.")
        return told

    def next_hint(self, task: Task) -> tuple[int, str] | None:
        """Its number, from 1, and its text. None: there are no more."""
        given = self.progress.hints.get(task.number, 0)
        if given >= len(task.hints):
            return None
        self.progress.hints[task.number] = given + 1
        self.save()
        return given + 1, task.hints[given]

    def passed(self, task: Task) -> None:
        if task.number not in self.progress.passed:
            self.progress.passed.append(task.number)
            self.save()
