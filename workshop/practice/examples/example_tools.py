"""Helpers of several examples, and prompts of workloads. Modules of the engine are imported when a
function is called: see `exercise.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Lines = Iterator[str]  # of what an example shows
CODE = "def area(width, height):\n    return width * height\n\ndef volume(width, height, depth):\n"
SONG = "a = [1, 2, 3, 4]\nb = [1, 2, 3, 4]\nc = [1, 2, 3, 4]\nd = [1, 2,"
_WORDS = """and are all add|but bytes base block|can class call code|data default does doc|error end
event exec|for file from first|get given getattr group|has have header handle|import index into
item|line list last log|method module must may|not name new number|object other out one|path prefix
process package|return read result run|self string set size|the that this time|used use using
user|value version values valid|with will which when"""


def blocks(letters: str, then: str = "") -> str:
    """A prompt of the shipped model: for each letter a block of four tokens, words that begin with
    it; then the text `then`."""
    by_letter = {words[0]: " " + " ".join(words.split()) for words in _WORDS.split("|")}
    return "".join(by_letter[letter] for letter in letters) + then


def request(name: str, num_prompt: int, max_tokens: int = 4, **options: Any) -> Any:
    """A greedy request of `num_prompt` tokens, all of them 1."""
    from request import Request

    return Request.from_tokens(name, [1] * num_prompt, max_tokens, **options)


def steps(scheduler: Any, most: int = 1_000) -> Iterator[dict[str, int]]:
    """The tokens that each request computes, step by step, until all requests have finished or
    `most` steps were made. A request without uncomputed tokens samples a 7."""
    from scheduler_interface import StepOutput

    for _ in range(most):
        if not scheduler.has_unfinished_requests():
            return
        plan = scheduler.schedule()
        computed = [r for r in plan.scheduled_requests if plan.num_scheduled_tokens[r.request_id]]
        ready = [r for r in computed if r.num_computed_tokens == r.num_tokens]
        scheduler.update_from_output(plan, StepOutput({r.request_id: [7] for r in ready}))
        yield plan.num_scheduled_tokens
