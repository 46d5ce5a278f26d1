"""Drawings of chapter 4's ideas: preemption over time, decodes that starve, a batch with adapters.

python 04_scheduler/lab/plot_scheduler_drawings.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bounded_loops import as_long_as
from common.adapters.adapter_columns import ordered
from common.adapters.adapter_files import LowRank
from common.adapters.adapter_slots import Addition, Ordered
from common.sampling.runner_plugin import Cargo
from prefill_first_scheduler import PrefillFirstScheduler
from scheduler import Scheduler
from scheduler_steps import SchedulerLoop, make_memory, preempted
from step_plan import PreemptingPlan
from workshop.book.draw import LARGE, PAPER, SMALL, Box, Drawing, save_all
from workshop.book.draw_parts import Axes
from workshop.book.palette import BASELINE, DECODE, INK, PREEMPTED, PROMPT, tint

BLOCK_SIZE = 4
SHADES = {"a": 0.75, "b": 0.5, "c": 0.3, "d": 0.15}  # of those that came first, the darkest


def make_loop(num_blocks: int, kind: type = Scheduler, **options: Any) -> SchedulerLoop:
    memory = make_memory(None, num_blocks, BLOCK_SIZE)
    return SchedulerLoop(kind(kv_memory=memory, **options))


@dataclass(frozen=True, slots=True)
class BlockRun:
    owners: list[dict[int, str]]  # of each step: block id -> request
    preempted: list[list[str]]


def block_run(num_blocks: int = 12, **options: Any) -> BlockRun:
    """Four requests of 6 tokens that generate 14 each."""
    loop = make_loop(num_blocks, **options)
    for name in SHADES:
        loop.add(name, 6, 14)
    run = BlockRun([], [])
    for _ in as_long_as(loop.scheduler.has_unfinished_requests, 100):
        plan = loop.schedule()
        tables = {r: loop.scheduler.kv_memory.get_block_ids(r) for r in loop.scheduler.running}
        run.owners.append({block: name for name, blocks in tables.items() for block in blocks})
        run.preempted.append(preempted(plan))
        loop.update(plan)
    return run


def draw_preemption() -> Drawing:
    runs = {
        "filled as needed, with preemption": block_run(watermark=0.0),
        "everything reserved at admission": block_run(reserve_all=True),
    }
    few, longest = (len(run.owners) for run in runs.values())
    size, left = min(24.0, 700 / longest), 100
    drawing = Drawing(
        840,
        606,
        "Preemption over time",
        "Twelve blocks over the steps of two runs, each block in the shade of its request. Filling "
        "starts four requests at once and preempts; reserving runs two at a time.",
    )
    title = f"Filled as needed, the same work takes {few} steps instead of {longest}"
    drawing.text(24, 30, title, size=LARGE, bold=True)
    y = 74.0
    for title, run in runs.items():
        drawing.text(left, y, f"{title}: {len(run.owners)} steps", bold=True)
        num_blocks, height = 12, 14
        top = y + 34
        for step, owners in enumerate(run.owners):
            for block in range(1, num_blocks + 1):
                name = owners.get(block)
                fill = tint(PROMPT, SHADES[name]) if name else PAPER
                drawing.box(
                    left + step * size, top + (block - 1) * height, size, height, fill=fill,
                    radius=0,
                )  # fmt: skip
            for i, name in enumerate(run.preempted[step]):
                x = left + step * size
                drawing.box(x + 2, top - 16, 10, 10, fill=PREEMPTED, radius=5)
                drawing.text(x + 16 + 14 * i, top - 11, name, size=SMALL)
        drawing.text(left - 10, top + 84, "12 blocks", size=SMALL, anchor="end")
        for step in range(0, len(run.owners), 10):
            drawing.text(left + step * size + size / 2, top + 12 * height + 14, str(step + 1),
                         size=SMALL, anchor="middle", muted=True)  # fmt: skip
        y = top + 12 * height + 50
    key = {name: tint(PROMPT, share) for name, share in SHADES.items()}
    drawing.key(left, y + 4, {**key, "free": PAPER, "preempted": PREEMPTED})
    return drawing


def tokens_of_the_first(kind: type, num_steps: int = 24, **options: Any) -> list[int]:
    """One newcomer in every step. What the request that decodes has generated after each."""
    loop = make_loop(400, kind, max_num_seqs=100, max_num_batched_tokens=100, **options)
    first = loop.add("first", 8, 40)
    counts = []
    for number in range(num_steps):
        loop.add(f"n{number}", 8, 40)
        loop.step()
        counts.append(first.num_output_tokens)
    return counts


def draw_starvation() -> Drawing:
    curves = {
        "two phases": (tokens_of_the_first(Scheduler), INK),
        "prefill first,\nat most 3 in a row": (
            tokens_of_the_first(PrefillFirstScheduler, max_consecutive_prefills=3), PROMPT),
        "prefill first,\nno bound": (
            tokens_of_the_first(PrefillFirstScheduler, max_consecutive_prefills=None), BASELINE),
    }  # fmt: skip
    drawing = Drawing(
        840,
        400,
        "A decode among newcomers",
        "Output tokens of one request while a new prompt arrives in every step: one a step with "
        "two phases, one in four with a bound of 3, and only its first without a bound.",
    )
    drawing.text(24, 30, "One newcomer in every step", size=LARGE, bold=True)
    num_steps = len(curves["two phases"][0])
    axes = Axes(Box(64, 84, 570, 250), (1, num_steps), (0, num_steps))
    ticks = {float(n): str(n) for n in (1, 8, 16, 24)}
    axes.draw(drawing, ticks, {float(n): str(n) for n in (0, 8, 16, 24)}, "step",
              "output tokens of the request that decodes")  # fmt: skip
    for label, (counts, color) in curves.items():
        points = []
        for step, count in enumerate(counts, 1):
            if points:
                points.append((axes.x_of(step), points[-1][1]))
            points.append((axes.x_of(step), axes.y_of(count)))
        drawing.line(*points, color=color, width=2.6)
        y = points[-1][1] - (9 if "\n" in label else 0)
        drawing.text(points[-1][0] + 14, y, f"{label}: {counts[-1]}", size=SMALL)
    return drawing


def budget_step() -> tuple[PreemptingPlan, int]:
    """A step of 16 tokens in which three requests decode, one comes in, and one does not fit."""
    loop = make_loop(40, max_num_seqs=8, max_num_batched_tokens=16)
    for name in "abc":
        loop.add(name, 5, 9)
        loop.step()
    loop.add("d", 7, 9)
    loop.add("e", 9, 9)
    return loop.schedule(), loop.scheduler.max_num_batched_tokens


def draw_step_budget() -> Drawing:
    plan, budget = budget_step()
    drawing = Drawing(
        760,
        212,
        "The budget of a step",
        "A step of 16 tokens. Three running requests get one each, a new one 7 for its prompt, and "
        "6 are left: too few for the next in line.",
    )
    drawing.text(24, 30, f"A step of {budget} tokens", size=LARGE, bold=True)
    width, x, top = 43, 36.0, 84
    ends: list[float] = []
    for name, num_tokens in sorted(plan.num_scheduled_tokens.items()):
        fill = DECODE if num_tokens == 1 else PROMPT
        drawing.cells(x, top, [name] * num_tokens, fill, width=width)
        x += num_tokens * width
        ends.append(x)
    num_left = budget - plan.total_num_scheduled_tokens
    drawing.cells(x, top, [""] * num_left, PAPER, width=width)
    num_running = sum(num == 1 for num in plan.num_scheduled_tokens.values())
    border = ends[num_running - 1]
    drawing.bracket(36, border, top - 4, "phase 1: they run")
    drawing.bracket(border + 4, ends[-1], top - 4, "phase 2: d comes in")
    assert plan.admission_stop is not None
    reason, name = plan.admission_stop
    drawing.bracket(x + 4, x + num_left * width, top - 4, f"left over: {num_left}")
    drawing.text(x + 4, top + 54, f"{name} needs 9: admission ends", size=SMALL)
    drawing.text(x + 4, top + 74, f'admission_stop = ("{reason}", "{name}")', size=SMALL, mono=True)
    drawing.key(36, top + 94, {"decode": DECODE, "prompt": PROMPT, "not used": PAPER})
    return drawing


# The example of `beyond/ADAPTERS.md`: each row's input and adapter, and the adapters' A and B.
ROWS = [((1, 2), "a"), ((4, 0), "a"), ((5, 5), ""), ((1, 2), "b"), ((0, 9), ""), ((0, 1), "a")]
MATRICES = {"a": ((1, 1), (2, 0)), "b": ((0, 1), (1, 1))}


def mixed_batch() -> tuple[Ordered, torch.Tensor]:
    """Its rows by adapter, and what comes of them, with W the identity."""
    addition = Addition(torch.eye(2), ["W"], [2], 1 + len(MATRICES), 1)
    for slot, (a, b) in enumerate(MATRICES.values(), 1):
        low_rank = LowRank(torch.tensor([a]), torch.tensor([b]).T)
        addition.fill(slot, {"W": low_rank})
    slots = [["", *MATRICES].index(name) for _, name in ROWS]
    rows = ordered(np.array(slots), cargo := Cargo(torch.device("cpu")))
    cargo.send()
    x = torch.tensor([row for row, _ in ROWS], dtype=torch.float32)
    return rows(), addition.add(rows(), x, x.clone())


def draw_mixed_adapters() -> Drawing:
    rows, y = mixed_batch()
    assert rows.order is not None
    drawing = Drawing(
        840,
        420,
        "A batch with adapters",
        "Six rows, of which three have adapter a, one b and two none. All are multiplied with W. "
        "Those with an adapter are ordered by it, multiplied with its A and B, and added.",
    )
    drawing.text(24, 30, "One product for all, a small one for each adapter", size=LARGE, bold=True)
    fills = {"a": tint(PROMPT, 0.75), "b": tint(PROMPT, 0.3), "": PAPER}
    left, width = 180, 100
    labels = [str(x).replace(" ", "") for x, _ in ROWS]
    drawing.text(24, 87, "x of each row")
    strip = drawing.cells(left, 70, labels, [fills[name] for _, name in ROWS], width=width)
    drawing.text(24, 167, "for all rows")
    drawing.box(left, 150, width * len(ROWS), 34, "W x")
    for cell in strip:
        drawing.arrow(cell.bottom, (cell.bottom[0], 148))
    drawing.text(24, 257, "by adapter")
    order = rows.order.tolist()
    for slot, start, stop in rows.segments:
        name, x = list(MATRICES)[slot - 1], left + width * start + 20 * (slot - 1)
        chosen = [labels[row] for row in order[start:stop]]
        drawing.cells(x, 240, chosen, fills[name], width=width)
        right = x + width * (stop - start)
        drawing.bracket(x + 2, right - 2, 278, f"B (A x) of {name}", above=False)
    drawing.text(24, 347, "the sum")
    sums = [f"({a:g},{b:g})" for a, b in y.tolist()]
    drawing.cells(left, 330, sums, [fills[name] for _, name in ROWS], width=width)
    drawing.key(left, 382, {"adapter a": fills["a"], "adapter b": fills["b"], "none": PAPER})
    return drawing


DRAWINGS = {
    "mixed_adapters": draw_mixed_adapters,
    "preemption": draw_preemption,
    "starvation": draw_starvation,
    "step_budget": draw_step_budget,
}

if __name__ == "__main__":
    save_all(DRAWINGS, __file__)
