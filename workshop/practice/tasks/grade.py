"""Try a reader's answer to a task, and describe the first problem in a sentence.

The checks go from fast to slow, and the first failure ends the grading:

    the text      is Python; the function is still there and takes the same arguments
    the import    the module can be imported, within a time limit
    the tests     the named ones, the simplest first, with the reader's module for every import of
                  it; the first failure is reported
    the mistakes  only after a failed test: which of them fails the same test in the same words

The reader's code runs in a separate process. Nothing in the checkout is written to.
"""

from __future__ import annotations

import ast
import linecache
import os
import tempfile
import textwrap
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from workshop.book.text_rows import is_chinese
from workshop.practice.apart import apart
from workshop.practice.module_swap import ModuleSwap
from workshop.practice.named_tests import Failure, TestRun, into
from workshop.practice.patch_table import log_row
from workshop.practice.source_patch import ROOT
from workshop.practice.tasks.answer import Answer, answer_to, is_blank
from workshop.practice.tasks.blank import function_at, signature
from workshop.practice.tasks.course import Task, blank_of
from workshop.practice.trial import said_by, swapped, try_tests

LIMIT_S = 10.0  # for a test, an import, an example
NUM_LINES = 12  # shown of the output of a test or of the reader's code


@dataclass(frozen=True, slots=True)
class Verdict:
    is_right: bool
    text: str


@dataclass(frozen=True, slots=True)
class _Trial:
    """A reader's file, and the module to try, which has the function of that file."""

    task: Task
    file: Path
    swap: ModuleSwap
    answer: Answer
    limit_s: float

    @property
    def name(self) -> str:
        return _name(self.file)

    def place(self, line: int) -> str:
        """Return a line of the tried module, as a place in the reader's file."""
        return f"line {self.answer.line(line)} of {self.name}:\n    {self.source_line(line)}"

    def source_line(self, line: int) -> str:
        lines = self.answer.text.splitlines()
        return lines[line - 1].strip() if 0 < line <= len(lines) else ""


def grade(
    task: Task, file: Path, limit_s: float = LIMIT_S, tell: Callable[[str], None] = lambda _: None
) -> Verdict:
    """Grade an answer. `tell` gets a message before each check, which can take seconds."""
    file = file.resolve()
    if problem := _in_the_text(task, file):
        return Verdict(False, problem)
    answer = answer_to(file.read_text(encoding="utf-8-sig"), [task], task.module)
    with swapped(task.path, answer.text) as swap:
        return _graded(_Trial(task, file, swap, answer, limit_s), tell)


def _graded(trial: _Trial, tell: Callable[[str], None]) -> Verdict:
    tell(f"Importing {trial.name} ...")
    if problem := _in_the_import(trial):
        return Verdict(False, f"{trial.name} cannot be imported: {problem}.")
    num_tests = len(trial.task.tests)
    tell(f"Its tests ({num_tests}) ...")
    run = _tested(trial)
    if isinstance(run, str):
        return Verdict(False, run)
    if not run.failed:
        cases = f", in {run.num_passed} cases" if run.num_passed > num_tests else ""
        return Verdict(True, f"Right. {num_tests} test{'s' * (num_tests > 1)} passed{cases}.")
    tell("One fails. Comparing it with common mistakes ...")
    return _explained(trial, run)


# -- the text


def _in_the_text(task: Task, file: Path) -> str:
    """Return the problem that is visible without running the code, or ""."""
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        return f"{_name(file)} is not UTF-8 ({error.reason}). Save it in that encoding."
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        line = (error.text or "").strip()
        at = f"line {error.lineno} of {_name(file)}"
        return f"Python cannot read {at}: {error.msg}.\n\n    {line}"
    ours, yours = (function_at(each, task.place) for each in (ast.parse(task.source()), tree))
    assert ours is not None
    if yours is None:
        return f"{_name(file)} has no {task.place} any more: others call it. Give it its name back."
    if signature(yours) != signature(ours):
        return (
            f"{task.place} takes {signature(yours)} now, and others call it with "
            f"{signature(ours)}. Put the arguments back; the task needs no others."
        )
    if is_blank(text, task):
        return "It is still the blank. Write your lines in the place of `raise`."
    stub = blank_of(task).stub.splitlines()[-1].strip()
    lines = [line.strip() for line in text.split("\n")]
    if stub in lines:
        line = lines.index(stub) + 1
        return f"Line {line} of {_name(file)} still raises NotImplementedError. Take it out."
    return ""


# -- in another process


def _in_the_import(trial: _Trial) -> str:
    """Return the problem of importing the module, or ""."""
    try:
        problem = apart(_import, (trial.swap,), trial.limit_s)
    except RuntimeError as error:
        return f"importing it ended the whole process ({error})"
    if problem is None:
        return f"importing it does not end within {trial.limit_s:g} seconds"
    said, line = problem
    shown = "" if line is None else f", line {trial.answer.line(line)}: `{trial.source_line(line)}`"
    return f"{said}{shown}"


def _import(swap: ModuleSwap) -> tuple[str, int | None]:
    """Return the exception, and its line in the module; or "" and None."""
    swap.install()
    with tempfile.TemporaryFile("w+") as file, into(file.fileno()):
        try:
            swap.check()
        except BaseException as error:  # `exit()` too
            frames = traceback.extract_tb(error.__traceback__)
            lines = [frame.lineno for frame in frames if frame.filename == str(swap.file)]
            return f"{type(error).__name__}: {error}", lines[-1] if lines else None
    return "", None


def first_failure(task: Task, text: str, limit_s: float) -> tuple[str, str] | None:
    """Return the first failed test with a module of that text, and its message."""
    with suppress(RuntimeError), swapped(task.path, text) as swap:
        run = try_tests(task.test_ids, swap, first_only=True, limit_s=limit_s)
        return None if run.first is None else (run.first.test, run.first.message)
    return None


def _tested(trial: _Trial) -> TestRun | str:
    """Return the run of the named tests, or why they could not run."""
    try:
        run = try_tests(trial.task.test_ids, trial.swap, first_only=True, limit_s=trial.limit_s)
    except RuntimeError as error:
        return f"The tests could not be run with {trial.name}: {error}"
    if not (run.failed or run.num_passed):
        return f"The tests do not end with {trial.name}, and could not be stopped."
    return run


# -- what is said


def _explained(trial: _Trial, run: TestRun) -> Verdict:
    task, first = trial.task, run.first
    assert first is not None
    parts = [_told(first, trial)]
    if task.example is not None:
        said = said_by(task.example, trial.swap, trial.limit_s)
        with swapped(task.path, task.source()) as swap:
            ours = said_by(task.example, swap)
        if said != ours and said not in first.message:  # else an exception, and it is told
            yours = f"With your lines it says:\n\n{_shown(said)}"
            parts.append(f"A small example, as it should be:\n\n{_shown(ours)}\n\n{yours}")
    lessons = [
        lesson
        for mistake, lesson in zip(task.mistakes, task.words.said["mistake"], strict=True)
        if first_failure(task, mistake.apply(), trial.limit_s) == (first.test, first.message)
    ]
    if lessons:
        told = f"This looks like a common mistake. {' Or: '.join(lessons)}"
        parts.append(told if is_chinese() else textwrap.fill(told, 96))
    elif not _is_ours_elsewhere(trial):
        parts.append(
            f"Outside of {task.place}, {trial.name} is not as {task.file} is now. That may "
            f"be what is wrong. (make task N={task.number} ARGS=--again begins with a new copy.)"
        )
    return Verdict(False, "\n\n".join(parts))


def _is_ours_elsewhere(trial: _Trial) -> bool:
    task = trial.task
    return answer_to(trial.answer.text, (), task.module).text == task.source()


def _told(failure: Failure, trial: _Trial) -> str:
    """Return the first failed test as a sentence, with its place and the values it saw."""
    path, _, name = failure.test.partition("::")
    name, _, parameters = name.rpartition("::")[2].partition("[")
    words = name.removeprefix("test_").replace("_", " ")
    words = "a random run agrees with a model of it" if name == "runTest" else words
    case = f" (case {parameters.rstrip(']')})" if parameters else ""
    if log_row(failure.test) is not None:
        words, case = parameters.rstrip("]"), ""
    lines = [textwrap.fill(f'Not yet. What does not hold: "{words}"{case}.', 96)]
    if failure.message.startswith(("Failed: Timeout", "Timeout")):
        line = failure.swapped_line
        at = "" if line is None else f" It was at {trial.place(line)}"
        lines.append(f"The test was stopped: it did not end. Does a loop never stop?{at}")
    else:
        raised_in = Path(os.path.join(ROOT, failure.path)).resolve()
        if raised_in == trial.swap.file:
            line = failure.swapped_line or failure.line
            lines.append(f"Your code raised an exception at {trial.place(line)}")
        elif failure.path:  # not a row of a step log, which shows what happened beside it
            source = linecache.getline(str(raised_in), failure.line).strip()
            lines.append(f"{_name(raised_in)}:{failure.line}\n    {source}")
            if failure.swapped_line is not None:
                lines.append(f"On the way there: {trial.place(failure.swapped_line)}")
        message = failure.message
        # All numbers of two tensors say less than the small example that follows.
        lines.append(_shown(message.partition("\n")[0] if "tensor(" in message else message))
    if failure.printed:
        lines.append(f"What was printed:\n\n{_shown(failure.printed)}")
    return "\n\n".join([*lines, f"The test: {path}::{name}"])


# How a run of pytest is told to repeat itself. (A reader runs the task again.)
_FOR_PYTEST = ("Use -v to get more", "@reproduce_failure", "You can reproduce this example")


def _shown(text: str) -> str:
    lines = [x for x in text.strip().splitlines() if x.strip()]
    lines = [x for x in lines if not any(part in x for part in _FOR_PYTEST)]
    if len(lines) > NUM_LINES:
        lines = [*lines[:NUM_LINES], "..."]
    return textwrap.indent("\n".join(line[:160] for line in lines), "    ")


def _name(file: Path) -> str:
    """Return a file's name as a reader of the repository knows it."""
    return file.relative_to(ROOT).as_posix() if file.is_relative_to(ROOT) else file.name
