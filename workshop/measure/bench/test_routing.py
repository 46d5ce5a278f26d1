"""The trace as this model can serve it; and the real router in front of two servers."""

from __future__ import annotations

import pytest

from workshop.measure.bench.load import Outcome
from workshop.measure.bench.routing import (
    BLOCK_SIZE,
    POLICIES,
    exit_reason,
    measure_one,
    row,
    scaled,
)
from workshop.measure.prefix_workloads import PrefixWorkload, TraceRequest


def test_prompts_share_what_the_trace_says_and_end_where_it_says() -> None:
    trace = [
        TraceRequest(1000, 1024 + 65, 100, (1, 2, 3)),
        TraceRequest(3000, 1024 + 512, 0, (1, 2, 4)),
        TraceRequest(3000, 1, 100_000, (5,)),
    ]
    first, second, third = scaled(trace, 2.0, 100)
    assert [len(p.prompt) for p in (first, second, third)] == [2 * BLOCK_SIZE + 2, 24, 1]
    assert first.prompt[:16] == second.prompt[:16] and first.prompt[16:] != second.prompt[16:18]
    assert [p.at for p in (first, second, third)] == [0, 1, 1]
    assert [p.max_tokens for p in (first, second, third)] == [7, 1, 64]


def test_those_who_are_lost_are_told_from_those_who_are_not() -> None:
    outcomes = [
        Outcome(0.0, 0.1, 0.2),
        Outcome(0.5, 0.6, 1.1, "the stream broke off"),
        Outcome(0.9, None, 1.2, "status 503"),
        Outcome(0.9, 1.4, 1.5),
        Outcome(1.0, 1.2, 1.3),
    ]
    death = {"killed_at": 1.0, "requests": [outcome.content() for outcome in outcomes]}
    said = exit_reason(death)
    assert "of 5 requests, 3 were in flight. 2 failed, 1 of them after their first token" in said
    assert "of those sent later, 0 failed" in said


def chats() -> list[TraceRequest]:
    """Turns of chats in the form of a trace: each goes on where the one before ended."""
    workload = PrefixWorkload(4096, seed=1)
    sessions = workload.chats(6, 5, 1, 1, 1)
    turns: dict[int, list[int]] = {}
    requests = []
    for i, request in enumerate(workload.arrive(sessions)):
        chat = next(c for c, session in enumerate(sessions) if request in session)
        ids = turns.setdefault(chat, [])
        ids += range(1000 * chat + len(ids), 1000 * chat + len(ids) + 4)
        requests.append(TraceRequest(400 * i, 512 * len(ids), 64, tuple(ids)))
    return requests


@pytest.mark.slow
@pytest.mark.needs("vllm-router")
def test_who_looks_at_prefixes_finds_more_of_them_than_who_takes_turns() -> None:
    requests = scaled(chats(), 1.0, 4096)
    found = {policy: measure_one(policy, requests, 2000) for policy in POLICIES}
    hits = {}
    for policy, one in found.items():
        assert all(outcome["error"] is None for outcome in one["requests"])
        assert sum(server["requests"] for server in one["servers"]) == len(requests)
        hits[policy] = sum(server["prefix_cache_hits"] for server in one["servers"])
        assert row(policy, one)["failed"] == "0"
    assert hits["round_robin"] < min(hits["cache_aware"], hits["kv_aware"])
    counted = found["kv_aware"]["router"]["vllm_router_kv_placement_lookups_total"]
    assert counted['result="hit"'] > 0
    decided = found["cache_aware"]["router"]["vllm_router_prefix_routing_decisions_total"]
    assert sum(count for how, count in decided.items() if 'outcome="prefix_hit"' in how) > 0
