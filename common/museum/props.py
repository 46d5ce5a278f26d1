"""What several demonstrations need. Everything of ours is imported when it is called: see
`exhibit.py`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any


def request(name: str, num_prompt: int, max_tokens: int = 4, **options: Any) -> Any:
    """A greedy request of `num_prompt` tokens, all of them 1."""
    from request import Request

    return Request.from_tokens(name, [1] * num_prompt, max_tokens, **options)


def steps(scheduler: Any, most: int = 1_000) -> Iterator[dict[str, int]]:
    """Step after step, the tokens that each request computes, until nobody is unfinished or `most`
    steps are over. A request that has caught up samples a 7."""
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
    """What the shipped model answers, greedily unless `params` say otherwise."""
    from common.llm import LLM, SamplingParams

    params = params or SamplingParams(temperature=0, max_tokens=12)
    llm = LLM(device="cpu", dtype="float64", num_blocks=200, compile=False, **config)
    outputs = llm.generate(list(prompts), params, use_tqdm=False)
    return [repr(output.outputs[0].text) for output in outputs]
