"""Evening 3: what is computed once, found again, and in the end forgotten."""

from __future__ import annotations

from common.workshop.tasks.task import Task


def chains() -> str:
    from prefix_cache_local import compute_block_hash, compute_hash_chain

    tokens = list(range(10))
    chain = compute_hash_chain(tokens, 4)
    other = compute_hash_chain([9, *tokens[1:]], 4)
    salted = compute_hash_chain(tokens, 4, [("salt", "x")])
    first = compute_block_hash(None, tokens[:4])
    behind = compute_block_hash(salted[0][0], tokens[4:8])
    return (
        f"10 tokens in blocks of 4: {[list(tokens) for _, tokens in chain]}\n"
        f"the first hash is that of its block: {chain[0][0] == first}\n"
        f"another first token, the second hash differs: {chain[1][0] != other[1][0]}\n"
        f"with a salt, the first hash differs: {chain[0][0] != salted[0][0]}\n"
        f"the second is the hash behind the first: {salted[1][0] == behind}"
    )


def matches() -> str:
    from prefix_cache_local import PrefixCacheLocal

    cache = PrefixCacheLocal(max_cached_blocks=4, block_size=4)
    a, b = list(range(8)), list(range(100, 108))
    cache.cache_computed_blocks(a)
    cache.cache_computed_blocks(b)
    lines = []
    for name, tokens in (("8", a), ("7", a[:7]), ("10", [*a, 1, 2])):
        match = cache.match_prefix(tokens)
        shown = f"{len(match.blocks)} blocks, {match.num_cached_tokens} tokens"
        lines.append(f"a prompt of {name} tokens, 8 of them are cached: {shown}")
    lines.append(f"under another salt: {cache.match_prefix(a, [('salt', 'x')]).num_cached_tokens}")
    cache.match_prefix(a)
    cache.evict(2)
    left = [cache.match_prefix(tokens).num_cached_tokens for tokens in (a, b)]
    lines.append(f"a was cached before b and matched after it; 2 blocks go: {left} tokens are left")
    return "\n".join(lines)


def evictions() -> str:
    from prefix_cache_local import PrefixCacheLocal

    cache = PrefixCacheLocal(max_cached_blocks=8, block_size=4)
    a, b = list(range(12)), list(range(100, 108))
    path = cache.cache_computed_blocks(a)
    other = cache.cache_computed_blocks(b)
    cache.touch(path)
    cache.touch(path)
    cache.release(path)
    lines = [f"a has 2 users, one goes: {cache.num_evictable_blocks} of 5 can be evicted"]
    cache.release(path)
    lines.append(f"the other goes: {cache.num_evictable_blocks} of 5 can be evicted")
    try:
        cache.release(other)
        lines.append("a release of what nobody uses: accepted")
    except ValueError:
        lines.append("a release of what nobody uses: refused")
    for _ in range(3):
        cache.evict(1)
        left = {name: sum(map(cache.owns, blocks)) for name, blocks in (("a", path), ("b", other))}
        heads = [name for name, blocks in (("a", path), ("b", other)) if cache.owns(blocks[0])]
        lines.append(f"one block is evicted: left are {left}, with their heads {heads}")
    return "\n".join(lines)


def cuts() -> str:
    from block_pool import Block
    from radix_tree import RadixTree

    tree = RadixTree(page_size=2)
    blocks = [Block(block_id, 2) for block_id in (1, 2, 3)]
    root = tree.root(())
    node = tree.append(root, [10, 11, 20, 21, 30, 31], blocks, lock_ref=1)
    node.last_access = 5
    upper = tree.cut(node, 1)
    lines = ["three pages of 2 tokens, one user; cut behind the first"]
    for name, part in (("upper", upper), ("lower", node)):
        ids = [block.block_id for block in part.blocks]
        lines.append(
            f"{name}: tokens {part.key}, blocks {ids}, pages {part.start} to {part.end - 1}, "
            f"{part.lock_ref} users, last used {part.last_access}"
        )
    names = {id(upper): "upper", id(node): "lower", id(root): "root"}
    lines.append(f"blocks are in {[names[id(tree.node_of[n])] for n in (1, 2, 3)]}")
    lines.append(f"below the root: {[names[id(child)] for child in root.children.values()]}")
    lines.append(f"below the upper: {[names[id(child)] for child in upper.children.values()]}")
    lines.append(f"the parent of the lower: {names[id(node.parent)]}")
    lines.append(f"a cut at its end: {names[id(tree.cut(node, 3))]}")
    return "\n".join(lines)


TASKS = (
    Task(
        number="3.1",
        title="A hash for each block, and for all before it",
        minutes=12,
        difficulty=1,
        module="prefix_cache_local",
        place="compute_hash_chain",
        write="A block can be shared by two requests if its tokens are the same and everything "
        "before it is the same. One number says so: a hash of the block's tokens and of the "
        "hash of the block before it.\n\n"
        "Go through the full blocks of `token_ids`. "
        "`compute_block_hash(parent_hash, tokens, extra_keys)` hashes one; the parent of the "
        "first block is None. `extra_keys` (an adapter, a tenant's salt) go into the first "
        "block only: through the chain they are in all others. Return a list of "
        "`(hash, tokens)`, the tokens of each block as a tuple.\n\n"
        "Keep this: equal hashes mean equal prefixes. A last block that is not full is left "
        "out; it will get other tokens yet.",
        hints=(
            "One loop; the hash that it has just made is the parent of the next.",
            "range(0, len(token_ids) - block_size + 1, block_size) gives the starts of the full "
            "blocks.",
            "tokens = tuple(token_ids[start : start + block_size]); parent_hash = "
            "compute_block_hash(parent_hash, tokens, None if chain else extra_keys); "
            "chain.append((parent_hash, tokens))",
        ),
        test_module="test_prefix_cache_local",
        tests=("test_a_chain_hashes_the_full_blocks_one_behind_the_other",),
        probe=chains,
        engine=None,
    ),
    Task(
        number="3.2",
        title="The longest cached prefix",
        minutes=15,
        difficulty=2,
        module="prefix_cache",
        place="PrefixCache.match_prefix",
        write="A new request asks: how much of my prompt has somebody computed already?\n\n"
        "`self._find(walk, begin, end)` gives the cached ones of blocks `begin` to `end - 1`, "
        "from the front up to the first that is not there. The walk says along which prefix: "
        "`Walk(token_ids, self.block_size, keys, path)`, with `keys` from "
        "`normalise_extra_keys(extra_keys)`, and a new `PrefixPath()` if the caller has "
        "brought none.\n\n"
        "Ask for all full blocks of `token_ids`. If some are found, tell "
        "`self._use(blocks)` that they are used now. Return a `PrefixMatch`: the blocks, and "
        "the number of tokens in them.\n\n"
        "Keep this: only whole blocks are shared. A match is a use, so that what is asked for "
        "often is evicted last.",
        hints=(
            "How many full blocks do 10 tokens have, if a block holds 4?",
            "The number of tokens is that of the blocks found, not that of the prompt.",
            "blocks = self._find(walk, 0, len(token_ids) // self.block_size); if blocks: "
            "self._use(blocks); return PrefixMatch(blocks, len(blocks) * self.block_size)",
        ),
        test_module="test_prefix_cache",
        tests=(
            "test_an_empty_cache_hits_nothing",
            "test_a_match_ends_at_the_first_block_that_is_not_cached",
            "test_only_whole_blocks_are_cached_and_matched",
            "test_prefixes_branch",
            "test_extra_keys_separate_everything",
            "test_only_the_matched_part_of_a_prefix_is_refreshed",
        ),
        probe=matches,
    ),
    Task(
        number="3.3",
        title="The order in which blocks are forgotten",
        minutes=20,
        difficulty=2,
        module="prefix_cache_local",
        place="PrefixCacheLocal.release",
        write="A request has ended and no longer uses its cached blocks, given head first. What "
        "nobody uses stays in the cache, and can be evicted when memory is wanted: the least "
        "recently used first.\n\n"
        "Look the blocks up with `self._cached(blocks, 'release')`. In the pool, `block.ref_cnt` "
        "counts the users and the cache itself: 1 means that the cache alone holds it. Raise "
        "`ValueError`, before anything changes, for a block that nobody uses. Then "
        "`self.pool.free([...])` drops one reference of each.\n\n"
        "Those that nobody uses now go into `self._evictable`, an OrderedDict from block id to "
        "cached block. Eviction takes from its front.\n\n"
        "Keep this: a child is evicted before its parent, for a block without the ones before "
        "it is never found. So of one request, the deepest goes to the front of the others.",
        hints=(
            "All of these blocks are released at the same moment. Which of them should go "
            "first, if one has to go?",
            "A new key of an OrderedDict stands at its end. So put the deepest in first.",
            "for cached in reversed(cached_blocks): if cached.block.ref_cnt == 1: "
            "self._evictable[cached.block_id] = cached",
        ),
        test_module="test_prefix_cache",
        tests=(
            "test_children_are_evicted_before_their_parents",
            "test_a_used_block_is_never_evicted",
            "test_a_block_is_used_until_its_last_user_lets_go",
            "test_a_release_is_a_use",
            "test_release_of_a_block_that_nobody_uses_is_an_error",
            "test_the_least_recently_used_block_is_evicted_first",
        ),
        probe=evictions,
    ),
    Task(
        number="3.4",
        title="Cut a node of the radix tree",
        minutes=30,
        difficulty=3,
        module="radix_tree",
        place="RadixTree.cut",
        write="A node of the tree is a run of pages (a page is a block). When a new prompt "
        "agrees with the first pages only, the run is cut in two:\n\n"
        "    root -- [A B C D]          cut behind B          root -- [A B] -- [C D]\n\n"
        "`page` counts from the root: the cut is behind page `page` of the whole path, and "
        "`node.start` and `node.end` are counted so too. If it is the end of `node`, nothing "
        "is to be done: return `node`. Otherwise make a new `TreeNode` for the upper part, "
        "with its share of `node.key` (tokens: `self.page_size` for each page) and of "
        "`node.blocks`, and with the parent, the users (`lock_ref`) and the last use of `node`. "
        "Take that share away from `node`. Hang the upper part where the node hung, and the "
        "node below it (`self._hang(node)` enters a node in its parent's `children`). "
        "`self.node_of` maps the id of each block to its node. Return the upper part.\n\n"
        "Keep this: the old object is the lower part. Whoever remembers the end of a path "
        "remembers that object, and its end has not moved.",
        hints=(
            "How many pages go to the upper part? Not `page`, if the node does not begin at 0.",
            "Order: make the upper node from slices, delete the slices from the node, hang the "
            "upper one, set node.parent, hang the node, enter the moved blocks in node_of.",
            "num_pages = page - node.start; upper = TreeNode(node.parent, node.key[: num_pages "
            "* self.page_size], node.blocks[:num_pages], page, node.lock_ref, node.last_access)",
        ),
        test_module="test_radix_tree",
        tests=(
            "test_a_cut_at_the_end_of_a_node_is_none",
            "test_a_cut_leaves_the_old_object_as_the_lower_part",
            "test_there_are_as_many_nodes_as_places_where_prefixes_part_or_end",
            "test_pages_are_found_and_cut_out_at_both_ends",
        ),
        probe=cuts,
        engine={"prefix_cache": "radix"},
    ),
)
