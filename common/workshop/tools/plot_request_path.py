"""The path of one request through the files, as a picture.

    python common/workshop/tools/plot_request_path.py

Writes `common/workshop/figures/request_path.svg`, which `common/README.md` shows. Nothing is
measured.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

FIGURE = Path(__file__).resolve().parents[1] / "figures" / "request_path.svg"
COMMON, CHAPTER, LOOP = "#ececec", "#cfe0ee", "#f7f9fb"
# x, y of the lower left corner, width, height, colour, file, what it does
BOXES = {
    "llm": (0.0, 7.2, 2.3, 1.3, COMMON, "llm.py", "generate, stream"),
    "engine": (3.4, 7.2, 2.9, 1.3, COMMON, "engine.py", "add_request, step, abort"),
    "intake": (7.5, 7.8, 3.5, 1.3, COMMON, "intake.py, tokenizer.py",
               "text in: checked, a Request"),
    "outputs": (7.5, 6.2, 3.5, 1.3, COMMON, "outputs.py, tokenizer.py",
                "text out: characters, stops"),
    "loop": (0.0, 0.0, 11.0, 5.6, LOOP, "", ""),
    "scheduler": (0.3, 3.0, 3.0, 1.5, CHAPTER, "scheduler.py", "chapter 4 (5: drafts, 6: chunks)"),
    "memory": (0.3, 0.4, 3.0, 1.6, CHAPTER, "cached_kv_cache_manager.py",
               "chapter 3: prefixes\nchapter 2: blocks"),
    "runner": (4.4, 3.0, 3.0, 1.5, COMMON, "runner/model_runner.py",
               "the delta becomes tensors\n(5: and guesses, around it)"),
    "model": (4.4, 0.4, 3.0, 1.6, COMMON, "model.py",
              "attention through tables:\nchapter 2, mixed: chapter 6"),
    "sampler": (8.5, 0.4, 2.25, 1.6, COMMON, "sampling/sampler.py", "logits become\ntoken ids"),
    "update": (8.5, 3.0, 2.25, 1.5, CHAPTER, "scheduler_books.py",
               "chapter 1: who has\nended, what is new"),
}  # fmt: skip
# from x, y to x, y, and what goes along; the label's place
ARROWS = [
    ((2.3, 7.85), (3.4, 7.85), "prompts", (2.85, 8.0)),
    ((6.3, 8.15), (7.5, 8.45), "text", (6.85, 8.45)),
    ((7.5, 6.85), (6.3, 7.5), "output", (6.95, 6.75)),
    ((4.0, 7.2), (2.2, 4.5), "Request", (2.45, 6.2)),
    ((1.8, 3.0), (1.8, 2.0), "how many blocks?", (2.75, 2.4)),
    ((3.3, 3.75), (4.4, 3.75), "plan", (3.85, 3.9)),
    ((5.9, 3.0), (5.9, 2.0), "tokens, tables", (6.7, 2.4)),
    ((7.4, 1.2), (8.5, 1.2), "logits", (7.95, 1.35)),
    ((8.7, 2.0), (7.2, 3.0), "ids", (8.15, 2.6)),
    ((7.4, 3.75), (8.5, 3.75), "StepOutput", (7.95, 3.92)),
    ((9.5, 4.5), (9.5, 6.2), "new token ids", (8.75, 5.8)),
]


def draw() -> Figure:
    figure, axis = plt.subplots(figsize=(10, 6.4), layout="constrained")
    for name, (x, y, width, height, color, title, text) in BOXES.items():
        box = FancyBboxPatch(
            (x, y), width, height, boxstyle="round,pad=0.02,rounding_size=0.12",
            facecolor=color, edgecolor="#7f8c99", lw=1,
        )  # fmt: skip
        axis.add_patch(box)
        if name != "loop":
            label(axis, x + width / 2, y + height - 0.32, title, weight="bold", size=10)
            label(axis, x + width / 2, y + (height - 0.5) / 2, text, size=9)
    label(
        axis, 5.5, 5.12, "engine_core.py, chapter 1: one step = schedule, execute, update", size=10
    )
    label(axis, 1.15, 8.95, "grey: common    blue: a chapter", size=9, color="#606060")
    for start, end, what, (x, y) in ARROWS:
        style = {"arrowstyle": "-|>", "color": "#404040", "lw": 1.2, "shrinkA": 0, "shrinkB": 0}
        axis.annotate("", end, start, arrowprops=style)
        label(axis, x, y, what, size=9, color="#8a3b00")
    axis.set(xlim=(-0.1, 11.1), ylim=(-0.1, 9.3))
    axis.axis("off")
    return figure


def label(axis: Axes, x: float, y: float, text: str, **how: Any) -> None:
    axis.text(x, y, text, ha="center", va="center", **how)


if __name__ == "__main__":
    plt.rcParams["svg.hashsalt"] = "vllm-from-scratch"
    draw().savefig(FIGURE, metadata={"Date": None})
