"""The source lines for the page's sentences: the statement that made the decision.

A place is a function and a statement in it, both named by their text. Places are found in the
syntax tree, so they survive moved lines, and raise an error when the statement is rewritten:

    SourcePlace("04_scheduler/scheduler.py", "Scheduler._try_schedule_new", "if num_tokens == 0")

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
MAX_LINES, MIN_LINES = 15, 5  # of an excerpt
LINES_BEFORE = 4  # of the statement, where its function begins further up


@dataclass(frozen=True, slots=True)
class SourcePlace:
    """The statement of `function` whose first line, as `ast.unparse` writes it, begins with
    `statement`. `function` is `Class.method` or a name."""

    file: str  # from the checkout's root
    function: str
    statement: str


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


@dataclass(frozen=True, slots=True)
class Excerpt:
    """Source lines. `lines` begin with line `first` of the file; the statement is in lines `line`
    to `end`."""

    line: int
    end: int
    first: int
    lines: list[str]


def find(place: SourcePlace, root: Path = ROOT) -> Excerpt:
    """Find the statement. Raises `LookupError` unless there is exactly one such statement."""
    source, tree = _parse(_path_of(place.file, root))
    functions = [node for name, node in _functions(tree) if name == place.function]
    if len(functions) != 1:
        raise LookupError(f"{place.file} must have one {place.function}, got {len(functions)}")
    found = [node for node in ast.walk(functions[0]) if _is_it(node, place.statement)]
    if len(found) != 1:
        raise LookupError(
            f"{place.function} of {place.file} must have one statement that begins with "
            f"{place.statement!r}, got {len(found)}"
        )
    return _excerpt(source, functions[0], found[0])


def _path_of(file: str, root: Path) -> Path:
    """The path of a source file. In a wheel, the chapters' modules are in one folder, next to
    `common`."""
    path = root / file
    return path if path.exists() else root / path.name


@cache
def _parse(path: Path) -> tuple[list[str], ast.Module]:
    text = path.read_text(encoding="utf-8")
    return text.splitlines(), ast.parse(text)


def _functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{prefix}{node.name}.")


def _is_it(node: ast.AST, statement: str) -> bool:
    is_statement = isinstance(node, ast.stmt) and not isinstance(node, ast.FunctionDef)
    return is_statement and ast.unparse(node).startswith(statement)


def _excerpt(source: list[str], function: ast.FunctionDef, node: Any) -> Excerpt:
    """Return the statement with its context in the function: the `def` line too if it is near, and
    only the start of a long statement."""
    top, bottom = function.lineno, function.end_lineno or function.lineno
    first = top if node.lineno - top <= 2 * LINES_BEFORE else node.lineno - LINES_BEFORE
    last = min(bottom, first + MAX_LINES - 1, max(node.end_lineno + 2, first + MIN_LINES + 2))
    first = max(1, min(first, last - MIN_LINES + 1))
    lines = source[first - 1 : last]
    margin = min(len(line) - len(line.lstrip()) for line in lines if line.strip())
    return Excerpt(
        node.lineno, min(node.end_lineno, last), first, [line[margin:] for line in lines]
    )


def source_lines(rules: Sequence[Rule], root: Path = ROOT) -> dict[str, Any]:
    """Return the data that the page embeds: `places`, and `rules` that name them by number."""
    places = list(dict.fromkeys(rule.place for rule in rules))
    numbers = {place: number for number, place in enumerate(places)}
    fields = ("scheduler", "prefix_cache", "policy", "setting", "overlaps", "windows")
    return {
        "places": [_as_json(place, find(place, root)) for place in places],
        "rules": [
            {
                "sentence": rule.sentence,
                "place": numbers[rule.place],
                "when": {name: getattr(rule, name) for name in fields if getattr(rule, name)},
            }
            for rule in rules
        ],
    }


def _as_json(place: SourcePlace, excerpt: Excerpt) -> dict[str, Any]:
    return {
        "file": place.file,
        "function": place.function,
        "line": excerpt.line,
        "end": excerpt.end,
        "first": excerpt.first,
        "lines": excerpt.lines,
    }
