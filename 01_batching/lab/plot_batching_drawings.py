"""Drawings of chapter 1's ideas.

python 01_batching/lab/plot_batching_drawings.py
"""

from __future__ import annotations

from fcfs_scheduler import FCFSScheduler
from request import Request
from scheduler_interface import StepOutput
from workshop.book.draw import LARGE, PAPER, SMALL, Drawing, save_all
from workshop.book.palette import DECODE, PROMPT

PROMPT_IDS, OUTPUT_IDS = [11, 12, 13, 14, 15], [21, 22, 23]


def counters() -> list[tuple[str, int, int, int]]:
    """What, `num_tokens`, `num_computed_tokens` and the tokens of the step that was planned."""
    scheduler = FCFSScheduler()
    request = Request.from_tokens("a", PROMPT_IDS, max_new_tokens=len(OUTPUT_IDS))
    scheduler.add_request(request)
    seen = [("it waits", request.num_tokens, request.num_computed_tokens, 0)]
    for number, token in enumerate(OUTPUT_IDS[:2], 1):
        plan = scheduler.schedule()
        planned = plan.num_scheduled_tokens["a"]
        scheduler.update_from_output(plan, StepOutput({"a": [token]}))
        what = f"step {number} computed {planned}"
        seen.append((what, request.num_tokens, request.num_computed_tokens, planned))
    return seen


def draw_counters() -> Drawing:
    drawing = Drawing(
        840,
        446,
        "Two counters on a strip of tokens",
        "The same request before any step, after its prefill and after a decode: num_tokens counts "
        "what is known, num_computed_tokens what is in the KV cache.",
    )
    drawing.text(24, 30, "Two counters, and a step lets the second catch up", size=LARGE, bold=True)
    drawing.key(24, 62, {"prompt token": PROMPT, "output token": DECODE, "not known yet": PAPER})
    width, left = 58, 210
    ids = [*PROMPT_IDS, *OUTPUT_IDS]
    for row, (what, known, computed, _) in enumerate(counters()):
        y = 132 + row * 112
        drawing.text(24, y + 17, what, bold=True)
        labels = [str(token) if i < known else "?" for i, token in enumerate(ids)]
        fills = [
            PAPER if i >= known else PROMPT if i < len(PROMPT_IDS) else DECODE
            for i in range(len(ids))
        ]
        drawing.cells(left, y, labels, fills, width=width)
        drawing.bracket(left, left + known * width - 3, y - 4, f"num_tokens = {known}")
        if computed:
            end = left + computed * width - 3
            text = f"num_computed_tokens = {computed}"
            drawing.bracket(left, end, y + 38, text, above=False)
        else:
            drawing.text(left, y + 52, "num_computed_tokens = 0", size=SMALL)
        drawing.text(left + len(ids) * width + 18, y + 17, f"{known - computed} behind", size=SMALL)
    return drawing


DRAWINGS = {"two_counters": draw_counters}

if __name__ == "__main__":
    save_all(DRAWINGS, __file__)
