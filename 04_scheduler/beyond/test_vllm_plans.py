"""The scheduler of this chapter plans what vLLM's own plans, token for token and step by step; and
where a rule is another, the difference is that rule's."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_plans import RecordedRun, first_difference, recorded_names, replay, table_of_steps

NAMES = recorded_names()
SAME_STEP = "same_step"  # one request hits what another computes in that very step
RULES = [
    {},
    {"reserve_for_chunks": "own"},
    {"defer_on_shared_prefix": False},
    {"reserve_for_chunks": "own", "defer_on_shared_prefix": False},
]


@pytest.mark.parametrize("name", [name for name in NAMES if name != SAME_STEP])
def test_every_step_is_planned_as_vllm_plans_it(name: str) -> None:
    run = RecordedRun.read(name)
    for rules in RULES:
        scheduler = run.scheduler(**rules)
        for step, (ours, theirs) in enumerate(zip(replay(run, scheduler), run.plans, strict=True)):
            assert ours == theirs, f"step {step}, {rules}"
        assert not scheduler.has_unfinished_requests()


def test_the_workloads_are_long_and_preempt() -> None:
    """Or they would prove little."""
    runs = [RecordedRun.read(name) for name in NAMES if name != SAME_STEP]
    plans = [plan for run in runs for plan in run.plans]
    assert (len(runs), len(plans)) == (16, 2367)
    assert sum(len(plan.preempted) for plan in plans) == 23
    assert sum(num > 0 for plan in plans for num in plan.cached.values()) > 50


def test_what_is_computed_in_the_same_step_is_hit_there_and_not_here() -> None:
    """The third rule. vLLM: r6 finds 40 tokens that r5 computes in the same step. Ours passes r6
    over, or lets it compute them again."""
    run = RecordedRun.read(SAME_STEP)
    assert first_difference(run, run.scheduler()) == 20
    assert first_difference(run, run.scheduler(defer_on_shared_prefix=False)) == 20
    waits, again = (
        list(replay(run, run.scheduler(defer_on_shared_prefix=way)))[20] for way in (True, False)
    )
    theirs = run.plans[20]
    assert (theirs.cached["r5"], theirs.cached["r6"]) == (0, 40)
    assert "r6" not in waits.tokens and waits.tokens["r9"] == theirs.tokens["r6"]
    assert again.tokens == theirs.tokens and again.cached["r6"] == 0


def test_the_page_shows_those_steps() -> None:
    page = Path(__file__).with_name("VLLM_PLANS.md").read_text(encoding="utf-8")
    assert table_of_steps(SAME_STEP, 19, 23) in page
