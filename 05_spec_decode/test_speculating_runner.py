"""Speculation around a runner: who is asked, what is counted, and that no token changes, whatever a
proposer says."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adaptive_length import AdaptiveLength
from bounded_loops import as_long_as
from draft_model_proposer import DraftModelProposer
from draft_plugin import DraftPlugin
from engine_core import EngineCore
from fake_model import FakeModelRunner, continuation
from input_batch import RunnerRequest
from kv_memory import SharingRunnerState, UncachedKVCacheManager
from paged_attention import PagedKVCache
from prefill_first_scheduler import PrefillFirstScheduler
from proposers import NgramProposer, Proposer, ProposerInput
from request import Request, SamplingParams
from scheduler import Scheduler
from scheduler_interface import (
    CachedRequestData,
    FinishedStep,
    NewRequestData,
    SchedulerOutput,
    StepOutput,
)
from scheduler_steps import make_scheduler
from speculating_runner import DraftLength, FixedLength, SpeculatingRunner
from step_record import RecordedScheduler
from test_scheduler_runs import make_memory

VOCAB = 6  # few tokens, so that drafts are accepted by chance too
K = 3
SCHEDULERS = (Scheduler, PrefillFirstScheduler)
CACHES = (None, "hash", "radix")


@dataclass
class Recorder:
    """A `Proposer` and a `DraftLength` that write down what they are asked and told."""

    num_drafts: int | Callable[[str], int] = K
    num_spec_tokens: int = K
    num_lookahead_tokens: int = 0
    log: list[tuple] = field(default_factory=list)
    inputs: list[ProposerInput] = field(default_factory=list)

    def propose(self, inputs: Sequence[ProposerInput], num_drafts: Sequence[int]):
        self.inputs = list(inputs)
        ids = [f.request.req_id for f in inputs]
        self.log.append(("propose", dict(zip(ids, num_drafts, strict=True))))
        return {i: [1] * num for i, num in zip(ids, num_drafts) if num}

    def draft_probs(self, request_id: str) -> None:
        return None

    def choose(self, request_ids: Sequence[str]) -> list[int]:
        self.log.append(("choose", list(request_ids)))
        if callable(self.num_drafts):
            return [self.num_drafts(request_id) for request_id in request_ids]
        return [self.num_drafts] * len(request_ids)

    def observe(self, request_id: str, num_drafted: int, num_accepted: int) -> None:
        self.log.append(("observe", request_id, num_drafted, num_accepted))

    def observe_step(self, *args) -> None:
        self.log.append(("step", *args))

    def remove_request(self, request_id: str) -> None:
        self.log.append(("remove_request", request_id))

    def take(self, *events: str) -> list[tuple]:
        taken = [entry for entry in self.log if entry[0] in events]
        self.log.clear()
        return taken


@dataclass(frozen=True)
class Row:
    """A request whose step computes the rest of 8 tokens, `num_uncomputed_tokens` less, and
    samples."""

    request_id: str
    sampled: Sequence[int] = (7,)
    drafts: Sequence[int] = ()
    num_uncomputed_tokens: int = 0  # then it samples nothing
    num_outputs_left: int = 20  # outputs that it may have after this step
    start: int = 0
    error: str | None = None


class Inner:
    """A `ModelRunner` that says what it is told to."""

    def __init__(self) -> None:
        self.state = SharingRunnerState(max_num_seqs=4, max_blocks_per_request=1)
        self.output = StepOutput()
        self.times: dict[str, float] = {}

    def execute(self, plan: SchedulerOutput) -> FinishedStep:
        self.state.apply(plan)
        self.output.times = dict(self.times)
        return FinishedStep(self.output)


class Bench:
    """A `SpeculatingRunner` around `Inner`, with a `Recorder` on either side."""

    def __init__(self, **options) -> None:
        self.recorder = Recorder(**options)
        self.inner = Inner()
        self.runner = SpeculatingRunner(self.inner, self.recorder, self.recorder, self.inner.state)

    def step(
        self, *rows: Row, resumed: Sequence[str] = (), finished: Sequence[str] = ()
    ) -> StepOutput:
        """Each row is a new request, unless it is resumed."""
        plan = SchedulerOutput(finished_req_ids=set(finished))
        output = self.inner.output = StepOutput()
        for row in rows:
            sampled = [] if row.num_uncomputed_tokens or row.error else list(row.sampled)
            num_tokens = 8 + len(row.drafts) - row.num_uncomputed_tokens - row.start
            plan.num_scheduled_tokens[row.request_id] = num_tokens
            if row.drafts:
                plan.scheduled_draft_token_ids[row.request_id] = list(row.drafts)
            if row.request_id in resumed:
                plan.scheduled_cached_reqs = CachedRequestData(
                    [row.request_id], [list(range(8))], [row.start], [0], [()], {row.request_id}
                )
            else:
                params = SamplingParams(max_tokens=row.num_outputs_left + len(sampled))
                plan.scheduled_new_reqs.append(
                    NewRequestData(row.request_id, list(range(8)), params, row.start)
                )
            if sampled:
                output.token_ids[row.request_id] = sampled
            if row.error:
                output.errors[row.request_id] = row.error
        return self.runner.execute(plan).wait()


def test_only_continuing_requests_that_lack_one_token_get_drafts():
    """Each the number that was chosen for it, but no negative one."""
    bench = Bench(num_drafts=lambda request_id: int(request_id) - 2)
    output = bench.step(
        Row("5"),
        Row("2", num_uncomputed_tokens=3),  # in the middle of its prompt
        Row("3", num_outputs_left=0),
        Row("6", error="its logits say nothing"),
        Row("1"),
        Row("4"),
    )
    assert output.draft_token_ids == {"5": [1] * 3, "4": [1] * 2}
    assert bench.recorder.take("choose", "propose") == [
        ("choose", ["5", "1", "4"]),
        ("propose", {"5": 3, "2": 0, "1": 0, "4": 2}),
    ]


def test_a_proposer_sees_the_tokens_of_the_step_and_no_rejected_one():
    bench = Bench()
    bench.step(
        Row("1", sampled=[5], start=2),
        Row("2", sampled=[4, 9], drafts=[4, 4, 4], start=7),
        Row("3", num_uncomputed_tokens=3, start=1),
    )
    seen = [
        (f.request.tokens(0, f.request.num_tokens)[8:], f.start, f.num_computed_tokens)
        for f in bench.recorder.inputs
    ]
    assert seen == [([5], 2, 8), ([4, 9], 7, 9), ([], 1, 5)]


def test_no_more_drafts_than_remaining_outputs():
    """The token that follows the drafts is an output too (Trap 39)."""
    for num_outputs_left in range(1, 7):
        bench = Bench()
        bench.step(Row("1", num_outputs_left=num_outputs_left), Row("2"))
        expected = {"1": min(num_outputs_left - 1, K), "2": K}
        assert bench.recorder.take("propose") == [("propose", expected)]


def test_a_request_that_has_finished_is_forgotten_before_its_id_begins_again():
    """A preempted one is new to the proposer, because its block table is another one; what is known
    of its acceptance holds."""
    bench = Bench()
    bench.step(Row("1"))
    bench.recorder.log.clear()
    bench.step(Row("1"), resumed=["1"])
    assert bench.recorder.take("remove_request") == [("remove_request", "1")]
    bench.step(Row("1"), finished=["1"])
    names = [name for name, *_ in bench.recorder.log]
    assert names[:4] == ["remove_request", "remove_request", "choose", "propose"]


def test_the_results_of_drafts_are_reported():
    bench = Bench()
    bench.step(
        Row("1", sampled=[4, 4, 5], drafts=[4, 4, 4]),
        Row("2", sampled=[4, 9], drafts=[4]),
        Row("3", sampled=[5], drafts=[4, 4]),
        Row("4", sampled=[6]),
    )
    assert bench.recorder.take("observe") == [
        ("observe", *x) for x in (("1", 3, 2), ("2", 1, 1), ("3", 2, 0))
    ]
    stats = bench.runner.stats
    assert (stats.num_passes, stats.num_tokens) == (4, 7)
    assert (stats.num_drafted, stats.num_accepted) == (6, 3)
    bench.step(
        Row("5", num_uncomputed_tokens=4), Row("6", drafts=[1], error="its logits say nothing")
    )
    assert stats.num_passes == 4, "a piece of a prompt yields nothing, and an error too"


def test_times_of_steps_without_prompt_tokens(monkeypatch):
    class Clock:
        def __init__(self) -> None:
            self.ms = {"propose_ms": 7.0}

        def lap(self, name: str) -> None:
            pass

    monkeypatch.setattr("speculating_runner.StepTimer", Clock)
    bench = Bench()
    bench.inner.times = {"prepare_ms": 1.0, "forward_ms": 20.0, "sample_ms": 300.0}
    one, other = Row("1", start=7), Row("2", start=7, num_outputs_left=3)
    output = bench.step(one, other)
    assert output.times == {**bench.inner.times, "propose_ms": 7.0}
    bench.recorder.log.clear()
    for rows in (
        (),
        (Row("1", start=6), other),
        (Row("1", start=7, drafts=[1, 1]), Row("2", start=6, drafts=[1])),
        (Row("1", start=5, num_uncomputed_tokens=1),),
    ):
        bench.step(*rows)
        assert bench.recorder.take("step") == [], rows
    bench.step(one, other)
    bench.step(one, other)
    bench.step(
        Row("1", start=7, drafts=[2, 2], sampled=[1]),
        Row("2", start=7, drafts=[2], sampled=[2, 2], num_outputs_left=3),
    )
    assert bench.recorder.take("step")[1:] == [
        ("step", 2, 2, K, 321.0, 7.0),
        ("step", 2, 5, K, 321.0, 7.0),
    ]


def test_drafting_is_not_timed_when_skipped_or_when_a_model_caught_up():
    """After steps without drafts, a draft model is fed what it has missed."""
    bench = Bench()
    rounds = []
    for num_drafts in (2, 3, 0, 0, 1, 1):
        bench.recorder.num_drafts = num_drafts
        bench.step(Row("1", start=7))
        rounds += [entry[3] for entry in bench.recorder.take("step")]
    assert rounds == [0, 3, 0, 0, 0, 1]


# -- in the loop


class Adversary(Proposer):
    """Returns `draft(request, num_drafts)`, asked or not, and drafts for an unknown request.
    Fails on a call that breaks the contract."""

    num_spec_tokens = num_lookahead_tokens = K

    def __init__(self, draft: Callable[[RunnerRequest, int], list[int]]) -> None:
        self.draft = draft
        self.known: set[str] = set()

    def propose(self, inputs: Sequence[ProposerInput], num_drafts: Sequence[int]):
        drafts = {"stranger": [1, 2, 3]}
        for f, num in zip(inputs, num_drafts, strict=True):
            request = f.request
            num_outputs = len(request.output_token_ids)
            num_uncomputed_tokens = request.num_tokens - f.num_computed_tokens
            assert num_uncomputed_tokens >= 1 and num >= 0 and f.start < f.num_computed_tokens
            if num:
                assert num_uncomputed_tokens == 1 and num_outputs >= 1
                assert num <= request.max_tokens - num_outputs - 1
            self.known.add(request.req_id)
            drafts[request.req_id] = self.draft(request, num)
        return drafts

    def remove_request(self, request_id: str) -> None:
        self.known.discard(request_id)


def right(request: RunnerRequest, num_drafts: int) -> list[int]:
    num_outputs = len(request.output_token_ids)
    outputs = continuation(request.prompt_token_ids, num_outputs + num_drafts, VOCAB)
    return outputs[num_outputs:]


def right_until(place: int) -> Callable[[RunnerRequest, int], list[int]]:
    def propose(request: RunnerRequest, num_drafts: int) -> list[int]:
        return [(t + (i >= place)) % VOCAB for i, t in enumerate(right(request, num_drafts))]

    return propose


class EchoModel:
    """A draft model for which it is enough to see the last token: it reads no KV, and is wrong."""

    num_heads = 1

    def __call__(self, batch, kv_cache):
        outputs = (batch.input_ids * 3 + batch.positions)[batch.logit_indices] % VOCAB
        return torch.nn.functional.one_hot(outputs, VOCAB).double()


def make_draft_proposer(
    memory: UncachedKVCacheManager, state: SharingRunnerState
) -> DraftModelProposer:
    kv_cache = PagedKVCache(1, memory.pool.num_blocks, memory.block_size, 1, 1)
    nothing: Any = SimpleNamespace(plan=lambda *arguments: None)
    return DraftModelProposer(EchoModel(), kv_cache, nothing, state, K, max_model_len=60)


PROPOSERS: dict[str, Callable[[UncachedKVCacheManager, SharingRunnerState], Proposer]] = {
    "ngram": lambda memory, state: NgramProposer(K, max_ngram=3, min_ngram=1),
    "draft": make_draft_proposer,
    "right": lambda memory, state: Adversary(right),
    **{f"until {i}": lambda memory, state, i=i: Adversary(right_until(i)) for i in range(K)},
    "too many": lambda memory, state: Adversary(lambda request, num: right(request, num + 9)),
    "too many, and wrong": lambda memory, state: Adversary(
        lambda request, num: right_until(num)(request, num + 9)
    ),
    "fewer": lambda memory, state: Adversary(lambda request, num: right(request, num // 2)),
    "no tokens at all": lambda memory, state: Adversary(
        lambda request, num: [-1, VOCAB, 10**9][:num]
    ),
}


class Engine:
    """Chapter 1's loop over this chapter's parts, and the outputs of every request."""

    def __init__(
        self,
        kind: type,
        memory: UncachedKVCacheManager,
        proposer: str | None,
        draft_length: DraftLength | None = None,
        **options,
    ) -> None:
        state = SharingRunnerState(max_num_seqs=4, max_blocks_per_request=64)
        runner = FakeModelRunner(memory.block_size, VOCAB, state)
        if proposer is not None:
            self.proposer = PROPOSERS[proposer](memory, state)
            options["plugins"] = [DraftPlugin(self.proposer.num_lookahead_tokens)]
            runner = self.runner = SpeculatingRunner(
                runner, self.proposer, draft_length or FixedLength(K), state
            )
        self.scheduler = make_scheduler(kind, kv_memory=memory, **options)
        self.core = EngineCore(RecordedScheduler(self.scheduler, check_invariants=True), runner)
        self.outputs: dict[str, list[int]] = {}
        self.finished: list[Request] = []

    def add(self, request: Request) -> None:
        self.core.add_request(request)
        self.outputs[request.request_id] = []

    def step(self) -> None:
        known = dict(self.scheduler.requests)
        for result in self.core.step():
            self.outputs[result.request_id] += result.new_token_ids
            if result.finish_reason:
                self.finished.append(known[result.request_id])

    def run(self) -> None:
        for _ in as_long_as(self.core.has_unfinished_requests, 2000):
            self.step()
        self.core.step()

    def check_counts(self) -> None:
        """Check the counts of a run in which no request was aborted or stopped early."""
        stats, seen = self.scheduler.get_stats(), self.runner.stats
        (draft_plugin,) = [p for p in self.scheduler.plugins if isinstance(p, DraftPlugin)]
        assert seen.num_tokens == sum(len(tokens) for tokens in self.outputs.values())
        assert seen.num_tokens == seen.num_passes + seen.num_accepted
        assert seen.num_drafted - seen.num_accepted == draft_plugin.num_rejected_drafts
        needed = sum(request.num_tokens - 1 for request in self.finished)
        assert stats.total_scheduled_tokens == (
            needed
            - stats.total_cached_tokens
            + stats.total_recomputed_tokens
            + draft_plugin.num_rejected_drafts
        )


def family(seed: int, num_requests: int) -> list[Request]:
    """Prompts that share beginnings."""
    rng = random.Random(seed)
    heads = [[rng.randrange(VOCAB) for _ in range(6)] for _ in range(2)]
    requests = []
    for i in range(num_requests):
        tail = [rng.randrange(VOCAB) for _ in range(rng.randint(0, 3))]
        requests.append(Request.from_tokens(f"r{i}", rng.choice(heads) + tail, rng.randint(1, 12)))
    return requests


@pytest.mark.net
@pytest.mark.sample
@pytest.mark.parametrize("name", PROPOSERS)
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_no_token_changes(kind, cache, name):
    """Small pools, small budgets, and every request preempted now and then."""
    for preempt_every in (None, 1, 2, 3, 5):
        memory = make_memory(cache, 12, 3)
        engine = Engine(
            kind,
            memory,
            name,
            preempt_every=preempt_every,
            max_num_batched_tokens=11,
            max_preemptions=4,
        )
        for request in family(preempt_every or 0, 4):
            engine.add(request)
        engine.run()
        for request in engine.finished:
            outputs = engine.outputs[request.request_id]
            assert outputs == continuation(request.prompt_token_ids, request.max_tokens, VOCAB)
        assert len(engine.finished) == 4
        engine.check_counts()


@pytest.mark.parametrize(
    ("name", "accepted_length"), [("right", K + 1), *((f"until {i}", i + 1) for i in range(K))]
)
def test_accepted_drafts_save_passes(name, accepted_length):
    memory = make_memory(None, 60, 4)
    engine = Engine(Scheduler, memory, name)
    engine.add(Request.from_tokens("a", [1, 2, 3], 1 + 10 * accepted_length))
    engine.run()
    seen = engine.runner.stats
    assert seen.num_passes == 1 + 10
    assert seen.mean_accepted_length == pytest.approx(accepted_length, abs=0.05)


@pytest.mark.parametrize("name", PROPOSERS)
def test_a_stop_token_inside_an_accepted_run_ends_the_request(name):
    """Trap 38."""
    prompt = [1, 2, 3, 4]
    outputs = continuation(prompt, 15, VOCAB)
    for stop in range(VOCAB):
        memory = make_memory("hash", 30, 4)
        engine = Engine(Scheduler, memory, name)
        params = SamplingParams(temperature=0, max_tokens=15, stop_token_ids=[stop])
        engine.add(Request("a", prompt, params))
        engine.run()
        end = outputs.index(stop) + 1 if stop in outputs else 15
        assert engine.outputs["a"] == outputs[:end]


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_reused_id_after_an_abort_is_another_request(kind):
    """The id may be reused before the runner has received the abort."""
    for name in ("ngram", "draft", "right"):
        for step in range(1, 6):
            memory = make_memory("hash", 40, 4)
            engine = Engine(kind, memory, name, AdaptiveLength(K))
            engine.add(Request.from_tokens("a", [1, 2, 3, 1, 2, 3], 30))
            engine.add(Request.from_tokens("b", [3, 3, 1], 9))
            for _ in range(step):
                engine.step()
            engine.core.abort_request("a")
            engine.add(Request.from_tokens("a", [2, 1], 9))
            engine.run()
            assert engine.outputs["a"] == continuation([2, 1], 9, VOCAB)
            assert engine.runner.draft_length._requests == {}
            kept = {"ngram": "_histories", "draft": "_followers", "right": "known"}[name]
            assert not getattr(engine.proposer, kept), "everybody has ended"


def test_lengths_that_adapt_change_no_token_and_see_the_steps():
    for seed in range(3):
        memory = make_memory("hash", 40, 4)
        length = AdaptiveLength(K, probe_every=3)
        engine = Engine(Scheduler, memory, "draft", length, preempt_every=7)
        for request in family(seed, 8):
            engine.add(request)
        engine.run()
        for request in engine.finished:
            outputs = engine.outputs[request.request_id]
            assert outputs == continuation(request.prompt_token_ids, request.max_tokens, VOCAB)
        engine.check_counts()
        assert length.verify_cost.has_seen and length._requests == {}
