"""A budget for each folder: code, tests, web pages, tables of text and words of Markdown.

A folder that holds more fails `test_house.py`. Then take something out, or raise the number in the
same commit and say why."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from common.tests.house import House
from workshop.book.quoted import code_lines

PAGE_SUFFIXES = (".js", ".css", ".html")


class Amounts(NamedTuple):
    """What a folder holds. Lines of code are those of Python and C++ that are neither blank, nor a
    comment, nor of a docstring: plain English is longer than a riddle."""

    code: int = 0
    tests: int = 0  # lines of code in tests and in what they share
    pages: int = 0  # lines of JavaScript, CSS and HTML
    tables: int = 0  # lines of `.txt`
    words: int = 0  # of Markdown, both languages


# What each folder held on 2026-11-28, and 3 % more.
BUDGETS = {
    ".": Amounts(code=13, tests=240, words=36000),
    "01_batching": Amounts(code=1147, tests=1564, words=11335),
    "01_batching/beyond": Amounts(code=398, tests=373, words=204),
    "01_batching/testing": Amounts(tests=42),
    "02_paged_kv": Amounts(code=899, tests=1024, words=10329),
    "02_paged_kv/beyond": Amounts(code=1901, tests=1059, words=4198),
    "03_prefix_cache": Amounts(code=1219, tests=1856, words=11787),
    "03_prefix_cache/beyond": Amounts(code=2120, tests=2895, words=4748),
    "03_prefix_cache/testing": Amounts(tests=813),
    "04_scheduler": Amounts(code=1002, tests=2104, words=9773),
    "04_scheduler/beyond": Amounts(code=960, tests=1760, words=13221),
    "04_scheduler/testing": Amounts(tests=523),
    "05_spec_decode": Amounts(code=665, tests=1748, words=9929),
    "05_spec_decode/beyond": Amounts(code=717, tests=1222, words=97),
    "05_spec_decode/testing": Amounts(tests=242),
    "06_chunked_prefill": Amounts(code=299, tests=700, words=7067),
    "06_chunked_prefill/beyond": Amounts(code=478, tests=867, words=1331),
    "common": Amounts(code=1434, tests=410, words=4379),
    "common/assembly": Amounts(code=712),
    "common/checkpoints": Amounts(words=839),
    "common/events": Amounts(code=1400, tests=890, pages=5147, words=1759),
    "common/features": Amounts(code=1245, tests=865),
    "common/models": Amounts(code=2724, tests=1861, words=5607),
    "common/parallel": Amounts(code=1526, tests=1606, words=6086),
    "common/requests": Amounts(code=817, tests=751),
    "common/runner": Amounts(code=1451, tests=1897),
    "common/sampling": Amounts(code=1497, tests=1193),
    "common/serve": Amounts(code=4110, tests=5680, pages=680, tables=65, words=9200),
    "common/tests": Amounts(tests=10762),
    "workshop": Amounts(code=12, tests=17),
    "workshop/book": Amounts(code=1692, tests=1440, tables=943),
    "workshop/measure": Amounts(code=7722, tests=1707, words=4373),
    "workshop/practice": Amounts(code=3501, tests=1847, tables=4026),
    "workshop/site": Amounts(code=945, tests=973, pages=820, words=864),
    "workshop/training": Amounts(code=810, tests=315, tables=75),
    "workshop/watch": Amounts(code=2032, tests=3439, pages=242, tables=475, words=983),
}
ALL_PYTHON_LINES = 132_500  # as `wc -l` counts them
LOADED_LINES = (
    12_400  # of what a default `LLM()` loads, docstrings and the pages that they name too
)


def folder_of(name: str) -> str:
    """The budget that a file counts for: of its folder, down to two."""
    folders = name.split("/")[:-1]
    return "/".join(folders[:2]) if folders else "."


def count_code(path: Path) -> int:
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return len(code_lines(source))
    lines = map(str.strip, source.splitlines())  # C++ without blocks of comments
    return sum(bool(line) and not line.startswith("//") for line in lines)


def is_test(name: str) -> bool:
    folders, _, file = name.rpartition("/")
    aside = {"tests", "testing"} & set(folders.split("/"))
    return bool(aside) or file.startswith("test_") or file == "conftest.py"


def amounts(house: House) -> dict[str, Amounts]:
    found: dict[str, list[int]] = defaultdict(lambda: [0] * len(Amounts._fields))
    for path in house.files:
        name = house.name(path)
        counts = found[folder_of(name)]
        if path.suffix in (".py", ".cpp", ".h"):
            counts[1 if is_test(name) else 0] += count_code(path)
        elif path.suffix in PAGE_SUFFIXES:
            counts[2] += len(path.read_text(encoding="utf-8").splitlines())
        elif path.suffix == ".txt":
            counts[3] += len(path.read_text(encoding="utf-8").splitlines())
        elif path.suffix == ".md":
            counts[4] += len(path.read_text(encoding="utf-8").split())
    return {folder: Amounts(*counts) for folder, counts in found.items() if any(counts)}


def rule_of_budgets(
    house: House,
    budgets: dict[str, Amounts] = BUDGETS,
    all_python_lines: int = ALL_PYTHON_LINES,
) -> list[str]:
    """No folder holds more than its budget, and all Python files together no more than theirs."""
    advice = (
        "take something out, or raise the number in common/tests/budgets.py in the same commit "
        "and say why"
    )
    broken = []
    for folder, held in sorted(amounts(house).items()):
        for kind, number, limit in zip(
            Amounts._fields, held, budgets.get(folder, Amounts()), strict=True
        ):
            if number > limit:
                broken.append(f"{folder}: {number} of {kind}, its budget is {limit}: {advice}")
    lines = sum(path.read_bytes().count(b"\n") for path in house.python_files())
    if lines > all_python_lines:
        broken.append(f"all Python: {lines} lines, the budget is {all_python_lines}: {advice}")
    return broken
