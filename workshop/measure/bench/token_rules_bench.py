"""The cost of the rules of `SamplingParams`: a step in which all rows have one, and one without.

    python -m workshop.bench.token_rules_bench           measures (minutes), and records
    python -m workshop.bench.token_rules_bench --tables  the table of common/README.md

The shipped model on this processor, greedy, one thread. The kinds take turns in each round, on one
engine for each number of rows; the first round warms up. `two words` is a bad word of two tokens,
which is compared with the outputs in every step, and `all` has everything above together."""

from __future__ import annotations

import statistics
from functools import partial
from pathlib import Path
from typing import Any

import torch

from common.engine import EngineConfig, LLMEngine
from common.engine_config import SHIPPED_CHECKPOINT
from common.models.loader import load_model
from common.requests.gc_utils import freeze_gc_heap
from common.requests.tokenizer import load_tokenizer
from request import SamplingParams
from workshop.measure.bench.bench_record import describe_environment, markdown_table
from workshop.measure.bench.grammar_bench import MAX_TOKENS, timed_batch
from workshop.measure.bench.side_by_side import measure_and_tell, spread

RECORD = Path(__file__).parent / "records" / "token_rules.json"
PAGE = Path(__file__).parents[3] / "common" / "README.md"
NUM_ROWS = (1, 32, 128)
ALLOWED = tuple(range(10, 3_000))
RULES: dict[str, dict[str, Any]] = {
    "without": {},
    "logit_bias": {"logit_bias": {token: 1.0 for token in range(100, 120)}},
    "allowed_token_ids": {"allowed_token_ids": ALLOWED},
    "bad_words": {"bad_words": [[token] for token in range(200, 220)]},
    "two words": {"bad_words": [[token, 300] for token in range(200, 220)]},
    "logprobs=5": {"logprobs": 5},
}
RULES["all"] = {name: value for rule in RULES.values() for name, value in rule.items()}
RULES["all"]["bad_words"] = [*RULES["bad_words"]["bad_words"], *RULES["two words"]["bad_words"]]


def measure(rounds: int) -> dict[str, Any]:
    freeze_gc_heap()
    torch.set_num_threads(1)
    loaded = load_model(SHIPPED_CHECKPOINT, "auto", torch.device("cpu"))
    tokenizer = load_tokenizer(SHIPPED_CHECKPOINT)
    params = partial(SamplingParams, temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    steps: dict[str, dict[str, list[float]]] = {}
    for n in NUM_ROWS:
        config = EngineConfig(max_num_seqs=n, num_blocks=8 * n + 8, prefix_cache=None)
        engine = LLMEngine(config, loaded=loaded, tokenizer=tokenizer)
        found: dict[str, list[float]] = {name: [] for name in RULES}
        for i in range(1 + rounds):
            for name, rule in RULES.items():
                seconds, num_steps = timed_batch(engine, n, params(**rule))
                found[name] += [round(1e3 * seconds / num_steps, 4)] if i else []
        steps[str(n)] = found
        engine.close()
    return {
        "command": "python -m workshop.bench.token_rules_bench",
        "environment": describe_environment(),
        "config": {"rounds": rounds, "max_tokens": MAX_TOKENS, "threads": 1},
        "steps": steps,
    }


def table_of_all(record: dict[str, Any]) -> str:
    head = ["every row has", *(f"{n} rows, times the time without" for n in record["steps"])]
    rows = []
    for name in next(iter(record["steps"].values())):
        ratios = [
            [ms / plain for ms, plain in zip(found[name], found["without"])]
            for found in record["steps"].values()
        ]
        rows.append([name, *map(spread, ratios)])
    plain = [f"{statistics.median(f['without']):.2f} ms" for f in record["steps"].values()]
    rows[0] = ["nothing, ms a step", *plain]
    return markdown_table(head, rows)


def main() -> None:
    measure_and_tell(__doc__, RECORD, PAGE, "token_rules", measure, table_of_all, rounds=7)


if __name__ == "__main__":
    main()
