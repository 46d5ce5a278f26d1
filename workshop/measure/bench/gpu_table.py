"""The records of `make gpu` as markdown. `make sync` writes it into `PAGES`.

    python -m workshop.bench.gpu_table --write-readme

An aim is a share of the roofline, one for each cell, and was set before any measurement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from workshop.measure.bench import bench_record
from workshop.measure.bench.bench_record import ROOT, markdown_table

Record = Mapping[str, Any]
MODES = "eager", "graphs", "overlap"
NOTHING = (
    "No GPU has been measured yet. Tests on a CPU run the kernels in Triton's interpreter and the "
    "graphs in an emulator, which checks their results but not their speed."
)
NOTHING_ZH = (
    "还没有在 GPU 上测过。测试在 CPU 上用 Triton 的解释器跑 kernel，用模拟器跑 CUDA "
    "graph：能核对结果，但看不出速度。"
)
# Page and markers of each text: the sentence, the table of cells, or the whole report.
PAGES = {"README.md": "gpu", "06_chunked_prefill/README.md": "gpu"}
PAGES |= {"README.zh.md": "gpu_zh", "06_chunked_prefill/README.zh.md": "gpu_zh"}
PAGES |= {"common/README.md": "gpu_cells", "common/README.zh.md": "gpu_cells_zh"}
PAGES |= {"workshop/measure/bench/README.md": "gpu_report"}


def aim_of(num_seqs: int, context: int) -> float | None:
    """The aim for an engine's decode step. Few keys leave little to do between two launches."""
    if num_seqs >= 64 and context >= 1024:
        return 0.75 if context >= 2048 else 0.70
    return {1: 0.50, 64: 0.45, 256: 0.45}.get(num_seqs)


def sections_of(record: Record) -> dict[str, dict[str, Any]]:
    """Merge the sections of all parts, which have no step of the same name."""
    found: dict[str, dict[str, Any]] = {}
    for part in record["parts"].values():
        for name, steps in part["results"].items():
            found.setdefault(name, {}).update(steps)
    return found


def cells_table(record: Record) -> str:
    """Return the table of cells, with the aim compared with the best mode."""
    sections, rows = sections_of(record), []
    by_mode = [sections.get(f"{mode}: steps", {}) for mode in MODES]
    for name in dict.fromkeys(name for steps in by_mode for name in steps):
        own = [steps.get(name) for steps in by_mode]
        best = max(filter(None, own), key=lambda row: row["share"])
        if aim := aim_of(*best["cell"]):
            name += f": {aim:.0%} {'reached' if best['share'] >= aim else 'missed'}"
        cells = (f"{row['ms'][0]:.2f} ms, {row['share']:.0%}" if row else "" for row in own)
        rows.append([name, f"{best['floor_ms']:.2f} ms", *cells])
    return markdown_table(["sequences x keys: aim", "floor", *MODES], rows)


def workloads(record: Record) -> list[list[Any]]:
    """Return name, mode, and the tokens in, tokens out and requests a second of the faster run."""
    sections, kinds = sections_of(record), ("in", "out", "requests")
    return [
        [name, mode, *(max(run[f"{kind}/s"] for run in runs) for kind in kinds)]
        for mode in MODES
        for name, runs in sections.get(f"{mode}: workload", {}).items()
    ]


def made_by(record: Record) -> str:
    where = record["environment"]
    commit = (
        f"commit {(where['commit'] or 'unknown')[:10]}{' and changes' * bool(where['is_dirty'])}"
    )
    versions = ", ".join(f"{name} {where.get(name)}" for name in ("torch", "triton", "python"))
    how = f"`{record['command']}`, {record['date']}, {commit}, {versions}, seed {record['seed']}"
    return f"<sub>{how}. Medians, shares of the roofline; Qwen3-0.6B's shape, bfloat16.</sub>"


def render(record: Record) -> str:
    title = f"**{record['environment'].get('device', {}).get('name')}**"
    if record["is_rehearsal"]:
        title = "**A rehearsal on a CPU: these numbers say nothing**"
    head = ["workload", "mode", "tokens in/s", "tokens out/s", "requests/s"]
    speeds = [[*row[:2], *(f"{x:,.1f}" for x in row[2:])] for row in workloads(record)]
    lines = []
    for section, steps in sections_of(record).items():
        if not section.endswith((": steps", ": workload")):
            lines += [f"{section}, {step}: {str(found)[:300]}" for step, found in steps.items()]
    for name, part in record["parts"].items():
        lines += [f"{name}: {text}" for text in (*part["errors"], *part["notes"])]
    rest = "\n".join("* " + line.replace("|", "/") for line in lines)
    tables = cells_table(record), markdown_table(head, speeds)
    return "\n\n".join([title, *tables, rest, made_by(record)])


def texts_of(records: Sequence[Record]) -> dict[str, str]:
    """Return the text for each marker. Raises `ValueError` for a record without a result."""
    english, chinese, fastest = NOTHING, NOTHING_ZH, 0.0
    for record in records:
        where = record["environment"]
        if record["is_rehearsal"] or where["is_dirty"] or where["commit"] is None:
            raise ValueError(
                f"cannot publish the record of {where['device']['name']}: it is a rehearsal or "
                "of no known commit. Measure a clean checkout, or name the commit: --commit"
            )
        for name, _, _, speed, _ in workloads(record):
            if speed > fastest:
                card, how, fastest = where["device"]["name"], f"`{record['command']}`", speed
                english = f"{speed:,.0f} output tokens a second on {card} with Qwen3-0.6B's shape"
                english += f" ({name}; {how})."
                chinese = f"在 {card} 上，Qwen3-0.6B 的形状每秒输出 {speed:,.0f} 个 token"
                chinese += f"（{name}；{how}）。"
    cells = "\n\n".join(f"{cells_table(record)}\n\n{made_by(record)}" for record in records)
    texts = {"gpu": english, "gpu_zh": chinese, "gpu_cells": cells or english}
    reports = "\n\n".join(map(render, records)) or english
    return texts | {"gpu_cells_zh": cells or chinese, "gpu_report": reports}


def main() -> None:
    records = sorted((ROOT / "workshop/measure/bench/records").glob("gpu_record_*.json"))
    texts = texts_of([bench_record.read_record(path) for path in records])
    for page, name in PAGES.items():
        bench_record.write_between_markers(ROOT / page, name, texts[name])


if __name__ == "__main__":
    main()
