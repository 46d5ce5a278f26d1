"""The bulk index says what the dictionary of `proposers.py` says, which is its specification."""

from __future__ import annotations

import random
import tracemalloc

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from input_batch import RunnerRequest
from ngram_index import BulkNgramProposer, NgramIndex
from proposers import NgramProposer, ProposerInput
from request import SamplingParams

LARGEST_ID = 2**31 - 1


def first_places(tokens: list[int], max_ngram: int) -> dict[tuple[int, ...], int]:
    """One dictionary for all sizes, filled as `NgramProposer` does."""
    first: dict[tuple[int, ...], int] = {}
    for next_token in range(1, len(tokens)):
        for n in range(1, min(max_ngram, next_token) + 1):
            first.setdefault(tuple(tokens[next_token - n : next_token]), next_token)
    return first


def longest(first: dict[tuple[int, ...], int], text: list[int], max_ngram: int) -> tuple[int, int]:
    for n in range(min(max_ngram, len(text)), 0, -1):
        if tuple(text[-n:]) in first:
            return n, first[tuple(text[-n:])]
    return 0, 0


few_ids = st.integers(1, 5).flatmap(lambda max_id: st.lists(st.integers(0, max_id), min_size=2))
any_ids = st.lists(st.sampled_from([0, 1, 2, 151_935, LARGEST_ID]), min_size=2)


@pytest.mark.net
@settings(deadline=None, max_examples=200)
@given(
    tokens=few_ids | any_ids,
    max_ngram=st.integers(1, 6),
    queries=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=8), max_size=5),
)
def test_it_finds_the_same_as_the_dictionary(tokens, max_ngram, queries):
    """Trap 44. Every beginning of the text itself is asked for, and other texts."""
    index, first = NgramIndex(tokens, max_ngram), first_places(tokens, max_ngram)
    for text in [tokens[:end] for end in range(1, len(tokens) + 1)] + queries:
        assert index.find(text) == longest(first, text, max_ngram), text


def test_a_long_prompt_is_indexed_in_bulk_and_outputs_token_by_token():
    """The same drafts at every step as without it, with little in the dictionaries."""
    rng = random.Random(3)
    prompt = [rng.randrange(12) for _ in range(2000)]
    bulk, plain = BulkNgramProposer(4), NgramProposer(4)
    assert bulk.num_lookahead_tokens == plain.num_lookahead_tokens == 0
    request = RunnerRequest("a", SamplingParams(), prompt, [])
    for _ in range(300):
        inputs = [ProposerInput(request, 0, request.num_tokens - 1)]
        assert bulk.propose(inputs, [4]) == plain.propose(inputs, [4])
        request.output_token_ids.append(rng.randrange(12))
    history = bulk._histories["a"]
    assert history.prompt is not None and not hasattr(plain._histories["a"], "prompt")
    assert sum(map(len, history.first.values())) <= 3 * 300


@pytest.mark.parametrize("num_kinds", [50, 151_936])
def test_it_takes_at_most_60_bytes_a_token(num_kinds):
    """12 for each of 4 levels, and 8 for each different token."""
    rng = random.Random(0)
    tokens = [rng.randrange(num_kinds) for _ in range(20_000)]
    NgramIndex(tokens[:100], 4)  # what is imported only once
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        index = NgramIndex(tokens, 4)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 12 < (after - before) / len(tokens) < 60, index
