"""Bugs that were planted by hand, and which of a folder's tests notices each.

python -m workshop.practice.planted_bugs 04_scheduler                    planted/04_scheduler.diff
python -m workshop.practice.planted_bugs 04_scheduler "WORDS" -m net     those with these words in
                                                          their titles, with options of pytest

A bug is a unified diff against the commit that the file names, below a line `# what is wrong`. It
is applied to this checkout and taken back.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[2]
BUGS = Path(__file__).with_name("planted")
LIMIT_S = 60  # for the tests of one bug: a run that hangs is noticed, too
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?(?:\[.*?\])?)(?: - .*)?$", re.MULTILINE)


def read_bugs(text: str) -> dict[str, str]:
    """Return the diffs by their titles."""
    parts = re.split(r"^# (.+)\n(?=--- )", text, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def apply(diff: str, *options: str) -> None:
    command = ["git", "apply", "--whitespace=nowarn", *options, "-"]
    subprocess.run(command, input=diff.encode(), cwd=ROOT, check=True)


def noticed_by(diff: str, folder: str, options: Sequence[str]) -> str:
    """Plant the bug, run the folder's tests until one fails, and return its name. "": none does."""
    command = [sys.executable, "-m", "pytest", folder, "-x", "-q", "--tb=no", "--color=no"]
    command += ["-p", "no:cacheprovider", *options]
    apply(diff)
    try:
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return f"does not end in {LIMIT_S} s"
    finally:
        apply(diff, "--reverse")
    found = FAILED.search(run.stdout)
    return found[1] if found else f"pytest ended with {run.returncode}" * bool(run.returncode)


def main(folder: str, words: str = "", *options: str) -> int:
    text = (BUGS / f"{folder.replace('/', '-')}.diff").read_text(encoding="utf-8")
    chosen = [bug for bug in read_bugs(text).items() if words in bug[0]]
    survivors = 0
    for title, diff in tqdm(chosen, unit="bug"):
        test = noticed_by(diff, folder, options)
        survivors += not test
        tqdm.write(f"{title}: {test.rpartition('/')[2] or 'SURVIVED'}")
    print(f"{len(chosen) - survivors} of {len(chosen)} are noticed")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
