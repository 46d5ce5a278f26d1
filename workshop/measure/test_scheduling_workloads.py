"""Each workload is what its line in the module says, and a seed makes all of it."""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest

from workshop.measure.scheduling_simulator import GO_ON, STOP, SimulatedRequest
from workshop.measure.scheduling_workloads import MAX_TOKENS, WORKLOADS

# Shortest and longest prompt, mean outputs.
LENGTHS = {
    "chat": (16, 128, 60),
    "long": (400, 1000, 20),
    "shared": (336, 384, 40),
    "burst": (16, 128, 60),
}
NUM_REQUESTS = 1000
RATE = 5.0


@cache
def made(name: str) -> list[SimulatedRequest]:
    return WORKLOADS[name](NUM_REQUESTS, RATE, 0)


@pytest.fixture(params=WORKLOADS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def test_lengths_limits_and_priorities(name: str) -> None:
    requests, (shortest, longest, mean_outputs) = made(name), LENGTHS[name]
    lengths = [len(request.prompt_token_ids) for request in requests]
    assert shortest <= min(lengths) and max(lengths) <= longest
    outputs = [request.num_outputs for request in requests]
    assert sum(outputs) / NUM_REQUESTS == pytest.approx(mean_outputs, rel=0.12)
    assert all(1 <= request.num_outputs <= request.max_tokens for request in requests)
    kinds = {(request.max_tokens, request.priority) for request in requests}
    assert kinds == {*product((64, 128, MAX_TOKENS), range(3))}


def test_prompts_share_blocks_only_where_it_is_intended(name: str) -> None:
    """No prompt has a token that the simulator samples, so a block of outputs differs."""
    prompts = [tuple(request.prompt_token_ids) for request in made(name)]
    num_heads = 24 if name == "shared" else NUM_REQUESTS
    assert len({prompt[:16] for prompt in prompts}) == num_heads
    assert {STOP, GO_ON}.isdisjoint(token for prompt in prompts for token in prompt)
    if name == "shared":
        assert len({prompt[:320] for prompt in prompts}) == 24
        assert len({prompt[:336] for prompt in prompts}) == NUM_REQUESTS
