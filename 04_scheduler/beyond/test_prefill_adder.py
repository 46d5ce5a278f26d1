"""The requests that the adder takes, against arithmetic by hand and a naive recomputation."""

from __future__ import annotations

from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from block_pool import BlockPool
from bounded_loops import as_long_as
from cached_kv_cache_manager import CachedKVCacheManager
from kv_memory import ComputedBlocks, UncachedKVCacheManager
from prefill_adder import (
    CLIP_MAX_NEW_TOKENS,
    RETRACT_DECODE_STEPS,
    AddReqResult,
    NewTokenRatio,
    PrefillAdder,
)
from prefix_cache_local import PrefixCacheLocal
from request import Request

CONTINUE, NO_TOKEN, OTHER = AddReqResult


class Memory(UncachedKVCacheManager):
    """Pages of 4, no cache, and a record of what was asked of `allocate`."""

    def __init__(self, num_pages: int, page_size: int = 4) -> None:
        super().__init__(BlockPool(num_pages + 1), page_size)
        self.allocations: list[tuple[str, int]] = []

    def allocate(self, request: Request, computed: ComputedBlocks, num_new_tokens: int) -> bool:
        self.allocations.append((request.request_id, num_new_tokens))
        return self.allocate_slots(request, num_new_tokens, 0, computed)

    def adder(self, rem_input_tokens: int = 1000, rem_chunk_tokens: int | None = None, **options):
        running, ratio = options.pop("running", []), options.pop("new_token_ratio", 1.0)
        return PrefillAdder(
            self, self.allocate, running, ratio, rem_input_tokens, rem_chunk_tokens, **options
        )


def waiting(name: str, num_prompt: int, max_new_tokens: int = 4) -> Request:
    return Request.from_tokens(name, list(range(num_prompt)), max_new_tokens)


def decoding(name: str, num_prompt: int, max_new_tokens: int, num_outputs: int) -> Request:
    """A request that has generated `num_outputs` tokens. It holds no pages, which these tests do
    not need."""
    request = waiting(name, num_prompt, max_new_tokens)
    for token_id in range(num_outputs):
        request.append_output_token(token_id)
    request.num_computed_tokens = request.num_tokens - 1
    return request


# -- the three counters


def test_an_example_by_hand():
    memory = Memory(10)
    adder = memory.adder(20, running=[decoding("r", 4, 9, 1)], new_token_ratio=0.5)
    assert adder.rem_total_tokens == 40 - 8 * 0.5
    assert adder.add_one_req(waiting("a", 6, 4), False) is CONTINUE
    # 6 + 4 tokens are 3 pages; 2 of them are taken, 1 is set aside.
    assert memory.num_blocks_in_use == 2
    assert adder.rem_total_tokens == 40 - 12 - 4
    assert (adder.rem_input_tokens, adder.rem_chunk_tokens) == (14, None)
    assert adder.add_one_req(waiting("b", 15, 1), False) is OTHER, "14 are left in this step"
    assert adder.add_one_req(waiting("c", 14, 12), False) is NO_TOKEN, "26 are 28 in pages"
    assert adder.add_one_req(waiting("d", 14, 10), False) is NO_TOKEN, "it is in: nobody else is"
    assert [r.request_id for r in adder.can_run_list] == ["a", "d"]
    assert adder.num_tokens == {"a": 6, "d": 14}
    assert (adder.log_input_tokens, adder.log_hit_tokens) == (20, 0)
    assert adder.rem_total_tokens == 0
    assert memory.allocations == [("a", 6), ("d", 14)]


@pytest.mark.parametrize(
    "num_outputs, max_new_tokens, expected",
    [(0, 100, 100), (99, 100, 1), (5, 10**6, CLIP_MAX_NEW_TOKENS)],
)
def test_the_decode_budget_is_a_share_of_what_may_still_come(num_outputs, max_new_tokens, expected):
    memory = Memory(5000)
    running = [decoding("r", 3, max_new_tokens, num_outputs)]
    for ratio in (0.0, 0.25, 1.0):
        adder = memory.adder(running=running, new_token_ratio=ratio)
        assert adder.rem_total_tokens == 20_000 - expected * ratio


def test_memory_is_counted_in_pages_and_compute_is_not():
    """Trap 8: three prompts of one token take three pages, and three tokens of the step."""
    memory = Memory(4)
    adder = memory.adder(10, running=[decoding("r", 1, 2, 1)], new_token_ratio=0.0)
    for name, left in (("a", 12), ("b", 8), ("c", 4)):
        assert adder.add_one_req(waiting(name, 1, 1), False) is CONTINUE
        assert adder.rem_total_tokens == left
    assert adder.rem_input_tokens == 7
    assert adder.add_one_req(waiting("d", 4, 1), False) is NO_TOKEN, "5 tokens are two pages"
    assert adder.add_one_req(waiting("e", 1, 3), False) is NO_TOKEN, "it takes the last page"
    assert len(adder.can_run_list) == 4


# -- what the cache has


def add_cached(num_pages: int, num_cached: int, max_new_tokens: int) -> PrefillAdder:
    """Add a request of `num_cached` unused cached pages and two tokens, while another decodes."""
    pool = BlockPool(num_pages + 1)
    memory = CachedKVCacheManager(pool, 4, PrefixCacheLocal(pool=pool, block_size=4))
    prompt = list(range(4 * num_cached))
    past = Request.from_tokens("past", [*prompt, 99], 1)
    assert memory.allocate_slots(past, len(prompt))
    past.num_computed_tokens = len(prompt)
    memory.cache_blocks(past, len(prompt))
    memory.free(past)

    def allocate(request, computed, num_tokens):
        return memory.allocate_slots(request, num_tokens, 0, computed)

    adder = PrefillAdder(memory, allocate, [decoding("r", 1, 2, 1)], 0.0, 100)
    assert adder.rem_total_tokens == 4 * num_pages
    request = Request.from_tokens("a", [*prompt, 7, 7], max_new_tokens)
    adder.add_one_req(request, False, memory.get_computed_blocks(request))
    return adder


def test_work_is_what_the_cache_does_not_have():
    adder = add_cached(10, 3, max_new_tokens=5)
    assert adder.num_tokens == {"a": 2}
    assert (adder.log_hit_tokens, adder.log_input_tokens) == (12, 2)
    # 3 cached pages that no other request may evict now, and 2 pages for 2 + 5 tokens.
    assert adder.rem_total_tokens == 40 - 12 - 8


def test_unused_cached_pages_count_as_needed():
    """Five pages count as free, two of them are its own prefix: 3 + 2 pages fit, 4 + 2 do not."""
    assert add_cached(5, 2, max_new_tokens=10).can_run_list
    assert not add_cached(5, 2, max_new_tokens=11).can_run_list


# -- chunks


def test_a_prompt_is_cut_at_a_page_and_reserves_nothing_for_its_outputs():
    memory = Memory(100)
    adder = memory.adder(100, 11)
    long = waiting("a", 30, 50)
    assert adder.add_one_req(long, False) is OTHER
    assert adder.new_chunked_req is long
    assert adder.num_tokens == {"a": 8}
    assert adder.rem_total_tokens == 400 - 8
    assert (adder.rem_input_tokens, adder.rem_chunk_tokens) == (92, 3)


def test_chunk_after_chunk_and_then_the_outputs_are_expected():
    memory = Memory(100)
    request = waiting("a", 30, 5)
    sizes = []
    adder = memory.adder(100, 11)
    adder.add_one_req(request, False)
    cut: Request | None = adder.new_chunked_req
    sizes += adder.num_tokens.values()
    for _ in as_long_as(lambda: cut is not None):
        request.num_computed_tokens = sum(sizes)
        adder = memory.adder(100, 11)
        cut = adder.add_chunked_req(request)
        sizes += adder.num_tokens.values()
    assert sizes == [8, 8, 8, 6]
    assert adder.rem_total_tokens == 400 - 32 - 8, "8 pages, and 2 for 5 tokens"
    assert adder.rem_chunk_tokens == 5 and adder.new_chunked_req is None


def test_the_chunked_slot_has_one_owner():
    """Trap 25: there is room for a chunk of it, but another request is between two chunks."""
    adder, second = Memory(1000, 16).adder(4096, 2048), waiting("b", 2064)
    assert adder.add_one_req(second, True) is OTHER and adder.can_run_list == []
    assert adder.add_one_req(second, False) is OTHER
    assert adder.new_chunked_req is second and adder.num_tokens == {"b": 2048}


def test_steps_smaller_than_a_page():
    memory = Memory(4, page_size=16)
    request, sizes = waiting("a", 20), []
    cut: Request | None = request
    for _ in as_long_as(lambda: cut is not None):
        adder = memory.adder(6, 6)
        if not sizes:
            adder.add_one_req(request, False)
            cut = adder.new_chunked_req
        else:
            cut = adder.add_chunked_req(request)
        sizes.append(adder.num_tokens["a"])
        request.num_computed_tokens = sum(sizes)
    assert sizes == [6, 6, 4, 4], "6 would cross the page: the third chunk ends with it"
    adder = Memory(10, page_size=16).adder(8, 8)
    adder.add_one_req(waiting("b", 3), False)
    assert adder.add_one_req(waiting("c", 20), False) is OTHER
    assert adder.num_tokens == {"b": 3}, "not a full page left, and the batch is not empty"


# -- against a naive recomputation


def naive_batch(
    prompts: list[tuple[int, int]],
    running: list[tuple[int, int]],
    num_pages: int,
    page: int,
    ratio: float,
    max_tokens: int,
    chunk: int | None,
) -> tuple[list[int], int | None]:
    """Sizes of the requests that are taken, and which of them was chunked: everything is summed up
    again for each. `prompts` are (prompt, outputs), `running` (remaining outputs, pages it
    holds)."""
    sizes: list[int] = []
    for number, (num_prompt, num_outputs) in enumerate(prompts):
        num_used = sum(pages for _, pages in running) + sum(ceil(n / page) for n in sizes)
        num_expected = sum(min(n, CLIP_MAX_NEW_TOKENS) for n, _ in running) * ratio
        for n, (_, out) in zip(sizes, prompts, strict=False):
            num_expected += (ceil((n + out) / page) - ceil(n / page)) * page
        num_deferred_tokens = (num_pages - num_used) * page - num_expected
        budget = max_tokens - sum(sizes)
        if chunk is not None:
            budget = min(budget, chunk - sum(sizes))
        if number and (num_deferred_tokens <= 0 or budget <= 0):
            return sizes, None
        is_alone = not running and not sizes
        if ceil((num_prompt + num_outputs) / page) * page > num_deferred_tokens and not is_alone:
            return sizes, None
        size = num_prompt
        if num_prompt > budget:
            if chunk is None and num_prompt <= max_tokens:
                return sizes, None
            size = budget // page * page or (0 if sizes else budget)
        if size == 0 or ceil(size / page) + num_used > num_pages:
            return sizes, None
        sizes.append(size)
        if size < num_prompt:
            return sizes, number
    return sizes, None


@settings(max_examples=200, deadline=None)
@given(
    prompts=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 20)), min_size=1, max_size=6),
    running=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 5)), max_size=4),
    num_pages=st.integers(4, 40),
    page=st.integers(1, 6),
    ratio=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    max_tokens=st.integers(1, 60),
    chunk=st.none() | st.integers(1, 30),
)
def test_the_batch_of_a_naive_recomputation(
    prompts, running, num_pages, page, ratio, max_tokens, chunk
):
    memory = Memory(num_pages, page)
    held = []
    for number, (num_outputs, pages) in enumerate(running):
        request = decoding(f"r{number}", 1, num_outputs + 1, 1)
        request.num_computed_tokens = 0
        if memory.allocate_slots(request, pages * page):
            held.append((request, (num_outputs, pages)))
    adder = memory.adder(
        max_tokens, chunk, running=[request for request, _ in held], new_token_ratio=ratio
    )
    requests = [waiting(f"w{i}", *sizes) for i, sizes in enumerate(prompts)]
    for request in requests:
        if adder.add_one_req(request, adder.new_chunked_req is not None) is not CONTINUE:
            break
    described = [numbers for _, numbers in held]
    sizes, cut = naive_batch(prompts, described, num_pages, page, ratio, max_tokens, chunk)
    assert list(adder.num_tokens.values()) == sizes
    assert adder.can_run_list == requests[: len(sizes)]
    assert adder.new_chunked_req is (None if cut is None else requests[cut])
    assert adder.rem_input_tokens == max_tokens - sum(sizes)
    assert memory.num_blocks_in_use == sum(p for _, p in described) + sum(
        ceil(size / page) for size in sizes
    )


# -- the share


def test_the_share_is_raised_to_the_observed_one():
    ratio = NewTokenRatio(0.7, 0.1, 1)
    ratio.decay()
    ratio.raise_for([decoding("a", 3, 100, 10), decoding("b", 3, 300, 70)])
    assert ratio.value == pytest.approx((80 + 2 * RETRACT_DECODE_STEPS) / 400)
    ratio.raise_for([decoding("a", 3, 1000, 1)])
    assert ratio.value == pytest.approx(0.3), "never lowered"
    ratio.raise_for([decoding("a", 3, 10, 9)])
    assert ratio.value == 1.0
    ratio.raise_for([])


def test_a_ratio_that_was_raised_falls_again_wherever_it_began():
    """Trap 26: with `initial == minimum` one retraction would keep memory idle forever."""
    ratio = NewTokenRatio(0.1, 0.1, 10)
    request = Request.from_tokens("r", [1, 2, 3], max_new_tokens=20)
    ratio.raise_for([request])
    assert ratio.value == 1.0
    for _ in range(10):
        ratio.decay()
    assert ratio.value == pytest.approx(0.1)


def test_only_a_request_that_runs_alone_needs_no_memory_beyond_its_own():
    """10 + 30 tokens do not fit 16. Alone it runs, and may end before it needs so much."""
    other = [decoding("r", 1, 2, 1)]
    for running, first, added in (([], [], "a"), ([], ["b"], "b"), (other, [], "")):
        adder = Memory(4).adder(running=running, new_token_ratio=0.0)
        for name in first:
            adder.add_one_req(waiting(name, 2, 2), False)
        assert adder.add_one_req(waiting("a", 10, 30), False) is NO_TOKEN
        assert [request.request_id for request in adder.can_run_list] == [*added]


def test_a_chunk_that_the_memory_refuses_keeps_the_slot():
    memory, request = Memory(2), waiting("a", 16)
    memory.adder(100, 8).add_one_req(request, False)
    request.num_computed_tokens = 8
    adder = memory.adder(100, 8)
    assert adder.add_chunked_req(request) is request
    assert adder.can_run_list == [] and (adder.rem_chunk_tokens, adder.rem_input_tokens) == (8, 100)
