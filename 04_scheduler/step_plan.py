"""The plan of a step while it is built, and the message fields that preemption adds for the runner.

never sent                  -> NewRequestData: prompt, whole block table       (chapters 1, 2)
sent before                 -> CachedRequestData: new tokens, new blocks
preempted, now resumed      -> CachedRequestData: all tokens, whole block table; the new table has
                               nothing in common with the one that the runner has

See 04_scheduler/README.md#the-step-begun-and-finished"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from block_delta import BlockDeltaEncoder
from kv_cache_manager import KVCacheManager
from request import Request
from scheduler_interface import SchedulerOutput


class Admission(Enum):
    """The outcome of trying to admit a waiting request."""

    # Try the next request.
    ADMITTED = "admitted"
    SKIPPED = "skipped"  # not ready, or a plugin or the chunk policy rejects it
    # Admission stops.
    BATCH_FULL = "seat"
    CONSTRAINT = "constraint"
    BUDGET = "budget"
    BLOCKS = "blocks"

    @property
    def continues(self) -> bool:
        return self in (Admission.ADMITTED, Admission.SKIPPED)


@dataclass(slots=True)
class StepPlan:
    """A step's plan while the scheduler builds it. `num_tokens` is in scheduling order; removing a
    request is one `pop`."""

    budget: int
    num_uncomputed_tokens: Callable[[Request], int]
    num_recomputed_before: int  # in all steps before
    num_tokens: dict[str, int] = field(default_factory=dict)
    admitted: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    # By request that got less than it needs.
    num_deferred_tokens: dict[str, int] = field(default_factory=dict)
    has_chunk: bool = False  # a chunk was scheduled or considered in this step
    # Why admission stopped, and the id of the request at which it did.
    stop: tuple[str, str] | None = None
    _num_decodes: list[int] = field(default_factory=list)

    def add(self, request: Request, num_tokens: int) -> None:
        self.num_tokens[request.request_id] = num_tokens
        self.budget -= num_tokens

    def defer(self, request: Request, num_tokens: int) -> None:
        """Note that `num_tokens` of the tokens that the request needs are left for later steps."""
        if num_tokens:
            self.num_deferred_tokens[request.request_id] = num_tokens

    def remove(self, request: Request) -> None:
        self.budget += self.num_tokens.pop(request.request_id, 0)
        self.num_deferred_tokens.pop(request.request_id, None)

    def num_decodes_after(self, running: Sequence[Request], index: int) -> int:
        """How many requests after `running[index]` need only one token. Counted once per step."""
        if not self._num_decodes:
            counts = [0]
            for request in reversed(running[1:]):
                counts.append(counts[-1] + (self.num_uncomputed_tokens(request) == 1))
            self._num_decodes = counts[::-1]
        return self._num_decodes[index]


class PreemptionDeltaEncoder(BlockDeltaEncoder):
    def __init__(self, kv_memory: KVCacheManager) -> None:
        super().__init__(kv_memory)
        self._preempted: set[str] = set()

    def request_preempted(self, request_id: str) -> None:
        """Mark the runner's copy of the request as stale, so that it will be sent again in full."""
        if self.is_tracked(request_id):
            self._num_sent[request_id] = 0
            self._num_blocks.pop(request_id, None)
            self._preempted.add(request_id)

    def remove_request(self, request_id: str) -> None:
        super().remove_request(request_id)
        self._preempted.discard(request_id)

    def encode(self, plan: SchedulerOutput) -> None:
        super().encode(plan)
        if self._preempted:
            resumed = self._preempted.intersection(plan.num_scheduled_tokens)
            plan.scheduled_cached_reqs.resumed_req_ids = resumed
            self._preempted -= resumed
