"""Drawing with one number, against fractions, which have no rounding."""

from __future__ import annotations

from fractions import Fraction

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from inverse_cdf import draw

LAST = 1 - 2.0**-53  # the last number below 1
SMALLEST = 2.0**-52  # a weight below it is never drawn
NAN = float("nan")


def draw_one(weights: list[float], u: float, dtype: torch.dtype = torch.float64) -> tuple:
    numbers = torch.tensor([u], dtype=torch.float64)
    index, within = draw(torch.tensor([weights], dtype=dtype), numbers)
    assert index.shape == within.shape == (1,)
    assert index.dtype == torch.int64 and within.dtype == torch.float64
    return int(index), float(within)


def interval(weights: list[float], index: int) -> tuple[Fraction, Fraction]:
    return sum(map(Fraction, weights[:index]), Fraction(0)), Fraction(weights[index])


def draw_exactly(weights: list[float], u: float) -> tuple[int, Fraction]:
    """The definition."""
    point = Fraction(u) * sum(map(Fraction, weights))
    for index in range(len(weights)):
        start, length = interval(weights, index)
        if start <= point < start + length:
            return index, (point - start) / length
    raise AssertionError("u is below 1 and some weight is above 0")


def with_some_positive(weights: list[float]) -> list[float]:
    return weights if any(weights) else [*weights[:-1], 1.0]


# Weights of 20 bits and numbers of 30: nothing has to be rounded. 0 is as likely as all others.
dyadic_weights = st.lists(
    st.one_of(st.just(0.0), st.integers(1, 2**18).map(lambda n: n / 2**20)), min_size=1, max_size=8
).map(with_some_positive)
dyadic_numbers = st.one_of(
    st.sampled_from([0.0, 0.25, 0.5, 1 - 2.0**-30]),
    st.integers(0, 2**30 - 1).map(lambda n: n / 2**30),
)


@settings(deadline=None, max_examples=120, derandomize=True)
@given(weights=dyadic_weights, u=dyadic_numbers, dtype=st.sampled_from([torch.float32, None]))
def test_token_and_place_are_exact_where_fractions_are(weights, u, dtype):
    """The total is anything up to 2, and `within` right to the last bit: so it is uniform."""
    index, within = draw_one(weights, u, dtype or torch.float64)
    expected, place = draw_exactly(weights, u)
    assert index == expected
    assert within == float(place)


@settings(deadline=None, max_examples=120, derandomize=True)
@given(
    weights=st.lists(
        st.one_of(st.sampled_from([0.0, 1e-30, 1e-20, 2**-52]), st.floats(1e-16, 1)),
        min_size=1,
        max_size=8,
    ).map(with_some_positive),
    u=st.one_of(st.sampled_from([0.0, 5e-324, 2.0**-53, 0.5, LAST]), st.floats(2.0**-60, LAST)),
    scale=st.floats(0.1, 1.5),
)
def test_any_weights_are_rounded_by_less_than_an_integer_each(weights, u, scale):
    """The point lies in the interval of the token drawn, give or take 2**-52 a weight."""
    max_weight = max(weights)
    weights = [w / max_weight for w in weights]  # some weight is more than the integers' grain
    total = float(sum(map(Fraction, weights)))
    weights = [w * (scale / total) for w in weights]
    index, within = draw_one(weights, u)
    assert 0 <= index < len(weights) and weights[index] >= SMALLEST
    assert 0 <= within < 1
    start, length = interval(weights, index)
    point = Fraction(u) * sum(map(Fraction, weights))
    slack = (len(weights) + 2) * Fraction(SMALLEST)
    assert start - slack <= point <= start + length + slack
    assert abs(start + Fraction(within) * length - point) <= 2 * slack


@pytest.mark.parametrize("total", [1.0, 0.25, 1.75, 2.0**-30])
def test_at_its_start_a_token_begins_and_at_its_end_the_next_one(total):
    """Zeros lie between, before and after. No number draws them, 0 and the last one included."""
    ends = {1: (0, 0.25), 3: (0.25, 0.5), 4: (0.5, 1)}
    weights = [w * total for w in (0, 0.25, 0, 0.25, 0.5, 0, 0)]
    for index, (start, end) in ends.items():
        assert draw_one(weights, start) == (index, 0.0)
        below = draw_one(weights, end - 2.0**-20)
        assert below[0] == index and 1 - 2.0**-17 < below[1] < 1
    assert draw_one(weights, LAST)[0] == 4


def test_the_grain_of_weights_is_an_integer():
    """One of 2**-52 is drawn, by the first integer; what is more is rounded down, less is none."""
    assert draw_one([SMALLEST, 1 - SMALLEST], 0.0) == (0, 0.0)
    assert draw_one([SMALLEST, 1 - SMALLEST], SMALLEST) == (1, 0.0)
    assert draw_one([SMALLEST / 2, 1.0], 0.0) == (1, 0.0)
    assert draw_one([SMALLEST * 1.5, 1.0], SMALLEST) == (1, 0.0), "rounded down"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_last_number_never_reaches_the_total(dtype):
    """`u * total` is rounded; the vocabulary's last lanes are padding of weight 0."""
    rng = np.random.default_rng(0)
    weights = torch.from_numpy(rng.dirichlet(np.full(50, 0.2), size=2000))
    weights *= torch.from_numpy(rng.uniform(0.5, 1.9, size=(2000, 1)))
    weights = torch.nn.functional.pad(weights, (3, 5)).to(dtype)
    for u in (LAST, 1 - 2.0**-52, 0.0):
        index, within = draw(weights, torch.full((2000,), u, dtype=torch.float64))
        assert (weights.gather(1, index[:, None]) > 0).all()
        assert ((within >= 0) & (within < 1)).all()


def test_the_order_of_the_preceding_weights_does_not_matter():
    """Sums of integers are exact: a token's interval is the same to the last bit, however the
    tokens before it are arranged, and so for a program that adds up in another order. Asked at the
    very ends of intervals, where a sum with roundings falls to one side or the other."""
    rng = np.random.default_rng(1)
    num_rows, vocab_size = 500, 200
    weights = torch.from_numpy(rng.dirichlet(np.full(vocab_size, 0.5), size=num_rows)).float()
    place = torch.from_numpy(rng.integers(vocab_size // 2, vocab_size, size=num_rows))
    exact = (weights.double() * 2.0**52).long()
    start = exact.cumsum(dim=1).gather(1, place[:, None] - 1)[:, 0]
    u = (start / exact.sum(dim=1)).clamp(max=LAST)
    before = draw(weights, u)
    order = torch.arange(vocab_size).repeat(num_rows, 1)
    for row, n in enumerate(place.tolist()):
        order[row, : n - 1] = torch.from_numpy(rng.permutation(n - 1))
    after = draw(weights.gather(1, order), u)
    near = before[0] >= place - 1  # else the numbers' grain put the point in some earlier token
    assert near.sum() > 0.9 * num_rows
    assert torch.equal(before[0][near], after[0][near])
    assert torch.equal(before[1][near], after[1][near])


@settings(deadline=None, max_examples=80, derandomize=True)
@given(weights=dyadic_weights, u=dyadic_numbers, size=st.integers(1, 4))
def test_a_block_and_then_a_token_in_it_is_the_token(weights, u, size):
    """The remaining number draws again, as `within` is used in `sample_from_probs`."""
    blocks = [weights[i : i + size] for i in range(0, len(weights), size)]
    block, left = draw_one([sum(b) for b in blocks], u)
    inside, _ = draw_one(blocks[block], left)
    expected, place = draw_exactly(weights, u)
    if min(place, 1 - place) > 1e-6:  # `left` is rounded: at an end either neighbour may come
        assert block * size + inside == expected


@pytest.mark.parametrize(
    "row", [[0.0] * 5, [NAN] * 5, [0.5, NAN, 0.25, 0.25, 0.0], [2.0**-60] * 5, [5e-324] * 5]
)
@pytest.mark.parametrize("u", [0.0, 0.5, LAST])
def test_a_row_that_says_nothing_gives_some_index_and_spares_the_others(row, u):
    good = [0.25, 0.25, 0.0, 0.5, 0.0]
    numbers = torch.tensor([0.5, u, 0.25], dtype=torch.float64)
    index, within = draw(torch.tensor([good, row, good], dtype=torch.float64), numbers)
    assert 0 <= int(index[1]) < 5
    assert index[[0, 2]].tolist() == [3, 1]
    assert within[[0, 2]].tolist() == [0.0, 0.0]


def test_rows_know_nothing_of_each_other_and_stay_as_they_are():
    rng = np.random.default_rng(2)
    weights = torch.from_numpy(rng.dirichlet(np.full(9, 0.5), size=40)).float()
    u = torch.from_numpy(rng.random(40))
    copies = weights.clone(), u.clone()
    index, within = draw(weights, u)
    assert torch.equal(weights, copies[0]) and torch.equal(u, copies[1])
    for i in range(40):
        alone = draw(weights[i : i + 1], u[i : i + 1])
        assert alone[0].item() == index[i] and alone[1].item() == within[i]
    assert draw(weights[:0], u[:0])[0].shape == (0,)
