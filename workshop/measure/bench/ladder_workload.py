"""The work of the ladder: users who arrive at random, with prompts and answers like code.

Arrivals are a Poisson process. Every prompt begins with the same system prompt and continues with
the first half of a function from the shipped checkpoint's held-out files; the answer ends after as
many tokens as the second half has. A few users bring most of a file instead: the long prompts that
make others wait. The length of an answer is not known in advance: `max_tokens` is the same for all,
and generous. The same seed gives the same users to every configuration.

All configurations serve the `REGIMES`. `QUESTIONS` has for each chapter the work in which its
question arises, which is served by its configuration and the one before."""

from __future__ import annotations

import ast
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from common.requests.tokenizer import Tokenizer
from workshop.measure.bench.bench_work import BenchRequest
from workshop.training.tiny_data import held_out

SYSTEM_PROMPT_LEN = 128
LONG_PROMPT_LEN = 1400
OUTPUT_LENS = (8, 64)
MAX_TOKENS = 256  # of every request


@dataclass(frozen=True, slots=True)
class Regime:
    """`num_long` of the `num_requests` users bring a long prompt. If `repeats`, the prompts of the
    others contain their answer. `repr`, which goes into seeds, leaves out the last two fields."""

    title: str
    num_requests: int
    num_long: int
    arrivals_per_s: float
    system_len: int = field(default=SYSTEM_PROMPT_LEN, repr=False)
    repeats: bool = field(default=False, repr=False)


REGIMES = {
    "many": Regime("many users", 80, 4, 24.0),
    "few": Regime("few users", 10, 1, 1.25),
}
QUESTIONS = {
    "continuous": Regime("who comes while others are answered", 24, 0, 4.0),
    "paged": Regime("more users than reservations fit", 40, 0, 24.0),
    "prefix-cache": Regime("one long system prompt", 30, 0, 12.0, system_len=1024),
    "preempting": Regime("answers shorter than what is reserved", 60, 0, 40.0),
    "speculative": Regime("answers copied from the prompt", 16, 0, 2.0, repeats=True),
    "chunked": Regime("long prompts among short answers", 30, 6, 6.0),
}


def make_workload(tokenizer: Tokenizer, regime: Regime, seed: int) -> list[BenchRequest]:
    """Draw the requests, in order of arrival."""
    rng = random.Random(f"{seed} {regime}")
    files, functions = _encoded_corpus(tokenizer)
    system = files[0][: regime.system_len]
    long_texts = [ids for ids in files if len(ids) > LONG_PROMPT_LEN]
    # Never among the very first: other requests must be waiting.
    first = regime.num_requests // 5
    long_places = set(rng.sample(range(first, regime.num_requests), regime.num_long))
    requests, now = [], 0.0
    for place in range(regime.num_requests):
        now += rng.expovariate(regime.arrivals_per_s)
        ids = rng.choice(functions)
        half = len(ids) // 2
        num_outputs = min(max(len(ids) - half, OUTPUT_LENS[0]), OUTPUT_LENS[1])
        body = [*(ids if regime.repeats else []), *ids[: min(half, 256)]]
        if place in long_places:
            text = rng.choice(long_texts)
            begin = rng.randrange(len(text) - LONG_PROMPT_LEN)
            body = text[begin : begin + LONG_PROMPT_LEN]
        requests.append(BenchRequest(system + body, num_outputs, MAX_TOKENS, now))
    return requests


def min_prompt_tokens(prompts: Iterable[Sequence[int]]) -> int:
    """Return the prompt tokens that must be computed if no prefix is computed twice. At least one
    of each prompt counts, because its last token gives the logits."""
    nodes: dict[tuple[int, int], int] = {}  # (node, token) -> the node of the longer prefix
    total = 0
    for prompt in prompts:
        node, num_known = 0, len(nodes)
        for token in prompt:
            node = nodes.setdefault((node, token), len(nodes) + 1)
        total += max(1, len(nodes) - num_known)
    return total


@lru_cache(maxsize=1)  # encoding takes seconds
def _encoded_corpus(tokenizer: Tokenizer) -> tuple[list[list[int]], list[list[int]]]:
    """The corpus's files in the order of their names, and their functions that are long enough."""
    files = held_out()
    functions = [tokenizer.encode(source) for text in files for source in functions_of(text)]
    functions = [ids for ids in functions if len(ids) >= 2 * OUTPUT_LENS[0]]
    return [tokenizer.encode(text) for text in files], functions


def functions_of(text: str) -> list[str]:
    """The source of every function and method of a module, in order."""
    nodes = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return [ast.get_source_segment(text, node) or "" for node in nodes]
