"""The hit that holds in every group, against brute force; who is evicted; who is withdrawn."""

from __future__ import annotations

import copy
from itertools import product

import pytest

from block_pool import BlockPool
from cached_grouped_memory import CachedGroupedMemory
from grouped_kv_memory import max_blocks
from grouped_prefix_cache import GroupedPrefixCache
from kv_memory import NotReady
from prefix_cache_local import compute_hash_chain
from request import Request, RequestStatus, SamplingParams
from scheduler_interface import BlockTableUpdate

SIZE = 2


@pytest.mark.net
@pytest.mark.parametrize("windows", [(None, 4), (3, None), (2, 5), (1, None), (3, 4, None), (9,)])
def test_the_longest_hit_is_that_of_brute_force(windows: tuple[int | None, ...]):
    """Every set of blocks that can be there, of all groups."""
    num_blocks = 4 if len(windows) < 3 else 3
    chain = compute_hash_chain(range(SIZE * num_blocks), SIZE)
    places = list(product(range(len(windows)), range(num_blocks)))
    lengths = set()
    for is_there in product([False, True], repeat=len(places)):
        there = {place for place, is_it in zip(places, is_there) if is_it}
        cache = GroupedPrefixCache(BlockPool(1 + len(places)), SIZE, windows)
        for number, (group, index) in enumerate(places, 1):
            if (group, index) in there:
                cache.publish(group, chain, index, cache.pool.blocks[number])
        expected = max(
            length
            for length in range(num_blocks + 1)
            if all(
                (group, position // SIZE) in there
                for group, window in enumerate(windows)
                for position in range(length * SIZE)
                if window is None or position > length * SIZE - window
            )
        )
        assert cache.longest_hit(chain) == expected, there
        found = cache.find(chain, expected)
        ids = [[(b.block_id - 1) % num_blocks for b in blocks] for blocks in found]
        assert all(x == list(range(expected - len(x), expected)) for x in ids)
        cache.check_invariants()
        lengths.add(expected)
    assert lengths == set(range(num_blocks + 1))


def test_the_longest_hits_of_the_page():
    """The table of `GROUPS.md`: blocks of 4, windows None and 6."""
    chain = compute_hash_chain(range(16), 4)
    hits = {"xxxx": (16, 12), "x-xx": (16, 4), "xx-x": (8, 8), "-xxx": (16, 12), "x-x-": (4, 4)}
    for in_group_1, (expected, shorter) in hits.items():
        cache = GroupedPrefixCache(BlockPool(9), 4, (None, 6))
        for index, is_there in enumerate(in_group_1):
            cache.publish(0, chain, index, cache.pool.blocks[1 + index])
            if is_there == "x":
                cache.publish(1, chain, index, cache.pool.blocks[5 + index])
        assert 4 * cache.longest_hit(chain) == expected, in_group_1
        cache.remove_blocks([cache.pool.blocks[4]])  # the last one of group 0
        assert 4 * cache.longest_hit(chain) == shorter, in_group_1


def test_a_hit_that_is_cut_shorter_may_not_hold():
    """Trap 71: the last token of a prompt is computed anyway, so no hit has its block. With it, all
    would hold; without it, block 1 of the window group is wanted, and gone."""
    memory, chain = make_memory(30), compute_hash_chain(range(8), SIZE)
    blocks = iter(memory.pool.blocks[1:])
    for group, indices in enumerate([(0, 1, 2, 3), (0, 2, 3)]):
        for index in indices:
            memory.cache.publish(group, chain, index, next(blocks))
    assert memory.cache.longest_hit(chain) == 4
    probe = Request.from_tokens("a", list(range(8)), 1)
    assert memory.get_computed_blocks(probe).num_tokens == 2


def make_memory(num_blocks: int, windows=(None, 4), step: int = 20) -> CachedGroupedMemory:
    return CachedGroupedMemory(BlockPool(num_blocks + 1), SIZE, windows, step)


def compute(memory: CachedGroupedMemory, request: Request, num_tokens: int | None = None) -> int:
    """A step of all that it has not computed, or of `num_tokens`. Returns what was found."""
    found = 0
    if not memory.get_block_ids(request.request_id):
        computed = memory.get_computed_blocks(request)
        assert not isinstance(computed, NotReady)
        num_new = num_tokens or request.num_tokens - computed.num_tokens
        assert memory.can_allocate(request, num_new, computed)
        assert memory.allocate_slots(request, num_new, 0, computed)
        found = request.num_computed_tokens = computed.num_tokens
    else:
        num_new = num_tokens or request.num_tokens - request.num_computed_tokens
        assert memory.allocate_slots(request, num_new)
    request.num_computed_tokens += num_new
    memory.cache_blocks(request, request.num_computed_tokens)
    memory.check_invariants([request])
    return found


def leave(memory: CachedGroupedMemory, request: Request) -> None:
    memory.free(request)
    memory.check_invariants()


def test_the_example_of_the_page():
    """A window of 5 and blocks of 2: 8 tokens are found, of which the window group holds 4."""
    memory = make_memory(30, (None, 5))
    first = Request.from_tokens("a", list(range(8)), 9)
    assert compute(memory, first) == 0
    leave(memory, first)
    second = Request.from_tokens("b", [*range(8), 50], 9)
    assert compute(memory, second) == 8
    full, window = memory.get_tables("b")
    assert 0 not in full and list(window[:2]) == [0, 0] and 0 not in window[2:]
    assert memory.num_blocks_in_use == 4 + 2 + 2 and memory.cache.stats.hit_rate == 8 / 17


@pytest.mark.net
@pytest.mark.parametrize("window", [1, 2, 3, 4, 5])
def test_a_block_is_held_until_the_next_token_does_not_see_it(window: int):
    """Token c sees the positions from c - window + 1 on (Trap 70)."""
    memory = make_memory(40, (None, window))
    request = Request.from_tokens("a", list(range(15)), 1)
    for num_computed in range(15):
        compute(memory, request, 1)
        every, seen = memory.get_tables("a")
        ends = range(SIZE - 1, SIZE * len(seen), SIZE)
        assert [i != 0 for i in seen] == [end > num_computed - window for end in ends]
        assert 0 not in every


def test_a_block_outside_the_window_can_be_found_until_it_is_reallocated():
    """A second request that parts from the first in the middle needs blocks that the first has
    given up long ago."""
    memory = make_memory(40, step=4)
    first = Request.from_tokens("a", list(range(20)), 1)
    while first.num_computed_tokens < 20:
        compute(memory, first, 4)
    assert 0 in memory.get_tables("a")[1]
    parted = Request.from_tokens("b", [*range(9), 77], 1)
    assert compute(memory, parted, 2) == 8
    leave(memory, parted)
    greedy = Request.from_tokens("c", [5] * 99, 1)
    while memory.allocate_slots(greedy, 1):
        greedy.num_computed_tokens += 1
    memory.check_invariants([first, greedy])
    assert memory.get_computed_blocks(parted).num_tokens == 0
    assert memory.pool.num_free_blocks < 2


@pytest.mark.parametrize("windows", [(None, 4), (3, 6), (None, 3, 5)])
def test_eviction_takes_the_end_of_a_prefix_first(windows):
    """Block by block, in all groups: what is left of a hit shrinks by a block, and never at once to
    nothing while there are windows of blocks left."""
    num_blocks = max_blocks(16, SIZE, windows, 20)
    memory = make_memory(num_blocks, windows)
    request = Request.from_tokens("a", list(range(16)), 1)
    compute(memory, request)
    leave(memory, request)
    hits, probe = [], Request.from_tokens("b", [*range(16), 9], 1)
    for _ in range(num_blocks):
        hits.append(memory.get_computed_blocks(probe).num_tokens)
        taken = memory.pool.allocate(1)
        memory.cache.remove_blocks(taken)
    assert hits == sorted(hits, reverse=True) and hits[0] == 16
    assert set(hits) >= set(range(2, 17, 2)), hits


def test_a_refusal_holds_nothing_and_a_hit_is_counted_once():
    memory = make_memory(14)
    first = Request.from_tokens("a", list(range(8)), 9)
    compute(memory, first)
    leave(memory, first)
    long = Request.from_tokens("b", list(range(40)), 9)
    computed = memory.get_computed_blocks(long)
    assert not isinstance(computed, NotReady) and computed.num_tokens == 8
    assert not memory.can_allocate(long, 20, computed)
    assert not memory.allocate_slots(long, 20, 0, computed)
    memory.check_invariants()
    assert memory.num_blocks_in_use == 0 and memory.get_tables("b") == ((), ())
    assert memory.allocate_slots(long, 4, 0, computed)
    long.num_computed_tokens = 8
    memory.check_invariants([long])
    memory.free(long)
    long.num_computed_tokens = 0
    long.num_preemptions = 1
    assert memory.allocate_slots(long, 4, 0, memory.get_computed_blocks(long))
    stats = memory.cache.stats
    assert (stats.num_requests, stats.num_tokens_looked_up, stats.num_tokens_hit) == (2, 48, 8)
    with pytest.raises(ValueError, match="already has a block table"):
        memory.allocate_slots(long, 4, 0, computed)
    with pytest.raises(ValueError, match="already has a block table"):
        memory.get_computed_blocks(long)


@pytest.mark.parametrize("num_new", [1, 3, 9])
@pytest.mark.parametrize("num_found", [2, 10])
def test_can_allocate_agrees_with_allocate_slots(num_found: int, num_new: int):
    """With a hit longer than a window group ever holds, and one shorter; by every number of free
    blocks beside those that are found; with the first who has it, and when it is to be gone."""
    tokens, answers = list(range(2 * num_found)), set()
    for num_free in range(12):
        memory = make_memory(50, (None, 2), step=9)
        first = Request.from_tokens("a", tokens, 1)
        compute(memory, first, 9 if num_found > 5 else None)
        while first.num_computed_tokens < first.num_tokens:
            compute(memory, first, min(9, first.num_tokens - first.num_computed_tokens))
        other = Request.from_tokens("c", [*tokens[:4], 88], 1)  # shares some with the first
        compute(memory, other)
        taken = memory.pool.allocate(memory.pool.num_free_blocks) or []
        memory.cache.remove_blocks(taken)
        memory.pool.free(taken[:num_free])
        request = Request.from_tokens("b", [*tokens, *[77] * num_new], 1)
        computed = memory.get_computed_blocks(request)
        assert not isinstance(computed, NotReady) and computed.num_tokens == 2 * num_found
        for freeing in (None, first):
            says = memory.can_allocate(request, num_new, computed, 0, freeing)
            trial, copied, victim = copy.deepcopy((memory, request, freeing))
            if victim is not None:
                trial.free(victim)
            assert says == trial.allocate_slots(copied, num_new, 0, computed), (num_free, freeing)
            answers.add(says)
    assert answers == {False, True}


def test_a_request_that_skips_the_cache_finds_nothing_and_is_not_counted():
    """A prompt with requested log-probabilities. Its computed blocks are published as usual."""
    memory = make_memory(60)
    params = SamplingParams(max_tokens=1, skip_reading_prefix_cache=True)
    for name in "ab":
        request = Request(name, list(range(9)), params)
        assert compute(memory, request) == 0 and memory.cache.stats.num_requests == 0
        leave(memory, request)
        assert memory.find_cached_blocks(request) == ()
    reader = Request.from_tokens("c", list(range(9)), 1)
    assert compute(memory, reader) == 8
    leave(memory, reader)
    assert len(memory.find_cached_blocks(reader)) == 4
    assert len(memory.find_cached_blocks(Request.from_tokens("d", list(range(8)), 1))) == 3


def test_requests_with_one_prefix_keep_its_tokens_once():
    """A cached block keeps the token chain of the request that published it; 26 chains of 8,000
    tokens would be a lot of memory."""
    memory, tokens = make_memory(90), list(range(20))
    for name in "abc":
        request = Request.from_tokens(name, [*tokens, *[ord(name)] * 4], 1)
        compute(memory, request)
        leave(memory, request)
    links = [k.chain[i] for k in memory.cache.cached_prefixes() for i in range(k.index + 1)]
    assert len(set(map(id, links))) == len(set(links)) == 10 + 3 * 2


def test_a_duplicate_is_freed_in_its_group():
    """Both begin in the same step, in the middle of a block: who is second takes the first's."""
    memory = make_memory(30)
    one, two = (Request.from_tokens(name, [1, 2, 3, 4], 4) for name in "ab")
    for request in (one, two):
        assert memory.allocate_slots(request, 1)
        request.num_computed_tokens = 1
    for request in (one, two):
        compute(memory, request, 3)
    memory.check_invariants([one, two])
    assert memory.get_tables("a") == memory.get_tables("b") and memory.num_blocks_in_use == 4
    tables = memory.get_tables("a")
    leave(memory, one)
    moves = memory.pop_table_updates()
    assert moves == [BlockTableUpdate("b", i, tables[g][i], g) for g in (0, 1) for i in (0, 1)]
    assert memory.pop_table_updates() == []


@pytest.mark.parametrize("has_reserved", [False, True])
def test_a_request_with_reserved_blocks_keeps_its_duplicate(has_reserved: bool):
    """And shares no block of a window: neither one that is found, nor one that both compute."""
    memory = make_memory(60)
    one, two = (Request.from_tokens(name, list(range(8)), 9) for name in "ab")
    two.num_preemptions = 0 if has_reserved else 1
    for request in (one, two):
        assert memory.allocate_slots(request, 1, 9 if has_reserved else 0)
        request.num_computed_tokens = 1
    for request in (one, two):
        compute(memory, request, 7)
    memory.check_invariants([one, two])
    assert not set(memory.get_tables("a")[1]) & set(memory.get_tables("b")[1])
    three = Request.from_tokens("c", list(range(9)), 9)
    assert memory.get_computed_blocks(three).num_tokens == (0 if has_reserved else 8)
    three.num_preemptions = 1
    assert memory.get_computed_blocks(three).num_tokens == 0
    leave(memory, one)
    assert memory.get_computed_blocks(three).num_tokens == 8, "nobody has them now"
    leave(memory, two)


def test_slots_for_draft_tokens_are_not_a_reservation():
    """Draft slots are allocated after admission, so a request with drafts shares its window's
    blocks, whatever a third one has reserved."""
    memory = make_memory(60)
    assert memory.allocate_slots(Request.from_tokens("c", [5] * 3, 9), 3, 4)
    one, two = (Request.from_tokens(name, list(range(9)), 9) for name in "ab")
    compute(memory, one)
    assert memory.allocate_slots(one, 1, 3)
    assert memory.get_computed_blocks(two).num_tokens == 8
    leave(memory, one)


def test_a_request_that_stops_publishing_keeps_the_marks_of_others():
    """The first to compute a block, which keeps its own duplicate: when it leaves, another request
    may be computing the same content."""
    memory = make_memory(60)
    alone, one, again, waiting = (Request.from_tokens(n, [1, 2, 3, 4], 4) for n in "abcd")
    waiting.all_token_ids.append(5)
    alone.num_preemptions = 1
    for request in (alone, one):
        assert memory.allocate_slots(request, 4)
        request.num_computed_tokens = 4
    memory.cache_blocks(one, 4)
    memory.cache_blocks(alone, 4)
    leave(memory, one)
    memory.cache.remove_blocks(memory.pool.blocks)
    assert memory.allocate_slots(again, 4)
    memory.free(alone)
    assert memory.get_computed_blocks(waiting) is NotReady.IN_FLIGHT


def test_a_request_waits_for_a_block_that_another_computes():
    memory = make_memory(30)
    one, two = (Request.from_tokens(name, [1, 2, 3, 4, int(name)], 4) for name in "56")
    assert memory.allocate_slots(one, 4)
    assert memory.get_computed_blocks(two) is NotReady.IN_FLIGHT and memory.blocking_req_id == "5"
    assert memory.get_computed_blocks(two, wait_for_others=False).num_tokens == 0
    one.num_computed_tokens = 4
    memory.cache_blocks(one, 4)
    assert memory.get_computed_blocks(two).num_tokens == 4 and memory.blocking_req_id is None
    short = Request.from_tokens("s", [1, 2], 4)
    assert memory.get_computed_blocks(short).num_tokens == 0, "its last token is computed anyway"


@pytest.mark.parametrize("first_has", ["left early", "sampled", "sampled, and lost its KV"])
def test_blocks_that_may_have_caused_an_error_are_invalidated_in_all_groups(first_has: str):
    """Unless a request has sampled a token from the block. Other requests that hold it stop
    publishing."""
    memory, has_sampled = make_memory(60), first_has == "sampled"
    first = Request.from_tokens("a", [*range(8), 60, 61, 62], 9)
    compute(memory, first, 11 if has_sampled else 10)
    if first_has != "left early":
        first.output_token_ids.append(8)
        first.all_token_ids.append(8)
    leave(memory, first)
    other, wrong = (Request.from_tokens(n, [*range(8), 70, 71, 72], 9) for n in "bc")
    assert compute(memory, other, 1) == 8
    memory.check_invariants([other])
    assert compute(memory, wrong) == 8
    stranger = Request.from_tokens("e", [90] * 12, 9)
    compute(memory, stranger)
    wrong.status = RequestStatus.FINISHED_ERROR
    leave(memory, wrong)
    leave(memory, stranger)
    probe = Request.from_tokens("f", [90] * 12, 9)
    assert memory.get_computed_blocks(probe, False).num_tokens == 10, "not of that prefix"
    memory.check_invariants([other])
    probe = Request.from_tokens("d", [*range(8), 70, 71, 72], 9)
    assert memory.get_computed_blocks(probe, False).num_tokens == (8 if has_sampled else 0)
    compute(memory, other)
    memory.check_invariants([other])
    assert list(memory.get_tables("b")[1][:3]) == [0, 0, 0], "its window has moved on"
    expected = 10 if has_sampled else 0
    assert memory.get_computed_blocks(probe).num_tokens == expected
    leave(memory, other)
    assert memory.num_blocks_in_use == 0


def test_nothing_is_given_up_before_it_is_published():
    """Trap 70: when a step is planned while another is in flight, its computed blocks are not
    published yet."""
    memory = make_memory(40, (4,), step=8)
    request = Request.from_tokens("a", list(range(20)), 1)
    for end in (6, 12, 18):
        assert memory.allocate_slots(request, 6)
        request.num_computed_tokens = end
        memory.cache_blocks(request, end - 6)
        memory.check_invariants([request])
    for end in range(2, 13, 2):
        probe = Request.from_tokens("b", [*range(end), 99], 1)
        assert memory.get_computed_blocks(probe).num_tokens == end


def test_a_reset_is_refused_while_a_block_is_used():
    memory = make_memory(30)
    request = Request.from_tokens("a", list(range(8)), 1)
    compute(memory, request)
    assert not memory.reset_prefix_cache() and memory.cache.num_cached_blocks == 8
    leave(memory, request)
    assert memory.reset_prefix_cache() and memory.cache.num_cached_blocks == 0
    compute(memory, Request.from_tokens("b", [7] * 8, 1))
    assert memory.allocate_slots(Request.from_tokens("d", list(range(8)), 1), 8)
    memory.clear()
    assert memory.cache.num_cached_blocks == 0 and memory.num_blocks_in_use == 0
    assert compute(memory, Request.from_tokens("c", list(range(8)), 1)) == 0
