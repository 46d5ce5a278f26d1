"""Chapter 5's kernels, for the GPU report: tokens have to be those of the PyTorch version."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from common.workshop.bench.gpu_arithmetic import matching_cost, rejection_cost
from common.workshop.bench.gpu_inputs import Cell, Lab, Sizes
from common.workshop.bench.gpu_work import Comparison, Makes, TimedCall
from rejection_sampler import rejection_sample, rejection_sampling_batched
from rejection_sampler_triton import rejection_sample_triton, rejection_sampling_batched_triton


def rejection_inputs(
    lab: Lab, drafts_of_each: Sequence[int], dtype: torch.dtype, is_one_hot: bool = False
) -> list[Any]:
    """Guesses that are right about as often as not: p is q and something else, half and half."""
    vocab_size, num_drafts = lab.sizes.model.vocab_size, sum(drafts_of_each)
    device, num_requests = lab.device.torch_device, len(drafts_of_each)
    cu_num_logits = torch.tensor([0, *(n + 1 for n in drafts_of_each)], device=device).cumsum(0)
    draft_probs = (2 * lab.normal(num_drafts, vocab_size, dtype=dtype)).softmax(-1)
    target_probs = (2 * lab.normal(num_drafts + num_requests, vocab_size, dtype=dtype)).softmax(-1)
    is_bonus = torch.zeros(len(target_probs), dtype=torch.bool, device=device)
    is_bonus[cu_num_logits[1:] - 1] = True
    target_probs[~is_bonus] = (target_probs[~is_bonus] + draft_probs) / 2
    drafts = torch.multinomial(draft_probs, 1, generator=lab.generator)[:, 0]
    numbers = lab.uniform(num_drafts), lab.uniform(len(target_probs))
    probs = None if is_one_hot else draft_probs
    return [target_probs, drafts, probs, cu_num_logits, max(drafts_of_each), *numbers]


def check_rejection(lab: Lab) -> Iterator[Comparison]:
    most = lab.sizes.num_drafts
    each = [i % (most + 1) for i in range(min(lab.sizes.checked_rows, 12))]
    for dtype in (torch.float32, torch.float64):
        for is_one_hot in (False, True):
            arguments = rejection_inputs(lab, each, dtype, is_one_hot)
            found, expected = rejection_sample_triton(*arguments), rejection_sample(*arguments)
            what = "look-ups" if is_one_hot else "drafts of a model"
            yield Comparison("rejection", dtype, what, found.token_ids, expected.token_ids)
            counts = found.num_sampled, expected.num_sampled
            yield Comparison("rejection", dtype, f"{what}, how many", *counts)


def rejection_works(lab: Lab, cell: Cell) -> Makes:
    each = [lab.sizes.num_drafts] * cell.num_seqs
    arguments = rejection_inputs(lab, each, torch.float32)
    num_sampled = rejection_sample_triton(*arguments).num_sampled
    num_rejecting = int((num_sampled <= lab.sizes.num_drafts).sum())
    vocab_size = lab.sizes.model.vocab_size
    cost = rejection_cost(vocab_size, 4, len(each), num_rejecting, sum(each))
    return {"rejection": TimedCall(partial(rejection_sample_triton, *arguments), cost)}


def matching_inputs(lab: Lab, drafts_of_each: Sequence[int]) -> list[Any]:
    """Of three tokens, so that runs of some length are accepted."""
    device, num_requests = lab.device.torch_device, len(drafts_of_each)
    cu_num_logits = torch.tensor([0, *(n + 1 for n in drafts_of_each)], device=device).cumsum(0)
    num_drafts = sum(drafts_of_each)
    sampled = lab.integers(3, num_drafts + num_requests)
    return [sampled, lab.integers(3, num_drafts), cu_num_logits, max(drafts_of_each)]


def check_matching(lab: Lab) -> Iterator[Comparison]:
    each = [i % (lab.sizes.num_drafts + 1) for i in range(lab.sizes.checked_rows)]
    arguments = matching_inputs(lab, each)
    results = rejection_sampling_batched_triton(*arguments), rejection_sampling_batched(*arguments)
    for what, found, expected in zip(("tokens", "how many"), *results, strict=True):
        yield Comparison("matching", torch.int64, what, found, expected)


def matching_works(lab: Lab, cell: Cell) -> Makes:
    arguments = matching_inputs(lab, [lab.sizes.num_drafts] * cell.num_seqs)
    cost = matching_cost(cell.num_seqs, cell.num_seqs * lab.sizes.num_drafts)
    return {"matching": TimedCall(partial(rejection_sampling_batched_triton, *arguments), cost)}


def request_cells(sizes: Sizes) -> list[Cell]:
    return [Cell(n) for n in sizes.num_requests]


def probs_bytes(lab: Lab, cell: Cell) -> int:
    """Of p and q, and of what softmax makes on the way."""
    rows = cell.num_seqs * (2 * lab.sizes.num_drafts + 1)
    return 3 * rows * lab.sizes.model.vocab_size * 4
