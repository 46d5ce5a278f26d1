"""Try a module with another text: a small function's output with it, and the tests that fail.

Each trial runs in a separate process (`workshop/practice/apart.py`), so that nothing is imported
before the module is swapped. With `workshop/practice/module_swap.py`, every import gets the other
text. Nothing in the checkout changes. The museum, the tasks of the course and `python -m
workshop.patches` try their bugs here, and readers' answers are tried here.
"""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from workshop.practice.apart import apart
from workshop.practice.module_swap import ModuleSwap, name_of
from workshop.practice.named_tests import TestRun, into, run_tests
from workshop.practice.source_patch import Patch

LIMIT_S = 60.0  # for a function, and for a test
NEVER_ENDS = "(the run does not end; stopped from outside)"
_FOLDER = "other-"
_IN_THE_FOLDER = re.compile(rf"[^\s\"']*{_FOLDER}\w+/")


@contextlib.contextmanager
def swapped(path: Path, text: str) -> Iterator[ModuleSwap]:
    """Swap the module of a file for that text, until the context ends."""
    with tempfile.TemporaryDirectory(prefix=_FOLDER) as folder:
        other = Path(folder).resolve() / path.name
        other.write_text(text, encoding="utf-8")
        yield ModuleSwap(name_of(path), other)


def broken_copy(patch: Patch) -> contextlib.AbstractContextManager[ModuleSwap]:
    return swapped(patch.path, patch.apply())


def said_by(
    work: Callable[[], Iterable[str]], swap: ModuleSwap | None = None, limit_s: float = LIMIT_S
) -> str:
    """Return the function's output. An exception, or the end of the process, is one line of it."""
    try:
        said = apart(say, (work,), limit_s, swap)
    except RuntimeError as error:
        return str(error)
    return NEVER_ENDS if said is None else said


def say(work: Callable[[], Iterable[str]]) -> str:
    """Return the function's lines, or its exception in one line. Printed text is dropped."""
    with tempfile.TemporaryFile("w+") as file, into(file.fileno()):
        try:
            return "\n".join(work())
        except Exception as error:
            return f"{type(error).__name__}: {error}"


def try_tests(
    tests: tuple[str, ...],
    swap: ModuleSwap | None = None,
    *,
    first_only: bool = False,
    limit_s: float = LIMIT_S,
) -> TestRun:
    """Run the tests, each for at most `limit_s`. `first_only` stops at the first failure, with all
    its details. Raises `RuntimeError` with a sentence if pytest could not run them."""
    file = None if swap is None else swap.file
    run = apart(_run, (tests, file, first_only, limit_s), 2 * limit_s + 60, swap)
    if run is None:
        return TestRun((), "pytest did not end")
    if isinstance(run, str):
        raise RuntimeError(run)
    return replace(run, report=without_folder(run.report))


def _run(
    tests: tuple[str, ...], file: Path | None, first_only: bool, limit_s: float
) -> TestRun | str:
    try:
        return run_tests(tests, file, first_only, limit_s)
    except RuntimeError as error:
        told = [line[1:].strip() for line in str(error).splitlines() if line.startswith("E ")]
        return told[0] if told else str(error)


def without_folder(text: str) -> str:
    """Return the text with file names as a reader knows them, without the temporary folder."""
    return _IN_THE_FOLDER.sub("(with the bug) ", text)
