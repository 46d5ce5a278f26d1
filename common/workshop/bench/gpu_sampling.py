"""Kernels of verification and of sampling, for the GPU report. What they give is that of the
PyTorch version, to the bit.

rejection     drafts of a model, verified by chapter 5's rule; and looked-up ones
matching      drafts against what was sampled
penalties     repetition, presence and frequency
temperature   the whole vocabulary: what the workload of the report asks for
top-k         the highest 50, with temperature and min-p, in their order of id
top-p         of the whole vocabulary; PyTorch's softmax in it
draw          one token of each row
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from common.kernels.sampler_kernel import KERNELS
from common.sampling.distributions import IN_TORCH, Rules
from common.workshop.bench.gpu_arithmetic import Cost, moved
from common.workshop.bench.gpu_inputs import Call, Lab
from rejection_sampler import rejection_sample, rejection_sampling_batched
from rejection_sampler_triton import rejection_sample_triton, rejection_sampling_batched_triton

TEMPERATURE, TOP_P, MIN_P, TOP_K, MOST = 0.6, 0.9, 1e-3, 50, 64
Calls = dict[str, Call]


def named(tensors: Iterable[torch.Tensor], what: Sequence[str]) -> dict[str, torch.Tensor]:
    return dict(zip(what, tensors))


# -- verification


def rows_of(lab: Lab, num_requests: int) -> tuple[int, int, torch.Tensor]:
    """Drafts of all, the most of one, and where each request's rows begin. Where kernels are only
    compared, requests have different numbers of drafts."""
    most, is_ragged = lab.sizes.num_drafts, num_requests in lab.sizes.checked_rows
    drafts = [i % (most + 1) if is_ragged else most for i in range(num_requests)]
    starts = torch.tensor([0, *(n + 1 for n in drafts)], device=lab.device).cumsum(0)
    return sum(drafts), max(drafts), starts


def make_rejection(lab: Lab, num_requests: int, dtype: torch.dtype) -> Calls:
    """Guesses that are right about as often as not: p is q and something else, half and half."""
    num_drafts, most, starts = rows_of(lab, num_requests)
    vocab_size = lab.sizes.model.vocab_size
    draft_probs = (2 * lab.normal(num_drafts, vocab_size, dtype=dtype)).softmax(-1)
    probs = (2 * lab.normal(num_drafts + num_requests, vocab_size, dtype=dtype)).softmax(-1)
    is_bonus = torch.zeros(len(probs), dtype=torch.bool, device=lab.device)
    is_bonus[starts[1:] - 1] = True
    probs[~is_bonus] = (probs[~is_bonus] + draft_probs) / 2
    drafts = torch.multinomial(draft_probs, 1, generator=lab.generator)[:, 0]
    numbers = lab.uniform(num_drafts), lab.uniform(len(probs))

    def work(q: torch.Tensor | None) -> Call:
        arguments = probs, drafts, q, starts, most, *numbers

        def call(verify: Callable[..., Any] = rejection_sample_triton) -> list[torch.Tensor]:
            found = verify(*arguments)
            return [found.token_ids, found.num_sampled]

        # A row of p each, one of q where a draft is rejected; of each draft its id, p, q, number.
        token_ids, num_sampled = call()
        num_rejecting = int((num_sampled <= starts.diff() - 1).sum())
        rows = (num_requests + (num_rejecting if q is not None else 0)) * vocab_size
        each = moved(drafts, numbers[0], numbers[1][:num_requests], starts, num_sampled, token_ids)
        cost = Cost(each.num_bytes + (rows + 2 * num_drafts) * dtype.itemsize)
        return Call(call, cost, lambda: named(call(rejection_sample), ("tokens", "how many")))

    return {"rejection": work(draft_probs), "rejection: look-ups": work(None)}


def make_matching(lab: Lab, num_requests: int, dtype: torch.dtype) -> Calls:
    """Of three tokens, so that runs of some length are accepted."""
    num_drafts, most, starts = rows_of(lab, num_requests)
    sampled, drafts = lab.integers(3, num_drafts + num_requests), lab.integers(3, num_drafts)
    arguments = sampled, drafts, starts, most
    # Written are the tokens and how many of them.
    cost = moved(sampled, drafts, starts, sampled, starts[1:])
    return {
        "matching": Call(
            lambda: rejection_sampling_batched_triton(*arguments),
            cost,
            lambda: named(rejection_sampling_batched(*arguments), ("tokens", "how many")),
        )
    }


# -- sampling


def sampling_inputs(lab: Lab, num_rows: int) -> dict[str, tuple[Any, ...]]:
    """Arguments by the name of a result. Logits with ties, as those of bfloat16 have."""
    vocab_size = lab.sizes.model.vocab_size
    logits = (3 * lab.normal(num_rows, vocab_size, dtype=torch.bfloat16)).float()

    def every_row(value: float, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        return torch.full((num_rows,), value, dtype=dtype, device=logits.device)

    temperature, top_k = every_row(TEMPERATURE), every_row(TOP_K, torch.int64)
    highest = logits.amax(dim=-1)
    counts = lab.integers(3, num_rows, vocab_size).int()
    penalties = every_row(1.3), every_row(0.2), every_row(0.1)
    most = min(MOST, vocab_size - 1)
    shaped, _ = IN_TORCH.shape(logits, highest, temperature, None, None, vocab_size, False)
    return {
        "penalties": (logits, counts > 0, counts, *penalties),
        "temperature": (logits, highest, temperature, None, None, vocab_size, False),
        "top-k": (logits, highest, temperature, top_k, every_row(MIN_P), most, True),
        "top-p": (shaped, every_row(TOP_P)),
        "draw": (shaped.softmax(-1), lab.uniform(num_rows)),
    }


def computed(rules: Rules, name: str, arguments: tuple[Any, ...]) -> list[torch.Tensor]:
    """What the rules make of them. Top-p writes into what it is given."""
    if name == "penalties":
        return [rules.apply_penalties(*arguments)]
    if name in ("temperature", "top-k"):
        return [tensor for tensor in rules.shape(*arguments) if tensor is not None]
    if name == "top-p":
        return [rules.apply_top_p(arguments[0].clone(), arguments[1])]
    return [rules.sample_from_probs(*arguments)]


def make_sampling(lab: Lab, num_rows: int, dtype: torch.dtype) -> Calls:
    inputs = sampling_inputs(lab, num_rows)
    numbers = num_rows * lab.sizes.model.vocab_size
    costs = {
        "penalties": Cost(numbers * (4 + 1 + 4 + 4)),  # logits, known, counts; logits
        "temperature": Cost(numbers * (4 + 4)),
        "top-k": Cost(numbers * 4 + num_rows * inputs["top-k"][5] * (8 + 8)),
        "top-p": Cost(numbers * (4 + 4)),
        "draw": Cost(numbers * 4 + num_rows * 16),
    }

    def work(name: str, arguments: tuple[Any, ...]) -> Call:
        call = partial(computed, KERNELS, name, arguments)
        if name == "top-p":  # called again it cuts off more, in as many passes
            call = lambda: [KERNELS.apply_top_p(*arguments)]  # noqa: E731
        right = partial(computed, IN_TORCH, name, arguments)
        return Call(call, costs[name], lambda: named(right(), ("numbers", "ids")))

    return {f"sampling: {name}": work(name, arguments) for name, arguments in inputs.items()}
