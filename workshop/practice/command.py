"""`make museum` and `make task`: see `MUSEUM.md` and `COURSE.md`."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from workshop.book.text_rows import TextRow, is_chinese
from workshop.practice.module_swap import ModuleSwap
from workshop.practice.museum.exhibits import CHINESE_TITLES, EXHIBITS, LABELS, TITLES, Exhibit
from workshop.practice.museum.museum_page import side_by_side
from workshop.practice.museum.two_films import compared, films, page_of_films
from workshop.practice.museum.watched_run import line_of, parting
from workshop.practice.tasks.blank import filled
from workshop.practice.tasks.course import (
    EVENINGS,
    TASKS,
    Task,
    blank_of,
    minutes_of,
    task_numbered,
    tasks_of_evening,
)
from workshop.practice.tasks.grade import grade
from workshop.practice.tasks.tickets import tickets_of_evening
from workshop.practice.tasks.workbench import Workbench
from workshop.practice.trial import broken_copy, try_tests
from workshop.watch.page_maker import write_page

WIDTH = 96


def _say(text: str) -> None:
    print(f"{text}\n", flush=True)


def _wait(doing: str) -> None:
    """A sign of life, which is no part of the output."""
    print(f"({doing}: some seconds)", file=sys.stderr, flush=True)


def _wrapped(text: str, indent: str = "") -> str:
    """Wrap the text between words. Chinese is unchanged: a terminal can break it anywhere."""
    return text if is_chinese() else textwrap.fill(text, WIDTH, subsequent_indent=indent)


# -- the museum


def museum(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m workshop.museum",
        description="Show real bugs of real engines.",
    )
    parser.add_argument(
        "bug", nargs="?", type=int, metavar="N", help="its number; without one: the list"
    )
    parser.add_argument("--find", action="store_true", help="hide the patch and give clues")
    parser.add_argument(
        "--reveal", action="store_true", help="with --find: print all clues without asking"
    )
    parser.add_argument(
        "--watch", action="store_true", help="write a page with two films: with the bug and without"
    )
    parser.add_argument(
        "--out", type=Path, metavar="F", help="with --watch: the page (default: museum-N.html)"
    )
    parser.add_argument("--open", action="store_true", help="with --watch: open it in the browser")
    options = parser.parse_args(arguments)
    asked = [name for name, value in vars(options).items() if value and name != "bug"]
    if options.reveal and not options.find:
        parser.error("--reveal needs --find; otherwise nothing is hidden")
    if asked and options.bug is None:
        parser.error(f"--{asked[0]} needs a bug: a number of the list")
    if options.bug is not None and not 1 <= options.bug <= len(EXHIBITS):
        parser.error(f"bug must be in [1, {len(EXHIBITS)}], got {options.bug}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # models here are tiny
    if options.bug is None:
        print(list_exhibits())
        return 0
    exhibit = EXHIBITS[options.bug - 1]
    if options.watch:
        out = options.out or Path(f"museum-{options.bug}.html")
        watch(options.bug, exhibit, out, options.open, is_hidden=options.find)
    if options.find:
        find(options.bug, exhibit, options.reveal)
    elif not options.watch:
        look(options.bug, exhibit)
    return 0


def list_exhibits() -> str:
    lines = []
    for chapter, group in groupby(enumerate(EXHIBITS, 1), key=lambda pair: pair[1].chapter):
        lines.append(f"\n{(CHINESE_TITLES if is_chinese() else TITLES)[chapter]}")
        lines += [f"  {n:2}  {e.words.text('title')}  ({e.origin})" for n, e in group]
    return "\n".join(lines) + (
        "\n\nRead one: make museum BUG=8    Find it yourself: add ARGS=--find    "
        "Watch it: ARGS=--watch"
    )


def look(number: int, exhibit: Exhibit) -> None:
    """Print the whole story, the patch, its effect and a test that fails."""
    words = exhibit.words
    _say(f"{number}. {words.text('title')}   ({exhibit.origin})")
    _say(_labelled(words, "symptom", "cause"))
    _say(_revealed(exhibit))
    with broken_copy(exhibit.patch) as swap:
        effects, events = _effects(exhibit, swap)
        for effect in effects + events:
            _say(effect)
        _say(_first_failure(exhibit, swap))
    _say(_labelled(words, "lesson", "watch"))
    if exhibit.watch is not None:
        _say(f"    make museum BUG={number} ARGS=--watch")


def watch(
    number: int, exhibit: Exhibit, out: Path, is_opened: bool = False, is_hidden: bool = False
) -> None:
    """Write a page with a run with the bug next to one without. `is_hidden`: it does not name the
    bug."""
    words = exhibit.words
    if exhibit.watch is None:
        reason = "" if is_hidden else words.text("nothing")
        _say(f"{number}. There is nothing to watch. {reason}")
        return
    _wait("recording the engine with the bug and without")
    with broken_copy(exhibit.patch) as swap:
        page, difference = page_of_films(number, exhibit, swap, is_hidden)
    if not is_hidden:
        _say(f"{number}. {words.text('title')}   ({exhibit.origin})")
        _say(_labelled(words, "symptom", "cause", "watch"))
    _say(difference)
    write_page(out, page, is_opened)


def find(number: int, exhibit: Exhibit, is_revealed: bool) -> None:
    """Print the symptom, then a clue for each press of the return key, then the patch."""
    with broken_copy(exhibit.patch) as swap:
        all_clues = clues(exhibit, swap)
        _say(f"{number}. There is a bug in {exhibit.patch.file}. While you look for it, it is in")
        _say(f"    {swap.file}")
        _say(_labelled(exhibit.words, "symptom"))
        _say(f"What it does:\n\n{next(all_clues)}")
        if exhibit.watch is not None:
            _say("(ARGS='--find --watch' writes a page with both.)")
        for clue in all_clues:
            if not (is_revealed or _is_asked_for()):
                return
            _say(clue)


def clues(exhibit: Exhibit, swap: ModuleSwap) -> Iterator[str]:
    """Yield clues, from the symptom to the patch. The tests run when their clue is requested."""
    effects, events = _effects(exhibit, swap)
    yield from effects
    yield f"A test that fails, and its message:\n\n{_first_failure(exhibit, swap)}"
    yield from events
    yield f"It is in `{exhibit.patch.symbol or 'the top level of the module'}`."
    words = exhibit.words
    parts = _labelled(words, "cause", "lesson", "watch")
    yield f"{_revealed(exhibit)}\n\n{words.text('title')}\n\n{parts}"


def _effects(exhibit: Exhibit, swap: ModuleSwap) -> tuple[list[str], list[str]]:
    """Return where the two films differ, and the changes in each there."""
    if exhibit.watch is None:
        return [], []
    _wait("recording the engine with the bug and without")
    with tempfile.TemporaryDirectory() as folder:
        wrong, right = films(exhibit, swap, Path(folder))
    requests = ", ".join(request.name for request in exhibit.watch.requests)
    told = _wrapped(f"An engine was recorded serving {requests}, with the bug and without.")
    effects = [f"{told}\n\n{compared(wrong, right)}"]
    if (where := parting(right, wrong)) is None:
        return effects, []
    lines = side_by_side(*map(line_of, where.changes))
    return effects, [f"The first difference, {where.place}:\n\n{lines}"]


def _is_asked_for() -> bool:
    try:
        return input("Return: next clue. q: quit.  ").strip().lower() != "q"
    except EOFError:
        print("\n(No terminal. --reveal prints all clues without asking.)")
        return False


def _first_failure(exhibit: Exhibit, swap: ModuleSwap) -> str:
    """Return the first test that fails and the first line of its message."""
    _wait("running its tests")
    run = try_tests(exhibit.tests, swap, first_only=True, limit_s=exhibit.limit_s)
    if run.first is None:
        return run.report.strip()
    message = textwrap.shorten(run.first.message.partition("Use -v")[0], 240)
    return f"Caught by {run.first.test}\n    {message}"


def _revealed(exhibit: Exhibit) -> str:
    return f"{exhibit.patch.file}\n\n{textwrap.indent(exhibit.patch.diff(), '    ')}"


def _labelled(words: TextRow, *parts: str) -> str:
    """The given parts of a story, each a paragraph with its label."""
    blank = "" if is_chinese() else " "
    labels = [LABELS[part][is_chinese()] for part in parts]
    texts = [words.text(part) or words.text("nothing") for part in parts]
    return "\n".join(_wrapped(f"{x}{blank}{text}") for x, text in zip(labels, texts))


# -- the tasks of the course


def tasks(arguments: Sequence[str] | None = None, bench: Workbench | None = None) -> int:
    """Return 0: success, 1: the answer is not right yet, 2: invalid arguments."""
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
    one.add_argument("--again", action="store_true", help="begin with a blank; the old is kept")
    options = parser.parse_args(arguments)
    asked = [name for name, value in vars(options).items() if value is True]
    if options.evening is not None and (options.number is not None or asked):
        parser.error("--evening writes the files of a whole evening; give nothing else with it")
    if options.number is None and asked:
        parser.error(f"--{asked[0]} must have a task: a number of the list, such as 3.2")
    task = None if options.number is None else task_numbered(options.number)
    if options.number is not None and task is None:
        known = ", ".join(task.number for task in TASKS)
        evening = "; for an evening: EVENING=4" if options.number.isdigit() else ""
        parser.error(f"task must be one of {known}, got {options.number}{evening}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # models here are tiny
    try:
        bench = bench or Workbench()
    except ValueError as error:
        parser.error(f"{error}. Remove it: your answers stay.")
    if options.evening is not None:
        return _evening(options.evening, bench)
    if task is None:
        print(list_tasks(bench))
        return 0
    does = {"grade": _grade, "hint": _hint, "solution": _solution, "again": _again}
    return does[asked[0]](task, bench) if asked else _go_on(task, bench)


def list_tasks(bench: Workbench) -> str:
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
        title = task.words.text("title")
        yield f" [{mark}] {task.number}  {task.minutes:2} min  {task.difficulty:6}  {title}"


def _open_tasks(bench: Workbench, among: Sequence[Task]) -> list[Task]:
    return [task for task in among if task.number not in bench.progress.passed]


def _evening(number: int, bench: Workbench) -> int:
    tonight = tasks_of_evening(number)
    _say(f"Evening {number}: {EVENINGS[number]}. Tonight's files, to read and to write in:")
    _say("\n".join(bench.open(tonight)))
    _say("\n".join(_rows(number, bench)))
    left = _open_tasks(bench, tonight)
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
    words = task.words
    _say(f"Task {task.number}. {words.text('title')} ({task.minutes} minutes, {task.difficulty})")
    _say("\n".join(told))
    where = f"{bench.name(bench.file(task))}{_line_of_hole(task, bench)}"
    _say(f"Write in {where}, in {task.place}, in the place of `raise`:")
    write = words.text("write")
    _say(textwrap.indent(write if is_chinese() else filled(write, WIDTH - 4), "    "))
    again = f"make task N={task.number}"
    _say(
        f"When you have written something: {again}\n"
        f"A hint ({len(words.said['hint'])} in all): {again} ARGS=--hint"
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
    _say("Run the engine on your answers: make demo ARGS=--mine")
    here = TASKS.index(task)
    following = _open_tasks(bench, (*TASKS[here:], *TASKS[:here]))
    if following:
        _say(f"The next: make task N={following[0].number}    ({following[0].words.text('title')})")
    return 0


def _hint(task: Task, bench: Workbench) -> int:
    hints, number = task.words.said["hint"], bench.next_hint(task)
    if number is None:
        _say(f"These were all {len(hints)} hints:")
        for number, hint in enumerate(hints, 1):
            _say(_wrapped(f"{number}. {hint}", "   "))
        _say(f"Our answer: make task N={task.number} ARGS=--solution")
    else:
        _say(_wrapped(f"Hint {number} of {len(hints)}: {hints[number - 1]}", "   "))
    return 0


def _solution(task: Task, bench: Workbench) -> int:
    blank = blank_of(task)
    _say(f"{task.file}, line {blank.first_line}, in {task.place}:")
    _say(textwrap.indent(textwrap.dedent(blank.solution), "    ").rstrip())
    return 0
