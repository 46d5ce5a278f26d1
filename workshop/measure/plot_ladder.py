"""The ladder as two figures: what each chapter does to throughput and to the two waits.

    python workshop/measure/plot_ladder.py

Reads `workshop/measure/bench/records/ladder.json`, writes `ladder.svg` (many users: README's
picture) and `ladder_regimes.svg` (both regimes) in `workshop/figures/`, and the tables in
README.md and workshop/measure/bench/README.md.
"""

from __future__ import annotations

import math
import statistics
from pathlib import Path

from workshop.book.draw import LARGE, SMALL, Box, Drawing, save_all
from workshop.book.draw_parts import Axes
from workshop.book.palette import BASELINE, DECODE, INK, PROMPT
from workshop.measure.bench.bench_record import read_record
from workshop.measure.bench.ladder_bench import main as write_tables

RECORD = Path(__file__).parent / "bench" / "records" / "ladder.json"
LEFT, COLUMN, TOP, ROW = 226, 202, 118, 32  # of the panels; between two; of the rungs; between two


def regimes() -> dict[str, dict[str, dict]]:
    """Title of a regime -> title of a rung -> what was measured."""
    found = read_record(RECORD)["regimes"].values()
    return {x["title"]: {rung["title"]: rung for rung in x["rungs"].values()} for x in found}


def spread(rung: dict, name: str) -> tuple[float, float, float]:
    """The lowest of the runs, their median and the highest."""
    values = [run[name] for run in rung["runs"]]
    return min(values), statistics.median(values), max(values)


def start(title: str, desc: str, rungs: dict[str, dict]) -> Drawing:
    drawing = Drawing(840, TOP + len(rungs) * ROW + 46, title, desc)
    drawing.text(24, 30, title, size=LARGE, bold=True)
    for place, name in enumerate(rungs):
        drawing.text(LEFT - 12, TOP + place * ROW, name, size=SMALL, anchor="end")
    return drawing


def draw_many() -> Drawing:
    """The three numbers of README's table, as bars."""
    rungs, *_ = regimes().values()
    first, last = list(rungs.values())[:: len(rungs) - 1]
    (_, slow, _), (_, fast, _) = (spread(x, "output_tokens_per_s") for x in (first, last))
    (_, late, _), (_, soon, _) = (spread(x, "ttft_ms_p50") for x in (first, last))
    drawing = start(
        f"{slow:,.0f} to {fast:,.0f} tokens a second, "
        f"first token {late / 1e3:.1f} s to {soon:,.0f} ms",
        "Bars for each rung, from one request at a time to all six chapters: output tokens a "
        "second, the median first token, and the longest gaps between two tokens. Thin lines go "
        "from the lowest run to the highest.",
        rungs,
    )
    quantities = {
        "output_tokens_per_s": "output tokens a second,\nmore is better",
        "ttft_ms_p50": "first token, p50, ms,\nless is better",
        "inter_token_ms_p99": "gap, p99, ms,\nless is better",
    }
    for column, (name, label) in enumerate(quantities.items()):
        left = LEFT + column * COLUMN
        drawing.text(left, 68, label, size=SMALL)
        scale = (COLUMN - 76) / max(spread(rung, name)[2] for rung in rungs.values())
        for place, (title, rung) in enumerate(rungs.items()):
            y = TOP + place * ROW
            low, middle, high = (value * scale for value in spread(rung, name))
            color = DECODE if title[0].isdigit() else BASELINE
            drawing.box(left, y - 10, middle, 20, fill=color, radius=0)
            drawing.line((left + low, y), (left + high, y), color=INK)
            drawing.text(
                left + max(middle, high) + 8, y, f"{spread(rung, name)[1]:,.0f}", size=SMALL
            )
    drawing.text(
        24, drawing.height - 30, "Many users. Each rung adds a chapter; a thin line goes from the "
        "lowest of three runs to the highest.", size=SMALL, muted=True,
    )  # fmt: skip
    return drawing


def draw_regimes() -> Drawing:
    """Throughput and the worst waits, where many users queue and where few do not."""
    found = regimes()
    rungs, *_ = found.values()
    drawing = start(
        "Few users: no rung is faster, but the first token comes sooner",
        "For each rung, from one request at a time to all six chapters, a mark for many users and "
        "one for few: output tokens a second, the first token and the gap between tokens at p99.",
        rungs,
    )
    drawing.key(LEFT, 60, dict(zip(found, (DECODE, PROMPT), strict=True)))
    quantities = {  # and the ticks; for those of waits, the scale is logarithmic
        "output_tokens_per_s": ("output tokens a second", (0, 250, 500)),
        "ttft_ms_p99": ("first token, p99, ms", (100, 1000, 10_000)),
        "inter_token_ms_p99": ("gap, p99, ms", (10, 100)),
    }
    for column, (name, (label, ticks)) in enumerate(quantities.items()):
        place_of = math.log10 if ticks[0] else float
        area = Box(LEFT + column * COLUMN, TOP - ROW / 2, COLUMN - 26, len(rungs) * ROW)
        every = [
            value for rungs in found.values() for x in rungs.values() for value in spread(x, name)
        ]
        limits = min(ticks[0], min(every)), 1.06 * max(every)
        axes = Axes(area, (place_of(limits[0]), place_of(limits[1])), (len(rungs) - 0.5, -0.5))
        axes.draw(drawing, {place_of(tick): f"{tick:,}" for tick in ticks}, {}, "", label)
        for measured, color, offset in zip(found.values(), (DECODE, PROMPT), (-6, 6), strict=True):
            for place, rung in enumerate(measured.values()):
                low, middle, high = (axes.x_of(place_of(value)) for value in spread(rung, name))
                y = axes.y_of(place) + offset
                drawing.line((low, y), (high, y), color=color)
                drawing.box(middle - 5, y - 5, 10, 10, fill=color, radius=5)
    return drawing


DRAWINGS = {"ladder": draw_many, "ladder_regimes": draw_regimes}

if __name__ == "__main__":
    save_all(DRAWINGS, __file__)
    write_tables(["--write-readme"])
