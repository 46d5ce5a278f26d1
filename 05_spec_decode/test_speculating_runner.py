"""Speculation in chapter 1's loop: who is asked, what is counted, and that no token changes,
whatever a proposer says."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from block_pool import BlockPool
from cached_kv_cache_manager import CachedKVCacheManager
from draft_length import AdaptiveLength, DraftLength, FixedLength
from engine_core import EngineCore, SamplerOutput, StepRecord
from fake_model import FakeModelRunner, continuation
from kv_cache_manager import KVCacheManager
from paged_attention import PagedKVCache
from prefill_first_scheduler import PrefillFirstScheduler
from prefix_cache_local import PrefixCacheLocal
from proposers import DraftModelProposer, NgramProposer, Proposer
from radix_cache import RadixCache
from request import Request, RequestStatus, SamplingParams
from scheduler import Scheduler
from scheduler_interface import SchedulerOutput
from speculator import SpecDecodeStats, Speculator

VOCAB = 6  # few tokens, so that guesses come true by chance too
K = 3
SCHEDULERS = (Scheduler, PrefillFirstScheduler)
CACHES = (None, "hash", "radix")


# -- the books


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 5).flatmap(lambda k: st.tuples(st.just(k), st.integers(0, k)))))
def test_nothing_is_lost_in_the_books(passes):
    stats = SpecDecodeStats()
    for drafted, accepted in passes:
        stats.observe(drafted, accepted)
    drafted_passes = [(drafted, accepted) for drafted, accepted in passes if drafted]
    assert stats.num_passes == len(passes)
    assert stats.num_tokens == stats.num_passes + stats.num_accepted
    assert stats.num_drafted == sum(stats.drafted_by_position) == sum(d for d, _ in passes)
    assert stats.num_accepted == sum(stats.accepted_by_position) == sum(a for _, a in passes)
    assert stats.num_drafted_passes == len(drafted_passes)
    assert stats.num_rejections == sum(a < d for d, a in passes)
    for counts in (stats.drafted_by_position, stats.accepted_by_position):
        assert counts == sorted(counts, reverse=True), "behind a rejection none is accepted"
        assert len(counts) == max((d for d, _ in passes), default=0)
    for i, share in enumerate(stats.acceptance_by_position):
        reached = [a for d, a in drafted_passes if d > i]
        assert share == pytest.approx(sum(a > i for a in reached) / len(reached))
    assert 1 <= stats.mean_accepted_length <= 6 and 0 <= stats.acceptance_rate <= 1


def test_the_books_by_hand():
    stats = SpecDecodeStats()
    assert (stats.acceptance_rate, stats.mean_accepted_length, stats.tokens_per_pass) == (0, 1, 0)
    assert stats.acceptance_by_position == []
    for drafted, accepted in ((0, 0), (2, 1), (4, 4), (2, 0)):
        stats.observe(drafted, accepted)
    assert stats.acceptance_by_position == [2 / 3, 1 / 3, 1, 1]
    assert stats.acceptance_rate == 5 / 8
    assert stats.mean_accepted_length == 1 + 5 / 3
    assert stats.tokens_per_pass == 9 / 4


# -- who is asked


@dataclass
class Recorder:
    """A `Proposer` and a `DraftLength` that write down what they are asked and told."""

    num_drafts: int | Callable[[Request], int] = K
    num_spec_tokens: int = K
    num_lookahead_tokens: int = 0
    log: list[tuple] = field(default_factory=list)

    def propose(self, requests: Sequence[Request], num_drafts: Sequence[int]):
        ids = [request.request_id for request in requests]
        self.log.append(("propose", dict(zip(ids, num_drafts, strict=True))))
        return {i: [1] * num for i, num in zip(ids, num_drafts) if num}

    def draft_probs(self, request_id: str) -> torch.Tensor:
        return torch.tensor([float(request_id)])

    def choose(self, requests: Sequence[Request]) -> list[int]:
        self.log.append(("choose", [request.request_id for request in requests]))
        if callable(self.num_drafts):
            return [self.num_drafts(request) for request in requests]
        return [self.num_drafts] * len(requests)

    def observe(self, request_id: str, num_drafted: int, num_accepted: int) -> None:
        self.log.append(("observe", request_id, num_drafted, num_accepted))

    def observe_step(self, *args) -> None:
        self.log.append(("step", *args))

    def forget(self, request_id: str) -> None:
        self.log.append(("forget", request_id))

    def take(self, *events: str) -> list[tuple]:
        taken = [entry for entry in self.log if entry[0] in events]
        self.log.clear()
        return taken


def make_recorded(**options) -> tuple[Recorder, Speculator]:
    recorder = Recorder(**options)
    return recorder, Speculator(recorder, recorder)


def request_at(
    request_id: str,
    num_tokens: int = 8,
    num_behind: int = 1,
    num_left: int = 20,
    status: RequestStatus = RequestStatus.RUNNING,
) -> Request:
    """`num_left` tokens may still become outputs."""
    request = Request.from_tokens(request_id, list(range(num_tokens)), num_left)
    request.num_computed_tokens = num_tokens - num_behind
    request.status = status
    return request


def plan(*requests: Request, finished: Sequence[str] = (), **drafts: list[int]) -> SchedulerOutput:
    return SchedulerOutput(
        num_scheduled_tokens={r.request_id: 1 for r in requests},
        scheduled_requests=list(requests),
        finished_req_ids=set(finished),
        scheduled_draft_token_ids={name.strip("_"): tokens for name, tokens in drafts.items()},
    )


def test_asked_are_those_who_run_and_guessed_on_those_who_lack_one_token():
    recorder, speculator = make_recorded()
    requests = [
        request_at("1"),
        request_at("2", num_behind=3),  # in the middle of its prompt
        request_at("3", status=RequestStatus.FINISHED_STOPPED),
        request_at("4", status=RequestStatus.FINISHED_ABORTED),
        request_at("5", status=RequestStatus.PREEMPTED),
        request_at("6"),
    ]
    drafts = speculator.propose(plan(*requests), {r.request_id: [7] for r in requests})
    assert drafts == {"1": [1] * K, "6": [1] * K}
    assert recorder.take("choose", "propose") == [
        ("choose", ["1", "6"]),
        ("propose", {"1": K, "2": 0, "6": K}),
    ]


@pytest.mark.parametrize("num_left", range(1, 7))
def test_no_more_than_can_still_become_outputs(num_left):
    """The token that follows the drafts is an output too (Trap 39)."""
    recorder, speculator = make_recorded()
    speculator.propose(plan(request_at("1", num_left=num_left), request_at("2")), {})
    assert recorder.take("propose") == [("propose", {"1": min(num_left - 1, K), "2": K})]


def test_lengths_are_each_request_s_own_and_never_negative():
    recorder, speculator = make_recorded(num_drafts=lambda request: int(request.request_id) - 2)
    requests = [request_at(name) for name in "31524"]
    speculator.propose(plan(*requests), {})
    expected = {"3": 1, "1": 0, "5": 3, "2": 0, "4": 2}
    assert recorder.take("propose") == [("propose", expected)]


def test_nobody_is_asked_for_nothing():
    recorder, speculator = make_recorded(num_drafts=0)
    assert speculator.propose(plan(request_at("1")), {}) == {}
    assert recorder.take("propose", "choose") == [("choose", ["1"])]
    recorder.num_drafts = 1
    assert speculator.propose(plan(request_at("1", num_behind=2)), {}) == {}
    assert speculator.propose(plan(), {}) == {}
    assert recorder.take("propose") == []


# -- who is forgotten


def test_finished_ids_are_forgotten_by_both():
    recorder, speculator = make_recorded()
    done = request_at("1", status=RequestStatus.FINISHED_LENGTH_CAPPED)
    speculator.propose(plan(done, request_at("2"), finished=["3"]), {"1": [5]})
    assert recorder.take("forget") == [("forget", "3")] * 2 + [("forget", "1")] * 2


def test_an_id_that_comes_again_in_the_very_step_is_forgotten_first():
    recorder, speculator = make_recorded()
    speculator.propose(plan(request_at("1"), finished=["1"]), {})
    assert [entry[0] for entry in recorder.log] == ["forget", "forget", "choose", "propose"]


def test_who_ends_is_observed_first_and_forgotten_then():
    """The other way round, the rule for lengths would keep it for ever."""
    recorder, speculator = make_recorded()
    done = request_at("1", status=RequestStatus.FINISHED_STOPPED)
    speculator.propose(plan(done, _1=[4, 4]), {"1": [4]})
    assert [entry[0] for entry in recorder.log][:2] == ["observe", "forget"]


# -- what is told


def test_what_came_of_the_drafts():
    recorder, speculator = make_recorded()
    requests = [request_at(name) for name in "1234"]
    output = plan(*requests, _1=[4, 4, 4], _2=[4], _3=[4, 4])
    speculator.propose(output, {"1": [4, 4, 5], "2": [4, 9], "3": [5], "4": [6]})
    assert recorder.take("observe") == [
        ("observe", *x) for x in (("1", 3, 2), ("2", 1, 1), ("3", 2, 0))
    ]
    stats = speculator.stats
    assert (stats.num_passes, stats.num_drafted, stats.num_accepted, stats.num_tokens) == (
        4,
        6,
        3,
        7,
    )
    speculator.propose(plan(request_at("5", num_behind=4)), {})
    assert stats.num_passes == 4, "a piece of a prompt yields nothing"


def record_of(drafts: dict[str, tuple[int, int]], **num_scheduled: int) -> StepRecord:
    return StepRecord(
        step=0,
        start_time=0.0,
        num_scheduled_tokens={name.strip("_"): num for name, num in num_scheduled.items()},
        start_positions={},
        admitted=[],
        preempted=[],
        finished={},
        new_token_ids={},
        num_running=0,
        num_waiting=0,
        schedule_ms=1000.0,
        prepare_ms=1.0,
        forward_ms=20.0,
        sample_ms=300.0,
        update_ms=1000.0,
        propose_ms=7.0,
        drafts=drafts,
    )


def test_times_of_steps_in_which_nobody_computed_a_prompt():
    recorder, speculator = make_recorded()
    requests = [request_at("1"), request_at("2", num_left=3)]
    speculator.propose(plan(*requests), {})
    speculator.propose(plan(*requests), {})
    recorder.log.clear()
    for drafts, scheduled in (
        ({}, {}),
        ({}, {"_1": 2, "_2": 1}),
        ({"1": (2, 2)}, {"_1": 3, "_2": 2}),
        ({"1": (2, 2)}, {"_1": 2}),
    ):
        speculator.observe_step(record_of(drafts, **scheduled))
        assert recorder.log == [], (drafts, scheduled)
    speculator.observe_step(record_of({}, _1=1, _2=1))
    speculator.observe_step(record_of({"1": (2, 0), "2": (1, 1)}, _1=3, _2=2))
    assert recorder.take("step") == [("step", 2, 2, K, 321.0, 7.0), ("step", 2, 5, K, 321.0, 7.0)]


def test_guessing_is_not_timed_when_it_was_not_done_or_a_model_caught_up():
    """After steps without drafts, a draft model is fed what it has missed."""
    recorder, speculator = make_recorded()
    rounds = []
    for num_drafts in (0, 2, 3, 0, 0, 1, 1):
        recorder.num_drafts = num_drafts
        speculator.propose(plan(request_at("1")), {})
        speculator.observe_step(record_of({}, _1=1))
        rounds += [entry[3] for entry in recorder.take("step")]
    assert rounds == [0, 0, 3, 0, 0, 0, 1]


def test_probabilities_are_the_proposer_s():
    _, speculator = make_recorded()
    assert speculator.draft_probs("3").tolist() == [3.0]


# -- in the loop


class LoopRunner:
    """A `ModelRunner` and its sampler around the fake model: it verifies drafts itself."""

    def __init__(self, block_size: int) -> None:
        self.model = FakeModelRunner(block_size, VOCAB)
        self.sampled: dict[str, list[int]] = {}

    def prepare(self, output: SchedulerOutput) -> SchedulerOutput:
        self.sampled = self.model.execute(output)
        return output

    def forward(self, batch: SchedulerOutput) -> torch.Tensor:
        return torch.empty(0)

    def sample(self, logits: torch.Tensor, batch: SchedulerOutput) -> SamplerOutput:
        return SamplerOutput(self.sampled)


class Adversary:
    """Says whatever `guess(request, num_drafts)` says, asked or not, and something for a stranger.
    Complains if it is asked what it must not be."""

    num_spec_tokens = num_lookahead_tokens = K

    def __init__(self, guess: Callable[[Request, int], list[int]]) -> None:
        self.guess = guess
        self.known: set[str] = set()

    def propose(self, requests: Sequence[Request], num_drafts: Sequence[int]):
        drafts = {"stranger": [1, 2, 3]}
        for request, num in zip(requests, num_drafts, strict=True):
            assert request.status is RequestStatus.RUNNING
            num_behind = request.num_tokens - request.num_computed_tokens
            assert num_behind >= 1 and num >= 0
            if num:
                assert num_behind == 1 and request.num_output_tokens >= 1
                assert num <= request.max_num_tokens - request.num_tokens - 1
            self.known.add(request.request_id)
            drafts[request.request_id] = self.guess(request, num)
        return drafts

    def draft_probs(self, request_id: str) -> None:
        return None

    def forget(self, request_id: str) -> None:
        self.known.discard(request_id)


def right(request: Request, num_drafts: int) -> list[int]:
    num_outputs = request.num_output_tokens
    said = continuation(request.prompt_token_ids, num_outputs + num_drafts, VOCAB)
    return said[num_outputs:]


def right_until(place: int) -> Callable[[Request, int], list[int]]:
    def guess(request: Request, num_drafts: int) -> list[int]:
        return [(t + (i >= place)) % VOCAB for i, t in enumerate(right(request, num_drafts))]

    return guess


class EchoModel:
    """A draft model for which it is enough to see the last token: it reads no KV, and is wrong."""

    def __call__(self, input_ids, positions, kv_cache, metadata, logit_indices, backend):
        said = (input_ids * 3 + positions)[logit_indices] % VOCAB
        return torch.nn.functional.one_hot(said, VOCAB).double()


def make_draft_proposer(memory: KVCacheManager) -> DraftModelProposer:
    kv_cache = PagedKVCache(1, memory.pool.num_blocks, memory.block_size, 1, 1)
    return DraftModelProposer(EchoModel(), kv_cache, None, memory, K, max_model_len=60)


PROPOSERS: dict[str, Callable[[KVCacheManager], Proposer]] = {
    "ngram": lambda memory: NgramProposer(K, max_ngram=3, min_ngram=1),
    "draft": make_draft_proposer,
    "right": lambda memory: Adversary(right),
    **{f"until {i}": lambda memory, i=i: Adversary(right_until(i)) for i in range(K)},
    "too many": lambda memory: Adversary(lambda request, num: right(request, num + 9)),
    "too many, and wrong": lambda memory: Adversary(
        lambda request, num: right_until(num)(request, num + 9)
    ),
    "fewer": lambda memory: Adversary(lambda request, num: right(request, num // 2)),
    "no tokens at all": lambda memory: Adversary(lambda request, num: [-1, VOCAB, 10**9][:num]),
}


def make_memory(cache: str | None, num_blocks: int, block_size: int) -> KVCacheManager:
    pool = BlockPool(num_blocks + 1)
    if cache is None:
        return KVCacheManager(pool, block_size)
    if cache == "radix":
        return CachedKVCacheManager(pool, block_size, RadixCache(pool=pool, page_size=block_size))
    return CachedKVCacheManager(
        pool, block_size, PrefixCacheLocal(pool=pool, block_size=block_size)
    )


class Engine:
    """Chapter 1's loop over this chapter's parts, and everybody's outputs."""

    def __init__(
        self,
        kind: type,
        memory: KVCacheManager,
        proposer: Proposer | None,
        draft_length: DraftLength | None = None,
        **options,
    ) -> None:
        self.scheduler = kind(kv_memory=memory, **options)
        runner = LoopRunner(memory.block_size)
        self.core = EngineCore(self.scheduler, runner, runner, check_invariants=True)
        self.speculator = None
        if proposer is not None:
            self.scheduler.num_lookahead_tokens = proposer.num_lookahead_tokens
            self.speculator = Speculator(proposer, draft_length or FixedLength(K))
            self.core.propose = self.speculator.propose
            self.core.on_step = self.speculator.observe_step
        self.said: dict[str, list[int]] = {}
        self.finished: list[Request] = []

    def add(self, request: Request) -> None:
        self.core.add_request(request)
        self.said[request.request_id] = []

    def step(self) -> None:
        known = dict(self.scheduler.requests)
        for result in self.core.step():
            self.said[result.request_id] += result.new_token_ids
            if result.finish_reason:
                self.finished.append(known[result.request_id])

    def run(self, most: int = 2000) -> None:
        for _ in range(most):
            if not self.core.has_unfinished_requests():
                self.core.step()
                return
            self.step()
        pytest.fail(f"not finished after {most} steps: {list(self.scheduler.requests.values())}")

    def check_books(self) -> None:
        """Of a run in which nobody was aborted or stopped early."""
        stats, seen = self.scheduler.get_stats(), self.speculator.stats
        assert seen.num_tokens == sum(len(tokens) for tokens in self.said.values())
        assert seen.num_tokens == seen.num_passes + seen.num_accepted
        assert seen.num_drafted - seen.num_accepted == stats.total_rejected_drafts
        needed = sum(request.num_tokens - 1 for request in self.finished)
        assert stats.total_scheduled_tokens == (
            needed
            - stats.total_cached_tokens
            + stats.total_recomputed_tokens
            + stats.total_rejected_drafts
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


@pytest.mark.parametrize("name", PROPOSERS)
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_no_token_changes(kind, cache, name):
    """Small pools, small budgets, everybody preempted now and then."""
    for preempt_every in (None, 1, 2, 3, 5):
        memory = make_memory(cache, 12, 3)
        engine = Engine(
            kind,
            memory,
            PROPOSERS[name](memory),
            preempt_every=preempt_every,
            max_num_batched_tokens=11,
            max_preemptions=4,
        )
        for request in family(preempt_every or 0, 4):
            engine.add(request)
        engine.run()
        for request in engine.finished:
            said = engine.said[request.request_id]
            assert said == continuation(request.prompt_token_ids, request.max_tokens, VOCAB)
        assert len(engine.finished) == 4
        engine.check_books()


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_it_is_what_the_loop_says_without_a_proposer(kind):
    said = []
    for name in (None, *PROPOSERS):
        memory = make_memory("hash", 30, 4)
        engine = Engine(kind, memory, PROPOSERS[name](memory) if name else None)
        for request in family(7, 6):
            engine.add(request)
        engine.run()
        said.append(engine.said)
    assert all(other == said[0] for other in said)


@pytest.mark.parametrize(
    ("name", "accepted_length"), [("right", K + 1), *((f"until {i}", i + 1) for i in range(K))]
)
def test_right_guesses_save_passes(name, accepted_length):
    memory = make_memory(None, 60, 4)
    engine = Engine(Scheduler, memory, PROPOSERS[name](memory))
    engine.add(Request.from_tokens("a", [1, 2, 3], 1 + 10 * accepted_length))
    engine.run()
    seen = engine.speculator.stats
    assert seen.num_passes == 1 + 10
    assert seen.mean_accepted_length == pytest.approx(accepted_length, abs=0.05)


@pytest.mark.parametrize("name", PROPOSERS)
def test_a_stop_token_inside_an_accepted_run_ends_the_request(name):
    """Trap 38."""
    prompt = [1, 2, 3, 4]
    said = continuation(prompt, 15, VOCAB)
    for stop in range(VOCAB):
        memory = make_memory("hash", 30, 4)
        engine = Engine(Scheduler, memory, PROPOSERS[name](memory))
        params = SamplingParams(temperature=0, max_tokens=15, stop_token_ids=[stop])
        engine.add(Request("a", prompt, params))
        engine.run()
        end = said.index(stop) + 1 if stop in said else 15
        assert engine.said["a"] == said[:end]


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_an_id_that_was_aborted_and_comes_again_is_another_request(kind):
    """It may come back before the speculator has heard of its end."""
    for name in ("ngram", "draft", "right"):
        for step in range(1, 6):
            memory = make_memory("hash", 40, 4)
            proposer = PROPOSERS[name](memory)
            engine = Engine(kind, memory, proposer, AdaptiveLength(K))
            engine.add(Request.from_tokens("a", [1, 2, 3, 1, 2, 3], 30))
            engine.add(Request.from_tokens("b", [3, 3, 1], 9))
            for _ in range(step):
                engine.step()
            engine.core.abort_request("a")
            engine.add(Request.from_tokens("a", [2, 1], 9))
            engine.run()
            assert engine.said["a"] == continuation([2, 1], 9, VOCAB)
            assert engine.speculator.draft_length._requests == {}
            kept = {"ngram": "_histories", "draft": "_followers", "right": "known"}[name]
            assert not getattr(proposer, kept), "everybody has ended"


def test_lengths_that_adapt_change_no_token_and_see_the_steps():
    for seed in range(3):
        memory = make_memory("hash", 40, 4)
        length = AdaptiveLength(K, probe_every=3)
        engine = Engine(Scheduler, memory, PROPOSERS["draft"](memory), length, preempt_every=7)
        for request in family(seed, 8):
            engine.add(request)
        engine.run()
        for request in engine.finished:
            said = engine.said[request.request_id]
            assert said == continuation(request.prompt_token_ids, request.max_tokens, VOCAB)
        engine.check_books()
        assert length.verify_cost.has_seen and length._requests == {}
