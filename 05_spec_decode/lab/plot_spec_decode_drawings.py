"""Drawings of chapter 5's ideas: accept, or draw from the residual; which row judges which guess.

python 05_spec_decode/lab/plot_spec_decode_drawings.py
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from exact_law import step_laws
from rejection_sampler import rejection_sample
from spec_decode import verify_and_sample
from workshop.book.draw import LARGE, PAPER, SMALL, SOFT, Box, Drawing, save_all
from workshop.book.draw_parts import Axes
from workshop.book.palette import ACCEPTED, DECODE, DRAFT, INK, PROMPT, REJECTED, tint

P = torch.tensor([0.05, 0.30, 0.10, 0.25, 0.02, 0.08, 0.15, 0.05], dtype=torch.float64)
Q = torch.tensor([0.20, 0.20, 0.02, 0.30, 0.10, 0.03, 0.05, 0.10], dtype=torch.float64)


def first_token() -> tuple[list[float], list[float]]:
    """Chances that each token comes out first: as an accepted guess, and drawn after a rejection.
    Exact, asked of the chapter's verification."""
    laws = step_laws(rejection_sample, lambda *_: P, lambda *_: Q, [()], 1)[()]
    accepted, drawn = [0.0] * len(P), [0.0] * len(P)
    for run, chance in laws.items():
        (accepted if len(run) == 2 else drawn)[run[0]] += chance
    return accepted, drawn


def draw_residual() -> Drawing:
    accepted, drawn = first_token()
    drawing = Drawing(
        840,
        460,
        "Accept, or draw what is missing",
        "Bars for eight tokens: accepted guesses fill min(p, q), tokens drawn after a rejection "
        "fill what is missing, and together they are p.",
    )
    drawing.text(24, 30, "Accepted guesses and what is drawn instead add up to p", size=LARGE,
                 bold=True)  # fmt: skip
    drawing.key(
        64, 64,
        {"accepted: min(p, q)": ACCEPTED, "drawn from the residual": REJECTED,
         "q, where it is above p": PAPER},
    )  # fmt: skip
    axes = Axes(Box(64, 110, 752, 230), (0, 8), (0, 0.35))
    ticks = {0.0: "0", 0.1: "0.1", 0.2: "0.2", 0.3: "0.3"}
    axes.draw(drawing, {i + 0.5: f"token {i}" for i in range(8)}, ticks, "", "chance")
    base = axes.y_of(0)
    for i in range(8):
        x = axes.x_of(i + 0.18)
        width = axes.x_of(i + 0.82) - x
        low, high = axes.y_of(accepted[i]), axes.y_of(accepted[i] + drawn[i])
        q = axes.y_of(float(Q[i]))
        if q < high:
            drawing.box(x, q, width, high - q, fill=PAPER, radius=0, dashed=True)
        drawing.box(x, low, width, base - low, fill=ACCEPTED, radius=0)
        if low - high > 0.1:
            drawing.box(x, high, width, low - high, fill=REJECTED, radius=0)
        drawing.line((x - 9, high), (x + width + 9, high), color=INK, width=3)
        sign = f"p {P[i]:.2f}"
        drawing.text(x + width / 2, base + 40, sign, size=SMALL, anchor="middle")
        drawing.text(x + width / 2, base + 60, f"q {Q[i]:.2f}", size=SMALL, anchor="middle",
                     muted=True)  # fmt: skip
    share = sum(accepted)
    drawing.text(
        64, 438,
        f"A guess is accepted in {share:.0%} of all cases. The thick line is p: each column "
        "ends there.",
        size=SMALL,
    )  # fmt: skip
    return drawing


class ScriptedLM:
    """Says the next word of a sentence, whatever it is asked."""

    def __init__(self, after: dict[tuple[int, ...], int], vocab_size: int) -> None:
        self.after, self.vocab_size = after, vocab_size

    def get_logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        logits = torch.zeros(len(token_ids), self.vocab_size, dtype=torch.float64)
        for i in range(len(token_ids)):
            logits[i, self.after[tuple(token_ids[: i + 1])]] = 1
        return logits


WORDS = ["the", "cat", "sat", "on", "my", "mat", "lap", "and"]


def judged() -> tuple[list[str], list[str], list[str], list[str], int]:
    """Context, guesses, what the target says behind each of their rows, what comes out, and how
    many guesses were right."""
    ids = {word: i for i, word in enumerate(WORDS)}
    context, drafts = ["the", "cat", "sat"], ["on", "my", "lap"]
    said = {1: "cat", 2: "sat", 3: "on", 4: "my", 5: "mat", 6: "and"}
    fed = [*context, *drafts]
    after = {tuple(ids[w] for w in fed[:n]): ids[word] for n, word in said.items()}
    target = ScriptedLM(after, len(WORDS))
    tokens, num_accepted = verify_and_sample(
        target, [ids[w] for w in context], [ids[w] for w in drafts], temperature=0.0
    )
    rows = [said[n] for n in range(len(context), len(fed) + 1)]
    return context, drafts, rows, [WORDS[t] for t in tokens], num_accepted


def draw_rows() -> Drawing:
    context, drafts, rows, out, num_accepted = judged()
    drawing = Drawing(
        840,
        430,
        "Which row judges which guess",
        "The row of logits behind a token is about the next one: the row of the last context token "
        "judges the first guess. The first wrong guess is replaced by that row's own token.",
    )
    drawing.text(24, 30, "A guess is judged by the row before it", size=LARGE, bold=True)
    left, width = 150, 108
    fed = [*context, *drafts]
    first = len(context)
    drawing.text(24, 97, "fed in one pass", size=SMALL)
    fills = [SOFT] * (first - 1) + [tint(PROMPT, 0.3)] + [tint(DRAFT, 0.35)] * len(drafts)
    cells = drawing.cells(left, 80, fed, fills, width=width)
    drawing.bracket(left, left + first * width - 4, 74, "context")
    drawing.bracket(left + first * width, left + len(fed) * width - 4, 74, "guesses")
    drawing.text(24, 187, "its row says", size=SMALL)
    row_boxes = []
    for i, word in enumerate(rows):
        is_used = i <= num_accepted
        x = left + (first - 1 + i) * width
        fill = tint(DECODE, 0.5) if is_used else PAPER
        row_boxes.append(drawing.box(x, 170, width - 10, 34, word, fill=fill, dashed=not is_used,
                                     radius=0))  # fmt: skip
        drawing.arrow((x + 30, cells[first - 1 + i].bottom[1]), (x + 30, 170))
    drawing.text(24, 285, "judges", size=SMALL)
    for i, guess in enumerate(drafts):
        is_right, is_reached = i < num_accepted, i <= num_accepted
        x = left + (first - 1 + i) * width
        fill = ACCEPTED if is_right else REJECTED if is_reached else PAPER
        verdict = f"{guess}: right" if is_right else f"{guess}: wrong"
        box = drawing.box(x, 268, width - 10, 34, verdict, fill=fill, size=SMALL)
        drawing.arrow((x + (width - 10) / 2, 204), box.top)
    bonus = left + (len(fed) - 1) * width
    drawing.text(bonus, 285, "bonus, if all\nwere right", size=SMALL, muted=True)
    drawing.text(24, 367, "comes out", size=SMALL)
    fills = [ACCEPTED] * num_accepted + [DECODE]
    drawing.cells(left + (first - 1) * width, 350, out, fills, width=width - 10)
    end = left + (first - 1) * width + len(out) * (width - 10)
    drawing.text(end + 16, 367, f"{num_accepted} guesses and one\ntoken of the target", size=SMALL)
    return drawing


DRAWINGS = {"accept_and_residual": draw_residual, "which_row_judges": draw_rows}

if __name__ == "__main__":
    save_all(DRAWINGS, __file__)
