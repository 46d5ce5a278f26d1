"""Drawings of chapter 6's ideas: the mask of a mixed batch, and online softmax in three tiles.

python 06_chunked_prefill/lab/plot_chunked_prefill_drawings.py
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

import mixed_attention
from batch_layout import Queries
from block_delta import PagedRunnerState
from mixed_batch import MixedMetadata, compose
from workshop.book.draw import LARGE, PAPER, SMALL, SOFT, Drawing, save_all
from workshop.book.palette import DECODE, PROMPT, tint

# In the order in which they were planned: first position, tokens of this step, rows of logits.
STEP = {"A": (0, 4, 1), "E": (2, 3, 0), "B": (5, 1, 1), "C": (2, 1, 1)}
OLD, NEW = tint(DECODE, 0.55), tint(PROMPT, 0.8)


@dataclass(frozen=True, slots=True)
class Mask:
    names: list[str]  # in the order of the batch
    num_short: int
    query_starts: list[int]
    seq_lens: list[int]
    positions: list[int]
    logit_rows: set[int]


def mixed_mask() -> Mask:
    names = list(STEP)
    columns = (np.array(column) for column in zip(*STEP.values(), strict=True))
    state = PagedRunnerState(len(names), 4)
    state.widen(16)
    layout = compose(state, Queries(np.arange(len(names)), *columns), 4)
    batch = layout.on(torch.device("cpu"))
    (metadata,) = batch.attention
    assert isinstance(metadata, MixedMetadata)
    return Mask(
        [names[i] for i in layout.order],
        metadata.num_short,
        list(metadata.query_starts),
        list(metadata.host_seq_lens),
        batch.positions.tolist(),
        set(batch.logit_indices.tolist()),
    )


def draw_mask() -> Drawing:
    mask = mixed_mask()
    size, left, top, gap = 27, 172, 118, 16
    drawing = Drawing(
        840,
        470,
        "The mask of a mixed batch",
        "Rows are the query tokens of a step, columns the keys of each request. A decode is one "
        "row that sees its whole history; a chunk is a triangle behind its history.",
    )
    drawing.text(24, 30, "Which keys each token sees", size=LARGE, bold=True)
    meanings = {"a decode sees": OLD, "a chunk sees": NEW, "later, masked": PAPER}
    drawing.key(24, 62, meanings)
    x = float(left)
    starts = []
    for name, seq_len in zip(mask.names, mask.seq_lens, strict=True):
        starts.append(x)
        drawing.text(x + seq_len * size / 2, top - 16, f"keys of {name}", size=SMALL,
                     anchor="middle")  # fmt: skip
        x += max(seq_len * size, 76) + gap
    for i, name in enumerate(mask.names):
        first, stop = mask.query_starts[i], mask.query_starts[i + 1]
        is_short = i < mask.num_short
        for row in range(first, stop):
            y = top + row * (size + 2) + i * 8
            position = mask.positions[row]
            drawing.text(24, y + size / 2, f"{name} at {position}", size=SMALL)
            if row in mask.logit_rows:
                drawing.text(98, y + size / 2, "logits", size=SMALL, muted=True)
            for key in range(mask.seq_lens[i]):
                is_seen = key <= position
                fill = (OLD if is_short else NEW) if is_seen else PAPER
                drawing.box(starts[i] + key * size, y, size, size, str(key) if is_seen else "",
                            fill=fill, size=SMALL, radius=0)  # fmt: skip
    bottom = top + mask.query_starts[-1] * (size + 2) + len(mask.names) * 8
    drawing.text(
        24, bottom + 24,
        "What is not drawn is not computed: no request sees another one's keys. E's prompt goes "
        "on, so\nno row of it has logits.", size=SMALL,
    )  # fmt: skip
    drawing.height = bottom + 66
    return drawing


# -- online softmax

SCORES = [[1.0, 3.0], [2.0, 5.0], [4.0, 0.0]]
VALUES = [[10.0, 20.0], [30.0, 40.0], [50.0, 60.0]]


@dataclass(frozen=True, slots=True)
class TileStep:
    """After a tile: the largest score, the sum of exp(score - largest), and the output so far."""

    largest: float
    total: float
    output: float
    kept: float  # what the old sum was multiplied by


def online_softmax() -> list[TileStep]:
    """One query of size 1, so that a key is a score. Chapter 6 keeps the logarithm of the sum; the
    sum relative to the largest score is made of it here."""
    steps: list[TileStep] = []
    running, largest = None, -math.inf
    for scores, values in zip(SCORES, VALUES, strict=True):
        keys, held = (torch.tensor(row, dtype=torch.float64).reshape(1, 1, 2, 1) for row in
                      (scores, values))  # fmt: skip
        part = mixed_attention._attend_tile(
            torch.ones(1, 1, 1, 1, dtype=torch.float64), keys, held, 1.0, False
        )
        if running is None:
            running = part
        else:
            running.merge(part)
        before, largest = largest, max(largest, *scores)
        lse = float(running.lse)
        kept = math.exp(before - largest)
        steps.append(TileStep(largest, math.exp(lse - largest), float(running.output), kept))
    return steps


def draw_softmax() -> Drawing:
    steps = online_softmax()
    drawing = Drawing(
        840,
        420,
        "Online softmax in three tiles",
        "Six keys in tiles of two. After each tile there are a running maximum m, a running sum l "
        "and an output o; when the maximum grows, the old sum is scaled down.",
    )
    drawing.text(24, 30, "Three numbers are enough, however many keys", size=LARGE, bold=True)
    for label, y in (("scores", 97), ("values", 133)):
        drawing.text(24, y, label, size=SMALL)
    boxes = []
    for number, now in enumerate(steps):
        x = 110 + number * 248
        drawing.text(x + 60, 62, f"tile {number + 1}", anchor="middle", bold=True)
        drawing.cells(x, 80, [f"{s:g}" for s in SCORES[number]], tint(PROMPT, 0.8), width=60)
        drawing.cells(x, 116, [f"{v:g}" for v in VALUES[number]], SOFT, width=60)
        text = f"m = {now.largest:g}\nl = {now.total:.3f}\no = {now.output:.2f}"
        boxes.append(drawing.box(x - 12, 206, 144, 84, text, fill=OLD, mono=True))
        drawing.arrow((x + 60, 150), (x + 60, 206))
    for number in (1, 2):
        start, stop = boxes[number - 1].right, boxes[number].left
        drawing.arrow(start, stop)
        middle = (start[0] + stop[0]) / 2
        drawing.text(middle, start[1] - 16, f"l x {steps[number].kept:.3f}", size=SMALL,
                     anchor="middle", mono=True)  # fmt: skip
    scores, values = torch.tensor(SCORES).flatten(), torch.tensor(VALUES).flatten()
    whole = float(scores.double().softmax(0) @ values.double())
    drawing.text(
        24, 334,
        "m: the largest score so far.  l: the sum of exp(score - m).  o: the mean of the values, "
        "weighted\nby exp(score - m) / l. A larger m comes: the old l is multiplied by "
        "exp(old m - new m).", size=SMALL,
    )  # fmt: skip
    drawing.text(24, 392, f"All six scores at once give the same: {whole:.2f}", bold=True)
    return drawing


DRAWINGS = {"mixed_mask": draw_mask, "online_softmax": draw_softmax}

if __name__ == "__main__":
    save_all(DRAWINGS, __file__)
