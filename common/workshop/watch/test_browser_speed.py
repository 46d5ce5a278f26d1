"""200 requests and 2,000 steps: what is done for a step does not grow with the run.

Counts are compared, which are the same on every machine. Of times only that of the processor is
looked at, with room: other programs run beside these tests."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from common.events.event_kinds import (
    Admitted,
    Arrived,
    Computed,
    Event,
    Finished,
    Planned,
    Run,
    Updated,
    to_line,
)
from common.workshop.watch.conftest import OpenPage
from common.workshop.watch.page_maker import Reel, make_page

if TYPE_CHECKING:
    from playwright.sync_api import Page

SEATS, DECODES = 16, 159
MOST_CELLS = 1000  # that fit into the grid's box
MOST_EVENTS = 33 * 4 + 10  # of 32 steps and one, some of which admit and end requests
MOST_MS = 120  # of the processor, for all six scenes, on a machine that is busy

COUNT = """() => {
  window.counts = {cells: 0, events: 0};
  const {cellOf} = Watch;
  Watch.cellOf = (...args) => { counts.cells += 1; return cellOf(...args); };
  const {apply} = Watch.State.prototype;
  Watch.State.prototype.apply = function (event) { counts.events += 1; apply.call(this, event); };
}"""
GO = """async (step) => {
  counts.cells = counts.events = 0;
  Watch.set({step});
  await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
  return {...counts, step: Watch.store.step};
}"""


def long_run(num_requests: int) -> Iterator[Event]:
    """All come at once, and run in turn, as many as there are seats."""
    config = ("two_phase", "fcfs", None, 16, 2, SEATS, 64, False, {}, {}, {})
    yield Run(1, 1.0, *config)
    names = [f"r{n}" for n in range(num_requests)]
    for name in names:
        yield Arrived(0.0, name, [1, 2, 3], [], DECODES + 1, 0)
    waiting, running, step = deque(names), dict[str, int](), 0
    while waiting or running:
        while waiting and len(running) < SEATS:
            running[waiting[0]] = 0
            yield Admitted(waiting.popleft(), 0)
        starts = [0 if not num else num + 2 for num in running.values()]
        tokens = [3 if not num else 1 for num in running.values()]
        stop = ["seat", waiting[0]] if waiting else None
        yield Planned(step, step * 1.0, 0.1, list(running), starts, tokens, stop=stop)
        yield Computed(step, step + 0.5, {"forward_ms": 5.0}, {name: [7] for name in running})
        running = {name: num + 1 for name, num in running.items()}
        for name in [name for name, num in running.items() if num == DECODES + 1]:
            del running[name]
            yield Finished(step + 0.6, name, "length")
        yield Updated(step, step + 0.7, 0.2)
        step += 1


@pytest.fixture(scope="module")
def long_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    text = "".join(f"{to_line(event)}\n" for event in long_run(200))
    path = tmp_path_factory.mktemp("long") / "page.html"
    path.write_text(make_page([Reel("run", text)]), encoding="utf-8")
    return path


@pytest.fixture
def page(open_page: OpenPage, long_page: Path) -> Page:
    page = open_page(long_page)
    page.wait_for_selector("html[data-ready=true]", timeout=60_000)
    return page


def test_a_jump_in_a_long_run_costs_what_a_step_costs(page: Page) -> None:
    num_steps = page.evaluate("Watch.numSteps()")
    assert num_steps >= 2000
    page.evaluate(COUNT)
    for step in (1999, 3, 1000, 1001, 64, 31, 1500):
        counts = page.evaluate(GO, step)
        assert counts["step"] == step
        assert 0 < counts["cells"] <= MOST_CELLS, (step, counts)
        # The state after it, the one before it, and what the sentences look at in between.
        assert counts["events"] <= 3 * MOST_EVENTS, (step, counts)


def test_a_scrubber_can_be_followed(page: Page) -> None:
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})

    def busy_ms() -> float:
        metrics = session.send("Performance.getMetrics")["metrics"]
        return 1e3 * next(m["value"] for m in metrics if m["name"] == "TaskDuration")

    page.evaluate(COUNT)
    before, num = busy_ms(), 40
    for place in range(num):
        page.evaluate(GO, place * 37 % 1900)
    assert (busy_ms() - before) / num < MOST_MS
