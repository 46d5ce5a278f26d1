"""The loops with several plans in flight, a step ahead or in a pipeline: their order, what fills
them, and what becomes of errors."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from bounded_loops import as_long_as
from common.runner.overlap import OverlappedEngineCore, QueuedRunner, ThreadedRunner
from common.tests.logging_runner import LoggingRunner
from fcfs_scheduler import FCFSScheduler
from overlap_plugin import OverlapPlugin
from pipeline_plugin import PipelinePlugin
from request import Request
from scheduler_interface import FinishedStep, SchedulerOutput, StepOutput
from step_record import make_record

BOTH = pytest.mark.parametrize("num_stages", [None, 3])


class Loop:
    """A loop that runs a step ahead, or with `num_stages`. Its runner computes nothing: `log` has
    `>ab` for a step of a and b that was begun, and `<ab` for one that was waited for."""

    def __init__(self, num_stages: int | None, num_in_flight: int = 0, **options) -> None:
        self.entries: list[tuple] = []
        self.records: list = []
        names = lambda _, plan: tuple(plan.num_scheduled_tokens)  # noqa: E731
        self.runner = LoggingRunner(self.entries, names)
        self.plugin: Any = PipelinePlugin(num_stages) if num_stages else OverlapPlugin()
        self.scheduler = FCFSScheduler(plugins=[self.plugin], **options)
        parts = self.scheduler, QueuedRunner(self.runner), self.plugin
        num_plans = (num_in_flight or num_stages) if num_stages else 2
        self.core = OverlappedEngineCore(*parts, num_plans)
        self.outputs: dict[str, list[int]] = {}

    def add(self, names: str, max_tokens: int = 3, num_prompt: int = 2) -> None:
        for name in names:
            self.core.add_request(Request.from_tokens(name, [1] * num_prompt, max_tokens))
            self.outputs[name] = []

    def step(self, num: int = 1) -> None:
        for _ in range(num):
            for result in self.core.step():
                self.outputs[result.request_id] += result.new_token_ids
            self.records.append(make_record(self.core, len(self.records)))
            self.scheduler.check_invariants()

    def run(self) -> None:
        for _ in as_long_as(self.core.has_unfinished_requests, 100):
            self.step()
        assert not self.core.in_flight and not getattr(self.plugin, "_in_flight", ())

    @property
    def log(self) -> str:
        return " ".join("<>"[kind == "begun"] + "".join(names) for kind, *names in self.entries)


def test_a_step_is_planned_and_begun_before_the_one_before_it_is_read() -> None:
    loop = Loop(None)
    loop.add("a")
    loop.step(2)
    assert loop.log == ">a >a <a >a <a" and loop.outputs == {"a": [1, 2]}


def test_decodes_are_split_and_each_part_is_planned_before_the_other_has_ended() -> None:
    """Prompts are bounded by the budget."""
    loop = Loop(2)
    loop.add("abcd", 4)
    loop.step(5)
    assert loop.log == ">abcd <abcd >ab >cd <ab >ab <cd >cd <ab >ab <cd"
    alone = Loop(4)
    alone.add("a")
    alone.run()
    assert alone.log == ">a <a >a <a >a <a", "never planned ahead of its token"


@pytest.mark.net
@pytest.mark.parametrize("num_in_flight", [1, 2, 5])
@pytest.mark.parametrize("num_stages", [None, 1, 2, 4])
def test_every_plan_is_executed_and_taken_once_and_nothing_is_left(num_stages, num_in_flight):
    """A record is of the step that ended. No more plans are in flight than allowed."""
    loop = Loop(num_stages, num_in_flight, max_num_seqs=5)
    expected = {}
    for i in range(12):
        loop.add(name := "abcdefghijkl"[i], 1 + i % 4)
        expected[name] = [*range(1, 2 + i % 4)]
        if i % 3 == 0:
            loop.step()
    loop.run()
    assert loop.outputs == expected
    begun, ended = ([e[1:] for e in loop.entries if e[0] == kind] for kind in ("begun", "ended"))
    assert begun == ended, "nothing is begun behind a last token that is pending"
    assert [*filter(None, ended)] == [tuple(r.num_scheduled_tokens) for r in loop.records]
    told = [(name, *ids) for record in loop.records for name, ids in record.new_token_ids.items()]
    assert len(told) == len(set(told)) == sum(map(len, expected.values()))
    in_flight = [1 if entry[0] == "begun" else -1 for entry in loop.entries if len(entry) > 1]
    largest = max(sum(in_flight[:i]) for i in range(len(in_flight) + 1))
    assert largest <= (num_in_flight if num_stages else 2)


@pytest.mark.parametrize("fails_when_waited_for", [False, True])
@pytest.mark.parametrize("step", [1, 2, 3, 4])
@BOTH
def test_an_error_ends_all_steps_in_flight_and_the_loop_goes_on(
    num_stages, step, fails_when_waited_for
) -> None:
    loop = Loop(num_stages)
    loop.runner.fails_at = step
    loop.runner.fails_when_waited_for = fails_when_waited_for
    loop.add("abc", 9)
    with pytest.raises(OSError, match=f"step {step}"):
        loop.step(4)
    begun, ended = ([e[1:] for e in loop.entries if e[0] == kind] for kind in ("begun", "ended"))
    assert ended == (begun if fails_when_waited_for else begun[:-1]), "all are waited for, once"
    assert not loop.core.in_flight
    assert all(r.num_output_placeholders == 0 for r in loop.scheduler.requests.values())
    for name in "abc":
        loop.core.abort_request(name)
    loop.add("d", 2)
    loop.run()
    assert loop.outputs["d"] == [1, 2]


def test_an_empty_plan_ends_the_filling_although_there_is_work() -> None:
    """A request whose KV is being loaded: planning again would find the same."""
    plans = iter([SchedulerOutput()] * 2)
    scheduler: Any = SimpleNamespace(
        schedule=lambda: next(plans), update_from_output=lambda plan, output: []
    )
    in_flight: Any = SimpleNamespace(has_work=True)
    core = OverlappedEngineCore(scheduler, QueuedRunner(OneToken()), in_flight, 2)
    assert core.step() == [] and not core.in_flight
    assert core.step() == []


# -- the threads


class OneToken:
    def execute(self, plan: SchedulerOutput) -> FinishedStep:
        if "bad" in plan.num_scheduled_tokens:
            raise OSError("bad")
        return FinishedStep(StepOutput({r: [1] for r in plan.num_scheduled_tokens}))


def test_after_an_interrupt_no_other_step_runs() -> None:
    """Trap 85: a step that was begun when the call was interrupted is in no list."""
    plan = SchedulerOutput(num_scheduled_tokens={"a": 1})
    before = set(threading.enumerate())
    runner = ThreadedRunner(OneToken())
    lost = runner.begin(plan)
    runner.give_up()
    assert lost.job.done()
    assert runner.execute(plan).wait().token_ids == {"a": [1]}
    assert len(set(threading.enumerate()) - before) == 1
    runner.close()
    assert set(threading.enumerate()) <= before
