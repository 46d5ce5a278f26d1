"""All bugs that this repository plants in itself, from one table: `patches.txt`.

    fcfs_scheduler FCFSScheduler._admit                     a module, and a symbol in it
    - while self.waiting and len(self.running) < limit:     the old code
    + while self.waiting:                                   the new code
    test test_fcfs_scheduler::test_running_never_exceeds    a test that fails; can be repeated
                                                            (of a row of a log: test_plans[title])
    line More than `max_num_seqs` requests run.             a line of `MUSEUM.md` to break
    zh 同时运行的请求超过 `max_num_seqs`。                  the line in Chinese
    task 1.2 The running requests are not counted.          a typical mistake in that task
    museum The title                                        the exhibit with that title

`text_rows.py` reads such tables: without its first line, a row is of the symbol above. A mistake is
noticed by the tests of its task.

A function may be renamed inside as you like: names that changed are found by `renames.py`, for all
rows of the function together. Where the new code needs a parameter that no old code has, the first
line has the function's parameters, `Scheduler._choose_victim(running, exclude)`, which are compared
with those of today by their positions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from workshop.book.text_rows import read_rows
from workshop.practice.renames import moved_parameters
from workshop.practice.source_patch import (
    ROOT,
    Patch,
    PatchError,
    file_of,
    logs_of,
    parameters_of,
    titles_in,
)

TABLE = Path(__file__).with_name("patches.txt")


@dataclass(frozen=True, slots=True)
class Bug(Patch):
    named_tests: tuple[str, ...] = ()  # module::name
    line: str = ""  # what a user would see
    chinese_line: str = ""
    task: str = ""  # its number
    message: str = ""  # to the reader whose mistake this is
    exhibit: str = ""  # its title
    parameters: tuple[str, ...] = ()  # of the function, when the row was written

    @property
    def name(self) -> str:
        """The bug's position in the table, in words."""
        task, exhibit = self.task and f"task {self.task}", self.exhibit and f"'{self.exhibit}'"
        where = f"{self.module} {self.symbol}".strip()
        return ", ".join(filter(None, (where, self.line and "a line", task, exhibit)))

    @property
    def tests(self) -> tuple[str, ...]:
        """The tests that notice, as path::name. Raises `LookupError` for a missing file."""
        return tuple(path_of_test(test) for test in self.named_tests)

    def known_names(self) -> dict[str, str]:
        return names_changed_in(self.module, self.symbol, self.parameters)


def names_changed_in(module: str, symbol: str, parameters: tuple[str, ...]) -> dict[str, str]:
    """Return the names that changed in a symbol since its rows were written, old -> new."""
    place = Patch(module, symbol, "", "")
    names = moved_parameters(parameters, parameters_of(place.text(), symbol))
    for bug in all_bugs():
        if (bug.module, bug.symbol) == (module, symbol):
            with suppress(PatchError):
                names |= replace(place, old=bug.old).changed_names()
    return names


def read_place(text: str) -> tuple[str, str, tuple[str, ...]]:
    """Return module, symbol and parameters of `module Class.method(parameter, ...)`."""
    module, _, symbol = text.partition(" ")
    symbol, _, parameters = symbol.partition("(")
    return module, symbol, tuple(re.findall(r"\w+", parameters))


def path_of_test(test: str) -> str:
    """Return the pytest argument for `module::name`."""
    module, _, name = test.partition("::")
    return f"{file_of(module).relative_to(ROOT).as_posix()}::{name}"


def log_row(test: str) -> tuple[str, str] | None:
    """Return the step log, as a path from the root, and the title of `path::name[title]`; None if
    the test is no row of a log."""
    file, _, name = test.partition("::")
    title = name.partition("[")[2].removesuffix("]")
    log = next((log for log in logs_of(ROOT / file) if title in titles_in(log)), None)
    return None if log is None else (log.relative_to(ROOT).as_posix(), title)


def read_bugs(text: str) -> Iterator[Bug]:
    """Yield the table's bugs. Raises `ValueError` for a row that is not a bug."""
    for row in read_rows(text, "- + test line zh task museum"):
        module, symbol, parameters = read_place(row.head)
        task, _, message = row.text("task", "").partition(" ")
        yield Bug(
            module,
            symbol,
            row.text("-"),
            row.text("+"),
            named_tests=tuple(row.said["test"]),
            line=row.text("line", ""),
            chinese_line=row.text("zh"),
            task=task,
            message=message,
            exhibit=row.text("museum", ""),
            parameters=parameters,
        )


@cache
def all_bugs() -> tuple[Bug, ...]:
    return tuple(read_bugs(TABLE.read_text(encoding="utf-8")))


def bug_of_exhibit(title: str) -> Bug:
    return next(bug for bug in all_bugs() if bug.exhibit == title)


def mistakes_of_task(number: str) -> tuple[Bug, ...]:
    return tuple(bug for bug in all_bugs() if bug.task == number)


def broken_lines() -> tuple[Bug, ...]:
    """The bugs with a line in `MUSEUM.md`, in the order of the chapters."""
    return tuple(sorted((bug for bug in all_bugs() if bug.line), key=lambda bug: bug.chapter))
