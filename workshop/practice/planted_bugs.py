"""Bugs that were planted by hand, and which of a folder's tests notices each.

python -m workshop.practice.planted_bugs 04_scheduler             those of planted/04_scheduler.diff
python -m workshop.practice.planted_bugs 04_scheduler --pytest "-m net"   by the nets alone
python -m workshop.practice.planted_bugs patches                  those of patches.txt, by the tests
                                of their folders without those that the table names

A bug is a unified diff against the commit that the file names, below a line `# what is wrong`. It
is applied to this checkout and taken back.
"""

from __future__ import annotations

import argparse
import difflib
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tqdm import tqdm

from workshop.practice.patch_table import all_bugs

ROOT = Path(__file__).resolve().parents[2]
BUGS = Path(__file__).with_name("planted")
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?(?:\[.*?\])?)(?: - .*)?$", re.MULTILINE)


def read_bugs(text: str) -> dict[str, str]:
    """Return the diffs by their titles."""
    parts = re.split(r"^# (.+)\n(?=--- )", text, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def bugs_of_patches() -> Iterator[tuple[str, str, str, list[str]]]:
    """Yield title, diff, folder and options of pytest for each bug of `patches.txt`."""
    for bug in all_bugs():
        name = bug.path.relative_to(ROOT).as_posix()
        lines = bug.path.read_text(encoding="utf-8"), bug.apply()
        old, new = (text.splitlines(keepends=True) for text in lines)
        diff = "".join(difflib.unified_diff(old, new, f"a/{name}", f"b/{name}"))
        folder = "/".join(name.split("/")[: 2 if name.startswith("common/") else 1])
        yield bug.name, diff, folder, [f"--deselect={test}" for test in bug.tests]


def apply(diff: str, *options: str) -> None:
    command = ["git", "apply", "--whitespace=nowarn", *options, "-"]
    subprocess.run(command, input=diff.encode(), cwd=ROOT, check=True)


def noticed_by(diff: str, folder: str, options: Sequence[str], limit_s: float) -> str:
    """Plant the bug, run the folder's tests until one fails, and return its name. "": none does."""
    command = [sys.executable, "-m", "pytest", folder, "-x", "-q", "--tb=no", "--color=no"]
    command += ["-p", "no:cacheprovider", *options]
    apply(diff)
    try:
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return f"does not end in {limit_s:.0f} s"
    finally:
        apply(diff, "--reverse")
    found = FAILED.search(run.stdout)
    return found[1] if found else f"pytest ended with {run.returncode}" * bool(run.returncode)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m workshop.practice.planted_bugs")
    parser.add_argument("folder", help="whose tests are run: of planted/FOLDER.diff; or: patches")
    parser.add_argument("--pytest", default="", help="options of pytest")
    parser.add_argument("--words", default="", help="only bugs with these words in their titles")
    parser.add_argument("--limit", type=float, default=60, help="seconds for a bug (60)")
    given = parser.parse_args()
    bugs = list(bugs_of_patches())
    if given.folder != "patches":
        text = (BUGS / f"{given.folder.replace('/', '-')}.diff").read_text(encoding="utf-8")
        bugs = [(title, diff, given.folder, []) for title, diff in read_bugs(text).items()]
    chosen = [bug for bug in bugs if given.words in bug[0]]
    survivors = 0
    for title, diff, folder, more in tqdm(chosen, unit="bug"):
        test = noticed_by(diff, folder, [*given.pytest.split(), *more], given.limit)
        survivors += not test
        tqdm.write(f"{title}: {test.rpartition('/')[2] or 'SURVIVED'}")
    print(f"{len(chosen) - survivors} of {len(chosen)} are noticed")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
