"""The run of the prefill-first scheduler that its page and a picture show: three batches over six
iterations, with pages of 4 and the fake model. `test_prefill_first_scheduler.py` compares it with
the page, and `workshop/book/test_drawn_states.py` with the picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from prefill_first_scheduler import ForwardMode, PrefillFirstScheduler
from request import Request
from scheduler_steps import make_loop


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


def six_iterations(mixing: bool = False) -> list[Iteration]:
    """Requests a and b are there first. c arrives before the third iteration, too long for a chunk
    of 8."""
    limits: dict[str, Any] = {"max_num_batched_tokens": 16, "chunked_prefill_size": 8}
    loop = make_loop(PrefillFirstScheduler, **limits, mixing=mixing)
    scheduler = loop.scheduler
    arrivals = {0: [("a", 5, 5), ("b", 3, 2)], 2: [("c", 14, 3)]}
    iterations: list[Iteration] = []
    for number in range(6):
        arrived = [loop.add(*sizes) for sizes in arrivals.get(number, [])]
        last = scheduler.last_batch
        between = scheduler.chunked_req
        last_names = [] if last is scheduler.running_batch else _names(last.reqs)
        joining = [r for r in last.reqs if r is not between and not r.is_finished]
        joined = [] if last.forward_mode is ForwardMode.DECODE else _names(joining)
        ended_before = set(loop.reasons)
        plan = loop.schedule()
        running = _names(scheduler.running_batch.reqs)
        mode = scheduler.last_batch.forward_mode
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


def iterations_table(*, mixing: bool) -> str:
    """The rows of the page's table; with mixing, without the columns of the batches."""
    lines = []
    for number, now in enumerate(six_iterations(mixing), 1):
        spans = [f"{r} {a}-{b}" if a < b else f"{r} {a}" for r, (a, b) in now.computed.items()]
        batches = [] if mixing else [" ".join(now.joined), " ".join(now.running_batch)]
        cells = [now.mode, ", ".join(spans), now.chunked_req, " ".join(now.ended)]
        lines.append(" | ".join(["", str(number), *batches, *cells, ""]).strip())
    return "\n".join(lines)
