"""Log-probabilities in the raw distribution of the model, before penalties and temperature."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from common.sampling.distributions import upload
from common.sampling.sampling_columns import LOGPROBS, SamplingBatch
from common.sampling.sampling_constraints import ranked_ids
from scheduler_interface import StepOutput


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """A token's log-probability, its rank (1: none is likelier), and the likeliest tokens, best
    first."""

    token_id: int
    logprob: float
    rank: int
    top: dict[int, float]


class Logprobs:
    """Of the rows that ask for them. `numbers` [rows, 2 + 2 * width] float64, in which integers are
    exact: of the token its log-probability and rank, then the likeliest ids, then theirs."""

    def __init__(self, raw: torch.Tensor, sampling: SamplingBatch, tokens: torch.Tensor) -> None:
        self.at = np.flatnonzero(sampling.needs & LOGPROBS)
        self.num_top = sampling.columns.num_logprobs[sampling.rows[self.at]]
        (at,) = upload(raw.device, self.at)
        raw = raw[at]
        logprobs = raw.log_softmax(dim=-1)
        chosen = logprobs.gather(1, tokens[at].clamp(min=0)[:, None])
        ranks = 1 + (logprobs > chosen).sum(dim=-1, keepdim=True)
        ids = ranked_ids(raw, min(int(self.num_top.max()), raw.shape[1]))
        columns = (chosen, ranks, ids, logprobs.gather(1, ids))
        self.numbers = torch.cat([column.to(torch.float64) for column in columns], dim=1)

    def add_to(
        self, output: StepOutput, req_ids: list[str], tokens: np.ndarray, read: np.ndarray
    ) -> None:
        """`read` is what was read of `numbers`."""
        width = (self.numbers.shape[1] - 2) // 2
        rows = read.reshape(self.numbers.shape).tolist()
        for at, k, (logprob, rank, *top) in zip(self.at.tolist(), self.num_top.tolist(), rows):
            if tokens[at] >= 0:
                likeliest = dict(zip(map(int, top[: min(k, width)]), top[width:]))
                entry = TokenLogprobs(int(tokens[at]), logprob, int(rank), likeliest)
                output.logprobs.setdefault(req_ids[at], []).append(entry)
