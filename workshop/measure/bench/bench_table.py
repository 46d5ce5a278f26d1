"""The benchmark's records as markdown. Measures nothing, and imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from workshop.measure.bench.bench_command import Tables
from workshop.measure.bench.bench_record import read_record


def tables_of(folder: Path) -> Tables:
    """Render all `bench_*.json` of a folder, the small model first. Raises `FileNotFoundError` if
    there are none."""
    paths = sorted(folder.glob("bench_*.json"))
    if not paths:
        raise FileNotFoundError(f"{folder} has no bench_*.json; run python -m workshop.bench first")
    records = sorted(map(read_record, paths), key=lambda r: r["config"]["num_parameters"])
    return Tables("\n\n".join(map(render, records)))


def render(record: dict[str, Any]) -> str:
    """Render one model: a heading, the table of systems, the floor of a step, and the machine of
    the measurement."""
    parts = [
        _heading(record),
        _systems_table(record),
        _floor(record),
        _footer(record),
    ]
    return "\n\n".join(part for part in parts if part)


def _heading(record: dict[str, Any]) -> str:
    config, work = record["config"], record["config"]["workload"]
    prompts, outputs = work["prompt_lens"], work["output_lens"]
    return (
        f"**{config['model']}** ({config['num_parameters'] / 1e6:,.1f} M parameters, "
        f"{config['dtype']}): {work['num_requests']} requests at once, {prompts[0]}-{prompts[1]} "
        f"tokens in, {outputs[0]}-{outputs[1]} out, "
        f"{sum(work['output_tokens']):,} useful tokens."
    )


def _systems_table(record: dict[str, Any]) -> str:
    lines = [
        "| system | useful tok/s | lowest-highest | TTFT p50 / p99 | between tokens p50 / p99 |",
        "|---|---:|---:|---:|---:|",
    ]
    for system in record["systems"].values():
        lines.append(_system_row(system, record["config"]))
    return "\n".join(lines)


def _system_row(system: dict[str, Any], config: dict[str, Any]) -> str:
    title = system["title"]
    if system["num_requests"] < config["workload"]["num_requests"]:
        title += (
            f", first {system['num_requests']} of {config['workload']['num_requests']} requests"
        )
    runs = system["runs"]
    speed = [run["useful_tokens_per_s"] for run in runs]
    if not speed:
        reason = system["error"] or "not measured: the time budget was used up"
        return f"| {title} | {reason} | | | |"
    if system["error"]:
        title += f" (then failed: {system['error']})"
    spread = f"{_number(min(speed))}-{_number(max(speed))}"
    if len(speed) == 1:
        spread = "1 run"
    elif len(speed) != config["repeats"]:  # the footer has the command with its `--repeats`
        spread += f" ({len(speed)} runs)"
    cells = [
        title,
        _number(median(speed)),
        spread,
        _latency(runs, "ttft_ms"),
        _latency(runs, "inter_token_ms"),
    ]
    return f"| {' | '.join(cells)} |"


def _latency(runs: list[dict[str, Any]], name: str) -> str:
    pairs = [run[name] for run in runs if name in run and run[name]["p50"] is not None]
    if not pairs:
        return ""
    return " / ".join(_duration(median(pair[p] for pair in pairs)) for p in ("p50", "p99"))


def _floor(record: dict[str, Any]) -> str:
    """The run's floor with its parts, and how many times as long each complete system took."""
    floor = record.get("floor")
    if not floor:
        return ""
    num_useful = sum(record["config"]["workload"]["output_tokens"])
    text = (
        f"**The floor of this run**: {floor['num_prompt_tokens']:,} prompt tokens at the rate of "
        f"the matrices {_seconds(floor['prompts_s'])}, the packed matrices alone in "
        f"{floor['num_decode_steps']:,} decode steps {_seconds(floor['decodes_s'])}, their KV read "
        f"once {_seconds(floor['kv_s'])}; together {_seconds(floor['seconds'])}, "
        f"{_number(num_useful / floor['seconds'])} tok/s."
    )
    times = [
        f"{system['title'].replace('**', '')} {times:.2f}"
        for name, system in record["systems"].items()
        if (times := times_the_floor(record, name)) is not None
    ]
    return text + (f" As many times that took: {'; '.join(times)}." if times else "")


def times_the_floor(record: dict[str, Any], name: str) -> float | None:
    """The median run of a system over the run's floor. None if it did not serve all requests."""
    system, work = record["systems"].get(name), record["config"]["workload"]
    if not system or not system["runs"] or system["num_requests"] < work["num_requests"]:
        return None
    return median(run["seconds"] for run in system["runs"]) / record["floor"]["seconds"]


def _seconds(seconds: float) -> str:
    return _duration(1e3 * seconds)


def _footer(record: dict[str, Any]) -> str:
    where, config = record["environment"], record["config"]
    commit = (where["commit"] or "unknown")[:9] + ("*" if where["is_dirty"] else "")
    memory = where["memory_bytes"] / (1 << 30)
    return (
        f"<sub>{where['cpu']}, {where['cpu_capability']}, {config['threads']} threads, "
        f"{memory:.0f} GiB; torch {where['torch']}, transformers {where['transformers']}, Python "
        f"{where['python']}; malloc {config['malloc']['mode']}; commit {commit}"
        f"{' with uncommitted changes' if where['is_dirty'] else ''}; {record['date']}. "
        f"Median of interleaved runs; `{record['command']}`.</sub>"
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _listed(parts: Sequence[str]) -> str:
    return " and ".join([", ".join(parts[:-1]), parts[-1]]) if parts[1:] else parts[0]


def _duration(milliseconds: float) -> str:
    if milliseconds >= 1000:
        return f"{milliseconds / 1e3:.1f} s"
    return f"{_ms(milliseconds)} ms"


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:,.0f}" if milliseconds >= 10 else f"{milliseconds:.2g}"
