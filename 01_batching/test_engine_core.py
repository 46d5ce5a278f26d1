"""The loop, on a script. Its tokens against transformers: with the runner,
`test_hf_model_runner.py`."""

from __future__ import annotations

from bounded_loops import as_long_as
from engine_core import EngineCore
from fcfs_scheduler import FCFSScheduler
from request import Request, SamplingParams
from scheduler_interface import FinishedStep, SchedulerOutput, StepOutput

SCRIPT = [20, 30, 21, 31, 22, 9, 23, 24, 25, 26, 27, 28]


def make(request_id: str, prompt: list[int], **params) -> Request:
    return Request(request_id, prompt, SamplingParams(temperature=0, **params))


def run(engine: EngineCore, *requests: Request) -> None:
    for request in requests:
        engine.add_request(request)
    for _ in as_long_as(engine.has_unfinished_requests):
        engine.step()


class ScriptedRunner:
    """Says token `SCRIPT[k]` to a request for the k-th time. Every plan must pass through it."""

    def __init__(self) -> None:
        self.num_said: dict[str, int] = {}
        self.plans: list[SchedulerOutput] = []

    def execute(self, plan: SchedulerOutput) -> FinishedStep:
        self.plans.append(plan)
        for req_id in plan.finished_req_ids:
            del self.num_said[req_id]
        for new in plan.scheduled_new_reqs:
            self.num_said[new.req_id] = 0
        output = StepOutput()
        for req_id in plan.num_scheduled_tokens:
            output.token_ids[req_id] = [SCRIPT[self.num_said[req_id]]]
            self.num_said[req_id] += 1
        return FinishedStep(output)


def test_an_empty_step_computes_nothing_and_still_tells_the_runner():
    engine = EngineCore(FCFSScheduler(), runner := ScriptedRunner())
    assert engine.step() == []
    run(engine, make("a", [1], max_tokens=1))
    assert runner.num_said == {"a": 1}
    assert engine.step() == []
    assert runner.num_said == {}, "the runner was not told that a has ended"
    assert [plan.is_empty for plan in runner.plans] == [True, False, True]


class Answers:
    """A runner that has one answer for every plan, and says it only when it is waited for."""

    def __init__(self, output: StepOutput) -> None:
        self.output = output

    def execute(self, plan: SchedulerOutput) -> Answers:
        return self

    def wait(self) -> StepOutput:
        return self.output


def test_what_is_sampled_behind_the_end_is_cut_and_an_error_ends_its_request_alone():
    """Trap 38: a runner that offers more tokens than a request takes."""
    output = StepOutput(
        {"a": [5, 6, 7], "c": [8]}, {"a": ["five", "six", "seven"]}, errors={"b": "why"}
    )
    engine = EngineCore(FCFSScheduler(), Answers(output))
    for name in "abc":
        engine.add_request(make(name, [1], max_tokens=9, stop_token_ids=[6]))
    a, b, c = engine.step()
    assert (a.new_token_ids, a.logprobs, a.stop_reason) == ([5, 6], ["five", "six"], 6)
    assert (b.new_token_ids, b.finish_reason, b.finish_detail) == ([], "error", "why")
    assert (c.new_token_ids, c.finish_reason) == ([8], None)
    assert engine.get_request_counts() == (1, 0)


def test_two_engines_share_nothing():
    """Trap 50."""
    runners = [ScriptedRunner(), ScriptedRunner()]
    one, other = (EngineCore(FCFSScheduler(), runner) for runner in runners)
    a = make("a", [1], max_tokens=2)
    run(one, a)
    again = make("a", [1, 2, 3], max_tokens=4)
    run(other, again)
    assert [len(runner.plans) for runner in runners] == [2, 4]
    assert (a.output_token_ids, again.output_token_ids) == (SCRIPT[:2], SCRIPT[:4])
