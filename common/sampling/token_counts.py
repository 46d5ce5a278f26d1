"""Token counts of prompts and outputs, for the penalties.

A penalty needs, for every token of the vocabulary, whether the token is in the prompt or the
output, and how often in the output. A step sends the histories of the rows with penalties, and they
are counted on the device, as in vLLM. A last token that is still pending (`BatchState`) is filled
in there.

See common/README.md#what-a-request-may-ask-for"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from common.sampling.runner_plugin import DeviceArgs
from common.sampling.sampling_columns import SamplingBatch


@dataclass(eq=False)
class Histories(DeviceArgs):
    """The tokens of R rows, as indices into a flattened table [R, vocab_size]."""

    num_rows: int
    vocab_size: int
    prompts: Any
    outputs: Any  # and the drafts before each row
    pending_rows: Any  # index of the first column of each row with a pending token
    pending_ids: Any
    fill_in: Callable[[torch.Tensor], torch.Tensor]  # of pending ids


def prepare_histories(batch: SamplingBatch, vocab_size: int) -> Histories:
    """Return the histories of these rows. Ids beyond the vocabulary are left out."""
    state = batch.state
    rows = batch.rows
    num_prompt = state.num_prompt_tokens[rows]
    num_tokens = state.num_tokens[rows]
    last_ids = state.token_ids[rows, num_tokens - 1]
    ends = num_prompt + batch.num_outputs if batch.drafts else num_tokens
    pending = np.flatnonzero(last_ids < 0)

    def flat(starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
        """Return the indices of tokens `[start, stop)` of each row."""
        lens = stops - starts
        index = np.repeat(np.arange(len(rows)), lens)
        positions = np.arange(len(index)) + (starts - np.cumsum(lens) + lens)[index]
        ids = state.token_ids[rows[index], positions].astype(np.int64)
        return (index * vocab_size + ids)[(ids >= 0) & (ids < vocab_size)]

    return Histories(
        num_rows=len(rows),
        vocab_size=vocab_size,
        prompts=flat(np.zeros_like(num_prompt), num_prompt),
        outputs=flat(num_prompt, ends),  # a pending id has no column
        pending_rows=pending * vocab_size,
        pending_ids=last_ids[pending].astype(np.int64),
        fill_in=state.fill_in,
    )


def count(histories: Histories) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which tokens are in each row's prompt, output or drafts, bool [R, vocab_size], and
    their counts in its output and drafts, int32 [R, vocab_size]."""
    shape = (histories.num_rows, histories.vocab_size)
    outputs = histories.outputs
    if len(histories.pending_ids):
        pending = histories.pending_rows + histories.fill_in(histories.pending_ids)
        outputs = torch.cat([outputs, pending])
    counts = torch.zeros(shape, dtype=torch.int32, device=outputs.device)
    counts.view(-1).scatter_add_(0, outputs, torch.ones_like(outputs, dtype=torch.int32))
    is_known = counts > 0
    is_known.view(-1).index_fill_(0, histories.prompts, True)
    return is_known, counts
