from __future__ import annotations

from pathlib import Path

import pytest

from own_policy import TakeTurns
from scheduler import Scheduler
from scheduler_steps import SchedulerLog, make_loop
from step_log import Case, cases_of


@pytest.mark.net
@pytest.mark.parametrize("policy", [TakeTurns(), "own_policy:TakeTurns"], ids=["made", "named"])
@cases_of(Path(__file__).with_name("own_policy_plans.txt"))
def test_tenants_take_turns(case: Case, policy: TakeTurns | str):
    """Neither names decide, nor adapters, nor lengths. Without a tenant: one tenant."""
    SchedulerLog(make_loop(Scheduler, **case.options | {"policy": policy})).perform(case)
