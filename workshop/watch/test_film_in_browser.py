"""The page's frames and Python's: the same JSON after every line of real runs, the same answers to
what happened in between and to why requests wait."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from common.events.conftest import draft, letters, workshop  # noqa: F401  (fixtures)
from common.tests.film_runs import Workshop
from workshop.watch.conftest import OpenPage, RunPage
from workshop.watch.film_scripts import CONSTRAINED, GUESSING, PREFIXES, SCARCE, WINDOWED
from workshop.watch.replay.film import Film
from workshop.watch.replay.frame_facts import (
    cells,
    eviction_order,
    happened,
    nodes,
    prefix_of,
)
from workshop.watch.tests.scene_runs import shown_run
from workshop.watch.workloads import Cast, Script, perform

if TYPE_CHECKING:
    from playwright.sync_api import Page

# Two of them have names that every object of JavaScript has, too.
NAMES = {"a": "constructor", "b": "__proto__"}
VISITS = tuple(replace(visit, name=NAMES.get(visit.name, visit.name)) for visit in SCARCE.visits)
PIECES = replace(SCARCE, visits=VISITS).but(chunked_prefill=4, max_num_batched_tokens=8)
TREE = PREFIXES.but(prefix_cache="radix")

# For each line: the frame after it, and its facts of the step.
LINES = """() => {
  const [F, film] = [Watch.frames, Watch.store.films[0]];
  const isGrouped = film.run.windows.length > 0;
  let before = F.empty(film.run);
  return film.lines.map(({changes, at}) => {
    const after = F.apply(before, changes);
    const what = at === "start" ? null : F.happened(before, after);
    before = after;
    const cells = what?.plan ? F.cells(what.plan, after) : [];
    const prefixes = F.cachedBlocks(after).map((block) => [block, F.prefixOf(after, block)]);
    return JSON.stringify([after, what, cells.map((c) => [c.request, c.kind, c.start, c.numTokens]),
      F.evictionOrder(after, isGrouped), isGrouped ? [] : F.nodes(after),
      isGrouped ? [] : prefixes]);
  });
}"""
STATES = "(steps) => steps.map((i) => JSON.stringify(Watch.store.films[0].stateAfter(i)))"


@pytest.fixture
def shown(open_page: OpenPage, tmp_path: Path) -> Callable[[Path], Page]:
    return lambda run: RunPage(open_page(shown_run(run).page)).page


def lines_in_python(film: Film) -> list[Any]:
    is_grouped, before, found = bool(getattr(film.run, "windows", ())), film.state_behind(0), []
    for position, line in enumerate(film.lines, 1):
        after = film.state_behind(position)
        what = None if line["at"] == "start" else happened(before, after)
        facts = [after, what, list(cells(what["plan"], after)) if what and what["plan"] else []]
        facts.append(eviction_order(after, is_grouped))
        blocks = [] if is_grouped else sorted(map(int, after["cached"]))
        facts += [[] if is_grouped else nodes(after), [[b, prefix_of(after, b)] for b in blocks]]
        found.append(facts)
        before = after
    return json.loads(json.dumps(found))


def in_any_order(answer: list[Any]) -> list[Any]:
    """JavaScript puts keys that are numbers first, so lists of requests by key differ in order."""
    if answer[1] is not None:
        for name in ("loads_begun", "loads_ended", "finished", "arrived", "known"):
            answer[1][name] = sorted(answer[1][name])
    return answer


def compare(page: Page, run: Path, seed: int = 0) -> None:
    """Every line; and every step, in a random order: a scrubber jumps."""
    film = Film.read(run)
    found = [json.loads(line) for line in page.evaluate(LINES)]
    expected = lines_in_python(film)
    assert len(found) == len(expected) > 20
    for number, (one, other) in enumerate(zip(found, expected)):
        assert in_any_order(one) == in_any_order(other), f"line {number}"
    order = list(range(-1, film.num_steps))
    random.Random(seed).shuffle(order)
    for step, state in zip(order, page.evaluate(STATES, order), strict=True):
        assert json.loads(state) == film.state_after(step), f"after step {step}"
    assert page.evaluate("Watch.store.films[0].contradiction") is None


@pytest.mark.parametrize(
    "script",
    [PIECES, GUESSING, TREE, CONSTRAINED, WINDOWED],
    ids=["pieces and preemption", "speculation", "a radix tree that evicts", "grammars", "windows"],
)
def test_the_page_has_the_frames_that_python_has(
    script: Script, cast: Cast, shown: Callable[[Path], Page], tmp_path: Path
) -> None:
    run = tmp_path / "run.jsonl"
    perform(script, run, cast)
    compare(shown(run), run)


@pytest.mark.sample(every=2, first=1)
@pytest.mark.parametrize(("seed", "first_step"), [(3, 0), (8, 0), (11, 0), (14, 0), (7, 6)])
def test_so_it_is_of_engines_of_all_kinds(
    seed: int,
    first_step: int,
    workshop: Workshop,  # noqa: F811
    shown: Callable[[Path], Page],
) -> None:
    """Overlap, aborts, steps that fail (3, 8), tiers (11), names that come again (11, 14), and one
    that is watched from the middle on, with a plan in flight."""
    late = {"first_step": first_step, "prefix_cache": "radix", "overlap_scheduling": True}
    recorded = workshop.run(seed, **(late if first_step else {}))
    compare(shown(recorded.path), recorded.path, seed)


def test_the_film_ends_where_the_record_contradicts_itself(
    cast: Cast, shown: Callable[[Path], Page], tmp_path: Path
) -> None:
    run = tmp_path / "run.jsonl"
    perform(PIECES, run, cast)
    lines = run.read_text(encoding="utf-8").splitlines(keepends=True)
    place = next(i for i, line in enumerate(lines) if i > 30 and '"starts":' in line)
    line = json.loads(lines[place])
    next(iter(line["changes"]["in_flight"].values()))[0]["starts"][0] = 99
    lines[place] = json.dumps(line) + "\n"
    run.write_text("".join(lines), encoding="utf-8")
    film, page = Film.read(run), shown(run)
    broken = page.evaluate("Watch.store.films[0].contradiction")
    assert "goes on at 99" in broken["message"]
    (before,) = page.evaluate(STATES, [broken["step"] - 1])
    assert json.loads(before) == film.state_after(broken["step"] - 1), "what came before is shown"
    assert broken["message"] in page.locator(".notice").inner_text()
