"""The loop with several plans in flight: its order, the plans that fill it, and errors."""

from __future__ import annotations

from collections import Counter

import pytest

from bounded_loops import as_long_as
from common.runner.overlap import QueuedRunner
from common.runner.pipeline import PipelinedEngineCore
from common.tests.logging_runner import LoggingRunner, request
from fcfs_scheduler import FCFSScheduler
from pipeline_plugin import PipelinePlugin
from request import Request
from scheduler_interface import SchedulerOutput
from step_record import RecordedScheduler, preemptions_of


def names(_: int, plan: SchedulerOutput) -> tuple[str, ...]:
    return tuple(plan.num_scheduled_tokens)


def make_core(num_stages: int = 2, num_in_flight: int | None = None, **options):
    log: list = []
    pipeline = PipelinePlugin(num_stages)
    scheduler = FCFSScheduler(plugins=[pipeline], **options)
    core = PipelinedEngineCore(
        RecordedScheduler(scheduler, check_invariants=True),
        QueuedRunner(runner := LoggingRunner(log, names)),
        pipeline,
        num_in_flight or num_stages,
    )
    return core, log, runner


def run(core: PipelinedEngineCore, max_steps: int = 60) -> Counter[str]:
    outputs: Counter[str] = Counter()
    for _ in as_long_as(core.has_unfinished_requests, max_steps):
        for result in core.step():
            outputs[result.request_id] += len(result.new_token_ids)
    return outputs


def test_decodes_are_split_and_each_part_is_planned_before_the_other_has_ended() -> None:
    core, log, _ = make_core()
    for name in "abcd":
        core.add_request(request(name, 4))
    for _ in range(5):
        core.step()
    assert log == [
        *(("begun", *"abcd"), ("ended", *"abcd")),  # prompts are bounded by the budget
        *(("begun", "a", "b"), ("begun", "c", "d"), ("ended", "a", "b")),
        *(("begun", "a", "b"), ("ended", "c", "d")),
        *(("begun", "c", "d"), ("ended", "a", "b")),
        *(("begun", "a", "b"), ("ended", "c", "d")),
    ]


def test_a_lone_request_is_never_planned_ahead_of_its_token() -> None:
    core, log, runner = make_core(num_stages=4)
    core.add_request(request("a"))
    assert run(core) == {"a": 3}
    assert log == [("begun", "a"), ("ended", "a")] * 3 and runner.num_steps == 3


@pytest.mark.parametrize("num_in_flight", [1, 2, 3, 5])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_every_plan_is_executed_and_taken_once_and_nothing_is_left(num_stages, num_in_flight):
    core, log, runner = make_core(num_stages, num_in_flight, max_num_seqs=5)
    expected = {}
    for i in range(12):
        expected[str(i)] = 1 + i % 4
        core.add_request(request(str(i), 1 + i % 4))
        if i % 3 == 0:
            core.step()
    max_in_flight = 0
    for _ in as_long_as(core.has_unfinished_requests, 100):
        core.step()
        max_in_flight = max(max_in_flight, len(core._in_flight))
    assert runner.said == expected
    begun = [entry[1:] for entry in log if entry[0] == "begun"]
    assert begun == [entry[1:] for entry in log if entry[0] == "ended"]
    assert not core._in_flight and not core.in_flight_plans._in_flight
    assert max_in_flight <= 2 * num_in_flight


def test_the_number_of_plans_in_flight_is_limited() -> None:
    core, log, _ = make_core(num_stages=8, num_in_flight=3)
    for name in "abcdefgh":
        core.add_request(request(name, 5))
    core.step()
    for _ in range(20):
        core.step()
        in_flight = sum(1 if entry[0] == "begun" else -1 for entry in log)
        assert in_flight <= 2, "after a step; 3 before it waited"
    assert (
        max(sum(1 if entry[0] == "begun" else -1 for entry in log[:i]) for i in range(len(log)))
        == 3
    )


def test_a_full_batch_does_not_ask_for_a_plan_in_every_step() -> None:
    core, log, _ = make_core(max_num_seqs=2)
    for name in "abcd":
        core.add_request(request(name, 5))
    assert run(core) == dict.fromkeys("abcd", 5)
    assert ("begun",) not in log


def test_an_empty_plan_in_flight_is_not_a_step_and_delays_none() -> None:
    """`c` exceeds the budget: a plan was asked for, and it scheduled no request."""
    core, log, _ = make_core(num_in_flight=3, max_num_batched_tokens=4)
    for name in "ab":
        core.add_request(request(name, 6))
    core.step()
    core.add_request(Request.from_tokens("c", [1] * 4, 3))
    results = [core.step() for _ in range(6)]
    assert all(len(result) == 1 for result in results), results
    assert ("begun",) in log
    assert run(core)["c"] == 3


def test_an_empty_plan_in_flight_does_not_count() -> None:
    """Two plans compute, though `c`, which does not fit, has brought a third about."""
    core, log, _ = make_core(max_num_batched_tokens=4)
    for name in "ab":
        core.add_request(request(name, 6))
    core.add_request(Request.from_tokens("c", [1] * 4, 3))
    core.step()
    assert log == [("begun", "a", "b"), ("begun",), ("ended", "a", "b")]
    core.step()
    assert log[3:] == [("begun", "a"), ("begun", "b"), ("ended",), ("ended", "a")]


def test_an_empty_plan_with_a_preemption_is_a_step() -> None:
    """So that a counter of preemptions gets it."""
    from forced_preemption import ForcedPreemption
    from scheduler import Scheduler

    pipeline = PipelinePlugin(2)
    scheduler = Scheduler(plugins=[pipeline, ForcedPreemption(3)])
    records = []
    recorder = RecordedScheduler(scheduler, [records.append], check_invariants=True)
    core = PipelinedEngineCore(recorder, QueuedRunner(LoggingRunner([], names)), pipeline, 2)
    for name in "ab":
        core.add_request(request(name, 4))
    num_told = 0  # in the engine, which looks at one plan a step
    for _ in as_long_as(core.has_unfinished_requests, 60):
        core.step()
        num_told += len(preemptions_of(recorder.plan)[0])
    num_preempted = sum(len(record.preempted) for record in records)
    assert num_told == num_preempted == scheduler.get_stats().total_preempted > 0
    assert any(record.preempted and not record.num_scheduled_tokens for record in records)


def test_an_empty_plan_that_is_alone_is_a_step() -> None:
    """The result that the loop waits for then (KV from elsewhere) decides the next plan."""
    core, log, _ = make_core()
    core.add_request(request("a"))
    core.scheduler.scheduler._admit = lambda budget: {}
    records = []
    core.scheduler.observers = (records.append,)
    assert list(core.step()) == []
    assert log == [("begun",), ("ended",)] and len(records) == 1


@pytest.mark.parametrize("fails_when_waited_for", [False, True])
@pytest.mark.parametrize("step", [1, 2, 3, 4])
def test_an_error_ends_all_steps_under_way_and_the_loop_goes_on(step, fails_when_waited_for):
    core, log, runner = make_core(num_stages=3)
    runner.fails_at, runner.fails_when_waited_for = step, fails_when_waited_for
    for name in "abc":
        core.add_request(request(name, 9))
    with pytest.raises(OSError, match=f"step {step}"):
        for _ in range(4):
            core.step()
    assert not core._in_flight
    begun, ended = ([e[1:] for e in log if e[0] == kind] for kind in ("begun", "ended"))
    assert ended == (begun if fails_when_waited_for else begun[:-1]), "all are waited for, once"
    assert all(r.num_output_placeholders == 0 for r in core.scheduler.requests.values())
    for name in "abc":
        core.abort_request(name)
    core.add_request(request("d", 2))
    outputs = [result.new_token_ids for _ in range(2) for result in core.step()]
    assert outputs == [[1], [2]]


def test_a_request_aborted_in_flight_gets_no_token_and_its_id_can_be_reused() -> None:
    core, _, _ = make_core()
    for name in "ab":
        core.add_request(request(name, 9))
    core.step(), core.step()
    core.abort_request("a"), core.abort_request("b")
    core.add_request(again := request("b", 2))
    assert run(core) == {"b": 2}
    assert again.output_token_ids == [3, 4], "the step under way was the old one's"
    assert core.in_flight_plans.num_discarded_tokens == 1
