"""The ladder's record as markdown. Nothing is measured here, and nothing heavy is imported."""

from __future__ import annotations

from typing import Any

from workshop.measure.bench.bench_record import made_on, markdown_table, summarise

# For each rung its chapter, and what is new on it in a phrase.
PHRASES = {
    "one-at-a-time": ("", "nobody shares a step"),
    "static": ("", "a batch starts and ends together"),
    "continuous": ("01_batching", "anybody joins or leaves at any step"),
    "paged": ("02_paged_kv", "KV in blocks: nobody reserves the longest"),
    "prefix-cache": ("03_prefix_cache", "a shared beginning is computed once"),
    "preempting": ("04_scheduler", "memory is filled, not reserved"),
    "speculative": ("05_spec_decode", "several tokens a pass, verified"),
    "chunked": ("06_chunked_prefill", "a long prompt comes in pieces"),
}

# The README's first table: what is added, the workload it is meant for, and the number that it
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


def render(record: dict[str, Any]) -> str:
    """Every rung in every regime, with all that was measured; and each chapter's own question."""
    regimes = map(_regime, record["regimes"].values())
    parts = [*regimes, render_questions(record), made_on(record)]
    return "\n\n".join(filter(None, parts))


def render_questions(record: dict[str, Any]) -> str:
    """Nothing if they were not measured. In each cell: without the chapter, and with it."""
    head = ["chapter, and its work", "output tok/s", "first token (p50)", "gap (p99)"]
    rows = []
    for name, question in record.get("questions", {}).items():
        before, after = (_short_row(*rung)[1:4] for rung in question["rungs"].items())
        cells = [f"{b} → {a}" for b, a in zip(before, after, strict=True)]
        rows.append([f"{question['rungs'][name]['title']}; {_work(question)}", *cells])
    return markdown_table(head, rows) if rows else ""


def render_short(record: dict[str, Any]) -> str:
    """Every rung where many users queue: throughput, both waits, and a phrase."""
    regime = record["regimes"]["many"]
    head = ["chapter", "output tok/s", "first token (p50)", "gap (p99)", "what is new"]
    rows = [_short_row(name, rung) for name, rung in regime["rungs"].items()]
    lines = markdown_table(head, rows).splitlines()
    lines[1] = lines[1].removesuffix("---: |") + "--- |"  # the phrase is to the left
    where, num_seeds = record["environment"], record["config"]["seeds"]
    dirty = " with uncommitted changes" if where["is_dirty"] else ""
    return "\n".join(lines) + (
        f"\n\n<sub>Gap: between two tokens of one answer. {_work(regime).capitalize()}; medians of "
        f"{num_seeds} workloads on {where['cpu']}, {where['cores']} cores, at commit "
        f"`{(where['commit'] or 'unknown')[:10]}`{dirty}; `make ladder` measures it again. "
        "[All columns, and few users](workshop/measure/bench/README.md#the-ladder).</sub>"
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


def _short_row(name: str, rung: dict[str, Any]) -> list[str]:
    chapter, phrase = PHRASES[name]
    title = f"[{rung['title']}]({chapter}/README.md)" if chapter else rung["title"]
    shown = [_median(rung, key) for key in ("output_tokens_per_s", "ttft_ms_p50")]
    return [
        title,
        f"{shown[0]:,.0f}",
        f"{shown[1]:,.0f} ms",
        f"{_median(rung, 'inter_token_ms_p99'):,.0f} ms",
        phrase,
    ]


def _median(rung: dict[str, Any], name: str) -> float:
    found = summarise([run[name] for run in rung["runs"]])
    assert found is not None, "a configuration has no run"
    return found.median


def _work(regime: dict[str, Any]) -> str:
    long = f", {regime['num_long']} long" if regime["num_long"] else ""
    return f"{regime['title']}: {_users(regime)}{long}"


def _users(regime: dict[str, Any]) -> str:
    return f"{regime['num_requests']} requests, {regime['arrivals_per_s']:g} a second"


def _regime(regime: dict[str, Any]) -> str:
    head = [
        _work(regime),
        "output tok/s",
        "lowest-highest",
        "TTFT p50 / p99",
        "between tokens p50 / p99",
        "KV waste",
        "prefix hits",
        "preempted",
        "guesses right",
        "tokens a pass",
        "steps",
    ]
    return markdown_table(head, [_row(rung) for rung in regime["rungs"].values()])


def _row(rung: dict[str, Any]) -> list[str]:
    def shown(name: str, form: str) -> str:
        found = summarise([run[name] for run in rung["runs"] if name in run])
        return "" if found is None else format(found.median, form)

    speed = [run["output_tokens_per_s"] for run in rung["runs"]]
    return [
        rung["title"],
        shown("output_tokens_per_s", ",.0f"),
        f"{min(speed):,.0f}-{max(speed):,.0f}",
        f"{shown('ttft_ms_p50', ',.0f')} / {shown('ttft_ms_p99', ',.0f')} ms",
        f"{shown('inter_token_ms_p50', '.1f')} / {shown('inter_token_ms_p99', ',.0f')} ms",
        shown("kv_waste", ".0%"),
        shown("prefix_hits", ".0%"),
        shown("preemptions", ",.0f"),
        shown("acceptance", ".0%"),
        shown("tokens_per_pass", ".2f"),
        shown("num_steps", ",.0f"),
    ]
