"""The benchmark's records as markdown. Measures nothing, and imports nothing heavy."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from workshop.measure.bench.bench_command import Tables
from workshop.measure.bench.bench_record import markdown_table, read_record


def tables_of(folder: Path) -> Tables:
    """Render all `bench_*.json` of a folder, the small model first. Raises `FileNotFoundError` if
    there are none."""
    paths = sorted(folder.glob("bench_*.json"))
    if not paths:
        raise FileNotFoundError(f"{folder} has no bench_*.json; run python -m workshop.bench first")
    records = sorted(map(read_record, paths), key=lambda r: r["config"]["num_parameters"])
    return {"workshop/measure/bench/README.md bench": "\n\n".join(map(render, records))}


def render(record: dict[str, Any]) -> str:
    """Render one model: a heading, the table of systems, and the machine of the measurement."""
    config, work, where = record["config"], record["config"]["workload"], record["environment"]
    prompts, outputs = work["prompt_lens"], work["output_lens"]
    head = ["system", "useful tok/s", "lowest-highest", "TTFT p50 / p99"]
    rows = [_row(system, config) for system in record["systems"].values()]
    dirty = "* with uncommitted changes" * bool(where["is_dirty"])
    parts = [
        f"**{config['model']}** ({config['num_parameters'] / 1e6:,.1f} M parameters, "
        f"{config['dtype']}): {work['num_requests']} requests at once, {prompts[0]}-{prompts[1]} "
        f"tokens in, {outputs[0]}-{outputs[1]} out, "
        f"{sum(work['output_tokens']):,} useful tokens.",
        markdown_table([*head, "between tokens p50 / p99"], rows),
        f"<sub>{where['cpu']}, {where['cpu_capability']}, {config['threads']} threads, "
        f"{where['memory_bytes'] / (1 << 30):.0f} GiB; torch {where['torch']}, transformers "
        f"{where['transformers']}, Python {where['python']}; malloc {config['malloc']['mode']}; "
        f"commit {(where['commit'] or 'unknown')[:9]}{dirty}; {record['date']}. "
        f"Median of interleaved runs; `{record['command']}`.</sub>",
    ]
    return "\n\n".join(parts)


def _row(system: dict[str, Any], config: dict[str, Any]) -> list[str]:
    title, all_requests = system["title"], config["workload"]["num_requests"]
    if system["num_requests"] < all_requests:
        title += f", first {system['num_requests']} of {all_requests} requests"
    runs = system["runs"]
    speed = [run["useful_tokens_per_s"] for run in runs]
    if not speed:
        return [title, system["error"] or "not measured: no time was left", "", "", ""]
    spread = f"{_number(min(speed))}-{_number(max(speed))}"
    if len(speed) != config["repeats"]:  # the last line has the command with its `--repeats`
        spread += f" ({len(speed)} runs)"
    latencies = (_latency(runs, name) for name in ("ttft_ms", "inter_token_ms"))
    return [title, _number(median(speed)), spread, *latencies]


def _latency(runs: list[dict[str, Any]], name: str) -> str:
    pairs = [run[name] for run in runs if name in run and run[name]["p50"] is not None]
    if not pairs:
        return ""
    return " / ".join(_duration(median(pair[p] for pair in pairs)) for p in ("p50", "p99"))


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _duration(milliseconds: float) -> str:
    if milliseconds >= 1000:
        return f"{milliseconds / 1e3:.1f} s"
    return f"{milliseconds:,.0f} ms" if milliseconds >= 10 else f"{milliseconds:.2g} ms"
