"""What happened in a film, step by step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from workshop.watch.replay.film import Film

Cell = tuple[str, str, int, int]  # request, kind, start, number of tokens


def happened(film: Film, name: str) -> Iterator[tuple[int, Any]]:
    """Yield everything of one name that `frame_facts.happened` finds, each with its step: plans,
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
