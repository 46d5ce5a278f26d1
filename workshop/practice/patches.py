"""`python -m workshop.patches`: the bugs of `patches.txt`.

python -m workshop.patches             those that do not apply any more, and why
python -m workshop.patches --only 7    show line 7 of those in MUSEUM.md, break it, test it
pytest workshop/practice/test_exercises.py -m "" -k noticed    plant each and run its tests
"""

from __future__ import annotations

import argparse
import ast
import os
import sys
from collections.abc import Iterable, Sequence

from workshop.practice.patch_table import Bug, all_bugs, broken_lines, log_row
from workshop.practice.source_patch import ROOT, logs_of, names_in
from workshop.practice.tasks.course import task_numbered
from workshop.practice.trial import broken_copy, try_tests


def problem_of(bug: Bug) -> str:
    """Return why the bug cannot be planted, or "". Runs nothing."""
    try:
        ast.parse(bug.apply())
        task = task_numbered(bug.task)
        if not bug.tests and task is None:
            return f"{bug.name}: nobody is said to notice"
        for test in bug.tests:
            file, _, name = test.partition("::")
            if name.partition("[")[0].partition("::")[0] not in names_in(ROOT / file):
                return f"{bug.name}: there is no test {test}"
            if "[" in name and logs_of(ROOT / file) and log_row(test) is None:
                return f"{bug.name}: no log has the row {test}"
    except SyntaxError as error:
        return f"{bug.name}: with it, {bug.file} is no Python: {error}"
    except (ValueError, LookupError) as error:
        return str(error) if str(error).startswith(bug.name) else f"{bug.name}: {error}"
    return ""


def trials(bugs: Iterable[Bug]) -> list[tuple[Bug, tuple[str, ...], bool]]:
    """Return the bugs with the tests that must notice: all that a bug names, or any of its task."""
    found = []
    for bug in bugs:
        if bug.named_tests:
            found.append((bug, bug.tests, False))
        if (task := task_numbered(bug.task)) is not None:
            found.append((bug, task.test_ids, True))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m workshop.patches", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--only", type=int, metavar="N", help="this line alone, from 1; runs it")
    options = parser.parse_args(arguments)
    lines = broken_lines()
    if options.only is not None and not 1 <= options.only <= len(lines):
        parser.error(f"--only must be in [1, {len(lines)}], got {options.only}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    chosen = all_bugs() if options.only is None else [lines[options.only - 1]]
    problems = [problem for bug in chosen if (problem := problem_of(bug))]
    print("".join(f"{problem}\n\n" for problem in problems), end="")
    print(f"{len(problems)} of {len(chosen)} do not apply")
    if problems or options.only is None:
        return 1 if problems else 0
    (bug,) = chosen
    print(f"{bug.file}:\n{bug.diff()}\n\n(running its tests: some seconds)", flush=True)
    ((_, tests, first_only),) = trials(chosen)
    with broken_copy(bug) as swap:
        run = try_tests(tests, swap, first_only=first_only)
    print("\n".join(f"caught by {test}" for test in run.failed) or "no test fails")
    return 0 if run.failed else 1


if __name__ == "__main__":
    sys.exit(main())
