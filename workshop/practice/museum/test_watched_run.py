"""Exhibits to be watched: the film with the bug parts from the right one, where it is said to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from common.events.event_kinds import (
    Arrived,
    Computed,
    Event,
    Evicted,
    Finished,
    Planned,
    Preempted,
    Taken,
    Updated,
    read_events,
)
from workshop.practice.museum import watched_run
from workshop.practice.museum.hall import EXHIBITS, Exhibit, Guest, Workload
from workshop.practice.museum.test_museum import A_RUN
from workshop.practice.museum.watched_run import (
    RunOnFilm,
    contradiction,
    line_of,
    make_film,
    parting,
)
from workshop.practice.trial import broken_copy
from workshop.watch.chromium import BrowserUnavailableError, started_browser
from workshop.watch.page_maker import Reel, make_page
from workshop.watch.sentence_needs import TOLD, unproven

if TYPE_CHECKING:
    from playwright.sync_api import Page


@pytest.fixture(scope="module")
def page() -> Iterator[Page | None]:
    """None where there is no browser; a CI has one for the tests of the page itself."""
    try:
        with started_browser() as browser:
            yield browser.new_page()
    except BrowserUnavailableError:
        yield None


WATCHED = [exhibit for exhibit in EXHIBITS if isinstance(exhibit.watch, Workload)]


@pytest.mark.sample(every=10, first=9)
@pytest.mark.parametrize("exhibit", WATCHED, ids=lambda e: e.title)
def test_the_film_with_the_bug_parts_from_the_right_one_and_the_page_tells_no_lie(
    exhibit: Exhibit, tmp_path: Path, page: Page | None
) -> None:
    """Of each sentence that the page says about either of the two, the event that it needs."""
    workload = exhibit.watch
    assert isinstance(workload, Workload)
    right = make_film(workload, tmp_path / "right.jsonl")
    assert (right.error, contradiction(right)) == ("", None)
    arrived = {event.request for event in right.events if isinstance(event, Arrived)}
    assert arrived == {e.request for e in right.events if isinstance(e, Finished)}
    assert right.num_steps < watched_run.MAX_STEPS
    with broken_copy(exhibit.patch) as swap:
        wrong = make_film(workload, tmp_path / "wrong.jsonl", swap)
    assert str(parting(right, wrong)).startswith(workload.parts)
    if page is None:
        return
    reels = [Reel(side, (tmp_path / f"{side}.jsonl").read_text()) for side in ("wrong", "right")]
    (tmp_path / "page.html").write_text(make_page(reels), encoding="utf-8")
    page.goto(f"{(tmp_path / 'page.html').as_uri()}#lang=en")
    page.wait_for_selector("html[data-ready]", state="attached")
    films = page.evaluate(TOLD)
    assert sum(len(step["told"]) for steps in films for step in steps) > 10
    assert unproven(films) == []


@pytest.mark.parametrize("exhibit", WATCHED, ids=lambda e: e.title)
def test_guests_come_in_order(exhibit: Exhibit) -> None:
    assert isinstance(exhibit.watch, Workload)
    arrivals = [guest.step for guest in exhibit.watch.guests]
    assert arrivals == sorted(arrivals)
    assert exhibit.watch.parts.startswith("step ")


def test_two_films_of_the_right_engine_are_the_same(tmp_path: Path) -> None:
    workload = Workload("", (Guest("a", "def f(x):", 4, priority=2), Guest("b", "import", 3)))
    one, other = (make_film(workload, tmp_path / name) for name in ("1.jsonl", "2.jsonl"))
    assert one.num_steps == 4 and parting(one, other) is None
    texts = [list(read_events(tmp_path / name)) for name in ("1.jsonl", "2.jsonl")]
    assert texts[0] != texts[1]  # by their times


def test_a_step_that_does_not_end_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched_run, "STEP_CPU_S", 0.05)

    def endless() -> None:
        while True:
            pass

    with pytest.raises(watched_run.EndlessError):
        watched_run._with_a_limit(endless)
    for _ in range(3):
        watched_run._with_a_limit(lambda: sum(range(1000)))


# -- where two films part


PLAN = Planned(0, 0.0, 0.1, ["a", "b"], [0, 4], [4, 1])
COMPUTED = Computed(0, 0.0, {}, {"a": [7], "b": [8]})


def film_of(*events: Event) -> RunOnFilm:
    return RunOnFilm([A_RUN, *events])


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        ([Evicted([1])], [Evicted([1, 2])], "step 0, evicted"),
        ([Updated(0, 0.0, 0.1), Taken("a", [1])], [Updated(0, 0.0, 0.1)], "step 1, taken, a"),
        ([Taken("a", [1])], [Taken("a", [1]), Preempted("b", 3)], "step 0, preempted, b"),
        ([Taken("a", [1])], [Evicted([4])], "step 0, evicted, a"),
        ([PLAN], [replace(PLAN, num_tokens=[4, 2])], "step 0, planned, b"),
        ([PLAN], [replace(PLAN, drafts={"a": [5]})], "step 0, planned, a"),
        ([PLAN], [replace(PLAN, requests=["b"], starts=[4], num_tokens=[1])], "step 0, planned, a"),
        ([COMPUTED], [replace(COMPUTED, tokens={"a": [7], "b": [9]})], "step 0, computed, b"),
    ],
)
def test_two_films_part_at_their_first_difference(right: Any, wrong: Any, said: str) -> None:
    assert str(parting(film_of(*right), film_of(*wrong))) == said


def test_a_film_does_not_part_from_itself() -> None:
    assert parting(film_of(PLAN, COMPUTED), film_of(PLAN, COMPUTED)) is None


def test_a_film_that_says_what_can_not_be() -> None:
    arrived = Arrived(0.0, "a", [1], [], 1, 0)
    sound = film_of(arrived, Taken("a", [1]))
    broken = film_of(arrived, Taken("a", [1]), Taken("a", [1]))
    assert contradiction(sound) is None
    found = contradiction(broken)
    assert found is not None and found.step == 0 and "block 1 was taken" in found.sentence


def test_a_long_event_is_cut() -> None:
    line = line_of(Evicted(list(range(200))), most=60)
    assert len(line) == 60 and line.startswith('{"kind":"evicted"') and line.endswith("…")
    assert line_of(None) == "the end of the film"
