"""The source code for the page's sentences: the function that made the decision.

A sentence is named by what happened ("admitted"), with a case ("finished:length"), or by a reason
to wait ("reason:budget"). Which function decided it depends on the engine that ran: three
schedulers admit in three ways. The rules are in one table, `source_places.txt`, and the first that
fits the run's header applies, also for a file that is dropped onto the page:

    computed overlaps=yes FILE::FUNCTION    the sentence, if the engine has this part
    FILE::FUNCTION                          the same sentence; always

`#` begins a remark. The source text is embedded in the page, which needs no checkout to show it. A
sentence whose function is gone has no link, so a renamed function never stops `make watch`;
`test_source_lines.py` names it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from workshop.practice.source_patch import definitions

ROOT = Path(__file__).resolve().parents[2]
TABLE = Path(__file__).with_name("source_places.txt")
_LINE = re.compile(r"^(?:([\w:]+) )?(?:(\w+)=(\S+) )?(\S+\.py)::(\S+)$")


class SourcePlace(NamedTuple):
    file: str  # from the checkout's root
    function: str  # `Class.method` or a name


class Rule(NamedTuple):
    sentence: str
    place: SourcePlace
    when: dict[str, Any] = {}  # noqa: RUF012  # a part of the engine, and what it must be


def read_rules(text: str) -> Iterator[Rule]:
    """Yield the rules. Raises `ValueError` for a line that is none."""
    sentence = ""
    for line in text.splitlines():
        if line and not line.startswith("#"):
            if (match := _LINE.match(line)) is None:
                raise ValueError(f"{line!r} is no rule")
            name, part, value, *place = match.groups()
            sentence = name or sentence
            when = {part: value == "yes" or value} if part and value != "no" else {}
            yield Rule(sentence, SourcePlace(*place), when)


def find(place: SourcePlace, root: Path = ROOT) -> dict[str, Any] | None:
    """Return the function's file, name, first line and lines, or None if the file has no such
    function. In a wheel, the chapters' modules are in one folder, next to `common`."""
    path = root / place.file
    path = path if path.exists() else root / path.name
    function = _defined(path).get(place.function) if path.exists() else None
    if function is None:
        return None
    lines = path.read_text(encoding="utf-8").splitlines()[function.lineno - 1 : function.end_lineno]
    lines = [line[function.col_offset :] for line in lines]
    return {**place._asdict(), "line": function.lineno, "lines": lines}


@cache
def _defined(path: Path) -> dict[str, ast.stmt]:
    return dict(definitions(ast.parse(path.read_text(encoding="utf-8"))))


def source_lines(rules: Sequence[Rule], root: Path = ROOT) -> dict[str, Any]:
    """Return the data that the page embeds: `places`, null for one that is gone, and `rules` that
    name them by number."""
    places = list(dict.fromkeys(rule.place for rule in rules))
    numbered = [{**rule._asdict(), "place": places.index(rule.place)} for rule in rules]
    return {"places": [find(place, root) for place in places], "rules": numbered}


RULES = list(read_rules(TABLE.read_text(encoding="utf-8")))
