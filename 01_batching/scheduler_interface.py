"""What a scheduler decides, and how it says so: one class for every scheduler in this book.

A `SchedulerOutput` is a plan for one step: which requests compute how many tokens. It is also a
*delta*. The model runner keeps its own copy of every running request, so the plan carries a
request's prompt once (`NewRequestData`, on the step that admits it) and afterwards only what
changed (`CachedRequestData`: usually one token id and now and then a block id). That keeps the
message small when the runner is another process.

Invariants: a request is new at most once between two of its preemptions; every scheduled request
has at least one token; the batch order is new requests first, then cached ones; `finished_req_ids`
names each finished request once, on the first plan after it ended.

vLLM has the same three classes, and sends them to its workers. nano-vllm passes the request objects
themselves."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from request import Request, RequestStatus, SamplingParams


@dataclass(slots=True)
class NewRequestData:
    """Everything about a request, sent once: when it is admitted."""

    req_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    num_computed_tokens: int = 0
    block_ids: list[int] = field(
        default_factory=list
    )  # the whole block table; empty without paging (chapter 2)


@dataclass(slots=True)
class CachedRequestData:
    """What changed about requests that the runner knows. All lists run parallel to `req_ids`.

    `new_token_ids[i]` are the tokens that became known since request i was last sent: one in plain
    decoding. For a request in `resumed_req_ids` (it was preempted, and the runner may have
    forgotten it) they are all of its tokens, prompt and outputs, and `new_block_ids[i]` is its
    whole block table."""

    req_ids: list[str] = field(default_factory=list)
    new_token_ids: list[list[int]] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)  # before this step
    num_output_tokens: list[int] = field(default_factory=list)
    new_block_ids: list[list[int]] = field(default_factory=list)
    resumed_req_ids: set[str] = field(default_factory=set)

    @classmethod
    def make_empty(cls) -> CachedRequestData:
        return cls()

    @property
    def num_reqs(self) -> int:
        return len(self.req_ids)


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Before the forward pass, the KV of block `src_block_id` is copied to `dst_block_id`, which
    takes its place as entry `block_index` of the request's block table (copy-on-write after a fork,
    chapter 2). If the two are equal nothing is copied: only the table changes (a duplicate of a
    cached block was given back, chapter 3)."""

    request_id: str
    block_index: int
    src_block_id: int
    dst_block_id: int


@dataclass(slots=True)
class SchedulerOutput:
    """The plan for one step."""

    scheduled_new_reqs: list[NewRequestData] = field(default_factory=list)
    scheduled_cached_reqs: CachedRequestData = field(default_factory=CachedRequestData.make_empty)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    finished_req_ids: set[str] = field(default_factory=set)
    block_copies: list[BlockCopy] = field(default_factory=list)
    scheduled_draft_token_ids: dict[str, list[int]] = field(default_factory=dict)
    # The same plan as this process sees it. Not part of the message to a runner.
    scheduled_requests: list[Request] = field(default_factory=list)
    preempted_requests: list[Request] = field(default_factory=list)
    num_kv_blocks_in_use: int = 0

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())

    @property
    def total_tokens(self) -> int:
        return self.total_num_scheduled_tokens

    @property
    def is_empty(self) -> bool:
        """No request computes anything in this step. There may still be finished requests to
        forget."""
        return not self.num_scheduled_tokens


@dataclass(slots=True)
class EngineCoreOutput:
    """What one step did for one request. `new_token_ids` are final: nothing later takes them
    back."""

    request_id: str
    new_token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list | None = None
    finish_detail: str | None = None  # what ended it, if that was a limit other than its own


class SchedulerInterface(Protocol):
    """What the engine asks of a scheduler. A step is one `schedule` followed by one
    `update_from_output`."""

    def add_request(self, request: Request) -> None:
        """Queue a request. Raises `ValueError` if it can never be served; nothing has changed
        then."""

    def schedule(self) -> SchedulerOutput:
        """Plan the next step. The planned tokens count as computed from here on."""

    def update_from_output(
        self, output: SchedulerOutput, token_ids: dict[str, list[int]]
    ) -> list[EngineCoreOutput]:
        """Take the sampled tokens of a planned step. A request that was aborted meanwhile is
        skipped."""

    def update_draft_token_ids(self, draft_token_ids: dict[str, list[int]]) -> None:
        """Take tokens proposed for the next step (chapter 5)."""

    def finish_requests(self, request_ids: str | Iterable[str], status: RequestStatus) -> None:
        """End requests from outside, at any moment, and free what they hold. Unknown ids are
        ignored."""

    def abort_request(self, request_id: str) -> None:
        """`finish_requests` with `FINISHED_ABORTED`."""

    def has_unfinished_requests(self) -> bool: ...

    def get_num_unfinished_requests(self) -> int: ...

    def get_request_counts(self) -> tuple[int, int]:
        """`(running, waiting)`."""

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes (chapter 3). False if that is not possible now."""

    def check_invariants(self) -> None:
        """Raise `AssertionError` if the scheduler contradicts itself."""


@dataclass(frozen=True, slots=True)
class ComputedBlocks:
    """What is known already of a request that waits: cached blocks (chapter 3), and how many of its
    positions they hold.

    `is_ready` is False while more of it is on its way and will be there soon: admitted now, it
    would be computed twice. `is_loading`: it comes from outside, not from another request."""

    blocks: list[Any] = field(default_factory=list)
    num_tokens: int = 0
    is_ready: bool = True
    is_loading: bool = False


class KVMemory(Protocol):
    """What a scheduler asks of whoever owns the KV memory. Chapter 2's `KVCacheManager` answers for
    blocks."""

    @property
    def block_size(self) -> int:
        """Positions that are handed out together."""

    @property
    def num_blocks_in_use(self) -> int: ...

    @property
    def usage(self) -> float:
        """The share of the memory that requests hold, 0 to 1."""

    @property
    def capacity(self) -> int:
        """Positions that the whole memory could hold of one request."""

    def fits_when_empty(self, num_tokens: int) -> bool:
        """Could the whole memory hold this many positions of one request?"""

    def get_computed_blocks(self, request: Request) -> ComputedBlocks:
        """What need not be computed of a request without memory. At least its last token is left.
        Nothing keeps the blocks: ask again before every attempt to admit it."""

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_lookahead_tokens: int = 0,
        computed: ComputedBlocks | None = None,
        num_blocks_kept_free: int = 0,
    ) -> bool:
        """Make room behind the computed positions, `computed` included. False: refused, and nothing
        has changed. It is refused too if fewer than `num_blocks_kept_free` were left for others."""

    def can_replace(
        self,
        victim: Request,
        request: Request,
        num_new_tokens: int,
        num_lookahead_tokens: int = 0,
        computed: ComputedBlocks | None = None,
        num_blocks_kept_free: int = 0,
    ) -> bool:
        """Would `allocate_slots` agree if `victim` had been freed first? Both stay as they are."""

    def find_cached_blocks(self, request: Request) -> Sequence[int]:
        """Ids of the blocks in which a cache has the request's longest known prefix, head first."""

    def cache_blocks(self, request: Request) -> None:
        """The forward pass that wrote the computed positions is over: they may be shared."""

    def fork(self, parent: Request, child: Request) -> None:
        """Let `child` share the memory of its first `num_computed_tokens` positions with
        `parent`."""

    def free(self, request: Request) -> None: ...

    def get_block_ids(self, request_id: str) -> Sequence[int]:
        """The request's block table."""

    def take_block_copies(self) -> list[tuple[str, int, int, int]]:
        """Copies to make before the next forward pass, as the fields of `BlockCopy`."""

    def wait_for_loads(self) -> None:
        """Called when nothing can be computed before some KV has arrived: wait, but not long."""

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes. False while some are in use."""


class UnlimitedKVMemory:
    """Chapter 1 has no blocks: the runner keeps every request's KV in tensors of its own, and
    nobody counts."""

    block_size = 1
    num_blocks_in_use = 0
    usage = 0.0
    capacity = sys.maxsize

    def fits_when_empty(self, num_tokens: int) -> bool:
        return True

    def get_computed_blocks(self, request: Request) -> ComputedBlocks:
        return ComputedBlocks()

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_lookahead_tokens: int = 0,
        computed: ComputedBlocks | None = None,
        num_blocks_kept_free: int = 0,
    ) -> bool:
        return True

    def can_replace(
        self,
        victim: Request,
        request: Request,
        num_new_tokens: int,
        num_lookahead_tokens: int = 0,
        computed: ComputedBlocks | None = None,
        num_blocks_kept_free: int = 0,
    ) -> bool:
        return True

    def find_cached_blocks(self, request: Request) -> Sequence[int]:
        return ()

    def cache_blocks(self, request: Request) -> None:
        pass

    def fork(self, parent: Request, child: Request) -> None:
        child.num_computed_tokens = 0  # nothing is shared: the child computes its prompt itself

    def free(self, request: Request) -> None:
        pass

    def get_block_ids(self, request_id: str) -> Sequence[int]:
        return ()

    def take_block_copies(self) -> list[tuple[str, int, int, int]]:
        return []

    def wait_for_loads(self) -> None:
        pass

    def reset_prefix_cache(self) -> bool:
        return True
