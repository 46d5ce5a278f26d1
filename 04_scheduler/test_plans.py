"""Decisions of the two-phase scheduler, step by step: `plans.txt`."""

from __future__ import annotations

from pathlib import Path

import pytest

from scheduler import Scheduler
from scheduler_steps import SchedulerLog, make_loop
from step_log import Case, cases_of


@pytest.mark.net
@cases_of(Path(__file__).with_name("plans.txt"))
def test_plans(case: Case) -> None:
    SchedulerLog(make_loop(Scheduler, **case.options)).perform(case)
