"""The lines of source behind the sentences of the page: which statement decided that.

A place is a function and a statement in it, both named by their text. It is found in the syntax
tree, so it survives whatever moves lines, and is missed, loudly, when the statement is rewritten:

    SourcePlace("04_scheduler/scheduler.py", "Scheduler._try_schedule_new", "if num_tokens == 0")

Which place a sentence means depends on what ran: three schedulers admit in three ways. `RULES` in
`source_places.py` has them; the page picks by the header of the run, so that a file that is dropped
onto it finds its own. The text goes into the page: it needs no checkout to show it."""

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
    """Where `sentence` was decided, if what ran is what is named; None fits whatever ran. Of the
    rules that fit the first one counts."""

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
    """`lines` begin with line `first` of the file; the statement is in lines `line` to `end`."""

    line: int
    end: int
    first: int
    lines: list[str]


def find(place: SourcePlace, root: Path = ROOT) -> Excerpt:
    """Raises `LookupError` unless there is exactly one such statement."""
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
    """In a wheel the chapters' modules lie side by side, next to `common`."""
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
    """The statement with what stands around it in its function: the `def` line too if it is near,
    and of a long statement its beginning."""
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
    """What the page embeds: `places`, and `rules` that name them by number."""
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
