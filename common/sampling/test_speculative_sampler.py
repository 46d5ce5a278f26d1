"""Verification draws from the target's distribution: its random numbers are independent."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch
from scipy.stats import chisquare

from common.requests.input_processor import DrawnSeedParams
from common.sampling.sampler import Sampler
from common.sampling.sampling_columns import SamplingBatch
from common.sampling.speculative_sampler import SpeculativeSampler
from common.tests.sampling_cases import make_sampling


def test_the_replacement_of_a_rejected_draft_does_not_depend_on_the_rejecting_number() -> None:
    """The remainder p - q has two tokens. Whether a draft is accepted, and which token replaces it,
    are two questions: with one random number for both, a rejection, which takes a high one, favours
    the last."""
    p = torch.tensor([0.2, 0.4, 0.4], dtype=torch.float64)
    q = torch.tensor([0.6, 0.2, 0.2], dtype=torch.float64)
    n = 6000
    drafts = np.random.default_rng(0).choice(3, n, p=[0.6, 0.2, 0.2])
    one = make_sampling([DrawnSeedParams(seed=1)] * n, seeds=range(1, n + 1))
    names = [name for name in one.req_ids for _ in range(2)]
    rows, outputs = np.repeat(one.rows, 2), np.tile([0, 1], n)
    draft_token_ids = {name: [int(draft)] for name, draft in zip(one.req_ids, drafts)}
    batch = SamplingBatch(one.columns, names, rows, outputs, one.state, draft_token_ids)
    sampler = SpeculativeSampler(Sampler(3), lambda _: q[None])
    output = sampler.sample(p.log().repeat(2 * n, 1), SimpleNamespace(sampling=batch))
    tokens = [output.token_ids[name] for name in one.req_ids]
    first_counts = np.bincount([ids[0] for ids in tokens], minlength=3)
    assert chisquare(first_counts, p.numpy() * n).pvalue > 1e-4, first_counts / n
    num_accepted = sum(len(ids) == 2 for ids in tokens)
    assert abs(num_accepted / n - 0.6) < 0.03  # sum of min(p, q)
    second_counts = np.bincount([ids[1] for ids in tokens if len(ids) == 2], minlength=3)
    assert chisquare(second_counts, p.numpy() * num_accepted).pvalue > 1e-4, (
        second_counts / num_accepted
    )
