"""The requests that the adder takes, against arithmetic by hand and a naive recomputation."""

from __future__ import annotations

from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from block_pool import BlockPool
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
from unchunked import ChunkToBudget, Unchunked


def make_memory(num_pages: int, page_size: int = 4) -> UncachedKVCacheManager:
    return UncachedKVCacheManager(BlockPool(num_pages + 1), page_size)


def make_adder(
    memory: UncachedKVCacheManager,
    rem_input_tokens: int = 1000,
    rem_chunk_tokens: int | None = None,
    running: tuple[Request, ...] = (),
    ratio: float = 1.0,
) -> PrefillAdder:
    def allocate(request, computed, num_tokens):
        return memory.allocate_slots(request, num_tokens, 0, computed)

    return PrefillAdder(
        kv_memory=memory,
        allocate=allocate,
        running=running,
        new_token_ratio=ratio,
        rem_input_tokens=rem_input_tokens,
        rem_chunk_tokens=rem_input_tokens if rem_chunk_tokens is None else rem_chunk_tokens,
        max_input_tokens=rem_input_tokens,
        num_next_decode_tokens=0,
        chunk_policy=Unchunked() if rem_chunk_tokens is None else ChunkToBudget(),
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


# -- by hand


@pytest.mark.parametrize(("max_new_tokens", "is_taken"), [(10, True), (11, False)])
def test_work_is_what_the_cache_does_not_have(max_new_tokens, is_taken):
    """Five pages count as free, two of them are its own prefix, which nobody may evict now: 2 + 3
    pages fit, 2 + 4 do not."""
    pool = BlockPool(6)
    cache = PrefixCacheLocal(pool=pool, block_size=4)
    memory = CachedKVCacheManager(pool, 4, cache)
    prompt = list(range(8))
    cache.cache_computed_blocks(prompt)
    adder = make_adder(memory, 100, running=(decoding("r", 1, 2, 1),), ratio=0.0)
    assert adder.rem_total_tokens == 20
    request = Request.from_tokens("a", [*prompt, 7, 7], max_new_tokens)
    adder.add_one_req(request, False, memory.get_computed_blocks(request))
    assert adder.num_tokens == ({"a": 2} if is_taken else {})
    if is_taken:
        assert adder.rem_total_tokens == 20 - 8 - 12


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
        num_left = (num_pages - num_used) * page - num_expected
        budget = max_tokens - sum(sizes)
        if chunk is not None:
            budget = min(budget, chunk - sum(sizes))
        if number and (num_left <= 0 or budget <= 0):
            return sizes, None
        is_alone = not running and not sizes
        if ceil((num_prompt + num_outputs) / page) * page > num_left and not is_alone:
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


@pytest.mark.net
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
    """Trap 8: memory is counted in pages, and compute is not."""
    memory = make_memory(num_pages, page)
    held = []
    numbers = []
    for number, (num_outputs, pages) in enumerate(running):
        request = decoding(f"r{number}", 1, num_outputs + 1, 1)
        request.num_computed_tokens = 0
        if memory.allocate_slots(request, pages * page):
            held.append(request)
            numbers.append((num_outputs, pages))
    adder = make_adder(memory, max_tokens, chunk, tuple(held), ratio)
    requests = [waiting(f"w{i}", *sizes) for i, sizes in enumerate(prompts)]
    for request in requests:
        result = adder.add_one_req(request, False, ComputedBlocks())
        if result is not AddReqResult.CONTINUE:
            break
    sizes, cut = naive_batch(prompts, numbers, num_pages, page, ratio, max_tokens, chunk)
    assert list(adder.num_tokens.values()) == sizes
    assert adder.can_run_list == requests[: len(sizes)]
    assert adder.new_chunked_req is (None if cut is None else requests[cut])
    assert adder.rem_input_tokens == max_tokens - sum(sizes)
    num_pages_used = sum(pages for _, pages in numbers) + sum(ceil(n / page) for n in sizes)
    assert memory.num_blocks_in_use == num_pages_used


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
    ratio.raise_for([waiting("r", 3, 20)])
    assert ratio.value == 1.0
    for _ in range(10):
        ratio.decay()
    assert ratio.value == pytest.approx(0.1)
