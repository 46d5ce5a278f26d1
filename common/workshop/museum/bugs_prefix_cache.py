"""Exhibits of chapter 3: what is shared, with whom, and for how long."""

from __future__ import annotations

from typing import Any

from common.workshop.museum.exhibit import Exhibit, Guest, Workload
from common.workshop.museum.props import blocks, steps
from common.workshop.tools.trial import NEVER_ENDS

A, B, C, D, E = ([letter] * 4 for letter in (1, 2, 3, 4, 5))  # a block of tokens each


def make_cache(num_blocks: int = 20) -> Any:
    """A hash chain over blocks of four tokens."""
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


def tokens_request(name: str, token_ids: list[int], max_tokens: int = 3) -> Any:
    from request import Request

    return Request.from_tokens(name, token_ids, max_tokens)


def same_words_another_story() -> str:
    cache = make_cache()
    cache.cache_computed_blocks(A + B)
    num_cached = cache.match_prefix(B + D).num_cached_tokens
    return f"cached: A, and B behind it; a prompt that begins with B finds {num_cached} tokens"


def twins_in_one_step() -> str:
    from block_pool import BlockPool
    from cached_kv_cache_manager import CachedKVCacheManager
    from prefix_cache_local import PrefixCacheLocal

    pool = BlockPool(7)
    manager = CachedKVCacheManager(pool, 4, PrefixCacheLocal(pool=pool, block_size=4))
    twins = [tokens_request(name, [1, 2, 3, 4, 5]) for name in ("a", "b")]
    for num_tokens in (3, 2):  # both compute the same block, in two pieces
        for twin in twins:
            manager.allocate_slots(twin, num_tokens)
            twin.num_computed_tokens += num_tokens
    for twin in twins:
        manager.cache_blocks(twin, 5)
    newcomer = tokens_request("c", [9] * 12)
    manager.allocate_slots(newcomer, 12)
    tables = {name: list(manager.get_block_ids(name)) for name in ("a", "b", "c")}
    shared = sorted(set(tables["b"]) & set(tables["c"]))
    return f"tables: {tables}\nblocks that `b` reads and the newcomer `c` overwrites: {shared}"


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
    return f"the same 16 tokens asked four times, cached: {hits}"


def the_matched_half() -> str:
    cache = make_tree()
    cache.cache_computed_blocks(A + B + C + D)
    cache.cache_computed_blocks(E)
    used = cache.match_prefix(A + B).num_cached_tokens  # used last of all
    cache.evict(3)
    left = cache.match_prefix(A + B).num_cached_tokens
    return f"A B was used just now ({used} tokens); after three evictions {left} of it are left"


def a_lock_that_begins_at_the_parent() -> str:
    cache = make_tree()
    cache.cache_computed_blocks(A + B)
    match = cache.match_prefix(A + B)
    cache.touch(match.blocks)  # a request reads these pages
    num_evicted = cache.evict(2)
    return f"two pages are in use; asked for two, the cache evicts {num_evicted}"


def a_split_under_a_lock() -> str:
    cache = make_tree()
    cache.cache_computed_blocks(A + B + C + D)
    match = cache.match_prefix(A + B + C + D)
    cache.touch(match.blocks)  # one request reads all four pages
    cache.match_prefix(A + B + E)  # another's prompt parts from it in the middle
    users = [(len(n.blocks), n.lock_ref) for n in cache.tree.nodes() if not n.is_root]
    return "\n".join(f"node of {pages} pages, users: {number}" for pages, number in users)


def pages_for_tokens() -> str:
    cache = make_cache()
    cache.cache_computed_blocks(A + B)
    match = cache.match_prefix(A + B + C)
    return f"two blocks of 4 tokens found: {match.num_cached_tokens} tokens need no computing"


def a_view_of_the_row() -> str:
    cache = make_tree()
    row = A + B  # the batch's row of the first request
    cache.insert(row, cache.pool.allocate(2))
    row[:] = C + D  # the next request gets the row
    found = [cache.match_prefix(p).num_cached_tokens for p in (A + D, A + B)]
    return (
        f"computed: A B; then its row is written over; found of A D: {found[0]}, of A B: {found[1]}"
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
    return f"a prompt that nobody has sent, made to collide: {num_cached} of 8 tokens are served"


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
        f"8 of 19 pages are wanted; the cache says {num_told}, and {cache.pool.num_free_blocks} "
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
        change(found)  # two requests read them, and have ended
    return f"nobody is served; pages cached: 2, of them evictable: {cache.num_evictable_blocks}"


def two_models_alike() -> str:
    import torch

    from weights_digest import weights_digest

    embedding = torch.zeros(5000, 4)
    other = embedding.clone()
    other[4000] = 1.0  # another checkpoint: one row of a large matrix differs
    names = {weights_digest([("embedding", weight)]) for weight in (embedding, other)}
    return f"two checkpoints, different in one row: names for their KV: {len(names)}"


LOCAL, TREE, CACHE = (
    f"03_prefix_cache/{name}.py" for name in ("prefix_cache_local", "radix_tree", "prefix_cache")
)
RADIX, MANAGER = "03_prefix_cache/radix_cache.py", "03_prefix_cache/cached_kv_cache_manager.py"

EXHIBITS = (
    Exhibit(
        trap=1,
        origin="nano-vllm #153 #163",
        title="The same words in another story",
        seen="A block was found by its own tokens, whatever stood before them. The KV of a block "
        "depends on all that precedes it, so the request went on in somebody else's context: "
        "fluent, wrong, and only when two prompts share a middle.",
        lesson="What a block holds is a prefix, not sixteen tokens. Chain the hash, and compare "
        "the chain.",
        demonstrate=same_words_another_story,
        wrong="cached: A, and B behind it; a prompt that begins with B finds 4 tokens",
        right="cached: A, and B behind it; a prompt that begins with B finds 0 tokens",
        watch=Workload(
            look="The prompt of b begins with what stands in the middle of a. Look at what it "
            "matches in step 3.",
            parts="step 3, matched, b",
            guests=(
                Guest("a", blocks("abc", " the"), 8),
                Guest("b", blocks("bc", " the"), 8, 3),
            ),
        ),
    ),
    Exhibit(
        trap=2,
        origin="nano-vllm #219 #243, mini-sglang #142",
        title="Twins in one step",
        seen="Two requests with one prompt were computed in the same step. The cache kept one "
        "copy and freed the other, but the second request's table still named the freed block: it "
        "went on from the KV of whoever got that block next.",
        lesson="Freeing a duplicate is two changes, in the pool and in the table that names it, "
        "and the runner has to hear of the second.",
        demonstrate=twins_in_one_step,
        wrong="tables: {'a': [1, 3], 'b': [2, 4], 'c': [5, 6, 2]}\n"
        "blocks that `b` reads and the newcomer `c` overwrites: [2]",
        right="tables: {'a': [1, 3], 'b': [1, 4], 'c': [5, 6, 2]}\n"
        "blocks that `b` reads and the newcomer `c` overwrites: []",
        watch=Workload(
            look="Requests a and b say the same. In step 4 both fill a block with the same tokens, "
            "and b is given a's: follow its table, and the block that it had.",
            parts="step 4, updated, b",
            guests=(
                Guest("a", blocks("ab", " the"), 6),
                Guest("b", blocks("ab", " the"), 6),
                Guest("c", blocks("ef"), 6, 2),
            ),
        ),
    ),
    Exhibit(
        trap=3,
        origin="nano-vllm #144 #199",
        title="A prompt that is cached to the last token",
        seen="A prompt of exactly so many blocks, sent twice. The second time nothing was left "
        "to compute: an empty query, no logits to sample from, and a crash; or a request that "
        "never ends.",
        lesson="A cache can give keys and values, not logits. At least the last token is computed.",
        demonstrate=all_of_it_is_cached,
        wrong="first: computes 8 of 8 tokens; the end after 3 steps\n"
        "second: computes 0 of 8 tokens; no end after 50 steps",
        right="first: computes 8 of 8 tokens; the end after 3 steps\n"
        "second: computes 4 of 8 tokens; the end after 3 steps",
        watch=Workload(
            look="The prompt of b is cached to its last token. Look at what step 3 computes of it.",
            parts="step 3, matched, b",
            guests=(
                Guest("a", blocks("ab"), 8),
                Guest("b", blocks("ab"), 8, 3),
            ),
        ),
    ),
    Exhibit(
        trap=4,
        origin="nano-vllm #207 #211 #233, vLLM #18957",
        title="Work is sized before the cache is asked",
        seen="12 of 13 tokens were cached, and 13 were scheduled behind them: positions that do "
        "not exist, and a budget spent on work that nobody has.",
        lesson="Look up, then size, and look up again at every attempt to admit: the cache has "
        "changed meanwhile.",
        demonstrate=sized_too_early,
        wrong="13 tokens, 12 of them cached: 13 scheduled from position 12 on",
        right="13 tokens, 12 of them cached: 1 scheduled from position 12 on",
        watch=Workload(
            look="12 of the 13 tokens of b are cached. Look at how many are planned behind them "
            "in step 3.",
            parts="step 3, taken, b",
            guests=(
                Guest("a", blocks("abc", " the"), 8),
                Guest("b", blocks("abc", " the"), 8, 3),
            ),
            config={"scheduler": "fcfs", "chunked_prefill": False},
        ),
    ),
    Exhibit(
        trap=5,
        origin="vLLM #42948",
        title="A full cache that never hits",
        seen="In a warm, full pool room was made for a request before its hit was held. The "
        "oldest blocks were evicted, and they were the very blocks that it was about to use. The "
        "hit rate fell to 0 and stayed there; nothing else was wrong.",
        lesson="Hold what you have found before you take anything. And watch the hit rate: a "
        "cache that never hits gives right answers.",
        demonstrate=a_warm_and_full_pool,
        wrong="the same 16 tokens asked four times, cached: [0, 0, 0, 0]",
        right="the same 16 tokens asked four times, cached: [0, 12, 12, 12]",
        watch=Workload(
            look="The same prompt comes four times to a memory that it fills. Look at the match "
            "of each, and at what is evicted before it.",
            parts="step 2, evicted, r2",
            guests=(
                Guest("r1", blocks("abcd"), 2),
                Guest("r2", blocks("abcd"), 2, 3),
                Guest("r3", blocks("abcd"), 2, 6),
                Guest("r4", blocks("abcd"), 2, 9),
            ),
            config={"num_blocks": 6},
        ),
    ),
    Exhibit(
        trap=6,
        origin="mini-sglang #124, SGLang #24892",
        title="The half that was just used is thrown away",
        seen="A match ended inside a node of the radix tree, the node was split, and the new "
        "half kept the old time of last use. The prefix that everybody was using was evicted "
        "first.",
        lesson="After a split ask of both halves: who uses it, and since when. The matched half "
        "is young, the rest is as old as it was.",
        demonstrate=the_matched_half,
        wrong="A B was used just now (8 tokens); after three evictions 4 of it are left",
        right="A B was used just now (8 tokens); after three evictions 8 of it are left",
        watch=Workload(
            look="Request d waits for memory. Its prompt begins with that of a, and is looked up "
            "in each step. Look at the eviction order, and at what is evicted in step 6.",
            parts="step 6, evicted",
            guests=(
                Guest("a", blocks("ab"), 1),
                Guest("b", blocks("ef"), 1, 1),
                Guest("c", blocks("ghi", " the"), 12, 3),
                Guest("d", blocks("abcdmn"), 4, 4),
            ),
            config={"prefix_cache": "radix", "num_blocks": 9},
        ),
    ),
    Exhibit(
        trap=7,
        origin="mini-sglang #52",
        title="A lock that begins at the parent",
        seen="A request locked the path to its node, and the walk up began one node too high: "
        "the pages that it had just matched were free to be evicted, and were given to somebody "
        "else while it read them.",
        lesson="Walks up a tree go wrong at both ends. Test a lock on a node right below the "
        "root, then on one deeper.",
        demonstrate=a_lock_that_begins_at_the_parent,
        wrong="two pages are in use; asked for two, the cache evicts 2",
        right="two pages are in use; asked for two, the cache evicts 0",
        watch=Workload(
            look="Request b shares two blocks with a from step 1 on. Look at their reference "
            "counts.",
            parts="step 1, taken, b",
            guests=(
                Guest("a", blocks("ab", " the"), 10),
                Guest("b", blocks("ab", " that"), 10, 1),
                Guest("c", blocks("defgh"), 4, 3),
            ),
            config={"prefix_cache": "radix", "num_blocks": 12},
        ),
    ),
    Exhibit(
        trap=7,
        origin="SGLang #38480",
        title="A split that forgets the lock",
        seen="While a request used a node, another prompt cut it in two. The new upper half had "
        "no user any more: the head of a prompt in use could be evicted.",
        lesson="A split makes one thing two, and whatever was true of the one must be said of "
        "both.",
        demonstrate=a_split_under_a_lock,
        wrong="node of 2 pages, users: 0\nnode of 2 pages, users: 1",
        right="node of 2 pages, users: 1\nnode of 2 pages, users: 1",
        watch=Workload(
            look="Request b cuts the node that a reads. Later c wants all the memory: look at "
            "what cannot be evicted.",
            parts="step 11, preempted, c",
            guests=(
                Guest("a", blocks("abcd", " the"), 10),
                Guest("b", blocks("abe", " that"), 3, 2),
                Guest("c", blocks("fghilmnoprs"), 4, 14),
            ),
            config={"prefix_cache": "radix", "num_blocks": 14},
        ),
    ),
    Exhibit(
        trap=8,
        origin="mini-sglang #64 #80",
        title="Pages where tokens are meant",
        seen="One function counted in pages, its caller in tokens. A long hit looked like a "
        "short one, and what was cached was computed again into pages that others were reading.",
        lesson="Put the unit into the name, `num_blocks`, `num_tokens`, and test with a block "
        "size other than 1.",
        demonstrate=pages_for_tokens,
        wrong="two blocks of 4 tokens found: 2 tokens need no computing",
        right="two blocks of 4 tokens found: 8 tokens need no computing",
        watch=Workload(
            look="Three blocks are found for b in step 3. Look at how many tokens it need not "
            "compute.",
            parts="step 3, admitted, b",
            guests=(
                Guest("a", blocks("abc", " the"), 8),
                Guest("b", blocks("abc", " the"), 8, 3),
            ),
        ),
    ),
    Exhibit(
        trap=9,
        origin="mini-sglang",
        title="The cache keeps a view of somebody's row",
        seen="The tree stored a slice of the batch's token table, which is no copy. The next "
        "request in that row rewrote the keys of the cache: its prompt now led to KV of the old "
        "one.",
        lesson="A slice of a list is a copy, a slice of a tensor, an array or a memoryview is a "
        "window. What is kept is copied.",
        demonstrate=a_view_of_the_row,
        wrong="computed: A B; then its row is written over; found of A D: 8, of A B: 4",
        right="computed: A B; then its row is written over; found of A D: 4, of A B: 8",
        watch="The engine publishes a request when a token more is known than is cached, so the "
        "list is never handed over whole.",
    ),
    Exhibit(
        trap=11,
        origin="vLLM #51482",
        title="The head of a prompt is evicted before its tail",
        seen="A request gave up its blocks head first, so the head was reused first. What was "
        "left in the cache could never be found again, since every look-up begins at the head: a "
        "full cache, and no hits.",
        lesson="The order in which blocks are freed is part of the contract: the deepest first.",
        demonstrate=the_head_goes_first,
        wrong="of 16 cached tokens 4 are evicted; 0 can still be found",
        right="of 16 cached tokens 4 are evicted; 12 can still be found",
        watch=Workload(
            look="In step 2 one block of a makes room. Look at how much of the prompt c finds of "
            "it.",
            parts="step 2, evicted",
            guests=(
                Guest("a", blocks("abcd"), 1),
                Guest("b", blocks("efgh"), 3, 2),
                Guest("c", blocks("abcd"), 3, 6),
            ),
            config={"num_blocks": 9},
        ),
    ),
    Exhibit(
        trap=12,
        origin="vLLM #12621",
        title="A prompt made to collide",
        seen="Blocks were named by Python's `hash`, which is made to be quick and is easy to "
        "foresee. A prompt could be written that had the name of another user's prefix, and was "
        "answered from it (CVE-2025-25183).",
        lesson="A key that strangers can choose needs a cryptographic digest. `hash(-1)` is "
        "`hash(-2)`.",
        demonstrate=crafted_prompts,
        wrong="a prompt that nobody has sent, made to collide: 8 of 8 tokens are served",
        right="a prompt that nobody has sent, made to collide: 0 of 8 tokens are served",
        watch="It takes tokens below 0, and an engine refuses those at the door.",
    ),
    Exhibit(
        trap=12,
        origin="vLLM #44701",
        title="An adapter named X and a tenant named X",
        seen="What KV depends on besides the tokens went into the hash as bare values. An "
        "adapter and a cache salt of the same name gave the same key, and KV that was computed "
        "with the adapter was served to a tenant without it.",
        lesson="A value without its kind is ambiguous. Tag every part of a key.",
        demonstrate=an_adapter_and_a_salt,
        wrong="computed with adapter X; found by tenant X without it: 8 of 8 tokens",
        right="computed with adapter X; found by tenant X without it: 0 of 8 tokens",
        watch="No adapters are served here; the cache alone knows them.",
    ),
    Exhibit(
        trap=14,
        origin="SGLang #5556 #32217",
        title="Nineteen pages for eight",
        seen="Eviction took whole nodes. For 8 pages a node of 19 went, the caller was told 8, "
        "and under pressure the cache was emptied again and again.",
        lesson="Evict exactly what was asked for, and say exactly what was evicted.",
        demonstrate=nineteen_for_eight,
        wrong="8 of 19 pages are wanted; the cache says 8, and 30 of 30 are free",
        right="8 of 19 pages are wanted; the cache says 8, and 19 of 30 are free",
        watch=Workload(
            look="One block is missing for b in step 1. Count those that are evicted, and look at "
            "what c finds afterwards.",
            parts="step 1, evicted",
            guests=(
                Guest("a", blocks("abcdefgh"), 1),
                Guest("b", blocks("ilmn"), 3, 2),
                Guest("c", blocks("abcdefgh"), 3, 6),
            ),
            config={"prefix_cache": "radix", "num_blocks": 12},
        ),
    ),
    Exhibit(
        trap=14,
        origin="SGLang #4987",
        title="Eviction goes round for ever",
        seen="The loop that makes room looked at the oldest entry, found that it was out of "
        "date, and put it back as it was. The variable that should have brought the end never "
        "changed: one processor busy, no answer to anybody, no error.",
        lesson="Of every loop ask what gets smaller with each round. And give every test a time "
        "limit: this bug shows as silence.",
        demonstrate=eviction_without_end,
        wrong=NEVER_ENDS,
        right="asked for one page, the cache evicts 1",
        watch=Workload(
            look="In step 3 somebody has to be evicted. The film ends there.",
            parts="step 3, failed",
            guests=(
                Guest("a", blocks("ab"), 1),
                Guest("b", blocks("ab", " the"), 1, 2),
                Guest("c", blocks("defg"), 3, 4),
            ),
            config={"prefix_cache": "radix", "num_blocks": 7},
        ),
    ),
    Exhibit(
        trap=58,
        origin="SGLang #35270",
        title="Memory that leaks in the books only",
        seen="Pages that two requests shared were counted twice when they were locked and once "
        "when they were let go. An idle server reported a leak and stopped; or it believed to "
        "have less memory after every shared prompt.",
        lesson="Count what changes state, not who caused it. And check the books against a "
        "recount when nobody is served.",
        demonstrate=shared_pages_counted_twice,
        wrong="nobody is served; pages cached: 2, of them evictable: 0",
        right="nobody is served; pages cached: 2, of them evictable: 2",
        watch=Workload(
            look="Blocks that a and b have read are free in the pool and in use in the books: "
            "from step 5 on b comes and goes.",
            parts="step 5, preempted, b",
            guests=(
                Guest("a", blocks("ab", " the"), 6),
                Guest("b", blocks("ab", " that"), 6, 1),
                Guest("c", blocks("defgh"), 4, 9),
            ),
            config={"prefix_cache": "radix", "num_blocks": 8},
        ),
    ),
    Exhibit(
        trap=59,
        origin="ours",
        title="Two models with one name",
        seen="Engines that share KV over a disk or a network have to know that they run the same "
        "model. Ours took a digest of a sample of the weights, to be quick. Two checkpoints that "
        "differ elsewhere, say after a little fine-tuning, answered from each other's KV.",
        lesson="A key must depend on everything that its value depends on. A digest of a sample "
        "is a guess.",
        demonstrate=two_models_alike,
        wrong="two checkpoints, different in one row: names for their KV: 1",
        right="two checkpoints, different in one row: names for their KV: 2",
        watch="It takes two checkpoints and a store between two engines.",
    ),
)
