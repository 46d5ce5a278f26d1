"""What a GPU report's record says, as markdown: aims first, everything else below them.

An aim is a number that was set before anything was measured. It is reached, missed, or not measured
here; nothing is estimated in place of a measurement. Times are median, lowest, highest."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from common.workshop.bench.bench_record import markdown_table, table_of

Record = Mapping[str, Any]
ATTENTION, STEP, TOKENS = 0.75, 0.70, 25_000
AIM_BATCH, AIM_CONTEXT = 64, 2048
ENGINE_KERNEL = "attention v3"
MODES = ("eager", "graphs", "overlap")
NOTHING = "No GPU has been measured yet."


def found_in(record: Record, section: str, name: str) -> Any:
    """A list of a section's results, empty if they were not measured."""
    return record["sections"].get(section, {}).get("results", {}).get(name, ())


def share(row: Mapping[str, Any]) -> float:
    """Of the roofline: 1 is the floor."""
    return row["floor_ms"] / row["ms"][0]


def decode_shares(record: Record) -> dict[tuple[int, int], float]:
    """Of the engine's attention, by sequences and keys."""
    rows = found_in(record, "kernels", "cells")
    own = [row for row in rows if row["kernel"] == ENGINE_KERNEL and row["cell"]]
    return {tuple(row["cell"]): share(row) for row in own}


def step_rows(record: Record) -> dict[tuple[int, int], dict[str, Mapping[str, Any]]]:
    """By sequences and keys: the model alone, and whole steps in the modes that were measured."""
    found: dict[tuple[int, int], dict[str, Mapping[str, Any]]] = {}
    sections = {"the model alone": "the model alone"} | {m: f"{m}: decode steps" for m in MODES}
    for name, section in sections.items():
        for row in found_in(record, section, "steps"):
            found.setdefault(tuple(row["cell"]), {})[name] = row
    return found


# -- aims


def aims_of(record: Record) -> list[tuple[str, float, float | None]]:
    """Each aim, what is wanted, and what was found: the worst of what the aim speaks of, None if
    that was not measured."""
    attention = [
        of_floor
        for (num_seqs, context), of_floor in decode_shares(record).items()
        if num_seqs >= AIM_BATCH and context == AIM_CONTEXT
    ]
    by_mode = [
        [share(row) for mode, row in rows.items() if mode in MODES]
        for (num_seqs, _), rows in step_rows(record).items()
        if num_seqs >= AIM_BATCH
    ]
    runs = [run for mode in MODES for run in found_in(record, f"{mode}: workload", "runs")]
    speeds = [run["output_tokens_per_s"] for run in runs]
    is_h200 = "H200" in record["environment"]["device"]["name"]
    of_copy = "share of the bandwidth that a copy reaches"
    return [
        (
            f"paged decode, from batch {AIM_BATCH} at {AIM_CONTEXT:,} keys: {of_copy}",
            ATTENTION,
            min(attention, default=None),
        ),
        (
            f"decode step of the engine, from batch {AIM_BATCH}: share of the roofline",
            STEP,
            min((max(shares) for shares in by_mode if shares), default=None),
        ),
        (
            "256 requests of 100-1,024 tokens in and out, on an H200: output tok/s",
            TOKENS,
            max(speeds, default=None) if is_h200 else None,
        ),
    ]


def aims_table(record: Record) -> str:
    def number(value: float | None) -> str:
        if value is None:
            return "not measured"
        return f"{value:,.0f}" if value > 2 else f"{value:.0%}"

    def verdict(wanted: float, found: float | None) -> str:
        return "" if found is None else "reached" if found >= wanted else "missed"

    rows = [
        [what, number(wanted), number(found), verdict(wanted, found)]
        for what, wanted, found in aims_of(record)
    ]
    return markdown_table(["aim", "wanted", "found", ""], rows)


# -- what was measured


def ceilings_line(record: Record) -> str:
    gb, tflop, gb_again, tflop_again = (
        found_in(record, section, name)
        for section in ("ceilings", "ceilings again")
        for name in ("copy_gb_per_s", "matrix_tflop_per_s")
    )
    if not tflop:
        return "The ceilings were not measured."
    text = (
        f"Ceilings: a copy moves {gb[0]:,.0f} GB/s ({gb[1]:.4g}-{gb[2]:.4g}), a matrix product in "
        f"bfloat16 makes {tflop[0]:,.0f} TFLOP/s ({tflop[1]:.3g}-{tflop[2]:.3g})."
    )
    if tflop_again:
        text += f" At the end: {gb_again[0]:,.0f} and {tflop_again[0]:,.0f}."
    return text


def numbers_table(record: Record) -> str:
    """The worst error of each kernel and dtype: of float64, or numbers that are others."""
    rows: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for section in ("numbers", "kernels"):
        for check in found_in(record, section, "checks"):
            rows.setdefault((check["kernel"], check["dtype"]), []).append(check)

    def cells(key: tuple[str, str], group: list[Mapping[str, Any]]) -> list[object]:
        numbers = [c for c in group if c["tolerance"]]
        worst = f"{max(c['error'] for c in numbers):.1e}" if numbers else ""
        allowed = f"{max(c['tolerance'] for c in numbers):.1e}" if numbers else ""
        num_wrong = sum(not check["is_right"] for check in group)
        return [*key, len(group), worst, allowed, num_wrong or "none"]

    head = ["kernel", "dtype", "results", "worst error", "tolerated", "wrong"]
    return markdown_table(head, [cells(key, group) for key, group in sorted(rows.items())])


def decode_grid(record: Record) -> str:
    shares = decode_shares(record)
    contexts = sorted({context for _, context in shares})
    table = [
        [n, *(f"{shares[n, c]:.0%}" if (n, c) in shares else "" for c in contexts)]
        for n in sorted({n for n, _ in shares})
    ]
    return markdown_table(["sequences", *(f"{c:,} keys" for c in contexts)], table)


def kernels_table(record: Record) -> str:
    def cells(row: Mapping[str, Any]) -> dict[str, object]:
        median, low, high = (1e3 * ms for ms in row["ms"])
        return {
            "kernel": row["kernel"] + ("" if row["is_graph"] else ", with its launches"),
            "where": row["what"],
            "us": f"{median:,.1f}",
            "lowest-highest": f"{low:.3g}-{high:.3g}",
            "share of its ceiling": f"{share(row):.0%}",
            "bound by": "memory" if row["is_bound_by_memory"] else "arithmetic",
        }

    rows = found_in(record, "kernels", "cells")
    by_kernel = sorted(rows, key=lambda row: (row["group"], row["kernel"]))
    return table_of([cells(row) for row in by_kernel]) if rows else "Not measured."


def steps_table(record: Record) -> str:
    columns = ["the model alone", *MODES]

    def cell(row: Mapping[str, Any] | None) -> str:
        return "" if row is None else f"{row['ms'][0]:.2f} ms, {share(row):.0%}"

    table = []
    for (num_seqs, context), rows in sorted(step_rows(record).items()):
        floor = min(row["floor_ms"] for row in rows.values())
        line = [f"{num_seqs} x {context:,}", f"{floor:.2f} ms"]
        table.append([*line, *(cell(rows.get(column)) for column in columns)])
    return markdown_table(["sequences x keys", "floor", *columns], table)


def workload_table(record: Record) -> str:
    rows = []
    for mode in MODES:
        waits = record["sections"].get(f"{mode}: waits", {}).get("results", {})
        num_steps = max(1, waits.get("num_steps", 0))
        counted = [
            f"{waits[kind] / num_steps:.2f}" if waits else "" for kind in ("meant", "hidden")
        ]
        rows.append([mode, *speed_cells(found_in(record, f"{mode}: workload", "runs")), *counted])
    hf = found_in(record, "transformers", "runs")
    rows.append(["`transformers` generate, padded batches", *speed_cells(hf), "", ""])
    head = ["", "output tok/s", "lowest-highest", "steps", "waits a step", "hidden ones"]
    return markdown_table(head, rows)


def speed_cells(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    if not runs:
        return ["not measured", "", ""]
    speeds = [run["output_tokens_per_s"] for run in runs]
    steps = runs[-1].get("num_steps")
    return [
        f"{statistics.median(speeds):,.0f}",
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
    title = f"**{record['environment']['device']['name']}**"
    if record["is_rehearsal"]:
        title = "**A rehearsal on a CPU: these numbers say nothing**"
    steps = "A decode step of the engine, its median, and its share of the roofline:"
    grid = "Decode attention of the engine, share of the measured bandwidth:"
    parts = [
        f"{title}. {ceilings_line(record)}",
        aims_table(record),
        workload_table(record),
        f"{steps}\n\n{steps_table(record)}",
        f"{grid}\n\n{decode_grid(record)}",
        folded("Every kernel", kernels_table(record)),
        folded("Every kernel against float64, or PyTorch's numbers", numbers_table(record)),
    ]
    if lines := left_out(record):
        parts.append("Cut, left out or failed:\n\n" + "\n".join(lines))
    return "\n\n".join([*parts, made_by(record)])


def readme_text(records: Sequence[Record]) -> str:
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
    return "\n\n".join(map(render, records)) or NOTHING
