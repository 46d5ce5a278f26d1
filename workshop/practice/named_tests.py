"""Tests by their names, in this process: which fail, what the first one said, and where."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass

from workshop.practice.module_swap import PLUGIN, VARIABLE, ModuleSwap
from workshop.practice.source_patch import ROOT


@dataclass(frozen=True, slots=True)
class Failure:
    """The first test that failed, in parts."""

    test: str  # path::name[parameters]
    message: str  # of the exception
    path: str  # where it was raised: an absolute path, or one from the root
    line: int
    swapped_line: int | None  # the last line of the swapped module on the way there
    printed: str


@dataclass(frozen=True, slots=True)
class TestRun:
    """Of the named tests, those that failed, and what pytest said."""

    __test__ = False  # for pytest, which collects what is called so

    failed: tuple[str, ...]  # by path::name and by path::name[parameters]
    report: str
    cpu_s: float = 0.0
    first: Failure | None = None
    num_passed: int = 0


class _Failures:
    """A plugin of pytest."""

    def __init__(self, swapped: str) -> None:
        self.found: dict[str, None] = {}
        self.first: Failure | None = None
        self.num_passed = 0
        self._swapped = swapped

    def pytest_runtest_logreport(self, report) -> None:
        if report.failed:
            self.found |= {report.nodeid: None, report.nodeid.partition("[")[0]: None}
            self.first = self.first or self._told(report)
        elif report.passed and report.when == "call":
            self.num_passed += 1

    def _told(self, report) -> Failure:
        crash = getattr(report.longrepr, "reprcrash", None)
        message = str(report.longrepr) if crash is None else crash.message
        path, line = ("", 0) if crash is None else (crash.path, crash.lineno)
        places = [
            entry.reprfileloc
            for part in getattr(report.longrepr, "chain", [])
            for entry in part[0].reprentries
            if getattr(entry, "reprfileloc", None) is not None
        ]
        lines = [p.lineno for p in places if os.path.abspath(p.path) == self._swapped]
        last = lines[-1] if lines else None
        return Failure(report.nodeid, message, path, line, last, report.capstdout)


def run_tests(
    tests: tuple[str, ...], swap: ModuleSwap | None, first_only: bool, limit_s: float
) -> TestRun:
    """With the module that `swap` names from its file. `first_only` stops at the first failure, and
    `limit_s` is each test's. Once a process. Raises `RuntimeError` if pytest does not come to run
    them."""
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
    failures = _Failures("" if swap is None else str(swap.file))
    with tempfile.TemporaryDirectory(prefix="tests-") as folder:
        # What a broken run finds is nothing for Hypothesis to remember.
        os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = folder
        with tempfile.TemporaryFile("w+", encoding="utf-8") as file, into(file.fileno()):
            code = pytest.main([*arguments, *tests], plugins=[failures])
            sys.stdout.flush()
            file.seek(0)
            report = file.read()
    if code not in (0, 1):
        raise RuntimeError(f"pytest ended with {code}\n{report}")
    found, first, passed = tuple(failures.found), failures.first, failures.num_passed
    return TestRun(found, report, time.process_time(), first, passed)


@contextlib.contextmanager
def into(descriptor: int) -> Iterator[None]:
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
