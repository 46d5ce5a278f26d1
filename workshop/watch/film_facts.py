"""What a film must show for its captions to be true: the rows `shows` of `films.txt`.

    shows 0 4 running ["a", "b", "c"]      recording, step, a part of the state after it, its value

If a film shows another value today, write it, and read the captions again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from workshop.watch.replay.film import Film


class NotShown(ValueError):
    """The film does not show what its caption is about."""


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
