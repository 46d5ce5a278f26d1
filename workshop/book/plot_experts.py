"""Which experts a step reads, as a picture.

    python workshop/book/plot_experts.py

Writes `workshop/figures/experts_read.svg`, which `common/experts/README.md` shows. Nothing
is measured: the rows' choices stand here, and are ordered as the engine orders them.
"""

from __future__ import annotations

import random

import numpy as np

from common.rows_by_owner import Segments, in_order
from workshop.book.draw import LARGE, PAPER, Drawing, save_all
from workshop.book.palette import INK, tint

NUM_EXPERTS, NUM_ACTIVE = 8, 2
BY_HAND = [(2, 5), (7, 2), (5, 2)]  # of the page's example
READ = tint(INK, 0.2)


def choices(num_rows: int) -> list[tuple[int, ...]]:
    rng = random.Random(0)
    more = [tuple(rng.sample(range(NUM_EXPERTS), NUM_ACTIVE)) for _ in range(num_rows)]
    return (BY_HAND + more)[:num_rows]


def segments_of(num_rows: int) -> Segments:
    return in_order(np.array(choices(num_rows)).flatten())[1]


def draw_experts() -> Drawing:
    drawing = Drawing(
        840,
        400,
        "Which experts a step reads",
        "Eight experts, of which a row needs two. One row reads two of them, three rows read "
        "three, sixteen rows read all eight, most of them for few rows.",
    )
    title = "A row reads two of eight experts, a step all that its rows need"
    drawing.text(24, 32, title, size=LARGE, bold=True)
    left, width = 130, 72
    drawing.text(24, 77, "experts")
    drawing.cells(left, 60, list(map(str, range(NUM_EXPERTS))), PAPER, width=width)
    for y, num_rows in zip((126, 192, 258), (1, 3, 16)):
        segments = {e: stop - start for e, start, stop in segments_of(num_rows)}
        label = "1 row" if num_rows == 1 else f"{num_rows} rows"
        drawing.text(24, y + 17, label)
        labels = [str(segments.get(e, "")) for e in range(NUM_EXPERTS)]
        fills = [READ if e in segments else PAPER for e in range(NUM_EXPERTS)]
        drawing.cells(left, y, labels, fills, width=width)
        drawing.text(left + width * NUM_EXPERTS + 14, y + 17, f"{len(segments)} read")
    drawing.text(left, 326, "in a cell: the rows that are multiplied with it", muted=True)
    drawing.key(left, 366, {"read in this step": READ, "not read": PAPER})
    return drawing


DRAWINGS = {"experts_read": draw_experts}

if __name__ == "__main__":
    save_all(DRAWINGS, __file__)
