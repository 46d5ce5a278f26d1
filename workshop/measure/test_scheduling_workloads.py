"""Each workload is what its line in the module says, and a seed makes all of it."""

from __future__ import annotations

from itertools import product

import pytest

from workshop.measure.scheduling_simulator import GO_ON, STOP
from workshop.measure.scheduling_workloads import MAX_TOKENS, WORKLOADS

# Shortest and longest prompt, mean outputs.
LENGTHS = {
    "chat": (16, 128, 60),
    "long": (400, 1000, 20),
    "shared": (336, 384, 40),
    "burst": (16, 128, 60),
}
NUM_REQUESTS = 1000


@pytest.mark.parametrize("name", WORKLOADS)
def test_lengths_limits_priorities_and_shared_blocks(name: str) -> None:
    """Prompts share a block of 16 only where it is intended. No prompt has a token that the
    simulator samples, so a block of outputs differs."""
    requests = WORKLOADS[name](NUM_REQUESTS, 5.0, 0)
    shortest, longest, mean_outputs = LENGTHS[name]
    prompts = [tuple(request.prompt_token_ids) for request in requests]
    assert shortest <= min(map(len, prompts)) and max(map(len, prompts)) <= longest
    outputs = [request.num_outputs for request in requests]
    assert sum(outputs) / NUM_REQUESTS == pytest.approx(mean_outputs, rel=0.12)
    assert all(1 <= request.num_outputs <= request.max_tokens for request in requests)
    kinds = {(request.max_tokens, request.priority) for request in requests}
    assert kinds == {*product((64, 128, MAX_TOKENS), range(3))}
    heads = [len({prompt[:length] for prompt in prompts}) for length in (16, 320, 336)]
    assert heads == ([24, 24, NUM_REQUESTS] if name == "shared" else [NUM_REQUESTS] * 3)
    assert {STOP, GO_ON}.isdisjoint(token for prompt in prompts for token in prompt)
