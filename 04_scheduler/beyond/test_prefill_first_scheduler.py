"""Decisions of the prefill-first scheduler, case by case, and whole runs at random. The behaviour
shared with the two-phase scheduler is in test_scheduler.py and test_scheduler_runs.py.

Tokens come from fake_model.py, whose KV is real: a wrong slot, table or history changes them."""

from __future__ import annotations

import inspect
import random
from functools import partial
from pathlib import Path

import pytest

import test_scheduler_runs as runs
from bounded_loops import as_long_as
from cached_kv_cache_manager import CachedKVCacheManager
from fake_model import FakeModelRunner, _mix, continuation
from forced_preemption import ForcedPreemption
from kv_connector import KVConnector
from loading_kv_cache_manager import LoadingKVCacheManager
from preemptive_scheduler import PreemptiveScheduler, SchedulerOptions
from prefill_first_scheduler import ForwardMode, PrefillFirstScheduler
from request import Request, RequestStatus
from scheduler import Scheduler
from scheduler_interface import SchedulerOutput
from scheduler_steps import (
    SchedulerLog,
    SchedulerLoop,
    make_loop,
    make_memory,
    make_scheduler,
    preempted_ids,
    preempting,
    scheduled_tokens,
)
from sglang_policies import policy_over
from step_log import Case, cases_of

EXTEND, DECODE, MIXED = ForwardMode
CACHES = (None, "hash", "radix")


@pytest.mark.net
@cases_of(Path(__file__).with_name("prefill_first_plans.txt"))
def test_prefill_first_plans(case: Case):
    SchedulerLog(make_loop(PrefillFirstScheduler, **case.options)).perform(case)


STOPS = [
    ({"max_num_seqs": 2}, ("seat", "")),
    ({"max_num_batched_tokens": 12}, ("budget", "e")),
    ({"max_num_batched_tokens": 8}, ("budget", "")),
    ({"num_pages": 6}, ("blocks", "c")),
    ({"num_pages": 12}, ("blocks", "")),
    ({"chunked_prefill_size": 12}, ("budget", "")),
    ({"max_consecutive_prefills": 1}, ("turn", "")),
    ({}, None),
]


@pytest.mark.parametrize(("options", "stop"), STOPS, ids=lambda value: str(value))
def test_a_plan_names_the_limit_that_ended_admission(options, stop):
    """a and b run. c wants 8 tokens, e as many. "": it was c that took the last of something."""
    loop = Loop(**{"num_pages": 100, **options})
    loop.add("a", 4, 4)
    loop.add("b", 4, 4)
    loop.step()
    if stop == ("turn", ""):
        loop.add("d", 4)
        loop.step()
    loop.add("c", 20 if "chunked_prefill_size" in options else 8)
    loop.add("e", 8)
    assert loop.step().admission_stop == stop


class Loop(SchedulerLoop):
    def __init__(
        self,
        num_pages: int,
        *,
        page_size: int = 4,
        cache: str | None = None,
        connector: KVConnector | None = None,
        kind: type[PreemptiveScheduler] = PrefillFirstScheduler,
        **options,
    ):
        cached = CachedKVCacheManager
        if connector is not None:
            cached = partial(LoadingKVCacheManager, connector=connector)
        memory = make_memory(cache, num_pages, page_size, cached=cached)
        if "policy" in options:
            options["policy"] = policy_over(memory, options["policy"], options.get("seed", 0))
        super().__init__(make_scheduler(kind, kv_memory=memory, **options))
        self.num_steps = 0

    def step(self) -> SchedulerOutput:
        self.num_steps += 1
        return super().step()

    def run(self) -> None:
        """Run to the end, within the bound: a request is computed at most `max_preemptions + 1`
        times; a step computes at least one token, or it is one of two in which a request was
        preempted."""
        num_tokens = sum(request.max_num_tokens for request in self.requests.values())
        max_steps = 2 * (self.scheduler.max_preemptions + 1) * num_tokens
        for _ in as_long_as(self.scheduler.has_unfinished_requests, max_steps - self.num_steps + 1):
            self.step()

    def run_until(self, is_reached) -> SchedulerOutput:
        """The plan of the first step for which `is_reached(plan)`."""
        for _ in range(200):
            output = self.step()
            if is_reached(output):
                return output
        pytest.fail("that did not happen within 200 steps")

    @property
    def mode(self) -> ForwardMode:
        return self.scheduler.last_batch.forward_mode

    def must_be_right(self) -> None:
        """Tokens of an uninterrupted run, and every computed token accounted for."""
        for name, request in self.requests.items():
            expected = continuation(request.prompt_token_ids, request.max_tokens)
            if request.status is RequestStatus.FINISHED_ABORTED:
                expected = expected[: len(self.outputs[name])]
            assert self.outputs[name] == expected, name
        stats = self.scheduler.get_stats()
        if not stats.total_aborted:
            num_tokens = sum(r.num_tokens - 1 for r in self.requests.values())
            num_saved = stats.total_cached_tokens - stats.total_recomputed_tokens
            assert stats.total_scheduled_tokens == num_tokens - num_saved
        assert self.memory.num_blocks_in_use == 0


# -- the interface


def test_it_has_the_parameters_of_the_other_scheduler():
    ours, theirs = (inspect.signature(s).parameters for s in (PrefillFirstScheduler, Scheduler))
    assert theirs.keys() - ours.keys() == {"watermark", "reserve_for_chunks", "reserve_all"}
    shared = inspect.signature(PreemptiveScheduler).parameters
    first = ["max_num_seqs", "max_num_batched_tokens", "num_gpu_blocks", "policy"]
    for parameters in (shared, ours, theirs):
        assert list(parameters)[:4] == first
    assert list(shared)[4:] == list(SchedulerOptions.__annotations__)
    for kind in (PrefillFirstScheduler, Scheduler):
        for name, parameter in shared.items():
            kind(**{name: parameter.default})  # handed on


@pytest.mark.parametrize(
    "options",
    [
        {"chunked_prefill_size": 0},
        {"chunked_prefill_size": 2.5},
        {"max_consecutive_prefills": 0},
        {"new_token_ratio_decay_steps": 0},
        {"new_token_ratio_decay_steps": 2.5},
        {"init_new_token_ratio": 1.5},
        {"init_new_token_ratio": -0.1},
        {"min_new_token_ratio": 0.8},
        {"min_new_token_ratio": -0.1},
    ],
)
def test_options_of_this_school_that_make_no_sense_are_named(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        PrefillFirstScheduler(**options)


# -- prefill or decode


def test_prompts_first_and_who_is_done_joins_those_who_decode():
    loop = Loop(100, max_num_batched_tokens=12)
    for name in "abc":
        loop.add(name, 6, 3)
    assert scheduled_tokens(loop.step()) == {"a": 6, "b": 6} and loop.mode is EXTEND
    assert loop.scheduler.running_batch.reqs == []
    assert scheduled_tokens(loop.step()) == {"c": 6} and loop.mode is EXTEND
    assert scheduled_tokens(loop.step()) == {"a": 1, "b": 1, "c": 1} and loop.mode is DECODE
    loop.add("d", 6, 3)
    assert scheduled_tokens(loop.step()) == {"d": 6} and loop.mode is EXTEND, "the others wait"
    assert scheduled_tokens(loop.step()) == {"a": 1, "b": 1, "c": 1, "d": 1}
    assert loop.reasons.keys() == set("abc")
    assert scheduled_tokens(loop.step()) == {"d": 1}
    loop.must_be_right()


def test_the_rule_of_nano_vllm():
    """FCFS, no mixing, no bound: a prefill whenever something that waits fits, else a decode."""
    rng = random.Random(4)
    loop = Loop(500, max_num_seqs=5, max_num_batched_tokens=16, max_consecutive_prefills=None)
    running: dict[str, int] = {}  # tokens to come
    waiting: list[tuple[str, int, int]] = []
    for number in range(300):
        if number < 150 and rng.random() < 0.4:
            request = (f"r{number}", rng.randint(4, 16), rng.randint(1, 6))
            waiting.append(request)
            loop.add(*request)
        expected, budget = {}, 16
        while waiting and len(running) < 5 and waiting[0][1] <= budget:
            name, num_prompt, num_outputs = waiting.pop(0)
            expected[name], budget = num_prompt, budget - num_prompt
            running[name] = num_outputs
        expected = expected or dict.fromkeys(running, 1)
        assert scheduled_tokens(loop.step()) == expected
        running = {r: n - (r in expected) for r, n in running.items() if n > (r in expected)}
    assert not loop.scheduler.has_unfinished_requests() and len(loop.reasons) > 50
    loop.must_be_right()


def longest_wait(loop: Loop, num_steps: int, arrive) -> int:
    """Steps between two tokens of "a", which decodes while others arrive."""
    loop.add("a", 4, 60)
    waits, wait = [], 0
    for number in range(num_steps):
        arrive(number)
        output = loop.step()
        wait += 1
        if "a" in output.num_scheduled_tokens:
            waits.append(wait)
            wait = 0
    return max(*waits, wait)


@pytest.mark.parametrize("bound", [1, 3, 8])
def test_who_decodes_gets_a_token_however_many_arrive(bound):
    """Trap 18: one prompt arrives in every step. Without a bound a request that runs gets one token
    in twenty-one steps, and it could be a thousand."""
    loop = Loop(1000, max_consecutive_prefills=bound)
    wait = longest_wait(loop, 50, lambda number: loop.add(f"n{number}", 8, 30))
    assert wait == bound + 1
    unbounded = Loop(1000, max_consecutive_prefills=None)
    longest_wait(unbounded, 21, lambda number: unbounded.add(f"n{number}", 8, 30))
    assert len(unbounded.outputs["a"]) == 1


def test_prefills_without_waiting_decodes_do_not_count():
    loop = Loop(1000, max_num_batched_tokens=8, chunked_prefill_size=8, max_consecutive_prefills=2)
    loop.add("long", 48)
    for _ in range(6):
        assert scheduled_tokens(loop.step()) == {"long": 8}
    assert scheduled_tokens(loop.step()) == {"long": 1}
    loop.add("next", 48)
    sizes = [scheduled_tokens(loop.step()) for _ in range(6)]
    assert sizes == [{"next": 8}, {"next": 8}, {"long": 1}] * 2


def test_no_decode_turn_after_the_waiting_decodes_are_gone():
    loop = Loop(100, max_consecutive_prefills=1)
    loop.add("a", 4)
    loop.step()
    loop.add("b", 4)
    assert scheduled_tokens(loop.step()) == {"b": 4}
    loop.scheduler.finish_requests(["a", "b"], RequestStatus.FINISHED_ABORTED)
    loop.add("c", 4)
    assert scheduled_tokens(loop.step()) == {"c": 4}


def test_decodes_take_their_share_of_a_mixed_chunk():
    loop = Loop(100, max_num_batched_tokens=64, chunked_prefill_size=16, mixing=True)
    loop.add("a", 5)
    loop.add("b", 5)
    assert scheduled_tokens(loop.step()) == {"a": 5, "b": 5} and loop.mode is EXTEND
    loop.add("c", 30)
    assert scheduled_tokens(loop.step()) == {"a": 1, "b": 1, "c": 12}, "16 - 2, down to whole pages"
    assert loop.scheduler.chunked_req is loop.requests["c"] and loop.mode is MIXED
    mixed, running = loop.scheduler.last_batch, loop.scheduler.running_batch
    assert ([r.request_id for r in mixed.reqs], running.reqs) == (["c", "a", "b"], [])
    assert scheduled_tokens(loop.step()) == {"a": 1, "b": 1, "c": 12}
    assert scheduled_tokens(loop.step()) == {"a": 1, "b": 1, "c": 6}
    assert scheduled_tokens(loop.step()) == {"a": 1, "b": 1, "c": 1} and loop.mode is DECODE


def test_a_whole_prompt_waits_until_it_fits_beside_the_decodes():
    loop = Loop(100, max_num_batched_tokens=16, mixing=True)
    loop.add("a", 4, 3)
    loop.step()
    loop.add("b", 16, 3)
    assert scheduled_tokens(loop.step()) == {"a": 1}
    loop.run()
    loop.must_be_right()


# -- max_running_requests


def test_no_more_run_than_a_step_has_tokens():
    loop = Loop(100, max_num_seqs=50, max_num_batched_tokens=4)
    for number in range(9):
        loop.add(str(number), 1, 5)
    for _ in range(4):
        loop.step()
    assert len(loop.scheduler.running) == 4
    assert len(scheduled_tokens(loop.step())) == 4
    loop.run()
    loop.must_be_right()


# -- chunks


def test_the_chunked_slot_passes_from_one_prompt_to_the_next():
    """Trap 25: 2064 tokens in chunks of 2048, twice, and one that is exactly a chunk."""
    loop = Loop(400, page_size=16, max_num_batched_tokens=4096, chunked_prefill_size=2048)
    first, second = loop.add("a", 2064, 3), loop.add("b", 2064, 3)
    loop.add("c", 2048, 3)
    assert scheduled_tokens(loop.step()) == {"a": 2048}
    assert loop.scheduler.chunked_req is first
    assert scheduled_tokens(loop.step()) == {"a": 16, "b": 2032}
    assert loop.scheduler.chunked_req is second
    assert scheduled_tokens(loop.step()) == {"b": 32, "c": 2016}
    assert scheduled_tokens(loop.step()) == {"c": 32}
    assert loop.scheduler.chunked_req is None
    assert scheduled_tokens(loop.step()) == {"a": 1, "b": 1, "c": 1}


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("moment", ["between chunks", "between schedule and update"])
def test_a_prompt_that_is_aborted_leaves_the_slot(cache, moment):
    """Trap 15: what was cached of it stays whole."""
    loop = Loop(30, cache=cache, chunked_prefill_size=8)
    loop.add("a", 30)
    loop.step()
    output = loop.schedule()
    if moment == "between chunks":
        loop.update(output)
        loop.scheduler.abort_request("a")
    else:
        loop.scheduler.abort_request("a")
        loop.update(output)
    loop.add("b", 20)
    assert scheduled_tokens(loop.step()) == {"b": 8}
    loop.run()
    loop.must_be_right()


@pytest.mark.parametrize("cache", CACHES)
def test_a_prompt_preempted_between_chunks_begins_again_with_all_its_tokens(cache):
    """Trap 24."""
    loop = Loop(30, cache=cache, chunked_prefill_size=8)
    request = loop.add("a", 10, 12)
    for _ in range(7):
        loop.step()
    assert request.num_output_tokens == 6
    with preempting(loop.scheduler):
        assert preempted_ids(loop.step()) == ["a"]
        assert loop.scheduler.kv_memory.reset_prefix_cache()
    loop.step()
    assert loop.scheduler.chunked_req is request and request.num_output_tokens == 6
    with preempting(loop.scheduler):
        assert preempted_ids(loop.step()) == ["a"] and loop.scheduler.chunked_req is None
    loop.run()
    loop.must_be_right()
    assert request.num_preemptions == 2


def test_a_preempted_request_longer_than_any_step_is_chunked_though_prompts_are_not():
    loop = Loop(30, max_num_batched_tokens=16)
    request = loop.add("a", 15, 20)
    for _ in range(10):
        loop.step()
    with preempting(loop.scheduler):
        loop.step()
    assert request.num_tokens == 25
    assert [scheduled_tokens(loop.step())["a"] for _ in range(3)] == [16, 9, 1]
    loop.run()
    loop.must_be_right()


def test_a_chunk_without_memory_waits_and_no_request_takes_its_pages():
    loop = Loop(8, chunked_prefill_size=8, new_token_ratio_decay_steps=1, init_new_token_ratio=0.0,
                min_new_token_ratio=0.0, max_consecutive_prefills=1)  # fmt: skip
    loop.add("a", 8, 9)
    loop.step()
    loop.add("b", 16, 2)
    loop.add("c", 1, 1)
    assert scheduled_tokens(loop.step()) == {"b": 8}
    blocker = Request.from_tokens("blocker", [1])
    assert scheduled_tokens(loop.step()) == {"a": 1}
    assert loop.memory.allocate_slots(blocker, 4 * (loop.memory.pool.num_free_blocks - 1))
    output = loop.step()
    assert scheduled_tokens(output) == {"a": 1}, "it is a prefill's turn. b wants two pages, c one"
    assert loop.scheduler.chunked_req is loop.requests["b"]
    loop.memory.free(blocker)
    assert scheduled_tokens(loop.step()) == {"b": 8}
    loop.run()


# -- memory runs out


def greedy(num_pages: int, **options) -> Loop:
    """A loop that admits as if running requests would generate nothing."""
    return Loop(num_pages, init_new_token_ratio=0.0, min_new_token_ratio=0.0, **options)


def test_fewest_outputs_are_retracted_and_come_back_as_prefills():
    """Trap 19: it has outputs, and is a prefill all the same."""
    loop = greedy(8)
    loop.add("a", 8, 12)
    loop.step()
    loop.step()
    victim = loop.add("b", 8, 12)
    loop.step()
    assert len(loop.scheduler.running) == 2
    output = loop.run_until(preempted_ids)
    assert preempted_ids(output) == ["b"] and scheduled_tokens(output) == {"a": 1}
    assert victim.status is RequestStatus.PREEMPTED and victim.num_output_tokens > 1
    assert loop.scheduler.get_stats().num_preempted == 1
    num_tokens = victim.num_tokens
    loop.run_until(lambda output: "b" in output.num_scheduled_tokens)
    assert loop.mode is EXTEND and loop.scheduler.last_batch.reqs == [victim]
    assert victim.num_computed_tokens == num_tokens
    loop.run()
    loop.must_be_right()
    assert loop.requests["a"].num_preemptions == 0


def test_a_prompt_between_two_chunks_is_preempted_for_decodes():
    """Or both would wait for each other: each has what the other needs."""
    loop = greedy(9, chunked_prefill_size=4, max_consecutive_prefills=1)
    loop.add("a", 4, 20)
    loop.step()
    request = loop.add("c", 27, 1)
    assert preempted_ids(loop.run_until(preempted_ids)) == ["c"]
    assert request.num_output_tokens == 0 and loop.scheduler.chunked_req is None
    loop.run()
    loop.must_be_right()


def test_the_share_falls_without_retractions_and_restarts_when_none_run():
    loop = Loop(100, init_new_token_ratio=0.5, min_new_token_ratio=0.1,
                new_token_ratio_decay_steps=4)  # fmt: skip
    loop.add("a", 4, 7)
    loop.step()
    shares = []
    for _ in range(6):
        loop.step()
        shares.append(loop.scheduler.new_token_ratio)
    assert shares == pytest.approx([0.4, 0.3, 0.2, 0.1, 0.1, 0.1])
    loop.step()
    assert loop.scheduler.new_token_ratio == 0.5


def test_no_request_is_admitted_into_the_pages_of_the_next_decode():
    """Four requests need a page each for their next token. An average would have set aside less,
    and the new request would cost another its KV."""
    loop = Loop(9, init_new_token_ratio=0.1, min_new_token_ratio=0.1)
    for name in "abcd":
        loop.add(name, 4, 4)
    loop.step()
    loop.add("e", 5, 3)
    assert scheduled_tokens(loop.step()) == dict.fromkeys("abcd", 1)
    loop.run()
    assert loop.scheduler.get_stats().total_preempted == 0


@pytest.mark.parametrize("mixing", [False, True])
def test_no_request_is_admitted_in_a_step_that_retracted(mixing):
    """Trap 21: not even a request more urgent than the victim, though there are pages now."""
    loop = greedy(11, mixing=mixing, max_consecutive_prefills=1, policy="priority")
    for name in "ab":
        loop.add(name, 8, 24)
        loop.step()
    for number in range(100):
        loop.add(f"n{number}", 1, 1, priority=-1)
        output = loop.step()
        if preempted_ids(output):
            assert scheduled_tokens(output) == {"a": 1}
            return
    pytest.fail("nobody was retracted")


def test_a_lone_request_is_never_retracted_for_want_of_memory():
    """A load for a waiting request can take the memory it needs. It is skipped for one step."""
    loop = Loop(4)
    request = loop.add("a", 4, 13)
    loop.step()
    load = Request.from_tokens("load", [1])
    assert loop.memory.allocate_slots(load, 12)
    assert scheduled_tokens(loop.step()) == {} and request.num_preemptions == 0
    assert scheduled_tokens(loop.step()) == {}
    loop.memory.free(load)
    assert scheduled_tokens(loop.step()) == {"a": 1}
    loop.run()
    loop.must_be_right()


def test_a_pinned_request_is_not_retracted_though_it_has_fewest_outputs():
    """Or it would be, again and again."""
    loop = greedy(7, max_preemptions=1)
    loop.add("a", 4, 20)
    for _ in range(7):
        loop.step()
    request = loop.add("b", 4, 9)
    loop.step()
    with preempting(loop.scheduler):
        assert preempted_ids(loop.step()) == ["b"]
    assert preempted_ids(loop.run_until(preempted_ids)) == ["a"]
    assert request.num_output_tokens < loop.requests["a"].num_output_tokens
    loop.run()
    loop.must_be_right()
    assert request.num_preemptions == 1


def test_a_pinned_request_has_all_its_memory_and_keeps_it():
    loop = Loop(8, max_preemptions=1, chunked_prefill_size=8)
    request = loop.add("a", 12, 13)
    loop.step()
    loop.scheduler.set_plugins([ForcedPreemption(1, spares_pinned=True)])
    assert preempted_ids(loop.step()) == ["a"]
    assert scheduled_tokens(loop.step()) == {"a": 8}
    assert len(loop.memory.get_block_ids("a")) == 6, "24 positions, though only 8 are computed"
    assert preempted_ids(loop.step()) == [] and request.num_preemptions == 1
    loop.run()
    loop.must_be_right()


# -- who waits


def test_the_policy_orders_waiting_requests_and_priorities_displace_none():
    loop = Loop(100, max_num_seqs=1, policy="priority")
    loop.add("a", 3, 4, priority=9)
    loop.step()
    loop.add("b", 3, 2, priority=5)
    loop.add("c", 3, 2, priority=1)
    for _ in range(3):
        assert scheduled_tokens(loop.step()) == {"a": 1}
    assert scheduled_tokens(loop.step()) == {"c": 3}
    loop.run()


# -- KV from outside


class SlowConnector(KVConnector):
    """Has the KV of every prompt's first blocks. A load takes `num_polls` questions."""

    def __init__(self, num_polls: int) -> None:
        self.num_polls = num_polls
        self.num_arrived = 0
        self.runner: FakeModelRunner | None = None
        self.loads: dict[str, list] = {}  # request, block ids, first position, polls to come

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        num_full = (request.num_prompt_tokens - 1) // self.block_size * self.block_size
        self.start = num_computed_tokens
        return max(0, num_full - num_computed_tokens), True

    def update_state_after_alloc(self, request, block_ids, num_external_tokens):
        polls = self.num_polls
        self.loads[request.request_id] = [request, list(block_ids), self.start, polls]

    def get_finished_load(self, request_id):
        load = self.loads[request_id]
        load[3] -= 1
        if load[3] > 0:
            return None
        request, block_ids, start, _ = self.loads.pop(request_id)
        kv: list[int] = []
        for token_id in request.all_token_ids[: start + len(block_ids) * self.block_size]:
            kv.append(_mix(kv, token_id))
        for position in range(start, len(kv)):
            block_id = block_ids[(position - start) // self.block_size]
            slot = block_id * self.block_size + position % self.block_size
            self.runner._kv[slot] = kv[position]
        self.num_arrived += 1
        return len(kv) - start

    def cancel_load(self, request_id):
        self.loads.pop(request_id, None)

    def request_finished(self, request, block_ids):
        pass

    def wait_for_load(self, timeout_s):
        pass

    def close(self):
        pass


@pytest.mark.parametrize("cache", ["hash", "radix"])
@pytest.mark.parametrize("kind", ["prefill first", "mixed", "two phases"])
def test_loads_for_waiting_requests_stop_no_request(cache, kind):
    """Small pools in which loads hold up to half of the pages. Every request finishes with right
    tokens; a step without tokens is one in which something was being loaded."""
    num_arrived = num_preempted = 0
    for seed in range(25):
        rng = random.Random(seed)
        num_pages, page_size = rng.randint(3, 10), rng.choice([1, 2, 4])
        if kind == "two phases":
            options = {"kind": Scheduler, "policy": "priority", "max_num_seqs": rng.randint(1, 3)}
            options |= {"watermark": rng.choice([0.0, 0.2]), "max_num_batched_tokens": 24}
        else:
            options = runs.random_options(rng, PrefillFirstScheduler)
            options |= {"mixing": kind == "mixed", "policy": "fcfs", "preempt_every": None}
            options |= {"init_new_token_ratio": 0.0, "max_num_seqs": 6}
            options["max_num_batched_tokens"] = rng.randint(1, 24)
        connector = SlowConnector(rng.choice([1, 3, 10]))
        connector.bind(None, page_size, ())
        loop = Loop(num_pages, page_size=page_size, cache=cache, connector=connector, **options)
        connector.runner = loop.runner
        for number in range(rng.randint(2, 8)):
            prompt = [
                rng.randrange(3) for _ in range(rng.randint(1, num_pages * page_size * 2 // 3))
            ]
            if len(prompt) <= options["max_num_batched_tokens"]:
                urgency = rng.randrange(3) if kind == "two phases" else 0
                loop.take(Request.from_tokens(str(number), prompt, rng.randint(1, 12), urgency))
            for _ in range(rng.choice([0, 1, 3])):
                loop.step()
        for _ in range(2000):
            if not loop.scheduler.has_unfinished_requests():
                break
            was_loading = bool(connector.loads)
            output = loop.step()
            assert not output.is_empty or was_loading or connector.loads
            for name in connector.loads:
                assert loop.requests[name].status == RequestStatus.WAITING_FOR_REMOTE_KVS
        assert not loop.scheduler.has_unfinished_requests(), seed
        loop.must_be_right()
        num_arrived += connector.num_arrived
        num_preempted += loop.scheduler.get_stats().total_preempted
    assert num_arrived > 50 and num_preempted > 0


# -- whole runs


@pytest.mark.sample
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("seed", range(80))
def test_tokens_are_those_of_an_uninterrupted_run(seed, cache):
    """In pools of hardly more than one request's pages, with everything that can happen; chunked
    prompts can be longer than a step."""
    rng = random.Random(f"{cache} {seed}")
    memory, to_come = runs.random_load(rng, cache)
    options = runs.random_options(rng, PrefillFirstScheduler)
    if options["chunked_prefill_size"] is not None:
        options["max_num_batched_tokens"] = rng.randint(1, 24)
    world = runs.World(memory, PrefillFirstScheduler, **options)
    runs.run_at_random(world, rng, to_come, has_aborts=seed % 3 == 0)
    world.check_end()


@pytest.mark.parametrize("mixing", [False, True])
def test_no_decode_waits_longer_than_the_bound(mixing):
    """Trap 18, as a property of random runs: between two tokens of a request that was not retracted
    there are at most `max_consecutive_prefills` steps, or none with mixing."""
    for seed in range(12):
        rng = random.Random(seed)
        bound = rng.randint(1, 5)
        loop = greedy(
            rng.randint(6, 20), max_consecutive_prefills=bound, mixing=mixing, max_preemptions=2,
            chunked_prefill_size=rng.choice([None, 4, 8]), max_num_batched_tokens=16,
        )  # fmt: skip
        last_token: dict[str, int] = {}
        for number in range(150):
            if rng.random() < 0.7:
                loop.add(f"n{number}", rng.randint(4, 16), rng.randint(1, 10))
            output = loop.step()
            for name in preempted_ids(output):
                last_token.pop(name, None)
            for name in output.num_scheduled_tokens:
                if loop.requests[name].num_tokens - loop.requests[name].num_computed_tokens == 1:
                    last_token[name] = number
            for name in loop.scheduler.running.keys() & last_token.keys():
                assert number - last_token[name] <= (0 if mixing else bound), (seed, name)
