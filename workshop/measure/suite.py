"""What the tests of each folder weigh and reach: lines, tokens, cases, seconds, branches.

python -m workshop.measure.suite                         lines, tokens and cases, as a table
python -m workshop.measure.suite --run 04_scheduler ...  also run them: processor seconds, branches
python -m workshop.measure.suite --record FILE           and write, or add to, a record

Lines are those of `wc -l`, with tables that tests read; a word or mark is a token. Tests run in one
process for each folder, under `coverage run --branch` (`pip install coverage`). A branch that no
test takes is written as FILE: FROM -> TO.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any

import pytest

from common.tests.budgets import count_tokens
from common.tests.house import House

ROOT = Path(__file__).resolve().parents[2]
HOUSE = House(ROOT)


def folder_of(name: str) -> str:
    folders = name.split("/")[:-1]
    return "/".join(folders[:2]) or "."


def files_of_tests() -> list[Path]:
    """Python files of tests, and the `.txt` and `.json` beside them whose names they hold."""
    tests = [path for path in HOUSE.python_files() if HOUSE.is_test(HOUSE.name(path))]
    text = "\n".join(path.read_text(encoding="utf-8") for path in tests)
    tables = [path for path in HOUSE.files if path.suffix in (".txt", ".json")]
    aside = {"records", "checkpoints"}  # measurements, and a tokenizer
    return tests + [p for p in tables if f'"{p.name}"' in text and not aside & {*p.parts}]


def cases(folders: Iterable[str]) -> Counter[str]:
    """The collected cases of each folder, those of the default run."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *folders]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    return Counter(folder_of(line.partition("::")[0]) for line in said.splitlines() if "::" in line)


class Seconds:
    """A pytest plugin: processor seconds of each test function, those of ended children too."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.spent: dict[str, float] = defaultdict(float)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        begun = processor_s()
        try:
            return (yield)
        finally:
            self.spent[item.nodeid.partition("[")[0]] += processor_s() - begun

    def pytest_sessionfinish(self) -> None:
        self.path.write_text(json.dumps(self.spent))


def processor_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def run(folder: str) -> dict[str, Any]:
    """Run a folder's tests. Returns seconds by test function, and the branches that none takes."""
    with tempfile.TemporaryDirectory() as temporary:
        spent, data, report = (Path(temporary) / name for name in ("spent", "data", "report"))
        cover = [sys.executable, "-m", "coverage"]
        command = [*cover, "run", "--branch", f"--data-file={data}", f"--source={folder}"]
        command += ["-m", __spec__.name, "--tests-of", folder, "--seconds", str(spent)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
        command = [*cover, "json", f"--data-file={data}", "-q", "-o", str(report)]
        subprocess.run(command, cwd=ROOT, check=True)
        files = json.loads(report.read_text())["files"]
        seconds = json.loads(spent.read_text())
    code = {name: found for name, found in sorted(files.items()) if not HOUSE.is_test(name)}
    missing = [
        f"{name}: {begin} -> {end}"
        for name, found in code.items()
        for begin, end in found["missing_branches"]
    ]
    return {
        "said": done.stdout.strip().splitlines()[-1],
        "processor_s": round(sum(seconds.values()), 1),
        "branches_taken": sum(len(found["executed_branches"]) for found in code.values()),
        "branches_not_taken": missing,
        "functions_s": {name: round(s, 2) for name, s in sorted(seconds.items())},
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m workshop.measure.suite")
    parser.add_argument("--run", nargs="+", default=[], metavar="FOLDER")
    parser.add_argument("--record", type=Path)
    parser.add_argument("--tests-of", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.tests_of:
        plugin = Seconds(options.seconds)
        return pytest.main([options.tests_of, "-q", "-p", "no:cacheprovider"], plugins=[plugin])
    lines, tokens = Counter[str](), Counter[str]()
    for path in files_of_tests():
        folder = folder_of(path.relative_to(ROOT).as_posix())
        lines[folder] += path.read_bytes().count(b"\n")
        tokens[folder] += count_tokens(path)
    number = cases(["."])
    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True).strip()
    record: dict[str, Any] = {"commit": commit, "folders": {}}
    if options.record and options.record.exists():
        record = json.loads(options.record.read_text())
    print(f"{'folder':26}{'lines':>8}{'tokens':>9}{'cases':>7}")
    for folder in sorted(lines | number):
        held = {"lines": lines[folder], "tokens": tokens[folder], "cases": number[folder]}
        record["folders"].setdefault(folder, {}).update(held)
        print(f"{folder:26}{lines[folder]:8}{tokens[folder]:9}{number[folder]:7}")
    print(f"{'all':26}{lines.total():8}{tokens.total():9}{number.total():7}")
    for folder in options.run:
        record.setdefault("runs", {})[folder] = found = run(folder)
        amounts = f"{found['processor_s']} s, {found['branches_taken']} branches"
        print(f"{folder}: {found['said']}; {amounts}", flush=True)
        if options.record:
            options.record.write_text(json.dumps(record, indent=1) + "\n")
    if options.record:
        options.record.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
