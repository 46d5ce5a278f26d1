"""Verification draws from the target's distribution: its random numbers are independent."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from common.requests.input_processor import DrawnSeedParams
from common.sampling.counter_random import DRAFT_STREAM, TOKEN_STREAM, uniforms
from common.sampling.sampler import Sampler
from common.sampling.sampling_columns import SamplingBatch
from common.sampling.speculative_sampler import ConstrainedDrafts, SpeculativeSampler
from common.sampling.test_sampler import RULED, naive_probs
from common.tests.sampling_cases import ListedTokens, make_sampling, sampled
from request import SamplingParams


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
    rows = np.repeat(one.rows, 2)
    outputs = np.tile([0, 1], n)
    drafts_of = {name: [int(draft)] for name, draft in zip(one.req_ids, drafts)}
    batch = SamplingBatch(one.columns, names, rows, outputs, one.state, drafts_of)
    of_two = torch.stack([q, torch.full_like(q, torch.nan)])  # the scheduler kept one of two drafts
    sampler = SpeculativeSampler(3, lambda _: of_two)
    output = sampled(sampler, p.log().repeat(2 * n, 1), batch)
    tokens = [output.token_ids[name] for name in one.req_ids]
    first_counts = np.bincount([ids[0] for ids in tokens], minlength=3)
    assert chisquare(first_counts, p.numpy() * n).pvalue > 1e-4, first_counts / n
    num_accepted = sum(len(ids) == 2 for ids in tokens)
    assert abs(num_accepted / n - 0.6) < 0.03  # sum of min(p, q)
    counts = np.bincount([ids[1] for ids in tokens if len(ids) == 2], minlength=3)
    assert chisquare(counts, p.numpy() * num_accepted).pvalue > 1e-4, counts / num_accepted


@pytest.mark.parametrize(
    ("params", "stream"),
    [(DrawnSeedParams(seed=5), DRAFT_STREAM), (SamplingParams(seed=5), TOKEN_STREAM)],
)
def test_each_draft_of_a_run_has_the_random_number_of_its_position(
    params: SamplingParams, stream: int
) -> None:
    """With a user's seed, the number that draws the token there."""
    sampling = make_sampling([params], outputs=[[7, 8]])
    device = torch.device("cpu")
    state = sampling.state
    state.row_of = {"r0": 0}  # type: ignore[attr-defined]
    state.sampling = sampling.columns  # type: ignore[attr-defined]
    drafts = ConstrainedDrafts(Sampler(11), state)  # type: ignore[arg-type]
    rounds = [[SimpleNamespace(req_id="r0")]] * 3
    drafts.prepare(rounds, device)  # type: ignore[arg-type]
    found = [float(args.u) for args in drafts._rounds]
    assert found == uniforms(torch.tensor([5] * 3), torch.tensor([2, 3, 4]), stream).tolist()


@pytest.mark.parametrize("has_probs", [False, True], ids=["look-up", "draft model"])
def test_verified_tokens_have_the_law_of_the_rules(has_probs: bool) -> None:
    """Two drafts, with any proposal: the distribution of the tokens in a row, against the one that
    follows from the order of application alone."""
    n = 8000
    vocab_size = 5
    rng = np.random.default_rng(0)
    params = DrawnSeedParams(seed=1, **RULED, repetition_penalty=1.3, top_p=0.97)
    q = np.array([0.3, 0.3, 0.2, 0.1, 0.1])
    drafts = rng.choice(vocab_size, (n, 2), p=q)
    raw = np.random.default_rng(1).normal(size=(3, vocab_size))
    every = [list(map(int, ids)) for ids in drafts]
    one = make_sampling([params] * n, seeds=range(1, n + 1), outputs=[[0]] * n)
    state = ListedTokens.of([[0]] * n, [[0]] * n, every)
    rows = np.repeat(one.rows, 3)
    num_drafts = np.tile([1, 2, 3], n)
    names = [name for name in one.req_ids for _ in range(3)]
    draft_token_ids = dict(zip(one.req_ids, every))
    batch = SamplingBatch(one.columns, names, rows, num_drafts, state, draft_token_ids)
    probs = torch.from_numpy(q).repeat(2, 1) if has_probs else None
    verify = SpeculativeSampler(vocab_size, lambda _: probs)
    output = sampled(verify, torch.from_numpy(raw).repeat(n, 1), batch)
    tokens, lens = Counter[tuple](), Counter[tuple]()
    for name in one.req_ids:
        ids = output.token_ids[name]
        for end in range(1, len(ids) + 1):
            tokens[tuple(ids[:end])] += 1
            lens[tuple(ids[: end - 1])] += 1
    assert max(map(len, tokens)) == 3
    for before, total in lens.items():
        expected = np.array(naive_probs(raw[len(before)].tolist(), params, [0], [0, *before]))
        found = np.array([tokens[(*before, t)] for t in range(vocab_size)])
        assert found[expected == 0].sum() == 0, before
        possible = expected > 0
        if total > 200 and possible.sum() > 1:
            share = expected[possible] * total
            assert chisquare(found[possible], share).pvalue > 1e-6, (before, found, share)
