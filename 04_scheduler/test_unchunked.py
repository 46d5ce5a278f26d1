"""Calls of both schedulers to a chunk policy, and their use of its answers. Chapter 6 has the
policies that chunk."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection

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


@pytest.mark.parametrize("num_uncomputed_tokens", [1, 7, 8, 9, 20])
@pytest.mark.parametrize("budget", [1, 7, 8])
@pytest.mark.parametrize("has_begun", [False, True])
def test_a_whole_prompt_waits_until_it_fits_unless_no_step_is_large_enough(
    num_uncomputed_tokens, budget, has_begun
):
    request = make("a", 30)
    request.num_computed_tokens = int(has_begun)
    given = Unchunked().num_tokens_to_schedule(
        request, num_uncomputed_tokens, budget, max_step_tokens=8
    )
    if num_uncomputed_tokens <= budget:
        assert given == num_uncomputed_tokens
    else:
        assert given == (budget if has_begun or num_uncomputed_tokens > 8 else 0)
    assert Unchunked().max_prompt_len(8) == 8
    assert Unchunked().can_start(request, 1000)


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


def test_the_prefill_first_scheduler_rounds_the_policys_answer_to_whole_pages():
    policy = AtMost(11)
    scheduler = PrefillFirstScheduler(
        chunk_policy=policy,
        chunked_prefill_size=32,
        max_num_batched_tokens=64,
        kv_memory=make_kv_memory(40, 4),
    )
    scheduler.add_request(make("long", 30, 1))
    assert [step(scheduler)["long"] for _ in range(4)] == [8, 8, 8, 6]


def test_a_cut_prompt_is_admitted_only_if_all_of_it_will_find_room():
    """With room for its first piece only it would be preempted in the middle, for nothing."""
    policy = AtMost(8)
    memory = make_kv_memory(1 + 12, 4)
    scheduler = Scheduler(kv_memory=memory, chunk_policy=policy, watermark=0)
    scheduler.add_request(make("a", 8, 3))  # two blocks, and a third one soon
    step(scheduler)
    scheduler.add_request(Request.from_tokens("long", list(range(50, 90)), max_new_tokens=2))
    assert step(scheduler) == {"a": 1}  # nine are left of ten
    scheduler.abort_request("a")
    assert step(scheduler) == {"long": 8}
    scheduler.add_request(Request.from_tokens("c", list(range(120, 127)), max_new_tokens=1))
    assert step(scheduler) == {"long": 8, "c": 7}  # ten of the twelve are promised, two are not
    assert memory.num_blocks_in_use == 4
    scheduler.add_request(Request.from_tokens("b", list(range(100, 116)), max_new_tokens=1))
    assert [step(scheduler).get("b") for _ in range(6)] == [None, None, None, None, 8, 8]
    assert scheduler.get_stats().total_preempted == 0


def test_no_blocks_are_reserved_for_a_displaced_prompt():
    """14 blocks. After two steps a has 2 and low 4, with 6 more to come. The newcomer needs 10 in
    all; 8 are free, and low's 4."""
    memory = make_kv_memory(1 + 14, 4)
    options = {"max_num_seqs": 2, "policy": "priority", "watermark": 0}
    scheduler = Scheduler(kv_memory=memory, chunk_policy=AtMost(8), **options)
    scheduler.add_request(Request.from_tokens("a", [1, 2, 3, 4], 5, priority=1))
    scheduler.add_request(Request.from_tokens("low", list(range(50, 90)), 2, priority=5))
    assert step(scheduler) == {"a": 4, "low": 8}
    scheduler.add_request(Request.from_tokens("urgent", list(range(100, 140)), 1, priority=0))
    assert step(scheduler) == {"a": 1, "urgent": 8}


def test_blocks_stay_reserved_for_a_prompt_beside_the_displaced_one():
    """In the second step, a has 4 of 14 blocks, and 2 are reserved for it. With the 2 of low, 8 are
    left, and the newcomer needs 9."""
    options = {"max_num_seqs": 2, "policy": "priority", "watermark": 0}
    scheduler = Scheduler(kv_memory=make_kv_memory(1 + 14, 4), chunk_policy=AtMost(8), **options)
    scheduler.add_request(Request.from_tokens("a", list(range(24)), 5, priority=1))
    scheduler.add_request(Request.from_tokens("low", [50, 51, 52, 53], 5, priority=5))
    assert step(scheduler) == {"a": 8, "low": 4}
    scheduler.add_request(Request.from_tokens("urgent", list(range(100, 133)), 1, priority=0))
    assert step(scheduler) == {"a": 8, "low": 1}


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
