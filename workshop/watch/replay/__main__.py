"""python -m workshop.replay run.jsonl              a summary of the file
python -m workshop.replay run.jsonl --step 12    tokens computed in a step, why others waited"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

from common.events.event_kinds import REASONS
from workshop.watch.replay.film import Film


def describe(film: Film) -> str:
    """Return a few lines about a whole run."""
    run, state = film.run, film.last_state()
    kinds = Counter(event.kind for event in film.events)
    ends = Counter(request.finish_reason or "unfinished" for request in state.requests.values())
    num_outputs = sum(len(request.outputs) for request in state.requests.values())
    return "\n".join(
        [
            f"{run.model.get('architecture')}, scheduler {run.scheduler}, policy {run.policy}, "
            f"prefix cache {run.prefix_cache}",
            f"{film.num_steps} steps, {len(state.requests)} requests "
            f"({', '.join(f'{n} {reason}' for reason, n in ends.items())}), {num_outputs} outputs",
            "events: " + ", ".join(f"{n} {kind}" for kind, n in kinds.items()),
        ]
    )


def describe_step(film: Film, step: int) -> str:
    """The tokens that a step computed for each request, and why other requests did not run."""
    film.state_after(step)  # raises if there is no such step
    part = next(part for part in film.steps() if part.number == step)
    lines = [f"step {step}"]
    for position, event in enumerate(part.events, part.first + 1):
        state = film.state_behind(position)
        if event.kind == "planned":
            for cell in state.cells(event):  # pyright: ignore[reportArgumentType]
                last = cell.start + cell.num_tokens - 1
                lines.append(f"  {cell.request:12} {cell.kind:10} [{cell.start}..{last}]")
            for name in state.waiting:
                reason = state.reason_to_wait(name)
                lines.append(f"  {name:12} waits: {REASONS.get(reason or '', 'it has just come')}")
        elif event.kind == "computed":
            tokens = getattr(event, "tokens", {})
            lines += [f"  {name:12} gets {ids}" for name, ids in tokens.items()]
        elif event.kind in ("preempted", "finished", "evicted", "failed"):
            lines.append(f"  {event}")
    return "\n".join(lines)


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
