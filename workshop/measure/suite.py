"""What the tests of each folder weigh: lines, tokens and cases.

    python -m workshop.measure.suite

Lines are those of `wc -l`, with tables that tests read; a word or mark is a token. Seconds and
branches of a folder are pytest's and coverage's own (`pip install coverage`):

    pytest FOLDER --durations=30
    coverage run --branch --source=FOLDER -m pytest FOLDER && coverage report -m
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

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


def cases() -> Counter[str]:
    """The collected cases of each folder, those of the default run."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "."]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    return Counter(folder_of(line.partition("::")[0]) for line in said.splitlines() if "::" in line)


def main() -> None:
    counts = lines, tokens, number = Counter[str](), Counter[str](), cases()
    for path in files_of_tests():
        folder = folder_of(path.relative_to(ROOT).as_posix())
        lines[folder] += path.read_bytes().count(b"\n")
        tokens[folder] += count_tokens(path)
    print(f"{'folder':26}{'lines':>9}{'tokens':>9}{'cases':>9}")
    for folder in sorted(lines | number):
        print(f"{folder:26}" + "".join(f"{count[folder]:9}" for count in counts))
    print(f"{'all':26}" + "".join(f"{count.total():9}" for count in counts))


if __name__ == "__main__":
    main()
