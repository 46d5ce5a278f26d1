"""200 requests and 2,000 steps: neither the work of a step nor the page grows with the run.

Counts are compared, which are the same on every machine. Only the time of the processor is looked
at, with a margin, because other programs run beside these tests."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from workshop.watch.big_run import make_big_run
from workshop.watch.conftest import OpenPage
from workshop.watch.page_maker import Reel, make_page
from workshop.watch.replay.film import Film

if TYPE_CHECKING:
    from playwright.sync_api import Page

MAX_CELLS = 1000  # that fit into the grid's box
MAX_ELEMENTS, MAX_CREATED = 1250, 750  # on the page, and made for a step
NUM_APPLIED = 32  # lines at most, from the last frame that is kept
MAX_MS = 120  # of the processor, for all six scenes, on a machine that is busy

COUNT = """() => {
  window.counts = {cells: 0, frames: 0, made: 0};
  const {cellOf} = Watch;
  Watch.cellOf = (...args) => { counts.cells += 1; return cellOf(...args); };
  const {apply} = Watch.frames;
  Watch.frames.apply = (before, changes) => {
    counts.frames += changes.computed !== undefined; // a line, and not a part of one
    return apply(before, changes);
  };
  new MutationObserver((changes) => {
    for (const change of changes) counts.made += change.addedNodes.length;
  }).observe(document.body, {childList: true, subtree: true});
}"""
GO = """async (step) => {
  counts.cells = counts.frames = counts.made = 0;
  Watch.set({step});
  await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
  const elements = document.querySelectorAll("main *").length;
  return {...counts, elements, step: Watch.store.step};
}"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("long") / "run.jsonl"
    make_big_run(path, num_requests=200, num_steps=1000, seed=3)
    return path


@pytest.fixture(scope="module")
def long_page(run: Path) -> Path:
    path = run.with_suffix(".html")
    path.write_text(make_page([Reel("run", run.read_text(encoding="utf-8"))]), encoding="utf-8")
    return path


@pytest.fixture
def page(open_page: OpenPage, long_page: Path) -> Page:
    page = open_page(long_page)
    page.wait_for_selector("html[data-ready=true]", timeout=60_000)
    return page


def test_a_jump_in_a_long_run_costs_as_much_as_a_step(page: Page, run: Path) -> None:
    film = Film.read(run)
    num_steps = page.evaluate("Watch.numSteps()")
    assert num_steps == film.num_steps >= 1000
    assert page.get_attribute("[data-label]", "data-encoding") == "gzip"
    # The frame after it, and those that the sentences look at in between.
    limit = 3 * NUM_APPLIED
    assert limit < len(film.lines) / 10
    page.evaluate(COUNT)
    for step in (999, 3, 500, 501, 64, 31, 750, num_steps - 1):
        counts = page.evaluate(GO, step)
        assert counts["step"] == step
        assert 0 < counts["cells"] <= MAX_CELLS, (step, counts)
        assert counts["frames"] <= limit, (step, counts)
        assert counts["elements"] < MAX_ELEMENTS and counts["made"] < MAX_CREATED, (step, counts)


def test_a_scrubber_can_be_followed(page: Page) -> None:
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})

    def busy_ms() -> float:
        metrics = session.send("Performance.getMetrics")["metrics"]
        return 1e3 * next(m["value"] for m in metrics if m["name"] == "TaskDuration")

    page.evaluate(COUNT)
    before, num = busy_ms(), 20
    for place in range(num):
        page.evaluate(GO, place * 37 % 1900)
    assert (busy_ms() - before) / num < MAX_MS
