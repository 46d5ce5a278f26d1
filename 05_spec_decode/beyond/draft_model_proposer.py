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
from typing import Any, Protocol

import numpy as np
import torch

from batch_layout import Queries, compose_in_order
from input_batch import RunnerRequest
from kv_memory import SharingRunnerState
from paged_attention import AttentionBackend, PagedKVCache
from proposers import ProposerInput


class DraftSampler(Protocol):
    def prepare(self, rounds: Sequence[Sequence[RunnerRequest]], device: torch.device) -> None:
        """Send what the device needs for the rounds of proposing: the requests of `rounds[n]` have
        `n` drafts already, and were in the rounds before."""

    def sample_drafts(
        self, logits: torch.Tensor, num_drafted: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Choose the next draft token of each request in round `num_drafted` from `logits` [R,
        vocab_size]. Returns `(tokens [R] int64, probs [R, vocab_size])`, where `probs` are the
        distributions they were drawn from, or None if the rejection rule does not need them."""
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
    drafts: list[int] = field(default_factory=list)  # whose KV is in the last of these positions
    probs: torch.Tensor | None = None  # of the last proposal


@dataclass(slots=True)
class _Work:
    request: RunnerRequest
    follower: _Follower
    stop: int  # known tokens before this position are fed
    num_drafts: int


class DraftModelProposer:
    """`kv_cache` has the draft's layers and the target's number and size of blocks; `state` is the
    state of the target's runner. Positions from `max_model_len` on get no draft tokens."""

    def __init__(
        self,
        model: Any,  # a decoder over a paged cache; its tokens are the target's
        kv_cache: PagedKVCache,
        backend: AttentionBackend,
        state: SharingRunnerState,
        num_spec_tokens: int = 4,
        *,
        sampler: DraftSampler,
        max_model_len: int = 2048,
    ) -> None:
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
        self.num_computed_tokens = 0  # total number fed to the draft model
        self._followers: dict[str, _Follower] = {}

    @torch.inference_mode()
    def propose(
        self, inputs: Sequence[ProposerInput], num_drafts: Sequence[int]
    ) -> dict[str, list[int]]:
        work = [self._plan(f, num) for f, num in zip(inputs, num_drafts, strict=True)]
        work = [w for w in work if w.stop > w.follower.num_computed]
        if not work:
            return {}
        work.sort(key=lambda w: -w.num_drafts)  # requests with more drafts come first
        rounds = [[w for w in work if w.num_drafts > n] for n in range(work[0].num_drafts)]
        columns = self._propose_rounds(work, rounds)
        read = iter(torch.cat(columns).tolist() if columns else ())  # the host waits here, once
        drafts = {w.request.req_id: [] for w in work if w.num_drafts}
        for active in rounds:
            for w, token in zip(active, read):
                drafts[w.request.req_id].append(token)
        for w in work:
            w.follower.drafts = drafts.get(w.request.req_id, [])[:-1]  # the last one is not fed
            w.follower.num_computed = w.stop + len(w.follower.drafts)
        return drafts

    def draft_probs(self, request_id: str) -> torch.Tensor | None:
        follower = self._followers.get(request_id)
        return follower and follower.probs

    def remove_request(self, request_id: str) -> None:
        self._followers.pop(request_id, None)

    # -- how far the KV reaches

    def _plan(self, inputs: ProposerInput, num_drafts: int) -> _Work:
        """Plan the work for a request: up to its last known token if draft tokens are needed, else
        as far as the target is; in either case only where there are slots."""
        request = inputs.request
        follower = self._followers.setdefault(request.req_id, _Follower())
        follower.probs = None
        self._take_back_wrong(request, follower)
        self._read_table(inputs, follower)
        num_slots = min(len(follower.block_ids) * self.block_size, self.max_model_len)
        num_known = request.num_tokens
        num_drafts = max(0, min(num_drafts, num_slots - num_known + 1))
        stop = num_known if num_drafts else min(inputs.num_computed_tokens, num_slots)
        return _Work(request, follower, stop, num_drafts)

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

    def _propose_rounds(self, work: list[_Work], rounds: list[list[_Work]]) -> list[torch.Tensor]:
        """Propose draft tokens: one column [num_requests in this round] for each round. The first
        round catches up on all missing known tokens, and predicts after the last one of requests
        that need drafts. The others feed one draft token of each, which is only on the device."""
        self.sampler.prepare(
            [[w.request for w in active] for active in rounds], self.kv_cache.key_cache[0].device
        )
        starts = np.array([w.follower.num_computed for w in work])
        stops = np.array([w.stop for w in work])
        is_drafting = np.array([w.num_drafts > 0 for w in work], dtype=np.int64)
        logits = self._forward(work, starts, stops - starts, is_drafting)
        columns: list[torch.Tensor] = []
        probs: list[torch.Tensor | None] = []
        for num_drafted, active in enumerate(rounds):
            n = len(active)
            if num_drafted:
                one = np.ones(n, dtype=np.int64)
                starts = stops[:n] + num_drafted - 1
                logits = self._forward(active, starts, one, one, columns[-1][:n])
            column, column_probs = self.sampler.sample_drafts(logits, num_drafted)
            columns.append(column)
            probs.append(column_probs)
        for index, w in enumerate(work):
            if w.num_drafts and self.sampler.needs_probs(w.request):
                rows = [p[index] for p in probs[: w.num_drafts] if p is not None]
                w.follower.probs = torch.stack(rows)
        return columns

    def _forward(
        self,
        work: list[_Work],
        starts: np.ndarray,
        lens: np.ndarray,
        num_logit_rows: np.ndarray,
        drafts: torch.Tensor | None = None,  # instead of the state's tokens
    ) -> torch.Tensor:
        rows = self.state.rows_of([w.request.req_id for w in work])
        self.state.widen(int((starts + lens).max()))
        queries = Queries(rows, starts, lens, num_logit_rows)
        layout = compose_in_order(self.state, queries, self.block_size)
        batch = layout.on(self.kv_cache.key_cache[0].device)
        if drafts is not None:
            batch.input_ids = drafts
        self.num_computed_tokens += len(batch.input_ids)
        batch.plan_attention(self.backend, self.model.num_heads, self.kv_cache)
        return self.model(batch, self.kv_cache)
