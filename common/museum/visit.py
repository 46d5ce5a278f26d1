"""Look at an exhibit: its demonstration and its tests, with the bug and without.

Each look is a process of its own, so that nothing is imported before the bug is in. Where the
system can fork, they are forked from one that has loaded the libraries and nothing of ours: a look
then takes a fraction of a second. The bug is in a copy of its module in a temporary folder, and
`common/tools/module_swap.py` gives that to whoever imports it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from common.museum.exhibit import NEVER_ENDS, Exhibit
from common.tools.module_swap import PLUGIN, VARIABLE, ModuleSwap
from common.tools.source_patch import ROOT

START_S = 120  # for a process to be there: it may import PyTorch on a busy machine
LIMIT_S = 60
END_S = 5  # for a process that has answered, to tidy up
ENDLESS_S = 2  # where the symptom is that it does not end
_LIBRARIES = ["common.museum.libraries"]
_FOLDER = "museum-"
_IN_THE_FOLDER = re.compile(rf"[^\s\"']*{_FOLDER}\w+/")


@dataclass(frozen=True, slots=True)
class TestRun:
    """Of the named tests, those that failed, and what pytest said."""

    __test__ = False  # for pytest, which collects what is called so

    failed: tuple[str, ...]
    report: str
    cpu_s: float = 0.0


@contextlib.contextmanager
def broken_copy(exhibit: Exhibit) -> Iterator[ModuleSwap]:
    """The module with the bug, for as long as the context lasts."""
    with tempfile.TemporaryDirectory(prefix=_FOLDER) as folder:
        path = Path(folder).resolve() / Path(exhibit.patch.file).name
        path.write_text(exhibit.patch.apply(), encoding="utf-8")
        yield ModuleSwap(exhibit.patch.module, path)


def show(exhibit: Exhibit, swap: ModuleSwap | None = None) -> str:
    """What the demonstration says, with the bug if `swap` has it. An exception is its last line."""
    limit_s = ENDLESS_S if swap is not None and exhibit.wrong == NEVER_ENDS else LIMIT_S
    answer = apart(_demonstrate, (exhibit, swap), limit_s)
    return NEVER_ENDS if answer is None else answer


def try_tests(
    exhibit: Exhibit, swap: ModuleSwap | None = None, *, first_only: bool = False
) -> TestRun:
    """Run the named tests. `first_only` stops at the first failure, and tells all about it."""
    limit_s = ENDLESS_S if swap is not None and exhibit.wrong == NEVER_ENDS else LIMIT_S
    answer = apart(_test, (exhibit.tests, swap, first_only, limit_s), 2 * limit_s + LIMIT_S)
    return TestRun((), "pytest did not end") if answer is None else answer


def without_folder(text: str) -> str:
    """Names of files as a reader knows them: the copy's without its temporary folder."""
    return _IN_THE_FOLDER.sub("(with the bug) ", text)


# -- in a process of its own


def apart(work: Callable, arguments: tuple, limit_s: float):
    """`work(*arguments)` in another process. None if it does not end within `limit_s`. Raises
    `RuntimeError` if the process dies."""
    if "forkserver" in multiprocessing.get_all_start_methods():
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_LIBRARIES)
    else:
        context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_answer, args=(theirs, work, arguments), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(START_S):
            raise RuntimeError(f"no process has begun within {START_S} seconds")
        ours.recv()  # it begins
        return ours.recv() if ours.poll(limit_s) else None
    except EOFError:
        process.join(1)
        raise RuntimeError(f"the process ended with {process.exitcode}") from None
    finally:
        process.join(END_S)
        process.kill()
        process.join()
        ours.close()


def _answer(connection: Connection, work: Callable, arguments: tuple) -> None:
    os.chdir(ROOT)
    for name in [name for name in os.environ if name.startswith("PYTEST_")]:
        del os.environ[name]
    connection.send("begun")
    connection.send(work(*arguments))


def _demonstrate(exhibit: Exhibit, swap: ModuleSwap | None) -> str:
    if swap is not None:
        swap.install()
        swap.check()  # before anything else
    try:
        return exhibit.demonstrate()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


class _Failures:
    """A plugin of pytest: which tests failed, by path::name and by path::name[parameters]."""

    def __init__(self) -> None:
        self.found: dict[str, None] = {}

    def pytest_runtest_logreport(self, report) -> None:
        if report.failed:
            self.found |= {report.nodeid: None, report.nodeid.partition("[")[0]: None}


def _test(
    tests: tuple[str, ...], swap: ModuleSwap | None, first_only: bool, limit_s: float
) -> TestRun:
    import pytest

    arguments = ["-q", "--no-header", "-p", "no:cacheprovider", "-p", "pytest_timeout"]
    arguments += ["-p", "_hypothesis_pytestplugin"]
    arguments += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    arguments += ["--color=no", "--tb=short", f"--timeout={limit_s}", f"--rootdir={ROOT}"]
    arguments += ["-x"] if first_only else []
    if swap is not None:
        arguments += ["-p", PLUGIN]
        os.environ[VARIABLE] = f"{swap.module}={swap.file}"
    # Of the plugins that are installed, only those that the settings and the tests need.
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    failures = _Failures()
    with tempfile.TemporaryDirectory(prefix=_FOLDER) as folder:
        # What a broken run finds is nothing for Hypothesis to remember.
        os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = folder
        with tempfile.TemporaryFile("w+", encoding="utf-8") as file, _into(file.fileno()):
            code = pytest.main([*arguments, *tests], plugins=[failures])
            sys.stdout.flush()
            file.seek(0)
            report = file.read()
    if code not in (0, 1):
        raise RuntimeError(f"pytest ended with {code}\n{report}")
    return TestRun(tuple(failures.found), without_folder(report), time.process_time())


@contextlib.contextmanager
def _into(descriptor: int) -> Iterator[None]:
    """What anybody prints goes there."""
    kept = [os.dup(1), os.dup(2)]
    for number in (1, 2):
        os.dup2(descriptor, number)
    try:
        yield
    finally:
        for number, old in enumerate(kept, 1):
            os.dup2(old, number)
            os.close(old)
