"""Apply the rules of `token_rules.py` to the rows of a step.

A step sends indices into its flattened logits: one for each token that is allowed, biased, or ruled
out by bad words. If a bad word includes a pending token, the comparison is done on the device.

See common/README.md#what-a-request-may-ask-for"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from common.sampling.runner_plugin import UploadBuffer
from common.sampling.sampling_columns import SamplingBatch, flat_index
from common.sampling.sampling_rules import NEG_INF, TOKEN_RULES


@dataclass(eq=False)
class RuleArgs:
    """Arrays until the upload, then tensors. Indices are into the flattened logits."""

    closed_rows: Any  # rows in which only some tokens are allowed
    allowed_at: Any
    bad_at: Any
    biased_at: Any
    biases: Any
    # [3, N]: last tokens of bad words, each with the word's last but one, and a pending id.
    may_be_bad: Any
    fill_in: Callable[[torch.Tensor], torch.Tensor]  # of pending ids


def prepare_rules(sampling: SamplingBatch, upload: UploadBuffer, vocab_size: int) -> RuleArgs:
    """Return the rules of these rows, for `keep_to_rules`."""
    rows = np.flatnonzero(sampling.needs & TOKEN_RULES)
    rules = [sampling.columns.rules[row] for row in sampling.rows[rows].tolist()]
    closed = [i for i, r in enumerate(rules) if r.allowed is not None]
    none = np.zeros(0, np.int64)
    bad, pending = [], []
    for row, rule in zip(rows.tolist(), rules):
        outputs = _outputs(sampling, row)
        ends = []
        for word in rule.words_ending_in(outputs):
            if outputs[-1] >= 0:
                ends.append(word[-1])
            else:
                pending.append((row, word[-1], word[-2], int(outputs[-1])))
        bad.append(np.concatenate([rule.bad, np.array(ends, dtype=np.int64)]))

    def flat(ids: list[np.ndarray], values: Sequence[np.ndarray] = ()) -> list[np.ndarray]:
        """Return `flat_index` of each rule's ids."""
        at = np.repeat(rows, list(map(len, ids)))
        return flat_index(at, np.concatenate([none, *ids]), vocab_size, values)

    bias = np.concatenate([none.astype(float), *(r.bias for r in rules)])
    biased_at, biases = flat([r.biased for r in rules], [bias])
    at, ends, last_but_one, last = np.array(pending, dtype=np.int64).reshape(-1, 4).T
    args = RuleArgs(
        closed_rows=rows[closed],
        allowed_at=flat([none if r.allowed is None else r.allowed for r in rules])[0],
        bad_at=flat(bad)[0],
        biased_at=biased_at,
        biases=biases,
        may_be_bad=np.stack(flat_index(at, ends, vocab_size, [last_but_one, last])),
        fill_in=sampling.state.fill_in,
    )
    upload.fill(args)
    return args


def keep_to_rules(logits: torch.Tensor, args: RuleArgs) -> torch.Tensor:
    """Return the logits [R, V] under the rules. The given `logits` are unchanged."""
    logits = logits.clone(memory_format=torch.contiguous_format)
    flat = logits.view(-1)
    if len(args.closed_rows):
        kept = flat[args.allowed_at]
        logits.index_fill_(0, args.closed_rows, NEG_INF)
        flat.scatter_(0, args.allowed_at, kept)
    flat.scatter_(0, args.bad_at, NEG_INF)
    at, last_but_one, last = args.may_be_bad
    if len(at):
        is_bad = args.fill_in(last) == last_but_one
        flat.index_add_(0, at, flat.new_zeros(len(at)).masked_fill_(is_bad, NEG_INF))
    flat.index_add_(0, args.biased_at, args.biases.to(flat.dtype))
    return logits


def _outputs(sampling: SamplingBatch, row: int) -> np.ndarray:
    """Return the outputs before this row of logits, including drafts. Empty where a draft model
    continues its own drafts, which the state does not have."""
    state = sampling.state
    at = sampling.rows[row]
    first = int(state.num_prompt_tokens[at])
    end = first + int(sampling.num_outputs[row])
    if end > state.num_tokens[at] and not sampling.drafts:
        end = first
    return state.token_ids[at, first:end]
