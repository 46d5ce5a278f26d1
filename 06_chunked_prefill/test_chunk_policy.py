"""Chunks in both schedulers, with a fake model whose KV memory is real (chapter 4's fake_model.py):
whatever a policy gives, the tokens are those of an uncut run, and every prompt ends. With the real
model: common/tests/test_chunked_prefill_engine.py."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from adaptive_chunks import AdaptiveChunks
from chunk_policy import ChunkedPrefill
from draft_plugin import DraftPlugin
from fake_model import continuation
from prefill_first_scheduler import PrefillFirstScheduler
from request import Request, RequestStatus
from scheduler import Scheduler
from scheduler_interface import SchedulerOutput, StepOutput
from scheduler_steps import (
    SchedulerLog,
    SchedulerLoop,
    make_loop,
    make_memory,
    make_scheduler,
    scheduled_tokens,
)
from sglang_policies import POLICIES, policy_by_name
from step_log import Case, cases_of

VOCAB = 4  # few tokens, so that prefixes are shared by chance
SCHEDULERS = (Scheduler, PrefillFirstScheduler)


def make_request(name: str, num_prompt: int, num_outputs: int, seed: int = 0) -> Request:
    rng = random.Random(f"{seed} {name}")
    tokens = [rng.randrange(VOCAB) for _ in range(num_prompt)]
    return Request.from_tokens(name, tokens, max_new_tokens=num_outputs)


class Run(SchedulerLoop):
    """`plans[i]`: tokens of each request in step i. After a step, `propose(name, number of
    outputs)` returns the drafts of the next (chapter 5)."""

    propose: Callable[[str, int], list[int]] | None = None
    vocab_size = VOCAB

    def __init__(self, scheduler) -> None:
        super().__init__(scheduler)
        self.plans: list[dict[str, int]] = []

    def schedule(self) -> SchedulerOutput:
        output = super().schedule()
        self.plans.append(scheduled_tokens(output))
        return output

    def execute(self, output: SchedulerOutput) -> StepOutput:
        sampled = super().execute(output)
        for name in scheduled_tokens(output) if self.propose else ():
            num_outputs = len(self.outputs[name]) + len(sampled.token_ids.get(name, ()))
            sampled.draft_token_ids[name] = self.propose(name, num_outputs)
        for request in output.scheduled_requests:
            is_last = request.num_computed_tokens >= request.num_tokens
            assert (request.request_id in sampled.token_ids) == is_last, "Trap 31"
        return sampled

    def to_the_end(self, max_steps: int = 3000) -> None:
        self.run(max_steps)
        for name, tokens in self.outputs.items():
            prompt = self.requests[name].prompt_token_ids
            assert tokens == continuation(prompt, len(tokens), VOCAB), name


# -- what a policy gives


@pytest.mark.net
@given(
    threshold=st.none() | st.integers(1, 50),
    num_uncomputed_tokens=st.integers(1, 200),
    budget=st.integers(1, 100),
)
def test_nobody_gets_more_than_it_needs_or_than_there_is_and_somebody_always_gets_one(
    threshold, num_uncomputed_tokens, budget
):
    policy = ChunkedPrefill(threshold)
    num_tokens = policy.num_tokens_to_schedule(
        make_request("a", 1, 1), num_uncomputed_tokens, budget, 100
    )
    assert num_tokens == min(num_uncomputed_tokens, budget, threshold or num_uncomputed_tokens)
    assert num_tokens >= 1


@pytest.mark.parametrize(
    ("kind", "named", "arguments"),
    [
        *((ChunkedPrefill, "long_prefill_token_threshold", (v,)) for v in (0, True, 2.5)),
        *((ChunkedPrefill, "max_long_partial_prefills", (4, v)) for v in (0, "2")),
        (ChunkedPrefill, "max_long_partial_prefills", (None, 2)),
        *((AdaptiveChunks, "target_step_ms", (v,)) for v in (0, True, math.nan, math.inf)),
        (AdaptiveChunks, "long_prefill_token_threshold", (5, 0)),
        *((AdaptiveChunks, "min_chunk", (5, None, None, v)) for v in (0, 2.0)),
    ],
)
def test_what_is_refused_is_named(kind, named, arguments):
    with pytest.raises(ValueError, match=named):
        kind(*arguments)


# -- chunks in the two-phase scheduler


@pytest.mark.net
@cases_of(Path(__file__).with_name("plans.txt"))
def test_plans(case: Case) -> None:
    options = dict(case.options)
    policy = ChunkedPrefill(options.pop("threshold", None), options.pop("max_long", None))
    SchedulerLog(make_loop(Scheduler, chunk_policy=policy, **options)).perform(case)


def test_short_prompts_take_no_place_and_without_a_limit_there_are_no_places():
    policy = ChunkedPrefill(4, max_long_partial_prefills=1)
    one = make_request("r", 9, 1)
    assert [policy.can_start(one, n) for n in (4, 1, 9, 9, 4)] == [True, True, True, False, True]
    assert ChunkedPrefill(4).can_start(one, 9)
    two = ChunkedPrefill(4, max_long_partial_prefills=2)
    assert [two.can_start(one, 9) for _ in range(4)] == [True, True, False, False]
    two.begin_step([one] * 3, lambda one: 9)  # more of them run than may
    assert not two.can_start(one, 9)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Scheduler, {"chunk_policy": ChunkedPrefill()}),
        (PrefillFirstScheduler, {"chunked_prefill_size": 24}),
        (PrefillFirstScheduler, {"chunked_prefill_size": 24, "mixing": True}),
        (PrefillFirstScheduler, {"chunked_prefill_size": 3, "mixing": True}),  # fewer than decodes
    ],
)
def test_drafts_never_keep_a_prompt_out(kind, options):
    """Four decodes, with as many drafts as there is budget, all of them right."""
    limits = {"max_num_batched_tokens": 24, "plugins": [DraftPlugin()]}
    run = Run(kind(kv_memory=make_memory(None, 400, 4), **options, **limits))
    decodes = [make_request(f"s{i}", 2, 200, seed=i) for i in range(4)]
    truth = {r.request_id: continuation(r.prompt_token_ids, 210, VOCAB) for r in decodes}
    for request in decodes:
        run.take(request)
    for _ in range(4):
        run.step()
    run.take(make_request("long", 40, 1))
    run.propose = lambda name, num: truth[name][num : num + 5] if name in truth else []
    for _ in range(30):
        run.step()
    assert run.outputs["long"], "40 tokens did not get through in 30 steps"


# -- random runs


POLICY_MAKERS: dict[str, Callable[[random.Random], ChunkedPrefill]] = {
    "budget": lambda rng: ChunkedPrefill(),
    "threshold": lambda rng: ChunkedPrefill(rng.randint(1, 12)),
    "long": lambda rng: ChunkedPrefill(rng.randint(1, 6), rng.randint(1, 2)),
    "adaptive": lambda rng: AdaptiveChunks(rng.choice([0.1, 1, 10]), min_chunk=rng.randint(1, 5)),
}


@pytest.mark.net
@pytest.mark.sample
@pytest.mark.parametrize("kind", SCHEDULERS)
@pytest.mark.parametrize("cache", [None, "hash", "radix"])
@pytest.mark.parametrize("maker", POLICY_MAKERS)
def test_random_runs_change_no_token(maker, cache, kind):
    """Pools that run out, forced preemption, drafts, aborts; both schedulers, every cache."""
    for seed in range(12):
        rng = random.Random(f"{seed} {maker} {cache} {kind}")
        block_size = rng.choice([1, 2, 3, 4, 8])
        options = {
            "max_num_seqs": rng.randint(1, 5),
            "max_num_batched_tokens": rng.randint(1, 24),
            "policy": rng.choice(sorted(POLICIES)),
            "preempt_every": rng.choice([None, None, 1, 2, 3]),
            "chunk_policy": POLICY_MAKERS[maker](rng),
            "plugins": [DraftPlugin(rng.choice([0, 2]))],
        }
        if kind is PrefillFirstScheduler:
            options["chunked_prefill_size"] = rng.randint(1, 16)
            options["mixing"] = rng.random() < 0.5
        largest = -(-40 // block_size)
        memory = make_memory(cache, largest + rng.choice([0, 1, largest]), block_size)
        options["policy"] = policy_by_name(options["policy"], memory)
        run = Run(make_scheduler(kind, kv_memory=memory, **options))
        waiting = [make_request(str(i), rng.randint(1, 32), rng.randint(1, 8)) for i in range(7)]
        for _ in range(6000):
            if waiting and rng.random() < 0.3:
                run.take(waiting.pop())
            if not waiting and not run.scheduler.has_unfinished_requests():
                break
            running = list(run.scheduler.running)
            if running and rng.random() < 0.02:
                run.scheduler.finish_requests(rng.choice(running), RequestStatus.FINISHED_ABORTED)
            drafts = [rng.randrange(VOCAB) for _ in range(3)]
            run.propose = (lambda *_, drafts=drafts: drafts) if rng.random() < 0.3 else None
            run.step()
            policy = options["chunk_policy"]
            if isinstance(policy, AdaptiveChunks):
                num_tokens = list(run.plans[-1].values())
                policy.observe_step([0] * len(num_tokens), num_tokens, 0.05 + rng.random())
        run.to_the_end(max_steps=0)
        assert memory.num_blocks_in_use == 0, f"seed {seed}"
