"""The pictures of `beyond/PREFILL_FIRST.md`: what they show of a run comes from the run.

python 04_scheduler/lab/plot_prefill_first.py
"""

from __future__ import annotations

from itertools import pairwise

from prefill_first_runs import (
    PAGE_SIZE,
    BudgetLine,
    one_retraction,
    ratio_run,
    six_iterations,
    worked_budget,
)
from workshop.book.draw import LARGE, PAPER, SMALL, SOFT, Box, Drawing, save_all
from workshop.book.draw_parts import Axes
from workshop.book.palette import DECODE, INK, PREEMPTED, PROMPT, WASTE, tint

NEW = tint(PROMPT, 0.85)  # prompts
OLD = tint(DECODE, 0.55)  # those who decode
# Steps that follow each other without `mixing`: from, to -> why. `test_prefill_first_runs.py` lets
# random runs find them. "": nothing is computed.
TRANSITIONS = {
    ("", ""): "nobody is there",
    ("", "EXTEND"): "a request arrives",
    ("EXTEND", "EXTEND"): "another prompt fits",
    ("EXTEND", "DECODE"): "no prompt fits,\nor enough in a row",
    ("EXTEND", ""): "all have ended",
    ("DECODE", "DECODE"): "no prompt fits",
    ("DECODE", "EXTEND"): "a prompt fits",
    ("DECODE", ""): "all have ended",
}


def draw_states() -> Drawing:
    drawing = Drawing(
        840,
        560,
        "The prefill-first state machine",
        "Above: a step is EXTEND, DECODE or nothing, with arrows for what follows what. Below: a "
        "request goes from waiting through last_batch to running_batch, and back when retracted.",
    )
    drawing.text(24, 30, "What a step is", size=LARGE, bold=True)
    extend = drawing.box(90, 100, 220, 64, "prompts, or chunks", title="EXTEND", fill=NEW)
    decode = drawing.box(530, 100, 220, 64, "a token for each", title="DECODE", fill=OLD)
    drawing.box(335, 240, 170, 44, "nothing to do", fill=PAPER, dashed=True)
    for box, pair in ((extend, ("EXTEND", "EXTEND")), (decode, ("DECODE", "DECODE"))):
        left, right = box.x + 60, box.x + 160
        drawing.arrow((left, box.y), (left, box.y - 22), (right, box.y - 22), (right, box.y))
        drawing.text(box.middle[0], box.y - 36, TRANSITIONS[pair], anchor="middle")
    drawing.arrow((310, 118), (530, 118))
    drawing.text(420, 84, TRANSITIONS["EXTEND", "DECODE"], size=SMALL, anchor="middle")
    drawing.arrow((530, 146), (310, 146))
    drawing.text(420, 163, TRANSITIONS["DECODE", "EXTEND"], size=SMALL, anchor="middle")
    drawing.arrow((150, 164), (150, 272), (335, 272))
    drawing.text(142, 292, TRANSITIONS["EXTEND", ""], size=SMALL)
    drawing.arrow((360, 240), (360, 206), (250, 206), (250, 164))
    drawing.text(262, 192, TRANSITIONS["", "EXTEND"], size=SMALL)
    drawing.arrow((640, 164), (640, 262), (505, 262))
    drawing.text(530, 282, TRANSITIONS["DECODE", ""], size=SMALL)

    drawing.text(24, 340, "Where a request stands", size=LARGE, bold=True)
    waiting = drawing.box(40, 400, 130, 56, "in the queue", title="waiting", fill=SOFT)
    last = drawing.box(345, 400, 150, 56, "computed now", title="last_batch", fill=NEW)
    running = drawing.box(640, 400, 160, 56, "decodes", title="running_batch", fill=OLD)
    drawing.arrow(waiting.right, last.left)
    drawing.text(257, 414, "PrefillAdder", size=SMALL, anchor="middle", mono=True)
    drawing.arrow(last.right, running.left)
    drawing.text(567, 414, "merge_batch", size=SMALL, anchor="middle", mono=True)
    drawing.arrow((380, 400), (380, 374), (460, 374), (460, 400))
    drawing.text(475, 374, "chunked_req: its prompt goes on", size=SMALL)
    drawing.arrow((700, 456), (700, 500), (105, 500), (105, 456), color=PREEMPTED, width=2)
    drawing.text(
        402, 520, "retracted: its KV is taken, its tokens are kept", size=SMALL, anchor="middle"
    )
    drawing.arrow((770, 456), (770, 500))
    drawing.text(770, 516, "ended", size=SMALL, anchor="middle")
    return drawing


def draw_next() -> Drawing:
    """`get_next_batch_to_run` without `mixing`."""
    drawing = Drawing(
        840,
        420,
        "Which batch runs next",
        "After the last batch has joined, decodes run if they have waited for enough prefills; "
        "else a prefill if one can be made; else decodes, and if their pages are not there, a "
        "retraction.",
    )
    drawing.text(24, 30, "Which batch runs next", size=LARGE, bold=True)
    merge = drawing.box(
        24, 74, 190, 60, "prompts that are done\njoin those that decode", size=SMALL
    )
    turn = drawing.box(290, 74, 200, 60, "have decodes waited\n8 prefills in a row?", size=SMALL)
    fits = drawing.box(290, 204, 200, 60, "does a chunk, or a prompt\nthat waits, fit?", size=SMALL)
    extend = drawing.box(24, 210, 190, 48, "new batch", title="EXTEND", fill=NEW, size=SMALL)
    pages = drawing.box(580, 140, 220, 60, "are there pages for\nall next tokens?", size=SMALL)
    decode = drawing.box(580, 254, 220, 48, "the share falls", title="DECODE", fill=OLD, size=SMALL)
    drawing.box(
        580, 346, 220, 48, "some go, the share rises", title="retraction, DECODE",
        fill=tint(PREEMPTED, 0.6), size=SMALL,
    )  # fmt: skip
    drawing.arrow(merge.right, turn.left)
    drawing.arrow(turn.bottom, fits.top)
    drawing.text(400, 168, "no", size=SMALL)
    drawing.arrow(turn.right, (690, 104), pages.top)
    drawing.text(530, 90, "yes", size=SMALL, anchor="middle")
    drawing.arrow(fits.left, extend.right)
    drawing.text(252, 220, "yes", size=SMALL, anchor="middle")
    drawing.arrow(fits.right, (536, 234), (536, 170), pages.left)
    drawing.text(512, 220, "no", size=SMALL, anchor="middle")
    drawing.arrow(pages.bottom, decode.top)
    drawing.text(702, 227, "yes", size=SMALL)
    drawing.arrow((580, 186), (556, 186), (556, 370), (580, 370))
    drawing.text(545, 330, "no", size=SMALL, anchor="end")
    return drawing


def draw_chunks() -> Drawing:
    runs = {"chunks of 8": six_iterations(), "mixed: 8 - 1": six_iterations(mixing=True)}
    left, width = 170, 45
    drawing = Drawing(
        840,
        320,
        "Chunks end where a page ends",
        "A prompt of 14 tokens on pages of 4. In chunks of 8 it takes two steps; where a decode "
        "has one of the 8 tokens, 7 are left, a page of 4 is cut off, and it takes three.",
    )
    drawing.text(24, 30, "A chunk ends where a page ends", size=LARGE, bold=True)
    drawing.text(24, 105, "prompt of c", size=SMALL)
    drawing.cells(left, 88, [str(i) for i in range(14)], SOFT, width=width)
    for page in range(4):
        x = left + page * PAGE_SIZE * width
        for top, bottom in ((80, 138), (184, 204), (248, 262)):  # between the chunks
            drawing.line((x, top), (x, bottom), dashed=True)
        end = left + min((page + 1) * PAGE_SIZE, 14) * width
        drawing.text((x + end) / 2, 68, f"page {page}", size=SMALL, anchor="middle", muted=True)
    for row, (name, iterations) in enumerate(runs.items()):
        y = 142 + row * 64
        drawing.text(24, y + 20, name, size=SMALL)
        spans = [now.computed["c"] for now in iterations if "c" in now.computed]
        for number, (first, last) in enumerate((a, b) for a, b in spans if b < 14):
            size = last - first + 1
            drawing.box(left + first * width + 3, y, size * width - 6, 40,
                        f"chunk {number + 1}: {size}", fill=NEW)  # fmt: skip
    drawing.text(24, 292, "Every page that a chunk fills is full, and can be cached at once. The "
                 "last chunk ends with the prompt.", size=SMALL)  # fmt: skip
    return drawing


def draw_batches() -> Drawing:
    iterations = six_iterations()
    left, column = 132, 114
    drawing = Drawing(
        left + 6 * column + 12,
        400,
        "Last, running and new batch over six iterations",
        "Six columns, one for each iteration: what arrives, what last_batch and running_batch "
        "hold, which batch runs and the positions it computes.",
    )
    drawing.text(20, 28, "Three batches over six iterations", size=LARGE, bold=True)
    rows = {"arrives": 92, "last_batch": 142, "running_batch": 202, "this step": 274, "ends": 362}
    for name, y in rows.items():
        drawing.text(20, y, name, size=SMALL, mono="_" in name)
    for number, now in enumerate(iterations):
        x = left + number * column
        drawing.box(x + 2, 64, column - 4, 320, fill=PAPER, radius=8)
        drawing.text(x + column / 2, 52, str(number + 1), anchor="middle", bold=True)
        _chips(drawing, x, rows["arrives"], now.arrived, SOFT)
        last = _chips(drawing, x, rows["last_batch"], now.last_batch, NEW)
        joined = [name for name in now.last_batch if name in now.joined]
        running = _chips(drawing, x, rows["running_batch"], now.running_batch, OLD)
        for name in joined:
            drawing.arrow(last[name].bottom, running[name].top)
        fill = NEW if now.mode == "EXTEND" else OLD
        spans = [f"{name} {a}-{b}" if a < b else f"{name} {a}" for name, (a, b) in
                 now.computed.items()]  # fmt: skip
        drawing.box(x + 8, 240, column - 16, 72, "\n".join(spans), title=now.mode, fill=fill,
                    size=SMALL)  # fmt: skip
        if now.chunked_req:
            drawing.text(x + column / 2, 326, f"{now.chunked_req} goes on", size=SMALL,
                         anchor="middle", muted=True)  # fmt: skip
        _chips(drawing, x, rows["ends"], now.ended, SOFT)
    return drawing


def _chips(drawing: Drawing, x: float, y: float, names: list[str], fill: str) -> dict[str, Box]:
    """One for each request, in the middle of a column."""
    start = x + 57 - len(names) * 17
    return {
        name: drawing.box(start + i * 34 + 2, y - 15, 30, 30, name, fill=fill, radius=15)
        for i, name in enumerate(names)
    }


def draw_budget() -> Drawing:
    drawing = Drawing(
        840,
        500,
        "The budget of an admission",
        "Bars of 48 tokens of memory: in use, expected of those who decode, and free. With a share "
        "of 0.5 request c fits and d does not; with 0.1 both fit.",
    )
    drawing.text(24, 30, "May it come in? The memory, in tokens", size=LARGE, bold=True)
    meanings = {"pages in use": OLD, "expected outputs": tint(WASTE, 0.7), "free": PAPER}
    drawing.key(60, 62, {**meanings, "what it would need": NEW})
    y = 110.0
    for ratio in (0.5, 0.1):
        budget = worked_budget(ratio)
        drawing.text(24, y, f"new_token_ratio = {ratio}", bold=True)
        y += 24
        for line in budget.lines:
            _budget_bar(drawing, y, line, budget.capacity)
            y += 78
        y += 20
    return drawing


def _budget_bar(drawing: Drawing, y: float, line: BudgetLine, capacity: int) -> None:
    x, scale = 60, 12.4
    drawing.text(24, y + 15, line.asked, bold=True)
    widths = (line.in_use, line.expected, line.free)
    for amount, fill in zip(widths, (OLD, tint(WASTE, 0.7), PAPER), strict=True):
        label = f"{amount:g}" if round(amount, 1) == amount else f"{amount:.1f}"
        drawing.box(x, y, amount * scale, 30, label if amount > 2 else "", fill=fill, radius=0)
        x += amount * scale
    start = 60 + (line.in_use + line.expected) * scale
    drawing.box(start, y + 34, line.needs * scale, 24, str(line.needs), fill=NEW, radius=0)
    is_in = line.result == "CONTINUE"
    free = f"{round(line.free, 1):g}"
    sign = f"{line.needs} <= {free}: in" if is_in else f"{line.needs} > {free}: waits"
    end = start + line.needs * scale
    drawing.text(max(end, 60 + capacity * scale) + 14, y + 30, sign)


def draw_ratio() -> Drawing:
    run = ratio_run()
    steps = len(run.ratios)
    drawing = Drawing(
        840,
        450,
        "new_token_ratio over a run",
        "Above, the share that is set aside: it falls from 0.7 to 0.1 and jumps at each of "
        f"{sum(map(len, run.retracted))} retractions. Below, how full the KV memory is.",
    )
    drawing.text(24, 30, "The share falls while all goes well", size=LARGE, bold=True)
    ticks = {float(s): str(s) for s in range(0, steps, 100)}
    upper = Axes(Box(60, 82, 750, 150), (0, steps), (0, 1))
    upper.draw(drawing, ticks, {0: "0", 0.5: "0.5", 1: "1"}, "", "new_token_ratio")
    lower = Axes(Box(60, 302, 750, 84), (0, steps), (0, 1))
    lower.draw(drawing, ticks, {0: "0", 1: "100%"}, "step", "KV memory in use")
    _curve(drawing, upper, run.ratios)
    _curve(drawing, lower, run.usage)
    for step, names in enumerate(run.retracted):
        if names:
            x, y = upper.x_of(step), upper.y_of(run.ratios[step])
            drawing.box(x - 5, y - 5, 10, 10, fill=PREEMPTED, radius=5)
            drawing.text(x + 12, y - 4, f"{names[0]} retracted: {run.ratios[step]:.2f}", size=SMALL)
            drawing.line((x, lower.area.y), (x, lower.area.y + lower.area.height), color=PREEMPTED)
    return drawing


def _curve(drawing: Drawing, axes: Axes, values: list[float]) -> None:
    points = [(axes.x_of(step), axes.y_of(value)) for step, value in enumerate(values)]
    kept = [points[0]]
    for before, now, after in zip(points, points[1:], points[2:]):
        is_straight = abs((now[1] - before[1]) - (after[1] - now[1])) < 1e-9
        if not is_straight:
            kept.append(now)
    drawing.line(*kept, points[-1], color=INK, width=2.2)


def draw_retraction() -> Drawing:
    now = one_retraction()
    drawing = Drawing(
        840,
        455,
        "A retraction",
        f"Ten pages are full and a decode needs one more. {now.retracted[0]}, which has "
        "the longest input of three with as many outputs, gives its pages back; the share "
        "is raised.",
    )
    victim = now.retracted[0]
    asks = [h for h in now.before if h.num_computed % PAGE_SIZE == 0]
    drawing.text(24, 30, "The next decode finds no page", size=LARGE, bold=True)
    for y, holders, title in (
        (76, now.before, "before"),
        (290, now.after, "after"),
    ):
        owner = {block: h.name for h in holders for block in h.blocks}
        labels = [owner.get(block, "") for block in range(1, now.num_pages + 1)]
        fills = [
            PAPER if not name else tint(PREEMPTED, 0.7) if name == victim else OLD
            for name in labels
        ]
        drawing.text(24, y + 18, title, bold=True)
        drawing.cells(110, y, labels, fills, width=44, height=36)
    who = " and ".join(h.name for h in asks)
    drawing.text(566, 94, f"{who}: position {asks[0].num_computed}\nopens a page: none is free",
                 size=SMALL)  # fmt: skip
    drawing.text(110, 146, "Who makes way? The last of this order:", size=SMALL)
    order = sorted(now.before, key=lambda h: (-h.num_outputs, h.num_prompt))
    x = 110.0
    boxes = []
    for holder in order:
        fill = tint(PREEMPTED, 0.7) if holder.name == victim else OLD
        label = f"{holder.num_outputs} outputs\n{holder.num_prompt} prompt tokens"
        boxes.append(drawing.box(x, 166, 164, 76, label, title=holder.name, fill=fill, size=SMALL))
        x += 196
    for left, right in pairwise(boxes):
        drawing.arrow(left.right, right.left)
    num_free = now.num_pages - sum(len(h.blocks) for h in now.after)
    drawing.text(566, 308, f"{victim} waits, in front;\n{num_free} pages are free", size=SMALL)
    stay = now.after
    drawing.text(24, 366, "The share for what the others may still generate:")
    outputs = " + ".join(f"({h.num_outputs} + 20)" for h in stay)
    most = " + ".join(str(h.max_tokens) for h in stay)
    value = sum(h.num_outputs + 20 for h in stay) / sum(h.max_tokens for h in stay)
    drawing.text(
        60, 398, f"{outputs}  over  {most}  =  {value:.2f}: at most 1", mono=True, size=SMALL
    )
    drawing.text(
        60, 428, f"new_token_ratio: {now.ratio_before:g} before, {now.ratio_after:g} now",
        mono=True, size=SMALL,
    )  # fmt: skip
    return drawing


DRAWINGS = {
    "prefill_first_states": draw_states,
    "three_batches": draw_batches,
    "next_batch": draw_next,
    "page_chunks": draw_chunks,
    "budget_bar": draw_budget,
    "new_token_ratio": draw_ratio,
    "retraction": draw_retraction,
}

if __name__ == "__main__":
    save_all(DRAWINGS, __file__)
