"""`make museum` and `make task`, as typed: `transcripts.txt` says what they print."""

from __future__ import annotations

import io
import json
import shlex
import sys
from functools import partial
from pathlib import Path

import pytest

from common.events.frames import VERSION
from workshop.practice import command
from workshop.practice.module_swap import ModuleSwap
from workshop.practice.museum import two_films
from workshop.practice.museum.exhibits import Workload
from workshop.practice.museum.watched_run import RunOnFilm
from workshop.practice.named_tests import TestRun
from workshop.practice.tasks.course import Task, blank_of, blank_text, task_numbered
from workshop.practice.tasks.grade import Verdict, grade
from workshop.practice.tasks.workbench import Workbench
from workshop.watch.replay.film import Film

TABLE = Path(__file__).with_name("transcripts.txt")
FILM_OF_A_RUN = {
    "kind": "run", "version": VERSION, "started_at": 0.0, "scheduler": "two_phase",
    "policy": "fcfs", "prefix_cache": "hash", "block_size": 4, "num_blocks": 9,
    "max_num_seqs": 4, "overlaps": False, "max_num_batched_tokens": 64, "config": {},
    "model": {}, "versions": {},
}  # fmt: skip


def read(text: str) -> dict[str, list[str]]:
    parts = text.split("\n\n")[1:]
    return {part.splitlines()[0]: part.splitlines()[1:] for part in parts}


TRANSCRIPTS = read(TABLE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("title", TRANSCRIPTS)
def test_transcripts(title: str, typist: Typist) -> None:
    for line in TRANSCRIPTS[title]:
        typist.follow(line)


class Typist:
    """A reader at a terminal, in a folder of their own."""

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, output: pytest.CaptureFixture[str]
    ) -> None:
        self.folder, self.monkeypatch, self.output = folder, monkeypatch, output
        self.shown, self.rest = "", ""

    def follow(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        if word == "$":
            self.run(rest)
        elif word == "":
            words = line.removeprefix("  ")
            assert words in self.rest, f"{words!r} is not in:\n{self.rest}"
            self.rest = self.rest.partition(words)[2]
        elif word == "!":
            assert rest not in self.shown
        else:
            does = {
                "keys": self.keys,
                "verdict": self.verdict,
                "limit": self.limit,
                "<": self.write,
            }
            does |= {"language": partial(self.monkeypatch.setenv, "LANGUAGE")}
            does[word](rest)

    def run(self, typed: str) -> None:
        typed, _, status = typed.partition(" -> ")
        program, *arguments = shlex.split(typed)
        commands = {"museum": command.museum, "task": command.tasks, "cat": cat}
        try:
            ended = commands[program](arguments)
        except SystemExit as stopped:
            ended = stopped.code
        printed = self.output.readouterr()
        self.rest = self.shown = f"{printed.out}{printed.err}"
        assert ended == int(status or 0), self.shown

    def keys(self, typed: str) -> None:
        self.monkeypatch.setattr(sys, "stdin", io.StringIO(typed.replace("R", "\n")))

    def verdict(self, verdict: str) -> None:
        found = Verdict(True, "RIGHT") if verdict == "right" else Verdict(False, "NOT YET")
        self.monkeypatch.setattr(command, "grade", lambda *_, **__: found)

    def limit(self, seconds: str) -> None:
        self.monkeypatch.setattr(command, "grade", partial(grade, limit_s=float(seconds)))

    def write(self, words: str) -> None:
        place, text = words.split(" ", 1)
        task = task_numbered(place)
        (self.folder / "my").mkdir(exist_ok=True)
        if task is None:
            (self.folder / place).write_text(text, encoding="utf-8")
            return
        encoding = "latin-1" if text == "latin-1" else "utf-8"
        file = self.folder / "my" / Path(task.file).name
        file.write_text(answer(task, text), encoding=encoding)


def cat(files: list[str]) -> int:
    print(Path(files[0]).read_text(encoding="utf-8"))
    return 0


def answer(task: Task, words: str) -> str:
    """The text of a reader's file."""
    blank = blank_of(task)
    kind, _, rest = words.partition(" ")
    if kind == "|":
        margin = blank.stub[: len(blank.stub) - len(blank.stub.lstrip())]
        body = "".join(f"{margin}{line}\n" for line in rest.split("; "))
        return blank.before + body + blank.after
    if kind == "mistake":
        return task.mistakes[int(rest) - 1].apply()
    whole = {
        "blank": blank_text(task.module),
        "filled": blank_text(task.module).replace(blank.stub, blank.solution),
        "ours": task.source(),
        "latin-1": f"{task.source()}# caf\u00e9\n",
    }[kind]
    if rest.startswith("+ "):
        return f"{whole}\n{rest[2:]}\n"
    old, arrow, new = rest.partition(" -> ")
    assert not arrow or whole.count(old) >= 1, f"{old!r} is not in {task.file}"
    return whole.replace(old, new.replace("\\n", "\n")) if arrow else whole


@pytest.fixture
def typist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Typist:
    """The museum's processes and films are not made: they answer at once."""
    monkeypatch.setenv("LANGUAGE", "en")
    report = TestRun(("a",), "THE REPORT")
    monkeypatch.setattr(command, "try_tests", lambda *_, **__: report)
    monkeypatch.setattr(two_films, "make_film", make_film)
    monkeypatch.setattr(command, "Workbench", lambda: Workbench(tmp_path / "my"))
    monkeypatch.chdir(tmp_path)
    return Typist(tmp_path, monkeypatch, capfd)


def make_film(workload: Workload, path: Path, swap: ModuleSwap | None = None) -> RunOnFilm:
    row = {"number": 0, "prompt": [1], "prompt_pieces": [], "max_tokens": 1, "priority": 0}
    changes = {"requests": {"FIRST": [row]}, "free": [[8, 7] if swap is not None else [8], []]}
    line = {"at": "between", "time": 0.0, "changes": changes}
    path.write_text(f"{json.dumps(FILM_OF_A_RUN)}\n{json.dumps(line)}\n", encoding="utf-8")
    return RunOnFilm(Film.read(path))
