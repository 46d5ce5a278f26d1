"""The source code for the page's sentences: the function that made the decision.

A place is a file and a function, found in the syntax tree:

    04_scheduler/scheduler.py::Scheduler._allocate_or_preempt

It survives moved lines and rewritten statements. A sentence whose function is gone has no link on
the page, so a renamed function never stops `make watch`; `test_source_lines.py` names it.

The place of a sentence depends on the engine that ran: three schedulers admit in three ways. The
rules are `RULES` in `source_places.py`. The page chooses by the run's header, also for a file that
is dropped onto it. The source text is embedded in the page, which needs no checkout to show it."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class SourcePlace:
    """A function that decides. `function` is `Class.method` or a name."""

    file: str  # from the checkout's root
    function: str


@dataclass(frozen=True, slots=True)
class Rule:
    """The place that decided `sentence`, if the run's engine has the named parts; None matches any.
    The first rule that matches applies."""

    sentence: str
    place: SourcePlace
    scheduler: str | None = None
    prefix_cache: str | None = None
    policy: str | None = None
    setting: str | None = None  # a field of the engine's configuration that must be on
    overlaps: bool | None = None
    windows: bool | None = None  # of layers in groups


def find(place: SourcePlace, root: Path = ROOT) -> dict[str, Any] | None:
    """Return the function's file, name, first line and lines, or None if the file has no such
    function."""
    path = _path_of(place.file, root)
    functions = dict(_functions(_parse(path))) if path.exists() else {}
    if place.function not in functions:
        return None
    function = functions[place.function]
    lines = path.read_text(encoding="utf-8").splitlines()[function.lineno - 1 : function.end_lineno]
    return {
        "file": place.file,
        "function": place.function,
        "line": function.lineno,
        "lines": [line[function.col_offset :] for line in lines],
    }


def _path_of(file: str, root: Path) -> Path:
    """The path of a source file. In a wheel, the chapters' modules are in one folder, next to
    `common`."""
    path = root / file
    return path if path.exists() else root / path.name


@cache
def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{prefix}{node.name}.")


def source_lines(rules: Sequence[Rule], root: Path = ROOT) -> dict[str, Any]:
    """Return the data that the page embeds: `places`, null for one that is gone, and `rules` that
    name them by number."""
    places = list(dict.fromkeys(rule.place for rule in rules))
    numbers = {place: number for number, place in enumerate(places)}
    fields = ("scheduler", "prefix_cache", "policy", "setting", "overlaps", "windows")
    return {
        "places": [find(place, root) for place in places],
        "rules": [
            {
                "sentence": rule.sentence,
                "place": numbers[rule.place],
                "when": {name: getattr(rule, name) for name in fields if getattr(rule, name)},
            }
            for rule in rules
        ],
    }
