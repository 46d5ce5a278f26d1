"""The tables of chapter 4, made from its records for `plot_scheduler.py --tables`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from workshop.measure.bench.bench_record import markdown_table, percentiles


def percentile_ms(values_s: Sequence[float], percent: float) -> float:
    return 1e3 * percentiles(values_s, [percent])[0]


def tables_of_lab(record: dict) -> dict[str, str]:
    names: dict[tuple[str, ...], list[str]] = {}  # equal rows of a workload are one row
    for workload, systems in record["workloads"].items():
        for name, run in systems.items():
            first = [percentile_ms(run["ttft_s"], p) / 1e3 for p in (50, 99)]
            between = [percentile_ms(run["itl_s"], p) for p in (50, 99)]
            cells = (
                workload,
                f"{run['throughput']:,.0f}",
                "{:.2f} / {:.2f}".format(*first),
                "{:.0f} / {:.0f}".format(*between),
                f"{run['goodput']:.0%}",
                f"{run['fairness']:.2f}",
                f"{run['num_preemptions']}",
                f"{run['num_recomputed_tokens']:,}",
                f"{run['num_cached_tokens']:,}",
                f"{run['kv_utilisation']:.0%}",
            )
            same = names.setdefault(cells, [])
            same.append(name.removeprefix("two phases, ") if same else name)
    rows = [
        [f"{workload}: {' = '.join(same)}", *cells] for (workload, *cells), same in names.items()
    ]
    head = ["simulated", "tok/s", "TTFT s p50 / p99", "between ms p50 / p99", "goodput", "Jain"]
    head += ["preempted", "tokens again", "tokens cached", "KV used"]
    fit = record["fit"]
    cost = {name.removesuffix("_ms"): 1e3 * value for name, value in fit["cost_model"].items()}
    numbers = ", ".join(f"{name.replace('_', ' ')} {value:,.2f}" for name, value in cost.items())
    config = record["config"]
    rates = ", ".join(f"{name} {rate:.1f}" for name, rate in config["rates"].items())
    note = (
        f"Simulated: {config['num_requests']} requests ({rates} a second), "
        f"{config['num_blocks'] - 1} blocks of {config['block_size']}, "
        f"{config['max_num_seqs']} slots, a budget of {config['max_num_batched_tokens']} tokens. "
        "Goodput: the share of requests with a first token within "
        f"{config['max_ttft_s']:g} s and {1e3 * config['max_itl_s']:g} ms a token after it. "
        f"Cost model in µs, fitted to {fit['num_steps']} steps of the shipped checkpoint, median "
        f"error {fit['median_relative_error']:.0%}: {numbers}."
    )
    return {"lab": markdown_table(head, rows), "lab_note": note}


def tables_of_rules(record: dict) -> dict[str, str]:
    rows = [
        [
            f"{workload}: {name}",
            f"{run['throughput']:,.0f}",
            "{:.2f} / {:.2f}".format(*(percentile_ms(run["ttft_s"], p) / 1e3 for p in (50, 99))),
            run["num_preemptions"],
            f"{run['num_recomputed_tokens']:,}",
            f"{run['num_cached_tokens']:,}",
        ]
        for workload, ways in record["workloads"].items()
        if workload in ("long", "shared")  # the others' prompts are never cut, and share nothing
        for name, run in ways.items()
    ]
    head = ["simulated", "tok/s", "TTFT s p50 / p99", "preempted", "tokens again", "tokens cached"]
    return {"rules": markdown_table(head, rows)}


def tables_of_memory(record: dict) -> dict[str, str]:
    rows = [
        [
            name,
            f"{max(run['num_running'])}",
            f"{mean_while_somebody_waits(run):.1f}",
            f"{statistics.mean(run['kv_waste']):.0%}",
            run["num_preemptions"],
            f"{run['num_recomputed_tokens'] / run['num_computed_tokens']:.1%}",
            f"{run['throughput']:,.0f}",
        ]
        for name, run in record["runs"].items()
    ]
    head = [
        "simulated",
        "most at once",
        "mean while others wait",
        "KV held and not written",
        "preemptions",
    ]
    head += ["work done again", "tok/s"]
    return {"memory": markdown_table(head, rows)}


def mean_while_somebody_waits(run: dict) -> float:
    both = zip(run["num_running"], run["num_waiting"], strict=True)
    return statistics.mean([running for running, waiting in both if waiting] or [0])


def tables_of_thrash(record: dict) -> dict[str, str]:
    rows = [
        [
            name,
            f"{run['throughput']:,.0f}",
            f"{min(run['tokens_per_s'][1:-2], default=0):,.0f}",
            run["num_preemptions"],
            f"{run['num_recomputed_tokens'] / run['num_computed_tokens']:.1%}",
            f"{run['longest_pause_s']:.2f}",
        ]
        for name, run in record["runs"].items()
    ]
    head = ["simulated", "tok/s", "worst second", "preemptions", "work done again"]
    head += ["longest pause between two tokens, s"]
    return {"thrash": markdown_table(head, rows)}


def tables_of_control(record: dict) -> dict[str, str]:
    def cell(times: Sequence[float]) -> str:
        shown = [time / 1e3 for time in percentiles(times, [50, 10, 90])]
        return "{:.3f} ({:.3f} - {:.3f})".format(*shown)

    sizes = list(next(iter(record["running_us"].values())))
    rows = [
        [name, *(cell(times) for times in by_size.values())]
        for name, by_size in record["running_us"].items()
    ]
    head = ["ms, schedule + update", *(f"{int(size):,} running" for size in sizes)]
    queues = list(next(iter(record["waiting_us"].values())))
    waiting = [
        [f"256 running, {policy}", *(cell(times) for times in by_queue.values())]
        for policy, by_queue in record["waiting_us"].items()
    ]
    host_head = ["ms of a decode step", *(f"{int(n):,} running" for n in record.get("host_us", ()))]
    parts = {part: None for by_part in record.get("host_us", {}).values() for part in by_part}
    host = [
        [part, *(cell(by_part[part]) for by_part in record["host_us"].values())] for part in parts
    ]
    tables = {"host": markdown_table(host_head, host)} if host else {}
    return tables | {
        "control": markdown_table(head, rows),
        "waiting": markdown_table(["ms", *(f"{int(n):,} waiting" for n in queues)], waiting),
    }
