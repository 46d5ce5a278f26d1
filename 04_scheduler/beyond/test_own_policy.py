from __future__ import annotations

from pathlib import Path

import pytest

from bounded_loops import as_long_as
from fake_model import FakeModelRunner
from kv_memory import KeyedRequest
from own_policy import TakeTurns
from request import SamplingParams
from scheduler import Scheduler


def request(name: str, tenant: str | None, adapter: str) -> KeyedRequest:
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    keys = [("lora", adapter)] if tenant is None else [("lora", adapter), ("salt", tenant)]
    return KeyedRequest(name, [ord(c) for c in name], params, extra_keys=keys)


@pytest.mark.parametrize("policy", [TakeTurns(), "own_policy:TakeTurns"], ids=["made", "named"])
def test_tenants_take_turns(policy):
    scheduler = Scheduler(max_num_seqs=1, policy=policy, max_overtakes=None)
    runner = FakeModelRunner(16)
    # Neither the tenants' names decide, nor adapters, nor lengths. Without a salt: one tenant.
    for i in range(4):
        scheduler.add_request(request(f"greedy {i}", "zoe", f"adapter {i}"))
    for tenant, name in (("amy", "mild"), (None, "free")):
        for i in range(2):
            scheduler.add_request(request(f"{name} {i}", tenant, "x"))
    served = []
    for _ in as_long_as(scheduler.has_unfinished_requests):
        output = scheduler.schedule()
        served += [new.req_id for new in output.scheduled_new_reqs]
        scheduler.update_from_output(output, runner.execute(output).wait())
    turns = [[f"{name} {i}" for name in ("greedy", "mild", "free")] for i in range(2)]
    assert served == [*turns[0], *turns[1], "greedy 2", "greedy 3"]


def test_it_is_as_short_as_it_says():
    source = (Path(__file__).parent / "own_policy.py").read_text(encoding="utf-8")
    body = source[source.index('"""\n\nfrom') + 5 :]
    assert len([line for line in body.splitlines() if line.strip()]) <= 20
