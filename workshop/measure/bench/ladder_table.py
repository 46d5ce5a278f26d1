"""The ladder's record as markdown. Measures nothing, and imports nothing heavy."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

from workshop.measure.bench.bench_record import made_on, markdown_table

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
SPEED, FIRST, GAP = "output_tokens_per_s", "ttft_ms_p50", "inter_token_ms_p99"
GAINS = {
    "paged": ("2 paged KV cache", "more users than worst-case reservations fit", SPEED),
    "prefix-cache": ("3 prefix caching", "one long system prompt", FIRST),
    "preempting": ("4 preemptive scheduling", "answers shorter than `max_tokens`", SPEED),
    "chunked": ("6 chunked prefill", "long prompts among short ones", GAP),
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


SHOWN = {"output tok/s": "{:,.0f}", "first token (p50)": "{:,.0f} ms", "gap (p99)": "{:,.0f} ms"}


def render(record: dict[str, Any]) -> str:
    """Render many users' table, and each chapter's question, cells without and with it."""
    many, rows = record["regimes"]["many"], []
    for name, question in record["questions"].items():
        before, after = map(_cells, question["rungs"].values())
        cells = [f"{b} → {a}" for b, a in zip(before, after, strict=True)]
        rows.append([f"{question['rungs'][name]['title']}; {_work(question)}", *cells])
    parts = [
        markdown_table(
            ["chapter, and what is new", *SHOWN],
            [[f"{c['title']}: {PHRASES[n][1]}", *_cells(c)] for n, c in many["rungs"].items()],
        ),
        f"<sub>{_work(many).capitalize()}; {_measured(record)}</sub>",
        markdown_table(["chapter, and its work", *SHOWN], rows),
        made_on(record),
    ]
    return "\n\n".join(parts)


def render_rows(record: dict[str, Any]) -> dict[str, str]:
    """Render a row for each chapter: its question's work without the chapter and with it, and the
    distance from its floor."""
    rows = {}
    for name, (floor, distance) in FLOORS.items():
        question, lines = record["questions"][name], []
        for config in question["rungs"].values():
            times = median(distance(question, run) for run in config["runs"])
            lines.append([config["title"], *_cells(config), f"{times:.2f}x"])
        table = markdown_table([_work(question), *SHOWN, floor], lines)
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
    many, rows = record["regimes"]["many"], []
    for name, (idea, workload, metric) in GAINS.items():
        rows.append([idea, workload, _gain(record["questions"][name], metric)])
    work = f"{_users(many)}, against one request at a time"
    rows.append(["all six", work, f"{_gain(many, SPEED)}, {_gain(many, FIRST)}"])
    return markdown_table(["chapter", "workload", "gain"], rows, "---")


def _gain(work: dict[str, Any], metric: str) -> str:
    """The metric of the first configuration and that of the last."""
    first, *_, last = work["rungs"].values()
    low, high = _median(first, metric), _median(last, metric)
    if metric == SPEED:
        return f"throughput {low:,.0f} → {high:,.0f} tok/s"
    name = "time to first token" if metric == FIRST else "p99 inter-token latency"
    if max(low, high) >= 10_000:
        return f"{name} {low / 1000:.1f} → {high / 1000:.2f} s"
    return f"{name} {low:,.0f} → {high:,.0f} ms"


def _cells(config: dict[str, Any]) -> list[str]:
    forms = zip(SHOWN.values(), (SPEED, FIRST, GAP), strict=True)
    return [form.format(_median(config, metric)) for form, metric in forms]


def _median(config: dict[str, Any], name: str) -> float:
    return median(run[name] for run in config["runs"])


def _work(regime: dict[str, Any]) -> str:
    long = f", {regime['num_long']} long" if regime["num_long"] else ""
    return f"{regime['title']}: {_users(regime)}{long}"


def _users(regime: dict[str, Any]) -> str:
    return f"{regime['num_requests']} requests, {regime['arrivals_per_s']:g} a second"
