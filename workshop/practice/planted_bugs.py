"""Bugs that were planted by hand, and which of a folder's tests notices each.

python -m workshop.practice.planted_bugs 04_scheduler             those of planted/04_scheduler.diff
python -m workshop.practice.planted_bugs 04_scheduler -- -m net   by the nets alone

A bug is a unified diff against the commit that the file names, below a line `# what is wrong`. It
is applied to this checkout and taken back.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUGS = Path(__file__).with_name("planted")
LIMIT_S = 60.0  # for the tests of one bug: a run that hangs is noticed, too
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?(?:\[.*?\])?)(?: - .*)?$", re.MULTILINE)


def read_bugs(text: str) -> dict[str, str]:
    """Return the diffs by their titles."""
    parts = re.split(r"^# (.+)\n(?=--- )", text, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


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
    parser.add_argument("folder", help="whose tests are run, and whose bugs: planted/FOLDER.diff")
    parser.add_argument("--words", default="", help="only bugs with these words in their titles")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for a bug (60)")
    parser.add_argument("pytest", nargs="*", help="after --: options of pytest")
    options = parser.parse_args(arguments)
    file = BUGS / f"{options.folder.replace('/', '-')}.diff"
    bugs = read_bugs(file.read_text(encoding="utf-8"))
    chosen = {title: diff for title, diff in bugs.items() if options.words in title}
    survivors = 0
    for title, diff in chosen.items():
        begun = time.perf_counter()
        test = noticed_by(diff, options.folder, options.pytest, options.limit)
        survivors += not test
        said = test.rpartition("/")[2] or "SURVIVED"
        print(f"{time.perf_counter() - begun:5.1f} s  {title}: {said}", flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} are noticed")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
