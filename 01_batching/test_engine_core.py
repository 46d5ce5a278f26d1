"""The loop: its stops against a script. Its tokens against transformers: with the runner,
`test_hf_model_runner.py`."""

from __future__ import annotations

import pytest

from bounded_loops import as_long_as
from engine_core import EngineCore
from fcfs_scheduler import FCFSScheduler
from request import Request, SamplingParams
from scheduler_interface import FinishedStep, SchedulerOutput, StepOutput
from step_record import RecordedScheduler, StepRecord

VOCAB_SIZE = 61


def make(request_id: str, prompt: list[int], eos=(), **params) -> Request:
    return Request(request_id, prompt, SamplingParams(temperature=0, **params), eos_token_ids=eos)


def run(engine: EngineCore, *requests: Request) -> None:
    for request in requests:
        engine.add_request(request)
    for _ in as_long_as(engine.has_unfinished_requests):
        engine.step()


class ScriptedRunner:
    """Says token `script[k]` to a request for the k-th time. Every plan must pass through it."""

    def __init__(self, script: list[int]) -> None:
        self.script = script
        self.num_said: dict[str, int] = {}
        self.plans: list[SchedulerOutput] = []
        self.num_forwards = 0

    def execute(self, plan: SchedulerOutput) -> FinishedStep:
        self.plans.append(plan)
        for req_id in plan.finished_req_ids:
            del self.num_said[req_id]
        for new in plan.scheduled_new_reqs:
            self.num_said[new.req_id] = 0
        self.num_forwards += not plan.is_empty
        output = StepOutput()
        for req_id in plan.num_scheduled_tokens:
            output.token_ids[req_id] = [self.script[self.num_said[req_id]]]
            self.num_said[req_id] += 1
        return FinishedStep(output)


SCRIPT = [20, 30, 21, 31, 22, 9, 23, 24, 25, 26, 27, 28]  # 30 and 31 are EOS, 9 is a stop token


@pytest.mark.parametrize(
    ("params", "num_tokens", "reason", "stop_reason"),
    [
        ({}, 2, "stop", None),
        ({"min_tokens": 2}, 2, "stop", None),
        ({"min_tokens": 3}, 4, "stop", None),  # the other EOS id (Trap 49)
        ({"min_tokens": 5}, 10, "length", None),
        ({"ignore_eos": True}, 10, "length", None),
        ({"ignore_eos": True, "stop_token_ids": [9]}, 6, "stop", 9),
        ({"ignore_eos": True, "stop_token_ids": [9], "min_tokens": 7}, 10, "length", None),
        ({"ignore_eos": True, "stop_token_ids": [31]}, 4, "stop", 31),
        ({"stop_token_ids": [20]}, 1, "stop", 20),
        ({"max_tokens": 1}, 1, "length", None),
        ({"max_tokens": 2}, 2, "stop", None),
    ],
)
def test_what_stops_a_request(params, num_tokens, reason, stop_reason):
    request = make("r", [1, 2], [30, 31], **{"max_tokens": 10, **params})
    engine = EngineCore(
        RecordedScheduler(FCFSScheduler(), check_invariants=True), ScriptedRunner(SCRIPT)
    )
    engine.add_request(request)
    results = []
    for _ in as_long_as(engine.has_unfinished_requests):
        results += engine.step()
    assert request.output_token_ids == SCRIPT[:num_tokens]
    assert [token for result in results for token in result.new_token_ids] == SCRIPT[:num_tokens]
    assert (results[-1].finish_reason, results[-1].stop_reason) == (reason, stop_reason)
    assert all(result.finish_reason is None for result in results[:-1])
    assert engine.scheduler.num_steps == num_tokens


def test_an_empty_step_computes_nothing_and_still_tells_the_runner():
    runner = ScriptedRunner(SCRIPT)
    engine = EngineCore(FCFSScheduler(), runner)
    assert engine.step() == []
    run(engine, make("a", [1], max_tokens=1))
    assert runner.num_said == {"a": 1}
    assert engine.step() == []
    assert runner.num_forwards == 1
    assert runner.num_said == {}, "the runner was not told that a has ended"
    assert [plan.finished_req_ids for plan in runner.plans] == [set(), set(), {"a"}]


def test_an_aborted_request_ends_at_once_and_others_do_not_notice():
    runner = ScriptedRunner(SCRIPT)
    engine = EngineCore(
        RecordedScheduler(FCFSScheduler(max_num_seqs=2), check_invariants=True), runner
    )
    a, b, c = (make(name, [1, 2], max_tokens=4) for name in "abc")
    for request in (a, b, c):
        engine.add_request(request)
    engine.step()
    assert engine.get_request_counts() == (2, 1)
    engine.abort_request("a")
    assert (a.finish_reason, a.output_token_ids) == ("abort", SCRIPT[:1])
    assert engine.get_request_counts() == (1, 1)
    assert [result.request_id for result in engine.step()] == ["c", "b"]
    engine.abort_request("nobody")
    run(engine)
    assert b.output_token_ids == c.output_token_ids == SCRIPT[:4]


def test_an_abort_from_within_a_step_drops_its_token():
    """Between `schedule` and `update_from_output`, as a user who hangs up does."""

    class AbortingRunner(ScriptedRunner):
        def execute(self, plan):
            handle = super().execute(plan)
            if len(self.plans) == 2:
                engine.abort_request("a")
            return handle

    runner = AbortingRunner(SCRIPT)
    engine = EngineCore(RecordedScheduler(FCFSScheduler(), check_invariants=True), runner)
    a, b = make("a", [1], max_tokens=5), make("b", [1], max_tokens=5)
    run(engine, a, b)
    assert (a.output_token_ids, a.finish_reason) == (SCRIPT[:1], "abort")
    assert b.output_token_ids == SCRIPT[:5]


class Answers:
    """A runner that has one answer for every plan."""

    def __init__(self, output: StepOutput) -> None:
        self.output = output

    def execute(self, plan: SchedulerOutput) -> FinishedStep:
        return FinishedStep(self.output)


def test_log_probabilities_are_cut_with_the_tokens():
    """Trap 38: a runner that offers more tokens than a request takes."""
    output = StepOutput({"a": [5, 6, 7]}, {"a": ["five", "six", "seven"]})
    engine = EngineCore(FCFSScheduler(), Answers(output))
    engine.add_request(make("a", [1], max_tokens=9, stop_token_ids=[6]))
    (result,) = engine.step()
    assert (result.new_token_ids, result.logprobs) == ([5, 6], ["five", "six"])


def test_a_request_that_cannot_be_sampled_ends_and_the_others_go_on():
    class BadForA(ScriptedRunner):
        def execute(self, plan):
            output = super().execute(plan).wait()
            if len(self.plans) == 2:
                del output.token_ids["a"]
                output.errors["a"] = "why"
            return FinishedStep(output)

    steps: list[StepRecord] = []
    engine = EngineCore(
        RecordedScheduler(FCFSScheduler(), [steps.append], check_invariants=True), BadForA(SCRIPT)
    )
    a, b = make("a", [1], max_tokens=4), make("b", [1], max_tokens=4)
    engine.add_request(a)
    engine.add_request(b)
    engine.step()
    of_a, of_b = engine.step()
    assert (of_a.new_token_ids, of_a.finish_reason, of_a.finish_detail) == ([], "error", "why")
    assert (of_b.new_token_ids, of_b.finish_reason) == ([SCRIPT[1]], None)
    assert steps[1].finished == {"a": "error"}
    run(engine)
    assert (a.finish_reason, a.output_token_ids) == ("error", SCRIPT[:1])
    assert (b.finish_reason, b.output_token_ids) == ("length", SCRIPT[:4])


def test_two_engines_share_nothing():
    """Trap 50."""
    runners = [ScriptedRunner(SCRIPT), ScriptedRunner(SCRIPT)]
    one, other = (EngineCore(FCFSScheduler(), runner) for runner in runners)
    a = make("a", [1], max_tokens=2)
    run(one, a)
    again = make("a", [1, 2, 3], max_tokens=4)
    run(other, again)
    assert [len(runner.plans) for runner in runners] == [2, 4]
    assert (a.output_token_ids, again.output_token_ids) == (SCRIPT[:2], SCRIPT[:4])


def test_a_step_that_is_not_finished_is_waited_for_once():
    """`execute` begins a step, `wait` ends it: its output is used only then."""
    events = []

    class SlowRunner:
        def execute(self, plan):
            events.append(("execute", list(plan.num_scheduled_tokens)))
            return self

        def wait(self):
            events.append("wait")
            return StepOutput({"a": [5]})

    class Watching(FCFSScheduler):
        def update_from_output(self, plan, output):
            events.append(("update", output.token_ids))
            return super().update_from_output(plan, output)

    engine = EngineCore(Watching(), SlowRunner())
    engine.add_request(make("a", [1], max_tokens=2))
    (result,) = engine.step()
    assert result.new_token_ids == [5]
    assert events == [("execute", ["a"]), "wait", ("update", {"a": [5]})]
