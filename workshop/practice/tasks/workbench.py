"""The folder with a reader's answers and progress.

    my/block_pool.py               a module of ours with a hole for each of its tasks
    my/answers/2.2_block_pool.py   its copy from before a task was started again
    my/progress.json               hints given, tasks passed

Invariant: nothing that a reader has written is ever lost. An existing file is only written to when
a task is started again, and then a copy is kept and its path is printed for the reader.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from workshop.practice.source_patch import ROOT
from workshop.practice.tasks.answer import answer_to, emptied, is_blank
from workshop.practice.tasks.course import Task, blank_text, tasks_of

FOLDER = ROOT / "my"


@dataclass
class Progress:
    hints: dict[str, int] = field(default_factory=dict)  # number of the task -> how many were given
    passed: dict[str, str] = field(default_factory=dict)  # number -> which text it was that passed


class Workbench:
    def __init__(self, folder: Path = FOLDER) -> None:
        self.folder = folder
        self._path = folder / "progress.json"
        self.progress = Progress()
        if self._path.is_file():
            try:
                self.progress = Progress(**json.loads(self._path.read_text(encoding="utf-8")))
            except (ValueError, TypeError) as error:
                raise ValueError(f"cannot read {self.name(self._path)}: {error}") from None

    def save(self) -> None:
        self.folder.mkdir(exist_ok=True)
        self._path.write_text(json.dumps(vars(self.progress), indent=1) + "\n", encoding="utf-8")

    def file(self, task: Task) -> Path:
        return self.folder / Path(task.file).name

    def name(self, path: Path) -> str:
        return path.relative_to(self.folder.parent).as_posix()

    def text(self, task: Task) -> str | None:
        """The text of the reader's file. None: the file does not exist or is not text."""
        try:
            return self.file(task).read_text(encoding="utf-8-sig")
        except (FileNotFoundError, UnicodeDecodeError):
            return None

    def is_blank(self, task: Task) -> bool:
        text = self.text(task)
        return text is not None and is_blank(text, task)

    def open(self, tasks: Iterable[Task]) -> list[str]:
        """Write the tasks' missing files. Returns messages for the reader."""
        told = []
        for file, task in {self.file(task): task for task in tasks}.items():
            if file.exists():
                told.append(f"It is there: {self.name(file)}")
            else:
                told.append(self._write_blank(task))
        return told

    def start_over(self, task: Task) -> list[str]:
        """Turn the task's function into a hole again, and keep a copy of the file."""
        file, text, told = self.file(task), self.text(task), []
        if file.is_file() and text != blank_text(task.module):
            kept = self._free_name(self.folder / "answers" / f"{task.number}_{file.name}")
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_bytes(file.read_bytes())
            told.append(f"As it was until now, {self.name(file)} is kept in {self.name(kept)}.")
        changed = None if text is None else emptied(text, task)
        if changed is None:
            return [*told, self._write_blank(task)]
        file.write_text(changed, encoding="utf-8")
        return [*told, f"{task.place} is empty again in {self.name(file)}; all else stays."]

    def _write_blank(self, task: Task) -> str:
        """Write the file with all its holes. Returns a message for the reader."""
        file, numbers = self.file(task), [one.number for one in tasks_of(task.module)]
        self.folder.mkdir(exist_ok=True)
        file.write_text(blank_text(task.module), encoding="utf-8")
        return (
            f"Written: {self.name(file)}, which is {task.file} "
            f"without the lines of {' and '.join(numbers)}."
        )

    def _free_name(self, wanted: Path) -> Path:
        """Return `wanted`, or if it exists, the name with the first free number."""
        places = (wanted.with_stem(f"{wanted.stem}_{n}") for n in count(2))
        return next(p for p in places if not p.exists()) if wanted.exists() else wanted

    def next_hint(self, task: Task) -> int | None:
        """Return the next hint's number, from 1. None: there are no more."""
        given = self.progress.hints.get(task.number, 0)
        if given >= len(task.english.said["hint"]):
            return None
        self.progress.hints[task.number] = given + 1
        self.save()
        return given + 1

    def passed(self, task: Task) -> None:
        """Record that the task's current function has passed."""
        self.progress.passed[task.number] = self._digest(task)
        self.save()

    def has_passed(self, task: Task) -> bool:
        """Whether the task has passed and its function is unchanged since."""
        return self.progress.passed.get(task.number) == self._digest(task)

    def _digest(self, task: Task) -> str:
        try:
            tried = answer_to(self.text(task) or "", [task], task.module).text
        except (SyntaxError, ValueError):
            return "none"
        return hashlib.blake2b(tried.encode(), digest_size=8).hexdigest()
