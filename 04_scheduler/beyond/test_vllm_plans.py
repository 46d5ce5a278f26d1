"""The scheduler of this chapter plans what vLLM's own plans, token for token and step by step; and
where a rule is another, the difference is that rule's.

`testing/records/vllm_plans.json` holds seventeen random workloads and the plans that vLLM 0.32.0
made for them: `vllm.v1.core.sched.scheduler.Scheduler` of its CPU build, with prefix caching and
chunked prefill, FCFS, no threshold, nothing asynchronous. No model ran: every sampled token was
`TOKEN`, and only `max_tokens` ended a request. So a plan is a fact about the scheduler alone:

    tokens       request -> tokens scheduled in this step
    cached       request -> computed tokens at its first admission
    preempted    in this step

The pool's size there leaves out the null block. Eviction and preemption are vLLM's of this
configuration: no watermark, no bound on preemptions, no pinned requests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from request import Request, SamplingParams
from scheduler import Scheduler
from scheduler_interface import StepOutput
from scheduler_steps import preempted_ids
from unchunked import ChunkToBudget

RUNS = json.loads(
    (Path(__file__).parents[1] / "testing" / "records" / "vllm_plans.json").read_text("utf-8")
)
TOKEN = 7
SAME_STEP = "workload_same_step"  # one request hits what another computes in that very step
NAMES = [name for name in RUNS if name != SAME_STEP]

Plan = dict[str, Any]


def read_run(name: str) -> dict[str, Any]:
    assert RUNS[name]["vllm"] == "0.32.0"
    return RUNS[name]


def replay(run: dict[str, Any], **options: Any) -> Iterator[Plan]:
    """Yield the plans of chapter 4's scheduler with this run's limits, for as many steps as vLLM
    needed."""
    scheduler = Scheduler(
        max_num_seqs=run["max_num_seqs"],
        max_num_batched_tokens=run["max_num_batched_tokens"],
        num_gpu_blocks=run["num_usable_blocks"] + 1,
        block_size=run["block_size"],
        chunk_policy=ChunkToBudget(),
        watermark=0.0,
        max_preemptions=10**9,
        max_overtakes=None,
        **options,
    )
    for step in range(len(run["plans"])):
        for r in run["requests"]:
            if r["arrival_step"] == step:
                params = SamplingParams(temperature=0, max_tokens=r["max_tokens"], ignore_eos=True)
                scheduler.add_request(Request(r["id"], r["prompt"], params))
        plan = scheduler.schedule()
        cached = {new.req_id: new.num_computed_tokens for new in plan.scheduled_new_reqs}
        facts = {"tokens": dict(plan.num_scheduled_tokens), "cached": cached}
        yield facts | {"preempted": preempted_ids(plan)}
        computed = (r for r in plan.scheduled_requests if r.num_computed_tokens == r.num_tokens)
        sampled = {request.request_id: [TOKEN] for request in computed}
        scheduler.update_from_output(plan, StepOutput(sampled))


@pytest.mark.net
@pytest.mark.parametrize("name", NAMES)
def test_every_step_is_planned_as_vllm_plans_it(name: str) -> None:
    run = read_run(name)
    for reserve, defer in product(("every", "own"), (True, False)):
        options = {"reserve_for_chunks": reserve, "defer_on_shared_prefix": defer}
        for step, ours in enumerate(replay(run, **options)):
            assert ours == run["plans"][step], (step, options)


def test_what_is_computed_in_the_same_step_is_hit_there_and_not_here() -> None:
    """The third rule, as the page shows it. vLLM: r6 finds 40 tokens that r5 computes in the same
    step. Ours passes r6 over, or lets it compute them again."""
    run = read_run(SAME_STEP)
    ways = [run["plans"], list(replay(run)), list(replay(run, defer_on_shared_prefix=False))]
    assert ways[0][:20] == ways[1][:20] == ways[2][:20]
    page = Path(__file__).with_name("VLLM_PLANS.md").read_text(encoding="utf-8")
    for step in range(19, 24):
        cells = []
        for plan in (way[step] for way in ways):
            hits = {name: f" ({num} cached)" for name, num in plan["cached"].items() if num}
            tokens = plan["tokens"].items()
            cells.append(", ".join(f"{name} {num}{hits.get(name, '')}" for name, num in tokens))
        assert f"\n| {step} | {' | '.join(cells)} |\n" in page
