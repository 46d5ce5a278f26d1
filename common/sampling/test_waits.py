"""Reads and copies of a sampling step, on a fake device."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from common.requests.input_processor import DrawnSeedParams
from common.sampling.sampler import Sampler
from common.sampling.sampling_columns import SamplingBatch
from common.sampling.speculative_sampler import SpeculativeSampler
from common.tests.pretend_device import pretend_device
from common.tests.sampling_cases import RECIPES, ListedTokens, as_plain, mixed_sampling
from request import SamplingParams

VOCAB = 700
KINDS = RECIPES | {"drawn seed": DrawnSeedParams(seed=1)}
BATCHES = {name: [params] for name, params in KINDS.items()} | {"mixed": list(KINDS.values())}


def make_logits(num_rows: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """With ties, and rows that say nothing."""
    torch.manual_seed(num_rows)
    logits = torch.randn(num_rows, VOCAB + 5).mul(3).to(dtype)
    logits[1::7, 4] = float("nan")  # which every recipe allows
    return logits


def make_batch(params: list[SamplingParams], num_rows: int) -> SimpleNamespace:
    return SimpleNamespace(sampling=mixed_sampling(params, num_rows, VOCAB, seed=1))


@pytest.mark.parametrize("name", BATCHES)
def test_the_host_reads_once_and_copies_once_however_many_rows(name, monkeypatch) -> None:
    for num_rows in (24, 96):
        batch, sampler = make_batch(BATCHES[name], num_rows), Sampler(VOCAB)
        logits = make_logits(num_rows)
        expected = as_plain(sampler.sample(logits, batch))
        with pretend_device(monkeypatch) as device:
            found = as_plain(Sampler(VOCAB).sample(device.put(logits), batch))
            assert device.reads == 1 and device.uploads == (name != "greedy")
        assert found == expected
        assert found[1].keys() == {f"r{i}" for i in range(1, num_rows, 7)}


def drafting_batch(params: list[SamplingParams], num_requests: int) -> SimpleNamespace:
    """Requests with 0 to 3 drafts, and a row for each and one more."""
    one = make_batch(params, num_requests).sampling
    drafts = {f"r{i}": [7 * i % VOCAB, 3, 9][: i % 4] for i in range(num_requests) if i % 4}
    every = [drafts.get(r, []) for r in one.req_ids]
    rows = np.repeat(one.rows, [len(ids) + 1 for ids in every])
    before = [n for ids in every for n in range(len(ids) + 1)]
    tokens = ListedTokens.of([[1]] * num_requests, [[2, 2]] * num_requests, every)
    names = [one.req_ids[row] for row in rows]
    sampling = SamplingBatch(one.columns, names, rows, 2 + np.array(before), tokens, drafts)
    return SimpleNamespace(sampling=sampling)


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("has_probs", [False, True], ids=["look-up", "draft model"])
def test_verification_is_read_once(name: str, has_probs: bool, monkeypatch) -> None:
    for num_requests in (24, 48):
        batch = drafting_batch(BATCHES[name], num_requests)
        columns, drafts = batch.sampling.columns, batch.sampling.drafts
        logits = make_logits(len(batch.sampling.rows), torch.float32)
        with_probs = [r for r in drafts if has_probs and columns.is_seed_drawn[int(r[1:])]]
        probs = {r: torch.full((3, VOCAB), 1 / VOCAB) for r in with_probs}
        verify = SpeculativeSampler(Sampler(VOCAB), probs.get)
        expected = as_plain(verify.sample(logits, batch))
        with pretend_device(monkeypatch) as device:
            probs = {r: device.put(q) for r, q in probs.items()}
            sampler = SpeculativeSampler(Sampler(VOCAB), probs.get)
            found = as_plain(sampler.sample(device.put(logits), batch))
            assert device.reads == device.uploads == 1
        assert found == expected
        assert found[0].keys() | found[1].keys() == set(batch.sampling.req_ids)
