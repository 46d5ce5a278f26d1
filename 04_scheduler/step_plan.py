"""A plan while it is made, and what preemption adds to the message that the runner gets of it.

never sent                  -> NewRequestData: prompt, whole block table       (chapters 1, 2)
sent before                 -> CachedRequestData: new tokens, new blocks
preempted, now resumed      -> CachedRequestData: all tokens, whole block table; its new table
                               has nothing in common with the one that the runner has
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from block_delta import BlockDelta
from kv_cache_manager import BlockMemory
from request import Request
from scheduler_interface import EngineCoreOutput, SchedulerOutput


@dataclass(slots=True)
class StepPlan:
    """`num_tokens` is in the order of planning; taking a request out again is one `pop`. A step is
    routine for a request if it writes one token, into a block that is held, below every limit."""

    budget: int
    num_behind: Callable[[Request], int]
    num_tokens: dict[str, int] = field(default_factory=dict)
    decided: set[str] = field(default_factory=set)  # those whose step is not routine
    admitted: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    num_left: dict[str, int] = field(default_factory=dict)  # of those that got less than they need
    has_piece: bool = False  # somebody got a piece of a prompt, or was asked whether it takes one
    stop: tuple[str, str] | None = None  # what ended admission, and at whom
    _num_decodes: list[int] = field(default_factory=list)

    def add(self, request: Request, num_tokens: int, num_left: int = 0) -> None:
        """Compute so many tokens of it. `num_left` have to wait for another step."""
        self.num_tokens[request.request_id] = num_tokens
        self.decided.add(request.request_id)
        self.budget -= num_tokens
        if num_left:
            self.num_left[request.request_id] = num_left

    def remove(self, request: Request) -> None:
        self.budget += self.num_tokens.pop(request.request_id, 0)
        self.num_left.pop(request.request_id, None)

    def without(self, request: Request) -> StepPlan:
        """What it would be if the request were removed. This plan stays as it is."""
        plan = StepPlan(self.budget, self.num_behind, {**self.num_tokens})
        plan.num_left = {**self.num_left}
        plan.remove(request)
        return plan

    def num_decodes_behind(self, running: Sequence[Request], index: int) -> int:
        """How many of those behind `running[index]` need one token only. Counted once a step."""
        if not self._num_decodes:
            counts = [0]
            for request in reversed(running[1:]):
                counts.append(counts[-1] + (self.num_behind(request) == 1))
            self._num_decodes = counts[::-1]
        return self._num_decodes[index]


@dataclass(slots=True)
class PreemptingPlan(SchedulerOutput):
    """The finished plan, with what only its scheduler's process is told."""

    preempted_requests: list[Request] = field(default_factory=list)
    admission_stop: tuple[str, str] | None = None  # what ended it, at whom ("": nobody)
    decided_req_ids: Collection[str] = ()  # all others take a routine step
    num_recomputed_tokens: int = 0


@dataclass(slots=True)
class StepResults(Sequence[EngineCoreOutput]):
    """What a step did for each request. Who got one token and goes on is not in `decided`: an
    object is made of it when somebody looks."""

    request_ids: list[str]
    token_ids: dict[str, list[int]]
    decided: dict[str, EngineCoreOutput] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.request_ids)

    def __getitem__(self, index: int) -> EngineCoreOutput:
        name = self.request_ids[index]
        return self.decided.get(name) or EngineCoreOutput(name, self.token_ids[name])


class PreemptionDelta(BlockDelta):
    def __init__(self, kv_memory: BlockMemory) -> None:
        super().__init__(kv_memory)
        self._preempted: set[str] = set()

    def request_preempted(self, request_id: str) -> None:
        """Of what the runner knows of it, nothing holds any more. It will be sent whole."""
        if self.knows(request_id):
            self._num_sent[request_id] = 0
            self._num_blocks.pop(request_id, None)
            self._preempted.add(request_id)

    def forget(self, request_id: str) -> None:
        super().forget(request_id)
        self._preempted.discard(request_id)

    def encode(self, plan: SchedulerOutput) -> None:
        super().encode(plan)
        if self._preempted:
            resumed = self._preempted.intersection(plan.num_scheduled_tokens)
            plan.scheduled_cached_reqs.resumed_req_ids = resumed
            self._preempted -= resumed
