"""Each workload is what its line in the module says, and a seed makes all of it."""

from __future__ import annotations

from collections import Counter
from functools import cache
from itertools import pairwise

import pytest

from workshop.measure.scheduling_simulator import GO_ON, STOP, SimulatedRequest
from workshop.measure.scheduling_workloads import BURST, MAX_TOKENS, WORKLOADS

PROMPT_LENS = {"chat": (16, 128), "long": (400, 1000), "shared": (336, 384), "burst": (16, 128)}
MEAN_OUTPUTS = {"chat": 60, "long": 20, "shared": 40, "burst": 60}
NUM_REQUESTS = 1000
RATE = 5.0


@cache
def made(name: str, seed: int = 0) -> list[SimulatedRequest]:
    return WORKLOADS[name](NUM_REQUESTS, RATE, seed)


@pytest.fixture(params=WORKLOADS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def test_a_longer_one_begins_like_a_shorter_one(name: str) -> None:
    """So asking for fewer requests is not asking for others."""
    assert WORKLOADS[name](40, RATE) == made(name)[:40]
    assert WORKLOADS[name](40, RATE, seed=1) != made(name)[:40]


def test_a_rate_moves_arrivals_and_nothing_else(name: str) -> None:
    for slow, fast in zip(WORKLOADS[name](40, RATE / 4), made(name), strict=False):
        assert slow.arrival_s == pytest.approx(4 * fast.arrival_s)
        assert slow.prompt_token_ids == fast.prompt_token_ids
        assert (slow.num_outputs, slow.max_tokens) == (fast.num_outputs, fast.max_tokens)


def test_requests_come_in_order_and_at_the_rate(name: str) -> None:
    requests = made(name)
    assert requests[0].arrival_s > 0
    assert all(a.arrival_s <= b.arrival_s for a, b in pairwise(requests))
    tolerance = 0.4 if name == "burst" else 0.1  # of 50 gaps, or of 1,000: about three deviations
    assert NUM_REQUESTS / requests[-1].arrival_s == pytest.approx(RATE, rel=tolerance)


def test_lengths_are_what_the_workload_says(name: str) -> None:
    requests = made(name)
    shortest, longest = PROMPT_LENS[name]
    lengths = [len(request.prompt_token_ids) for request in requests]
    assert shortest <= min(lengths) < 1.05 * shortest + 3
    assert 0.98 * longest - 3 < max(lengths) <= longest
    outputs = [request.num_outputs for request in requests]
    assert min(outputs) >= 1
    assert sum(outputs) / NUM_REQUESTS == pytest.approx(MEAN_OUTPUTS[name], rel=0.12)


def test_nobody_says_more_than_it_asked_for_and_most_say_much_less(name: str) -> None:
    requests = made(name)
    assert all(request.num_outputs <= request.max_tokens for request in requests)
    assert {request.max_tokens for request in requests} == {64, 128, MAX_TOKENS}
    asked, said = (sum(getattr(r, f) for r in requests) for f in ("max_tokens", "num_outputs"))
    assert said < asked / 2


def test_a_request_that_ends_at_its_limit_is_simulated_to_the_end(name: str) -> None:
    """Clipping at `MAX_TOKENS` leaves nobody without a limit that fits."""
    longest = max(made(name), key=lambda request: request.num_outputs)
    assert longest.num_outputs <= longest.max_tokens <= MAX_TOKENS


def test_priorities_are_spread_evenly(name: str) -> None:
    counts = Counter(request.priority for request in made(name))
    assert set(counts) == {0, 1, 2} and min(counts.values()) > 0.27 * NUM_REQUESTS


def test_no_prompt_has_a_token_that_the_simulator_samples(name: str) -> None:
    """Or a prompt could share a block with somebody's outputs by accident."""
    tokens = {token for request in made(name) for token in request.prompt_token_ids}
    assert tokens.isdisjoint({STOP, GO_ON})


@pytest.mark.parametrize("name", ["chat", "long", "burst"])
def test_prompts_share_no_block_unless_they_are_meant_to(name: str) -> None:
    heads = Counter(tuple(request.prompt_token_ids[:16]) for request in made(name))
    assert max(heads.values()) == 1


@pytest.mark.parametrize("seed", range(2))
def test_shared_prompts_have_two_dozen_beginnings_of_320_tokens(seed: int) -> None:
    prompts = [tuple(request.prompt_token_ids) for request in made("shared", seed)]
    assert len({prompt[:16] for prompt in prompts}) == 24
    assert len({prompt[:320] for prompt in prompts}) == 24
    assert len({prompt[:336] for prompt in prompts}) == NUM_REQUESTS


def test_bursts_come_twenty_at_a_time_and_chats_one_by_one() -> None:
    arrivals = Counter(request.arrival_s for request in made("burst"))
    assert set(arrivals.values()) == {BURST}
    assert len({request.arrival_s for request in made("chat")}) == NUM_REQUESTS
