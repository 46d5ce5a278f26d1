"""Runs of the prefill-first scheduler that its page describes.

They are small enough for a pencil: pages of 4, and the fake model. `test_prefill_first_runs.py`
compares them with the page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from prefill_adder import PrefillAdder, num_expected_outputs
from prefill_first_scheduler import ForwardMode, PrefillFirstScheduler
from request import Request
from scheduler_steps import SchedulerLoop, make_memory

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
    options = {"max_num_batched_tokens": 16, "chunked_prefill_size": 8}
    loop, scheduler = make_loop(100, **options, mixing=mixing)
    arrivals = {0: [("a", 5, 5), ("b", 3, 2)], 2: [("c", 14, 3)]}
    iterations: list[Iteration] = []
    for number in range(num_iterations):
        arrived = [loop.add(*sizes) for sizes in arrivals.get(number, [])]
        last, between = scheduler.last_batch, scheduler.chunked_req
        last_names = [] if last is scheduler.running_batch else _names(last.reqs)
        joining = [r for r in last.reqs if r is not between and not r.is_finished]
        joined = [] if last.forward_mode is ForwardMode.DECODE else _names(joining)
        ended_before = set(loop.reasons)
        plan = loop.schedule()
        running, mode = _names(scheduler.running_batch.reqs), scheduler.last_batch.forward_mode
        sizes = zip(plan.num_scheduled_tokens.items(), plan.start_positions, strict=True)
        computed = {name: (start, start + n - 1) for (name, n), start in sizes}
        chunked = [] if scheduler.chunked_req is None else _names([scheduler.chunked_req])
        loop.update(plan)
        ended = sorted(set(loop.reasons) - ended_before)
        now = (last_names, joined, running, mode.name, computed, "".join(chunked))
        iterations.append(Iteration(*now, _names(arrived), ended))
    return iterations


def _names(requests: Sequence[Request]) -> list[str]:
    return [request.request_id for request in requests]


# -- what the page says


def parts() -> dict[str, str]:
    """The page's text between `<!-- run:NAME -->` and `<!-- /run:NAME -->`."""
    running, first = worked_budget(0.5)
    return {
        "six": iterations_table(mixing=False),
        "mixed": iterations_table(mixing=True),
        "running": running,
        "budget": "\n".join([first, worked_budget(0.1)[1].split("\n", 2)[2]]),
    }


def _table(head: Sequence[str], rule: str, rows: Sequence[Sequence[object]]) -> str:
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in [head, *rows]]
    return "\n".join([lines[0], rule, *lines[1:]])


def iterations_table(*, mixing: bool) -> str:
    rows = []
    for number, now in enumerate(six_iterations(mixing), 1):
        spans = [f"{r} {a}-{b}" if a < b else f"{r} {a}" for r, (a, b) in now.computed.items()]
        batches = [] if mixing else [" ".join(now.joined), " ".join(now.running_batch)]
        cells = [now.mode, ", ".join(spans), now.chunked_req, " ".join(now.ended)]
        rows.append([number, *batches, *cells])
    batches = [] if mixing else ["`last_batch` joins", "`running_batch`"]
    head = ["iteration", *batches, "the step", "computes", "`chunked_req`", "ends"]
    return _table(head, "| " + " | ".join(["---"] * len(head)) + " |", rows)


def worked_budget(ratio: float) -> tuple[str, str]:
    """Requests a and b have decoded once. c and d wait, and are tried in that order. Returns the
    table of those that run, and that of those that are tried."""
    loop, scheduler = make_loop(12, init_new_token_ratio=ratio, min_new_token_ratio=ratio)
    loop.add("a", 10, 8)
    loop.add("b", 5, 10)
    loop.step()
    loop.step()
    memory, decodes = scheduler.kv_memory, scheduler.running_batch.reqs
    running = []
    for r in decodes:
        num_computed, num_pages = r.num_computed_tokens, -(-r.num_computed_tokens // PAGE_SIZE)
        row = [f"`{r.request_id}`", num_computed, num_pages, r.num_output_tokens]
        running.append([*row, num_expected_outputs(r)])
    adder = PrefillAdder(
        memory,
        lambda request, computed, num_new: scheduler.start_running(request, computed, num_new, 0),
        decodes,
        ratio,
        scheduler.max_num_batched_tokens,
    )
    tried = []
    for name, num_prompt, max_tokens in (("c", 6, 4), ("d", 5, 6)):
        in_use, left = memory.num_blocks_in_use * PAGE_SIZE, adder.rem_total_tokens
        expected = memory.capacity - in_use - left
        needs = -(-(num_prompt + max_tokens) // PAGE_SIZE) * PAGE_SIZE
        result = adder.add_one_req(loop.add(name, num_prompt, max_tokens), False).name
        tried.append([ratio, f"`{name}`", in_use, f"{expected:.3g}", f"{left:.3g}", needs, result])
    head = ["", "computed", "pages", "generated", "may still generate"]
    heads = ["share", "asked", "in use", "expected", "left", "needs", ""]
    return (
        _table(head, "| --- | ---: | ---: | ---: | ---: |", running),
        _table(heads, "| --- | --- | ---: | ---: | ---: | ---: | --- |", tried),
    )
