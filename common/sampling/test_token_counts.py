"""Counts of histories that are sent to the device."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from common.sampling.runner_plugin import UploadBuffer
from common.sampling.sampling_columns import SamplingBatch, SamplingColumns
from common.sampling.token_counts import count, prepare_histories
from common.tests.sampling_cases import ListedTokens

VOCAB = 11


def recount(token_ids: list[int]) -> list[int]:
    return [sum(t == token for t in token_ids) for token in range(VOCAB)]


@pytest.mark.parametrize("seed", range(20))
def test_counts_are_those_of_the_lists(seed: int) -> None:
    """With a row for each draft, or with last tokens that are still on the device."""
    rng = random.Random(seed)

    def tokens(num_max: int) -> list[int]:
        return [rng.randrange(VOCAB + 2) for _ in range(rng.randint(0, num_max))]  # 2 are padding

    num_requests = rng.randint(1, 5)
    prompts = [[0, *tokens(8)] for _ in range(num_requests)]
    outputs = [tokens(6) for _ in range(num_requests)]
    drafts = [tokens(3) if seed % 2 else [] for _ in range(num_requests)]
    state = ListedTokens.of(prompts, outputs, drafts)
    if not seed % 2:
        state.take_to_device(i for i, ids in enumerate(outputs) if ids and ids[-1] < VOCAB)
    chosen = rng.sample(range(num_requests), rng.randint(1, num_requests))
    found = [(row, n) for row in chosen for n in range(len(drafts[row]) + 1)]
    batch = SamplingBatch(
        SamplingColumns(num_requests),
        [str(row) for row, _ in found],
        np.array([row for row, _ in found]),
        np.array([len(outputs[row]) + n for row, n in found]),
        state,
        {str(row): ids for row, ids in enumerate(drafts) if ids},
    )
    upload = UploadBuffer(torch.device("cpu"))
    histories = prepare_histories(batch, VOCAB)
    upload.fill(histories)
    upload.send()
    is_known, output_counts = count(histories)
    for i, (row, n) in enumerate(found):
        output = outputs[row] + drafts[row][:n]
        assert output_counts[i].tolist() == recount(output)
        assert is_known[i].tolist() == [n > 0 for n in recount(prompts[row] + output)]
