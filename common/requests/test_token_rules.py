"""Token rules: the refused settings, and the tokens in which a bad word is searched."""

from __future__ import annotations

from collections import Counter
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from common.requests.input_processor import DrawnSeedParams
from common.requests.token_rules import token_rules_of
from common.requests.tokenizer import Tokenizer
from common.sampling.sampler import Sampler
from common.sampling.sampling_columns import SamplingBatch
from common.sampling.speculative_sampler import SpeculativeSampler
from common.sampling.test_sampler import naive_probs
from common.tests.sampling_cases import ListedTokens, make_sampling, sampling_probs
from request import SamplingParams

RULED = dict(
    allowed_token_ids=[0, 1, 2, 3], bad_words=[[1, 3], [0, 0, 2], [2, 1]], logit_bias={1: 0.8}
)


@pytest.mark.parametrize("num_outputs", range(4))
def test_a_pending_token_ends_a_bad_word_as_a_known_one_does(num_outputs: int) -> None:
    logits = torch.randn(64, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    outputs = [list(ids) for ids in product(range(4), repeat=num_outputs)][:64]
    logits, params = logits[: len(outputs)], [SamplingParams(**RULED)] * len(outputs)
    batch = make_sampling(params, prompts=[[0]] * len(outputs), outputs=outputs)
    known = sampling_probs(logits, batch)
    for row, output in enumerate(outputs):
        expected = naive_probs(logits[row].tolist(), params[row], [0], output)
        assert known[row].tolist() == pytest.approx(expected, abs=1e-12), output
    assert isinstance(batch.state, ListedTokens)
    if num_outputs:
        batch.state.take_to_device(range(0, len(outputs), 2))
    assert torch.equal(sampling_probs(logits, batch), known)


@pytest.mark.parametrize("is_pending", [False, True])
@pytest.mark.parametrize(
    "rules",
    [
        dict(bad_words=[[5], [6]]),
        dict(bad_words=[[1, 5]]),
        dict(allowed_token_ids=[0, 1, 2, 3, 4, 6]),
        dict(logit_bias={5: 50.0}),
        dict(min_tokens=9, stop_token_ids=[5]),
        dict(repetition_penalty=1.5, frequency_penalty=1.0),
    ],
    ids=lambda rules: next(iter(rules)),
)
def test_a_token_without_a_column_changes_no_other_row(rules: dict, is_pending: bool) -> None:
    """Trap 79: at `row * vocab_size + id` stands a token of the next row, or nothing."""
    raw = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    params = [SamplingParams(**rules), SamplingParams(), SamplingParams(**rules)]
    batch = make_sampling(params, prompts=[[0, 5]] * 3, outputs=[[6, 1]] * 3)
    if is_pending:
        batch.state.take_to_device(range(3))
    found = sampling_probs(raw, batch)
    plain = sampling_probs(raw, make_sampling([SamplingParams()] * 3))
    assert torch.equal(found[1], plain[1])
    if "penalty" not in next(iter(rules)):
        assert torch.equal(found, plain)


@pytest.mark.parametrize("has_probs", [False, True], ids=["look-up", "draft model"])
def test_verified_tokens_have_the_law_of_the_rules(has_probs: bool) -> None:
    """Two drafts, with any proposal. The distribution of the tokens that a request gets in a row,
    against the one that follows from the order of application alone."""
    n, vocab_size, rng = 8000, 5, np.random.default_rng(0)
    params = DrawnSeedParams(seed=1, **RULED, repetition_penalty=1.3, top_p=0.97)
    q = np.array([0.3, 0.3, 0.2, 0.1, 0.1])
    drafts = rng.choice(vocab_size, (n, 2), p=q)
    raw = np.random.default_rng(1).normal(size=(3, vocab_size))
    every = [list(map(int, ids)) for ids in drafts]
    one = make_sampling([params] * n, seeds=range(1, n + 1), outputs=[[0]] * n)
    state = ListedTokens.of([[0]] * n, [[0]] * n, every)
    rows, num_drafts = np.repeat(one.rows, 3), np.tile([1, 2, 3], n)
    names = [name for name in one.req_ids for _ in range(3)]
    draft_token_ids = dict(zip(one.req_ids, every))
    batch = SamplingBatch(one.columns, names, rows, num_drafts, state, draft_token_ids)
    probs = torch.from_numpy(q).repeat(2, 1) if has_probs else None
    verify = SpeculativeSampler(Sampler(vocab_size), lambda _: probs)
    output = verify.sample(torch.from_numpy(raw).repeat(n, 1), SimpleNamespace(sampling=batch))
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


def check_ids(name: str, ids: list) -> list[int]:
    if not all(type(t) is int and 0 <= t < 9 for t in ids):
        raise ValueError(f"{name} holds {ids!r}")
    return ids


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("allowed_token_ids", v) for v in ((), [], "12", {1: 2}, 5, [9], ["a"], [1, 2])),
        *(("logit_bias", v) for v in ([1], 3, {9: 1.0}, {1: "a"}, {1: True}, {1: 100.1})),
        *(("logit_bias", {1: v}) for v in (float("nan"), float("inf"), 10**400, None)),
        *(("bad_words", v) for v in ("word", 3, [[]], [3], [""], [" "], [[9]], ["\ud800"], ["a"])),
        *((name, np.array(5)) for name in ("allowed_token_ids", "bad_words")),
    ],
)
def test_an_invalid_rule_is_a_clear_error(field: str, value: object) -> None:
    params = SamplingParams(**({"bad_words": [[2], [1]]} | {field: value}))
    with pytest.raises(ValueError, match=f"^{field} ") as error:
        token_rules_of(params, None, 9, check_ids)
    assert "\n" not in str(error.value)


def test_a_text_is_ruled_out_with_and_without_a_space_and_without_a_prompts_prefix(
    shipped_tokenizer: Tokenizer,
) -> None:
    from tokenizers.processors import TemplateProcessing

    backend = type(shipped_tokenizer.backend).from_str(shipped_tokenizer.backend.to_str())
    backend.post_processor = TemplateProcessing(single="bos $A", special_tokens=[("bos", 0)])
    assert Tokenizer(backend).encode("self")[0] == 0
    params = SamplingParams(bad_words=["self", "  self", [3, 4]])
    own = [shipped_tokenizer.encode(text, add_special_tokens=False) for text in ("self", " self")]
    for tokenizer in (shipped_tokenizer, Tokenizer(backend)):
        rules = token_rules_of(params, tokenizer, 4096, lambda _, ids: ids)
        assert rules["bad_words"] == [*own, [3, 4]] and own[0] != own[1]
