"""Drop draft tokens that a runner plugin knows to be impossible: each would cost a row of the next
step, and none can be accepted.

See 04_scheduler/beyond/GRAMMARS.md#what-else-depends-on-it"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from common.runner.batch_state import BatchState
from proposers import Proposer, ProposerInput


class AllowedDrafts(Proposer):
    """A `Proposer` that cuts the drafts of `proposer` to the number that every plugin allows."""

    def __init__(self, proposer: Proposer, state: BatchState) -> None:
        self.proposer = proposer
        self.state = state
        self.num_spec_tokens = proposer.num_spec_tokens
        self.num_lookahead_tokens = proposer.num_lookahead_tokens

    def propose(
        self, inputs: Sequence[ProposerInput], num_drafts: Sequence[int]
    ) -> dict[str, list[int]]:
        draft_token_ids = self.proposer.propose(inputs, num_drafts)
        state = self.state
        for plugin in state.plugins:
            for req_id, drafts in draft_token_ids.items():
                del drafts[plugin.num_possible(state, state.row_of[req_id], drafts) :]
        return {req_id: drafts for req_id, drafts in draft_token_ids.items() if drafts}

    def draft_probs(self, request_id: str) -> torch.Tensor | None:
        return self.proposer.draft_probs(request_id)

    def remove_request(self, request_id: str) -> None:
        self.proposer.remove_request(request_id)
