"""From a plan to tensors: the padded batch.

A plan names requests of very different sizes: a prompt of 500 tokens next to a request that feeds
back the one token it sampled last. A model wants a rectangle, so the rows are padded on the right
to the longest one:

    token ids            attention mask   positions
    1  2  3  4  5        1 1 1 1 1        0 1 2 3 4      a new request with 5 prompt tokens
    6  7  8  .  .        1 1 1 0 0        0 1 2 . .      a new request with 3
    12 .  .  .  .        1 0 0 0 0        3 . . . .      running: 4 tokens known, 3 computed
    17 .  .  .  .        1 0 0 0 0        4 . . . .      running: 5 tokens known, 4 computed

Half of this rectangle is padding (10 of 20), and it is computed all the same. Note the positions of
the two running requests: the token fed back is the last one known, so it stands at `len - 1`, not
at `len`. A position off by one still gives fluent text, only a different one.

Invariants: a row holds exactly the tokens that the plan gives its request; padding holds
`pad_token_id` and position 0, never what happened to be in memory (an uninitialised id may lie
outside the vocabulary).

vLLM and SGLang lay the tokens of all requests end to end and pad nothing; chapter 2 does so too,
because attention over blocks makes it possible."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from scheduler_interface import CachedRequestData, NewRequestData, SchedulerOutput


@dataclass(slots=True)
class InputBatch:
    """The tokens of one step, one row for each request. All lists run parallel to `req_ids`."""

    req_ids: list[str]
    token_ids: list[list[int]]  # what each request computes in this step
    start_positions: list[int]  # the position of each row's first token
    is_prefill: list[bool]  # does the row compute any position of the prompt?
    prompt_lens: list[int]

    @property
    def batch_size(self) -> int:
        return len(self.req_ids)

    @property
    def num_tokens(self) -> int:
        """Without padding."""
        return sum(map(len, self.token_ids))

    @property
    def logit_req_ids(self) -> list[str]:
        """Every row ends with its request's last known token, so each yields a row of logits."""
        return self.req_ids

    def to_tensors(
        self, device: torch.device | str, pad_token_id: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Token ids, attention mask (1 for a token, 0 for padding) and positions, each
        `[batch_size, max_len]` int64, padded on the right."""
        max_len = max(map(len, self.token_ids), default=0)
        ids, mask, positions = [], [], []
        for row, start in zip(self.token_ids, self.start_positions, strict=True):
            num_padding = max_len - len(row)
            ids.append(row + [pad_token_id] * num_padding)
            mask.append([1] * len(row) + [0] * num_padding)
            positions.append([*range(start, start + len(row))] + [0] * num_padding)
        shape = (self.batch_size, max_len)
        token_ids, attention_mask, position_ids = (
            torch.tensor(rows, dtype=torch.int64, device=device).view(shape)
            for rows in (ids, mask, positions)
        )
        return token_ids, attention_mask, position_ids


def prepare_inputs_from_scheduler_output(output: SchedulerOutput) -> InputBatch:
    """The rows of a plan: new requests first, then cached ones. Reads the plan and nothing else.

    Raises `ValueError` if a plan schedules tokens that it does not carry: chapter 1 computes whole
    prompts, so a known request always computes exactly what is new about it."""
    batch = InputBatch([], [], [], [], [])
    for new in output.scheduled_new_reqs:
        _append_new(batch, new, output.num_scheduled_tokens[new.req_id])
    for index, req_id in enumerate(output.scheduled_cached_reqs.req_ids):
        num_scheduled = output.num_scheduled_tokens[req_id]
        _append_cached(batch, output.scheduled_cached_reqs, index, num_scheduled)
    return batch


def _append_new(batch: InputBatch, new: NewRequestData, num_scheduled: int) -> None:
    start = new.num_computed_tokens
    row = new.prompt_token_ids[start : start + num_scheduled]
    _append_row(batch, new.req_id, row, start, num_scheduled, len(new.prompt_token_ids))


def _append_cached(
    batch: InputBatch, cached: CachedRequestData, index: int, num_scheduled: int
) -> None:
    req_id, start = cached.req_ids[index], cached.num_computed_tokens[index]
    row = cached.new_token_ids[index]
    if req_id in cached.resumed_req_ids:  # the row is the whole request
        num_tokens = len(row)
        row = row[start : start + num_scheduled]
    else:
        num_tokens = start + len(row)
    prompt_len = num_tokens - cached.num_output_tokens[index]
    _append_row(batch, req_id, row, start, num_scheduled, prompt_len)


def _append_row(
    batch: InputBatch, req_id: str, row: list[int], start: int, num_scheduled: int, prompt_len: int
) -> None:
    if len(row) != num_scheduled:
        raise ValueError(
            f"request {req_id!r}: {num_scheduled} tokens are scheduled "
            f"and the plan carries {len(row)}"
        )
    batch.req_ids.append(req_id)
    batch.token_ids.append(row)
    batch.start_positions.append(start)
    batch.is_prefill.append(start < prompt_len)
    batch.prompt_lens.append(prompt_len)
