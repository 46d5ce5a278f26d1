"""Requirements of draft tokens on a scheduler, case by case and in whole runs, for both of chapter
4's schedulers.

The model is fake and its KV is not: see chapter 4's fake_model.py. Whole runs are those of chapter
4's tests, with a proposer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import initialize, precondition, rule

import test_scheduler_runs as runs
from bounded_loops import as_long_as
from draft_plugin import DraftPlugin
from fake_model import FakeModelRunner, continuation
from pipeline_plugin import PipelinePlugin
from prefill_first_scheduler import PrefillFirstScheduler
from request import Request
from scheduler import Scheduler
from scheduler_interface import FinishedStep, SchedulerOutput, StepOutput
from scheduler_steps import SchedulerLoop, make_memory, preempted_ids, scheduled_tokens
from unchunked import ChunkToBudget

SCHEDULERS = (Scheduler, PrefillFirstScheduler)
Drafts = Mapping[str, Sequence[int]]


class DraftingRunner:
    """The fake model, which returns the drafts of a test after each step."""

    def __init__(self, runner: FakeModelRunner) -> None:
        self.runner, self.state = runner, runner.state
        self.proposals: Drafts = {}

    def execute(self, plan: SchedulerOutput) -> FinishedStep:
        output = self.runner.execute(plan).wait()
        output.draft_token_ids = {r: list(tokens) for r, tokens in self.proposals.items()}
        return FinishedStep(output)


class Loop(SchedulerLoop):
    """Block size 4, no cache."""

    def __init__(self, num_blocks: int, kind: type = Scheduler, **options) -> None:
        if kind is Scheduler:
            options.setdefault("watermark", 0.0)
        else:
            options.setdefault("init_new_token_ratio", 0.0)
            options.setdefault("min_new_token_ratio", 0.0)
        self.draft_plugin = DraftPlugin(options.pop("num_lookahead_tokens", 0))
        memory = make_memory(None, num_blocks, 4)
        super().__init__(kind(kv_memory=memory, plugins=[self.draft_plugin], **options))
        self.runner = DraftingRunner(self.runner)

    def step(self, proposals: Drafts | None = None) -> SchedulerOutput:
        """Run a step, after which the runner returns `proposals`."""
        self.runner.proposals = proposals or {}
        return super().step()

    def run(self, max_steps: int = 500) -> None:
        super().run(max_steps)
        for request_id, request in self.requests.items():
            expected = continuation(request.prompt_token_ids, request.max_tokens)
            assert self.outputs[request_id] == expected


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_drafts_are_planned_trimmed_and_taken_back(kind):
    loop = Loop(40, kind, max_num_batched_tokens=12)
    first, second = loop.add("a", 6, 6), loop.add("b", 6, 20)
    expected = continuation(second.prompt_token_ids, 20)
    loop.step({"a": [0] * 9, "b": expected[1:9], "nobody": [1]})
    assert len(loop.draft_plugin.drafts["a"]) == 4, "6 outputs: 1 is there, and 1 needs no draft"
    plan = loop.step()
    assert scheduled_tokens(plan) == {"a": 5, "b": 7}, "the budget cuts b's drafts"
    assert plan.scheduled_draft_token_ids["b"] == expected[1:7]
    assert loop.outputs["b"] == expected[:8], "six accepted, and one more"
    assert loop.outputs["a"] == continuation(first.prompt_token_ids, 2), "none accepted"
    assert first.num_computed_tokens == first.num_tokens - 1
    assert loop.draft_plugin.num_rejected_drafts == 4
    assert scheduled_tokens(loop.step()) == {"a": 1, "b": 1}, "drafts are for one step"
    loop.run()
    stats = loop.scheduler.get_stats()
    num_tokens = sum(r.num_tokens - 1 for r in loop.requests.values())
    assert stats.total_scheduled_tokens == num_tokens + loop.draft_plugin.num_rejected_drafts


def test_a_block_that_ends_in_a_rejected_guess_is_not_published():
    """Trap 13. 7 tokens are known, 3 drafts fill the second block, and all three are wrong."""
    scheduler = Scheduler(num_gpu_blocks=20, block_size=4, plugins=[DraftPlugin()])
    request = Request.from_tokens("r", [1, 2, 3, 4, 5, 6], 20)
    scheduler.add_request(request)
    output = StepOutput({"r": [7]}, draft_token_ids={"r": [50, 51, 52]})
    scheduler.update_from_output(scheduler.schedule(), output)
    scheduler.update_from_output(scheduler.schedule(), StepOutput({"r": [8]}))
    assert (request.num_tokens, request.num_computed_tokens) == (8, 7)
    (published,) = scheduler.kv_memory.cache.cached_prefixes()
    assert published.token_ids == (1, 2, 3, 4)


def test_drafts_of_a_request_that_is_skipped_never_enter_the_model():
    """Trap 40."""
    loop = Loop(20)
    for name in "ab":
        loop.add(name, 1, 12)
    loop.step({"a": [0, 0, 0], "b": [0, 0]})
    loop.scheduler.max_num_batched_tokens = 1
    assert scheduled_tokens(loop.step()) == {"a": 1}, "the budget is gone"
    assert loop.draft_plugin.drafts == {"b": [0, 0]}, "kept for the step that plans it"
    loop.scheduler.max_num_batched_tokens = 10
    loop.run()


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_each_request_gets_a_token_before_any_draft_is_verified(kind):
    loop = Loop(40, kind)
    for name in "abc":
        loop.add(name, 3, 12)
    loop.step({"b": [1, 2, 3], "c": [1, 2, 3]})
    loop.scheduler.max_num_batched_tokens = 7
    assert scheduled_tokens(loop.step({"b": [1, 2, 3], "c": [1, 2, 3]})) == {"a": 1, "b": 4, "c": 2}
    loop.scheduler.max_num_batched_tokens = 3
    assert scheduled_tokens(loop.step()) == {"a": 1, "b": 1, "c": 1}
    assert loop.draft_plugin.drafts == {}


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        (Scheduler, {"chunk_policy": ChunkToBudget()}, [(2, 4), (1, 5)]),
        (
            PrefillFirstScheduler,
            {"chunked_prefill_size": 6, "mixing": True},
            [(2, 4), (2, 4), (2, 4), (5, 1)],
        ),
    ],
)
def test_a_waiting_prompt_gets_a_block_before_any_draft_is_verified(kind, options, expected):
    """6 tokens a step, blocks of 4: after a's token, 4 are for the prompt and 1 for a draft. A
    prompt in flight also gets a token before any draft."""
    loop = Loop(40, kind, max_num_batched_tokens=6, **options)
    loop.add("a", 4, 20)
    loop.step({"a": [0] * 5})
    loop.add("b", 12, 2)
    for of_a, of_b in expected:
        assert scheduled_tokens(loop.step({"a": [0] * 5})) == {"a": of_a, "b": of_b}
    loop.run()


class OneToken(ChunkToBudget):
    def num_tokens_to_schedule(self, request, num_uncomputed_tokens, budget, max_step_tokens):
        return min(1, budget)


def test_drafts_are_not_a_prompt_and_no_chunk_policy_chunks_them():
    loop = Loop(40, chunk_policy=OneToken())
    loop.add("a", 2, 12)
    loop.step()
    loop.step({"a": [0, 0, 0]})
    assert scheduled_tokens(loop.step()) == {"a": 4}


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_no_request_is_preempted_for_a_draft(kind):
    """Two blocks each, and all are held: a draft of `a` would need another one."""
    loop = Loop(4, kind)
    loop.add("a", 6, 8)
    loop.step()
    loop.add("b", 6, 2)
    loop.step({"a": [0, 0]})
    plan = loop.step()
    assert not plan.preempted_requests and not plan.scheduled_draft_token_ids
    assert scheduled_tokens(plan) == {"a": 1, "b": 1}
    loop.run()


def test_a_victim_that_was_planned_gives_its_drafts_back_too():
    """Trap 21. What else it gives back: the test of almost this name in chapter 4."""
    loop = Loop(5, policy="priority", max_num_batched_tokens=12)
    for name, num_prompt, priority in (("v", 3, 5), ("u", 5, 1), ("o", 4, 2)):
        loop.add(name, num_prompt, 8, priority=priority)
        plan = loop.step({"v": [1, 1]} if name == "o" else None)
    assert scheduled_tokens(plan) == {"v": 1, "u": 1, "o": 4}  # 2 + 2 + 1 blocks: all are held
    plan = loop.scheduler.schedule()  # v has room inside its block; o wants another block
    assert preempted_ids(plan) == ["v"]
    assert scheduled_tokens(plan) == {"u": 1, "o": 1}
    assert plan.scheduled_draft_token_ids == {} and loop.draft_plugin.drafts == {}


@pytest.mark.parametrize("kind", SCHEDULERS)
@pytest.mark.parametrize("lookahead", [1, 3, 4, 9])
def test_draft_slots_follow_a_steps_tokens_if_there_are_any_to_spare(lookahead, kind):
    loop = Loop(100, kind, num_lookahead_tokens=lookahead)
    request = loop.add("a", 4, 13)  # its last fed token ends a block
    loop.step()
    for _ in as_long_as(lambda: not request.is_finished):
        loop.step()
        table = loop.scheduler.kv_memory.get_block_ids("a")
        end = min(request.num_computed_tokens + lookahead, request.max_num_tokens - 1)
        assert request.is_finished or len(table) == -(-end // 4)
    tight = Loop(5, kind, num_lookahead_tokens=lookahead)
    assert tight.add("a", 4, 17).max_tokens == 17
    tight.add("b", 1, 3)
    tight.run()


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_drafts_of_a_finished_request_or_a_partial_prompt_are_dropped(kind):
    """The runner proposes before the scheduler knows which requests end with this step."""
    options = {"chunk_policy": ChunkToBudget()}
    if kind is PrefillFirstScheduler:
        options = {"chunked_prefill_size": 8}
    loop = Loop(40, kind, max_num_batched_tokens=8, **options)
    loop.add("a", 3, 1)
    loop.add("b", 1, 9)
    loop.add("c", 9, 3)
    plan = loop.scheduler.schedule()
    assert scheduled_tokens(plan) == {"a": 3, "b": 1, "c": 4}
    loop.scheduler.abort_request("b")
    loop.runner.proposals = {name: [1, 2] for name in "abcd"}
    loop.update(plan)
    assert loop.draft_plugin.drafts == {}
    del loop.requests["b"]
    loop.run()


@pytest.mark.parametrize("kind", SCHEDULERS)
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


@pytest.mark.parametrize("num_slots", [-1, 1.5, True, None])
def test_a_number_of_slots_that_makes_no_sense_is_named(num_slots):
    with pytest.raises(ValueError, match=f"^num_lookahead_tokens must .*>= 0, got {num_slots}"):
        DraftPlugin(num_slots)


class World(runs.World):
    """Chapter 4's world with drafts."""

    def __init__(self, memory, kind=Scheduler, num_lookahead_tokens: int = 0, **options) -> None:
        super().__init__(memory, kind, plugins=[DraftPlugin(num_lookahead_tokens)], **options)
        self.runner = DraftingRunner(self.runner)


class GuessingMachine(runs.SchedulerMachine):
    """Any order of calls; after each, everything that must hold."""

    world_type = World

    @initialize(**runs.SMALL_WORLDS, num_lookahead_tokens=st.integers(0, 3))
    def start(self, **options):
        super().start(**options)

    @precondition(lambda self: self.world.pending is not None)
    @rule(data=st.data())
    def update(self, data):
        drafts = st.lists(st.integers(0, runs.VOCAB), max_size=4)
        request_ids = sorted(self.world.pending.num_scheduled_tokens)
        self.world.runner.proposals = {r: data.draw(drafts) for r in request_ids}
        self.world.update()
        self.world.runner.proposals = {}


GuessingMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestGuessingMachine = pytest.mark.net(GuessingMachine.TestCase)
