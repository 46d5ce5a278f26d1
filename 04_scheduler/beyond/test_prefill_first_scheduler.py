"""The prefill-first scheduler: its log, and what a row cannot say. Whole runs, shared with the
two-phase scheduler, are in test_scheduler_runs.py."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from prefill_first_runs import iterations_table
from prefill_first_scheduler import PrefillFirstScheduler
from request import Request
from scheduler_steps import SchedulerLog, SchedulerLoop, make_loop, preempted_ids, scheduled_tokens
from step_log import Case, cases_of


@pytest.mark.net
@cases_of(Path(__file__).with_name("prefill_first_plans.txt"))
def test_prefill_first_plans(case: Case):
    SchedulerLog(make_loop(PrefillFirstScheduler, **case.options)).perform(case)


def test_the_iterations_of_the_page():
    page = Path(__file__).with_name("PREFILL_FIRST.md").read_text(encoding="utf-8")
    for mixing in (False, True):
        assert f"\n{iterations_table(mixing=mixing)}\n" in page


def greedy(num_blocks: int, **options) -> SchedulerLoop:
    """A loop that admits as if running requests would generate nothing."""
    options |= {"init_new_token_ratio": 0.0, "min_new_token_ratio": 0.0}
    return make_loop(PrefillFirstScheduler, num_blocks=num_blocks, **options)


def test_the_rule_of_nano_vllm():
    """FCFS, no mixing, no bound: a prefill whenever something that waits fits, else a decode."""
    rng = random.Random(4)
    limits = {"max_num_seqs": 5, "max_num_batched_tokens": 16, "max_consecutive_prefills": None}
    loop = make_loop(PrefillFirstScheduler, num_blocks=500, **limits)
    running: dict[str, int] = {}  # tokens to come
    waiting: list[tuple[str, int, int]] = []
    for number in range(300):
        if number < 150 and rng.random() < 0.4:
            waiting.append((f"r{number}", rng.randint(4, 16), rng.randint(1, 6)))
            loop.add(*waiting[-1])
        expected = {}
        budget = 16
        while waiting and len(running) < 5 and waiting[0][1] <= budget:
            name, num_prompt, num_outputs = waiting.pop(0)
            expected[name] = num_prompt
            budget = budget - num_prompt
            running[name] = num_outputs
        expected = expected or dict.fromkeys(running, 1)
        assert scheduled_tokens(loop.step()) == expected
        running = {r: n - (r in expected) for r, n in running.items() if n > (r in expected)}
    assert not loop.scheduler.has_unfinished_requests() and len(loop.reasons) > 50


@pytest.mark.net
@pytest.mark.parametrize("mixing", [False, True])
def test_no_decode_waits_longer_than_the_bound(mixing):
    """Trap 18, as a property of random runs: between two tokens of a request that was not retracted
    there are at most `max_consecutive_prefills` steps, or none with mixing."""
    for seed in range(12):
        rng = random.Random(seed)
        bound = rng.randint(1, 5)
        size = rng.choice([None, 4, 8])
        options = {"max_consecutive_prefills": bound, "mixing": mixing, "max_preemptions": 2}
        options |= {"chunked_prefill_size": size, "max_num_batched_tokens": 16}
        loop = greedy(rng.randint(6, 20), **options)
        last_token: dict[str, int] = {}
        for number in range(150):
            if rng.random() < 0.7:
                loop.add(f"n{number}", rng.randint(4, 16), rng.randint(1, 10))
            plan = loop.step()
            for name in preempted_ids(plan):
                last_token.pop(name, None)
            for name in plan.num_scheduled_tokens:
                if loop.requests[name].num_tokens - loop.requests[name].num_computed_tokens == 1:
                    last_token[name] = number
            for name in loop.scheduler.running.keys() & last_token.keys():
                assert number - last_token[name] <= (0 if mixing else bound), (seed, name)


def test_a_chunk_without_memory_waits_and_no_request_takes_its_pages():
    """Others hold all pages but one. It is a prefill's turn; b wants two pages, c one."""
    loop = greedy(8, chunked_prefill_size=8, max_consecutive_prefills=1)
    loop.add("a", 8, 9)
    loop.step()
    loop.add("b", 16, 2)
    loop.add("c", 1, 1)
    assert scheduled_tokens(loop.step()) == {"b": 8}
    assert scheduled_tokens(loop.step()) == {"a": 1}
    blocker = Request.from_tokens("blocker", [1])
    assert loop.memory.allocate_slots(blocker, 4 * (loop.memory.pool.num_free_blocks - 1))
    assert scheduled_tokens(loop.step()) == {"a": 1}
    loop.memory.free(blocker)
    assert scheduled_tokens(loop.step()) == {"b": 8}
