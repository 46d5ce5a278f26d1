"""Draft tokens on both of chapter 4's schedulers: what they decide (`drafts.txt`). Whole runs:
test_speculating_runner.py."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from draft_plugin import DraftPlugin
from fake_model import FakeModelRunner
from pipeline_plugin import PipelinePlugin
from prefill_first_scheduler import PrefillFirstScheduler
from request import Request
from scheduler import Scheduler
from scheduler_interface import FinishedStep, SchedulerOutput, StepOutput
from scheduler_steps import SchedulerLog, make_loop
from step_log import Case, StepLog, cases_of

KINDS = {"two-phase": Scheduler, "prefill-first": PrefillFirstScheduler}


class DraftingRunner:
    """The fake model, which returns the drafts of a test after each step."""

    def __init__(self, runner: FakeModelRunner) -> None:
        self.runner = runner
        self.state = runner.state
        self.vocab_size = runner.vocab_size
        self.proposals: Mapping[str, Sequence[int]] = {}

    def execute(self, plan: SchedulerOutput) -> FinishedStep:
        output = self.runner.execute(plan).wait()
        output.draft_token_ids = {r: list(tokens) for r, tokens in self.proposals.items()}
        self.proposals = {}
        return FinishedStep(output)


class DraftLog(SchedulerLog):
    def __init__(self, kind: type, *, lookahead: int = 0, **options) -> None:
        if kind is PrefillFirstScheduler:
            options |= {"init_new_token_ratio": 0.0, "min_new_token_ratio": 0.0}
        self.plugin = DraftPlugin(lookahead)
        super().__init__(make_loop(kind, plugins=[self.plugin], **options))
        self.loop.runner = DraftingRunner(self.loop.runner)

    def act(self, action: str) -> str:
        word, _, rest = action.partition(" ")
        if word == "guess":
            self.loop.runner.proposals = dict(map(self.guess, rest.split()))
        elif word == "budget":
            self.loop.scheduler.max_num_batched_tokens = int(rest)
        else:
            return super().act(action)
        return action

    def guess(self, word: str) -> tuple[str, list[int]]:
        name, is_right, num = re.fullmatch(r"(\w+?)(=?)(\d+)", word).groups()
        if not is_right:
            return name, [self.loop.runner.vocab_size] * int(num)
        request = self.loop.requests[name]
        num_known = request.num_output_tokens + 1
        return name, self.loop.continuation(request)[num_known : num_known + int(num)]

    def describe(self, plan: SchedulerOutput) -> str:
        words = super().describe(plan).partition(" |")[0]
        for name, drafts in plan.scheduled_draft_token_ids.items():
            words = re.sub(rf"\b{name}\d+", rf"\g<0>({len(drafts)})", words)
        return words

    def check_end(self) -> None:
        StepLog.check_end(self)
        self.loop.check_account(self.plugin.num_rejected_drafts)


@pytest.mark.net
@cases_of(Path(__file__).with_name("drafts.txt"))
def test_drafts(case: Case):
    options = dict(case.options)
    name = options.pop("kind", None)
    for kind in [KINDS[name]] if name else KINDS.values():
        DraftLog(kind, **options).perform(case)


@pytest.mark.parametrize("kind", KINDS.values())
def test_drafts_of_a_finished_request_are_not_used_for_the_next_of_its_id(kind):
    """Trap 40, in a pipeline. The step of the first `a` returns drafts, and settles those that it
    was planned with, when another `a` runs."""
    proposals = DraftPlugin()
    scheduler = kind(num_gpu_blocks=40, block_size=4, plugins=[PipelinePlugin(2), proposals])
    scheduler.add_request(Request.from_tokens("a", [1, 2, 3], 20))
    scheduler.update_from_output(
        scheduler.schedule(), StepOutput({"a": [4]}, draft_token_ids={"a": [5, 6]})
    )
    first = scheduler.schedule()
    assert first.scheduled_draft_token_ids == {"a": [5, 6]}
    scheduler.abort_request("a")
    scheduler.add_request(again := Request.from_tokens("a", [1, 2], 20))
    second = scheduler.schedule()
    scheduler.update_from_output(first, StepOutput({"a": [5]}, draft_token_ids={"a": [7, 8]}))
    assert proposals.drafts == {} and again.num_computed_tokens == 2
    scheduler.update_from_output(second, StepOutput({"a": [3]}, draft_token_ids={"a": [9]}))
    assert proposals.drafts == {"a": [9]} and again.output_token_ids == [3]
    scheduler.check_invariants()
    with pytest.raises(ValueError, match=r"^num_lookahead_tokens must .*>= 0, got 1.5"):
        DraftPlugin(1.5)


@pytest.mark.parametrize("kind", KINDS.values())
def test_tokens_after_a_stop_string_are_cut_with_their_logprobs(kind):
    """Trap 82: not those of another request that has the id of an aborted one."""
    sequences = {name: SimpleNamespace(num_wanted=lambda tokens: 2) for name in "abc"}
    plugin = DraftPlugin(sequences=sequences)
    scheduler = kind(num_gpu_blocks=40, block_size=4, plugins=[plugin])
    for name in "abc":
        scheduler.add_request(Request.from_tokens(name, [1, 2, 3], 20))
    proposals = {"a": [5, 6], "b": [5], "c": [5, 6]}
    output = StepOutput({name: [4] for name in "abc"}, draft_token_ids=proposals)
    scheduler.update_from_output(scheduler.schedule(), output)
    plan = scheduler.schedule()
    scheduler.abort_request("c")
    sequences["c"] = SimpleNamespace(num_wanted=lambda tokens: 1)
    scheduler.add_request(Request.from_tokens("c", [1, 2], 20))
    tokens = {"a": [5, 6, 7], "b": [5, 8], "c": [5, 6, 7]}
    output = StepOutput(tokens, {"a": ["x", "y", "z"]})
    results = scheduler.update_from_output(plan, output)
    assert {r.request_id: r.new_token_ids for r in results} == {"a": [5, 6], "b": [5, 8]}
    assert output.logprobs["a"] == ["x", "y"] and output.token_ids["c"] == [5, 6, 7]
    assert plugin.num_rejected_drafts == 1 and plugin.stats.num_accepted == 2
