"""Three requests over three steps of this engine, as READING_ALONG.zh.md shows them.

    python -m workshop.worked_steps

Prompts of 9, 3 and 5 tokens, and one of 12 that must wait for a slot: the example of a post that
this book is read along with. The model is the shipped one in float64, with blocks of 4. Everything
in the table is read from the frames of the run (`common/events`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from common.engine import LLMEngine
from common.engine_config import EngineConfig
from request import SamplingParams
from workshop.watch.replay.film import Film

NUM_STEPS = 3
BLOCK_SIZE = 4
PROMPTS = [range(1, 10), range(10, 13), range(13, 18), range(20, 32)]
MAX_TOKENS = [3, 2, 3, 3]
HEAD = ["step", "request", "positions", "block table", "slots", "token", "known, computed"]


def run(path: str | Path) -> None:
    """Serve the four requests, and record their frames."""
    config = EngineConfig(
        device="cpu",
        dtype="float64",
        block_size=BLOCK_SIZE,
        num_blocks=9,  # eight and the null block: the fourth request gets what the second gave back
        max_num_seqs=3,
        prefix_cache=None,
        num_threads=1,
        events=str(path),
    )
    engine = LLMEngine(config)
    for number, (prompt, max_tokens) in enumerate(zip(PROMPTS, MAX_TOKENS, strict=True)):
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        engine.add_request(f"req-{number}", list(prompt), params)
    while engine.has_unfinished_requests():
        engine.step()
    engine.close()


def rows_of(path: str | Path) -> Iterator[list[str]]:
    """Yield the cells of `HEAD` for each request of each step."""
    film = Film.read(path)
    for step in range(NUM_STEPS):
        (_, _, planned), (_, _, ended) = film.step(step).frames[-2:]
        plan = planned["in_flight"][str(step)]
        for name, start, num in zip(plan["requests"], plan["starts"], plan["num_tokens"]):
            outputs, table = ended["outputs"][name], planned["tables"][name]["0"]
            positions = range(start, start + num)
            slots = [table[pos // BLOCK_SIZE] * BLOCK_SIZE + pos % BLOCK_SIZE for pos in positions]
            known = len(ended["requests"][name]["prompt"]) + len(outputs)
            counters = f"{known}, {start + num}"
            cells = [str(step + 1), name, stretch(positions), str(table)]
            yield [*cells, stretch(slots), str(outputs[-1]), counters]


def stretch(numbers: range | list[int]) -> str:
    """Return `0-8` for consecutive numbers; gaps are shown with a comma: `4-7, 20`."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] + 1 == number:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)


def worked_table() -> str:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "run.jsonl"
        run(path)
        lines = [HEAD, *rows_of(path)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = "  ".join("{:%d}" % width for width in widths)  # noqa: UP031
    return "\n".join(padded.format(*line).rstrip() for line in lines)


if __name__ == "__main__":
    print(worked_table())
