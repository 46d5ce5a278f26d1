"""Reads and copies of a sampling step, on a fake device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from common.requests.input_processor import DrawnSeedParams
from common.sampling.sampler import Sampler
from common.sampling.sampling_columns import SamplingBatch
from common.sampling.speculative_sampler import SpeculativeSampler
from common.tests.pretend_device import pretend_device
from common.tests.sampling_cases import RECIPES, ListedTokens, as_plain, mixed_sampling, sampled
from request import SamplingParams

VOCAB = 700
KINDS = RECIPES | {"drawn seed": DrawnSeedParams(seed=1)}
BATCHES = {name: [params] for name, params in KINDS.items()} | {"mixed": list(KINDS.values())}


def make_logits(num_rows: int, dtype: torch.dtype) -> torch.Tensor:
    """With ties, and rows that say nothing."""
    torch.manual_seed(num_rows)
    logits = torch.randn(num_rows, VOCAB + 5).mul(3).to(dtype)
    logits[1::7, 4] = float("nan")  # which every recipe allows
    return logits


def drafting_batch(params: list[SamplingParams], num_requests: int) -> SamplingBatch:
    """Requests with 0 to 3 drafts, and a row for each and one more."""
    one = mixed_sampling(params, num_requests, VOCAB, seed=1)
    drafts = {f"r{i}": [7 * i % VOCAB, 3, 9][: i % 4] for i in range(num_requests) if i % 4}
    every = [drafts.get(r, []) for r in one.req_ids]
    rows = np.repeat(one.rows, [len(ids) + 1 for ids in every])
    before = [n for ids in every for n in range(len(ids) + 1)]
    tokens = ListedTokens.of([[1]] * num_requests, [[2, 2]] * num_requests, every)
    names = [one.req_ids[row] for row in rows]
    return SamplingBatch(one.columns, names, rows, 2 + np.array(before), tokens, drafts)


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("drafts", [None, "look-up", "draft model"])
def test_the_host_reads_once_and_copies_once_however_many_rows(name, drafts, monkeypatch) -> None:
    params = BATCHES[name]
    for num_requests in (24, 96):
        batch = mixed_sampling(params, num_requests, VOCAB, seed=1)
        batch = drafting_batch(params, num_requests) if drafts else batch
        logits = make_logits(len(batch.rows), torch.float32 if drafts else torch.bfloat16)
        columns = batch.columns
        with_probs = batch.drafts if drafts == "draft model" else ()
        with_probs = [r for r in with_probs if columns.is_seed_drawn[int(r[1:])]]
        probs = {r: torch.full((3, VOCAB), 1 / VOCAB) for r in with_probs}

        def sample(logits, probs, batch=batch) -> tuple:
            sampler = SpeculativeSampler(VOCAB, probs.get) if drafts else Sampler(VOCAB)
            return as_plain(sampled(sampler, logits, batch))

        expected = sample(logits, probs)
        with pretend_device(monkeypatch) as device:
            on_device = {r: device.put(q) for r, q in probs.items()}
            found = sample(device.put(logits), on_device)
            assert device.reads == 1
            assert device.uploads == (name != "greedy" or drafts is not None)
        assert found == expected
        assert found[0].keys() | found[1].keys() == set(batch.req_ids)
        assert drafts or found[1].keys() == {f"r{i}" for i in range(1, num_requests, 7)}
