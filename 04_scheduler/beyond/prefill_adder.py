"""`PrefillAdder`: which requests join the next prefill batch, and with how many tokens.

A prefill-first scheduler fills a batch from the waiting queue until something runs out. Three
resources can, and each has a counter, in tokens:

    rem_input_tokens    how many this step can still compute
    rem_chunk_tokens    the same for chunked prompts, usually smaller
    rem_total_tokens    KV memory that is free and not expected to be needed by running requests

The first two count tokens exactly. The third counts memory, which is allocated in pages (a page is
a block), so an amount is rounded up to whole pages before it is compared. A count of pages is never
compared with a count of tokens.

The expectation is the point of this approach. A running request may still generate `max_tokens -
generated` tokens, and most stop earlier, so only a share is set aside:

    decode budget = sum of min(max_tokens - generated, CLIP_MAX_NEW_TOKENS) * new_token_ratio

A new request counts in full, once. If the share was too small, a request is retracted; if it was
too large, memory is idle. So the ratio falls while all goes well, and is raised after a retraction.

    | in use | pages for the prompt | own outputs, in full | decode budget of the others |
    0        ^ here allocation begins                                            capacity

A chunked prompt gets one chunk per step. A chunk ends at a page boundary, so that all of it can be
cached, and nothing is set aside for outputs that are still far away.

Names and rules are those of SGLang's `PrefillAdder`, which rounds all three counters to pages.

See 04_scheduler/beyond/PREFILL_FIRST.md#6-chunks-end-where-a-page-ends"""

from __future__ import annotations

from collections.abc import Callable, Collection
from enum import Enum, auto

from kv_memory import ComputedBlocks, UncachedKVCacheManager
from request import Request
from unchunked import ChunkPolicy

CLIP_MAX_NEW_TOKENS = 4096  # upper limit of the expected outputs of a request
RETRACT_DECODE_STEPS = 20  # steps that should succeed after a retraction


class AddReqResult(Enum):
    CONTINUE = auto()  # added, and the next one can be tried
    NO_TOKEN = auto()  # the memory is full, now or by the expectation
    OTHER = auto()  # this batch is full


def num_expected_outputs(request: Request) -> int:
    """Tokens that a request may still generate, clipped."""
    num_outputs = request.num_output_tokens + request.num_output_placeholders
    return min(request.max_tokens - num_outputs, CLIP_MAX_NEW_TOKENS)


class NewTokenRatio:
    """The share of their possible outputs that running requests are expected to generate.

    Falls linearly from `initial` to `minimum` in `decay_steps` decode batches.
    """

    def __init__(self, initial: float, minimum: float, decay_steps: int) -> None:
        self.value = self.initial = initial
        self.minimum = minimum
        self._decay_steps = decay_steps
        self._decay = (initial - minimum) / decay_steps

    def decay(self) -> None:
        """Lower the ratio after a decode batch that had enough memory."""
        if self.value > self.minimum:
            self.value = max(self.minimum, self.value - self._decay)

    def raise_for(self, remaining: Collection[Request]) -> None:
        """Raise the ratio after a retraction, from the outputs of the remaining requests, which
        should continue for `RETRACT_DECODE_STEPS` more steps. Never lowers it."""
        num_possible = sum(request.max_tokens for request in remaining)
        if num_possible:
            num_expected = sum(r.num_output_tokens + RETRACT_DECODE_STEPS for r in remaining)
            self.value = min(1.0, max(self.value, num_expected / num_possible))
            # Falls in as many steps from its present value, so one bad moment does not last
            # forever.
            self._decay = max(self._decay, (self.value - self.minimum) / self._decay_steps)

    def reset(self) -> None:
        """Return to the initial ratio when no request decodes, because the load has changed."""
        self.value = self.initial


class PrefillAdder:
    """One batch while it is filled.

    `running` are the decoding requests, `num_next_decode_tokens` the memory that their next step
    will certainly take. `max_input_tokens` is what the largest step can compute: a larger prompt is
    split even without chunking. `chunk_policy` decides the size of a chunk, and the adder where the
    chunk ends. `allocate(request, computed, num_new_tokens)` starts a request whose memory is
    available.
    """

    def __init__(
        self,
        kv_memory: UncachedKVCacheManager,
        allocate: Callable[[Request, ComputedBlocks, int], bool],
        running: Collection[Request],
        new_token_ratio: float,
        rem_input_tokens: int,
        rem_chunk_tokens: int,
        *,
        max_input_tokens: int,
        num_next_decode_tokens: int,
        chunk_policy: ChunkPolicy,
    ) -> None:
        self.page_size = kv_memory.block_size
        self.rem_input_tokens = rem_input_tokens
        self.rem_chunk_tokens = rem_chunk_tokens
        self.can_run_list: list[Request] = []
        self.num_tokens: dict[str, int] = {}  # by request id: tokens to compute in this step
        self.new_chunked_req: Request | None = None
        self._kv_memory = kv_memory
        self._allocate = allocate
        self._max_input_tokens = max_input_tokens
        self._chunk_policy = chunk_policy
        self._is_idle = not running
        # An average over many steps can be less than what the next step takes.
        expected = sum(map(num_expected_outputs, running)) * new_token_ratio
        self._num_expected_tokens = max(expected, num_next_decode_tokens)

    @property
    def rem_total_tokens(self) -> float:
        """KV positions, in whole pages, that are free and not expected to be needed."""
        return self._num_available_tokens - self._num_expected_tokens

    @property
    def _num_available_tokens(self) -> int:
        return self._kv_memory.capacity - self._kv_memory.num_blocks_in_use * self.page_size

    def add_one_req(
        self, req: Request, has_chunked_req: bool, computed: ComputedBlocks
    ) -> AddReqResult:
        """Add a waiting request, whole or as a chunk, if it fits; `computed` is its cached prefix.

        The request was added if it is in `can_run_list`, whatever the result: the result is about
        the next request. A request that would be alone needs no memory beyond its own: then the
        memory itself decides, and it can hold any request (`add_request` makes sure of that).
        """
        if self.new_chunked_req is not None:
            return AddReqResult.OTHER
        is_alone = self._is_idle and not self.can_run_list
        num_uncomputed_tokens = req.num_tokens - computed.num_tokens
        # Cached pages without users count as free until this request uses them.
        num_idle_pages = sum(block.ref_cnt == 1 for block in computed.blocks)
        num_needed = self._whole_pages(num_uncomputed_tokens + num_expected_outputs(req))
        num_needed += num_idle_pages * self.page_size
        num_tokens = self._num_tokens_to_schedule(req, num_uncomputed_tokens)
        is_cut = num_tokens < num_uncomputed_tokens
        if num_needed > self.rem_total_tokens and not is_alone:
            return AddReqResult.NO_TOKEN
        if num_tokens == 0 or (is_cut and has_chunked_req):
            return AddReqResult.OTHER
        num_available = self._num_available_tokens
        if not self._allocate(req, computed, num_tokens):
            return AddReqResult.NO_TOKEN
        self._add(req, num_tokens)
        if is_cut:
            self.new_chunked_req = req
            return AddReqResult.OTHER
        self._num_expected_tokens += num_needed - (num_available - self._num_available_tokens)
        return AddReqResult.CONTINUE

    def add_chunked_req(self, req: Request) -> Request | None:
        """Add the next chunk of a prompt that was split before. Returns the request if it still
        needs the chunked slot, because its prompt has not ended, or there was no memory for more of
        it now."""
        num_uncomputed_tokens = req.num_tokens - req.num_computed_tokens
        num_tokens = self._num_tokens_to_schedule(req, num_uncomputed_tokens)
        if num_tokens == 0 or not self._kv_memory.allocate_slots(req, num_tokens):
            return req
        self._add(req, num_tokens)
        if num_tokens < num_uncomputed_tokens:
            return req
        self._num_expected_tokens += self._whole_pages(num_expected_outputs(req))
        return None

    def _num_tokens_to_schedule(self, req: Request, num_uncomputed_tokens: int) -> int:
        """How many of the request's `num_uncomputed_tokens` uncomputed tokens go into this batch; 0
        for none."""
        budget = min(self.rem_input_tokens, self.rem_chunk_tokens)
        if budget <= 0:
            return 0
        num_tokens = self._chunk_policy.num_tokens_to_schedule(
            req, num_uncomputed_tokens, budget, self._max_input_tokens
        )
        if num_tokens in (0, num_uncomputed_tokens):
            return num_tokens
        start = req.num_tokens - num_uncomputed_tokens
        end = (start + num_tokens) // self.page_size * self.page_size  # rounded down to whole pages
        if end > start:
            return end - start
        return 0 if self.can_run_list else num_tokens  # if pages are larger than steps

    def _add(self, req: Request, num_tokens: int) -> None:
        self.can_run_list.append(req)
        self.num_tokens[req.request_id] = num_tokens
        self.rem_input_tokens -= num_tokens
        self.rem_chunk_tokens -= num_tokens

    def _whole_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size) * self.page_size
