"""A batch of the prefill-first scheduler: requests that take the same kind of step together.

Requests come and go, so a batch is a list that is merged with others and filtered. It knows how
many pages its next decode needs, and which requests to retract if they are not available.

    next decode of a request, pages of 4:      | 0 1 2 3 | 4 5 6 . |     position 7: nothing
                                               | 0 1 2 3 | 4 5 6 7 |     position 8: a page

SGLang's `ScheduleBatch` also holds the tensors of the batch; here those are the runner's.

See 04_scheduler/beyond/PREFILL_FIRST.md#a-retraction"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

from kv_memory import UncachedKVCacheManager
from request import Request, RequestStatus


class ForwardMode(Enum):
    EXTEND = auto()  # prompts, or chunks of them
    DECODE = auto()  # one token per request
    MIXED = auto()  # both


@dataclass(slots=True)
class ScheduleBatch:
    kv_memory: UncachedKVCacheManager
    reqs: list[Request] = field(default_factory=list)
    forward_mode: ForwardMode = ForwardMode.DECODE

    def filter_batch(self, chunked_req_to_exclude: Request | None = None) -> None:
        """Keep only running requests."""
        self.reqs = [
            req
            for req in self.reqs
            if req.status is RequestStatus.RUNNING and req is not chunked_req_to_exclude
        ]

    def merge_batch(self, other: ScheduleBatch) -> None:
        """Take over the requests of `other`, which is empty afterwards."""
        self.reqs += other.reqs
        other.reqs = []

    def mix_with_running(self, running_batch: ScheduleBatch) -> None:
        """Add the decoding requests to this prefill batch."""
        if running_batch.reqs:
            self.merge_batch(running_batch)
            self.forward_mode = ForwardMode.MIXED

    # -- the next decode

    def new_page_count_next_decode(self) -> int:
        """Number of pages that the next decode opens, for all requests. Computed positions are in
        pages that a request has, so it opens a new page only at a page boundary."""
        return sum(map(self._opens_page, self.reqs))

    def check_decode_mem(self) -> bool:
        """Allocate the page of each request's next token. Returns False if the memory has too few;
        pages that were allocated are kept, so calling again is cheap."""
        return all(
            not self._opens_page(req) or self.kv_memory.allocate_slots(req, 1) for req in self.reqs
        )

    def _opens_page(self, req: Request) -> bool:
        """Whether the next decode opens a page. The last token is never fed back, though it may be
        pending."""
        start = req.num_computed_tokens
        return start % self.kv_memory.block_size == 0 and start < req.max_num_tokens - 1

    def retract_decode(
        self,
        retract: Callable[[Request], None],
        is_pinned: Callable[[Request], bool],
        chunked_req: Request | None = None,
    ) -> list[Request]:
        """Retract requests (with `retract`) until there is enough memory for the others. Returns
        them in that order: fewest outputs first, among equals the longest input. A prompt between
        two chunks has KV too. At least one request always keeps its KV."""
        holders = self.reqs if chunked_req is None else [*self.reqs, chunked_req]
        candidates = sorted(
            (req for req in holders if not is_pinned(req)),
            key=lambda req: (-req.num_output_tokens, req.num_prompt_tokens),
        )
        retracted: list[Request] = []
        while candidates and len(retracted) < len(holders) - 1 and not self.check_decode_mem():
            retract(candidates[-1])
            retracted.append(candidates.pop())
            self.filter_batch()
        return retracted
