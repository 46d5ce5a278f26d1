"""Bugs that were planted by hand, and which of a folder's tests notices each.

python -m workshop.practice.planted_bugs 04_scheduler             those of planted/04_scheduler.diff
python -m workshop.practice.planted_bugs 04_scheduler -- -m net   by the nets alone
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
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from workshop.practice.patch_table import all_bugs

ROOT = Path(__file__).resolve().parents[2]
BUGS = Path(__file__).with_name("planted")
LIMIT_S = 60.0  # for the tests of one bug: a run that hangs is noticed, too
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


def noticed_by(diff: str, folder: str, options: Sequence[str], limit_s: float = LIMIT_S) -> str:
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
    if run.returncode == 0:
        return ""
    found = FAILED.search(run.stdout)
    return found[1] if found else f"pytest ended with {run.returncode}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m workshop.practice.planted_bugs")
    parser.add_argument("folder", help="whose tests are run: of planted/FOLDER.diff; or: patches")
    parser.add_argument("--words", default="", help="only bugs with these words in their titles")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for a bug (60)")
    words = list(sys.argv[1:] if arguments is None else arguments)
    end = words.index("--") if "--" in words else len(words)
    options, of_pytest = parser.parse_args(words[:end]), words[end + 1 :]
    if options.folder == "patches":
        bugs = list(bugs_of_patches())
    else:
        file = BUGS / f"{options.folder.replace('/', '-')}.diff"
        found = read_bugs(file.read_text(encoding="utf-8"))
        bugs = [(title, diff, options.folder, []) for title, diff in found.items()]
    chosen = [bug for bug in bugs if options.words in bug[0]]
    survivors = 0
    for title, diff, folder, more in chosen:
        begun = time.perf_counter()
        test = noticed_by(diff, folder, of_pytest + more, options.limit)
        survivors += not test
        said = test.rpartition("/")[2] or "SURVIVED"
        print(f"{time.perf_counter() - begun:5.1f} s  {title}: {said}", flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} are noticed")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
