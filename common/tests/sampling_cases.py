"""Rows for a sampler, made of lists: each has a row of the columns to itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from common.requests.input_processor import TOKEN_RULE_FIELDS
from common.requests.token_rules import token_rules_of
from common.sampling.runner_plugin import UploadBuffer
from common.sampling.sampler import Sampler, as_float
from common.sampling.sampling_columns import SamplingBatch, SamplingColumns
from common.sampling.sampling_rules import SAMPLING_RULES
from request import SamplingParams
from scheduler_interface import StepOutput

GREEDY = SamplingParams(temperature=0)
# Each rule of the table alone, and what they do together.
RECIPES = {rule.name: SamplingParams(**{rule.name: rule.example}) for rule in SAMPLING_RULES} | {
    "greedy": GREEDY,
    "plain": SamplingParams(),
    "cold": SamplingParams(temperature=1e-300, top_p=0.5),
    "hot": SamplingParams(temperature=1.7, top_k=20),
    "wide top-k": SamplingParams(temperature=2.0, top_k=300, top_p=0.95),
    "limits": SamplingParams(temperature=0.9, min_p=0.05, top_k=6, top_p=0.9),
    "penalties": SamplingParams(temperature=0, repetition_penalty=1.5, frequency_penalty=1.0),
    "penalties, drawn": SamplingParams(presence_penalty=-0.5, repetition_penalty=0.8, min_p=0.1),
    "minimum": SamplingParams(min_tokens=9, stop_token_ids=(2,), max_tokens=20, temperature=1.3),
    "log-probabilities": SamplingParams(temperature=0, logprobs=3),
    "token rules": SamplingParams(
        allowed_token_ids=[4, 0, 2], logit_bias={0: 1.5, 2: -0.4, 3: 9.0}, top_p=0.95
    ),
    "bad words": SamplingParams(
        bad_words=[[0], [2, 1], [2, 2, 3], [1, 1, 2, 4]], logit_bias={4: 0.7, 1: -1}
    ),
    "everything": SamplingParams(
        **dict(allowed_token_ids=range(5), bad_words=[[4, 4], [2, 0]], logit_bias={2: 1.1}),
        **dict(min_tokens=9, stop_token_ids=(2,), max_tokens=20, logprobs=2),
        **{rule.name: rule.example for rule in SAMPLING_RULES},
    ),
}


@dataclass
class ListedTokens:
    """A `HasTokens`."""

    token_ids: np.ndarray
    num_tokens: np.ndarray
    num_prompt_tokens: np.ndarray
    on_device: list[int] = field(default_factory=list)  # ids of pending tokens

    @classmethod
    def of(
        cls,
        prompts: Sequence[list[int]],
        outputs: Sequence[list[int]],
        drafts: Sequence[list[int]] | None = None,
    ) -> ListedTokens:
        parts = list(zip(prompts, outputs, drafts or [[]] * len(prompts), strict=True))
        rows = [[*p, *o, *d] for p, o, d in parts]
        token_ids = np.full((len(rows), max(map(len, rows), default=0)), -7, dtype=np.int32)
        for row, ids in zip(token_ids, rows):
            row[: len(ids)] = ids
        num_prompt = np.array([len(p) for p in prompts], dtype=np.int64)
        return cls(
            token_ids, num_prompt + np.array([len(o) for o in outputs], np.int64), num_prompt
        )

    def take_to_device(self, rows: Iterable[int]) -> None:
        """The host no longer knows the last tokens of these rows."""
        for row in rows:
            last = self.num_tokens[row] - 1
            self.on_device.append(int(self.token_ids[row, last]))
            self.token_ids[row, last] = -len(self.on_device)

    def fill_in(self, token_ids: torch.Tensor) -> torch.Tensor:
        ids = [self.on_device[-1 - i] if i < 0 else i for i in token_ids.tolist()]
        return torch.tensor(ids, dtype=torch.int64)


def make_sampling(
    params: Sequence[SamplingParams],
    *,
    seeds: Sequence[int] | None = None,
    prompts: Sequence[list[int]] | None = None,
    outputs: Sequence[list[int]] | None = None,
    drafts: Sequence[list[int]] | None = None,
    eos: Sequence[tuple[int, ...]] | None = None,
    req_ids: list[str] | None = None,
) -> SamplingBatch:
    """`drafts` of a row stand before its token."""
    n = len(params)
    columns = SamplingColumns(n)
    rows = np.arange(n)
    for row, p in enumerate(params):
        has_rules = any(getattr(p, name) is not None for name in TOKEN_RULE_FIELDS)
        rules = token_rules_of(p, None, 1 << 40, lambda _, ids: ids) if has_rules else None
        columns.write(row, p, eos[row] if eos else (), rules)
    if seeds:
        columns.seed[:] = seeds
    prompts = prompts or [[0]] * n
    outputs = outputs or [[]] * n
    before = drafts or [[]] * n
    req_ids = req_ids or [f"r{i}" for i in range(n)]
    return SamplingBatch(
        columns,
        req_ids,
        rows,
        np.array([len(o) + len(d) for o, d in zip(outputs, before)], dtype=np.int64),
        ListedTokens.of(prompts, outputs, before),
        dict(zip(req_ids, before)) if any(before) else {},
    )


def mixed_sampling(
    recipes: Sequence[SamplingParams], num_rows: int, vocab_size: int, seed: int
) -> SamplingBatch:
    """Rows that take turns with the recipes, each with a seed and a history of its own."""
    rows = range(num_rows)
    return make_sampling(
        [replace(recipes[i % len(recipes)]) for i in rows],
        prompts=[[i % vocab_size, 1] for i in rows],
        outputs=[[i] * (i % 3) for i in rows],
        eos=[(3,)] * num_rows,
        seeds=[seed + i for i in rows],
    )


def as_plain(output: StepOutput) -> tuple:
    return output.token_ids, output.errors, {r: list(e) for r, e in output.logprobs.items()}


def sampled(sampler: Sampler, logits: torch.Tensor, sampling: SamplingBatch) -> StepOutput:
    """Prepare, send, sample and wait."""
    upload = UploadBuffer(logits.device)
    args = sampler.prepare(sampling)
    upload.fill(args)
    if upload.arrays:
        upload.send()
    return sampler.sample(logits, args).wait()


def sampling_probs(logits: torch.Tensor, sampling: SamplingBatch) -> torch.Tensor:
    """The distribution [R, V] of each row of `logits` without padding; histories are counted
    anew."""
    from common.sampling.distributions import prepare, row_probs

    upload = UploadBuffer(logits.device)
    args = prepare(sampling, logits.shape[1])
    upload.fill(args)
    upload.send()
    return row_probs(as_float(logits), args)
