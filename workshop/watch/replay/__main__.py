"""python -m workshop.replay run.jsonl              a summary of the file
python -m workshop.replay run.jsonl --step 12    tokens computed in a step, why others waited"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

from common.events.frames import REASONS
from workshop.watch.replay.film import Film


def describe(film: Film) -> str:
    """Return a few lines about a whole run."""
    run, requests = film.run, film.requests().values()
    ends = Counter(row.get("finish", {}).get("reason", "unfinished") for row in requests)
    num_outputs = sum(len(row["outputs"]) for row in requests)
    return "\n".join(
        [
            f"{run.model.get('architecture')}, scheduler {run.scheduler}, policy {run.policy}, "
            f"prefix cache {run.prefix_cache}",
            f"{film.num_steps} steps, {len(requests)} requests "
            f"({', '.join(f'{n} {reason}' for reason, n in ends.items())}), {num_outputs} outputs",
        ]
    )


def describe_step(film: Film, number: int) -> str:
    """The tokens that a step computed for each request, and why other requests did not run."""
    step, lines = film.step(number), [f"step {number}"]
    for name, kind, start, num in step.cells():
        lines.append(f"  {name:12} {kind:10} [{start}..{start + num - 1}]")
    for name, reason in step.reasons.items():
        lines.append(f"  {name:12} waits: {REASONS.get(reason, 'it has just arrived')}")
    for what in step.happened:
        for name, num_lost, beneficiary in what["preempted"]:
            whom = f" for {beneficiary}" if beneficiary else ""
            lines.append(f"  {name:12} preempted{whom}, {num_lost} tokens lost")
        lines += [f"  {name:12} gets {ids}" for name, ids in what["tokens"].items()]
        ends = step.state["requests"]
        lines += [f"  {name:12} ends: {_reason_of(ends, name)}" for name in what["finished"]]
        if what["evicted"]:
            lines.append(f"  evicted blocks {what['evicted']}")
    if error := step.result.get("error"):
        lines.append(f"  failed: {error}")
    return "\n".join(lines)


def _reason_of(rows: dict, name: str) -> str:
    return rows[name]["finish"]["reason"] if name in rows else "its end was in an earlier frame"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m workshop.replay", description="Read a film.")
    parser.add_argument("film", type=Path, help="what LLM(events=...) wrote")
    parser.add_argument("--step", type=int, metavar="N", help="tell what happened in this step")
    args = parser.parse_args(argv)
    try:
        film = Film.read(args.film)
        print(describe(film) if args.step is None else describe_step(film, args.step))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
