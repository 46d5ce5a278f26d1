"""Helpers of several examples, and prompts of workloads. Modules of the engine are imported when a
function is called: see `exercise.py`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

Lines = Iterator[str]  # of what an example shows
CODE = "def area(width, height):\n    return width * height\n\ndef volume(width, height, depth):\n"
# Always four draft tokens, because the adaptive number depends on times, which vary.
GUESS = {"method": "ngram", "num_spec_tokens": 4, "adaptive": False}
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


def say(prompts: Sequence[str], params: Sequence[Any] | Any = None, **config: Any) -> list[str]:
    """The answers of the shipped model, greedy unless `params` is given."""
    from common.llm import LLM, SamplingParams

    params = params or SamplingParams(temperature=0, max_tokens=12)
    llm = LLM(device="cpu", dtype="float64", num_blocks=200, compile=False, **config)
    outputs = llm.generate(list(prompts), params, use_tqdm=False)
    return [repr(output.outputs[0].text) for output in outputs]


def served(work: Callable[[Any], Awaitable[str]]) -> str:
    """The result of `work(llm)`, a program that uses an `AsyncLLM`."""
    import asyncio

    from common.serve.async_llm import AsyncLLM

    async def run() -> str:
        llm = AsyncLLM(device="cpu", num_blocks=99, compile=False)
        try:
            return await work(llm)
        finally:
            await asyncio.to_thread(llm.close)

    return asyncio.run(run())
