"""A batch of the prefill-first scheduler: requests that take the same kind of step together.

Requests come and go, so a batch is a list that is merged with others and filtered. What it knows
better than anybody is what its own next decode needs, and who should make way if that is not there.

    next decode of a request, pages of 4:      | 0 1 2 3 | 4 5 6 . |     position 7: nothing
                                               | 0 1 2 3 | 4 5 6 7 |     position 8: a page

SGLang's `ScheduleBatch` also holds the tensors of the batch; here those are the runner's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

from kv_memory import KVMemory
from request import Request, RequestStatus


class ForwardMode(Enum):
    EXTEND = auto()  # prompts, or pieces of them
    DECODE = auto()  # a token each
    MIXED = auto()  # both


@dataclass(slots=True)
class ScheduleBatch:
    kv_memory: KVMemory
    reqs: list[Request] = field(default_factory=list)
    forward_mode: ForwardMode = ForwardMode.DECODE

    def filter_batch(self, chunked_req_to_exclude: Request | None = None) -> None:
        """Keep those who still run."""
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
        """Those who decode take part in this prefill."""
        if running_batch.reqs:
            self.merge_batch(running_batch)
            self.forward_mode = ForwardMode.MIXED

    # -- the next decode

    def new_page_count_next_decode(self) -> int:
        """Pages that the next decode opens, for all together: what is computed is in pages that
        they have, so a new one is opened where a page begins."""
        return sum(map(self._opens_page, self.reqs))

    def check_decode_mem(self) -> bool:
        """Get everybody the page of its next token. False: the memory has not that many. Whoever
        got one keeps it, so asking again is cheap."""
        return all(
            not self._opens_page(req) or self.kv_memory.allocate_slots(req, 1) for req in self.reqs
        )

    def _opens_page(self, req: Request) -> bool:
        """If there is a next decode: the last token is never fed back, though it may be pending."""
        start = req.num_computed_tokens
        return start % self.kv_memory.block_size == 0 and start < req.max_num_tokens - 1

    def retract_decode(
        self,
        retract: Callable[[Request], None],
        is_pinned: Callable[[Request], bool],
        chunked_req: Request | None = None,
    ) -> list[Request]:
        """Take the KV of some, by `retract`, until there is enough for the others; who went, in
        that order. Fewest outputs first, of those the longest input. A prompt between two chunks
        has KV too. Somebody always keeps it."""
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
