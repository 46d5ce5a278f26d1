"""Look-ups in the history, step by step and in bulk, against a search through all of it."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from input_batch import RunnerRequest
from proposers import NgramProposer, ProposerInput
from request import SamplingParams


def make_request(tokens: list[int], request_id: str = "a") -> RunnerRequest:
    return RunnerRequest(request_id, SamplingParams(), tokens, [])


def follow(*requests: RunnerRequest) -> list[ProposerInput]:
    return [ProposerInput(request, 0, request.num_tokens - 1) for request in requests]


def propose(proposer: NgramProposer, request: RunnerRequest, num_drafts: int = 99) -> list[int]:
    drafts = proposer.propose(follow(request), [num_drafts])
    assert drafts.keys() <= {request.req_id}
    return drafts.get(request.req_id, [])


def search(tokens: list[int], num_drafts: int, max_ngram: int, min_ngram: int) -> list[int]:
    """The tokens after the first earlier occurrence of the longest suffix that has one."""
    for n in range(max_ngram, min_ngram - 1, -1):
        for start in range(len(tokens) - n):  # the suffix itself starts at len(tokens) - n
            if tokens[start : start + n] == tokens[len(tokens) - n :]:
                return tokens[start + n :][:num_drafts]
    return []


@pytest.mark.parametrize(
    ("tokens", "num_drafts", "drafts"),
    [
        ([1, 2, 3, 4, 1, 2], 4, [3, 4, 1, 2]),  # up to the end of what is known
        ([1, 2, 3, 4, 1, 2], 2, [3, 4]),
        ([1, 2, 3, 1, 2, 4, 1, 2], 1, [3]),  # the earliest
        ([7, 1, 2, 3, 9, 1, 2, 4, 7, 1, 2], 2, [3, 9]),
        ([1, 2, 8, 7, 1, 2, 9, 7, 1, 2], 1, [9]),  # the longest, though a shorter one came first
        ([1, 2, 3, 4, 5, 9, 0, 2, 3, 4, 5, 8, 2, 3, 4, 5], 1, [9]),  # no longer than max_ngram
        ([5, 5, 5], 4, [5]),  # it may overlap with itself
        ([5, 5, 5, 5, 5], 4, [5]),  # "5 5 5 5" stood here once before, and one token behind it
        ([5, 5], 4, []),  # and never matches itself
        ([1, 2, 3, 4], 4, []),
        ([1, 2, 9, 2], 4, []),  # a single token is fewer than min_ngram
    ],
)
def test_the_longest_match_and_of_these_the_earliest(tokens, num_drafts, drafts):
    """Trap 44."""
    proposer = NgramProposer(4, max_ngram=4, min_ngram=2)
    assert propose(proposer, make_request(tokens), num_drafts) == drafts


def test_a_reused_id_has_no_past():
    proposer = NgramProposer(2)
    assert propose(proposer, make_request([1, 2, 3, 1, 2])) == [3, 1]
    assert proposer.draft_probs("a") is None, "a lookup is deterministic"
    for name in ("a", "a", "nobody"):
        proposer.remove_request(name)
    assert proposer._histories == {}, "what is forgotten takes no memory"
    assert propose(proposer, make_request([8, 9, 1, 2])) == []
    assert propose(proposer, make_request([8, 9, 1, 2, 8, 9])) == [1, 2]


tokens_of_few_kinds = st.sampled_from([[0], [0, 1], [0, 1, 151_935], [0, 1, 2, 2**31 - 1]]).flatmap(
    lambda kinds: st.lists(
        st.lists(st.sampled_from(kinds), min_size=1, max_size=5), min_size=1, max_size=16
    )
)


@pytest.mark.net
@settings(deadline=None, max_examples=150)
@given(
    prompts=st.lists(tokens_of_few_kinds, min_size=1, max_size=3),
    num_spec_tokens=st.integers(1, 5),
    num_drafts=st.integers(0, 7),
    min_ngram=st.integers(1, 4),
    num_larger=st.integers(0, 3),
)
def test_it_finds_what_a_search_through_everything_finds(
    prompts, num_spec_tokens, num_drafts, min_ngram, num_larger
):
    """Step by step, each with 1 to 5 tokens more, several requests in turn."""
    sizes = (min_ngram + num_larger, min_ngram)
    proposer = NgramProposer(num_spec_tokens, *sizes)
    requests = [make_request(steps[0], f"r{i}") for i, steps in enumerate(prompts)]
    for step in range(max(len(steps) for steps in prompts)):
        expected = {}
        for request, steps in zip(requests, prompts):
            request.output_token_ids += steps[step] if 0 < step < len(steps) else []
            tokens = request.tokens(0, request.num_tokens)
            if drafts := search(tokens, min(num_drafts, num_spec_tokens), *sizes):
                expected[request.req_id] = drafts
        assert proposer.propose(follow(*requests), [num_drafts] * len(requests)) == expected


@pytest.mark.parametrize(
    "options", [{"num_spec_tokens": 0}, {"max_ngram": 4, "min_ngram": 5}], ids=str
)
def test_options_that_make_no_sense_are_named(options):
    with pytest.raises(ValueError, match=f"^{list(options)[-1]} must be "):
        NgramProposer(**{"num_spec_tokens": 2} | options)
    with pytest.raises(ValueError):  # a number of drafts is missing
        NgramProposer(2).propose(follow(make_request([1, 2]), make_request([3], "b")), [2])
