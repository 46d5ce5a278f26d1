"""Apply the rules of `token_rules.py`, and `min_tokens`, to the rows of a step.

A step sends indices into its flattened logits: one for each token that is allowed, biased, or
forbidden. If a bad word includes a pending token, the comparison is done on the device.

See common/README.md#what-a-request-may-ask-for"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from common.sampling.runner_plugin import DeviceArgs
from common.sampling.sampling_columns import SamplingBatch
from common.sampling.sampling_rules import MIN_TOKENS, NEG_INF, TOKEN_RULES


@dataclass(eq=False)
class RuleArgs(DeviceArgs):
    """Indices are into the flattened logits."""

    closed_rows: Any  # rows in which only some tokens are allowed
    allowed_at: Any
    forbidden_at: Any  # ends of bad words; EOS and stop tokens before `min_tokens`
    biased_at: Any
    biases: Any
    may_be_bad: Any  # [3, N]: a bad word's last token, its last but one, the row's pending id
    fill_in: Callable[[torch.Tensor], torch.Tensor]  # of pending ids


def prepare_rules(sampling: SamplingBatch, vocab_size: int) -> RuleArgs:
    """Return the rules of these rows, for `keep_to_rules`."""
    columns = sampling.columns
    none = np.zeros(0, dtype=np.int64)
    closed = []
    allowed = [none]
    forbidden = [none]
    biased = [none]
    biases = [np.zeros(0)]
    pending = []
    for row in np.flatnonzero(sampling.needs & (TOKEN_RULES | MIN_TOKENS)).tolist():
        first = row * vocab_size
        column = int(sampling.rows[row])
        if sampling.num_outputs[row] < columns.min_tokens[column]:
            ends = columns.forbidden[column]
            forbidden.append(first + ends[ends < vocab_size])
        if not sampling.needs[row] & TOKEN_RULES:
            continue
        rules = columns.rules[column]
        if rules.allowed is not None:
            closed.append(row)
            allowed.append(first + rules.allowed)
        forbidden.append(first + rules.bad)
        biased.append(first + rules.biased)
        biases.append(rules.bias)
        outputs = _outputs(sampling, row)
        for word in rules.words_ending_in(outputs):
            if outputs[-1] >= 0:
                forbidden.append(first + np.array(word[-1:]))
            else:
                pending.append((first + word[-1], word[-2], int(outputs[-1])))
    return RuleArgs(
        closed_rows=np.array(closed, dtype=np.int64),
        allowed_at=np.concatenate(allowed),
        forbidden_at=np.concatenate(forbidden),
        biased_at=np.concatenate(biased),
        biases=np.concatenate(biases),
        may_be_bad=np.array(pending, dtype=np.int64).reshape(-1, 3).T,
        fill_in=sampling.state.fill_in,
    )


def keep_to_rules(logits: torch.Tensor, args: RuleArgs) -> torch.Tensor:
    """Return the logits [R, V] under the rules. The given `logits` are unchanged."""
    logits = logits.clone(memory_format=torch.contiguous_format)
    flat = logits.view(-1)
    if len(args.closed_rows):
        kept = flat[args.allowed_at]
        logits.index_fill_(0, args.closed_rows, NEG_INF)
        flat.scatter_(0, args.allowed_at, kept)
    flat.scatter_(0, args.forbidden_at, NEG_INF)
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
