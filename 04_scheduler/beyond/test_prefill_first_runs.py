"""Statements of `beyond/PREFILL_FIRST.md` and its pictures about runs hold for the runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from prefill_first_runs import (
    mode_transitions,
    one_retraction,
    parts,
    ratio_run,
    six_iterations,
    worked_budget,
)

PAGE = Path(__file__).parents[1] / "beyond" / "PREFILL_FIRST.md"


@pytest.mark.parametrize("name", ["six", "running", "budget", "ratio", "mixed"])
def test_the_page_agrees_with_the_run(name: str) -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert f"<!-- run:{name} -->\n{parts()[name]}\n<!-- /run:{name} -->" in page


def test_every_place_on_the_page_is_filled_from_a_run() -> None:
    assert set(re.findall(r"<!-- run:(\w+) -->", PAGE.read_text(encoding="utf-8"))) == set(parts())


def test_mixing_brings_steps_of_both() -> None:
    mixed = mode_transitions(mixing=True)
    assert {("EXTEND", "MIXED"), ("MIXED", "MIXED"), ("MIXED", "DECODE")} < mixed


def test_mixing_spares_the_decode_its_pause() -> None:
    """Section 7: five iterations instead of seven."""
    ends = {
        mixing: [n for n, now in enumerate(six_iterations(mixing, 7), 1) if "a" in now.ended]
        for mixing in (False, True)
    }
    assert ends == {False: [7], True: [5]}


def test_the_budget_by_hand() -> None:
    """Section 4 and question 3."""
    budget = worked_budget(0.5)
    assert [expected for *_, expected in budget.running] == [6, 8]
    assert (budget.lines[0].free, budget.lines[1].free) == (48 - 20 - 7, 48 - 28 - 11)
    results = {r: [line.result for line in worked_budget(r).lines] for r in (0.28, 0.29)}
    assert results == {0.28: ["CONTINUE"] * 2, 0.29: ["CONTINUE", "NO_TOKEN"]}


def test_the_share_only_falls_but_for_retractions() -> None:
    run = ratio_run()
    for step in range(1, len(run.ratios)):
        assert (run.ratios[step] > run.ratios[step - 1]) == bool(run.retracted[step])


def test_the_retraction_that_is_drawn() -> None:
    now = one_retraction()
    assert sum(len(h.blocks) for h in now.before) == now.num_pages, "none is free"
    fewest = min(h.num_outputs for h in now.before)
    equals = [h for h in now.before if h.num_outputs == fewest]
    assert now.retracted == [max(equals, key=lambda h: h.num_prompt).name] == now.waiting
    assert sorted(now.computed) == sorted(h.name for h in now.after)
    expected = sum(h.num_outputs + 20 for h in now.after) / sum(h.max_tokens for h in now.after)
    assert now.ratio_after == min(1.0, expected) > now.ratio_before
