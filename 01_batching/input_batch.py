"""From a plan to tensors: the runner's copies of the requests, and the padded batch.

`RunnerState` receives the plan's delta: it is the runner's own copy of every request. A model needs
a rectangle, so rows are padded on the right to the longest one:

    token ids       attention mask   positions
    6  7  8         1 1 1            0 1 2      a new request with 3 prompt tokens
    12 .  .         1 0 0            3 . .      running: 4 tokens known, 3 computed

Invariants: a row holds exactly the tokens that the plan schedules for its request; padding holds
`pad_token_id` and position 0, never what happened to be in memory. (vLLM and SGLang concatenate the
tokens of all requests without padding, as chapter 2 does.)

See 01_batching/README.md#the-rectangle"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from request import SamplingParams
from scheduler_interface import CachedRequestData, NewRequestData, RunnerInput

if TYPE_CHECKING:  # tests of a scheduler read plans without loading PyTorch
    import torch


@dataclass
class RunnerRequest:
    """The runner's copy of a request."""

    req_id: str
    params: SamplingParams
    prompt_token_ids: list[int]
    output_token_ids: list[int]

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def max_tokens(self) -> int:
        assert self.params.max_tokens is not None, "max_tokens of a Request must be a number"
        return self.params.max_tokens

    def tokens(self, start: int, stop: int) -> list[int]:
        """The tokens at positions `[start, stop)`."""
        num_prompt = len(self.prompt_token_ids)
        if start >= num_prompt:
            return self.output_token_ids[start - num_prompt : stop - num_prompt]
        head = self.prompt_token_ids[start:stop]
        return head + self.output_token_ids[: stop - num_prompt] if stop > num_prompt else head


class RunnerState:
    """The runner's copies of the requests, made from plans alone. A subclass that stores more than
    a request's tokens extends `admit`, `append` and `release`."""

    def __init__(self) -> None:
        self.requests: dict[str, RunnerRequest] = {}

    def apply(self, plan: RunnerInput) -> None:
        """Apply the changes of a plan. Every plan passes through here, once and in order."""
        if plan.reset:
            self.reset()
        # Sorted, so that rows are a function of the plans.
        for req_id in sorted(plan.finished_req_ids):
            self.release(req_id)
        for new in plan.scheduled_new_reqs:
            self.admit(new)
        self.append(plan.scheduled_cached_reqs)

    def admit(self, new: NewRequestData) -> None:
        copy = RunnerRequest(new.req_id, new.sampling_params, new.prompt_token_ids, [])
        self.requests[new.req_id] = copy

    def append(self, changes: CachedRequestData) -> None:
        """Append the new tokens of known requests."""
        for req_id, new, num_outputs in zip(
            changes.req_ids, changes.new_token_ids, changes.num_output_tokens, strict=True
        ):
            outputs = self.requests[req_id].output_token_ids
            first = num_outputs - len(new)  # index of the first new token among the outputs
            # Chapter 4 sends tokens again, from an earlier one on; below 0, from within the prompt.
            outputs[max(first, 0) :] = new[max(-first, 0) :]

    def release(self, req_id: str) -> None:
        del self.requests[req_id]

    def reset(self) -> None:
        """Forget all requests. Their state can be anything: a plan may be half applied."""
        self.requests.clear()


@dataclass(slots=True)
class InputBatch:
    """The tokens of one step, one row for each request. All lists are parallel to `req_ids`."""

    req_ids: list[str]
    token_ids: list[list[int]]  # tokens that each request computes in this step
    start_positions: list[int]  # the position of each row's first token

    @property
    def batch_size(self) -> int:
        return len(self.req_ids)

    def to_tensors(
        self, device: torch.device | str, pad_token_id: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Token ids, attention mask (1 for a token, 0 for padding) and positions, each
        `[batch_size, max_len]` int64, padded on the right."""
        import torch

        max_len = max(map(len, self.token_ids), default=0)
        ids = []
        mask = []
        positions = []
        for row, start in zip(self.token_ids, self.start_positions, strict=True):
            num_padding = max_len - len(row)
            ids.append(row + [pad_token_id] * num_padding)
            mask.append([1] * len(row) + [0] * num_padding)
            positions.append([*range(start, start + len(row))] + [0] * num_padding)
        shape = (self.batch_size, max_len)
        return (
            torch.tensor(ids, device=device).long().view(shape),
            torch.tensor(mask, device=device).long().view(shape),
            torch.tensor(positions, device=device).long().view(shape),
        )


def prepare_inputs_from_scheduler_output(plan: RunnerInput, state: RunnerState) -> InputBatch:
    """Bring `state` up to date and lay out the rows of the plan: new requests first, then known
    ones. Raises `ValueError` for a row that does not end with its request's last known token, which
    would yield no logits to sample from: chapter 1 computes whole prompts."""
    state.apply(plan)
    batch = InputBatch([], [], [])
    for req_id, start in plan.starts().items():
        request = state.requests[req_id]
        stop = start + plan.num_scheduled_tokens[req_id]
        if stop != request.num_tokens:
            raise ValueError(
                f"request {req_id!r}: positions [{start}, {stop}) are scheduled, but only "
                f"{request.num_tokens} tokens are known"
            )
        batch.req_ids.append(req_id)
        batch.token_ids.append(request.tokens(start, stop))
        batch.start_positions.append(start)
    return batch
