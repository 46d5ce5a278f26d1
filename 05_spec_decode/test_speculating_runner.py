"""Speculation around a runner: no token changes, whatever a proposer says; who is asked, and what
is counted. The runs are those of chapter 4's tests."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

import test_scheduler_runs as runs
from adaptive_length import AdaptiveLength
from bounded_loops import as_long_as
from draft_plugin import DraftPlugin, FixedLength
from fake_model import FakeModelRunner, continuation
from input_batch import RunnerRequest
from kv_memory import KeyedRequest, SharingRunnerState, UncachedKVCacheManager
from prefill_first_scheduler import PrefillFirstScheduler
from proposers import NgramProposer, Proposer, ProposerInput
from request import Request
from scheduler import Scheduler
from scheduler_interface import FinishedStep, SchedulerOutput
from speculating_runner import SpeculatingRunner
from test_scheduler_runs import CACHES, VOCAB, make_memory

K = 3
SCHEDULERS = (Scheduler, PrefillFirstScheduler)
NO_ATTENTION: Any = SimpleNamespace(plan=lambda *arguments: None)
MakeProposer = Callable[[UncachedKVCacheManager, SharingRunnerState], Any]


class World(runs.World):
    """Chapter 4's world with a runner that speculates."""

    def __init__(
        self,
        memory: UncachedKVCacheManager,
        kind: type,
        make_proposer: MakeProposer,
        draft_length: FixedLength | None = None,
        num_lookahead_tokens: int | None = None,
        **options,
    ) -> None:
        state = SharingRunnerState(max_num_seqs=2, max_blocks_per_request=64)
        self.proposer = make_proposer(memory, state)
        if num_lookahead_tokens is None:
            num_lookahead_tokens = self.proposer.num_lookahead_tokens
        self.length: Any = draft_length or FixedLength(K)
        self.drafts = DraftPlugin(num_lookahead_tokens, self.length)
        super().__init__(memory, kind, plugins=[self.drafts], **options)
        target = FakeModelRunner(memory.block_size, VOCAB, state)
        self.runner = SpeculatingRunner(target, self.proposer, state)
        self.num_moved = 0  # table entries that came to name a cached block

    @property
    def num_discarded_tokens(self) -> int:
        return self.drafts.num_rejected_drafts

    def schedule(self) -> SchedulerOutput:
        plan = super().schedule()
        self.num_moved += len(plan.block_moves)
        return plan

    def run(self, *args, **options) -> None:
        """Also the step after the last one, so that who finished last is forgotten."""
        super().run(*args, **options)
        self.step()
        seen = self.drafts.stats
        assert seen.num_tokens == seen.num_passes + seen.num_accepted
        is_cut = any(request.sampling_params.stop_token_ids for request in self.finished)
        if len(self.finished) == self.num_taken and not is_cut:
            assert seen.num_tokens == sum(len(tokens) for tokens in self.outputs.values())
            assert seen.num_drafted - seen.num_accepted == self.num_discarded_tokens


class Adversary(Proposer):
    """Returns `draft(request, num_drafts)`, asked or not, and drafts for an unknown request.
    Fails on a call that breaks the contract."""

    num_spec_tokens = num_lookahead_tokens = K

    def __init__(self, draft: Callable[[RunnerRequest, int], list[int]]) -> None:
        self.draft = draft
        self.known: dict[str, int] = {}  # positions with KV

    def propose(self, inputs: Sequence[ProposerInput], num_drafts: Sequence[int]):
        drafts = {"stranger": [1, 2, 3]}
        for f, num in zip(inputs, num_drafts, strict=True):
            request = f.request
            num_outputs = len(request.output_token_ids)
            num_uncomputed_tokens = request.num_tokens - f.num_computed_tokens
            assert num_uncomputed_tokens >= 1 and num >= 0 and f.start < f.num_computed_tokens
            if num:
                assert num_uncomputed_tokens == 1 and num_outputs >= 1
                assert num <= request.max_tokens - num_outputs - 1, "Trap 39"
            assert f.start >= self.known.get(request.req_id, 0), "a preempted request is new"
            self.known[request.req_id] = f.num_computed_tokens
            drafts[request.req_id] = self.draft(request, num)
        return drafts

    def remove_request(self, request_id: str) -> None:
        self.known.pop(request_id, None)


def right(request: RunnerRequest, num_drafts: int) -> list[int]:
    num_outputs = len(request.output_token_ids)
    outputs = continuation(request.prompt_token_ids, num_outputs + num_drafts, VOCAB)
    return outputs[num_outputs:]


def right_until(place: int) -> Callable[[RunnerRequest, int], list[int]]:
    def propose(request: RunnerRequest, num_drafts: int) -> list[int]:
        return [(t + (i >= place)) % VOCAB for i, t in enumerate(right(request, num_drafts))]

    return propose


def at_random(rng: random.Random) -> Callable[[RunnerRequest, int], list[int]]:
    return lambda request, num: [rng.randrange(VOCAB + 1) for _ in range(rng.randint(0, 4))]


def adversary(draft: Callable[[RunnerRequest, int], list[int]]) -> MakeProposer:
    return lambda memory, state: Adversary(draft)


PROPOSERS: dict[str, MakeProposer] = {
    "ngram": lambda memory, state: NgramProposer(K, max_ngram=3, min_ngram=1),
    "right": adversary(right),
    **{f"until {i}": adversary(right_until(i)) for i in range(K)},
    "too many": adversary(lambda request, num: right(request, num + 9)),
    "too many, and wrong": adversary(lambda request, num: right_until(num)(request, num + 9)),
    "fewer": adversary(lambda request, num: right(request, num // 2)),
    "at random": lambda memory, state: Adversary(at_random(random.Random(1))),
    "no tokens at all": adversary(lambda request, num: [-1, VOCAB, 10**9][:num]),
}


def run_at_random(
    world: runs.World, rng: random.Random, to_come: list[KeyedRequest], *, has_aborts: bool
) -> None:
    """Trickling arrivals, and aborts while the runner is at work. The id may be used again before
    the runner has received the abort."""
    scheduler = world.scheduler

    def abort() -> None:
        if has_aborts and rng.random() < 0.05 and scheduler.requests:
            name = rng.choice(sorted(scheduler.requests))
            scheduler.abort_request(name)
            if to_come and rng.random() < 0.7:
                to_come[-1].request_id = name
                world.take(to_come.pop())

    for _ in as_long_as(lambda: to_come or scheduler.has_unfinished_requests(), 3000):
        if to_come and rng.random() < 0.4:
            world.take(request := to_come.pop())
            for i in range(rng.choice([0, 0, 0, 2])):  # as one call with `n` samples adds them
                fields = {"priority": request.priority, "extra_keys": request.extra_keys}
                params = request.sampling_params
                name = f"{request.request_id}.{i}"
                world.take(KeyedRequest(name, request.prompt_token_ids, params, (), **fields))
        world.step(abort)


@pytest.mark.net
@pytest.mark.sample
@pytest.mark.parametrize("name", PROPOSERS)
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_no_token_changes(kind, cache, name):
    """Small pools, preemption, equal prompts, stop tokens (Trap 38), aborts while the runner is at
    work. A proposer forgets who has ended."""
    for seed in range(4):
        rng = random.Random(f"{seed} {cache} {name}")
        memory, to_come = runs.random_load(rng, cache)
        length = AdaptiveLength(K, probe_every=3) if seed % 2 else None
        options = runs.random_options(rng, kind)
        options["num_lookahead_tokens"] = rng.choice([None, 0, 1, K])
        world = World(memory, kind, PROPOSERS[name], length, **options)
        run_at_random(world, rng, to_come, has_aborts=seed > 1)
        world.run()
        assert not getattr(world.proposer, "_histories" if name == "ngram" else "known")


class Recorder(FixedLength):
    """Writes down what it is told."""

    def __init__(self, num_spec_tokens: int = K) -> None:
        super().__init__(num_spec_tokens)
        self.steps: list[tuple] = []
        self.observed: list[tuple] = []

    def observe(self, *numbers) -> None:
        self.observed.append(numbers)

    def observe_step(self, *numbers) -> None:
        self.steps.append(numbers)


def test_what_a_length_is_told_of_steps_and_requests(monkeypatch):
    """Steps with prompt tokens are not timed. After steps without drafts, a draft model is fed what
    it has missed: that is no round of proposing. A request with an error is not proposed for."""
    clock = SimpleNamespace(ms={"propose_ms": 7.0}, lap=lambda name: None)
    monkeypatch.setattr("speculating_runner.StepTimer", lambda: clock)
    length = Recorder()
    errors = {}
    world = World(make_memory(None, 60, 4), Scheduler, PROPOSERS["until 1"], length)
    execute = world.runner.runner.execute

    def timed(plan: SchedulerOutput) -> FinishedStep:
        output = execute(plan).wait()
        output.times = {"prepare_ms": 3.0, "forward_ms": 20.0}
        output.errors = errors
        for name in errors:
            del output.token_ids[name]
        return FinishedStep(output)

    world.runner.runner.execute = timed
    world.take(Request.from_tokens("a", [1, 2, 3], 40))
    steps: list[tuple] = []
    for length.num_spec_tokens in (2, 3, 0, 0, 1, 1):
        world.step()
        steps += [tuple(length.steps[-1:])]
    # A request's tokens, and rounds of drafting; nothing of the prompt's step.
    expected = [(3, 3), (4, 0), (1, 0), (1, 0), (2, 1)]
    assert steps == [(), *[((1, *step, 23.0, 7.0),) for step in expected]]
    assert length.observed == [(2, 1), (3, 1), (1, 1)]
    world.take(Request.from_tokens("b", [1, 2], 9))
    world.step()
    assert len(length.steps) == 5
    errors["b"] = "its logits say nothing"
    world.step()
    assert length.steps[-1][:2] == (2, 2 + 1 + 1)
