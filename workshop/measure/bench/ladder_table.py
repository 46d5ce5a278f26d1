"""The ladder's record as markdown. Measures nothing, and imports nothing heavy."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

from workshop.measure.bench.bench_record import made_on, markdown_table
from workshop.measure.rounds import median_of

# For each configuration its chapter, and a phrase that names the change.
PHRASES = {
    "one-at-a-time": ("", "one request in each step"),
    "static": ("", "a batch starts and ends together"),
    "continuous": ("01_batching", "requests join and leave between any two steps"),
    "paged": ("02_paged_kv", "KV in blocks; each request reserves only its own maximum"),
    "prefix-cache": ("03_prefix_cache", "a shared prefix is computed once"),
    "preempting": ("04_scheduler", "memory is allocated step by step, not reserved"),
    "speculative": ("05_spec_decode", "one pass verifies several draft tokens"),
    "chunked": ("06_chunked_prefill", "a long prompt is split over several steps"),
}

# The README's first table: the added idea, the workload it is meant for, and the number that it
# improves. A chapter without a row gains little in its own workload.
GAINS = {
    "paged": (
        "2 paged KV cache",
        "more users than worst-case reservations fit",
        "output_tokens_per_s",
    ),
    "prefix-cache": ("3 prefix caching", "one long system prompt", "ttft_ms_p50"),
    "preempting": (
        "4 preemptive scheduling",
        "answers shorter than `max_tokens`",
        "output_tokens_per_s",
    ),
    "chunked": (
        "6 chunked prefill",
        "long prompts among short ones",
        "inter_token_ms_p99",
    ),
}


def _tokens_over_least(question: dict[str, Any], run: dict[str, Any]) -> float:
    computed = sum(question["prompt_tokens"][run["seed"]]) * (1 - run.get("prefix_hits", 0))
    return computed / question["min_prompt_tokens"][run["seed"]]


def _kv_over_written(question: dict[str, Any], run: dict[str, Any]) -> float:
    return 1 / (1 - run["kv_waste"])


def _passes_over_least(question: dict[str, Any], run: dict[str, Any]) -> float:
    """Passes compared with four draft tokens a pass, the default, all of them accepted."""
    return 5 / run.get("tokens_per_pass", 1)


def _gap_over_least(question: dict[str, Any], run: dict[str, Any]) -> float:
    """Gap compared with one chunk, at the rate of the longest prompt computed in one step."""
    whole, chunk = (
        next(other for other in config["runs"] if other["seed"] == run["seed"])
        for config in question["rungs"].values()
    )
    share = chunk["most_tokens_of_one"] / whole["most_tokens_of_one"]
    return run["inter_token_ms_p99"] / (share * whole["inter_token_ms_p99"])


# A chapter's own row: its distance from the least possible cost of its question's work.
FLOORS: dict[str, tuple[str, Callable[[dict[str, Any], dict[str, Any]], float]]] = {
    "continuous": ("KV memory held / written", _kv_over_written),
    "paged": ("KV memory held / written", _kv_over_written),
    "prefix-cache": ("prompt tokens computed / least", _tokens_over_least),
    "preempting": ("KV memory held / written", _kv_over_written),
    "speculative": ("passes / least", _passes_over_least),
    "chunked": ("gap / least", _gap_over_least),
}


def render(record: dict[str, Any]) -> str:
    """Render many users' table, and each chapter's question, cells without and with it."""
    head = ["chapter, and its work", "output tok/s", "first token (p50)", "gap (p99)"]
    rows = []
    for name, question in record.get("questions", {}).items():
        before, after = (_short_row(*config)[1:4] for config in question["rungs"].items())
        cells = [f"{b} → {a}" for b, a in zip(before, after, strict=True)]
        rows.append([f"{question['rungs'][name]['title']}; {_work(question)}", *cells])
    return f"{_many_users(record)}\n\n{markdown_table(head, rows)}\n\n{made_on(record)}"


def _many_users(record: dict[str, Any]) -> str:
    """Render every configuration where many users queue: throughput, both waits, and a phrase."""
    regime = record["regimes"]["many"]
    head = ["chapter", "output tok/s", "first token (p50)", "gap (p99)", "what is new"]
    rows = [_short_row(name, config) for name, config in regime["rungs"].items()]
    lines = markdown_table(head, rows).splitlines()
    lines[1] = lines[1].removesuffix("---: |") + "--- |"  # the phrase is left-aligned
    return "\n".join(lines) + f"\n\n<sub>{_work(regime).capitalize()}; {_measured(record)}</sub>"


def render_rows(record: dict[str, Any]) -> dict[str, str]:
    """Render a row for each chapter: its question's work without the chapter and with it, and the
    distance from its floor."""
    rows = {}
    for name, (floor, distance) in FLOORS.items():
        if (question := record.get("questions", {}).get(name)) is None:
            continue
        head = [_work(question), "output tok/s", "first token (p50)", "gap (p99)", floor]
        lines = []
        for config in question["rungs"].values():
            times = median(distance(question, run) for run in config["runs"])
            lines.append([config["title"], *_short_row(name, config)[1:4], f"{times:.2f}x"])
        table = markdown_table(head, lines)
        rows[PHRASES[name][0]] = f"{table}\n\n<sub>Measured: {_measured(record)}</sub>"
    return rows


def _measured(record: dict[str, Any]) -> str:
    where, num_seeds = record["environment"], record["config"]["seeds"]
    dirty = " with uncommitted changes" if where["is_dirty"] else ""
    return (
        f"medians of {num_seeds} workloads on {where['cpu']}, {where['cores']} cores, at commit "
        f"`{(where['commit'] or 'unknown')[:10]}`{dirty}; `make ladder` measures it again."
    )


def render_gains(record: dict[str, Any]) -> str:
    """The README's first table: each idea in the workload it is meant for, without it → with it."""
    rows = []
    for name, (idea, workload, metric) in GAINS.items():
        if name in record.get("questions", {}):
            before, after = record["questions"][name]["rungs"].values()
            rows.append([idea, workload, _gain(before, after, metric)])
    many = record["regimes"]["many"]
    first, *_, last = many["rungs"].values()
    gains = [_gain(first, last, metric) for metric in ("output_tokens_per_s", "ttft_ms_p50")]
    work = f"{_users(many)}, against one request at a time"
    rows.append(["all six", work, ", ".join(gains)])
    lines = markdown_table(["chapter", "workload", "gain"], rows).splitlines()
    lines[1] = "| --- | --- | ---: |"
    return "\n".join(lines)


def _gain(before: dict[str, Any], after: dict[str, Any], metric: str) -> str:
    low, high = _median(before, metric), _median(after, metric)
    if metric == "output_tokens_per_s":
        return f"throughput {low:,.0f} → {high:,.0f} tok/s"
    name = "time to first token" if metric == "ttft_ms_p50" else "p99 inter-token latency"
    if max(low, high) >= 10_000:
        return f"{name} {low / 1000:.1f} → {high / 1000:.2f} s"
    return f"{name} {low:,.0f} → {high:,.0f} ms"


def _short_row(name: str, config: dict[str, Any]) -> list[str]:
    shown = [_median(config, key) for key in ("output_tokens_per_s", "ttft_ms_p50")]
    return [
        config["title"],
        f"{shown[0]:,.0f}",
        f"{shown[1]:,.0f} ms",
        f"{_median(config, 'inter_token_ms_p99'):,.0f} ms",
        PHRASES[name][1],
    ]


def _median(config: dict[str, Any], name: str) -> float:
    return median_of(config["runs"], name)


def _work(regime: dict[str, Any]) -> str:
    long = f", {regime['num_long']} long" if regime["num_long"] else ""
    return f"{regime['title']}: {_users(regime)}{long}"


def _users(regime: dict[str, Any]) -> str:
    return f"{regime['num_requests']} requests, {regime['arrivals_per_s']:g} a second"
