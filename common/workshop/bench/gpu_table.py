"""What a GPU report's record says, as markdown: aims first, everything else below them.

An aim is a number that was set before anything was measured. It is reached, missed, or not measured
here; nothing is estimated in place of a measurement."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from common.workshop.bench.bench_record import markdown_table

Record = Mapping[str, Any]
ATTENTION, STEP, TOKENS = 0.75, 0.70, 25_000
AIM_BATCH, AIM_CONTEXT = 64, 2048
ENGINE_KERNEL = "attention v3"
MODES = ("eager", "graphs", "overlap")
NOTHING = "No GPU has been measured yet."


def results_of(record: Record, section: str) -> Mapping[str, Any]:
    return record["sections"].get(section, {}).get("results", {})


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def share(row: Mapping[str, Any]) -> float:
    """Of the roofline: 1 is the floor."""
    return row["floor_ms"] / median(row["ms"])


def spread(values: Sequence[float], digits: int = 3) -> str:
    return f"{min(values):.{digits}g}-{max(values):.{digits}g}"


# -- aims


def aims_of(record: Record) -> list[dict[str, Any]]:
    """`found` is the worst of what an aim speaks of, None if that was not measured."""
    attention = [
        share(row)
        for row in results_of(record, "kernels").get("cells", ())
        if row["group"] == "decode attention"
        and row["kernel"] == ENGINE_KERNEL
        and row["cell"][0] >= AIM_BATCH
        and row["cell"][1] == AIM_CONTEXT
    ]
    steps = [
        max(shares)
        for cell, shares in step_shares(record).items()
        if cell[0] >= AIM_BATCH and shares
    ]
    speeds = [
        run["output_tokens_per_s"]
        for mode in MODES
        for run in runs_of(record, f"{mode}: workload")
        if run["is_complete"]
    ]
    is_h200 = "H200" in record["environment"]["device"]["name"]
    return [
        aim(
            f"paged decode, from batch {AIM_BATCH} at {AIM_CONTEXT:,} keys: share of the bandwidth "
            "that a copy reaches",
            ATTENTION,
            min(attention, default=None),
        ),
        aim(
            f"decode step of the engine, from batch {AIM_BATCH}: share of the roofline",
            STEP,
            min(steps, default=None),
        ),
        aim(
            "256 requests of 100-1,024 tokens in and out, on an H200: output tok/s",
            TOKENS,
            max(speeds, default=None) if is_h200 else None,
        ),
    ]


def aim(what: str, wanted: float, found: float | None) -> dict[str, Any]:
    is_reached = None if found is None else found >= wanted
    return {"aim": what, "wanted": wanted, "found": found, "is_reached": is_reached}


def step_shares(record: Record) -> dict[tuple[int, int], list[float]]:
    """Of whole steps of the engine, in the modes that were measured."""
    found: dict[tuple[int, int], list[float]] = {}
    for mode in MODES:
        for row in results_of(record, f"{mode}: decode steps").get("steps", ()):
            num_seqs, context = row["cell"]
            found.setdefault((num_seqs, context), []).append(share(row))
    return found


def runs_of(record: Record, section: str) -> list[Mapping[str, Any]]:
    return list(results_of(record, section).get("runs", ()))


def aims_table(record: Record) -> str:
    def number(value: float | None) -> str:
        if value is None:
            return "not measured"
        return f"{value:,.0f}" if value > 2 else f"{value:.0%}"

    words = {None: "", True: "reached", False: "missed"}
    rows = [
        [one["aim"], number(one["wanted"]), number(one["found"]), words[one["is_reached"]]]
        for one in aims_of(record)
    ]
    return markdown_table(["aim", "wanted", "found", ""], rows)


# -- what was measured


def ceilings_line(record: Record) -> str:
    found = results_of(record, "ceilings")
    if "matrix_tflop_per_s" not in found:
        return "The ceilings were not measured."
    gb, tflop = found["copy_gb_per_s"], found["matrix_tflop_per_s"]
    text = (
        f"Ceilings: a copy moves {median(gb):,.0f} GB/s ({spread(gb, 4)}), a matrix product in "
        f"bfloat16 makes {median(tflop):,.0f} TFLOP/s ({spread(tflop)})."
    )
    again = results_of(record, "ceilings again")
    if "matrix_tflop_per_s" in again:
        text += (
            f" At the end: {median(again['copy_gb_per_s']):,.0f} and "
            f"{median(again['matrix_tflop_per_s']):,.0f}."
        )
    return text


def numbers_table(record: Record) -> str:
    """The worst error of each kernel and dtype: of float64, or tokens that are others."""
    checks = [
        *results_of(record, "numbers").get("checks", ()),
        *results_of(record, "kernels").get("checks", ()),
    ]
    rows: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for check in checks:
        rows.setdefault((check["kernel"], check["dtype"]), []).append(check)

    def cells(key: tuple[str, str], group: list[Mapping[str, Any]]) -> list[object]:
        numbers = [c for c in group if c["tolerance"]]
        errors = [float("inf") if c["error"] is None else c["error"] for c in numbers]
        worst = f"{max(errors):.1e}" if errors else ""
        allowed = f"{max(c['tolerance'] for c in numbers):.1e}" if numbers else ""
        num_wrong = sum(not check["is_right"] for check in group)
        return [*key, len(group), worst, allowed, num_wrong or "none"]

    head = ["kernel", "dtype", "results", "worst error", "tolerated", "wrong"]
    return markdown_table(head, [cells(key, group) for key, group in sorted(rows.items())])


def decode_grid(record: Record) -> str:
    rows = {
        tuple(row["cell"]): share(row)
        for row in results_of(record, "kernels").get("cells", ())
        if row["group"] == "decode attention" and row["kernel"] == ENGINE_KERNEL
    }
    contexts = sorted({context for _, context in rows})
    table = [
        [n, *(f"{rows[n, c]:.0%}" if (n, c) in rows else "" for c in contexts)]
        for n in sorted({n for n, _ in rows})
    ]
    return markdown_table(["sequences", *(f"{c:,} keys" for c in contexts)], table)


def kernels_table(record: Record) -> str:
    rows = [
        [
            row["kernel"],
            row["what"],
            f"{1e3 * median(row['ms']):,.1f}",
            spread([1e3 * ms for ms in row["ms"]]),
            f"{share(row):.0%}",
            "memory" if row["is_bound_by_memory"] else "arithmetic",
        ]
        for row in sorted(
            results_of(record, "kernels").get("cells", ()),
            key=lambda row: (row["group"], row["kernel"], row["cell"]),
        )
    ]
    head = ["kernel", "where", "us", "lowest-highest", "share of its ceiling", "bound by"]
    return markdown_table(head, rows)


def steps_table(record: Record) -> str:
    columns = {"the model alone": "the model alone"}
    columns |= {f"{mode}: decode steps": mode for mode in MODES}
    found: dict[tuple[int, int], dict[str, Mapping[str, Any]]] = {}
    for section in columns:
        for row in results_of(record, section).get("steps", ()):
            found.setdefault(tuple(row["cell"]), {})[section] = row

    def cell(row: Mapping[str, Any] | None) -> str:
        return "" if row is None else f"{median(row['ms']):.2f} ms, {share(row):.0%}"

    table = []
    for (num_seqs, context), rows in sorted(found.items()):
        floor = min(row["floor_ms"] for row in rows.values())
        line = [f"{num_seqs} x {context:,}", f"{floor:.2f} ms"]
        table.append([*line, *(cell(rows.get(section)) for section in columns)])
    return markdown_table(["sequences x keys", "floor", *columns.values()], table)


def workload_table(record: Record) -> str:
    rows = []
    for mode in MODES:
        runs, waits = runs_of(record, f"{mode}: workload"), results_of(record, f"{mode}: waits")
        num_steps = max(1, waits.get("num_steps", 0))
        counted = [
            f"{waits[kind] / num_steps:.2f}" if waits else "" for kind in ("meant", "hidden")
        ]
        rows.append([mode, *speed_cells(runs), *counted])
    hf = runs_of(record, "transformers")
    rows.append(["`transformers` generate, padded batches", *speed_cells(hf), "", ""])
    head = ["", "output tok/s", "lowest-highest", "steps", "waits a step", "hidden ones"]
    return markdown_table(head, rows)


def speed_cells(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    if not runs:
        return ["not measured", "", ""]
    speeds = [run["output_tokens_per_s"] for run in runs]
    early = "" if all(run["is_complete"] for run in runs) else ", ended early"
    steps = runs[-1].get("num_steps")
    return [
        f"{median(speeds):,.0f}{early}",
        f"{min(speeds):,.0f}-{max(speeds):,.0f} ({len(runs)})",
        "" if steps is None else f"{steps:,}",
    ]


def left_out(record: Record) -> list[str]:
    lines = []
    for name, section in record["sections"].items():
        lines += [f"* {name}: {error}" for error in section["errors"]]
        if section["status"] == "running":
            lines.append(f"* {name}: it never ended")
        notes = section["notes"]
        lines += [f"* {name}: {note}" for note in notes[:3]]
        if len(notes) > 3:
            lines.append(f"* {name}: and {len(notes) - 3} more of the kind")
    return [line.replace("|", "/") for line in lines]


def made_by(record: Record) -> str:
    where, device = record["environment"], record["environment"]["device"]
    dirty = " with uncommitted changes" if where["is_dirty"] else ""
    memory = device["memory_bytes"] / (1 << 30)
    seconds = sum(section["seconds"] for section in record["sections"].values())
    return (
        f"<sub>{device['name']}, {memory:.0f} GiB; torch {where['torch']}, Triton "
        f"{where['triton']}, transformers {where['transformers']}, Python {where['python']}; "
        f"commit {(where['commit'] or 'unknown')[:10]}{dirty}; {record['date']}; {seconds:.0f} s. "
        f"Medians; Qwen3-0.6B's shape, random weights, {record['config']['dtype']}, seed "
        f"{record['config']['seed']}; `{record['command']}`.</sub>"
    )


def folded(title: str, text: str) -> str:
    return f"<details><summary>{title}</summary>\n\n{text}\n\n</details>"


def render(record: Record) -> str:
    """The whole report. A rehearsal's says that it is none."""
    device = record["environment"]["device"]["name"]
    title = f"**{device}**"
    if record["is_rehearsal"]:
        title = "**A rehearsal on a CPU: these numbers say nothing**"
    steps = "A decode step of the engine, its median, and its share of the roofline:"
    grid = "Decode attention of the engine, share of the measured bandwidth:"
    parts: Iterable[str] = [
        f"{title}. {ceilings_line(record)}",
        aims_table(record),
        workload_table(record),
        f"{steps}\n\n{steps_table(record)}",
        f"{grid}\n\n{decode_grid(record)}",
        folded("Every kernel", kernels_table(record)),
        folded("Every kernel against float64, or PyTorch's tokens", numbers_table(record)),
    ]
    lines = left_out(record)
    if lines:
        parts = [*parts, "Cut, left out or failed:\n\n" + "\n".join(lines)]
    return "\n\n".join([*parts, made_by(record)])


def readme_text(records: Sequence[Record], render: Callable[[Record], str] = render) -> str:
    """Of GPUs only. Raises `ValueError` for what is no result."""
    for record in records:
        where = record["environment"]
        if record["is_rehearsal"]:
            raise ValueError("a rehearsal is no result, and is not written into a text")
        if where["is_dirty"] or where["commit"] is None:
            raise ValueError(
                f"the record of {where['device']['name']} was made with uncommitted changes or at "
                "an unknown commit: commit, and measure again"
            )
    return "\n\n".join(render(record) for record in records) or NOTHING
