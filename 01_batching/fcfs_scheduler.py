"""First come, first served, decided again in every iteration: a free slot of the batch is filled in
the next step (Orca, OSDI 2022). One step has a budget of `max_num_batched_tokens`:

    | one token for each running request | whole prompts from the front of the queue | unused |
    0                           len(running)                              max_num_batched_tokens

Invariants: `len(running) <= max_num_seqs`; no plan exceeds the budget; between two steps, a running
request has exactly one uncomputed token.

See 01_batching/README.md#which-requests-compute-how-much"""

from __future__ import annotations

from collections.abc import Sequence

from base_scheduler import BaseScheduler, DeltaEncoder, SchedulerPlugin
from request import Request, RequestStatus
from request_queue import RequestQueue
from scheduler_interface import SchedulerOutput


class FCFSScheduler(BaseScheduler):
    """Iteration-level scheduling of whole prompts."""

    def __init__(
        self,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 2048,
        max_model_len: int | None = None,
        delta: DeltaEncoder | None = None,
        plugins: Sequence[SchedulerPlugin] = (),
    ) -> None:
        super().__init__(
            waiting=RequestQueue(),
            delta=delta or DeltaEncoder(),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            plugins=plugins,
        )

    def schedule(self) -> SchedulerOutput:
        """Plan a step: new requests first, then one token for each request that was already
        running."""
        were_running = self.runnable_ids()
        admitted = self._admit(self.max_num_batched_tokens - len(self.running))
        return self.make_plan(admitted | dict.fromkeys(were_running, 1))

    def _admit(self, budget: int) -> dict[str, int]:
        """Move requests from the front of the queue to `running` for as long as they fit. Returns
        their numbers of tokens to compute, by id."""
        admitted: dict[str, int] = {}
        while self.waiting and len(self.running) < self.max_num_seqs:
            request = self.waiting.peek_request()
            num_tokens = request.num_tokens
            if num_tokens > budget or not self.can_start(request) or not self._allocate(request):
                break
            self._start_running(self.waiting.pop_request())
            admitted[request.request_id] = num_tokens
            budget -= num_tokens
        return admitted

    def _allocate(self, request: Request) -> bool:
        """Reserve memory for a request, or return False. Called last, because a subclass may
        reserve. Chapter 1 has no limited memory."""
        return True

    def _start_running(self, request: Request) -> None:
        request.status = RequestStatus.RUNNING
        self.running[request.request_id] = request
        for plugin in self.plugins:
            plugin.on_start(request)

    def check_invariants(self) -> None:
        super().check_invariants()
        assert len(self.running) <= self.max_num_batched_tokens
        for request in self.running.values():
            num_known = request.num_tokens + request.num_output_placeholders
            assert num_known - request.num_computed_tokens == 1, repr(request)
