"""Drawing with one number, against fractions, which have no rounding."""

from __future__ import annotations

from fractions import Fraction
from itertools import accumulate

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from inverse_cdf import draw

LAST = 1 - 2.0**-53  # the last number below 1
NAN = float("nan")


def draw_one(weights: list[float], u: float, dtype: torch.dtype = torch.float64) -> tuple:
    numbers = torch.tensor([u], dtype=torch.float64)
    index, within = draw(torch.tensor([weights], dtype=dtype), numbers)
    assert index.shape == within.shape == (1,)
    assert index.dtype == torch.int64 and within.dtype == torch.float64
    return int(index), float(within)


def draw_exactly(weights: list[float], u: float) -> tuple[int, Fraction]:
    """The definition."""
    ends = list(accumulate(map(Fraction, weights)))
    point = Fraction(u) * ends[-1]
    index = next(i for i, end in enumerate(ends) if point < end)
    length = Fraction(weights[index])
    return index, (point - ends[index] + length) / length


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


@pytest.mark.net
@settings(deadline=None, max_examples=120, derandomize=True)
@given(weights=dyadic_weights, u=dyadic_numbers, dtype=st.sampled_from([torch.float32, None]))
def test_token_and_place_are_exact_where_fractions_are(weights, u, dtype):
    """The total is anything up to 2, and `within` right to the last bit: so it is uniform."""
    expected, place = draw_exactly(weights, u)
    assert draw_one(weights, u, dtype or torch.float64) == (expected, float(place))


@pytest.mark.parametrize("row", [[0.0] * 5, [0.5, NAN, 0.25, 0.25, 0.0], [2.0**-60] * 5])
@pytest.mark.parametrize("u", [0.0, 0.5, LAST])
def test_a_row_that_says_nothing_gives_some_index_and_spares_the_others(row, u):
    good = [0.25, 0.25, 0.0, 0.5, 0.0]
    numbers = torch.tensor([0.5, u, 0.25], dtype=torch.float64)
    index, within = draw(torch.tensor([good, row, good], dtype=torch.float64), numbers)
    assert 0 <= int(index[1]) < 5
    assert index[[0, 2]].tolist() == [3, 1] and within[[0, 2]].tolist() == [0.0, 0.0]
    assert draw(torch.zeros(0, 5), numbers[:0])[0].shape == (0,)
