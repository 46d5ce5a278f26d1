"""What the scripts of `workshop/watch` have to answer, by `transformers`, in float64."""

from __future__ import annotations

from functools import cache

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from common.engine_config import SHIPPED_CHECKPOINT
from common.requests.tokenizer import Tokenizer
from common.tests.engine_oracle import greedy
from workshop.watch.workloads import Script, Visit


@cache
def _model(window: int | None) -> PreTrainedModel:
    """Every second layer sees no more than `window`."""
    config = AutoConfig.from_pretrained(SHIPPED_CHECKPOINT)
    if window is not None:
        config.use_sliding_window = True
        config.sliding_window = window
        config.layer_types = ["full_attention", "sliding_attention"] * 3
    how = dict(config=config, dtype=torch.float64)
    model = AutoModelForCausalLM.from_pretrained(SHIPPED_CHECKPOINT, **how)
    model.generation_config.eos_token_id = None
    return model


@cache
def _continued(window: int | None, prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    return greedy(_model(window), [*prompt], max_tokens)


class Answers:
    """Each prompt is continued once, as far as anybody wants."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        eos = GenerationConfig.from_pretrained(SHIPPED_CHECKPOINT).eos_token_id
        self._eos = {tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])}
        self._tokenizer = tokenizer

    def of(self, script: Script) -> dict[str, list[int]]:
        """The tokens of each request."""
        return {visit.name: self._of(visit, script.window) for visit in script.visits}

    def _of(self, visit: Visit, window: int | None) -> list[int]:
        tokenizer = self._tokenizer
        tokens = _continued(window, tuple(tokenizer.encode(visit.prompt)), visit.max_tokens)
        for end in range(1, len(tokens) + 1):
            text = tokenizer.decode(tokens[:end])
            if tokens[end - 1] in self._eos or any(stop in text for stop in visit.stop):
                return tokens[:end]
        return tokens
