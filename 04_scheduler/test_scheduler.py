"""What a row of `plans.txt` cannot say about both schedulers: names, errors, plugins, calls. Whole
runs are in test_scheduler_runs.py."""

from __future__ import annotations

from collections.abc import Callable, Collection
from unittest.mock import Mock

import pytest

from base_scheduler import SchedulerPlugin
from fake_model import continuation
from forced_preemption import ForcedPreemption
from kv_memory import NotReady
from preemptive_scheduler import MAX_SKIPPED
from prefill_first_scheduler import PrefillFirstScheduler
from scheduler import Request, RequestStatus, Scheduler
from scheduler_interface import StepOutput
from scheduler_steps import (
    ChunksOf,
    SchedulerLoop,
    make_loop,
    make_scheduler,
    preempted_ids,
    scheduled_tokens,
)

KINDS = (Scheduler, PrefillFirstScheduler)
BOTH = pytest.mark.parametrize("kind", KINDS)


def loop_with(*sizes: tuple[str, int, int], kind: type = Scheduler, **options) -> SchedulerLoop:
    """A loop with requests: the name, the prompt and the outputs of each."""
    loop = make_loop(kind, **options)
    for name, num_prompt, max_tokens in sizes:
        loop.add(name, num_prompt, max_tokens)
    return loop


# -- as a reader types it


def test_the_names_of_the_reading_material_work_as_typed():
    scheduler = Scheduler(
        max_num_seqs=4, max_num_batched_tokens=64, num_gpu_blocks=100, policy="fcfs"
    )
    request = Request.from_tokens("a", list(range(20)), max_new_tokens=2, priority=0)
    scheduler.add_request(request)
    scheduler.add_request(Request.from_tokens("b", list(range(100, 130)), max_new_tokens=2))
    output = scheduler.schedule()
    assert [r.request_id for r in output.scheduled_requests] == ["a", "b"]
    assert output.num_scheduled_tokens == {"a": 20, "b": 30}
    assert (output.preempted_requests, output.total_num_scheduled_tokens) == ([], 50)
    scheduler.update_from_output(output, StepOutput({"a": [7], "b": [8]}))
    assert (request.num_tokens, request.num_computed_tokens) == (21, 20)
    output = scheduler.schedule()
    scheduler.abort_request("b")
    scheduler.update_from_output(output, StepOutput({"a": [7], "b": [8]}))
    assert request.is_finished and not scheduler.has_unfinished_requests()
    assert scheduler.kv_memory.usage == 0.0 and scheduler.kv_memory.reset_prefix_cache()


@pytest.mark.parametrize("kind", KINDS)
def test_an_unknown_policy_is_named(kind):
    with pytest.raises(ValueError, match=r"policy .*fastest"):
        make_scheduler(kind, policy="fastest")


# -- memory


class Noting(SchedulerPlugin):
    """Notes the blocks of each preempted request, as they are when it is told."""

    def __init__(self) -> None:
        self.preempted: list[tuple[str, int]] = []

    def on_preempt(self, request: Request) -> None:
        block_ids = self.scheduler.kv_memory.get_block_ids(request.request_id)
        self.preempted.append((request.request_id, len(block_ids)))


def test_a_plugin_is_told_of_a_preemption_while_the_request_has_its_memory():
    plugin = Noting()
    loop = loop_with(("a", 7, 8), ("b", 7, 8), num_blocks=4, plugins=[plugin])
    for _ in range(3):
        output = loop.step()
    assert preempted_ids(output) == ["b"] and plugin.preempted == [("b", 2)]
    second = loop.requests["b"]
    assert second.status == RequestStatus.PREEMPTED and second.num_preemptions == 1
    assert (loop.memory.usage, output.num_kv_blocks_in_use) == (0.75, 3)


@BOTH
def test_a_request_that_outgrows_the_pool_ends_with_a_reason(kind):
    """Trap 16: with 16 positions there are 4 tokens after a prompt of 13, and the last of them
    needs no slot."""
    loop = loop_with(("a", 13, 50), kind=kind, num_blocks=4)
    for _ in range(3):
        loop.step()
    plan = loop.schedule()
    (last,) = loop.scheduler.update_from_output(plan, loop.execute(plan))
    assert (last.finish_reason, loop.requests["a"].num_output_tokens) == ("length", 4)
    assert last.finish_detail == "the KV memory holds 16 positions"
    assert loop.add("b", 13, 4).length_limit is None
    bounded = make_loop(kind, num_blocks=4, max_model_len=15).add("c", 13, 50)
    assert (bounded.max_tokens, bounded.length_limit) == (2, "max_model_len=15")


# -- the queue


@BOTH
def test_requests_after_many_loads_are_reached_and_no_load_is_forgotten(kind, monkeypatch):
    names = [f"load {i}" for i in range(MAX_SKIPPED)]
    loading = set(names)
    loop = loop_with(*((name, 9, 1) for name in names), ("a", 3, 8), kind=kind)
    find = loop.memory.get_computed_blocks
    lookups = Mock(
        side_effect=lambda r, w: NotReady.LOADING if r.request_id in loading else find(r, w)
    )
    monkeypatch.setattr(loop.memory, "get_computed_blocks", lookups)
    assert scheduled_tokens(loop.step()) == {"a": 3}
    loading.clear()
    loop.run()
    assert loop.reasons.keys() == {"a", *names}


@BOTH
def test_a_step_tries_a_bounded_number_of_requests_and_then_those_behind(kind):
    names = [f"x{i}" for i in range(MAX_SKIPPED)]
    loop = loop_with(*((name, 5, 1) for name in names), ("a", 3, 1), kind=kind)
    can_start = Mock(side_effect=lambda request: request.request_id == "a")
    loop.scheduler.can_start = can_start
    assert scheduled_tokens(loop.step()) == {} and can_start.call_count == MAX_SKIPPED
    loop.scheduler.abort_request(names[0])
    assert scheduled_tokens(loop.step()) == {"a": 3}


# -- plugins, and interrupts


class Paused(SchedulerPlugin):
    """b sits out every second step."""

    num_steps = 0

    def begin_step(self) -> None:
        self.num_steps += 1

    def skips_step(self, request: Request) -> bool:
        return request.request_id == "b" and self.num_steps % 2 == 0


def test_a_request_that_skips_a_step_is_not_planned():
    loop = loop_with(("a", 3, 7), ("b", 3, 7), plugins=[Paused()])
    assert [list(scheduled_tokens(loop.step())) for _ in range(4)] == [["a", "b"], ["a"]] * 2
    loop.run()
    for name, request in loop.requests.items():
        assert loop.outputs[name] == continuation(request.prompt_token_ids, 7)


@pytest.mark.parametrize("name", ["free", "on_finish", "remove_request"])
def test_an_interrupted_removal_of_a_request_is_repeated(name, monkeypatch):
    loop = loop_with(("a", 6, 8), plugins=[plugin := ForcedPreemption(100)])
    loop.step()
    owners = {"free": loop.memory, "on_finish": plugin, "remove_request": loop.scheduler.delta}
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(type(owners[name]), name, Mock(side_effect=KeyboardInterrupt))
        loop.scheduler.abort_request("a")
    loop.scheduler.abort_request("a")
    loop.scheduler.check_invariants()
    assert not loop.scheduler.requests and loop.memory.num_blocks_in_use == 0


# -- chunk policies; chapter 6 has those that chunk


class Holding(ChunksOf):
    """Holds x back until it is released, and notes who can share each step."""

    is_released = False
    beside = ()

    def begin_step(
        self, running: Collection[Request], num_uncomputed_tokens: Callable[[Request], int]
    ) -> None:
        assert all(num_uncomputed_tokens(request) == 1 for request in running)
        self.beside = [request.request_id for request in running]

    def can_start(self, request: Request, num_uncomputed_tokens: int) -> bool:
        assert request.request_id != "x" or num_uncomputed_tokens == 2, "the rest is cached"
        return self.is_released or request.request_id != "x"


@pytest.mark.parametrize("options", [{}, {"mixing": True}, {"mixing": False}])
def test_a_request_that_a_policy_holds_back_keeps_nothing_and_stops_admission_when_aged(options):
    policy = Holding(50)
    kind = PrefillFirstScheduler if options else Scheduler
    options = options | {"chunk_policy": policy, "cache": "hash", "max_overtakes": 2}
    loop = loop_with(("a", 12, 9), kind=kind, **options)
    loop.step()
    loop.take(Request.from_tokens("x", [*loop.requests["a"].prompt_token_ids, 1, 2], 2))
    for name in ("y", "z"):
        loop.add(name, 5, 1)
        assert scheduled_tokens(loop.step())[name] == 5
        assert not loop.memory.get_block_ids("x")
    # In a prefill, nobody decodes.
    assert policy.beside == ([] if options.get("mixing") is False else ["a"])
    loop.add("late", 5, 1)
    assert scheduled_tokens(loop.step()) == {"a": 1}
    policy.is_released = True
    plan = scheduled_tokens(loop.step())
    assert (plan["x"], plan["late"]) == (2, 5)


def test_chunks_leave_a_token_for_each_decode_after_them_and_the_first_always_goes_on():
    policy = ChunksOf(2)
    loop = loop_with(
        *(("k", 40, 5), ("l", 40, 5), ("a", 1, 30), ("b", 1, 30), ("c", 1, 30)),
        **{"chunk_policy": policy, "max_num_batched_tokens": 7},
    )
    assert scheduled_tokens(loop.step()) == {"k": 2, "l": 2, "a": 1, "b": 1, "c": 1}
    policy.size = 100
    assert scheduled_tokens(loop.step()) == {"k": 4, "a": 1, "b": 1, "c": 1}
    loop.scheduler.abort_request("a")
    assert scheduled_tokens(loop.step()) == {"k": 5, "b": 1, "c": 1}
    loop.scheduler.max_num_batched_tokens = 2  # fewer than there are requests
    assert scheduled_tokens(loop.step()) == {"k": 1, "b": 1}
