"""The figures and tables of chapter 2, drawn from its record. Measuring takes some minutes.

`plot_paged_kv_workloads.py` defines what is counted, `plot_paged_kv_timing.py` what is timed. The
command line is described in `workshop/measure/lab_frame.py`.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path as Path2D

from workshop.book.palette import (
    BASELINE,
    DECODE,
    INK,
    PAPER,
    WASTE,
    add_key,
    label_line,
    shade,
    tint,
)
from workshop.measure.bench.bench_record import ROOT, markdown_table, read_record, table_of
from workshop.measure.bench.bench_table import times_the_floor
from workshop.measure.lab_frame import Measurement, Part, run_lab
from workshop.measure.plot_paged_kv_timing import measure_time
from workshop.measure.plot_paged_kv_workloads import (
    BLOCK_SIZE,
    BLOCK_SIZES,
    MAX_MODEL_LEN,
    NUM_SLOTS,
    SEED,
    count,
    stdlib_jobs,
)

TOKENIZER = ROOT / "common" / "checkpoints" / "tiny" / "tokenizer.json"


def measure(measurement: Measurement) -> dict:
    torch.set_num_threads(1)
    repeats = 1 if measurement.tiny else measurement.options.repeats
    jobs = stdlib_jobs(measurement.options.tokenizer)
    config = {
        "seed": SEED,
        "num_slots": NUM_SLOTS,
        "max_model_len": MAX_MODEL_LEN,
        "threads": 1,
        "clock": "processor time",
        "repeats": repeats,
    }
    return {
        "config": config,
        "jobs": [[job.prompt_len, job.output_len, job.max_tokens] for job in jobs],
        "counted": count(jobs),
        "timed": measure_time(repeats),
    }


# -- figures

WRITTEN = [DECODE, tint(DECODE, 0.5), shade(DECODE, 0.75), tint(DECODE, 0.75)]  # by request
ROW = 128  # slots in a row of the memory map


def empty_share(run: dict) -> float:
    """Return the share of the whole memory that holds nothing while requests wait for memory."""
    return 1 - run["crowded_written"] / (run["crowded_steps"] * run["total_slots"])


def draw_memory_map(record: dict) -> Figure:
    """Draw the memory with 128 slots in a row of pixels. Blocks are drawn at their addresses."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 5.6), sharey=True, layout="constrained")
    counted, num_requests = record["counted"], []
    names = {"contiguous": "2,048 slots a request", "paged": "blocks of 16 slots"}
    for axis, (name, title) in zip(axes, names.items()):
        run = counted[name]
        snapshot = run["snapshot"]
        draw_slots(axis, snapshot["requests"], run["block_size"], run["total_slots"])
        empty = 1 - snapshot["written"] / run["total_slots"]
        num_requests.append(len(snapshot["requests"]))
        axis.set_title(f"{name}, {title}:\n{empty:.0%} of memory empty")
        axis.set_xlabel("slot in row")
    axes[0].set_ylabel("row of 128 slots")
    figure.suptitle(
        "In blocks, the same memory holds {1} requests instead of {0}".format(*num_requests)
    )
    unused = {"reserved, empty": WASTE, "free": PAPER}
    add_key(figure, {"written, shades tell requests apart": DECODE, **unused})
    return figure


def draw_slots(axis: Axes, snapshot: list[dict], block_size: int, num_slots: int) -> None:
    boxes: dict[str, list[Path2D]] = {}  # by colour: one compound path each keeps files small
    for place, request in enumerate(snapshot):
        left = request["num_computed_tokens"]
        for block_id in request["block_ids"]:
            first = (block_id - 1) * block_size  # block 0, the null block, is not drawn
            written = min(left, block_size)
            left -= written
            color = WRITTEN[place % len(WRITTEN)]
            boxes.setdefault(color, []).extend(boxes_of(first, first + written))
            boxes.setdefault(WASTE, []).extend(boxes_of(first + written, first + block_size))
    for color, paths in boxes.items():
        path = Path2D.make_compound_path(*paths)
        axis.add_patch(PathPatch(path, facecolor=color, edgecolor="none"))
    axis.set(xlim=(0, ROW), ylim=(num_slots // ROW, 0), xticks=range(0, ROW, 32))


def boxes_of(start: int, stop: int) -> list[Path2D]:
    """Return slots `[start, stop)` as boxes, one in each row of the map they touch."""
    boxes = []
    for row in range(start // ROW, -(-stop // ROW)) if start < stop else ():
        low, high = max(start - row * ROW, 0), min(stop - row * ROW, ROW)
        corners = [(low, row), (high, row), (high, row + 1), (low, row + 1), (low, row)]
        boxes.append(Path2D(corners, closed=True))
    return boxes


def draw_block_size(record: dict) -> Figure:
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4), layout="constrained")
    runs = record["counted"]["on_demand"]
    waste = [100 * (1 - run["written"] / run["held"]) for run in runs]
    left.plot(BLOCK_SIZES, waste, "o-", color=WASTE)
    left.set(title="Held slots that are empty", ylabel="% of held slots, counted", ylim=0)
    times = {name: statistics.median(ms) for name, ms in record["timed"]["attend_ms"].items()}
    ratio = [times[str(size)] / times["contiguous"] for size in BLOCK_SIZES]
    right.plot(BLOCK_SIZES, ratio, "o-", color=INK)
    right.axhline(1, color=BASELINE)
    label_line(right, BLOCK_SIZES[1], ratio[1], "paged, PyTorch", INK, offset=(10, 8))
    label_line(right, BLOCK_SIZES[0], 1, "contiguous", BASELINE, offset=(0, -12))
    right.set(title="Time of decode attention", ylabel="contiguous = 1, timed", ylim=0)
    for axis in (left, right):
        axis.set_xscale("log", base=2)
        axis.set_xticks(BLOCK_SIZES[::2], [str(size) for size in BLOCK_SIZES[::2]])
        axis.set_xlabel("block size, tokens")
    return figure


# -- tables


def tables(record: dict) -> dict[str, str]:
    counted, timed = record["counted"], record["timed"]
    return {
        "headline": _headline(counted),
        "memory": _memory_table(counted),
        "asked_for": _asked_for_table(counted),
        "block_size": _block_size_table(counted, timed),
        "gather": _gather_table(timed),
        "floor": _floor_table(
            read_record(ROOT / "workshop/measure/bench/records/bench_qwen3-0.6b.json")
        ),
    }


def _headline(counted: dict) -> str:
    contiguous, paged = counted["contiguous"], counted["paged"]
    demand = next(run for run in counted["on_demand"] if run["block_size"] == BLOCK_SIZE)
    return (
        f"With a contiguous region of `max_model_len` slots for each request, **"
        f"{empty_share(contiguous):.0%} of the KV memory holds nothing while requests wait for "
        f"memory**. With blocks of {BLOCK_SIZE} slots it is {empty_share(paged):.0%} if each "
        f"request reserves all it may ever need, and of the blocks held "
        f"{1 - demand['written'] / demand['held']:.1%} if it takes a block when a token needs one."
    )


def _floor_table(bench: dict) -> str:
    """The floor of the bench's run by its parts, and the paged engine's multiple of it."""
    floor, roofline = bench["floor"], bench["roofline"]
    num_rows = roofline["prefill"]["num_rows"]
    matrices_ms = statistics.median(roofline["prefill"]["ms"])
    bandwidth = statistics.median(roofline["bandwidth"]["matvec_gb_per_s"])
    took = statistics.median(run["seconds"] for run in bench["systems"]["paged"]["runs"])
    rows = [
        [
            f"{floor['num_prompt_tokens']:,} prompt tokens; {num_rows:,} rows take "
            f"{matrices_ms:,.0f} ms",
            f"{floor['prompts_s']:.1f}",
        ],
        [
            f"{floor['num_decode_steps']} decode steps; the matrices alone",
            f"{floor['decodes_s']:.1f}",
        ],
        [
            f"KV read once in each; {roofline['kv_bytes_per_token']:,} bytes a token at "
            f"{bandwidth:.1f} GB/s",
            f"{floor['kv_s']:.1f}",
        ],
        ["the floor", f"{floor['seconds']:.1f}"],
        [
            f"measured: **{times_the_floor(bench, 'paged'):.2f} times the floor**",
            f"{took:.1f}",
        ],
    ]
    machine = bench["environment"]
    return (
        markdown_table(["part", "seconds"], rows)
        + f"\n\n<sub>`workshop/measure/bench/records/bench_qwen3-0.6b.json`, {machine['cpu']}, "
        f"{machine['cores']} cores, commit `{machine['commit'][:10]}`: `{bench['command']}`</sub>"
    )


def _memory_table(counted: dict) -> str:
    runs = {
        "contiguous, `max_model_len`": counted["contiguous"],
        "contiguous, prompt + `max_tokens`, first fit": counted["first_fit"],
        "paged, prompt + `max_tokens` (the engine of this chapter)": counted["paged"],
    }
    rows = []
    for name, run in runs.items():
        memory = run["crowded_steps"] * run["total_slots"]
        written, held = run["crowded_written"] / memory, run["crowded_held"] / memory
        shares = (f"{written:.0%}", f"{held - written:.0%}", f"{1 - held:.0%}")
        rows.append(_memory_row(name, run, *shares))
    demand = next(run for run in counted["on_demand"] if run["block_size"] == BLOCK_SIZE)
    share = demand["written"] / demand["held"]
    name = "paged, on demand (chapter 4), of the blocks it holds"
    rows.append(_memory_row(name, demand, f"{share:.1%}", f"{1 - share:.1%}", "-"))
    return table_of(rows)


def _memory_row(name: str, run: dict, written: str, reserved: str, free: str) -> dict[str, str]:
    return {
        "KV memory while requests wait": name,
        "written": written,
        "reserved, empty": reserved,
        "free": free,
        **_pace(run),
    }


def _pace(run: dict) -> dict[str, str]:
    at_once = run["crowded_running"] / run["crowded_steps"]
    return {"at once": f"{at_once:.1f}", "steps": f"{run['steps']:,}"}


def _asked_for_table(counted: dict) -> str:
    return table_of(
        [
            {
                "`max_tokens` each user asks for": name,
                "memory written": f"{1 - empty_share(run):.0%}",
                **_pace(run),
            }
            for name, run in counted["asked_for"].items()
        ]
    )


def _block_size_table(counted: dict, timed: dict) -> str:
    attend = {name: statistics.median(ms) for name, ms in timed["attend_ms"].items()}
    gather = {name: statistics.median(ms) for name, ms in timed["gather_ms"].items()}
    rows = []
    for run, bookkeeping in zip(counted["on_demand"], counted["tables"]):
        size = run["block_size"]
        host = bookkeeping["host_bytes_per_token"] / bookkeeping["kv_bytes_per_token"]
        rows.append(
            [
                size,
                f"{1 - run['written'] / run['held']:.1%}",
                f"{bookkeeping['host_bytes_per_token']:.1f}",
                f"{host:.4%}",
                f"{gather[str(size)] / gather[str(BLOCK_SIZE)]:.2f}",
                f"{attend[str(size)] / attend['contiguous']:.2f}",
            ]
        )
    head = ["block size", "empty slots", "table bytes a token", "of KV bytes"]
    return markdown_table([*head, "gather (16 = 1)", "attention (contiguous = 1)"], rows)


def _gather_table(timed: dict) -> str:
    ms = {name: statistics.median(times) for name, times in timed["gather_ms"].items()}
    ways = {
        "`cache[ids]`, fresh memory": "anew {}",
        "`index_select`, fresh memory": "select {}",
        "`index_select` into one buffer": "{}",
    }
    rows = [
        [way, *(f"{ms[name.format(b)] / ms[str(BLOCK_SIZE)]:.1f}" for b in (1, BLOCK_SIZE))]
        for way, name in ways.items()
        if name.format(1) in ms
    ]
    if "fill" in ms:
        fill = f"{ms['fill'] / ms[str(BLOCK_SIZE)]:.1f}"
        rows.append(["nothing gathered: fresh memory filled with 0", "-", fill])
    return markdown_table(
        ["gathering all keys and values", "by token", f"by block of {BLOCK_SIZE}"], rows
    )


PARTS = {
    "paged_kv": Part(
        measure, {"memory_map": draw_memory_map, "block_size": draw_block_size}, tables
    )
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=9, help="of each timed call")
    parser.add_argument("--tokenizer", type=Path, default=TOKENIZER, help="a tokenizer.json")


if __name__ == "__main__":
    run_lab(__file__, "02_paged_kv", PARTS, add_options=add_options)
