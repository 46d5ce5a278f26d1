"""Chapter 1's scheduler over blocks: a request is admitted only if there is memory for it.

A request reserves at admission all memory that it may ever need: for its prompt, and for all tokens
that it may still generate. That is safe, because a running request can never run out, and wasteful,
because most requests stop early. Chapter 4 replaces it.

    prompt 10, max_tokens 30, block_size 16     reserved: 39 positions = 3 blocks

The last token is sampled and never fed back, so it needs no slot. Invariant: a running request's
table reaches every position that it may still write.

See 02_paged_kv/README.md#the-scheduler-asks-for-memory"""

from __future__ import annotations

from collections.abc import Sequence

from base_scheduler import SchedulerPlugin, describe_prompt
from block_delta import BlockDeltaEncoder
from fcfs_scheduler import FCFSScheduler
from kv_cache_manager import KVCacheManager
from request import Request
from scheduler_interface import SchedulerOutput


class PagedFCFSScheduler(FCFSScheduler):
    """An `FCFSScheduler` that allocates from `kv_memory` before it admits a request."""

    def __init__(
        self,
        kv_memory: KVCacheManager,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 2048,
        max_model_len: int | None = None,
        plugins: Sequence[SchedulerPlugin] = (),
    ) -> None:
        delta = BlockDeltaEncoder(kv_memory)
        super().__init__(max_num_seqs, max_num_batched_tokens, max_model_len, delta, plugins)
        self.kv_memory = kv_memory

    def check_prompt(self, request: Request) -> None:
        super().check_prompt(request)
        max_tokens = min([request.max_tokens, *self.length_limits(request).values()])
        num_positions = request.num_prompt_tokens + max_tokens - 1
        if num_positions > self.kv_memory.capacity:
            raise ValueError(
                f"{describe_prompt(request)} and max_tokens is {max_tokens}, but {num_positions} "
                "positions do not fit the KV cache even when it is empty; lower max_tokens or "
                "raise num_blocks"
            )

    def _allocate(self, request: Request) -> bool:
        num_reserved = request.max_num_tokens - 1 - request.num_tokens
        return self.kv_memory.allocate_slots(request, request.num_tokens, num_reserved)

    def _free_request(self, request: Request) -> None:
        self.kv_memory.free(request)
        super()._free_request(request)

    def make_plan(
        self, num_tokens: dict[str, int], plan: SchedulerOutput | None = None
    ) -> SchedulerOutput:
        plan = plan or SchedulerOutput()
        plan.num_kv_blocks_in_use = self.kv_memory.num_blocks_in_use
        return super().make_plan(num_tokens, plan)
