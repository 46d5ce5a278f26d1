"""A small model that proposes draft tokens for the large one.

It has its own keys and values, in its own tensors, but in the *same blocks*: slot s of its cache
belongs to the same request as slot s of the target's. So it needs no memory manager; it only has to
track how far its KV reaches. With n known tokens and 3 drafts:

    position          n-2     n-1     n      n+1    n+2
    token             known   last    d0     d1     d2
    target's KV       yes     -       -      -      -        n - 1 positions
    draft's KV        yes     wrote   wrote  wrote  -        fed last, d0, d1; the output was d2

Accepted draft tokens are known tokens now, and their KV stays; later positions are overwritten. If
all were accepted, d2 has no KV yet: the draft model lags by one more token and is fed two.

The same rule lets it catch up with anything: it computes from the end of its KV to the last known
token. After a prefix-cache hit that is the whole prompt, because blocks that another request
computed, or a disk, may have no KV of the draft. Nothing would look wrong, except that fewer draft
tokens are accepted. In a shared block it writes what is there already, or what no other has read.

Invariants: positions below `num_computed` hold the draft's KV of the request's own tokens; nothing
is written outside the request's own table. vLLM keeps the draft's KV in layers of the same manager,
so that a hit brings it; it once had the bug of a missing last token (Trap 41).

See 05_spec_decode/README.md#where-draft-tokens-come-from"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

import numpy as np
import torch

from batch_layout import ComposedBatch, Queries, all_to_device, compose_in_order
from input_batch import RunnerRequest
from kv_memory import SharingRunnerState
from paged_attention import AttentionBackend, PagedKVCache
from proposers import ProposerInput
from request import check_integers


class DraftModel(Protocol):
    """A decoder over a paged cache; its tokens are the target's."""

    num_heads: int

    def __call__(
        self, batch: ComposedBatch, kv_cache: PagedKVCache
    ) -> torch.Tensor:  # [num_logit_rows, vocab_size]
        ...


class DraftSampler(Protocol):
    def prepare(self, rounds: Sequence[Sequence[RunnerRequest]], device: torch.device) -> None:
        """Send what the device needs for the rounds of proposing: the requests of `rounds[n]` have
        `n` drafts already, and were in the rounds before."""

    def sample_drafts(
        self, logits: torch.Tensor, requests: Sequence[RunnerRequest], num_drafted: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Choose the next draft token of each request from `logits` [R, vocab_size]; each has
        `num_drafted` already. Returns `(tokens [R] int64, probs [R, vocab_size])`, where `probs`
        are the distributions they were drawn from, or None if the rejection rule does not need
        them."""
        ...

    def needs_probs(self, request: RunnerRequest) -> bool:
        """Whether the request's draft tokens are verified with probabilities."""
        ...


@dataclass(slots=True)
class _Follower:
    """How far the draft model has followed a request."""

    block_ids: list[int] = field(default_factory=list)  # when the table was last read
    num_final: int = 0  # leading blocks that were full before that step, and do not change
    num_computed: int = 0  # positions with the draft's KV
    # Draft tokens whose KV is in the last of those positions.
    drafts: list[int] = field(default_factory=list)


class DraftModelProposer:
    """`kv_cache` has the draft's layers and the target's number and size of blocks; `state` is the
    state of the target's runner. Positions from `max_model_len` on get no draft tokens."""

    def __init__(
        self,
        model: DraftModel,
        kv_cache: PagedKVCache,
        backend: AttentionBackend,
        state: SharingRunnerState,
        num_spec_tokens: int = 4,
        *,
        sampler: DraftSampler,
        max_model_len: int = 2048,
    ) -> None:
        check_integers(1, num_spec_tokens=num_spec_tokens)
        self.model = model
        self.backend = backend
        self.kv_cache = kv_cache
        self.state = state
        self.num_spec_tokens = num_spec_tokens
        # Written: the last known token and every draft token except the last, which is never fed
        # back.
        self.num_lookahead_tokens = num_spec_tokens
        self.max_model_len = max_model_len
        self.sampler = sampler
        self.block_size = kv_cache.block_size
        self.device = kv_cache.key_cache[0].device
        self.num_computed_tokens = 0  # total number fed to the draft model
        self._followers: dict[str, _Follower] = {}
        self._probs: dict[str, torch.Tensor] = {}

    # -- the interface

    @torch.inference_mode()
    def propose(
        self, inputs: Sequence[ProposerInput], num_drafts: Sequence[int]
    ) -> dict[str, list[int]]:
        work = [
            self._plan(f, min(num, self.num_spec_tokens))
            for f, num in zip(inputs, num_drafts, strict=True)
        ]
        for f in inputs:
            self._probs.pop(f.request.req_id, None)
        work = [w for w in work if w.stop > w.follower.num_computed]
        work.sort(key=lambda w: -w.num_drafts)  # requests with more drafts come first
        drafting = [w for w in work if w.num_drafts]
        if not work:
            return {}
        rounds = [
            [w for w in drafting if w.num_drafts > num_drafted]
            for num_drafted in range(max((w.num_drafts for w in drafting), default=0))
        ]
        columns = self._propose_rounds(rounds, self._compose(work, rounds))
        read = iter(torch.cat(columns).tolist() if columns else ())  # the host waits here, once
        drafts = {w.request.req_id: [] for w in drafting}
        for active in rounds:
            for w, token in zip(active, read):
                drafts[w.request.req_id].append(token)
        for w in work:
            w.follower.drafts = drafts.get(w.request.req_id, [])[:-1]  # the last one is not fed
            w.follower.num_computed = w.stop + len(w.follower.drafts)
        return drafts

    def draft_probs(self, request_id: str) -> torch.Tensor | None:
        return self._probs.get(request_id)

    def remove_request(self, request_id: str) -> None:
        self._probs.pop(request_id, None)
        self._followers.pop(request_id, None)

    # -- how far the KV reaches

    def _plan(self, inputs: ProposerInput, num_drafts: int) -> _Work:
        """Plan the work for a request: up to its last known token if draft tokens are needed, else
        as far as the target is; in either case only where there are slots."""
        follower = self._followers.setdefault(inputs.request.req_id, _Follower())
        self._take_back_wrong(inputs.request, follower)
        self._read_table(inputs, follower)
        num_slots = min(len(follower.block_ids) * self.block_size, self.max_model_len)
        num_known = inputs.request.num_tokens
        num_drafts = max(0, min(num_drafts, num_slots - num_known + 1))
        stop = num_known if num_drafts else min(inputs.num_computed_tokens, num_slots)
        return _Work(inputs, follower, stop, num_drafts)

    def _take_back_wrong(self, request: RunnerRequest, follower: _Follower) -> None:
        """Drop the KV of wrong draft tokens; correct ones stay, verified or not. The last known
        token has to be fed in any case, because the model's output after it is needed."""
        start = follower.num_computed - len(follower.drafts)
        tokens = request.tokens(start, start + len(follower.drafts))
        num_right = 0
        while num_right < len(tokens) and tokens[num_right] == follower.drafts[num_right]:
            num_right += 1
        follower.num_computed = min(start + num_right, request.num_tokens - 1)
        follower.drafts = []

    def _read_table(self, inputs: ProposerInput, follower: _Follower) -> None:
        """Read the block table. A block that was filled since the last time may have been replaced
        by a cached block of the same content, which may not have the draft's KV."""
        first = follower.num_final
        block_ids = self.state.block_ids(inputs.request.req_id, first)
        for index, (before, now) in enumerate(zip(follower.block_ids[first:], block_ids), first):
            if before != now:
                follower.num_computed = min(follower.num_computed, index * self.block_size)
                break
        follower.block_ids[first:] = block_ids
        follower.num_final = inputs.start // self.block_size

    # -- the model

    def _compose(self, work: list[_Work], rounds: list[list[_Work]]) -> list[ComposedBatch]:
        """Lay out the input of the model for each round. The first round catches up on all missing
        known tokens, and predicts after the last one of requests that need drafts. The other rounds
        feed one draft token of each, which is only on the device. One copy for all rounds."""
        starts = np.array([w.follower.num_computed for w in work])
        lens = np.array([w.stop for w in work]) - starts
        is_drafting = np.array([w.num_drafts > 0 for w in work], dtype=np.int64)
        parts = [Queries(self._rows_of(work), starts, lens, is_drafting)]
        for num_drafted, active in enumerate(rounds[1:], 1):
            starts = np.array([w.stop + num_drafted - 1 for w in active])
            one = np.ones_like(starts)
            parts.append(Queries(self._rows_of(active), starts, one, one))
        self.state.widen(max(int((part.starts + part.num_tokens).max()) for part in parts))
        layouts = [compose_in_order(self.state, part, self.block_size) for part in parts]
        self.sampler.prepare([[w.request for w in active] for active in rounds], self.device)
        arrays = [array for layout in layouts for array in layout.arrays]
        sent = iter(all_to_device(self.device, arrays))
        return [layout.compose(list(islice(sent, len(layout.arrays)))) for layout in layouts]

    def _rows_of(self, work: list[_Work]) -> np.ndarray:
        return self.state.rows_of([w.request.req_id for w in work])

    def _propose_rounds(
        self, rounds: list[list[_Work]], batches: list[ComposedBatch]
    ) -> list[torch.Tensor]:
        """Propose draft tokens: one column [num_requests in this round] for each round."""
        columns: list[torch.Tensor] = []
        probs: list[torch.Tensor | None] = []
        logits = self._forward(batches[0])
        for num_drafted, active in enumerate(rounds):
            if num_drafted:
                batches[num_drafted].input_ids = columns[-1][: len(active)]
                logits = self._forward(batches[num_drafted])
            requests = [w.request for w in active]
            column, column_probs = self.sampler.sample_drafts(logits, requests, num_drafted)
            columns.append(column)
            probs.append(column_probs)
        for index, w in enumerate(rounds[0] if rounds else ()):
            if self.sampler.needs_probs(w.request):
                rows = [p[index] for p in probs[: w.num_drafts] if p is not None]
                self._probs[w.request.req_id] = torch.stack(rows)
        return columns

    def _forward(self, batch: ComposedBatch) -> torch.Tensor:
        self.num_computed_tokens += len(batch.input_ids)
        batch.plan_attention(self.backend, self.model.num_heads, self.kv_cache)
        return self.model(batch, self.kv_cache)


@dataclass(slots=True)
class _Work:
    inputs: ProposerInput
    follower: _Follower = field(repr=False)
    stop: int  # known tokens before this position are fed
    num_drafts: int

    @property
    def request(self) -> RunnerRequest:
        return self.inputs.request
