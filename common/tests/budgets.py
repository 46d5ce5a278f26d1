"""A budget for each folder: code, tests, web pages, tables of text and words of Markdown.

A folder that holds more fails `test_house.py`. Then take something out, or raise the number in the
same commit and say why."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from common.tests.house import House, parse

PAGE_SUFFIXES = (".js", ".css", ".html")


class Amounts(NamedTuple):
    """What a folder holds. Lines of code are those of Python and C++ that are neither blank, nor a
    comment, nor of a docstring: plain English is longer than a riddle."""

    code: int = 0
    tests: int = 0  # lines of code in tests and in what they share
    pages: int = 0  # lines of JavaScript, CSS and HTML
    tables: int = 0  # lines of `.txt`
    words: int = 0  # of Markdown, both languages


# What each folder held on 2026-11-27, and 3 % more.
BUDGETS = {}
ALL_PYTHON_LINES = 0  # as `wc -l` counts them
LOADED_LINES = 12_300  # of what a default `LLM()` loads, docstrings too (`python -m workshop.path`)


def folder_of(name: str) -> str:
    """The budget that a file counts for: of its folder, down to two."""
    folders = name.split("/")[:-1]
    return "/".join(folders[:2]) if folders else "."


def code_lines(path: Path) -> int:
    if path.suffix != ".py":  # C++ without blocks of comments
        lines = path.read_text(encoding="utf-8").splitlines()
        return sum(bool(line.strip()) and not line.strip().startswith("//") for line in lines)
    docstrings = set[int]()
    nodes: list[ast.AST] = [parse(path)]
    while nodes:
        node = nodes.pop()
        inner = [*getattr(node, "body", []), *getattr(node, "orelse", [])]
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = inner[0] if inner else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                docstrings.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
        nodes += [child for child in inner if isinstance(child, ast.stmt)]
    lines = enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
    return sum(
        n not in docstrings and bool(line.strip()) and not line.strip().startswith("#")
        for n, line in lines
    )


def is_test(name: str) -> bool:
    folders, _, file = name.rpartition("/")
    aside = {"tests", "testing", "lab"} & set(folders.split("/"))
    return bool(aside) or file.startswith("test_") or file == "conftest.py"


def amounts(house: House) -> dict[str, Amounts]:
    found: dict[str, list[int]] = defaultdict(lambda: [0] * len(Amounts._fields))
    for path in house.files:
        name = house.name(path)
        own = found[folder_of(name)]
        if path.suffix in (".py", ".cpp", ".h"):
            own[1 if is_test(name) else 0] += code_lines(path)
        elif path.suffix in PAGE_SUFFIXES:
            own[2] += len(path.read_text(encoding="utf-8").splitlines())
        elif path.suffix == ".txt":
            own[3] += len(path.read_text(encoding="utf-8").splitlines())
        elif path.suffix == ".md":
            own[4] += len(path.read_text(encoding="utf-8").split())
    return {folder: Amounts(*own) for folder, own in found.items() if any(own)}


def rule_of_budgets(
    house: House,
    budgets: dict[str, Amounts] = BUDGETS,
    all_python_lines: int = ALL_PYTHON_LINES,
) -> list[str]:
    """No folder holds more than its budget, and all Python files together no more than theirs."""
    what_to_do = (
        "take something out, or raise the number in common/tests/budgets.py in the same commit "
        "and say why"
    )
    broken = []
    for folder, held in sorted(amounts(house).items()):
        for kind, number, most in zip(
            Amounts._fields, held, budgets.get(folder, Amounts()), strict=True
        ):
            if number > most:
                broken.append(f"{folder}: {number} of {kind}, its budget is {most}: {what_to_do}")
    lines = sum(path.read_bytes().count(b"\n") for path in house.python_files())
    if lines > all_python_lines:
        broken.append(f"all Python: {lines} lines, the budget is {all_python_lines}: {what_to_do}")
    return broken
