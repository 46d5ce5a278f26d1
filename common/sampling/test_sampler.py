"""The sampler against exact probabilities, against transformers' logits processors, and against
itself in other company."""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from itertools import accumulate, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.sampling.counter_random import sample_from_probs, uniforms
from common.sampling.sampler import Sampler
from common.sampling.sampling_columns import SamplingBatch
from common.sampling.sampling_constraints import (
    apply_top_k,
    apply_top_p,
    ranked_ids,
)
from common.tests.sampling_cases import (
    GREEDY,
    RECIPES,
    ListedTokens,
    make_sampling,
    sampled,
    sampling_probs,
)
from request import _RANGES, SamplingParams
from scheduler_interface import NO_FINITE_LOGITS

NEG_INF = float("-inf")
MIXED = list(RECIPES.values())


def make_batch(
    params: list[SamplingParams], seeds: list[int] | None = None, **lists
) -> SamplingBatch:
    return make_sampling(params, seeds=seeds, **lists)


def sample(logits: torch.Tensor, batch: SamplingBatch, vocab_size: int | None = None) -> list:
    tokens = sampled(Sampler(vocab_size or logits.shape[1]), logits, batch).token_ids
    return [tokens[r][0] for r in batch.req_ids]


def naive_probs(
    logits: list[float],
    p: SamplingParams,
    prompt: list[int],
    output: list[int],
    eos: tuple[int, ...] = (),
) -> list[float]:
    """The specification in plain Python, one token at a time. Shares no code with the sampler."""
    x = list(logits)
    for t in range(len(x)):
        if p.allowed_token_ids is not None and t not in p.allowed_token_ids:
            x[t] = NEG_INF
        if any([*output, t][-len(word) :] == word for word in p.bad_words or ()):
            x[t] = NEG_INF
        if len(output) < p.min_tokens and (t in eos or t in p.stop_token_ids):
            x[t] = NEG_INF
        x[t] += (p.logit_bias or {}).get(t, 0.0)
        if t in prompt or t in output:
            x[t] = x[t] / p.repetition_penalty if x[t] > 0 else x[t] * p.repetition_penalty
        x[t] -= p.frequency_penalty * output.count(t) + p.presence_penalty * (t in output)
    order = sorted(range(len(x)), key=lambda t: (-x[t], t))
    if p.temperature == 0:
        return [float(t == order[0]) for t in range(len(x))]
    weights = [math.exp((v - x[order[0]]) / p.temperature) for v in x]
    kept = [t for t in order if weights[t] >= p.min_p]  # the highest weight is 1
    kept = kept[: p.top_k] if p.top_k else kept
    total = sum(weights[t] for t in kept)
    mass = 0.0
    nucleus = []
    for t in kept:
        if mass < p.top_p:
            nucleus.append(t)
        mass += weights[t] / total
    total = sum(weights[t] for t in nucleus)
    return [weights[t] / total if t in nucleus else 0.0 for t in range(len(x))]


@pytest.mark.net
@pytest.mark.parametrize("seed", range(3))
def test_probabilities_equal_a_plain_python_specification(seed: int) -> None:
    """And a token is drawn from them by the number of its seed and position. Of equal logits the
    lower ids are kept and win."""
    rng = random.Random(seed)
    for vocab_size in (5, 12, 300):
        logits = torch.tensor(
            [[rng.gauss(0, 2) for _ in range(vocab_size)] for _ in MIXED], dtype=torch.float64
        )
        logits = logits.round() if seed == 1 else logits
        prompts = [[rng.randrange(vocab_size) for _ in range(4)] for _ in MIXED]
        outputs = [[rng.randrange(vocab_size) for _ in range(rng.randrange(8))] for _ in MIXED]
        seeds = [rng.getrandbits(60) for _ in MIXED]
        histories = {"prompts": prompts, "outputs": outputs, "eos": [(1, 3)] * len(MIXED)}
        batch = make_batch(MIXED, seeds, **histories)
        found = sampling_probs(logits, batch)
        tokens = sample(logits, batch)
        u = uniforms(torch.tensor(seeds), torch.tensor(list(map(len, outputs))))
        for i, params in enumerate(MIXED):
            expected = naive_probs(logits[i].tolist(), params, prompts[i], outputs[i], (1, 3))
            assert found[i].tolist() == pytest.approx(expected, abs=1e-12), (seed, params)
            assert tokens[i] == bisect_right(list(accumulate(expected)), float(u[i]))


def test_top_p_keeps_the_token_that_reaches_it_and_no_more() -> None:
    """Trap 43: a boundary token dropped."""
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]], dtype=torch.float64).log()
    cases = [(0.1, 1), (0.5, 1), (0.500001, 2), (0.75, 2), (0.76, 3), (0.876, 4), (1, 4)]
    for p, num_kept in cases:
        kept = apply_top_p(logits, torch.tensor([p], dtype=torch.float64)) > NEG_INF
        assert kept[0].tolist() == [i < num_kept for i in range(4)], p


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_large_vocabulary_is_ranked_as_if_all_were_compared(dtype: torch.dtype) -> None:
    """Most of it is looked at for the maxima of its blocks only. bfloat16 logits are full of ties,
    within blocks and across: of those, exactly k are left, the lower ids."""
    torch.manual_seed(6)
    for vocab_size in (64 * 7, 6000, 30_001):
        logits = torch.randn(6, vocab_size).bfloat16().to(dtype) * 3
        logits[1] = logits[1].round() * 0.0  # zeros of both signs are equal
        logits[2, 50:] = logits[3, :-3] = NEG_INF
        order = logits.sort(dim=-1, descending=True, stable=True).indices
        for k in (1, 3, 40, 200):
            assert torch.equal(ranked_ids(logits, k), order[:, :k]), (vocab_size, k)
            mask = torch.zeros_like(logits, dtype=torch.bool).scatter(1, order[:, :k], True)
            masked = logits.where(mask, NEG_INF)
            assert torch.equal(apply_top_k(logits, torch.full((6,), k), max_top_k=k), masked)


@pytest.mark.net
@pytest.mark.parametrize("seed", range(4))
def test_a_row_is_sampled_alike_alone_and_in_any_company(seed: int) -> None:
    """Trap 42: the seed alone decides. And the distribution is equal to the last bit, whatever
    its batch mates ask for: `batch_invariant` rests on it."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    n = 60
    vocab_size = rng.choice([97, 300, 5000])
    logits = 3 * torch.randn(n, vocab_size, generator=generator, dtype=torch.float64)
    # A top-k also beside the power of two above it.
    choices = dict(top_k=[0, 1, 3, 4, 17, 32, 100, 256, 300], top_p=[1, 0.9], min_p=[0, 0.01])
    params = [rng.choice(MIXED) for _ in range(n // 2)]
    for _ in range(n // 2):
        picked = {name: rng.choice(values) for name, values in choices.items()}
        temperature = rng.choice([0, 0.7, 1.3])
        params.append(SamplingParams(temperature=temperature, **picked, logprobs=2))
    seeds = [rng.getrandbits(60) for _ in range(n)]
    prompts = [[rng.randrange(vocab_size) for _ in range(rng.randrange(1, 9))] for _ in range(n)]
    outputs = [[rng.randrange(vocab_size) for _ in range(rng.randrange(9))] for _ in range(n)]

    def run(rows: list[int]) -> dict[int, tuple]:
        columns = params, seeds, prompts, outputs
        params_, seeds_, *lists = ([column[i] for i in rows] for column in columns)
        batch = make_batch(params_, seeds_, prompts=lists[0], outputs=lists[1])
        output = sampled(Sampler(vocab_size), logits[rows], batch)
        probs = sampling_probs(logits[rows], batch).tolist()
        names = [f"r{i}" for i in range(len(rows))]
        entries = [(output.token_ids[name], output.logprobs.get(name)) for name in names]
        return dict(zip(rows, zip(entries, probs), strict=True))

    together = run(list(range(n)))
    for rows in [[i] for i in range(n)] + [rng.sample(range(n), size) for size in (2, 7, 31, 60)]:
        assert run(rows) == {i: together[i] for i in rows}, (seed, rows)


def test_uniforms_are_splitmix64_in_unbounded_integers() -> None:
    """The hash in plain Python: what wraps and shifts in int64 must be the 64-bit arithmetic."""
    mask = 2**64 - 1

    def mix(x: int) -> int:
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
        return x ^ (x >> 31)

    golden = 0x9E3779B97F4A7C15
    for seed in (0, 1, -1, 2**63 - 1, -(2**63), 123456789):
        for position in (0, 1, 77, 10**6):
            for stream in (0, 3):
                state = mix((seed + golden) & mask)
                state = mix((state + (position + 1) * golden) & mask)
                state = mix(state ^ mix(stream + 1))
                found = uniforms(torch.tensor([seed]), torch.tensor([position]), stream)
                assert found.item() == (state >> 11) / 2**53, (seed, position, stream)


@pytest.mark.parametrize("vocab_size", [1, 2, 5, 127, 128, 129, 1000])
def test_impossible_tokens_are_never_drawn_at_any_edge(vocab_size: int) -> None:
    """Trap 43: intervals are closed left, open right, and those of impossible tokens are empty."""
    torch.manual_seed(vocab_size)
    edges = [0.0, 2.0**-53, 0.25, 0.5, 0.75, 1 - 2.0**-53]
    u = torch.tensor(edges, dtype=torch.float64)
    for dtype in (torch.float32, torch.float64):
        for alive in range(min(vocab_size, 140)):
            probs = torch.zeros(len(edges), vocab_size, dtype=dtype)
            probs[:, alive] = 1.0
            assert sample_from_probs(probs, u).tolist() == [alive] * len(edges)
        probs = torch.rand(len(edges), vocab_size, dtype=dtype)
        probs[:, torch.rand(vocab_size) < 0.7] = 0
        probs[:, vocab_size // 2] = 0.3
        probs /= probs.sum(-1, keepdim=True)
        drawn = sample_from_probs(probs, u)
        assert (probs.gather(1, drawn[:, None]) > 0).all()
        alive = probs[0].nonzero()[:, 0]
        assert drawn[0] == alive[0], "u = 0 draws the first possible token"
        assert drawn[-1] == alive[-1], "u -> 1 draws the last one"
    u = uniforms(torch.full((2000,), vocab_size), torch.arange(2000))
    probs = (torch.randn(vocab_size, dtype=torch.float64) * 1.5).softmax(-1)
    exact = torch.searchsorted(probs.cumsum(-1), u, right=True)
    drawn = sample_from_probs(probs.expand(2000, -1), u)
    assert torch.equal(exact, drawn), "as one cumulative sum over all blocks"


def test_padding_lanes_of_the_vocabulary_never_win() -> None:
    """Trap 43."""
    logits = torch.zeros(len(MIXED), 600)
    logits[:, 500:] = 100.0
    outputs = [[0] * 3 for _ in MIXED]
    prompts = [[599, 3] for _ in MIXED]  # ids beyond the vocabulary do not break the penalties
    batch = make_batch(MIXED, prompts=prompts, outputs=outputs)
    assert max(sample(logits, batch, vocab_size=500)) < 500
    params = [SamplingParams(temperature=0, logprobs=5)]
    output = sampled(Sampler(500), logits[:1], make_batch(params))
    assert output.token_ids == {"r0": [0]}
    assert output.logprobs["r0"][0].logprob == pytest.approx(-math.log(500))
    assert all(t < 500 for t in output.logprobs["r0"][0].top)


def test_logprobs_are_raw_ranked_and_only_where_asked() -> None:
    torch.manual_seed(1)
    logits = torch.randn(4, 50)
    logits[2, :] = 0.0
    penalized = SamplingParams(temperature=0, repetition_penalty=5.0, logprobs=3)
    params = [penalized, GREEDY, SamplingParams(logprobs=2, top_k=4), SamplingParams(logprobs=0)]
    batch = make_batch(params, prompts=[[int(logits[0].argmax())], [0], [0], [0]])
    output = sampled(Sampler(50), logits, batch)
    assert set(output.logprobs) == {"r0", "r2", "r3"}
    for i in (0, 2, 3):
        (entry,) = output.logprobs[f"r{i}"]
        row = logits[i].double().log_softmax(-1)
        token = output.token_ids[f"r{i}"][0]
        order = sorted(range(50), key=lambda t, r=row: (-r[t].item(), t))
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(row[token].item(), abs=1e-6)
        assert entry.rank == 1 + sum(row[t] > row[token] for t in range(50))
        assert list(entry.top) == order[: params[i].logprobs]
        assert entry.top == pytest.approx({t: row[t].item() for t in entry.top}, abs=1e-6)
    assert output.logprobs["r0"][0].rank == 2, "the penalty changed the choice, not the logprobs"


@pytest.mark.parametrize("params", MIXED, ids=RECIPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), None])
def test_a_row_without_a_finite_maximum_is_an_error_of_its_request_alone(
    params: SamplingParams, bad: float | None
) -> None:
    logits = torch.zeros(3, 600)
    logits[1, 4 if bad is not None else slice(None)] = NEG_INF if bad is None else bad
    output = sampled(Sampler(600), logits, make_batch([params] * 3))
    assert output.errors == {"r1": NO_FINITE_LOGITS}
    clean = sampled(Sampler(600), torch.zeros(3, 600), make_batch([params] * 3))
    assert output.token_ids == {r: clean.token_ids[r] for r in ("r0", "r2")}
    assert output.logprobs == {r: clean.logprobs[r] for r in output.logprobs}
    probs = sampling_probs(logits, make_batch([params] * 3))
    assert probs.isnan().all(1).tolist() == probs.isnan().any(1).tolist() == [False, True, False]


def numbers(name: str) -> st.SearchStrategy[float]:
    """The default, the ends of the interval, and all between."""
    _, low, high = _RANGES[name]
    ends = st.sampled_from([SamplingParams.__dataclass_fields__[name].default, low, high])
    return ends | st.floats(low, high)


@pytest.mark.net
@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    drawn=st.fixed_dictionaries(
        {name: numbers(name) for name, (_, low, _) in _RANGES.items() if isinstance(low, float)}
    ),
    top_k=st.integers(0, 40),
    seed=st.integers(-(2**63), 2**63 - 1),
    data=st.data(),
)
def test_extreme_parameters_draw_a_possible_token(
    drawn: dict[str, float], top_k: int, seed: int, data: st.DataObject
) -> None:
    """Traps 43, 45, 46: no NaN, no division by zero, temperature 0 is greedy."""
    values = st.one_of(st.floats(-1e4, 1e4, width=32), st.sampled_from([NEG_INF, 0.0]))
    logits = data.draw(st.lists(values, min_size=1, max_size=30).filter(lambda v: max(v) > NEG_INF))
    params = SamplingParams(**drawn, top_k=top_k, seed=seed, logprobs=2)
    batch = make_batch([params], outputs=[[0, 0]])
    row = torch.tensor([logits])
    (token,) = sample(row, batch)
    assert row.tolist() == [logits], "the caller's logits stay as they are"
    probs = sampling_probs(row, batch)[0]
    assert probs.sum().item() == pytest.approx(1.0, abs=1e-5)
    assert probs[token] > 0
    assert logits[token] > NEG_INF
    assert (probs > 0).sum() <= (1 if params.is_greedy else top_k or len(logits))


# -- token rules

RULED = dict(
    allowed_token_ids=[0, 1, 2, 3], bad_words=[[1, 3], [0, 0, 2], [2, 1]], logit_bias={1: 0.8}
)


@pytest.mark.parametrize("num_outputs", range(4))
def test_a_pending_token_ends_a_bad_word_as_a_known_one_does(num_outputs: int) -> None:
    logits = torch.randn(64, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    outputs = [list(ids) for ids in product(range(4), repeat=num_outputs)][:64]
    logits = logits[: len(outputs)]
    params = [SamplingParams(**RULED)] * len(outputs)
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
