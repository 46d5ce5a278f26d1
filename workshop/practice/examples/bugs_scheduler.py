"""Exhibits of chapter 4: memory runs out, and a request is preempted."""

from __future__ import annotations

from typing import Any

from workshop.practice.examples.example_tools import steps


def make_scheduler(num_blocks: int, **options: Any) -> Any:
    """Make a scheduler with `num_blocks` usable blocks of four positions, without a cache."""
    from block_pool import BlockPool
    from kv_memory import UncachedKVCacheManager
    from scheduler import Scheduler

    return Scheduler(
        kv_memory=UncachedKVCacheManager(BlockPool(num_blocks + 1), 4), watermark=0, **options
    )


def add(scheduler: Any, name: str, num_prompt: int, max_tokens: int = 8, priority: int = 0) -> Any:
    from request import Request

    request = Request.from_tokens(name, [ord(name[0])] * num_prompt, max_tokens, priority)
    scheduler.add_request(request)
    return request


def a_list_that_changes_under_the_loop() -> str:
    scheduler = make_scheduler(6, policy="priority")
    for name, priority in (("v", 9), ("u", 0), ("w", 1)):  # v comes first, and can wait longest
        add(scheduler, name, 5, priority=priority)
        next(steps(scheduler))
    plans = [plan for plan in steps(scheduler, most=4) if "v" not in plan]
    names = sorted(plans[0])
    return f"v, first in the list but least urgent, is preempted; tokens in that step: {names}"


def a_victim_in_the_plan() -> str:
    scheduler = make_scheduler(5, policy="priority", max_num_batched_tokens=12)
    for name, num_prompt, priority in (("v", 3, 5), ("u", 5, 1), ("o", 4, 2)):
        add(scheduler, name, num_prompt, priority=priority)
        next(steps(scheduler))
    plan = scheduler.schedule()
    lost = [request.request_id for request in plan.preempted_requests]
    return f"preempted in this step: {lost}; planned in this step: {plan.num_scheduled_tokens}"


def urgent_and_not_served() -> str:
    scheduler = make_scheduler(40, max_num_seqs=1, policy="priority")
    add(scheduler, "patient", 4, max_tokens=30, priority=9)
    next(steps(scheduler))
    add(scheduler, "urgent", 4, priority=0)
    plans = list(steps(scheduler))
    first = next(number for number, plan in enumerate(plans, 1) if "urgent" in plan)
    return f"max_num_seqs=1, batch full; an urgent request computes its first token in step {first}"


def equals_in_one_seat() -> str:
    scheduler = make_scheduler(40, max_num_seqs=1, policy="priority", max_preemptions=1000)
    for name in ("a", "b"):
        add(scheduler, name, 4, max_tokens=6, priority=1)
    seats = [name for plan in steps(scheduler, most=12) for name in plan]
    return f"two equal priorities, max_num_seqs=1, 12 steps: {' '.join(seats)}"


def what_was_said_before() -> str:
    from scheduler_interface import StepOutput

    scheduler, said = make_scheduler(4), {"a": [], "b": []}
    for name in said:
        add(scheduler, name, 7, max_tokens=8)
    for _ in range(200):
        if not scheduler.has_unfinished_requests():
            break
        plan = scheduler.schedule()
        ready = [r for r in plan.scheduled_requests if r.num_computed_tokens == r.num_tokens]
        # The model counts: each token is its own position.
        output = StepOutput({r.request_id: [r.num_tokens] for r in ready})
        for result in scheduler.update_from_output(plan, output):
            said[result.request_id] += result.new_token_ids
    return f"b was preempted and resumed; its output: {said['b']}"


def back_and_forth() -> str:
    scheduler = make_scheduler(8, max_preemptions=1)
    requests = [add(scheduler, name, 4, max_tokens=24) for name in "abcdef"]
    list(steps(scheduler))
    most = max(request.num_preemptions for request in requests)
    num_recomputed = scheduler.get_stats().total_recomputed_tokens
    return (
        f"max_preemptions=1; most preemptions of a request: {most}\n"
        f"tokens computed again: {num_recomputed}"
    )


def a_seat_for_nobody() -> str:
    scheduler = make_scheduler(8, max_num_seqs=2, policy="priority")
    for name, num_prompt, priority in (("a", 13, 1), ("b", 5, 5)):
        add(scheduler, name, num_prompt, max_tokens=4, priority=priority)
    next(steps(scheduler))
    add(scheduler, "urgent", 20, max_tokens=1, priority=0)
    plan = next(steps(scheduler))
    return f"max_num_seqs=2, urgent does not fit into memory; computed now: {plan}"
