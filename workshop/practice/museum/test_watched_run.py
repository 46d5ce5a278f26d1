"""Exhibits to be watched: the film with the bug parts from the right one, where it is said to."""

from __future__ import annotations

from pathlib import Path

import pytest

from workshop.practice.museum import watched_run
from workshop.practice.museum.exhibits import EXHIBITS, Exhibit, Workload
from workshop.practice.museum.watched_run import make_film, parting
from workshop.practice.trial import broken_copy

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
