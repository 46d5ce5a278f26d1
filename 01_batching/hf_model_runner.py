"""`HFModelRunner`: serves any causal language model of `transformers`, in two ways.

One at a time (`batched=False`): a step calls the model, and so reads its weights, once per request.

Batched (`batched=True`): one call per step. Keys and values of requests with different pasts must
become one tensor, so every step stacks them, padded to the longest, with slots for the new ones:

                     past, padded to the longest   | new, padded to the longest
    A (prefill, 3)   . . . . . .                   | a0 a1 a2
    B (decode)       b0 b1 b2 b3 . .               | b4 .  .
    C (decode)       c0 c1 c2 c3 c4 c5             | c6 .  .

After the call the new keys and values are cut out and appended to each request's own. All KV is
copied twice to add one token per request; in chapter 2, attention reads KV without copying.

Invariants: between two steps the runner holds KV for exactly the positions that the scheduler
counts as computed; padding is zero, never uninitialised (a masked NaN is still a NaN: 0 * NaN).

See 01_batching/README.md#calling-the-model"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from input_batch import InputBatch, RunnerState, prepare_inputs_from_scheduler_output
from scheduler_interface import NO_FINITE_LOGITS, FinishedStep, RunnerInput, StepOutput, StepTimer


def sample_greedy(logits: torch.Tensor, req_ids: Sequence[str]) -> StepOutput:
    """Pick the most likely token from each row of `logits` `[len(req_ids), vocab_size]`; of equals,
    the lowest id."""
    highest, tokens = logits.max(dim=-1)  # NaN counts as the highest
    # The host waits for the device only in `tolist`.
    tokens = torch.where(highest.isfinite(), tokens, -1).tolist()
    chosen = dict(zip(req_ids, tokens, strict=True))
    return StepOutput(
        {req_id: [token] for req_id, token in chosen.items() if token >= 0},
        errors={req_id: NO_FINITE_LOGITS for req_id, token in chosen.items() if token < 0},
    )


class StackedKV(DynamicCache):
    """The pasts of all rows as one `past_key_values`, for one call of the model. The model passes
    the new keys and values of each layer to `update`, which stores them in `new[layer]`."""

    def __init__(self, caches: list[DynamicCache], max_past: int) -> None:
        super().__init__()
        self.caches = caches
        self.max_past = max_past
        self.new: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.num_bytes_stacked = 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert layer_idx == len(self.new), "layers must be updated in order, each once"
        self.new.append((key_states, value_states))  # [batch_size, num_kv_heads, max_new, head_dim]
        keys, values = zip(*(_kv_of(cache.layers[layer_idx]) for cache in self.caches), strict=True)
        return self._stack(keys, key_states), self._stack(values, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.max_past

    def _stack(self, pasts: Sequence[torch.Tensor | None], new: torch.Tensor) -> torch.Tensor:
        """Stack pasts and new keys or values, `[batch_size, num_kv_heads, max_past + max_new,
        head_dim]`. A past of None is a row without past."""
        if self.max_past == 0:
            return new
        batch_size, num_kv_heads, max_new, head_dim = new.shape
        stacked = new.new_zeros(batch_size, num_kv_heads, self.max_past + max_new, head_dim)
        for row, past in zip(stacked, pasts, strict=True):
            if past is not None:
                row[:, : past.shape[2]] = past[0]
        stacked[:, :, self.max_past :] = new
        self.num_bytes_stacked += stacked.nbytes
        return stacked


class HFModelRunner:
    """A greedy `ModelRunner` for `model`, on its device and in its dtype. Raises `ValueError` if
    `batched` and some layers keep something other than all keys and values (sliding windows,
    recurrent state), which cannot be stacked."""

    def __init__(self, model: PreTrainedModel, batched: bool = True) -> None:
        for layer in DynamicCache(config=model.config).layers if batched else ():
            if type(layer) is not DynamicLayer:
                raise ValueError(
                    f"batched must be False for {type(model).__name__}, got True: one of its "
                    f"layers keeps a {type(layer).__name__}, and only a plain DynamicLayer can be "
                    "stacked"
                )
        self.model = model.eval()
        self.batched = batched
        self.state = RunnerState()
        self.num_model_calls = 0
        self.num_bytes_copied = 0  # KV written by stacking and appending, new KV included
        self.num_bytes_new = 0  # KV of the computed tokens: the minimum to write
        self._caches = defaultdict[str, DynamicCache](lambda: DynamicCache(config=model.config))

    def execute(self, plan: RunnerInput) -> FinishedStep:
        clock, output = StepTimer(), StepOutput()
        batch = self.prepare(plan)
        clock.lap("prepare_ms")
        if batch.req_ids:
            logits = self.forward(batch)
            clock.lap("forward_ms")
            output = sample_greedy(logits, batch.req_ids)
            clock.lap("sample_ms")
        output.times = clock.ms
        return FinishedStep(output)

    def prepare(self, plan: RunnerInput) -> InputBatch:
        """Drop the KV of finished requests, and lay out the tokens."""
        if plan.reset:
            self._caches.clear()
        for req_id in plan.finished_req_ids:
            self._caches.pop(req_id, None)
        return prepare_inputs_from_scheduler_output(plan, self.state)

    @torch.inference_mode()
    def forward(self, batch: InputBatch) -> torch.Tensor:
        """Compute the logits after each row's last token, `[batch_size, vocab_size]`, and keep the
        rows' KV. Raises `ValueError` if a row does not start where the KV of its request ends."""
        for req_id, start in zip(batch.req_ids, batch.start_positions, strict=True):
            if start != (num_held := self.num_computed_tokens(req_id)):
                raise ValueError(
                    f"request {req_id!r}: row starts at position {start}, but KV is held for "
                    f"{num_held} positions"
                )
        caches = [self._caches[req_id] for req_id in batch.req_ids]
        run = self._forward_batched if self.batched else self._forward_one_by_one
        logits = run(batch, caches)
        for cache, row in zip(caches, batch.token_ids, strict=True):
            # A DynamicCache grows by concatenation, so it has just rewritten all of its KV.
            kv = [tensor for layer in cache.layers for tensor in _kv_of(layer)]
            num_bytes = sum(tensor.nbytes for tensor in kv if tensor is not None)
            self.num_bytes_copied += num_bytes
            self.num_bytes_new += num_bytes * len(row) // cache.get_seq_length()
        return logits

    def _forward_one_by_one(self, batch: InputBatch, caches: list[DynamicCache]) -> torch.Tensor:
        logits = []
        device = self.model.device
        for row, start, cache in zip(batch.token_ids, batch.start_positions, caches, strict=True):
            output = self.model(
                torch.tensor([row], device=device),
                position_ids=torch.arange(start, start + len(row), device=device)[None],
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            self.num_model_calls += 1
            logits.append(output.logits[0, -1])
        return torch.stack(logits)

    def _forward_batched(self, batch: InputBatch, caches: list[DynamicCache]) -> torch.Tensor:
        """Call the model once for all rows: stack, compute, cut out and append."""
        device = self.model.device
        past_lens = batch.start_positions
        token_ids, _, positions = batch.to_tensors(device)
        new_lens = [len(row) for row in batch.token_ids]
        stacked = StackedKV(caches, max(past_lens))
        last = torch.tensor(new_lens, device=device) - 1
        columns, column_of_row = torch.unique(last, return_inverse=True)
        output = self.model(
            token_ids,
            attention_mask=make_mask(past_lens, max(new_lens), self.model.dtype, device),
            position_ids=positions,
            past_key_values=stacked,
            use_cache=True,
            logits_to_keep=columns,  # not for every prompt token, because the vocabulary is large
        )
        self.num_model_calls += 1
        self.num_bytes_copied += stacked.num_bytes_stacked
        for index, (cache, new_len) in enumerate(zip(caches, new_lens, strict=True)):
            row = slice(index, index + 1)
            for layer, (keys, values) in enumerate(stacked.new):
                cache.update(keys[row, :, :new_len], values[row, :, :new_len], layer)
        return output.logits[torch.arange(batch.batch_size, device=device), column_of_row]

    def num_computed_tokens(self, req_id: str) -> int:
        """Number of positions of the request whose KV is held."""
        return self._caches[req_id].get_seq_length() if req_id in self._caches else 0


def make_mask(
    past_lens: Sequence[int], max_new: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """The mask to add to attention scores: 0 where a new token may attend, else the lowest number.
    `[batch_size, 1, max_new, max_past + max_new]`. A token attends to the past of its row and the
    new tokens up to itself. A padding token does too, so that no softmax runs over nothing."""
    past = torch.tensor(past_lens, device=device)[:, None]
    sees_past = torch.arange(max(past_lens), device=device) < past  # [batch_size, max_past]
    sees_new = torch.ones(max_new, max_new, dtype=torch.bool, device=device).tril()
    sees_past = sees_past[:, None].expand(-1, max_new, -1)
    visible = torch.cat([sees_past, sees_new.expand(len(past_lens), -1, -1)], dim=2)
    mask = torch.zeros(visible.shape, dtype=dtype, device=device)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min)[:, None]


def _kv_of(layer: object) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Keys and values `[1, num_kv_heads, num_tokens, head_dim]`; None where a layer keeps none."""
    return (layer.keys, layer.values) if isinstance(layer, DynamicLayer) else (None, None)
