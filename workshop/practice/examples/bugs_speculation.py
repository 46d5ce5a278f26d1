"""Exhibits of chapter 5: draft tokens, and the handling of rejected ones."""

from __future__ import annotations

from typing import Any


def unread() -> str:
    import torch

    from rejection_sampler import rejection_sampling_batched

    says, guesses = torch.tensor([5, 6, 7, 8]), torch.tensor([1, 6, 7])
    tokens, num = rejection_sampling_batched(says, guesses, torch.tensor([0, 4]), 3)
    return f"the model says 5 6 7 8, the draft is 1 6 7; emitted: {tokens[0, : num[0]].tolist()}"


def the_latest_match() -> str:
    from input_batch import RunnerRequest
    from proposers import NgramProposer, ProposerInput
    from request import SamplingParams

    song = [5] * 9  # la la la
    request = RunnerRequest("r", SamplingParams(), song, [])
    drafts = NgramProposer(4).propose([ProposerInput(request, 0, len(song) - 1)], [4])
    return f"nine times the same token; four draft tokens requested, proposed: {drafts['r']}"


def a_point_on_a_border() -> str:
    import torch

    from inverse_cdf import draw

    weights = torch.tensor([[0.0, 0.5, 0.5]], dtype=torch.float64)
    index, _ = draw(weights, torch.tensor([0.0], dtype=torch.float64))
    return f"weights 0, 0.5, 0.5, drawn with u = 0: token {int(index)}"


def make_scheduler(**options: Any) -> Any:
    from draft_plugin import DraftPlugin
    from scheduler import Scheduler

    return Scheduler(num_gpu_blocks=20, block_size=4, plugins=[DraftPlugin()], **options)


def begin(scheduler: Any, guesses: list[int], max_tokens: int = 20) -> Any:
    """Start a request with a prompt of 6 tokens, one sampled token, and draft tokens after it."""
    from request import Request
    from scheduler_interface import StepOutput

    request = Request.from_tokens("r", [1, 2, 3, 4, 5, 6], max_tokens)
    scheduler.add_request(request)
    output = StepOutput({"r": [7]})
    output.draft_token_ids = {"r": guesses}
    scheduler.update_from_output(scheduler.schedule(), output)
    return request


def a_guess_in_the_cache() -> str:
    from scheduler_interface import StepOutput

    scheduler = make_scheduler()
    request = begin(scheduler, guesses=[50, 51, 52])
    scheduler.update_from_output(scheduler.schedule(), StepOutput({"r": [8]}))  # all are wrong
    cache = scheduler.kv_memory.cache
    num_published = 4 * sum(1 for _ in cache.cached_prefixes())
    return (
        f"the KV of {request.num_computed_tokens} positions is of verified tokens; "
        f"published: {num_published} positions"
    )


def beyond_the_last_token() -> str:
    scheduler = make_scheduler()
    request = begin(scheduler, guesses=[8, 9, 10, 11], max_tokens=3)
    plan = scheduler.schedule()
    end = plan.start_positions[0] + plan.num_scheduled_tokens["r"]
    return f"the request can have {request.max_num_tokens} tokens; the step writes up to {end}"


def last_steps_guesses() -> str:
    from scheduler_interface import StepOutput

    scheduler, fed = make_scheduler(), []
    begin(scheduler, guesses=[50, 51])
    for token in (8, 9):
        plan = scheduler.schedule()
        fed.append(plan.scheduled_draft_token_ids.get("r", []))
        scheduler.update_from_output(plan, StepOutput({"r": [token]}))
    return f"draft tokens in the model's input, step by step: {fed}"
