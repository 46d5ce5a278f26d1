"""The loop that runs a step ahead: its order, and what becomes of errors."""

from __future__ import annotations

import threading
from collections import Counter
from itertools import count
from types import SimpleNamespace

import pytest

from common.runner.overlap import OverlappedEngineCore, QueuedRunner, ThreadedRunner
from common.tests.logging_runner import LoggingRunner, request
from fcfs_scheduler import FCFSScheduler
from overlap_plugin import OverlapPlugin
from scheduler_interface import FinishedStep, SchedulerOutput, StepOutput
from step_record import RecordedScheduler
from test_worker_thread import interrupted_at


class LoggingScheduler(FCFSScheduler):
    log: list

    def schedule(self):
        plan = super().schedule()
        self.log.append("planned")
        return plan

    def update_from_output(self, plan, output):
        self.log.append("updated")
        return super().update_from_output(plan, output)


def make_core() -> tuple[OverlappedEngineCore, list, LoggingRunner]:
    log: list = []
    overlap, runner = OverlapPlugin(), LoggingRunner(log, lambda step, plan: (step,))
    scheduler = LoggingScheduler(plugins=[overlap])
    scheduler.log = log
    recorder = RecordedScheduler(scheduler, check_invariants=True)
    return (
        OverlappedEngineCore(recorder, QueuedRunner(runner), in_flight_plans=overlap),
        log,
        runner,
    )


def test_a_step_is_planned_and_begun_before_the_one_before_it_is_read() -> None:
    core, log, _ = make_core()
    core.add_request(request("a"))
    results = [core.step() for _ in range(2)]
    assert log == [
        *("planned", ("begun", 1), "planned", ("begun", 2), ("ended", 1), "updated"),
        *("planned", ("begun", 3), ("ended", 2), "updated"),
    ]
    assert [[r.new_token_ids for r in step] for step in results] == [[[1]], [[2]]]


def test_each_step_of_the_loop_returns_one_plans_results_and_the_last_leaves_nothing() -> None:
    core, log, runner = make_core()
    for name, n in (("a", 1), ("b", 4), ("c", 2)):
        core.add_request(request(name, n))
    outputs, num_steps = Counter(), 0
    while core.has_unfinished_requests():
        for result in core.step():
            outputs[result.request_id] += len(result.new_token_ids)
        num_steps += 1
        assert num_steps < 20
    assert outputs == {"a": 1, "b": 4, "c": 2}
    assert runner.num_steps == num_steps, "nothing is begun behind a last token that is pending"
    assert runner.num_steps == log.count("planned") == log.count("updated")
    assert not core._in_flight


def test_an_empty_step_is_not_planned_ahead_of() -> None:
    """The result that the loop waits for then (KV from elsewhere) decides the next plan."""
    core, log, _ = make_core()
    core.add_request(request("a"))
    core.scheduler.scheduler._admit = lambda budget: {}
    assert list(core.step()) == []
    assert log == ["planned", ("begun", 1), ("ended", 1), "updated"]


def test_waiting_for_steps_in_flight_takes_no_output() -> None:
    core, log, _ = make_core()
    core.add_request(request("a", 9))
    core.step()
    core.runner.wait_for_steps()
    assert log[-1] == ("ended", 2) and log.count("updated") == 1
    core.runner.wait_for_steps()
    assert log.count(("ended", 2)) == 1, "once"
    (result,) = core.step()
    assert result.new_token_ids == [2]
    assert len(core.runner._in_flight) == len(core._in_flight) == 1, "who has ended is forgotten"


@pytest.mark.parametrize("fails_when_waited_for", [False, True])
@pytest.mark.parametrize("step", [1, 2, 3])
def test_an_error_ends_all_steps_in_flight_and_the_loop_continues(step, fails_when_waited_for):
    core, _, runner = make_core()
    runner.fails_at, runner.fails_when_waited_for = step, fails_when_waited_for
    core.add_request(request("a", 9))
    with pytest.raises(OSError, match=f"step {step}"):
        for _ in range(4):
            core.step()
    assert not core._in_flight
    assert all(r.num_output_placeholders == 0 for r in core.scheduler.requests.values())
    core.abort_request("a")
    core.add_request(request("b", 2))
    outputs = [result.new_token_ids for _ in range(2) for result in core.step()]
    assert outputs == [[1], [2]]


def test_a_record_is_of_the_step_that_ended() -> None:
    core, _, _ = make_core()
    records = []
    core.scheduler.observers = (records.append,)
    core.add_request(request("a"))
    while core.has_unfinished_requests():
        core.step()
    assert [record.num_scheduled_tokens for record in records] == [{"a": 2}, {"a": 1}, {"a": 1}]
    assert [record.new_token_ids for record in records] == [{"a": [1]}, {"a": [2]}, {"a": [3]}]


def test_the_thread_computes_steps_in_order_without_a_waiting_call() -> None:
    names, may_go = [], threading.Event()

    class Runner:
        def execute(self, plan: SchedulerOutput) -> FinishedStep:
            may_go.wait(10)
            names.append((threading.current_thread().name, *plan.num_scheduled_tokens))
            if "bad" in plan.num_scheduled_tokens:
                raise OSError("bad")
            return FinishedStep(StepOutput({r: [1] for r in plan.num_scheduled_tokens}))

    runner = ThreadedRunner(Runner())
    plans = [SchedulerOutput(num_scheduled_tokens={name: 1}) for name in ("a", "bad", "c")]
    handles = [runner.execute(plan) for plan in plans]
    assert names == [], "it returned before the step was over"
    may_go.set()
    assert handles[0].wait().token_ids == {"a": [1]}
    with pytest.raises(OSError, match="bad"):
        handles[1].wait()
    assert handles[2].wait().token_ids == {"c": [1]}
    assert [name[1] for name in names] == ["a", "bad", "c"]
    assert len({name[0] for name in names}) == 1
    assert names[0][0] != threading.current_thread().name


def test_an_interrupted_wait_can_be_repeated_for_the_remaining_steps() -> None:
    class Interrupted:
        def wait(self) -> StepOutput:
            raise KeyboardInterrupt

    class Failed:
        def wait(self) -> StepOutput:
            waited_for.append(self)
            raise OSError

    waited_for: list[Failed] = []
    handles = [Failed(), Interrupted(), Failed(), Failed()]
    steps = iter(handles)
    queued = QueuedRunner(SimpleNamespace(execute=lambda plan: next(steps)))
    for _ in handles:
        queued.execute(SchedulerOutput())
    with pytest.raises(KeyboardInterrupt):
        queued.give_up()
    assert waited_for == handles[:1]
    queued.give_up()
    assert waited_for == [handles[0], *handles[2:]]
    queued.wait_for_steps()  # nothing is in flight
    assert len(waited_for) == 3


def test_an_interrupt_at_any_line_of_a_step_leaves_one_step_thread() -> None:
    """Trap 85: the thread is there before the first step, and what was interrupted comes out as
    that."""

    class Runner:
        def execute(self, plan: SchedulerOutput) -> FinishedStep:
            return FinishedStep(StepOutput({r: [1] for r in plan.num_scheduled_tokens}))

    plan = SchedulerOutput(num_scheduled_tokens={"a": 1})
    for line in count():
        before = set(threading.enumerate())
        runner = ThreadedRunner(Runner())
        was_interrupted = interrupted_at(line, lambda: runner.execute(plan).wait())
        runner.give_up()
        assert runner.execute(plan).wait().token_ids == {"a": [1]}
        assert len(set(threading.enumerate()) - before) == 1
        runner.close()
        assert set(threading.enumerate()) <= before
        if not was_interrupted:
            break
    assert line > 20
