"""The page agrees with the recorded run: bars, queue, clock, cells of the grid."""

from __future__ import annotations

import re
from typing import Any

import pytest

from common.events.frames import REASONS, reasons_to_wait
from workshop.watch.conftest import OpenRun, RunPage
from workshop.watch.replay.film import Film

PARTS = ("schedule", "prepare", "forward", "sample", "propose", "update")
KINDS = ("decode", "prompt", "recomputed", "draft")


def facts_of(film: Film, step: int) -> dict[str, Any]:
    """Python's facts of a step: its plan and result, cells, waiting requests and reasons."""
    part = film.step(step)
    (plan,) = part.plans
    (frame,) = (after for at, _, after in part.frames if at == "plan")
    idle = [name for name in frame["running"] if name not in plan["requests"]]
    return {
        "plan": plan,
        "result": part.result,
        "cells": part.cells(),
        "waits": reasons_to_wait(frame),
        "idle": idle,
    }


def numbers(text: str) -> list[int]:
    return [int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*", text)]


def check_queue(run: RunPage, film: Film, facts: dict[str, Any]) -> None:
    sums = {kind: sum(num for _, k, _, num in facts["cells"] if k == kind) for kind in KINDS}
    used, budget = sum(sums.values()), film.run.max_num_batched_tokens
    assert numbers(run.text(".bar-sum")) == [used, budget, budget - used]
    keys = (re.fullmatch(r"\S?\s*(\D+?) (\d+)", text) for text in run.texts(".bar-key span"))
    shown_values = {key[1]: key[2] for key in keys if key is not None}
    assert shown_values == {kind: str(num) for kind, num in sums.items() if num}
    waiting, running = run.texts(".queue-list h3")
    assert numbers(waiting)[0] == len(facts["waits"])
    assert numbers(running) == [
        len({name for name, *_ in facts["cells"]} | set(facts["idle"])),
        film.run.max_num_seqs,
    ]
    rows = run.ask(
        """() => [...document.querySelectorAll(".queue-list")].map((list) =>
            [...list.querySelectorAll("button")].map(
                (button) => [button.dataset.request, button.title, button.innerText]))"""
    )
    assert [row[0] for row in rows[0]] == list(facts["waits"])
    for name, title, _ in rows[0]:
        assert REASONS[facts["waits"][name]] in title
    tokens = {name: 0 for name in facts["idle"]}
    for name, _, _, num in facts["cells"]:
        tokens[name] = tokens.get(name, 0) + num
    assert {name: numbers(text.split(maxsplit=1)[1])[0] for name, _, text in rows[1]} == tokens


def check_clock(run: RunPage, facts: dict[str, Any]) -> None:
    times = {f"{part}_ms": 0.0 for part in PARTS} | facts["result"]["times"]
    times["schedule_ms"] = facts["plan"]["schedule_ms"]
    times["update_ms"] = facts["result"]["update_ms"]
    shown = run.texts(".clock-parts li:not(.quiet)")
    assert len(shown) == len(PARTS)
    for part, text in zip(PARTS, shown):
        name, value = re.fullmatch(r"([a-z]+)\s*([\d.]+) ms", text).groups()
        digits = len(value.partition(".")[2])
        assert name == part
        assert float(value) == pytest.approx(times[f"{part}_ms"], abs=0.51 * 10**-digits)
        assert digits >= 2 or float(value) >= 10


def test_bars_queue_and_clock_agree_with_the_recorded_run(
    open_run: OpenRun, default_run_text: str, default_film: Film
) -> None:
    film, run = default_film, open_run(default_run_text)
    for step in (0, 3, 5, 8, 11, 14, 17, 20, 27, 33, film.num_steps - 1):
        run.show(step=step)
        assert numbers(run.text("output.now")) == [step, film.num_steps - 1]
        facts = facts_of(film, step)
        check_queue(run, film, facts)
        check_clock(run, facts)
        state = film.state_after(step)
        idle, free = len(state["evictable"]), len(state["free"])
        held = film.run.num_blocks - 1 - idle - free
        assert numbers(run.text(".pool-counts"))[:3] == [held, idle, free]


def test_the_cells_of_the_grid_have_the_colours_of_their_kinds(
    open_run: OpenRun, default_run_text: str, default_film: Film
) -> None:
    """Much of a cell of one kind has its colour, and next to nothing of one that waits."""
    film, run = default_film, open_run(default_run_text)
    colour = "(name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim()"
    variables = {"prompt": "--prompt", "decode": "--decode", "recomputed": "--preempted"}
    expected = {kind: run.ask(colour, name) for kind, name in variables.items()}
    names = list(film.requests())
    filled: list[tuple[int, int, str]] = []
    empty: list[tuple[int, int, str]] = []
    for step in range(film.num_steps):
        facts = facts_of(film, step)
        kinds: dict[str, set[str]] = {}
        for name, kind, _, _ in facts["cells"]:
            kinds.setdefault(name, set()).add(kind)
        for name, its in kinds.items():
            if len(its) == 1 and its <= expected.keys():
                filled.append((names.index(name), step, expected[its.pop()]))
        for name in facts["waits"]:
            empty += [(names.index(name), step, c) for c in expected.values()]
    assert {cell[2] for cell in filled} == set(expected.values())
    assert len(filled) > 50 and len(empty) > 50
    assert min(run.check("shares", filled)) > 0.2
    assert max(run.check("shares", empty)) < 0.05
