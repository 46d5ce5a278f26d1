"""The drawing of `beyond/GRAMMARS.md`: from texts and outputs to bits, and from bits to logits.

python 04_scheduler/lab/plot_grammars.py
"""

from __future__ import annotations

import numpy as np
import torch

from common.grammars.grammar_masks import GrammarMasks
from common.grammars.lark_text import compile_source
from common.grammars.vocabulary import Vocabulary, tokenizer_of
from common.sampling.sampling_constraints import forbid
from grammars import Choice, source_of
from workshop.book.draw import LARGE, PAPER, SMALL, Drawing, save_all
from workshop.book.palette import DECODE, tint

TEXTS = ["yes", "no", "none"]
TOKENS = ["n", "o", "y", "no", "es", "ne", "one", "EOS"]
SO_FAR = "no"
LOGITS = [1.2, 0.4, -0.3, 2.9, -1.0, 0.8, 0.1, 2.1]  # for the worked example
LEFT, TOP, WIDTH, HEIGHT = 24, 66, 66, 34  # of the tree's nodes
COLUMN, CELL = 190, 77  # of the table


def masked() -> tuple[list[bool], torch.Tensor]:
    """Which tokens may follow what is there so far, and the logits with the others forbidden."""
    pieces = tuple(token.encode() for token in TOKENS[:-1])
    vocabulary = Vocabulary((*pieces, b""), (len(pieces),))
    compiled = compile_source(source_of(Choice(TEXTS)), tokenizer_of(vocabulary))
    bits = np.zeros((2, 1), dtype=np.int32)
    GrammarMasks(vocabulary).match(compiled).fill(
        bits, 0, [TOKENS.index(SO_FAR)]
    )  # as if it were guessed
    changed = forbid(torch.tensor([LOGITS]), torch.tensor([0]), torch.from_numpy(bits[1:]))
    return [bool(bits[1, 0] >> i & 1) for i in range(len(TOKENS))], changed[0]


def draw_tree(drawing: Drawing) -> None:
    """All beginnings of the texts, and the steps that may be taken from the one so far."""
    rows = {"": TOP + 54, "y": TOP, "n": TOP + 108}
    boxes = {}
    for prefix in sorted({text[:i] for text in TEXTS for i in range(len(text) + 1)}):
        x, y = LEFT + 118 * len(prefix), rows[prefix[:1]]
        fill = DECODE if prefix == SO_FAR else tint(DECODE, 0.3) if prefix in ("", "n") else PAPER
        boxes[prefix] = drawing.box(x, y, WIDTH, HEIGHT, f'"{prefix}"', fill=fill, mono=True)
        if prefix and prefix != SO_FAR + "n":
            drawing.arrow(boxes[prefix[:-1]].right, boxes[prefix].left)
    for text in TEXTS:
        box = boxes[text]
        x, y = (box.x, box.y - 62) if text == SO_FAR else (box.x + 118, box.y)
        end = drawing.box(x, y, WIDTH, HEIGHT, "EOS", mono=True, dashed=True)
        strong = {"color": DECODE, "width": 2.6} if text == SO_FAR else {}
        drawing.arrow(*((box.top, end.bottom) if y < box.y else (box.right, end.left)), **strong)
    here, there, end = boxes[SO_FAR], boxes[SO_FAR + "n"], boxes["none"]
    drawing.arrow(here.right, there.left, color=DECODE, width=2.6)
    drawing.text(here.x + WIDTH + 26, here.y + 4, '"n"', size=SMALL, anchor="middle", mono=True)
    low = here.y + HEIGHT + 26
    drawing.arrow(here.bottom, (here.bottom[0], low), (end.bottom[0], low), end.bottom,
                  color=DECODE, width=2.6)  # fmt: skip
    drawing.text(there.bottom[0], low - 11, '"ne"', size=SMALL, anchor="middle", mono=True)


def draw_mask() -> Drawing:
    is_allowed, changed = masked()
    drawing = Drawing(
        840,
        496,
        "From a grammar to logits",
        "The tree of the texts yes, no and none. From no, the tokens n, ne and EOS lead on. They "
        "have a bit; the logits of all others become minus infinity.",
    )
    drawing.text(24, 30, 'After "no", three tokens of eight may come', size=LARGE, bold=True)
    draw_tree(drawing)
    drawing.text(560, TOP + 62, "blue: what each of the three\nadds to the text", size=SMALL)
    no_fills = [PAPER] * len(TOKENS)
    fills = [tint(DECODE, 0.75) if allowed else PAPER for allowed in is_allowed]
    after = [f"{x:g}" if np.isfinite(x) else "−∞" for x in changed.double().numpy().round(3)]
    rows = {
        "token": ([*(f'"{token}"' for token in TOKENS[:-1]), "EOS"], no_fills),
        "bit": ([str(int(allowed)) for allowed in is_allowed], fills),
        "logit": ([f"{x:g}".replace("-", "−") for x in LOGITS], no_fills),
        "logit, masked": (after, fills),
    }
    for i, (label, (cells, fill)) in enumerate(rows.items()):
        y = 282 + 44 * i
        drawing.text(24, y + 17, label)
        for j, (cell, color) in enumerate(zip(cells, fill, strict=True)):
            drawing.box(COLUMN + j * CELL, y, CELL, HEIGHT, cell, fill=color, mono=True, radius=0)
    best = [TOKENS[int(torch.as_tensor(row).argmax())] for row in (LOGITS, changed)]
    drawing.text(24, 470, f'the highest: "{best[0]}" before, {best[1]} after', size=SMALL)
    return drawing


DRAWINGS = {"grammar_mask": draw_mask}

if __name__ == "__main__":
    save_all(DRAWINGS, __file__)
