"""What the scripts of `common/workshop/watch` have to answer, by `transformers`, in float64."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from common.engine_config import SHIPPED_CHECKPOINT
from common.tests.engine_oracle import greedy
from common.tokenizer import Tokenizer
from common.workshop.watch.workloads import Script, Visit


class Answers:
    """Each prompt is continued once, as far as anybody wants."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(SHIPPED_CHECKPOINT, dtype=torch.float64)
        generation = GenerationConfig.from_pretrained(SHIPPED_CHECKPOINT)
        eos = generation.eos_token_id
        self._eos = set(eos if isinstance(eos, list) else [eos])
        self._model.generation_config.eos_token_id = None
        self._tokenizer = tokenizer
        self._known: dict[tuple[str, int], list[int]] = {}

    def of(self, script: Script) -> dict[str, list[int]]:
        """The tokens of each request."""
        return {visit.name: self._of(visit) for visit in script.visits}

    def _of(self, visit: Visit) -> list[int]:
        known = (visit.prompt, visit.max_tokens)
        if known not in self._known:
            prompt = self._tokenizer.encode(visit.prompt)
            self._known[known] = greedy(self._model, prompt, visit.max_tokens)
        tokens = self._known[known]
        for end in range(1, len(tokens) + 1):
            text = self._tokenizer.decode(tokens[:end])
            if tokens[end - 1] in self._eos or any(stop in text for stop in visit.stop):
                return tokens[:end]
        return tokens
