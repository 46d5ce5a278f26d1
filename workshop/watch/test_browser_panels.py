"""What the six panels say of four runs: approved in `panels.json`, a line a panel; and every
event of every step has its sentence, which leads to its lines of source."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from workshop.watch.conftest import OpenPage, RunPage
from workshop.watch.tests.scene_runs import SCRIPTS, Pages

APPROVED = json.loads(Path(__file__).with_name("panels.json").read_text(encoding="utf-8"))
RUNS = {  # by step: a request, then a block to point at
    "radix": {2: ("b", 3)},
    "preempted": {8: ("d", 29), 25: ("d", 19)},
    "everything": {26: ("d", 20)},
    "urgent": {5: ("d", 12)},
}
HOLE = re.compile(r"(say|pool|cache|words|tokens|source|reason)\.(?!py\b)[a-z_]+|undefined|NaN")
CHINESE = re.compile(r"[\u4e00-\u9fff]")


@pytest.fixture
def opened(shown: Pages, open_page: OpenPage) -> Callable[[str], RunPage]:
    return lambda run: RunPage(open_page(shown[run].page, 1920, 1080))


def panels(page: RunPage, run: str, step: int) -> Iterator[tuple[str, Any]]:
    request, block = RUNS[run][step]
    page.show(step=step, request=None, block=None)
    found = page.check("panels")
    page.show(request=request)
    found["chosen"] = page.check("panels")["chosen"]
    page.show(request=None, block=block)
    found["pointed"] = page.check("panels")["pointed"]
    yield from ((f"{run} {step} {panel}", words) for panel, words in found.items() if words)


@pytest.mark.parametrize("run", RUNS)
def test_the_panels_are_as_approved(
    run: str, opened: Callable[[str], RunPage], tmp_path: Path
) -> None:
    """Where the engine plans otherwise, compare each line that differs with
    the run's frames (`Film.step`) before you take it over."""
    page, found, chinese = opened(run), dict[str, Any](), dict[str, Any]()
    for step in RUNS[run]:
        found |= panels(page, run, step)
        page.show(language="zh")
        chinese |= panels(page, run, step)
        page.show(language="en")
    lines = [json.dumps({key: words}, ensure_ascii=False)[1:-1] for key, words in found.items()]
    (tmp_path / "panels.json").write_text(",\n".join(lines) + "\n", encoding="utf-8")
    approved = {key: words for key, words in APPROVED.items() if key.split()[0] == run}
    for key in approved.keys() | found.keys():
        assert found.get(key) == approved.get(key), f"{key}: see {tmp_path / 'panels.json'}"
    for key, words in chinese.items():
        assert HOLE.search(f"{found[key]} {words}") is None, key
        if key.endswith("words"):
            assert all(map(CHINESE.search, words)), key


TOLD_AS = {  # an event of frames: the kinds of its one sentence, told of the request
    "arrived": {"arrived"},
    "preempted": {"preempted"},
    "admitted": {"admitted", "returned"},
    "finished": {"finished", "cut"},
    "loads_begun": {"load_begun"},
    "loads_ended": {"load_ended"},
}
TOLD = """() => { const [film] = Watch.store.films;
    return film.steps.map((facts, step) => Watch.sentencesOf({film, step, facts})); }"""
UNLINKED = """() => Watch.store.films[0].steps.flatMap((facts, step) => {
    const [film] = Watch.store.films;
    return Watch.sentencesOf({film, step, facts})
        .filter(({sources}) => !sources.some((name) => Watch.sourceOf(film.run, name)))
        .map(({key}) => key); })"""


@pytest.mark.parametrize("run", [*SCRIPTS, "urgent"])
def test_every_event_has_one_sentence(
    run: str, opened: Callable[[str], RunPage], shown: Pages
) -> None:
    """And leads to the source."""
    page = opened(run)
    told = page.ask(TOLD)
    assert page.ask(UNLINKED) == []
    for step, told_of_step in zip(shown[run].film.steps(), told, strict=True):
        kinds = [(one["key"].split(".")[1], one["group"]) for one in told_of_step]
        for event, names in TOLD_AS.items():
            rows = [row for what in step.happened for row in what[event]]
            expected = Counter(row if isinstance(row, str) else row[0] for row in rows)
            found = Counter(group for kind, group in kinds if kind in names)
            assert found == expected, (step.number, event)
        for event in ("evicted", "split"):
            assert any(what[event] for what in step.happened) == ((event, "cache") in kinds)
        num_stops = sum("stop" in plan for plan in step.plans)
        assert num_stops == sum(kind == "stop" for kind, _ in kinds), step.number


ROWS = """() => Object.fromEntries([...document.querySelectorAll(".cache-box:not(.is-gone)")]
    .flatMap((box) => box.dataset.blocks.split(" ").map((block) => [block, box.offsetTop])))"""


def test_a_block_keeps_its_row_in_the_cache_while_it_lives(
    opened: Callable[[str], RunPage], shown: Pages
) -> None:
    page, film, rows = opened("radix"), shown["radix"].film, list[dict[str, int]]()
    for step in range(film.num_steps):
        page.show(step=step)
        rows.append(page.ask(ROWS))
    for step, (before, now) in enumerate(pairwise(rows), 1):
        evicted = {str(b) for what in film.step(step).happened for b in what["evicted"]}
        for block in before.keys() & now.keys() - evicted:
            assert before[block] == now[block], f"block {block} moves in step {step}"
