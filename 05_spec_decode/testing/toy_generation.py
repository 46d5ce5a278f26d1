"""Whole texts from the toy models of `spec_decode.py`, with and without draft tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from acceptance import SpecDecodeStats
from spec_decode import LanguageModel, sample_token, speculative_decode_step


def speculative_generate(
    target_model: LanguageModel,
    draft_model: LanguageModel,
    context_ids: Sequence[int],
    num_tokens: int,
    num_speculative_tokens: int = 4,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
    *,
    rule: str = "rejection",
) -> tuple[list[int], SpecDecodeStats]:
    """Generate the next `num_tokens` tokens. The last step proposes only as many as it could
    emit."""
    tokens: list[int] = []
    stats = SpecDecodeStats()
    while len(tokens) < num_tokens:
        num_drafts = min(num_speculative_tokens, num_tokens - len(tokens) - 1)
        context = [*context_ids, *tokens]
        new_tokens, step = speculative_decode_step(
            target_model, draft_model, context, num_drafts, temperature, generator, rule=rule
        )
        tokens += new_tokens
        stats.observe(num_drafts, step.num_accepted)
    return tokens, stats


def plain_generate(
    model: LanguageModel, context_ids: Sequence[int], num_tokens: int, *args: Any, **kwargs: Any
) -> list[int]:
    """Generate without draft tokens: one pass, one token. Other arguments as in
    `sample_token`."""
    tokens: list[int] = []
    while len(tokens) < num_tokens:
        logits = model.get_logits([*context_ids, *tokens])[-1]
        tokens.append(sample_token(logits, *args, **kwargs))
    return tokens
