"""A proposer that knows how each prompt continues, and drafts what a script makes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from common.tests.engine_oracle import Oracle
from proposers import ProposerInput


@dataclass
class ScriptedProposer:
    """`script(truth, k)` are the draft tokens, where `truth` is what follows."""

    oracle: Oracle
    script: Callable[[list[int], int], list[int]]
    num_spec_tokens: int = 4
    num_lookahead_tokens: int = 0
    probs: dict[str, torch.Tensor] = field(default_factory=dict)

    def propose(
        self, inputs: Sequence[ProposerInput], num_drafts: Sequence[int]
    ) -> dict[str, list[int]]:
        drafts = {}
        for request, k in zip((f.request for f in inputs), num_drafts, strict=True):
            index = self.oracle.prompts.index(request.prompt_token_ids)
            truth = self.oracle.continuations[index][len(request.output_token_ids) :]
            drafts[request.req_id] = self.script(truth, k)
        return drafts

    def draft_probs(self, request_id: str) -> None:
        return None

    def remove_request(self, request_id: str) -> None:
        pass


def wrong(token: int) -> int:
    return (token + 1) % 97


SCRIPTS = {
    "right": lambda truth, k: truth[:k],
    "wrong": lambda truth, k: [wrong(t) for t in truth[:k]],
    **{
        f"wrong at {i}": lambda truth, k, i=i: [
            wrong(t) if j == i else t for j, t in enumerate(truth[:k])
        ]
        for i in range(4)
    },
    "only one": lambda truth, k: truth[: min(k, 1)],
    "none": lambda truth, k: [],
    "shifted": lambda truth, k: truth[1 : 1 + k],
    "too many": lambda truth, k: [*truth, 1, 2, 3, 4, 5, 6, 7, 8, 9] * 3,
}
