"""`python -m workshop.patches`: the bugs of `patches.txt`.

python -m workshop.patches                  those that do not apply any more, and why
python -m workshop.patches --check          plant each and run its tests; those not noticed
python -m workshop.patches --check WORDS    of those that have the words in their names
python -m workshop.patches --only 7         break line 7 of those in MUSEUM.md
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
from workshop.practice.trial import try_all


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
    parser = argparse.ArgumentParser(
        prog="python -m workshop.patches", description=__doc__, formatter_class=_Formatter
    )
    parser.add_argument("--check", action="store_true", help="run the tests that are to notice")
    parser.add_argument("words", nargs="*", help="only bugs with these words in their names")
    parser.add_argument("--only", type=int, metavar="N", help="this line alone, from 1; runs it")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time (2)")
    options = parser.parse_args(arguments)
    lines = broken_lines()
    if options.only is not None and not 1 <= options.only <= len(lines):
        parser.error(f"--only must be in [1, {len(lines)}], got {options.only}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    chosen = all_bugs() if options.only is None else [lines[options.only - 1]]
    chosen = [bug for bug in chosen if all(word in bug.name for word in options.words)]
    problems = [problem for bug in chosen if (problem := problem_of(bug))]
    for problem in problems:
        print(f"{problem}\n")
    print(f"{len(problems)} of {len(chosen)} do not apply")
    if not (options.check or options.only):
        return 1 if problems else 0
    survivors = 0
    cases = trials(bug for bug in chosen if not problem_of(bug))
    for bug, complaint, seconds in try_all(cases, options.jobs):
        survivors += bool(complaint)
        print(f"{seconds:5.1f} s  {complaint and 'SURVIVED  '}{complaint or bug.name}", flush=True)
    print(f"{survivors} of {len(cases)} are not noticed")
    return 1 if problems or survivors else 0


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of the description unchanged."""


if __name__ == "__main__":
    sys.exit(main())
