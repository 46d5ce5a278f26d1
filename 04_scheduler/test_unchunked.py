"""Calls of both schedulers to a chunk policy, and their use of its answers. Chapter 6 has the
policies that chunk."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from itertools import product

import pytest

from prefill_first_scheduler import PrefillFirstScheduler
from request import Request
from scheduler import Scheduler, make_kv_memory
from scheduler_interface import StepOutput
from unchunked import Unchunked

KINDS = (Scheduler, PrefillFirstScheduler)


class AtMost(Unchunked):
    """At most `max_chunk_tokens` of any prompt in a step; the named requests are held back."""

    def __init__(self, max_chunk_tokens: int, held_back: Collection[str] = ()) -> None:
        self.max_chunk_tokens = max_chunk_tokens
        self.held_back = set(held_back)
        self.begun: list[set[str]] = []
        self.queries: list[tuple[str, int]] = []

    def max_prompt_len(self, max_num_batched_tokens: int) -> int:
        return sys.maxsize

    def begin_step(
        self, running: Collection[Request], num_uncomputed_tokens: Callable[[Request], int]
    ) -> None:
        assert all(
            num_uncomputed_tokens(r) == r.num_tokens - r.num_computed_tokens for r in running
        )
        self.begun.append({request.request_id for request in running})

    def can_start(self, request: Request, num_uncomputed_tokens: int) -> bool:
        self.queries.append((request.request_id, num_uncomputed_tokens))
        return request.request_id not in self.held_back

    def num_tokens_to_schedule(
        self, request: Request, num_uncomputed_tokens: int, budget: int, max_step_tokens: int
    ) -> int:
        return min(num_uncomputed_tokens, budget, self.max_chunk_tokens)


def make(name: str, num_prompt: int, num_outputs: int = 5) -> Request:
    return Request.from_tokens(name, list(range(num_prompt)), max_new_tokens=num_outputs)


def step(scheduler) -> dict[str, int]:
    output = scheduler.schedule()
    tokens = {
        r.request_id: [9]
        for r in output.scheduled_requests
        if r.num_computed_tokens == r.num_tokens
    }
    scheduler.update_from_output(output, StepOutput(tokens))
    scheduler.check_invariants()
    return output.num_scheduled_tokens


def test_a_whole_prompt_waits_until_it_fits_unless_no_step_is_large_enough():
    policy, request = Unchunked(), make("a", 30)
    for num_uncomputed, budget, num_computed in product((1, 7, 8, 9, 20), (1, 7, 8), (0, 1)):
        request.num_computed_tokens = num_computed
        given = policy.num_tokens_to_schedule(request, num_uncomputed, budget, max_step_tokens=8)
        expected = budget if num_computed or num_uncomputed > 8 else 0
        if num_uncomputed <= budget:
            expected = num_uncomputed
        assert given == expected, (num_uncomputed, budget, num_computed)
    assert policy.max_prompt_len(8) == 8 and policy.can_start(request, 1000)


@pytest.mark.parametrize(
    ("kind", "options", "beside"),
    [
        (Scheduler, {}, [set(), {"a"}, {"a", "b"}]),
        (PrefillFirstScheduler, {"mixing": True}, [set(), {"a"}, {"a", "b"}]),
        (PrefillFirstScheduler, {}, [set(), set(), set()]),  # who decodes is in no prefill
    ],
)
def test_the_policy_gets_every_step_and_the_requests_that_can_share_it(kind, options, beside):
    policy = AtMost(50)
    scheduler = kind(chunk_policy=policy, max_num_batched_tokens=64, **options)
    scheduler.add_request(make("a", 4))
    step(scheduler)
    scheduler.add_request(make("b", 4))
    step(scheduler)
    step(scheduler)
    assert policy.begun == beside
    assert policy.queries == [("a", 4), ("b", 4)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_held_back_request_is_skipped_and_keeps_nothing(kind):
    memory = make_kv_memory(40, 4)
    policy = AtMost(50, held_back="x")
    scheduler = kind(kv_memory=memory, chunk_policy=policy, max_num_batched_tokens=64)
    prompt = list(range(12))
    scheduler.add_request(Request.from_tokens("first", prompt, max_new_tokens=1))
    step(scheduler)  # its blocks are in the cache: x's look-up touches them
    scheduler.add_request(Request.from_tokens("x", [*prompt, 1, 2], max_new_tokens=2))
    scheduler.add_request(Request.from_tokens("y", [30, 31, 32, 33, 34], max_new_tokens=1))
    assert step(scheduler) == {"y": 5}
    assert ("x", 2) in policy.queries
    assert memory.num_blocks_in_use == 0
    assert scheduler.requests["x"].num_computed_tokens == 0
    policy.held_back.clear()
    assert step(scheduler) == {"x": 2}


def test_a_chunk_leaves_a_token_for_each_decode_after_it():
    policy = AtMost(6)
    scheduler = Scheduler(chunk_policy=policy, max_num_batched_tokens=9)
    scheduler.add_request(make("long", 40))
    for name in "abc":
        scheduler.add_request(make(name, 1, 30))
    assert step(scheduler) == {"long": 6, "a": 1, "b": 1, "c": 1}
    policy.max_chunk_tokens = 100
    assert step(scheduler) == {"long": 6, "a": 1, "b": 1, "c": 1}
    scheduler.abort_request("a")
    assert step(scheduler) == {"long": 7, "b": 1, "c": 1}


def test_two_chunks_leave_tokens_for_the_same_ones_and_the_first_always_goes_on():
    policy = AtMost(2)
    scheduler = Scheduler(chunk_policy=policy, max_num_batched_tokens=7)
    for name in ("long0", "long1"):
        scheduler.add_request(make(name, 40))
    for name in "abc":
        scheduler.add_request(make(name, 1, 30))
    assert step(scheduler) == {"long0": 2, "long1": 2, "a": 1, "b": 1, "c": 1}
    policy.max_chunk_tokens = 100
    assert step(scheduler) == {"long0": 4, "a": 1, "b": 1, "c": 1}
    scheduler.max_num_batched_tokens = 3  # fewer than there are requests
    assert step(scheduler) == {"long0": 1, "a": 1, "b": 1}


@pytest.mark.parametrize("kind", KINDS)
def test_admission_stops_at_a_request_held_back_too_long(kind):
    """Requests age when others leave the queue: in the second step here."""
    policy = AtMost(50, held_back="x")
    scheduler = kind(chunk_policy=policy, max_num_batched_tokens=64, max_overtakes=2)
    for name in ("x", "y0", "y1"):
        scheduler.add_request(make(name, 5, 1))
    assert step(scheduler).keys() == {"y0", "y1"}
    scheduler.add_request(make("late", 5, 1))
    assert step(scheduler) == {}
    policy.held_back.clear()
    assert step(scheduler).keys() == {"x", "late"}
