"""Runs of the prefill-first scheduler that its page and its pictures describe.

They are small enough for a pencil: pages of 4, and the fake model. The page and the pictures read
their values from here when they are rendered, and `test_prefill_first_runs.py` checks the text.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

from bounded_loops import as_long_as
from prefill_adder import PrefillAdder, num_expected_outputs
from prefill_first_scheduler import ForwardMode, PrefillFirstScheduler
from request import Request
from scheduler_steps import SchedulerLoop, make_memory, preempted_ids, scheduled_tokens

PAGE_SIZE = 4


def make_loop(num_pages: int, **options: Any) -> tuple[SchedulerLoop, PrefillFirstScheduler]:
    memory = make_memory(None, num_pages, PAGE_SIZE)
    scheduler = PrefillFirstScheduler(kv_memory=memory, **options)
    return SchedulerLoop(scheduler), scheduler


# -- three batches over six iterations


@dataclass(frozen=True, slots=True)
class Iteration:
    """One iteration: `last_batch` as `get_next_batch_to_run` finds it (empty if it is the running
    batch itself), the requests of it that join `running_batch`, and the plan; `ended`: requests
    that finished with the step's tokens."""

    last_batch: list[str]
    joined: list[str]
    running_batch: list[str]
    mode: str
    computed: dict[str, tuple[int, int]]  # positions, from and to
    chunked_req: str
    arrived: list[str]
    ended: list[str]


def six_iterations(mixing: bool = False, num_iterations: int = 6) -> list[Iteration]:
    """Requests a and b are there first. c arrives before the third iteration, too long for a chunk
    of 8."""
    loop, scheduler = make_loop(
        100, max_num_batched_tokens=16, chunked_prefill_size=8, mixing=mixing
    )
    iterations: list[Iteration] = []
    for number in range(num_iterations):
        arrived = []
        if number == 0:
            arrived = [loop.add("a", 5, 5), loop.add("b", 3, 2)]
        if number == 2:
            arrived = [loop.add("c", 14, 3)]
        last, last_mode = _names(scheduler.last_batch.reqs), scheduler.last_batch.forward_mode
        is_shared = scheduler.last_batch is scheduler.running_batch
        between = scheduler.chunked_req
        joined = [
            request.request_id
            for request in scheduler.last_batch.reqs
            if last_mode is not ForwardMode.DECODE
            and request is not between
            and not request.is_finished
        ]
        ended_before = set(loop.reasons)
        plan = loop.schedule()
        running = _names(scheduler.running_batch.reqs)
        starts = dict(zip(plan.num_scheduled_tokens, plan.start_positions, strict=True))
        computed = {
            name: (starts[name], starts[name] + n - 1)
            for name, n in plan.num_scheduled_tokens.items()
        }
        mode = scheduler.last_batch.forward_mode
        chunked = scheduler.chunked_req
        loop.update(plan)
        iterations.append(
            Iteration(
                [] if is_shared else last,
                joined,
                running,
                mode.name,
                computed,
                "" if chunked is None else chunked.request_id,
                [request.request_id for request in arrived],
                sorted(set(loop.reasons) - ended_before),
            )
        )
    return iterations


def _names(requests: list[Request]) -> list[str]:
    return [request.request_id for request in requests]


# -- the budget


@dataclass(frozen=True, slots=True)
class BudgetLine:
    """The memory before a request is tried, in tokens, and the amount that it needs."""

    in_use: int
    expected: float
    free: float  # rem_total_tokens
    request_id: str
    needs: int  # prompt and outputs, in whole pages
    result: str


@dataclass(frozen=True, slots=True)
class Budget:
    capacity: int
    running: list[tuple[str, int, int, int]]  # name, computed, generated, may still generate
    lines: list[BudgetLine]


def worked_budget(new_token_ratio: float) -> Budget:
    """Requests a and b have decoded once. c and d wait, and are tried in that order."""
    loop, scheduler = make_loop(
        12, init_new_token_ratio=new_token_ratio, min_new_token_ratio=new_token_ratio
    )
    for name, num_prompt, max_tokens in (("a", 10, 8), ("b", 5, 10)):
        loop.add(name, num_prompt, max_tokens)
    loop.step()
    loop.step()
    memory, decodes = scheduler.kv_memory, scheduler.running_batch.reqs
    running = [
        (r.request_id, r.num_computed_tokens, r.num_output_tokens, num_expected_outputs(r))
        for r in decodes
    ]
    adder = PrefillAdder(
        memory,
        lambda request, computed, num_new: scheduler.start_running(request, computed, num_new, 0),
        decodes,
        scheduler.new_token_ratio,
        scheduler.max_num_batched_tokens,
    )

    def state() -> tuple[int, float, float]:
        in_use = memory.num_blocks_in_use * PAGE_SIZE
        return in_use, memory.capacity - in_use - adder.rem_total_tokens, adder.rem_total_tokens

    lines = []
    for name, num_prompt, max_tokens in (("c", 6, 4), ("d", 5, 6)):
        request = loop.add(name, num_prompt, max_tokens)
        before = state()
        result = adder.add_one_req(request, False)
        expected = num_expected_outputs(request)
        needs = -(-(request.num_tokens + expected) // PAGE_SIZE) * PAGE_SIZE
        lines.append(BudgetLine(*before, name, needs, result.name))
    return Budget(memory.capacity, running, lines)


# -- the share over a run


@dataclass(frozen=True, slots=True)
class RatioRun:
    """One number for each step of a run."""

    ratios: list[float]
    usage: list[float]
    retracted: list[list[str]]
    mean_outputs: float  # share of `max_tokens` that the requests generated


def ratio_run(num_requests: int = 30, seed: int = 1) -> RatioRun:
    """Run requests most of which stop early, while some continue to their `max_tokens`, so the
    expected share is too small now and then. The token that ends an answer comes by chance: the
    model has 50 tokens, and a request stops at a few of them or at none."""
    loop, scheduler = make_loop(
        120, max_num_seqs=16, max_num_batched_tokens=64, new_token_ratio_decay_steps=100
    )
    rng = random.Random(seed)
    run = RatioRun([], [], [], 0.0)
    requests: list[Request] = []

    def has_work() -> bool:
        return len(requests) < num_requests or scheduler.has_unfinished_requests()

    for number in as_long_as(has_work, 2000):
        if len(requests) < num_requests and number % 6 == 0:
            stops = frozenset(range(rng.choice((0, 1, 2, 4))))
            name = f"r{len(requests)}"
            request = loop.add(name, rng.randint(6, 14), 120)
            request.end_ids = stops
            requests.append(request)
        plan = loop.step()
        run.ratios.append(scheduler.new_token_ratio)
        run.usage.append(scheduler.kv_memory.usage)
        run.retracted.append(preempted_ids(plan))
    shares = [request.num_output_tokens / request.max_tokens for request in requests]
    return replace(run, mean_outputs=sum(shares) / len(shares))


# -- a retraction


@dataclass(frozen=True, slots=True)
class Holder:
    name: str
    num_prompt: int
    num_outputs: int
    max_tokens: int
    num_computed: int
    blocks: list[int]


@dataclass(frozen=True, slots=True)
class Retraction:
    before: list[Holder]
    retracted: list[str]
    after: list[Holder]
    computed: dict[str, int]
    waiting: list[str]
    ratio_before: float
    ratio_after: float
    num_pages: int


def one_retraction() -> Retraction:
    """A tenth was set aside for outputs, and the three requests need more soon."""
    loop, scheduler = make_loop(
        10, max_num_batched_tokens=11, init_new_token_ratio=0.1, min_new_token_ratio=0.1
    )
    for name, num_prompt, max_tokens in (("a", 7, 13), ("b", 11, 9), ("c", 8, 8)):
        loop.add(name, num_prompt, max_tokens)
    for _ in as_long_as(scheduler.has_unfinished_requests, 100):
        before, ratio = _holders(scheduler), scheduler.new_token_ratio
        plan = loop.schedule()
        if plan.preempted_requests:
            return Retraction(
                before,
                preempted_ids(plan),
                _holders(scheduler),
                scheduled_tokens(plan),
                [request.request_id for request in scheduler.waiting],
                ratio,
                scheduler.new_token_ratio,
                10,
            )
        loop.update(plan)
    raise AssertionError("no request was retracted")


def _holders(scheduler: PrefillFirstScheduler) -> list[Holder]:
    return [
        Holder(
            r.request_id,
            r.num_prompt_tokens,
            r.num_output_tokens,
            r.max_tokens,
            r.num_computed_tokens,
            list(scheduler.kv_memory.get_block_ids(r.request_id)),
        )
        for r in scheduler.running.values()
    ]


# -- which batch follows which


def mode_transitions(mixing: bool, num_runs: int = 60) -> set[tuple[str, str]]:
    """Pairs of modes of two consecutive steps, over random runs. "" is a step without work."""
    seen: set[tuple[str, str]] = set()
    for seed in range(num_runs):
        rng = random.Random(seed)
        loop, scheduler = make_loop(
            rng.choice((10, 30)),
            max_num_batched_tokens=16,
            chunked_prefill_size=8,
            mixing=mixing,
            max_consecutive_prefills=rng.choice((1, 3)),
        )
        before, number = "", 0
        for step in range(200):
            if step < 24 and rng.random() < 0.3:
                loop.add(f"r{number}", rng.randint(3, 14), rng.randint(1, 8))
                number += 1
            plan = loop.step()
            mode = scheduler.last_batch.forward_mode.name if scheduled_tokens(plan) else ""
            seen.add((before, mode))
            before = mode
    return seen


# -- what the page says


def parts() -> dict[str, str]:
    """The page's text between `<!-- run:NAME -->` and `<!-- /run:NAME -->`."""
    budgets = {ratio: worked_budget(ratio) for ratio in (0.5, 0.1)}
    return {
        "six": _iterations_table(six_iterations(), is_mixed=False),
        "mixed": _iterations_table(six_iterations(mixing=True), is_mixed=True),
        "running": _table(
            ["", "computed", "pages", "generated", "may still generate"],
            "| --- | ---: | ---: | ---: | ---: |",
            [
                [f"`{name}`", computed, -(-computed // PAGE_SIZE), generated, left]
                for name, computed, generated, left in budgets[0.5].running
            ],
        ),
        "budget": _table(
            ["share", "asked", "in use", "expected", "left", "needs", ""],
            "| --- | --- | ---: | ---: | ---: | ---: | --- |",
            [
                [ratio, f"`{line.request_id}`", line.in_use, f"{line.expected:.3g}",
                 f"{line.free:.3g}", line.needs, line.result]
                for ratio, budget in budgets.items()
                for line in budget.lines
            ],
        ),
        "ratio": _describe_ratio(ratio_run()),
    }  # fmt: skip


def _table(head: list[str], rule: str, rows: list[list[object]]) -> str:
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in [head, *rows]]
    return "\n".join([lines[0], rule, *lines[1:]])


def _iterations_table(iterations: list[Iteration], *, is_mixed: bool) -> str:
    rows = []
    for number, now in enumerate(iterations, 1):
        spans = ", ".join(f"{r} {a}-{b}" if a < b else f"{r} {a}" for r, (a, b) in
                          now.computed.items())  # fmt: skip
        batches = [] if is_mixed else [" ".join(now.joined), " ".join(now.running_batch)]
        rows.append([number, *batches, now.mode, spans, now.chunked_req, " ".join(now.ended)])
    batches = [] if is_mixed else ["`last_batch` joins", "`running_batch`"]
    head = ["iteration", *batches, "the step", "computes", "`chunked_req`", "ends"]
    return _table(head, "| " + " | ".join(["---"] * len(head)) + " |", rows)


def _describe_ratio(run: RatioRun) -> str:
    jumps = [(names, run.ratios[step]) for step, names in enumerate(run.retracted) if names]
    num_times = {1: "Once", 2: "Twice"}.get(len(jumps), f"{len(jumps)} times")
    rose = ", ".join(f"{names[0]} was retracted and the share rose to {ratio:.2f}" for names, ratio
                     in jumps)  # fmt: skip
    return (
        "This is a run of 30 requests on 120 pages with the fake model. Each may generate 120 "
        f"tokens; on average they generate {run.mean_outputs:.0%} of that. The share falls from "
        f"{run.ratios[0]:.2f} to {min(run.ratios):.2f} in 100 decode batches. {num_times} in "
        f"{len(run.ratios)} steps it was too small: {rose}. Each time it falls again."
    )
