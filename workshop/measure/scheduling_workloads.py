"""Four kinds of load, each a seeded stream of requests.

    chat       short prompts, short answers, at a steady rate
    long       long prompts, short answers: a summariser
    shared     two dozen system prompts in front of short questions: together, all of the memory
    burst      chats, but twenty at a time

Tokens are random, and equal only where prompts share a beginning. All requests have a `max_tokens`
of up to `MAX_TOKENS`, in powers of two, and most stop long before. `rate` is in requests a second;
arrivals are a Poisson process.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

from workshop.measure.scheduling_simulator import SimulatedRequest

MAX_TOKENS = 256
BURST = 20
_VOCAB_SIZE = 30_000


def _prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(2, _VOCAB_SIZE) for _ in range(length)]


def _num_outputs(rng: random.Random, mean: int) -> int:
    return min(MAX_TOKENS, 1 + int(rng.expovariate(1 / mean)))


def _stream(
    num_requests: int,
    rate: float,
    seed: int = 0,
    *,
    make_prompt: Callable[[random.Random], list[int]],
    mean_outputs: int,
    burst: int = 1,
) -> list[SimulatedRequest]:
    rng = random.Random(seed)
    requests, arrival_s = [], 0.0
    for index in range(num_requests):
        if index % burst == 0:
            arrival_s += rng.expovariate(rate / burst)
        outputs, priority = _num_outputs(rng, mean_outputs), rng.randrange(3)
        max_tokens = rng.choice([n for n in (64, 128, 256) if n >= outputs])
        prompt = make_prompt(rng)
        requests.append(SimulatedRequest(arrival_s, prompt, outputs, max_tokens, priority))
    return requests


def _lengths(low: int, high: int) -> Callable[[random.Random], list[int]]:
    return lambda rng: _prompt(rng, rng.randint(low, high))


def shared_prefixes(num_requests: int, rate: float, seed: int = 0) -> list[SimulatedRequest]:
    systems = [_prompt(random.Random(f"{seed} {i}"), 320) for i in range(24)]
    make_prompt = lambda rng: rng.choice(systems) + _prompt(rng, rng.randint(16, 64))  # noqa: E731
    return _stream(num_requests, rate, seed, make_prompt=make_prompt, mean_outputs=40)


chat = partial(_stream, make_prompt=_lengths(16, 128), mean_outputs=60)
long_prompts = partial(_stream, make_prompt=_lengths(400, 1000), mean_outputs=20)
bursts = partial(chat, burst=BURST)
WORKLOADS = {"chat": chat, "long": long_prompts, "shared": shared_prefixes, "burst": bursts}
