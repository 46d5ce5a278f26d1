"""Chapter 2's scheduler over a memory with a prefix cache: the smallest change that uses a cache.

    look up, then size   a prompt of 100 tokens of which 96 are cached costs 4 of the budget
    wait for equals      blocks that another request computes in this step are cached in the next
    publish              after the forward pass, not before

A request can be overtaken in this queue, but only while its KV is being computed or loaded. A step
tries at most `max_num_seqs` waiting requests, however long the queue is.

See 03_prefix_cache/README.md#the-scheduler-looks-up-then-sizes"""

from __future__ import annotations

from itertools import islice

from kv_memory import NotReady, UncachedKVCacheManager
from paged_fcfs_scheduler import PagedFCFSScheduler
from request import Request, RequestStatus
from scheduler_interface import SchedulerOutput

_WAITING_STATUS = {
    NotReady.IN_FLIGHT: RequestStatus.WAITING,
    NotReady.LOADING: RequestStatus.WAITING_FOR_REMOTE_KVS,
}


class CachingFCFSScheduler(PagedFCFSScheduler):
    """A `PagedFCFSScheduler` that shares prefixes through `kv_memory`."""

    kv_memory: UncachedKVCacheManager

    def _admit(self, budget: int) -> dict[str, int]:
        admitted: dict[str, int] = {}
        for request in islice(self.waiting, self.max_num_seqs):
            if len(self.running) == self.max_num_seqs or not self.can_start(request):
                break
            computed = self.kv_memory.get_computed_blocks(request)
            if isinstance(computed, NotReady):
                request.status = _WAITING_STATUS[computed]
                continue
            num_tokens = request.num_tokens - computed.num_tokens
            num_reserved = request.max_num_tokens - 1 - request.num_tokens
            if num_tokens > budget or not self.kv_memory.allocate_slots(
                request, num_tokens, num_reserved, computed
            ):
                break
            request.num_computed_tokens = request.num_cached_tokens = computed.num_tokens
            self._start_running(request)
            admitted[request.request_id] = num_tokens
            budget -= num_tokens
        for request_id in admitted:
            self.waiting.remove_request(self.requests[request_id])
        return admitted

    def make_plan(
        self, num_tokens: dict[str, int], plan: SchedulerOutput | None = None
    ) -> SchedulerOutput:
        plan = plan or SchedulerOutput()
        plan.block_moves = self.kv_memory.pop_table_updates()
        return super().make_plan(num_tokens, plan)

    def on_positions_computed(self, request: Request, start: int, end: int) -> None:
        if end % self.kv_memory.block_size < end - start:  # a block was filled
            self.kv_memory.cache_blocks(request, end)
