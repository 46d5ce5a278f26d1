"""The table of sampling rules: a row for each number of `SamplingParams` that changes logits.

To add a rule, add a field to `SamplingParams` (chapter 1; its interval goes into `_RANGES`) and a
row here, with a function in this file if it needs only logits and the numbers. The columns, the
sampler, the server (`wire.py`, `app.py`) and the warm-up (`kv_sizing.py`) read the table.

The default of a field has no effect, so a request needs a rule only if it has another value. A step
applies the rules that its rows need: penalties, temperature, then `LIMITS` in the order of the
table. A new penalty needs more than a row: `apply_penalties` takes exactly these three.

See common/README.md#what-a-request-may-ask-for"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from request import SamplingParams

NEG_INF = float("-inf")
Limit = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class SamplingRule:
    """A row. Functions that need more than its numbers are in `sampling_constraints.py`."""

    name: str  # of the field
    example: float  # a value with an effect, for the warm-up and for tests
    apply: Limit | None = None  # from logits [R, C] and the rule's numbers [R] to new logits
    is_penalty: bool = False  # an argument of `apply_penalties`; greedy rows ignore all others
    is_recommended: bool = False  # read from a checkpoint's generation_config.json, as in vLLM

    @property
    def default(self) -> float:
        return SamplingParams.__dataclass_fields__[self.name].default


def apply_min_p(logits: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Keep tokens at least `min_p` [R] times as probable as the most probable one."""
    lowest = logits.amax(dim=-1, keepdim=True) + min_p.log().to(logits.dtype)[:, None]
    return logits.masked_fill(logits < lowest, NEG_INF)


SAMPLING_RULES = (
    SamplingRule("repetition_penalty", 1.3, is_penalty=True, is_recommended=True),
    SamplingRule("presence_penalty", 0.7, is_penalty=True),
    SamplingRule("frequency_penalty", -0.3, is_penalty=True),
    SamplingRule("temperature", 0.6, is_recommended=True),  # of all drawn rows: no bit is read
    SamplingRule("top_k", 3, is_recommended=True),  # a number that is whole
    SamplingRule("min_p", 0.15, apply_min_p, is_recommended=True),
    SamplingRule("top_p", 0.8, is_recommended=True),
)
NUMBERS = tuple(rule.name for rule in SAMPLING_RULES)  # their columns: penalties first
NUM_PENALTIES = sum(rule.is_penalty for rule in SAMPLING_RULES)
LIMITS = SAMPLING_RULES[NUM_PENALTIES + 1 :]  # after the temperature

# Bits of `needs`.
DRAWN, MIN_TOKENS, LOGPROBS, TOKEN_RULES = (1 << i for i in range(4))
BITS = {rule.name: 1 << i for i, rule in enumerate(SAMPLING_RULES, start=4)}
PENALTIES = sum(BITS[rule.name] for rule in SAMPLING_RULES if rule.is_penalty)


def needs_of(params: SamplingParams) -> int:
    """Return the bits of what a request needs. 0: only its highest logits."""
    needs = LOGPROBS * (params.logprobs is not None) | MIN_TOKENS * (params.min_tokens > 0)
    needs |= DRAWN * (not params.is_greedy)
    for rule in SAMPLING_RULES:
        if rule.is_penalty or not params.is_greedy:
            needs |= BITS[rule.name] * (getattr(params, rule.name) != rule.default)
    return needs
