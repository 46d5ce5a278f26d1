"""Evening 3: blocks that are computed once, found again, and finally evicted."""

from __future__ import annotations

import contextlib

from workshop.practice.examples.example_tools import Lines


def chains() -> Lines:
    from prefix_cache_local import compute_block_hash, compute_hash_chain

    tokens = list(range(14))
    chain = compute_hash_chain(tokens, 4)
    other = compute_hash_chain([9, *tokens[1:]], 4)
    salted = compute_hash_chain(tokens, 4, [("salt", "x")])
    first = compute_block_hash(None, tokens[:4])
    behind = compute_block_hash(salted[0][0], tokens[4:8])
    third = compute_block_hash(chain[1][0], tokens[8:12])
    yield (
        f"14 tokens in blocks of 4: {[list(tokens) for _, tokens in chain]}\n"
        f"8 tokens in blocks of 4: {len(compute_hash_chain(tokens[:8], 4))} blocks\n"
        f"the first hash is that of its block: {chain[0][0] == first}\n"
        f"another first token, the second hash differs: {chain[1][0] != other[1][0]}\n"
        f"with a salt, the first hash differs: {chain[0][0] != salted[0][0]}\n"
        f"the second is the hash after the first: {salted[1][0] == behind}\n"
        f"the third is the hash after the second: {chain[2][0] == third}"
    )


def matches() -> Lines:
    from prefix_cache import MatchCursor
    from prefix_cache_local import PrefixCacheLocal

    cache = PrefixCacheLocal(max_cached_blocks=4, block_size=4)
    a, b = list(range(8)), list(range(100, 108))
    cache.cache_computed_blocks(a)
    cache.cache_computed_blocks(b)
    for name, tokens in (("8", a), ("7", a[:7]), ("12", [*a, 1, 2, 3, 4])):
        match = cache.match_prefix(tokens)
        shown = f"{len(match.blocks)} blocks, {match.num_cached_tokens} tokens"
        yield f"a prompt of {name} tokens, 8 of them are cached: {shown}"
    yield f"under another salt: {cache.match_prefix(a, [('salt', 'x')]).num_cached_tokens}"
    cursor = MatchCursor()
    found = [len(cache.match_prefix(a[:n], None, cursor).blocks) for n in (7, 8)]
    known = "is remembered" if cursor.state else "is not remembered"
    yield f"7 tokens, then 8, with one cursor: {found} blocks; its place {known}"
    cache = PrefixCacheLocal(max_cached_blocks=4, block_size=4)
    for tokens in (a, b):
        cache.cache_computed_blocks(tokens)
    cache.match_prefix(a)
    cache.evict(2)
    left = [cache.match_prefix(tokens).num_cached_tokens for tokens in (a, b)]
    yield f"a was cached before b and matched after it; 2 blocks go: {left} tokens are left"


def evictions() -> Lines:
    from prefix_cache_local import PrefixCacheLocal

    cache = PrefixCacheLocal(max_cached_blocks=8, block_size=4)
    a, b = list(range(12)), list(range(100, 108))
    path = cache.cache_computed_blocks(a)
    other = cache.cache_computed_blocks(b)
    cache.touch(path)
    cache.touch(path)
    cache.release(path)
    yield f"a has 2 users, one goes: {cache.num_evictable_blocks} of 5 can be evicted"
    cache.release(path)
    yield f"the other goes: {cache.num_evictable_blocks} of 5 can be evicted"
    try:
        cache.release(other)
        yield "a release of an unused block: accepted"
    except ValueError:
        yield "a release of an unused block: refused"
    cache.touch(path[:1])
    with contextlib.suppress(ValueError):
        cache.release(path)
    yield f"its head is used and all is released: {cache.num_evictable_blocks} of 5"
    cache.release(path[:1])
    for _ in range(3):
        cache.evict(1)
        left = {name: sum(map(cache.owns, blocks)) for name, blocks in (("a", path), ("b", other))}
        heads = [name for name, blocks in (("a", path), ("b", other)) if cache.owns(blocks[0])]
        yield f"one block is evicted: left are {left}, with their heads {heads}"


def cuts() -> Lines:
    from block_pool import Block
    from radix_tree import RadixTree

    tree = RadixTree(page_size=2)
    blocks = [Block(block_id, 2) for block_id in (1, 2, 3)]
    root = tree.root(())
    node = tree.append(root, [10, 11, 20, 21, 30, 31], blocks, lock_ref=1)
    node.last_access = 5
    upper = tree.split_node(node, 1)
    yield "three pages of 2 tokens, one user; cut behind the first"
    for name, part in (("upper", upper), ("lower", node)):
        ids = [block.block_id for block in part.blocks]
        yield (
            f"{name}: tokens {part.key}, blocks {ids}, pages {part.start} to {part.end - 1}, "
            f"{part.lock_ref} users, last used {part.last_access}"
        )
    names = {id(upper): "upper", id(node): "lower", id(root): "root"}
    yield f"blocks are in {[names[id(tree.node_of[n])] for n in (1, 2, 3)]}"
    yield f"below the root: {[names[id(child)] for child in root.children.values()]}"
    yield f"below the upper: {[names[id(child)] for child in upper.children.values()]}"
    yield f"the parent of the lower: {names[id(node.parent)]}"
    yield f"a cut at its end: {names[id(tree.split_node(node, 3))]}"
    part = tree.split_node(node, 2)
    yield f"the lower, cut after page 2: {part.key} and {node.key}"


def longest_hits() -> Lines:
    from block_pool import BlockPool
    from grouped_prefix_cache import GroupedPrefixCache
    from prefix_cache_local import compute_hash_chain

    windows = (None, 10, 6, 1)
    chain = compute_hash_chain(list(range(16)), 4)
    yield "4 blocks of 4 tokens, x is there; blocks of the longest prefix that holds"
    for there in ("xxxx", "xxx-", "x-xx", "xx-x", "-xxx", "-x-x", "x---"):
        cache = GroupedPrefixCache(BlockPool(17), 4, windows)
        blocks = iter(cache.pool.blocks[1:])
        for group in range(len(windows)):
            for index, mark in enumerate(there if group else there[::-1]):
                if mark == "x":
                    cache.publish(group, chain, index, next(blocks))
        hashes = [name for name, _ in chain]
        everything, *others = (cache._longest_in(group, hashes) for group in range(len(windows)))
        yield (
            f"{there[::-1]}, all is seen: {everything}    {there}, windows of 10, 6 and 1: {others}"
        )


# -- exhibits


A, B, C, D = ([letter] * 4 for letter in (1, 2, 3, 4))  # a block of tokens each
