"""Exhibits to be watched: the film with the bug parts from the right one, where it is said to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from workshop.practice.museum import watched_run
from workshop.practice.museum.exhibits import EXHIBITS, Exhibit, Workload
from workshop.practice.museum.watched_run import (
    RunOnFilm,
    make_film,
    parting,
)
from workshop.practice.test_transcripts import FILM_OF_A_RUN
from workshop.practice.trial import broken_copy
from workshop.watch.replay.film import Film

WATCHED = [exhibit for exhibit in EXHIBITS if isinstance(exhibit.watch, Workload)]


@pytest.mark.sample(every=10, first=9)
@pytest.mark.parametrize("exhibit", WATCHED, ids=lambda e: e.title)
def test_the_film_with_the_bug_parts_from_the_right_one(exhibit: Exhibit, tmp_path: Path) -> None:
    workload = exhibit.watch
    assert isinstance(workload, Workload)
    right = make_film(workload, tmp_path / "right.jsonl")
    assert right.error == ""
    assert all("finish" in row for row in right.film.requests().values())
    assert right.num_steps < watched_run.MAX_STEPS
    with broken_copy(exhibit.patch) as swap:
        wrong = make_film(workload, tmp_path / "wrong.jsonl", swap)
    assert str(parting(right, wrong)).startswith(workload.parts)


PLAN = {"requests": ["a", "b"], "starts": [0, 4], "num_tokens": [4, 1], "schedule_ms": 0.1}


def film_of(*changes: tuple[str, dict[str, Any]]) -> RunOnFilm:
    lines = [{"at": at, "time": 0.1 * i, "changes": one} for i, (at, one) in enumerate(changes)]
    return RunOnFilm(
        Film([f"{json.dumps(FILM_OF_A_RUN)}\n", *(f"{json.dumps(line)}\n" for line in lines)])
    )


def plan(**other: Any) -> tuple[str, dict[str, Any]]:
    return "plan", {"in_flight": {"0": [{**PLAN, **other}]}}


ENDED = ("result", {"in_flight": {"0": None}, "result": [{"number": 0}]})


@pytest.mark.parametrize(
    ("right", "wrong", "expected"),
    [
        ([("plan", {"free": [[1], []]})], [("plan", {"free": [[1, 2], []]})], "step 0, plan, free"),
        ([plan(), ENDED], [plan(), ENDED, plan()], "step 1, plan, in_flight, a"),
        ([plan()], [plan(num_tokens=[4, 2])], "step 0, plan, in_flight, b"),
        ([plan()], [plan(schedule_ms=0.9, skipped={"c": "seat"})], "step 0, plan, in_flight, c"),
        ([("result", {"outputs": {"a": [[], [7]], "b": [[], [8]]}})],
         [("result", {"outputs": {"a": [[], [7]], "b": [[], [9]]}})],
         "step 0, result, outputs, b"),
    ],
)  # fmt: skip
def test_two_films_part_at_their_first_difference(right: Any, wrong: Any, expected: str) -> None:
    assert str(parting(film_of(*right), film_of(*wrong))) == expected
    assert parting(film_of(*right), film_of(*right)) is None
