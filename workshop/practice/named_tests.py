"""Run named tests in this process: which fail, and the first failure's message and place."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from workshop.practice.source_patch import ROOT


@dataclass(frozen=True, slots=True)
class Failure:
    """The first failed test's name, message and place."""

    test: str  # path::name[parameters]
    message: str  # of the exception
    path: str  # where it was raised: an absolute path, or one from the root
    line: int
    swapped_line: int | None  # the last line of the swapped module on the way there
    printed: str


@dataclass(frozen=True, slots=True)
class TestRun:
    """The result of a run: the named tests that failed, and pytest's output."""

    __test__ = False  # for pytest, which collects classes with this name

    failed: tuple[str, ...]  # by path::name and by path::name[parameters]
    report: str
    cpu_s: float = 0.0
    first: Failure | None = None
    num_passed: int = 0


class _Failures:
    """A pytest plugin that collects failures."""

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
    tests: tuple[str, ...], swapped: Path | None, first_only: bool, limit_s: float
) -> TestRun:
    """Run the tests; `swapped` is the file of this process's swapped module. `first_only` stops at
    the first failure. `limit_s` applies to each test. Call once per process. Raises `RuntimeError`
    if pytest cannot run them."""
    import pytest

    arguments = ["-q", "--no-header", "-p", "no:cacheprovider", "-p", "pytest_timeout"]
    arguments += ["-p", "_hypothesis_pytestplugin"]
    arguments += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    arguments += ["--color=no", "--tb=short", f"--timeout={limit_s}", f"--rootdir={ROOT}"]
    arguments += ["-x"] if first_only else []
    # Load only the installed plugins that the settings and the tests need.
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    failures = _Failures(str(swapped))
    with tempfile.TemporaryDirectory(prefix="tests-") as folder:
        # Hypothesis must not store the failures of a broken run.
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
    """Redirect all output of this process, stdout and stderr, to `descriptor`."""
    kept = [os.dup(1), os.dup(2)]
    for number in (1, 2):
        os.dup2(descriptor, number)
    try:
        yield
    finally:
        for number, old in enumerate(kept, 1):
            os.dup2(old, number)
            os.close(old)
