"""What a film must show for its captions to be true: the rows `shows` of `films.txt`.

    shows 0 4 running ["a", "b", "c"]      recording, step, a part of the state after it, its value

`make watch ARGS=--facts` writes what the films show today; then read the captions again."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from workshop.watch.replay.film import Film

Cell = tuple[str, str, int, int]  # request, kind, start, number of tokens


class NotShown(ValueError):
    """The film does not show what its caption is about."""


def happened(film: Film, name: str) -> Iterator[tuple[int, Any]]:
    """Yield everything of one name that `frames.happened` finds, each with its step: plans,
    results, items of a list, or pairs of a request and its blocks."""
    for step in film.steps():
        for what in step.happened:
            found = what[name]
            if name in ("plan", "result"):
                found = [] if found is None else [found]
            for item in found.items() if isinstance(found, dict) else found:
                yield step.number, item


def cells(film: Film) -> list[list[Cell]]:
    """Return the cells that each step computed."""
    return [step.cells() for step in film.steps()]


def fact(films: Sequence[Film], row: str) -> tuple[str, Any]:
    """Return a row without its value, and the value that it has in the films."""
    recording, step, path, *_ = row.split(" ", 3)
    found: Any = films[int(recording)].state_after(int(step))
    for key in path.split("."):
        if key == "length":
            found = len(found)
        else:
            found = None if found is None else found.get(key)
    return f"{recording} {step} {path}", found


def check(films: Sequence[Film], rows: Sequence[str]) -> None:
    """Raises `NotShown`. Two recordings of a film have the same tokens."""
    for row in rows:
        where, value = fact(films, row)
        if json.loads(row.removeprefix(where)) != value:
            raise NotShown(f"the film does not show {row}: it is {value}")
    first, *others = ({name: r["outputs"] for name, r in f.requests().items()} for f in films)
    if any(answers != first for answers in others):
        raise NotShown("the film does not show the same tokens in both runs")


def renewed(text: str, shown: Sequence[tuple[Sequence[Film], Sequence[str]]]) -> str:
    """Return the table with the values of today. `shown`: each film's recordings and rows."""
    values = iter([fact(films, row) for films, rows in shown for row in rows])

    def write(_: re.Match[str]) -> str:
        where, value = next(values)
        return f"shows {where} {json.dumps(value)}"

    return re.sub(r"^shows .*$", write, text, flags=re.MULTILINE)
