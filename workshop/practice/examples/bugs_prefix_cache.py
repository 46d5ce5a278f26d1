"""Exhibits of chapter 3: shared blocks, the requests that share them, and their lifetime."""

from __future__ import annotations

from typing import Any

from workshop.practice.examples.example_tools import steps

A, B, C, D, E = ([letter] * 4 for letter in (1, 2, 3, 4, 5))  # a block of tokens each


def make_cache(num_blocks: int = 20) -> Any:
    """Make a hash chain over blocks of four tokens."""
    from block_pool import BlockPool
    from prefix_cache_local import PrefixCacheLocal

    return PrefixCacheLocal(pool=BlockPool(num_blocks), block_size=4)


def make_tree(num_pages: int = 20) -> Any:
    from radix_cache import RadixCache

    return RadixCache(page_size=4, num_pages=num_pages)


def make_scheduler(num_blocks: int = 20, **limits: Any) -> Any:
    from cached_kv_cache_manager import CachedKVCacheManager
    from caching_fcfs_scheduler import CachingFCFSScheduler

    cache = make_cache(num_blocks)
    return CachingFCFSScheduler(CachedKVCacheManager(cache.pool, 4, cache), **limits)


def make_groups(*windows: int | None) -> Any:
    """Make tables in groups with these windows, and their cache, over blocks of two tokens."""
    from block_pool import BlockPool
    from cached_grouped_memory import CachedGroupedMemory

    return CachedGroupedMemory(BlockPool(20), 2, windows, 8)


def tokens_request(name: str, token_ids: list[int], max_tokens: int = 3) -> Any:
    from request import Request

    return Request.from_tokens(name, token_ids, max_tokens)


def same_words_another_story() -> str:
    cache = make_cache()
    cache.cache_computed_blocks(A + B)
    num_cached = cache.match_prefix(B + D).num_cached_tokens
    return f"cached: A B; a prompt that begins with B finds {num_cached} tokens"


def twins_in_one_step() -> str:
    from block_pool import BlockPool
    from cached_kv_cache_manager import CachedKVCacheManager
    from prefix_cache_local import PrefixCacheLocal

    pool = BlockPool(7)
    manager = CachedKVCacheManager(pool, 4, PrefixCacheLocal(pool=pool, block_size=4))
    twins = [tokens_request(name, [1, 2, 3, 4, 5]) for name in ("a", "b")]
    for num_tokens in (3, 2):  # both compute the same block, in two chunks
        for twin in twins:
            manager.allocate_slots(twin, num_tokens)
            twin.num_computed_tokens += num_tokens
    for twin in twins:
        manager.cache_blocks(twin, 5)
    new_request = tokens_request("c", [9] * 12)
    manager.allocate_slots(new_request, 12)
    tables = {name: list(manager.get_block_ids(name)) for name in ("a", "b", "c")}
    shared = sorted(set(tables["b"]) & set(tables["c"]))
    return f"tables: {tables}\nblocks that `b` reads and the new request `c` overwrites: {shared}"


def all_of_it_is_cached() -> str:
    scheduler, lines = make_scheduler(), []
    for name in ("first", "second"):
        scheduler.add_request(tokens_request(name, A + B))
        plans = list(steps(scheduler, most=50))
        end = "no end" if scheduler.has_unfinished_requests() else "the end"
        lines.append(
            f"{name}: computes {plans[0][name]} of 8 tokens; {end} after {len(plans)} steps"
        )
    return "\n".join(lines)


def sized_too_early() -> str:
    scheduler = make_scheduler(max_num_batched_tokens=40)
    scheduler.add_request(tokens_request("first", A + B + C + [9], max_tokens=1))
    list(steps(scheduler))
    scheduler.add_request(tokens_request("second", A + B + C + [9], max_tokens=1))
    plan = scheduler.schedule()
    (start,), planned = plan.start_positions, plan.num_scheduled_tokens["second"]
    return f"13 tokens, {start} of them cached: {planned} scheduled from position {start} on"


def a_warm_and_full_pool() -> str:
    scheduler, hits = make_scheduler(num_blocks=6), []
    for number in range(4):  # a prompt and its answer fill the 5 blocks
        again = tokens_request(f"r{number}", A + B + C + D, max_tokens=2)
        scheduler.add_request(again)
        list(steps(scheduler))
        hits.append(again.num_cached_tokens)
    return f"the same 16 tokens sent four times, cached: {hits}"


def the_matched_half() -> str:
    cache = make_tree()
    cache.cache_computed_blocks(A + B + C + D)
    cache.cache_computed_blocks(E)
    used = cache.match_prefix(A + B).num_cached_tokens  # used last of all
    cache.evict(3)
    left = cache.match_prefix(A + B).num_cached_tokens
    return f"A B was just used ({used} tokens); after three evictions {left} are left"


def a_lock_that_begins_at_the_parent() -> str:
    cache = make_tree()
    cache.cache_computed_blocks(A + B)
    match = cache.match_prefix(A + B)
    cache.touch(match.blocks)  # a request reads these pages
    num_evicted = cache.evict(2)
    return f"two pages are in use; asked for two more, the cache evicts {num_evicted}"


def a_split_under_a_lock() -> str:
    cache = make_tree()
    cache.cache_computed_blocks(A + B + C + D)
    match = cache.match_prefix(A + B + C + D)
    cache.touch(match.blocks)  # one request reads all four pages
    cache.match_prefix(A + B + E)  # another prompt diverges in the middle
    users = [(len(n.blocks), n.lock_ref) for n in cache.tree.nodes() if not n.is_root]
    return "\n".join(f"node of {pages} pages, users: {number}" for pages, number in users)


def pages_for_tokens() -> str:
    cache = make_cache()
    cache.cache_computed_blocks(A + B)
    match = cache.match_prefix(A + B + C)
    return f"two blocks of 4 tokens found: {match.num_cached_tokens} tokens are not computed"


def a_view_of_the_row() -> str:
    cache = make_tree()
    row = A + B  # the batch's row of the first request
    cache.insert(row, cache.pool.allocate(2))
    row[:] = C + D  # the next request gets the row
    found = [cache.match_prefix(p).num_cached_tokens for p in (A + D, A + B)]
    return (
        f"computed: A B; then its row is overwritten; found of A D: {found[0]}, of A B: {found[1]}"
    )


def the_head_goes_first() -> str:
    cache = make_cache()
    cache.cache_computed_blocks(A + B + C + D)
    cache.evict(1)
    left = cache.match_prefix(A + B + C + D).num_cached_tokens
    return f"of 16 cached tokens 4 are evicted; {left} can still be found"


def crafted_prompts() -> str:
    cache = make_cache()
    cache.cache_computed_blocks([-1] * 8)
    num_cached = cache.match_prefix([-2] * 8).num_cached_tokens
    return f"a new prompt, made to collide: {num_cached} of 8 tokens are served"


def an_adapter_and_a_salt() -> str:
    cache = make_cache()
    cache.cache_computed_blocks(A + B, (("lora", "X"),))
    num_cached = cache.match_prefix(A + B, (("salt", "X"),)).num_cached_tokens
    return f"computed with adapter X; found by tenant X without it: {num_cached} of 8 tokens"


def nineteen_for_eight() -> str:
    cache = make_tree(num_pages=30)
    cache.cache_computed_blocks(list(range(19 * 4)))
    num_told = cache.evict(8)
    return (
        f"8 of 19 pages requested; the cache reports {num_told}, and {cache.pool.num_free_blocks} "
        f"of 30 are free"
    )


def eviction_without_end() -> str:
    cache = make_tree()
    cache.cache_computed_blocks(A + B)
    cache.match_prefix(A + B)  # used again: its entry in the heap is out of date
    return f"asked for one page, the cache evicts {cache.evict(1)}"


def shared_pages_counted_twice() -> str:
    cache = make_tree()
    found = cache.cache_computed_blocks(A + B)
    for change in (cache.touch, cache.touch, cache.release, cache.release):
        change(found)  # two requests read them, and have finished
    return f"idle; pages cached: 2, of them evictable: {cache.num_evictable_blocks}"


def two_models_alike() -> str:
    import torch

    from weights_digest import weights_digest

    embedding = torch.zeros(5000, 4)
    other = embedding.clone()
    other[4000] = 1.0  # another checkpoint: one row of a large matrix differs
    names = {weights_digest([("embedding", weight)]) for weight in (embedding, other)}
    return f"two checkpoints, different in one row: names for their KV: {len(names)}"


def the_block_that_is_computed_anyway() -> str:
    from prefix_cache_local import compute_hash_chain

    memory, tokens = make_groups(None, 4), list(range(8))
    blocks, chain = iter(memory.pool.blocks[1:]), compute_hash_chain(tokens, 2)
    for group, indices in enumerate([(0, 1, 2, 3), (0, 2, 3)]):
        for index in indices:
            memory.cache.publish(group, chain, index, next(blocks))
    end = memory.get_computed_blocks(tokens_request("a", tokens)).num_tokens
    there = {known.index for known in memory.cache.cached_prefixes() if known.group == 1}
    missing = [p for p in range(max(0, end - 3), end) if p // 2 not in there]
    return (
        f"of 8 cached tokens 2 and 3 are evicted in the window group; found: {end}\n"
        f"token {end} comes next; missing in its window: {missing}"
    )


def a_step_under_way() -> str:
    memory, request = make_groups(4), tokens_request("a", list(range(20)))
    memory.allocate_slots(request, 6)
    first = [memory.pool.blocks[block_id] for block_id in memory.get_block_ids("a")]
    request.num_computed_tokens = 6  # set when the step is planned
    memory.allocate_slots(request, 6)
    free = [block.block_id for block in first if block.ref_cnt == 0]
    memory.cache_blocks(request, 6)
    cached = {known.index: known.block.block_id for known in memory.cache.cached_prefixes()}
    return (
        f"tokens 0-5 are being computed, 6-11 are planned; their free blocks: {free}\n"
        f"tokens 0-5 are computed; 0 and 1 are cached in block {cached[0]}"
    )
