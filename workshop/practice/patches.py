"""`python -m workshop.patches`: the bugs of `patches.txt`.

python -m workshop.patches                  those that do not apply any more, and why
python -m workshop.patches --check          plant each and run its tests; those not noticed
python -m workshop.patches --check WORDS    of those that have the words in their names
python -m workshop.patches --only 7         break line 7 of BREAK_A_LINE.md
python -m workshop.patches --write          make BREAK_A_LINE.md anew
"""

from __future__ import annotations

import argparse
import ast
import os
import sys
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

from workshop.practice.museum.hall import TITLES
from workshop.practice.patch_table import Bug, all_bugs, broken_lines
from workshop.practice.source_patch import ROOT, names_in
from workshop.practice.tasks.course import task_numbered
from workshop.practice.trial import try_all

PAGE = ROOT / "BREAK_A_LINE.md"
_HEAD = """# Break a line

{count} lines of this repository, each broken on purpose: what a user would see, and the test that
notices. Break one yourself, guess what happens, then run its test. Or let
`python -m workshop.patches --only N` do it in a copy of the one module. (This page is made
from the table in [`workshop/practice/patches.txt`](workshop/practice/patches.txt).)
"""


def render() -> str:
    """The text of `BREAK_A_LINE.md`."""
    lines = broken_lines()
    parts = [_HEAD.format(count=len(lines))]
    for chapter, group in groupby(enumerate(lines, 1), key=lambda pair: pair[1].chapter):
        parts.append(f"## {TITLES[chapter]}\n")
        parts += [_entry(number, bug) for number, bug in group]
    return "\n".join(parts)


def _entry(number: int, bug: Bug) -> str:
    test_file, _, test = bug.tests[0].partition("::")
    return (
        f"**{number}.** [`{bug.file}`]({bug.file}). {bug.line}\n\n"
        f"```diff\n{bug.diff()}\n```\n\n"
        f"Caught by `{test}` in [`{Path(test_file).name}`]({test_file}).\n"
    )


def problem_of(bug: Bug) -> str:
    """Why it can not be planted, or nothing. Nothing is run."""
    try:
        ast.parse(bug.apply())
        task = task_numbered(bug.task)
        if not bug.tests and task is None:
            return f"{bug.name}: nobody is said to notice"
        for test in bug.tests:
            file, _, name = test.partition("::")
            if name.partition("[")[0].partition("::")[0] not in names_in(ROOT / file):
                return f"{bug.name}: there is no test {test}"
    except SyntaxError as error:
        return f"{bug.name}: with it, {bug.file} is no Python: {error}"
    except (ValueError, LookupError) as error:
        return str(error) if str(error).startswith(bug.name) else f"{bug.name}: {error}"
    return ""


def trials(bugs: Iterable[Bug]) -> list[tuple[Bug, tuple[str, ...], bool]]:
    """With the tests that are to notice: all that a bug names, or any of its task."""
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
    parser.add_argument("--write", action="store_true", help="make BREAK_A_LINE.md and stop")
    options = parser.parse_args(arguments)
    lines = broken_lines()
    if options.only is not None and not 1 <= options.only <= len(lines):
        parser.error(f"--only is {options.only}: it must be in [1, {len(lines)}]")
    if options.write:
        PAGE.write_text(render(), encoding="utf-8")
        return 0
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
    """The lines of the description stay as they are."""


if __name__ == "__main__":
    sys.exit(main())
