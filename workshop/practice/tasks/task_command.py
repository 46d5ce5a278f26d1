"""`python -m workshop.tasks`, `make task`: see `COURSE.md`."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence

from workshop.practice.module_swap import VARIABLE
from workshop.practice.tasks import reading
from workshop.practice.tasks.answer import answer_to
from workshop.practice.tasks.course import (
    EVENINGS,
    TASKS,
    blank_of,
    is_chinese,
    minutes_of,
    task_numbered,
    tasks_of_evening,
    words_of,
)
from workshop.practice.tasks.grade import grade
from workshop.practice.tasks.task import DIFFICULTIES, Task
from workshop.practice.tasks.tickets import tickets_of_evening
from workshop.practice.tasks.workbench import Workbench
from workshop.practice.trial import swapped

WIDTH = 96
DEMO_S = 120  # it takes a few; ten times as long on a busy machine
STOPPED = 130  # the shell's exit status for Ctrl-C


def main(arguments: Sequence[str] | None = None, bench: Workbench | None = None) -> int:
    """Return 0: success, 1: the answer is not right yet, 2: invalid arguments, 130: Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="python -m workshop.tasks", description="Write parts of the engine yourself."
    )
    parser.add_argument("number", nargs="?", metavar="N", help="which task, as 3.2; none: the list")
    parser.add_argument(
        "--evening", type=int, choices=EVENINGS, metavar="E", help="write all its files into my/"
    )
    one = parser.add_mutually_exclusive_group()
    one.add_argument("--grade", action="store_true", help="try your answer, whatever it is")
    one.add_argument("--hint", action="store_true", help="one hint more")
    one.add_argument("--solution", action="store_true", help="our answer")
    one.add_argument("--demo", action="store_true", help="run the engine on your answer")
    one.add_argument("--again", action="store_true", help="begin with a blank; the old is kept")
    one.add_argument("--write", action="store_true", help="count COURSE.md's lines anew and stop")
    options = parser.parse_args(arguments)
    if options.write:
        reading.write()
        return 0
    asked = [name for name, value in vars(options).items() if value is True]
    if options.evening is not None and (options.number is not None or asked):
        parser.error("--evening writes the files of a whole evening; give nothing else with it")
    if options.number is None and asked:
        parser.error(f"--{asked[0]} must have a task: a number of the list, such as 3.2")
    task = None if options.number is None else task_numbered(options.number)
    if options.number is not None and task is None:
        known = ", ".join(task.number for task in TASKS)
        parser.error(f"task must be one of {known}, got {options.number}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # models here are tiny
    try:
        bench = bench or Workbench()
    except ValueError as error:
        parser.error(f"{error}. Remove it: your answers stay.")
    if options.evening is not None:
        return _evening(options.evening, bench)
    if task is None:
        print(listed(bench))
        return 0
    does = {"grade": _grade, "hint": _hint, "solution": _solution, "demo": _demo, "again": _again}
    return does[asked[0]](task, bench) if asked else _go_on(task, bench)


def listed(bench: Workbench) -> str:
    lines = []
    for evening, title in EVENINGS.items():
        lines.append(f"\nEvening {evening}: {title} ({minutes_of(evening)} minutes)")
        lines += _rows(evening, bench)
        lines += [f"     ticket {n:2}         {title}" for n, title in tickets_of_evening(evening)]
    lines.append(
        "\nTickets are in INCIDENTS.md, and INCIDENTS.zh.md: you read evidence and write no code."
    )
    left = _open_tasks(bench, TASKS)
    lines.append(f"\n{len(TASKS) - len(left)} of {len(TASKS)} done.")
    if left:
        lines[-1] += f" The first of the others: make task N={left[0].number}"
    return "\n".join(lines)


def _rows(evening: int, bench: Workbench) -> Iterator[str]:
    for task in tasks_of_evening(evening):
        mark = "x" if task.number in bench.progress.passed else " "
        level = DIFFICULTIES[task.difficulty]
        title = words_of(task).title
        yield f" [{mark}] {task.number}  {task.minutes:2} min  {level:6}  {title}"


def _open_tasks(bench: Workbench, tasks: Sequence[Task]) -> list[Task]:
    return [task for task in tasks if task.number not in bench.progress.passed]


def _evening(number: int, bench: Workbench) -> int:
    tasks = tasks_of_evening(number)
    _say(f"Evening {number}: {EVENINGS[number]}. Tonight's files, to read and to write in:")
    _say("\n".join(bench.open(tasks)))
    _say("\n".join(_rows(number, bench)))
    left = _open_tasks(bench, tasks)
    if left:
        _say(f"The first that is open: make task N={left[0].number}")
    return 0


def _go_on(task: Task, bench: Workbench) -> int:
    """Begin the task, or grade the existing answer."""
    if not bench.file(task).exists():
        return _begin(task, bench, bench.open([task]))
    if bench.is_blank(task):
        where = f"{bench.name(bench.file(task))} is there, and {task.place} is still blank."
        return _begin(task, bench, [where])
    return _grade(task, bench)


def _again(task: Task, bench: Workbench) -> int:
    return _begin(task, bench, bench.start_over(task))


def _begin(task: Task, bench: Workbench, told: list[str]) -> int:
    level, words = DIFFICULTIES[task.difficulty], words_of(task)
    _say(f"Task {task.number}. {words.title} ({task.minutes} minutes, {level})")
    _say("\n".join(told))
    where = f"{bench.name(bench.file(task))}{_line_of_hole(task, bench)}"
    _say(f"Write in {where}, in {task.place}, in the place of `raise`:")
    _say(textwrap.indent(words.write, "    "))
    again = f"make task N={task.number}"
    _say(
        f"When you have written something: {again}\n"
        f"A hint ({len(task.hints)} in all): {again} ARGS=--hint"
    )
    return 0


def _line_of_hole(task: Task, bench: Workbench) -> str:
    before, found, _ = (bench.text(task) or "").partition(blank_of(task).stub)
    return f", line {(before + found).count(chr(10))}" if found else ""


def _grade(task: Task, bench: Workbench) -> int:
    if not bench.file(task).exists():
        _say(
            f"There is no answer to task {task.number}: there is no {bench.name(bench.file(task))}."
        )
        return _begin(task, bench, bench.open([task]))
    verdict = grade(task, bench.file(task), tell=lambda doing: print(doing, flush=True))
    _say(f"\n{verdict.text}")
    again = f"make task N={task.number}"
    if not verdict.is_right:
        _say(f"Try again: {again}    A hint: {again} ARGS=--hint")
        return 1
    bench.passed(task)
    _say(f"Compare it with ours: {again} ARGS=--solution")
    _say(f"Run it: {again} ARGS=--demo    With all of yours: make demo ARGS=--mine")
    here = TASKS.index(task)
    following = _open_tasks(bench, (*TASKS[here:], *TASKS[:here]))
    if following:
        _say(f"The next: make task N={following[0].number}    ({words_of(following[0]).title})")
    return 0


def _hint(task: Task, bench: Workbench) -> int:
    hints, number = words_of(task).hints, bench.next_hint(task)
    if number is None:
        _say(f"These were all {len(hints)} hints:")
        for number, hint in enumerate(hints, 1):
            _say(_filled(f"{number}. {hint}"))
        _say(f"Our answer: make task N={task.number} ARGS=--solution")
    else:
        _say(_filled(f"Hint {number} of {len(hints)}: {hints[number - 1]}"))
    return 0


def _filled(text: str) -> str:
    """Wrap the text between words. Chinese is unchanged: a terminal can break it anywhere."""
    return text if is_chinese() else textwrap.fill(text, WIDTH, subsequent_indent="   ")


def _solution(task: Task, bench: Workbench) -> int:
    blank = blank_of(task)
    _say(f"{task.file}, line {blank.first_line}, in {task.place}:")
    _say(textwrap.indent(textwrap.dedent(blank.solution), "    ").rstrip())
    return 0


def _demo(task: Task, bench: Workbench) -> int:
    """Run the demo in a separate process: nothing is imported before the reader's module."""
    text = bench.text(task)
    if text is None or bench.is_blank(task):
        _say(f"There is no answer to run yet. Begin: make task N={task.number}")
        return 1
    try:
        answer = answer_to(text, [task], task.module)
    except (SyntaxError, ValueError) as error:
        _say(f"Python cannot read {bench.name(bench.file(task))}: {error}")
        return 1
    command = [sys.executable, "-m", "workshop.tasks.demo_on_yours", task.number]
    try:
        with swapped(task.path, answer.text) as swap:
            environment = {**os.environ, VARIABLE: f"{swap.module}={swap.file}"}
            return subprocess.run(command, env=environment, timeout=DEMO_S).returncode
    except subprocess.TimeoutExpired:
        _say(f"Stopped: it did not end within {DEMO_S} seconds. Does a loop never stop?")
        return 1
    except KeyboardInterrupt:
        _say("The demo was stopped.")
        return STOPPED


def _say(text: str) -> None:
    print(f"{text}\n", flush=True)
