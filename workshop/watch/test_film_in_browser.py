"""The page's film and Python's: the same state after every step of real runs, the same cells and
the same reasons to wait; and both refuse the same lines."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from common.events.conftest import draft, letters, workshop  # noqa: F401  (fixtures)
from common.events.event_kinds import Planned, parse_events
from common.tests.film_runs import Workshop
from workshop.watch.conftest import OpenPage
from workshop.watch.film_scripts import (
    CONSTRAINED,
    GUESSING,
    PREFIXES,
    SCARCE,
    WINDOWED,
)
from workshop.watch.page_maker import Reel, make_page
from workshop.watch.replay.film import Film, State
from workshop.watch.workloads import Cast, Script, perform

if TYPE_CHECKING:
    from playwright.sync_api import Page

# Two of them have names that every object of JavaScript has, too.
NAMES = {"a": "constructor", "b": "__proto__"}
VISITS = tuple(replace(visit, name=NAMES.get(visit.name, visit.name)) for visit in SCARCE.visits)
PIECES = replace(SCARCE, visits=VISITS).but(chunked_prefill=4, max_num_batched_tokens=8)
SPECULATION = GUESSING
TREE = PREFIXES.but(prefix_cache="radix")

STATE = """(state) => ({
  refCnt: state.refCnt, free: [...state.free], waiting: state.waiting, running: [...state.running],
  requests: [...state.requests.values()].map((r) => [r.id, r.tables, r.numComputedTokens,
    r.numCachedTokens, r.numPreemptions, r.highest, r.outputs, r.text, r.finishReason,
    r.stopReason, r.detail, r.priority, r.tenant, r.maxTokens, r.adapter,
    r.grammar]),
  cached: [...state.cached].map(
    ([b, c]) => [b, state.prefixOf(b), c.parent, c.tenant, c.blockHash,
      c.group ?? 0, c.place ?? null]),
  evictionOrder: state.evictionOrder(), nodes: state.nodes(),
  lastMatch: state.lastMatch && [state.lastMatch.request, state.lastMatch.blocks],
  loads: [...state.loads].map(([id, l]) => [id, l.prefix, l.blocks, l.hasArrived]),
  numLoaded: [...state.numLoaded], underWay: state.underWay.map(({step}) => step),
  numSteps: state.numSteps, errors: state.errors,
  users: state.refCnt.map((_, block) => state.usersOf(block)),
  reasons: state.waiting.map((id) => state.reasonToWait(id)),
})"""
STATES = f"""(steps) => {{
  const film = Watch.store.films[0];
  return steps.map((step) => ({STATE})(film.stateAfter(step)));
}}"""
FACTS = """() => {
  const film = Watch.store.films[0];
  return film.steps.map(({number, first, events, planned, cells, idle}, step) => ({
    number, first, events: events.map(({kind}) => kind), planned: planned && planned.step,
    cells: [...cells.values()].flat().map((c) => [c.request, c.kind, c.start, c.numTokens]),
    waits: [...film.waits(step)], idle}));
}"""


@pytest.fixture
def shown(open_page: OpenPage, tmp_path: Path) -> Callable[[Path], Page]:
    def show(run: Path) -> Page:
        path = tmp_path / "page.html"
        path.write_text(make_page([Reel("run", run.read_text(encoding="utf-8"))]), encoding="utf-8")
        page = open_page(path)
        page.wait_for_selector("html[data-ready=true]")
        return page

    return show


def state_in_python(state: State) -> dict[str, Any]:
    match = state.last_match
    found = {
        "refCnt": state.ref_cnt,
        "free": list(state.free),
        "waiting": state.waiting,
        "running": list(state.running),
        "requests": [
            [
                *(r.request_id, r.tables, r.num_computed_tokens, r.num_cached_tokens),
                *(r.num_preemptions, r.highest, r.outputs, r.text, r.finish_reason),
                *(r.stop_reason, r.detail, r.priority, r.tenant, r.max_tokens),
                *(r.adapter, r.grammar),
            ]
            for r in state.requests.values()
        ],
        "cached": [
            [
                *(block, state.prefix_of(block), c.parent, c.tenant, c.block_hash),
                *(c.group, c.place),
            ]
            for block, c in state.cached.items()
        ],
        "evictionOrder": state.eviction_order(),
        "nodes": state.nodes(),
        "lastMatch": match and [match.request, match.blocks],
        "loads": [[n, x.prefix, x.blocks, x.has_arrived] for n, x in state.loads.items()],
        "numLoaded": list(state.num_loaded.items()),
        "underWay": [planned.step for planned in state.under_way],
        "numSteps": state.num_steps,
        "errors": state.errors,
        "users": [state.users_of(block) for block in range(len(state.ref_cnt))],
        "reasons": [state.reason_to_wait(name) for name in state.waiting],
    }
    return json.loads(json.dumps(found))  # tuples are lists there


def facts_in_python(film: Film) -> list[dict[str, Any]]:
    """What each step computed, and what its plan left waiting: by a replay of its own."""
    state, facts = State(film.run), []
    seen: dict[int, dict[str, Any]] = {}
    for step in film.steps():
        computed = None
        for event in step.events:
            if event.kind in ("computed", "failed"):
                computed = state.under_way[0] if state.under_way else None
            state.apply(event)
            if isinstance(event, Planned):
                cells = [[c.request, c.kind, c.start, c.num_tokens] for c in state.cells(event)]
                seen[id(event)] = {
                    "cells": cells,
                    "waits": [[name, state.reason_to_wait(name) or ""] for name in state.waiting],
                    "idle": [name for name in state.running if name not in event.requests],
                }
        nothing = {"cells": [], "waits": [], "idle": []}
        facts.append(
            {
                "number": step.number,
                "first": step.first,
                "events": [event.kind for event in step.events],
                "planned": None if computed is None else computed.step,
                **(nothing if computed is None else seen.get(id(computed), nothing)),
            }
        )
    return facts


def compare(page: Page, run: Path, seed: int = 0) -> Film:
    """Every step, in a random order: a scrubber jumps."""
    film = Film.read(run)
    order = list(range(-1, film.num_steps))
    expected = {step: state_in_python(film.state_after(step)) for step in order}
    random.Random(seed).shuffle(order)
    for step, found in zip(order, page.evaluate(STATES, order), strict=True):
        for name, value in expected[step].items():
            assert found[name] == value, f"after step {step}: {name}"
    assert page.evaluate(FACTS) == facts_in_python(film)
    assert page.evaluate("Watch.store.films[0].contradiction") is None
    return film


@pytest.mark.parametrize(
    ("script", "kinds"),
    [
        (PIECES, {"preempted"}),
        (SPECULATION, {"verified"}),
        (TREE, {"split", "evicted", "matched"}),
        (CONSTRAINED, {"grammar"}),
        (WINDOWED, {"group", "matched", "evicted"}),
    ],
    ids=["pieces and preemption", "speculation", "a radix tree that evicts", "grammars", "windows"],
)
def test_the_page_has_the_state_that_python_has(
    script: Script, kinds: set[str], cast: Cast, shown: Callable[[Path], Page], tmp_path: Path
) -> None:
    run = tmp_path / "run.jsonl"
    perform(script, run, cast)
    film = compare(shown(run), run)
    there = {event.kind for event in film.events}
    fields = "verified", "grammar", "group"
    there |= {name for name in fields if any(getattr(e, name, None) for e in film.events)}
    assert kinds <= there, "the run shows nothing of what this test is about"


@pytest.mark.sample(every=2, first=1)
@pytest.mark.parametrize(("seed", "first_step"), [(3, 0), (8, 0), (11, 0), (14, 0), (7, 6)])
def test_so_it_is_of_engines_of_all_kinds(
    seed: int,
    first_step: int,
    workshop: Workshop,  # noqa: F811
    shown: Callable[[Path], Page],
) -> None:
    """Overlap, aborts, steps that fail (3, 8), tiers (11), names that come again (11, 14), and one
    that is watched from the middle on, with a plan under way."""
    late = {"first_step": first_step, "prefix_cache": "radix", "overlap_scheduling": True}
    recorded = workshop.run(seed, **(late if first_step else {}))
    compare(shown(recorded.path), recorded.path, seed)


def test_the_film_ends_where_events_contradict_themselves(
    cast: Cast, shown: Callable[[Path], Page], tmp_path: Path
) -> None:
    run = tmp_path / "run.jsonl"
    perform(PIECES, run, cast)
    lines = run.read_text(encoding="utf-8").splitlines(keepends=True)
    place = next(i for i, line in enumerate(lines) if i > 60 and '"freed"' in line)
    run.write_text("".join([*lines[:place], lines[place], lines[place], *lines[place + 1 :]]))
    film, page = Film.read(run), shown(run)
    with pytest.raises(ValueError, match="was freed, and is free"):
        film.last_state()
    broken = page.evaluate("Watch.store.films[0].contradiction")
    assert "was freed, and is free" in broken["message"]
    last = page.evaluate("Watch.store.films[0].numSteps") - 1
    assert broken["step"] == last
    before = page.evaluate(STATES, [last - 1])[0]
    assert before == state_in_python(film.state_after(last - 1)), "what came before is shown"
    assert broken["message"] in page.locator(".notice").inner_text()


def test_both_refuse_what_is_published_beyond_the_table(
    cast: Cast, shown: Callable[[Path], Page], tmp_path: Path
) -> None:
    run = tmp_path / "run.jsonl"
    perform(TREE, run, cast)
    lines = run.read_text(encoding="utf-8").splitlines(keepends=True)
    place = next(i for i, line in enumerate(lines) if '"published"' in line)
    beyond = {**json.loads(lines[place]), "start": 99, "given": [], "kept": []}
    lines[place] = json.dumps({**beyond, "hashes": [], "node_heads": []}) + "\n"
    run.write_text("".join(lines), encoding="utf-8")
    with pytest.raises((ValueError, IndexError)):
        Film.read(run).last_state()
    broken = shown(run).evaluate("Watch.store.films[0].contradiction")
    assert "is shorter than the 99 entries" in broken["message"]


EXTRA = ["", "[1]\n", "{\n", "null\n", "\n"]


def broken_lines(text: str, seed: int) -> str:
    """One thing wrong in one line, or nothing."""
    rng = random.Random(seed)
    lines = text.splitlines(keepends=True)
    place = rng.randrange(min(len(lines), 40))
    event = json.loads(lines[place])
    name = rng.choice([name for name in event if name != "kind"])
    match rng.randrange(6):
        case 0:
            del event[name]
        case 1:
            event[name] = rng.choice([None, "x", 1.5, [1], ["x"], {"a": 1}, {"a": ["x"]}, True])
        case 2:
            event[rng.choice(["new", "toString", "__proto__"])] = 1
        case 3:
            event["kind"] = rng.choice(["no", "constructor", 3, None])
        case 4:
            return "".join([*lines[:place], rng.choice(EXTRA) or lines[0], *lines[place:]])
        case _:
            lines[-1] = lines[-1][: rng.randrange(len(lines[-1]))]
    lines[place] = json.dumps(event) + "\n"
    return "".join(lines)


def test_both_read_and_refuse_the_same_lines(
    cast: Cast, shown: Callable[[Path], Page], tmp_path: Path
) -> None:
    run = tmp_path / "run.jsonl"
    perform(SPECULATION, run, cast)
    texts = [broken_lines(run.read_text(encoding="utf-8"), seed) for seed in range(300)]
    verdicts = shown(run).evaluate(
        """(texts) => texts.map((text) => {
          try { return Watch.parseEvents(text).length; } catch (error) {
            if (!(error instanceof Watch.EventError)) throw error;
            return error.message.split(":")[0];
          }
        })""",
        texts,
    )
    expected = [verdict_of_python(text) for text in texts]
    assert verdicts == expected
    assert 50 < sum(isinstance(verdict, str) for verdict in expected) < 290, "both cases occur"


def verdict_of_python(text: str) -> int | str:
    """How many events there are, or "Line 3" for the one that is refused."""
    try:
        return len(list(parse_events(text.splitlines(keepends=True), "x")))
    except ValueError as error:
        return "Line " + str(error).removeprefix("x, line ").split(":")[0]
