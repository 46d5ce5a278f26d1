"""The baseline: a fixed batch that runs until its longest request finishes.

This is what `model.generate` on a padded batch does, and how a first server often works: collect
`batch_size` requests, pad their prompts to one length, and step all of them until the last one
finishes.

    slot 0   P u u                  P  prefill: the prompt is computed, the first token sampled
    slot 1   P u u u u u u          u  useful: a token that its user gets
    slot 2   P . . . . . .          .  wasted: the request has finished, its slot is computed anyway
             1 2 3 4 5 6 7  step

The waste is counted in slot-steps, one for each row in each step. Here 21 are spent and 11 used: a
utilisation of 52 %. A slot is free from its last useful step on, and the next request could have
used it; but with one rectangular KV tensor for the whole batch it cannot join. `fcfs_scheduler.py`
solves that. The padding of prompts is counted separately, in tokens.

Invariants: `slot_steps_used` equals the number of tokens that users get, since every row in every
useful step yields one; padding never changes a token.

Orca (OSDI 2022) named the problem; its remedy, scheduling per iteration, is called continuous
batching in vLLM and in-flight batching in TensorRT-LLM.

See 01_batching/README.md#and-the-static-batch"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from transformers import DynamicCache, PreTrainedModel

from request import Request


@dataclass(slots=True)
class StaticBatch:
    """The record of one batch."""

    req_ids: list[str]
    start_step: int  # counted over all batches
    num_prompt_tokens: int
    num_padding_tokens: int  # computed to make the prompts a rectangle
    # The use of each row's slot in each step: `P` prefill, `u` useful, `.` wasted.
    timeline: list[str]

    @property
    def num_steps(self) -> int:
        """As many as its longest output has tokens."""
        return len(self.timeline[0])


@dataclass(slots=True)
class StaticBatchingReport:
    """The tokens of each request, and the cost."""

    token_ids: dict[str, list[int]] = field(default_factory=dict)
    batches: list[StaticBatch] = field(default_factory=list)

    @property
    def num_steps(self) -> int:
        return sum(batch.num_steps for batch in self.batches)

    @property
    def slot_steps_spent(self) -> int:
        return sum(len(row) for batch in self.batches for row in batch.timeline)

    @property
    def slot_steps_used(self) -> int:
        return sum(len(row) - row.count(".") for batch in self.batches for row in batch.timeline)


@torch.inference_mode()
def generate_static(
    model: PreTrainedModel, requests: Sequence[Request], batch_size: int
) -> StaticBatchingReport:
    """Run `requests` greedily, in order of arrival, in fixed batches of `batch_size`; the last one
    can be smaller.

    Changes the requests: their outputs and status are set as a scheduler would set them.
    """
    model.eval()
    report = StaticBatchingReport()
    in_order = sorted(requests, key=lambda request: request.arrival_time)
    for first in range(0, len(in_order), batch_size):
        batch = in_order[first : first + batch_size]
        report.batches.append(_run_batch(model, batch, report.num_steps))
    report.token_ids = {request.request_id: request.output_token_ids for request in requests}
    return report


def _run_batch(model: PreTrainedModel, requests: list[Request], start_step: int) -> StaticBatch:
    token_ids, attention_mask = pad_left([request.prompt_token_ids for request in requests])
    token_ids = token_ids.to(model.device)
    attention_mask = attention_mask.to(model.device)
    num_prompt_tokens = sum(request.num_prompt_tokens for request in requests)
    num_padding_tokens = token_ids.numel() - num_prompt_tokens
    positions = (attention_mask.cumsum(dim=1) - 1).clamp(min=0)  # [batch_size, max_len]
    cache = DynamicCache(config=model.config)
    timeline = [""] * len(requests)
    while not all(request.is_finished for request in requests):
        output = model(
            token_ids,
            attention_mask=attention_mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        sampled = output.logits[:, -1].argmax(dim=-1)  # [batch_size]
        use = "u" if timeline[0] else "P"
        for row, (request, token) in enumerate(zip(requests, sampled.tolist(), strict=True)):
            timeline[row] += "." if request.is_finished else use
            if not request.is_finished:
                request.append_output_token(token)
        token_ids = sampled[:, None]  # rows that have finished continue, but are not read
        attention_mask = torch.cat([attention_mask, torch.ones_like(token_ids)], dim=1)
        positions = positions[:, -1:] + 1
    return StaticBatch(
        req_ids=[request.request_id for request in requests],
        start_step=start_step,
        num_prompt_tokens=num_prompt_tokens,
        num_padding_tokens=num_padding_tokens,
        timeline=timeline,
    )


def pad_left(
    prompts: Sequence[Sequence[int]], pad_token_id: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and attention mask, `[batch_size, max_len]` int64. Padding is on the left, so that
    every row's last column is its last token and outputs are appended to one column."""
    max_len = max(map(len, prompts))
    ids = [[pad_token_id] * (max_len - len(p)) + list(p) for p in prompts]
    mask = [[0] * (max_len - len(p)) + [1] * len(p) for p in prompts]
    return torch.tensor(ids), torch.tensor(mask)
