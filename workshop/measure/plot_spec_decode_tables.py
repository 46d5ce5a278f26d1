"""The tables of chapter 5, made from its records for `plot_spec_decode.py --tables`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from acceptance import expected_tokens
from workshop.measure.bench.bench_record import markdown_table

RULE_NAMES = {
    "rejection": "rejection: accept with min(1, p/q)",
    "shared": "matching, draft drawn with the same random number",
    "argmax": "matching, the draft model's likeliest token",
    "matching": "matching, draft and token drawn independently",
}


def median(turns: Sequence[dict], field: str) -> float:
    return statistics.median(turn[field] for turn in turns)


def speedups(turns: Sequence[dict], plain: Sequence[dict]) -> list[float]:
    """Return each round's speed relative to the same round's plain decoding."""
    pairs = zip(turns, plain, strict=True)
    return [turn["tokens_per_s"] / other["tokens_per_s"] for turn, other in pairs]


def tables_of_engine(record: dict) -> dict[str, str]:
    tables = {}
    for workload, batches in record["runs"].items():
        rows = []
        for name in record["config"]["systems"]:
            cells: list[object] = [name]
            for systems in batches.values():
                turns = systems[name]
                speed = f"{median(turns, 'tokens_per_s'):,.0f}"
                if name != "plain":
                    ratios = speedups(turns, systems["plain"])
                    length = median(turns, "tokens_per_pass")
                    speed += (
                        f", **{statistics.median(ratios):.2f}×** "
                        f"({min(ratios):.2f}-{max(ratios):.2f}), {length:.2f}"
                    )
                cells.append(speed)
            rows.append(cells)
        head = [workload, *batches]
        tables[f"engine_{workload}"] = markdown_table(head, rows)
    rows = []
    for workload, batches in record["runs"].items():
        for name in ("n-gram, 4", "draft, 4"):
            turns = batches["1"][name]
            places = turns[len(turns) // 2]["acceptance_by_position"]
            rows.append(
                [
                    f"{workload}: {name}",
                    f"{median(turns, 'acceptance'):.0%}",
                    " ".join(f"{a:.0%}" for a in places),
                ]
            )
    head = ["one at a time", "accepted, of those tried", "accepted at position 1, 2, ..."]
    tables["acceptance"] = markdown_table(head, rows)
    return tables


def predict(points: dict[str, list[dict]], k: int) -> tuple[float, float]:
    """Return `(tokens per pass, speed-up)` by the formula, from separate measurements: acceptance,
    and the times of a pass over 1 + k tokens and of k rounds, in units of a plain step."""
    turns, plain_ms = points[str(k)], median(points["0"], "verify_ms")
    tokens = expected_tokens(median(turns, "acceptance"), k)
    cost = (median(turns, "verify_ms") + median(turns, "propose_ms")) / plain_ms
    return tokens, tokens / cost


def tables_of_formula(record: dict) -> dict[str, str]:
    rows = []
    for size, points in record["points"].items():
        plain_ms = median(points["0"], "verify_ms")
        for k in (int(name) for name in points if name != "0"):
            turns = points[str(k)]
            tokens, speedup = predict(points, k)
            measured = statistics.median(speedups(turns, points["0"]))
            rows.append(
                [
                    f"{size}, {k}",
                    f"{median(turns, 'acceptance'):.2f}",
                    f"{median(turns, 'verify_ms') / plain_ms:.2f}",
                    f"{median(turns, 'propose_ms') / plain_ms / k:.2f}",
                    f"{tokens:.2f} ({median(turns, 'tokens_per_pass'):.2f})",
                    f"{speedup:.2f} ({measured:.2f})",
                ]
            )
    head = ["requests, k", "acceptance a", "target pass v(k)", "draft pass c"]
    head += ["tokens a pass: formula (measured)", "speed-up: formula (measured)"]
    return {"formula": markdown_table(head, rows)}


def tables_of_rules(record: dict) -> dict[str, str]:
    temperatures = list(record["acceptance"])
    rows = [
        [name, *(f"{record['acceptance'][t][rule]:.1%}" for t in temperatures)]
        for rule, name in RULE_NAMES.items()
    ]
    head = ["chance that a draft is accepted", *(f"temperature {t}" for t in temperatures)]
    note = (
        f"Exact, not sampled: the mean over {record['config']['num_positions']:,} positions of "
        f"{record['config']['num_texts']} files that neither model has seen. Greedy, the two agree "
        f"on {record['greedy']:.1%} of them."
    )
    return {
        "rules": markdown_table(head, rows),
        "rules_note": note,
    }


def tables_of_proposers(record: dict) -> dict[str, str]:
    lengths = list(next(iter(record["step_us"].values())))
    rows = [
        [name, *(f"{statistics.median(by[n]):,.0f}" if n in by else "" for n in lengths)]
        for name, by in record["step_us"].items()
    ]
    head = ["µs a step, tokens so far:", *(f"{int(n):,}" for n in lengths)]
    return {"proposers": markdown_table(head, rows)}
