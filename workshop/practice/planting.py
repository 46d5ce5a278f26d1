"""Plant the mutants of modules, and find out which cases notice which.

    python -m pytest 03_prefix_cache/test_*.py -p workshop.practice.planting \\
        --plant 03_prefix_cache --plant-record planted.json

A plugin of pytest. It first runs every selected case once under `coverage`, for the lines that each
executes. Then, for each mutant, a fork of the process changes the code of the loaded functions and
runs all cases that execute the changed lines, without stopping at a failure. Nothing is imported
again, so a mutant costs what its cases cost. Processes that a case starts get the changed module
from an import hook.

The record has the cases with their seconds, and for each mutant how many cases execute it
(`num_reached`), how many of these run (`num_run`), and the numbers of those that fail (`kills`). A
case is left out if it fails without a change, alone or after others, in a fork. With
`--plant-kills N` a mutant is tried until N test functions have noticed it, those first that earlier
mutants needed: a function that is never needed notices nothing that N others do not.

A time limit of ten times a case's seconds, at least `MIN_LIMIT_S`, counts as a failure: run this on
a quiet machine.

Not planted: the code of a module's top level and of class bodies."""

from __future__ import annotations

import gc
import json
import linecache
import os
import select
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from workshop.practice.mutants import Mutant, planted_mutants
from workshop.practice.named_tests import into

MIN_LIMIT_S, LIMIT_FACTOR = 2.0, 10.0
ALL = 10**9
LRU_CACHE = type(lru_cache(len))
GRACE_S = 20.0  # after a case's time limit; then its process is killed
NO_MODULES = ("__init__.py", "__main__.py", "conftest.py")
# For processes that a case starts, as `sitecustomize.py`.
IMPORT_HOOK = """
import os
from importlib.machinery import SourceFileLoader
get_code = SourceFileLoader.get_code
def get_planted_code(self, fullname):
    if self.path != os.environ.get("PLANTED_PATH"):
        return get_code(self, fullname)
    with open(os.environ["PLANTED_SOURCE"], "rb") as file:
        return compile(file.read(), self.path, "exec", dont_inherit=True)
SourceFileLoader.get_code = get_planted_code
"""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("planting")
    group.addoption("--plant", nargs="+", default=[], help="modules, or folders of modules")
    group.addoption("--plant-record", default="planted.json", help="the file that is written")
    group.addoption("--plant-factor", type=float, default=1.0, help="times as many mutants")
    group.addoption("--plant-seconds", type=float, default=1e9, help="of cases, for one mutant")
    group.addoption("--plant-kills", type=int, default=ALL, help="so many functions are enough")
    group.addoption("--plant-only", default="", help="mutants with this text in their keys")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    options = session.config.option
    if not options.plant or options.collectonly:
        return None
    with tempfile.TemporaryDirectory(prefix="planting-") as folder:
        Planting(session.items, session.config.rootpath, options, Path(folder)).run()
    return True


# -- changing the code of this process


def functions_of(code: CodeType, prefix: str = "") -> Iterator[tuple[str, CodeType]]:
    """Yield the full name and the code of each function, outer ones first."""
    for const in code.co_consts:
        if isinstance(const, CodeType):
            name = f"{prefix}.{const.co_name}".lstrip(".")
            yield name, const
            yield from functions_of(const, name)


def swap_code(path: Path, old: str, new: str) -> None:
    """Give the loaded functions of a module their code in another source, which has the same
    functions at the same lines. Raises `ValueError` if it has others, or if none is loaded."""
    before, after = (
        list(functions_of(compile(text, str(path), "exec", dont_inherit=True)))
        for text in (old, new)
    )
    if [name for name, _ in before] != [name for name, _ in after]:
        raise ValueError("the functions must be the same")
    code_at = {(o.co_name, o.co_firstlineno): n for (_, o), (_, n) in zip(before, after)}
    is_loaded = False
    for function in [one for one in loaded_objects() if isinstance(one, FunctionType)]:
        code = function.__code__
        place = (code.co_name, code.co_firstlineno)
        if code.co_filename == str(path) and place in code_at:
            function.__code__, is_loaded = code_at[place], True
    if not is_loaded:
        raise ValueError(f"no function of {path.name} is loaded")
    # Triton reads a kernel's source when it is called first.
    linecache.cache[str(path)] = (len(new), None, new.splitlines(keepends=True), str(path))
    if (interpreter := sys.modules.get("triton.runtime.interpreter")) is not None:
        interpreter.InterpretedFunction.rewritten_fn.clear()


def loaded_objects() -> list[Any]:
    gc.unfreeze()  # conftest.py freezes what is loaded, and `get_objects` does not list that
    return gc.get_objects()


def caches_of(paths: Sequence[str]) -> list[Any]:
    """Return the `lru_cache`s of functions of these files: they keep what the old code returned."""
    found = [one for one in loaded_objects() if type(one) is LRU_CACHE]
    codes = [getattr(one.__wrapped__, "__code__", None) for one in found]  # a builtin has none
    return [one for one, code in zip(found, codes) if code and code.co_filename in paths]


def hook_imports(folder: Path, path: Path, source: str) -> None:
    """Have processes that this one starts import `path` as `source`."""
    (folder / "sitecustomize.py").write_text(IMPORT_HOOK)
    (changed := folder / f"{os.getpid()}.py").write_text(source)
    paths = filter(None, [str(folder), os.environ.get("PYTHONPATH")])
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    os.environ |= {"PLANTED_PATH": str(path), "PLANTED_SOURCE": str(changed)}


@contextmanager
def without_output() -> Iterator[None]:
    with open(os.devnull, "w") as sink, into(sink.fileno()):
        yield


class Planting:
    def __init__(
        self, items: Sequence[pytest.Item], root: Path, options: Any, folder: Path
    ) -> None:
        self.items, self.root, self.options, self.folder = items, root, options, folder
        self.functions = [item.nodeid.partition("[")[0] for item in items]
        self.needed = set[str]()  # functions that noticed a mutant
        self.seconds: list[float] = []  # of each case
        self.cases_at: dict[tuple[str, int], set[int]] = {}  # by file and line
        self.rows: list[dict[str, Any]] = []

    def run(self) -> None:
        good = self.cover()
        print(f"{len(good)} of {len(self.items)} cases pass, in {sum(self.seconds):.0f} s")
        if files := self.files():
            text = files[0].read_text(encoding="utf-8")
            results, _ = self.try_all(files[0], text, text, good)
            good = [case for case, is_failed in results if not is_failed]
            print(f"{len(good)} of them in a fork")
        for path in files:
            source = path.read_text(encoding="utf-8")
            for mutant in planted_mutants(source, self.options.plant_factor):
                if self.options.plant_only in mutant.key:
                    self.rows.append(row := self.plant(path, source, mutant, good))
                    numbers = f"{len(row['kills'])} of {row['num_run']} {row.get('problem', '')}"
                    print(
                        f"{numbers:12} {row['file']}:{row['line']} {mutant.key!r:.150}", flush=True
                    )
                    self.write()

    def files(self) -> list[Path]:
        found: list[Path] = []
        for name in self.options.plant:
            path = self.root / name
            found += [path] if path.is_file() else sorted(path.glob("*.py"))
        return [f for f in found if not f.name.startswith("test_") and f.name not in NO_MODULES]

    def write(self) -> None:
        cases = [[item.nodeid, round(s, 3)] for item, s in zip(self.items, self.seconds)]
        parts = [",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
                 for rows in (cases, self.rows)]  # fmt: skip
        text = f'{{"cases": [\n{parts[0]}\n],\n"mutants": [\n{parts[1]}\n]}}\n'
        Path(self.options.plant_record).write_text(text, encoding="utf-8")

    def cover(self) -> list[int]:
        """Run every case, and store its seconds and its lines. Return those that pass."""
        from coverage import Coverage  # only this plugin needs it

        measured = [str(path) for path in self.files()]
        coverage = Coverage(data_file=None, include=measured, config_file=False)
        coverage.start()
        good, caches = [], caches_of(measured)
        with without_output():
            for case, item in enumerate(self.items):
                for wrapper in caches:
                    wrapper.cache_clear()
                coverage.switch_context(str(case))
                start = time.perf_counter()
                # After the last one, too, session fixtures are needed.
                then = self.items[(case + 1) % len(self.items)]
                if all(report.passed for report in runtestprotocol(item, False, then)):
                    good.append(case)
                self.seconds.append(time.perf_counter() - start)
        coverage.stop()
        data = coverage.get_data()
        for file in data.measured_files():
            for line, contexts in data.contexts_by_lineno(file).items():
                self.cases_at[file, line] = {int(context) for context in contexts if context}
        return good

    def plant(self, path: Path, source: str, mutant: Mutant, good: Sequence[int]) -> dict[str, Any]:
        reached = set[int]().union(
            *(self.cases_at.get((str(path), line), ()) for line in mutant.lines(source))
        )
        candidates, spent_s = [], 0.0
        for case in sorted(reached.intersection(good), key=self.seconds.__getitem__):
            spent_s += self.seconds[case]
            if not candidates or spent_s <= self.options.plant_seconds:
                candidates.append(case)
        max_kills, changed = self.options.plant_kills, mutant.apply(source)
        if max_kills == ALL:
            candidates.sort()
        else:  # stable: of each kind the shortest first
            candidates.sort(key=lambda case: self.functions[case] not in self.needed)
        results, problem = self.try_all(path, source, changed, candidates, max_kills)
        kills = [case for case, is_failed in results if is_failed]
        self.needed |= {self.functions[case] for case in kills}
        name = path.relative_to(self.root).as_posix()
        first = mutant.lines(source)[0]
        row = {"file": name, "line": first, "kind": mutant.kind, "mutant": mutant.key}
        num_reached = len(reached.intersection(good))
        counts = {"num_reached": num_reached, "num_run": len(results), "kills": kills}
        return row | counts | ({"problem": problem} if problem else {})

    def limit_s(self, case: int) -> float:
        return max(MIN_LIMIT_S, LIMIT_FACTOR * self.seconds[case])

    def try_all(
        self, path: Path, old: str, new: str, cases: Sequence[int], max_kills: int = ALL
    ) -> tuple[list[tuple[int, bool]], str]:
        """Return (case, failed) of the cases, up to failures in `max_kills` functions, and a
        problem or ""."""
        results: list[tuple[int, bool]] = []
        problem, left, kills = "", list(cases), set[str]()
        while left and not problem and len(kills) < max_kills:
            more, problem = self.try_some(path, old, new, left, max_kills - len(kills))
            results += more
            kills |= {self.functions[case] for case, is_failed in more if is_failed}
            left = left[left.index(more[-1][0]) + 1 :] if more else []
            if max_kills != ALL:
                left = [case for case in left if self.functions[case] not in kills]
        return results, problem

    def try_some(
        self, path: Path, old: str, new: str, cases: Sequence[int], max_kills: int
    ) -> tuple[list[tuple[int, bool]], str]:
        """As `try_all`, in one process: up to a case that ends or blocks it, which has failed."""
        sys.stdout.flush()
        read, write = os.pipe()
        if (process := os.fork()) == 0:
            try:
                os.close(read)
                self._in_fork(path, old, new, cases, write, max_kills != ALL)
            finally:
                os._exit(0)
        os.close(write)
        outcomes: list[str] = []
        problem, received, kills = "", b"", set[str]()
        while len(outcomes) < len(cases) and not problem and len(kills) < max_kills:
            limit_s = self.limit_s(cases[len(outcomes)]) + GRACE_S
            ready, _, _ = select.select([read], [], [], limit_s)
            if not ready or not (data := os.read(read, 1 << 16)):
                outcomes.append("failed")
                break
            *lines, received = (received + data).split(b"\n")
            for line in lines:
                outcome, _, rest = line.decode().partition(" ")
                if outcome == "problem":
                    problem = rest
                elif len(kills) < max_kills:  # the process goes on until it is killed
                    if outcome == "failed":
                        kills.add(self.functions[cases[len(outcomes)]])
                    outcomes.append(outcome)
        os.close(read)
        with suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)
        os.waitpid(process, 0)
        found = [(c, o == "failed") for c, o in zip(cases, outcomes) if o != "skipped"]
        return found, problem

    def _in_fork(
        self, path: Path, old: str, new: str, cases: Sequence[int], write: int, one_is_enough: bool
    ) -> None:
        os.setpgid(0, 0)
        with without_output():
            try:
                if old != new:
                    for wrapper in caches_of([str(file) for file in self.files()]):
                        wrapper.cache_clear()
                    swap_code(path, old, new)
                    hook_imports(self.folder, path, new)
            except Exception as error:
                os.write(write, f"problem {error}\n".encode())
                return
            failed = set[str]()
            for place, case in enumerate(cases):
                if one_is_enough and self.functions[case] in failed:
                    os.write(write, b"skipped\n")
                    continue
                item = self.items[case]
                item.own_markers = [m for m in item.own_markers if m.name != "timeout"]
                item.add_marker(pytest.mark.timeout(self.limit_s(case), method="signal"), False)
                then = self.items[cases[place + 1]] if place + 1 < len(cases) else item
                try:
                    reports = runtestprotocol(item, False, then)
                    is_failed = any(report.failed for report in reports)
                except BaseException:  # what a case raises when pytest itself is changed, `exit()`
                    is_failed = True
                if is_failed:
                    failed.add(self.functions[case])
                os.write(write, b"failed\n" if is_failed else b"passed\n")
