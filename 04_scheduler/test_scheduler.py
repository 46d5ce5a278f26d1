"""Decisions of the two-phase scheduler, case by case. Whole runs are in test_scheduler_runs.py."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from adapter_limit import MaxLoRAs
from base_scheduler import SchedulerPlugin
from bounded_loops import as_long_as
from fake_model import continuation
from forced_preemption import ForcedPreemption
from kv_memory import NotReady
from preemptive_scheduler import PreemptionPlugin
from prefill_first_scheduler import PrefillFirstScheduler
from scheduler import (
    MAX_SKIPPED,
    Request,
    RequestStatus,
    Scheduler,
    make_kv_memory,
)
from scheduler_interface import StepOutput
from scheduler_steps import (
    SchedulerLoop,
    make_memory,
    make_scheduler,
    preempted_ids,
    preempting,
    scheduled_tokens,
)
from sglang_policies import policy_over
from step_plan import StepPlan
from unchunked import ChunkToBudget

SCHEDULERS = (Scheduler, PrefillFirstScheduler)


class Loop(SchedulerLoop):
    """Block size 4, no cache, unless it is told otherwise."""

    def __init__(
        self,
        num_blocks: int,
        kind: type = Scheduler,
        *,
        block_size: int = 4,
        cache: str | None = None,
        **options,
    ):
        options.setdefault("kv_memory", make_memory(cache, num_blocks, block_size))
        if kind is Scheduler:
            options.setdefault("watermark", 0.0)
        super().__init__(make_scheduler(kind, **options))


# -- as a reader types it


def test_the_names_of_the_reading_material_work_as_typed():
    scheduler = Scheduler(
        max_num_seqs=4, max_num_batched_tokens=64, num_gpu_blocks=100, policy="fcfs"
    )
    request = Request.from_tokens("a", list(range(20)), max_new_tokens=2, priority=0)
    assert (request.seq_len, request.remaining_tokens, request.num_blocks_needed) == (20, 20, 2)
    scheduler.add_request(request)
    scheduler.add_request(Request.from_tokens("b", list(range(100, 130)), max_new_tokens=2))
    output = scheduler.schedule()
    assert [r.request_id for r in output.scheduled_requests] == ["a", "b"]
    assert output.num_scheduled_tokens == {"a": 20, "b": 30}
    assert (output.preempted_requests, output.total_tokens) == ([], 50)
    scheduler.update_from_output(output, StepOutput({"a": [7], "b": [8]}))
    assert (request.seq_len, request.remaining_tokens) == (21, 1)
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {"a": 1, "b": 1}
    scheduler.abort_request("b")
    scheduler.update_from_output(output, StepOutput({"a": [7], "b": [8]}))
    assert request.is_finished and not scheduler.has_requests()
    stats = scheduler.get_stats()
    assert (stats.total_scheduled, stats.total_finished, stats.total_preempted) == (4, 1, 0)
    assert (stats["num_waiting"], stats["num_running"], stats.total_aborted) == (0, 0, 1)
    assert stats.kv_cache_usage == 0.0
    assert scheduler.kv_memory.reset_prefix_cache()


def test_a_request_made_as_in_the_reading_material_is_refused_with_the_right_call():
    with pytest.raises(ValueError, match=r"sampling_params must .*Request\.from_tokens\(") as error:
        Request("a", [1, 2, 3], 10)
    assert "AttributeError" not in str(error.value)
    with pytest.raises(ValueError, match="request must be a Request, got 'a'"):
        Scheduler().add_request("a")


@pytest.mark.parametrize("kind", SCHEDULERS)
@pytest.mark.parametrize(
    "options",
    [
        {"preempt_every": 0},
        {"max_num_seqs": 0},
        {"max_num_seqs": 2.5},
        {"max_num_batched_tokens": 0},
        {"max_preemptions": 0},
        {"max_model_len": 0},
        {"policy": "fastest"},
    ],
)
def test_options_that_make_no_sense_are_named(kind, options):
    (name,) = options
    with pytest.raises(ValueError, match=name):
        make_scheduler(kind, **options)


@pytest.mark.parametrize("watermark", [1.0, -0.1])
def test_a_watermark_that_is_no_share_is_an_error(watermark):
    with pytest.raises(ValueError, match="watermark"):
        Scheduler(watermark=watermark)


# -- phase 1


@pytest.mark.parametrize(
    ("options", "stop"),
    [
        ({"max_num_seqs": 1}, ("seat", "")),
        ({"max_num_seqs": 2}, ("seat", "c")),
        ({"max_num_batched_tokens": 12}, ("budget", "c")),
        ({"max_num_batched_tokens": 8}, ("budget", "b")),
        ({"num_blocks": 4}, ("blocks", "c")),
        ({}, None),
    ],
)
def test_a_plan_names_the_limit_and_the_request_that_ended_admission(options, stop):
    """a runs; b takes 8 tokens and 2 blocks, and so does c after it."""
    loop = Loop(**{"num_blocks": 100, **options})
    loop.add("a", 2)
    assert loop.step().admission_stop is None, "all were asked"
    loop.add("b", 8)
    loop.add("c", 8)
    assert loop.step().admission_stop == stop


def test_who_takes_a_seat_and_who_is_held_back_too_long_end_admission_too():
    loop = full_batch(100, (4, 8), (4, 8))
    loop.add("urgent", 4, priority=0)
    assert loop.step().admission_stop == ("admitted", "urgent")
    loop = Loop(100, plugins=[MaxLoRAs(1)], max_overtakes=0)
    for name, adapter in (("a", 1), ("b", 2), ("c", 1)):
        loop.add(name, 4, extra_keys=(("lora", adapter),))
    output = loop.step()
    assert output.admission_stop == ("constraint", "b") and scheduled_tokens(output) == {"a": 4}


def test_a_prompt_waits_until_it_fits_whole_and_nobody_overtakes_it():
    loop = Loop(100, max_num_batched_tokens=10)
    loop.add("a", 6)
    loop.add("b", 10)
    loop.add("c", 1)
    assert scheduled_tokens(loop.step()) == {"a": 6}
    assert scheduled_tokens(loop.step()) == {"a": 1}


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_max_num_seqs_counts_the_requests_just_admitted(kind):
    """Trap 17, and trap 23: a waiting request does not count against `max_num_seqs`."""
    loop = Loop(100, kind, max_num_seqs=2)
    for name in "abcde":
        loop.add(name, 3, 2)
    assert list(scheduled_tokens(loop.step())) == ["a", "b"]
    loop.run()
    assert set(loop.reasons) == set("abcde")


def test_memory_is_filled_and_not_reserved():
    """Three may each grow to 4 blocks, and 3 blocks suffice to admit all of them."""
    reserving = Loop(6, reserve_all=True)
    filling = Loop(6)
    for loop in (reserving, filling):
        for name in "abc":
            loop.add(name, 4, 12)
        loop.step()
    assert len(reserving.scheduler.running) == 1
    assert len(filling.scheduler.running) == 3


def test_the_last_admitted_makes_room_and_comes_back_with_its_outputs():
    preempted: list[tuple[str, int]] = []

    class Noting(PreemptionPlugin):
        def on_preempt(self, request: Request) -> None:
            num_blocks = len(self.scheduler.kv_memory.get_block_ids(request.request_id))
            preempted.append((request.request_id, num_blocks))

    loop = Loop(4, plugins=[Noting()])
    first, second = loop.add("a", 7, 8), loop.add("b", 7, 8)
    loop.step()  # 7 positions each: two blocks each
    loop.step()  # 8 positions: the blocks are full
    output = loop.step()
    assert preempted_ids(output) == ["b"] and scheduled_tokens(output) == {"a": 1}
    assert preempted == [("b", 2)], "while it has its memory"
    assert second.status == RequestStatus.PREEMPTED and second.num_computed_tokens == 0
    assert second.num_preemptions == 1 and second.num_output_tokens == 2
    stats = loop.scheduler.get_stats()
    assert (stats.num_preempted, stats.total_preempted, output.num_kv_blocks_in_use) == (1, 1, 3)
    assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (1, 1, 0.75)
    loop.run()
    for request in (first, second):
        expected = continuation(request.prompt_token_ids, 8)
        assert loop.outputs[request.request_id] == expected


def test_who_makes_room_for_itself_is_not_running_as_well():
    loop = Loop(5)
    loop.add("a", 8, 8)
    loop.add("b", 8, 8)
    loop.step()
    loop.add("c", 1, 1)
    output = loop.step()  # a takes the last block; no request is after b
    assert preempted_ids(output) == ["b"] and scheduled_tokens(output) == {"a": 1}
    assert list(loop.scheduler.running) == ["a"]
    assert [r.request_id for r in loop.scheduler.waiting] == ["b", "c"], "in front of c"


def test_a_victim_in_front_of_others_costs_none_of_them_its_token():
    """Trap 20: the victim leaves the list while it is walked through. v is first, so every request
    after it moves up."""
    loop = Loop(6, policy="priority")
    for name, priority in (("v", 9), ("u", 0), ("w", 1)):
        loop.add(name, 5, 8, priority=priority)
        loop.step()
    assert list(loop.scheduler.running) == ["v", "u", "w"]
    output = loop.step()
    for _ in as_long_as(lambda: not preempted_ids(output)):
        output = loop.step()
    assert preempted_ids(output) == ["v"]
    assert scheduled_tokens(output) == {"u": 1, "w": 1}
    loop.run()


def test_a_victim_that_was_planned_gives_everything_back():
    """Trap 21: budget, blocks and its entry in the plan."""
    loop = Loop(5, policy="priority", max_num_batched_tokens=12)
    victim = loop.add("v", 3, 8, priority=5)  # admitted first, least urgent
    loop.step()
    urgent = loop.add("u", 5, 8, priority=1)
    loop.step()
    other = loop.add("o", 4, 8, priority=2)
    assert scheduled_tokens(loop.step()) == {"v": 1, "u": 1, "o": 4}  # 2 + 2 + 1 blocks, all held
    output = loop.scheduler.schedule()  # v has room inside its block; o wants another block
    assert preempted_ids(output) == ["v"]
    assert output.num_scheduled_tokens == {"u": 1, "o": 1}
    assert victim.status == RequestStatus.PREEMPTED
    assert list(loop.scheduler.running) == ["u", "o"]
    assert [r.request_id for r in output.scheduled_requests] == ["u", "o"]
    assert "v" not in output.scheduled_cached_reqs.req_ids
    assert loop.scheduler.get_stats().total_scheduled_tokens == 3 + (1 + 5) + (1 + 1 + 4) + 2
    assert urgent.num_computed_tokens == 7 and other.num_computed_tokens == 5


def test_nobody_is_admitted_in_a_step_that_preempted():
    loop = Loop(4)
    loop.add("a", 7, 8)
    loop.add("b", 7, 8)
    loop.step()
    loop.step()
    loop.add("c", 1, 1)  # would fit the block that b gives up
    output = loop.step()
    assert preempted_ids(output) == ["b"] and scheduled_tokens(output) == {"a": 1}


def test_what_came_back_may_be_larger_than_any_step():
    """Trap 24: prompt and outputs are computed again, in as many steps as it takes."""
    loop = Loop(6, max_num_batched_tokens=9)
    loop.add("a", 8, 15)
    second = loop.add("b", 8, 16)
    for _ in as_long_as(lambda: not second.num_preemptions):
        loop.step()
    assert second.num_tokens > 9
    loop.run()
    for request_id, length in (("a", 15), ("b", 16)):
        prompt = [ord(request_id), *range(7)]
        assert loop.outputs[request_id] == continuation(prompt, length)


def test_a_step_that_is_not_the_last_of_a_prompt_samples_nothing():
    loop = Loop(6, max_num_batched_tokens=8)
    request = loop.add("a", 8, 8)
    for _ in range(4):
        loop.step()
    with preempting(loop.scheduler):
        loop.step()
    assert request.num_tokens == 12
    assert scheduled_tokens(loop.step()) == {"a": 8} and request.num_output_tokens == 4
    assert scheduled_tokens(loop.step()) == {"a": 4} and request.num_output_tokens == 5


def test_forced_preemption_hits_a_request_with_a_token_every_so_many_steps():
    loop = Loop(100, preempt_every=3, max_preemptions=9)
    loop.add("a", 4, 30)
    loop.add("b", 4, 30)
    steps = [preempted_ids(loop.step()) for _ in range(12)]
    assert steps == [[], [], ["b"]] * 4, "b comes back, and gets a token"
    loop = Loop(100, preempt_every=1)
    loop.add("a", 4, 3)
    assert [preempted_ids(loop.step()) for _ in range(5)] == [[], ["a"], [], ["a"], []]
    assert loop.scheduler.plugins[0]._num_outputs_then == {}


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_shuffled_queue_is_asked_in_another_order(kind):
    def admitted(seed: int, shuffle: bool = True) -> str:
        loop = Loop(100, kind, max_num_seqs=8, shuffle_waiting=shuffle, seed=seed)
        for name in "abcdefgh":
            loop.add(name, 2, 2)
        return "".join(scheduled_tokens(loop.step()))

    assert admitted(0, shuffle=False) == "abcdefgh"
    orders = [admitted(seed) for seed in range(4)]
    assert all(sorted(order) == list("abcdefgh") for order in orders)
    assert len(set(orders)) == 4 and admitted(3) == orders[3]


# -- the bound on preemption


def test_nobody_is_preempted_more_often_than_allowed():
    for max_preemptions in (1, 2, 3):
        loop = Loop(10, max_preemptions=max_preemptions, policy="priority")
        requests = [loop.add(name, 4, 24, priority=9) for name in "ab"]
        for name in "cdefghijklmnop":
            requests.append(loop.add(name, 4, 16))
            for _ in range(8):
                loop.step()
        loop.run()
        assert max(r.num_preemptions for r in requests[:2]) == max_preemptions
        for request in requests:
            expected = continuation(request.prompt_token_ids, request.max_tokens)
            assert loop.outputs[request.request_id] == expected


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_equals_preempt_without_a_bound(policy):
    """None is pinned: memory for all of `max_tokens` would be idle."""
    loop = Loop(8, max_preemptions=1, policy=policy)
    priorities = range(6) if policy == "fcfs" else [9] * 6
    requests = [loop.add(f"{i}", 4, 24, priority=p) for i, p in enumerate(priorities)]
    for _ in as_long_as(loop.scheduler.has_unfinished_requests):
        assert not any(loop.scheduler.is_pinned(request) for request in requests)
        loop.step()
    assert max(r.num_preemptions for r in requests) > 1


def test_a_pinned_request_gets_everything_at_admission():
    loop = Loop(7, max_preemptions=1)
    request = loop.add("a", 4, 17)
    loop.step()
    with preempting(loop.scheduler):
        loop.step()
    loop.step()
    assert loop.scheduler.is_pinned(request)
    assert len(loop.scheduler.kv_memory.get_block_ids("a")) == 5  # 4 + 17 - 1 positions


# -- admission control


def test_the_watermark_is_left_free_for_running_requests_if_there_are_any():
    loop = Loop(10, watermark=0.2)
    loop.add("a", 16)
    loop.add("b", 16)  # 4 + 4 blocks: 2 are left
    loop.add("c", 4)  # 1 would be left
    assert list(scheduled_tokens(loop.step())) == ["a", "b"]
    loop = Loop(10, watermark=0.5)
    loop.add("a", 39, 2)
    loop.run()
    assert loop.reasons == {"a": "length"}


@pytest.mark.parametrize("rule, admitted", [("every", ["a", "b"]), ("own", ["a", "b", "c"])])
def test_blocks_are_reserved_for_the_rest_of_every_chunked_prompt_or_only_its_own(rule, admitted):
    """a has 2 of 4 blocks, b 1 of 4; c needs 2 of the 9. For b and c there is room only if the
    blocks that a and b still need are not counted."""
    chunks = ChunkToBudget()
    chunks.num_tokens_to_schedule = lambda _, num_uncomputed_tokens, budget, max_step_tokens: min(
        num_uncomputed_tokens, budget, 8
    )
    loop = Loop(9, max_num_batched_tokens=20, chunk_policy=chunks, reserve_for_chunks=rule)
    for name, length in (("a", 16), ("b", 16), ("c", 8)):
        loop.add(name, length)
    assert list(loop.schedule().num_scheduled_tokens) == admitted
    with pytest.raises(ValueError, match=r"reserve_for_chunks must .*'all'"):
        Scheduler(reserve_for_chunks="all")


def test_a_prompt_that_is_cut_needs_no_more_blocks_than_it_has():
    """10 positions in 3 blocks of 4, 5 of them now: 2 blocks and 2 for the other 5 would be 4."""
    loop = Loop(5, max_num_batched_tokens=6, chunk_policy=ChunkToBudget())
    loop.add("a", 5)
    loop.step()
    loop.add("b", 10)
    assert loop.schedule().num_scheduled_tokens == {"a": 1, "b": 5}


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_request_that_can_never_run_is_refused_and_changes_nothing(kind):
    """Trap 16."""
    loop = Loop(4, kind, max_num_batched_tokens=20, max_model_len=30)
    cases = {"r" * 2: 17, "s" * 2: 21}
    for name, num_prompt in cases.items():
        with pytest.raises(ValueError, match=f"{name}.*prompt has {num_prompt} tokens"):
            loop.add(name, num_prompt)
    with pytest.raises(ValueError, match="max_model_len=30"):
        Loop(100, kind, max_model_len=30).add("a", 30)
    loop.add("a", 16, 1)
    with pytest.raises(ValueError, match="request_id must be unique, got 'a'"):
        loop.add("a", 3)
    assert list(loop.scheduler.requests) == ["a"]
    loop.run()
    assert len(loop.outputs["a"]) == 1


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_request_that_outgrows_the_pool_ends_with_a_reason(kind):
    """Trap 16: with 16 positions there are 4 tokens behind a prompt of 13, and the last of them
    needs no slot."""
    loop = Loop(4, kind)
    request = loop.add("a", 13, 50)
    results = []
    for _ in as_long_as(loop.scheduler.has_unfinished_requests):
        output = loop.scheduler.schedule()
        results += loop.scheduler.update_from_output(output, loop.runner.execute(output).wait())
    assert sum(len(r.new_token_ids) for r in results) == 4
    assert results[-1].finish_reason == "length"
    assert results[-1].finish_detail == "the KV memory holds 16 positions"
    assert request.num_preemptions == 0
    short = loop.add("b", 13, 4)
    assert short.length_limit is None
    bounded = Loop(4, kind, max_model_len=15).add("c", 13, 50)
    assert (bounded.max_tokens, bounded.length_limit) == (2, "max_model_len=15")


# -- priorities


def test_a_strictly_more_urgent_newcomer_takes_a_seat_and_an_equal_does_not():
    """Trap 22."""
    loop = Loop(100, max_num_seqs=2, policy="priority")
    loop.add("a", 4, priority=1)
    lowest = loop.add("b", 4, priority=5)
    loop.step()
    loop.add("equal", 8, priority=5)
    assert preempted_ids(loop.step()) == []
    loop.add("urgent", 8, priority=2)
    output = loop.step()
    assert preempted_ids(output) == ["b"] and scheduled_tokens(output) == {"a": 1, "urgent": 8}
    assert lowest.num_computed_tokens == 0
    assert [r.request_id for r in loop.scheduler.waiting] == ["b", "equal"], "b came first"
    loop.run()
    for name in ("a", "b", "equal", "urgent"):
        assert len(loop.outputs[name]) == 8


def full_batch(num_blocks: int, *sizes: tuple[int, int], **options) -> Loop:
    """a and b, which is less urgent, fill `max_num_seqs=2`. `sizes`: prompt and outputs of each."""
    loop = Loop(num_blocks, max_num_seqs=2, policy="priority", **options)
    for name, priority, size in zip("ab", (1, 5), sizes, strict=True):
        loop.add(name, *size, priority=priority)
    loop.step()
    return loop


@pytest.mark.parametrize(
    ("num_prompt", "plan"), [(10, {"a": 1, "b": 1}), (9, {"a": 1, "urgent": 9})]
)
def test_the_new_request_gets_the_budget_of_its_victim_and_no_more(num_prompt, plan):
    """8 of 10 tokens remain beside a and b, and 9 without b. With too few, b keeps running."""
    loop = full_batch(100, (4, 8), (4, 8), max_num_batched_tokens=10)
    loop.add("urgent", num_prompt, priority=0)
    assert scheduled_tokens(loop.step()) == plan


@pytest.mark.parametrize("cache", [None, "hash"])
def test_nobody_is_displaced_for_a_newcomer_that_does_not_fit_the_memory(cache):
    """Trap 60: 8 blocks, of which a has 4, b has 2, and 2 are free. The newcomer wants 5."""
    loop = full_batch(8, (13, 4), (5, 4), cache=cache)
    loop.add("urgent", 20, 1, priority=0)
    output = loop.step()
    assert preempted_ids(output) == [] and scheduled_tokens(output) == {"a": 1, "b": 1}
    for _ in range(2):
        assert set(scheduled_tokens(loop.step())) == {"a", "b"}
    assert set(scheduled_tokens(loop.step())) == {"urgent"}, "when a and b have ended"


def test_nobody_is_displaced_for_memory_or_budget_if_the_batch_has_room():
    """6 blocks: a and b have 2 each, and 2 are free. Without b, 4 blocks would be free, and there
    would be budget for 10 tokens."""
    for num_prompt, max_num_batched_tokens in ((16, 100), (10, 11)):
        loop = Loop(6, max_num_batched_tokens=max_num_batched_tokens, policy="priority")
        for name, priority in (("a", 0), ("b", 1)):
            loop.add(name, 5, 3, priority=priority)
        loop.step()
        loop.add("urgent", num_prompt, 1, priority=0)
        assert scheduled_tokens(loop.step()) == {"a": 1, "b": 1}
        loop.run()


def test_shared_blocks_of_the_victim_are_not_counted_as_freed():
    """7 blocks: a and b share 2, have 1 each of their own, and 3 are free."""
    loop = Loop(7, max_num_seqs=2, policy="priority", cache="hash")
    for name, priority in (("a", 1), ("b", 5)):
        loop.take(Request.from_tokens(name, [*[7] * 8, ord(name)], 8, priority))
        loop.step()
    assert len(loop.scheduler.running) == 2 and loop.memory.num_blocks_in_use == 4
    loop.add("urgent", 20, 1, priority=0)  # 5 blocks: 3 are free, and 1 is b's alone
    assert preempted_ids(loop.step()) == []
    loop.scheduler.abort_request("urgent")
    loop.add("modest", 16, 1, priority=0)
    assert preempted_ids(loop.step()) == ["b"]


@pytest.mark.parametrize(("num_prompt", "victims"), [(20, ["b"]), (21, [])])
def test_cached_blocks_of_the_new_request_are_not_also_evicted_for_it(num_prompt, victims):
    """6 blocks: a has 1, b has 3, and 2 are free. The newcomer finds b's first 2 cached, so 3 are
    left for the rest of it."""
    loop = Loop(6, max_num_seqs=2, policy="priority", cache="hash")
    loop.add("a", 1, 4, priority=0)
    for name, num_optional, priority in (("b", 1, 5), ("u", num_prompt - 8, 1)):
        loop.take(Request.from_tokens(name, [*range(8)] + [ord(name)] * num_optional, 4, priority))
        output = loop.step()
    assert preempted_ids(output) == victims
    loop.run()


def test_a_pinned_request_is_not_displaced():
    loop = Loop(100, max_num_seqs=1, max_preemptions=1, policy="priority")
    loop.add("a", 4, 20, priority=5)
    loop.step()
    loop.add("u", 4, 1, priority=0)
    assert preempted_ids(loop.step()) == ["a"]
    for _ in as_long_as(lambda: "a" not in loop.scheduler.running):
        loop.step()
    loop.add("w", 4, 1, priority=0)
    assert preempted_ids(loop.step()) == []
    loop.run()


def test_the_victim_is_the_least_urgent_and_of_those_the_latest():
    loop = Loop(9, policy="priority")
    for name, priority in (("a", 3), ("b", 7), ("c", 7), ("d", 1)):
        loop.add(name, 7, 20, priority=priority)
    victims = []
    for _ in as_long_as(lambda: not victims):
        victims = preempted_ids(loop.step())
    assert victims[0] == "c"


@pytest.mark.parametrize(("policy", "order"), [("fcfs", "dcba"), ("priority", "bcda")])
def test_requests_make_room_in_their_order_and_who_is_spared_does_not(policy, order):
    loop = Loop(20, policy=policy)
    for name, priority, time in (("a", 1, 0.0), ("b", 9, 5.0), ("c", 9, 2.0), ("d", 1, 1.0)):
        # The last has computed most.
        loop.add(name, 3 + 9 * (name == "d"), 20, priority=priority).arrival_time = time
        loop.step()
    exclude = []
    for _ in order:
        exclude.append(loop.scheduler._choose_victim(exclude))
    assert [request.request_id for request in exclude] == list(order)
    assert loop.scheduler._choose_victim(exclude) is None
    loop.scheduler._num_displacements[order[0]] = loop.scheduler.max_preemptions
    assert loop.scheduler._choose_victim() is exclude[1], "the first is pinned"


def test_as_many_positions_get_room_as_are_asked_for():
    loop = Loop(20)
    request = loop.add("a", 7, 20)
    loop.step()
    for num_tokens, num_blocks in ((1, 2), (2, 3), (6, 4)):  # of 4 positions, for 7 and these
        step = StepPlan(6, lambda one: 6)
        assert loop.scheduler._allocate_or_preempt(request, num_tokens, 0, step) == num_tokens
        assert len(loop.scheduler.kv_memory.get_block_ids("a")) == num_blocks
    full = Loop(5)  # a has two blocks, each of the others one
    requests = [full.add(name, 7 if name == "a" else 3, 20) for name in "abcd"]
    full.step()
    # (tokens, optional ones): optional tokens preempt no other; 13 tokens take the blocks of three.
    for (num_tokens, num_optional), given, num_blocks, running in (
        ((1, 9), 1, 2, "abcd"),
        ((13, 0), 13, 5, "a"),
    ):
        step = StepPlan(6, lambda one: 6)
        assert (
            full.scheduler._allocate_or_preempt(requests[0], num_tokens, num_optional, step)
            == given
        )
        assert len(full.scheduler.kv_memory.get_block_ids("a")) == num_blocks
        assert list(full.scheduler.running) == [*running]


# -- a cache. Equal prompts: `test_scheduler_runs.py`


def test_blocks_that_outputs_fill_are_shared_too():
    """3 + 8 tokens of which the last is never fed back: 10 positions are 2 full blocks."""
    loop = Loop(20, cache="hash")
    first = loop.add("a", 3, 8)
    loop.run()
    second = loop.take(Request.from_tokens("b", first.all_token_ids, 1))
    assert scheduled_tokens(loop.step()) == {"b": 11 - 8} and second.num_cached_tokens == 8


# -- constraints


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_batch_holds_so_many_adapters_and_others_overtake_until_one_has_waited_too_long(kind):
    loop = Loop(100, kind, plugins=[MaxLoRAs(2)], max_overtakes=3)
    lora = {name: (("lora", name),) for name in "xyz"}
    loop.add("a", 3, 4, extra_keys=lora["x"])
    loop.add("b", 3, 4, extra_keys=lora["y"])
    held_back = loop.add("c", 3, 4, extra_keys=lora["z"])
    loop.add("d", 3, 4)
    loop.add("e", 3, 4, extra_keys=lora["x"])
    assert list(scheduled_tokens(loop.step())) == ["a", "b", "d", "e"]
    loop.add("f", 3, 4, extra_keys=lora["x"])  # two that came after c have overtaken it
    assert "f" in scheduled_tokens(loop.step())
    loop.add("g", 3, 4, extra_keys=lora["x"])  # and now three
    assert "g" not in scheduled_tokens(loop.step()) and held_back.status == RequestStatus.WAITING
    loop.run()
    assert set(loop.reasons) == set("abcdefg")
    plugin = loop.scheduler.plugins[0]
    plugin.begin_step()
    assert plugin._adapters == {}


def test_requests_that_share_an_adapter_take_the_room_of_one():
    loop = Loop(100, plugins=[MaxLoRAs(2)])
    loop.add("without", 3, 4)  # takes none
    for name, adapter in (("a", "x"), ("b", "x"), ("c", "y")):
        loop.add(name, 3, 4, extra_keys=(("lora", adapter),))
    assert list(scheduled_tokens(loop.step())) == ["without", "a", "b", "c"]


def test_preemption_gives_the_adapter_back():
    loop = Loop(100, plugins=[MaxLoRAs(1)])
    loop.add("a", 3, 4, extra_keys=(("lora", 1),))
    loop.step()
    with preempting(loop.scheduler):
        loop.step()
    loop.scheduler.abort_request("a")
    loop.add("b", 3, 4, extra_keys=(("lora", 2),))
    assert scheduled_tokens(loop.step()) == {"b": 3}
    with pytest.raises(ValueError, match="max_loras"):
        MaxLoRAs(0)


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_so_many_are_passed_over_and_no_more(kind, monkeypatch):
    """Each has to be asked whether it is ready: by a constraint, or in the cache."""

    class NobodyMayRun(SchedulerPlugin):
        queries = 0

        def can_start(self, request):
            self.queries += request.request_id.startswith("held")
            return not request.request_id.startswith("held")

    constraint, max_tried = NobodyMayRun(), 2 * MAX_SKIPPED + 10
    for module in ("scheduler", "prefill_first_scheduler"):
        monkeypatch.setattr(f"{module}.MAX_TRIED", max_tried)
    loop = Loop(100, kind, plugins=[constraint], max_overtakes=None)
    for i in range(max_tried - 1):
        loop.add(f"held {i}", 9)
    loop.add("a", 3)
    assert scheduled_tokens(loop.step()) == {"a": 3}
    for i in range(20):
        loop.add(f"held too {i}", 12)
    loop.add("b", 3)
    constraint.queries = 0
    loop.scheduler.abort_request("a")
    assert scheduled_tokens(loop.step()) == {} and constraint.queries == max_tried
    monkeypatch.undo()
    num_equals = 2 * MAX_SKIPPED + 10
    loop = Loop(2000, kind, cache="hash", max_num_seqs=num_equals)
    for i in range(num_equals):
        loop.take(Request.from_tokens(f"s{i}", list(range(10)), 2))
    queries = []
    get_computed_blocks = loop.scheduler.get_computed_blocks
    loop.scheduler.get_computed_blocks = lambda request: (
        queries.append(request.request_id) or get_computed_blocks(request)
    )
    assert scheduled_tokens(loop.step()) == {"s0": 10}
    assert len(queries) == 1 + 2 * MAX_SKIPPED
    loop.run()


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_requests_behind_many_loads_are_reached_and_no_load_is_forgotten(kind, monkeypatch):
    loop, lookups = Loop(100, kind), []
    get_computed_blocks = loop.memory.get_computed_blocks

    def find(request, wait_for_others):
        lookups.append(request.request_id)
        is_loading = request.request_id in loading
        return NotReady.LOADING if is_loading else get_computed_blocks(request, wait_for_others)

    monkeypatch.setattr(loop.memory, "get_computed_blocks", find)
    names = [f"load {i}" for i in range(2 * MAX_SKIPPED)]
    loading = set(names)
    for name in names:
        loop.add(name, 9, 1)
    loop.add("a", 3)
    for plan in ({}, {"a": 3}):
        lookups.clear()
        assert scheduled_tokens(loop.step()) == plan
    assert len(lookups) == MAX_SKIPPED + 1
    loading.clear()
    loop.run()
    assert loop.reasons.keys() == {"a", *names}


# -- from outside


def test_the_runner_forgets_who_was_preempted_and_then_aborted():
    loop = Loop(4)
    loop.add("a", 7, 8)
    loop.add("b", 7, 8)
    for _ in range(3):
        loop.step()
    loop.scheduler.abort_request("b")
    assert loop.step().finished_req_ids == {"b"}
    assert set(loop.runner.state.requests) == {"a"}
    loop.add("b", 3, 1)
    assert not loop.step().scheduled_cached_reqs.resumed_req_ids, "it is another one"


def test_a_full_batch_does_not_ask_the_policy():
    """A cache-aware order costs milliseconds, and the batch is full."""
    memory = make_kv_memory(101, 4)
    policy = policy_over(memory, "lpm")
    loop = Loop(100, max_num_seqs=1, policy=policy, kv_memory=memory)
    for name in "ab":
        loop.add(name, 4, 5)
    loop.step()
    policy.find_cached_blocks = lambda request: pytest.fail("it was asked")
    loop.schedule()


def test_the_memory_is_asked_once_a_block():
    loop = Loop(100, block_size=8)
    loop.add("a", 8, 30)
    loop.step()
    queries = []
    allocate = loop.scheduler.kv_memory.allocate_slots
    loop.scheduler.kv_memory.allocate_slots = lambda request, *n: (
        queries.append(request.num_computed_tokens) or allocate(request, *n)
    )
    loop.run()
    assert queries == [8, 16, 24, 32]


# -- plugins


class Paused(SchedulerPlugin):
    """b sits out every second step."""

    allows_fast_path = False
    num_steps = 0

    def begin_step(self) -> None:
        self.num_steps += 1

    def skips_step(self, request: Request) -> bool:
        return request.request_id == "b" and self.num_steps % 2 == 0


def test_a_request_that_skips_a_step_is_not_planned_even_on_the_fast_path():
    loop = Loop(20, plugins=[Paused()])
    for name in "ab":
        loop.add(name, 3, max_new_tokens=7)
    assert [list(loop.step().num_scheduled_tokens) for _ in range(5)] == [
        ["a", "b"],
        ["a"],
        ["a", "b"],
        ["a"],
        ["a", "b"],
    ]
    loop.run()
    assert len(loop.outputs["a"]) == len(loop.outputs["b"]) == 7


class SlotsUpToTen(PreemptionPlugin):
    def num_optional_slots(self, request: Request, end: int) -> int:
        return 10 - end


def test_a_plugin_may_ask_for_slots_alone():
    loop = Loop(20, plugins=[SlotsUpToTen()])
    loop.add("a", 6)
    loop.step()
    loop.step()
    assert len(loop.memory.get_block_ids("a")) == 3, "7 tokens in 2 blocks of 4, and 3 slots more"


@pytest.mark.parametrize("name", ["free", "on_finish", "remove_request"])
def test_an_interrupted_removal_of_a_request_is_repeated(name, monkeypatch):
    loop = Loop(20, plugins=[plugin := ForcedPreemption(100)])
    loop.add("a", 6)
    loop.step()
    owners = {"free": loop.memory, "on_finish": plugin, "remove_request": loop.scheduler.delta}
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(type(owners[name]), name, Mock(side_effect=KeyboardInterrupt))
        loop.scheduler.abort_request("a")
    loop.scheduler.abort_request("a")
    loop.scheduler.check_invariants()
    assert not loop.scheduler.requests and loop.memory.num_blocks_in_use == 0


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_queue_that_an_interrupt_has_torn_is_one_again(kind):
    scheduler = Loop(20, kind).scheduler
    for name in "ab":
        scheduler.add_request(Request.from_tokens(name, [1, 2, 3], 2))
    del scheduler.waiting._entries["a"]
    scheduler.clear()
    scheduler.waiting.check_invariants()
    assert [request.request_id for request in scheduler.waiting] == ["b"]


def test_a_prefix_that_is_being_computed_is_computed_again_on_request():
    loop = Loop(20, cache="hash", defer_on_shared_prefix=False)
    for name in "ab":
        loop.take(Request.from_tokens(name, list(range(10)), 4))
    assert scheduled_tokens(loop.step()) == {"a": 10, "b": 10}
