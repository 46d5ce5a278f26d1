"""The figures and tables of chapter 2, drawn from its record.

    python 02_paged_kv/lab/plot_paged_kv.py   draw figures/ from records/
    python 02_paged_kv/lab/plot_paged_kv.py --record    run the workloads first (some minutes)
    python 02_paged_kv/lab/plot_paged_kv.py --write     put the tables of the record into README.md

What is counted and how stands in `plot_paged_kv_workloads.py`, what is timed in
`plot_paged_kv_timing.py`.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import torch
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path as Path2D

from common.bench.bench_record import markdown_table, replace_between_markers
from plot_paged_kv_timing import describe_environment, measure_time
from plot_paged_kv_workloads import (
    BLOCK_SIZE,
    BLOCK_SIZES,
    MAX_MODEL_LEN,
    NUM_SLOTS,
    SEED,
    count,
    stdlib_jobs,
)

HERE = Path(__file__).resolve().parent
RECORD = HERE / "records" / "paged_kv.json"
TOKENIZER = HERE.parents[1] / "common" / "checkpoints" / "tiny" / "tokenizer.json"


def make_record(tokenizer_file: Path, repeats: int) -> dict:
    torch.set_num_threads(1)
    jobs = stdlib_jobs(tokenizer_file)
    config = {
        "seed": SEED,
        "num_slots": NUM_SLOTS,
        "max_model_len": MAX_MODEL_LEN,
        "threads": 1,
        "clock": "processor time",
        "repeats": repeats,
    }
    return {
        "command": "python 02_paged_kv/lab/plot_paged_kv.py --record",
        "environment": describe_environment(),
        "config": config,
        "jobs": [[job.prompt_len, job.output_len, job.max_tokens] for job in jobs],
        "counted": count(jobs),
        "timed": measure_time(repeats),
    }


# -- figures

BLUES = ["#1f4e79", "#5b9bd5", "#2e75b6", "#9dc3e6"]
EMPTY, FREE, INK = "#f4b183", "#ffffff", "#404040"
ROW = 128  # slots in a row of the memory map


def empty_share(run: dict) -> float:
    """The share of the whole memory that holds nothing while requests wait for memory."""
    return 1 - run["crowded_written"] / (run["crowded_steps"] * run["total_slots"])


def draw_memory_map(record: dict) -> plt.Figure:
    """One row of pixels is 128 slots. Blocks are drawn where they lie."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 4.6), sharey=True, layout="constrained")
    counted = record["counted"]
    names = {
        "contiguous": "contiguous: 2,048 slots a request",
        "paged": "paged: blocks of 16 slots",
    }
    for axis, (name, title) in zip(axes, names.items()):
        run = counted[name]
        snapshot = run["snapshot"]
        draw_slots(axis, snapshot["requests"], run["block_size"], run["total_slots"])
        empty = 1 - snapshot["written"] / run["total_slots"]
        shown = f"step {snapshot['step']:,}: {len(snapshot['requests'])} requests"
        axis.set_title(f"{title}\n{shown}, {empty:.0%} of memory empty")
        axis.set_xlabel("slot in row")
    axes[0].set_ylabel("row of 128 slots")
    kinds = {
        "written, colours tell requests apart": BLUES[1],
        "reserved, empty": EMPTY,
        "free": FREE,
    }
    handles = [Patch(facecolor=color, edgecolor=INK, label=kind) for kind, color in kinds.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle("The same memory and workload, each run at a median step")
    return figure


def draw_slots(axis: plt.Axes, snapshot: list[dict], block_size: int, num_slots: int) -> None:
    boxes: dict[str, list[Path2D]] = {}  # by colour: one compound path each keeps the file small
    for place, request in enumerate(snapshot):
        left = request["num_computed_tokens"]
        for block_id in request["block_ids"]:
            first = (block_id - 1) * block_size  # block 0, the null block, is not drawn
            written = min(left, block_size)
            left -= written
            blue = BLUES[place % len(BLUES)]
            boxes.setdefault(blue, []).extend(boxes_of(first, first + written))
            boxes.setdefault(EMPTY, []).extend(boxes_of(first + written, first + block_size))
    for color, paths in boxes.items():
        path = Path2D.make_compound_path(*paths)
        axis.add_patch(PathPatch(path, facecolor=color, edgecolor="none"))
    axis.set(xlim=(0, ROW), ylim=(num_slots // ROW, 0))


def boxes_of(start: int, stop: int) -> list[Path2D]:
    """Slots `[start, stop)` as boxes, one in each row of the map they touch."""
    boxes = []
    for row in range(start // ROW, -(-stop // ROW)) if start < stop else ():
        low, high = max(start - row * ROW, 0), min(stop - row * ROW, ROW)
        corners = [(low, row), (high, row), (high, row + 1), (low, row + 1), (low, row)]
        boxes.append(Path2D(corners, closed=True))
    return boxes


def draw_block_size(record: dict) -> plt.Figure:
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    runs = record["counted"]["on_demand"]
    waste = [100 * (1 - run["written"] / run["held"]) for run in runs]
    left.plot(BLOCK_SIZES, waste, "o-", color=BLUES[0])
    left.set(title="Held slots that are empty, counted", ylabel="% of held slots", ylim=0)
    times = {name: statistics.median(ms) for name, ms in record["timed"]["attend_ms"].items()}
    ratio = [times[str(size)] / times["contiguous"] for size in BLOCK_SIZES]
    right.plot(BLOCK_SIZES, ratio, "o-", color=BLUES[0], label="paged, PyTorch")
    right.axhline(1, color=EMPTY, label="contiguous")
    right.set(title="Time of decode attention, timed", ylabel="contiguous = 1", ylim=0)
    right.legend(frameon=False)
    for axis in (left, right):
        axis.set_xscale("log", base=2)
        axis.set_xticks(BLOCK_SIZES, [str(size) for size in BLOCK_SIZES])
        axis.set_xlabel("block size, tokens")
    return figure


def draw(record: dict) -> None:
    # Text stays text, and what varies from run to run (ids, the date) is fixed: no diff.
    matplotlib.rcParams.update(
        {"svg.hashsalt": "paged_kv", "svg.fonttype": "none", "font.size": 11}
    )
    pictures = {"memory_map": draw_memory_map, "block_size": draw_block_size}
    (HERE.parent / "figures").mkdir(exist_ok=True)
    for name, picture in pictures.items():
        figure = picture(record)
        figure.savefig(HERE.parent / "figures" / f"{name}.svg", metadata={"Date": None})
        plt.close(figure)


# -- tables


def tables(record: dict) -> dict[str, str]:
    """What stands between `<!-- table:NAME -->` markers in the README and in that of beyond/."""
    counted, timed = record["counted"], record["timed"]
    return {
        "headline": _headline(counted),
        "memory": _memory_table(counted),
        "asked_for": _asked_for_table(counted),
        "block_size": _block_size_table(counted, timed),
        "gather": _gather_table(timed),
        "fork": _fork_table(counted["fork"]),
        "made_on": _made_on(record),
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
        at_once = run["crowded_running"] / run["crowded_steps"]
        shares = (f"{written:.0%}", f"{held - written:.0%}", f"{1 - held:.0%}")
        rows.append([name, *shares, f"{at_once:.1f}", f"{run['steps']:,}"])
    demand = next(run for run in counted["on_demand"] if run["block_size"] == BLOCK_SIZE)
    share = demand["written"] / demand["held"]
    rows.append(
        [
            "paged, on demand (chapter 4), of the blocks it holds",
            *(f"{share:.1%}", f"{1 - share:.1%}", "-"),
            *(f"{demand['crowded_running'] / demand['crowded_steps']:.1f}", f"{demand['steps']:,}"),
        ]
    )
    head = [
        "KV memory while requests wait",
        "written",
        "reserved, empty",
        "free",
        "at once",
        "steps",
    ]
    return markdown_table(head, rows)


def _asked_for_table(counted: dict) -> str:
    rows = [
        [
            name,
            f"{1 - empty_share(run):.0%}",
            f"{run['crowded_running'] / run['crowded_steps']:.1f}",
            f"{run['steps']:,}",
        ]
        for name, run in counted["asked_for"].items()
    ]
    return markdown_table(
        ["`max_tokens` each user asks for", "memory written", "at once", "steps"], rows
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


def _fork_table(fork: dict) -> str:
    rows = []
    for name, run in (("no sharing", fork["alone"]), ("`fork`", fork["shared"])):
        most, mean = run["peak_held"] // run["block_size"], run["held"] / run["steps"]
        counts = (most, round(mean), run["num_block_copies"], run["steps"])
        rows.append([name, *(f"{number:,}" for number in counts)])
    head = ["32 prompts, `n=4`", "most blocks held", "slots held, mean", "blocks copied", "steps"]
    return markdown_table(head, rows)


def _made_on(record: dict) -> str:
    where, config = record["environment"], record["config"]
    load = where["load_average"]
    busy = " Other programs were running: the times are rough." if load > 1 else ""
    return (
        f"Made by `{record['command']}` at commit `{where['commit'][:10]}` on {where['cpu']}, "
        f"{where['cores']} cores, {where['cpu_capability']}, Python {where['python']}, "
        f"torch {where['torch']}. Timed by {config.get('clock', 'wall clock')}, "
        f"{config['threads']} thread, {config['repeats']} repeats, load average {load:.1f} at the "
        f"start.{busy}"
    )


def write_tables(record: dict, readmes: list[Path]) -> None:
    texts = {readme: readme.read_text(encoding="utf-8") for readme in readmes}
    for name, content in tables(record).items():
        (readme,) = [r for r, text in texts.items() if f"<!-- table:{name} -->" in text]
        texts[readme] = replace_between_markers(texts[readme], name, content)
    for readme, text in texts.items():
        readme.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--record", action="store_true", help="run the workloads first")
    parser.add_argument("--write", action="store_true", help="put the tables into README.md")
    parser.add_argument("--repeats", type=int, default=9, help="of each timed call")
    parser.add_argument("--tokenizer", type=Path, default=TOKENIZER, help="a tokenizer.json")
    options = parser.parse_args()
    if options.record:
        record = make_record(options.tokenizer, options.repeats)
        RECORD.parent.mkdir(exist_ok=True)
        RECORD.write_text(json.dumps(record) + "\n", encoding="utf-8")
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    draw(record)
    if options.write:
        write_tables(record, [HERE.parent / "README.md", HERE.parent / "beyond" / "README.md"])


if __name__ == "__main__":
    main()
