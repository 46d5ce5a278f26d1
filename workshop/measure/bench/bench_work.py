"""The work that every system of a benchmark does, and its limits.

Token ids in, and a fixed number of greedy tokens out: end of text is ignored. Only tokens that a
user gets are counted: tokens computed past a request's own `max_tokens` are not useful.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from common.engine_config import EngineConfig
from request import SamplingParams


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """Its answer ends after `num_outputs` tokens. An engine knows only `max_tokens` in advance."""

    prompt_token_ids: list[int]
    num_outputs: int
    max_tokens: int
    arrival_time: float = 0.0  # seconds after the start

    @property
    def num_positions(self) -> int:
        return len(self.prompt_token_ids) + self.max_tokens


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits that every system has to keep."""

    max_num_seqs: int = 32
    max_num_batched_tokens: int = 2048
    block_size: int = 16
    longest: int = 2048  # positions of the longest request
    num_positions: int | None = None  # of KV memory; None: `max_num_seqs` of the longest

    @property
    def num_contiguous(self) -> int:
        """The number of requests that fit in the memory if each reserves the longest."""
        if self.num_positions is None:
            return self.max_num_seqs
        return self.num_positions // self.longest

    def engine_config(self, **options: Any) -> EngineConfig:
        """The engine's configuration within these limits, with chapters 1 and 2 only unless
        `options` add more."""
        blocks_per_request = -(-self.longest // self.block_size)
        num_blocks = self.max_num_seqs * blocks_per_request
        if self.num_positions is not None:
            num_blocks = self.num_positions // self.block_size
        parts: dict[str, Any] = {
            "scheduler": "fcfs",
            "prefix_cache": None,
            "chunked_prefill": False,
            "block_size": self.block_size,
            "num_blocks": 1 + num_blocks,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "max_model_len": self.longest,
        }
        return EngineConfig(**parts | options)


class CannotRunError(RuntimeError):
    """The system is not available here. The message gives the exact reason."""


@dataclass(slots=True)
class Served:
    """The tokens of each request, in order; when they came, in seconds after the start (empty: not
    known); the system's own counts; and the seconds by its own clock, if it has one."""

    token_ids: list[list[int]]
    token_times: list[list[float]] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)
    seconds: float | None = None


Serve = Callable[[Sequence[BenchRequest]], Served]


def make_requests(
    num_requests: int,
    prompt_lens: tuple[int, int],
    output_lens: tuple[int, int],
    vocab_size: int,
    seed: int,
) -> list[BenchRequest]:
    """Draw requests: lengths and token ids are uniform, both bounds included."""
    rng = random.Random(seed)
    lengths = [(rng.randint(*prompt_lens), rng.randint(*output_lens)) for _ in range(num_requests)]
    return [
        BenchRequest([rng.randrange(vocab_size) for _ in range(prompt)], output, output)
        for prompt, output in lengths
    ]


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
