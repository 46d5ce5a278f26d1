"""The cost of grammars: a step with masks next to one without, and the work before the first token.

    python -m workshop.bench.grammar_bench           measures (minutes), writes the record
    python -m workshop.bench.grammar_bench --tables  writes the table of GRAMMARS.md

`steps`    the shipped model on this processor, where no request or every request has a grammar:
           engines in turn, milliseconds of a step, with the shares of the bits and of the logits
`compile`  a source becomes a matcher, which computes its first mask
`large`    the bits of one row with as many tokens as large models have, made of the shipped ones
           and random ones
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.engine import EngineConfig, LLMEngine
from common.engine_config import SHIPPED_CHECKPOINT
from common.features.grammars import grammar_masks
from common.features.grammars.grammar_masks import GrammarMasks
from common.features.grammars.lark_text import compile_source
from common.features.grammars.vocabulary import Vocabulary, beginning_of, tokenizer_of
from common.models.loader import load_model
from common.requests.gc_utils import freeze_gc_heap
from common.requests.tokenizer import load_tokenizer
from grammars import Choice, Ebnf, Grammar, Json, Regex, source_of
from request import SamplingParams
from workshop.measure.bench.bench_record import (
    describe_environment,
    markdown_table,
)
from workshop.measure.bench.side_by_side import measure_and_tell, spread

RECORD = Path(__file__).parent / "records" / "grammars.json"
PAGE = Path(__file__).parents[3] / "04_scheduler" / "beyond" / "GRAMMARS.md"
NUM_ROWS = (1, 8, 32, 128)
MAX_TOKENS, NUM_LARGE = 48, 151_936
# Every answer is longer than the measured part.
SCHEMA = {"type": "array", "minItems": 99, "items": {"enum": ["open", "closed", 7, None]}}
GRAMMARS: dict[str, Grammar] = {
    "JSON schema": Json(SCHEMA),
    "regular expression": Regex(r"[0-9]{4}-[0-9]{2}-[0-9]{2}( [a-z]+)*"),
    "choice of 100": Choice([f"label {i}" for i in range(100)]),
    "rules": Ebnf('root ::= sum\nsum ::= item ("+" item)*\nitem ::= [0-9]+ | "(" sum ")"'),
}


class Clock:
    """Adds up the durations of calls."""

    def __init__(self) -> None:
        self.ms = 0.0

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*arguments)
            finally:
                self.ms += 1e3 * (time.perf_counter() - start)

        return timed


def timed_batch(
    engine: LLMEngine, num_rows: int, params: SamplingParams, begin: Callable[[], object] = int
) -> tuple[float, int]:
    """Return the seconds and steps of one batch, from the first step after the prompts, where
    `begin` is called."""
    for i in range(num_rows):
        engine.add_request(str(i), [5 + i, 6, 7], params)
    while engine.stats().num_running < num_rows:
        engine.step()
    begin()
    before, start = engine.stats().num_steps, time.perf_counter()
    while engine.has_unfinished_requests():
        engine.step()
    return time.perf_counter() - start, engine.stats().num_steps - before


def run(engine: LLMEngine, num_rows: int, grammar: Grammar | None) -> dict[str, float]:
    """Return milliseconds a step of one batch, from the first step after the prompts."""
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, grammar=grammar)
    if grammar is None:
        params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    fill, apply = Clock(), Clock()
    plain = GrammarMasks.before_sampling, grammar_masks.forbid

    def begin() -> None:
        GrammarMasks.before_sampling = fill.around(plain[0])
        grammar_masks.forbid = apply.around(plain[1])

    seconds, num_steps = timed_batch(engine, num_rows, params, begin)
    GrammarMasks.before_sampling, grammar_masks.forbid = plain
    ms = {"step": 1e3 * seconds, "fill": fill.ms, "apply": apply.ms}
    return {name: round(value / num_steps, 4) for name, value in ms.items()}


def measure(rounds: int) -> dict[str, Any]:
    freeze_gc_heap()
    torch.set_num_threads(1)
    loaded = load_model(SHIPPED_CHECKPOINT, "auto", torch.device("cpu"))
    tokenizer = load_tokenizer(SHIPPED_CHECKPOINT)
    steps: dict[str, dict[str, list[dict[str, float]]]] = {}
    for n in NUM_ROWS:
        config = EngineConfig(max_num_seqs=n, num_blocks=8 * n + 8, prefix_cache=None)
        engine = LLMEngine(config, loaded=loaded, tokenizer=tokenizer)
        kinds = {"without": None, "with": GRAMMARS["JSON schema"]}
        found: dict[str, list[dict[str, float]]] = {name: [] for name in kinds}
        for i in range(1 + rounds):
            for name, grammar in kinds.items():
                ms = run(engine, n, grammar)
                found[name] += [ms] if i else []  # the first of each warms up
        steps[str(n)] = found
        engine.close()
    eos = loaded.generation_eos_token_ids
    vocabulary = Vocabulary.of(tokenizer, tokenizer.vocab_size, eos)
    rng = random.Random(0)
    letters = b'abcdefghijklmnopqrstuvwxyz {}",:0123456789'
    more = [
        bytes(rng.choices(letters, k=rng.randint(2, 9)))
        for _ in range(NUM_LARGE - len(vocabulary.token_bytes))
    ]
    start = time.perf_counter()
    large = Vocabulary((*vocabulary.token_bytes, *more), vocabulary.eos_token_ids)
    tokenizer_of(large)
    seconds = time.perf_counter() - start
    return {
        "command": "python -m workshop.bench.grammar_bench",
        "environment": describe_environment(),
        "config": {"rounds": rounds, "max_tokens": MAX_TOKENS, "schema": SCHEMA, "threads": 1},
        "steps": steps,
        "compile": {
            name: [_compile_ms(grammar, vocabulary) for _ in range(1 + rounds)][1:]
            for name, grammar in GRAMMARS.items()
        },
        "large": {
            "num_tokens": NUM_LARGE,
            "seconds_to_build": round(seconds, 3),
            "us": {name: _fill_us(grammar, large) for name, grammar in GRAMMARS.items()},
        },
    }


def _compile_ms(grammar: Grammar, vocabulary: Vocabulary) -> float:
    beginning_of.cache_clear()
    start = time.perf_counter()
    compile_source(source_of(grammar), tokenizer_of(vocabulary))
    return round(1e3 * (time.perf_counter() - start), 4)


def _fill_us(grammar: Grammar, vocabulary: Vocabulary) -> list[float]:
    """Return the microseconds of each mask along a text that is drawn token by token."""
    matched = GrammarMasks(vocabulary).match(
        compile_source(source_of(grammar), tokenizer_of(vocabulary))
    )
    rng, found = random.Random(1), []
    bits = np.zeros((1, -(-len(vocabulary.token_bytes) // 32)), dtype=np.int32)
    while len(found) < 200:
        start = time.perf_counter()
        matched.fill(bits, 0, ())
        found.append(round(1e6 * (time.perf_counter() - start), 1))
        allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
        allowed = [t for t in allowed.tolist() if t not in vocabulary.eos_token_ids]
        if not allowed:
            break
        matched._accept(rng.choice(allowed))
    return found


def table_of_all(record: dict[str, Any]) -> str:
    head = [
        "rows with a grammar",
        "ms a step without",
        "with",
        "of it bits",
        "of it logits",
        "times as long (lowest-highest)",
    ]
    rows = []
    for n, found in record["steps"].items():
        ratios = [b["step"] / a["step"] for a, b in zip(found["without"], found["with"])]

        def median(kind: str, part: str, found: dict[str, Any] = found) -> str:
            return f"{statistics.median(ms[part] for ms in found[kind]):.2f}"

        parts = [median("without", "step"), median("with", "step")]
        parts += [median("with", "fill"), median("with", "apply")]
        rows.append([n, *parts, spread(ratios)])
    large = record["large"]
    other_head = ["", "ms to compile", f"us for a row of {large['num_tokens']:,} bits", "longest"]
    others = [
        [
            name,
            f"{statistics.median(ms):.1f}",
            f"{statistics.median(large['us'][name]):.0f}",
            f"{max(large['us'][name]):.0f}",
        ]
        for name, ms in record["compile"].items()
    ]
    return "\n\n".join([markdown_table(head, rows), markdown_table(other_head, others)])


def main() -> None:
    measure_and_tell(__doc__, RECORD, PAGE, "grammars", measure, table_of_all, rounds=7)


if __name__ == "__main__":
    main()
