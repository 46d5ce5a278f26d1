"""Every invariant of a prefix cache and of the managers over it, for tests. The engine's own checks
(`check_invariants`) are those that need no search."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, NamedTuple

from block_pool import NULL_BLOCK_ID, Block
from cached_kv_cache_manager import CachedKVCacheManager
from grouped_kv_memory import GroupedKVMemory
from grouped_prefix_cache import GroupedPrefixCache
from loading_kv_cache_manager import LoadingKVCacheManager
from prefix_cache import NormalKeys, PrefixCache, extra_keys_of, normalise_extra_keys
from prefix_cache_local import PrefixCacheLocal, compute_block_hash
from radix_cache import RadixCache
from radix_tree import RadixTree
from request import Request


class CachedPrefix(NamedTuple):
    """One cached block with its whole prefix. In groups, also its group."""

    extra_keys: NormalKeys
    token_ids: tuple[int, ...]  # of the whole prefix, with this block's tokens last
    block: Block
    group: int = 0
    num_own_references: int = 1  # of the cache

    @property
    def num_users(self) -> int:
        return self.block.ref_cnt - self.num_own_references


def cached_prefixes(cache: PrefixCache | GroupedPrefixCache) -> Iterator[CachedPrefix]:
    """Every cached block with its whole prefix, in the order of `cached_contents`."""
    if isinstance(cache, GroupedPrefixCache):
        for known in cache.cached_prefixes():
            tokens = chain.from_iterable(tokens for _, tokens in known.chain[: known.index + 1])
            yield CachedPrefix((), tuple(tokens), known.block, known.group, num_own_references=0)
        return
    contents = {content.block.block_id: content for content in cache.cached_contents()}
    for content in contents.values():
        parts = [content.token_ids]
        parent_id = content.parent_id
        while parent_id is not None:
            parent = contents[parent_id]
            parts.append(parent.token_ids)
            parent_id = parent.parent_id
        token_ids = tuple(token for part in reversed(parts) for token in part)
        yield CachedPrefix(content.extra_keys, token_ids, content.block)


def check_cache(cache: Any) -> None:
    """Raise `AssertionError` if the cache is inconsistent, or contradicts its pool."""
    cache.check_invariants()
    checks = {
        PrefixCacheLocal: check_chain,
        RadixCache: check_radix,
        GroupedPrefixCache: check_groups,
    }
    for kind, check in checks.items():
        if isinstance(cache, kind):
            check(cache)


def check_chain(cache: PrefixCacheLocal) -> None:
    assert len(cache._by_hash) == len(cache._by_block_id)
    places = {block_id: place for place, block_id in enumerate(cache._evictable)}
    for block_hash, cached in cache._by_hash.items():
        assert cache._by_block_id[cached.block_id] is cached, cached
        assert cached.block is cache.pool.blocks[cached.block_id], cached
        assert cached.block_hash == block_hash, cached
        assert len(cached.token_ids) == cache.block_size, cached
        parent = cached.parent
        if parent is None:
            keys = [(tag, value.partition(":")[2]) for tag, value in cached.extra_keys]
            is_text = all(value.startswith("str:") for _, value in cached.extra_keys)
            assert not is_text or block_hash == compute_block_hash(None, cached.token_ids, keys)
        else:
            assert cache._by_hash.get(parent.block_hash) is parent, f"{cached} has no parent"
            assert parent.num_users >= cached.num_users, f"{cached} is used, its parent is not"
            assert block_hash == compute_block_hash(parent.block_hash, cached.token_ids), cached
        assert (cached.num_users == 0) == (cached.block_id in places), cached
        if parent is not None and parent.num_users == 0:
            assert places[cached.block_id] < places[parent.block_id], f"wrong order: {cached}"


def check_radix(cache: RadixCache) -> None:
    check_tree(cache.tree)
    nodes = set(cache.tree.nodes())
    for node in nodes:
        for block in node.blocks:
            assert block is cache.pool.blocks[block.block_id], f"{block} is not in the pool"
            assert block.ref_cnt == node.lock_ref + 1, f"ref_cnt of {block} contradicts {node}"
        for child in node.children.values():
            assert node.is_root or child.lock_ref <= node.lock_ref, f"{child} used, {node} not"
            is_newer = child.last_access > node.last_access
            assert node.is_root or node.lock_ref or not is_newer, f"{child} newer than {node}"
    queued = {node for _, _, node in cache._heap}
    assert len(queued) == len(cache._heap), "a node is in the eviction heap twice"
    assert queued == {node for node in nodes if node.is_queued}, "queued, but not in the tree"
    for time, _, node in cache._heap:
        assert time <= node.last_access, f"{node} would be evicted too late"
    for node in nodes - queued:
        assert node.is_root or node.children or node.lock_ref, f"{node} is not queued"


def check_tree(tree: RadixTree) -> None:
    num_pages = 0
    for extra_keys, root in tree.roots.items():
        assert root.extra_keys == extra_keys and root.is_root, root
        assert root.children and not root.blocks and not root.key and root.end == 0, root
    for node in tree.nodes():
        num_pages += len(node.blocks)
        assert len(node.key) == len(node.blocks) * tree.page_size, node
        for first_page, child in node.children.items():
            assert child.parent is node and child.blocks, child
            assert child.start == node.end, f"{child} does not start at its parent's end"
            assert first_page == tuple(child.key[: tree.page_size]), child
        for block in node.blocks:
            assert tree.node_of.get(block.block_id) is node, f"{block} is in another node"
    assert num_pages == len(tree.node_of), f"{num_pages} pages, {len(tree.node_of)} in node_of"


def check_groups(cache: GroupedPrefixCache) -> None:
    for block_id, known in cache._by_block_id.items():
        assert cache.pool.blocks[block_id] is known.block, known
        before = known.chain[: known.index]
        (name, tokens) = known.chain[known.index]
        assert not before or compute_block_hash(before[-1][0], tokens) == name, known


def check_memory(memory: Any, requests: Iterable[Request] = ()) -> None:
    """Raise `AssertionError` if tables, cache and pool are inconsistent."""
    requests = list(requests)
    memory.check_invariants(requests)
    if memory.cache is not None:
        check_cache(memory.cache)
    if isinstance(memory, GroupedKVMemory):
        check_windows(memory, requests)
        if memory.cache is not None:
            check_published_in_groups(memory, requests)
    if isinstance(memory, CachedKVCacheManager):
        check_published(memory, requests)
    if isinstance(memory, LoadingKVCacheManager):
        assert memory.loads.keys().isdisjoint(memory._tables), "both loading and running"


def check_published(manager: CachedKVCacheManager, requests: list[Request]) -> None:
    """A cached block, or one that was cached, is at the same index in every table that has it; any
    other block is in one table. Published blocks are cached under the request's own prefix."""
    for key, request_id in manager._in_flight.items():
        assert manager._states[request_id].in_flight == key, request_id
    places: dict[int, tuple[object, int]] = {}
    for request_id, table in manager._tables.items():
        state = manager._states.get(request_id)
        for index, block in enumerate(table.blocks):
            is_cached = manager.cache.owns(block)
            is_shared = is_cached or state is None
            assert state is None or is_cached or index >= state.num_published, (
                f"{request_id!r} lost {block}"
            )
            place = ("shared" if is_shared else request_id, index)
            assert places.setdefault(block.block_id, place) == place, (request_id, place)
    paths = {prefix.block.block_id: prefix for prefix in cached_prefixes(manager.cache)}
    for request in requests:
        block_ids = manager.get_block_ids(request.request_id)
        state = manager._states.get(request.request_id)
        for index in range(state.num_published if state else 0):
            held = paths[block_ids[index]]
            tokens = request.all_token_ids[: (index + 1) * manager.block_size]
            assert list(held.token_ids) == tokens, (request, index)
            assert held.extra_keys == normalise_extra_keys(extra_keys_of(request)), request


def check_windows(memory: GroupedKVMemory, requests: list[Request]) -> None:
    """No block that is seen was freed."""
    names = [group._tables.keys() for group in memory.groups]
    assert all(found == names[0] for found in names), "a block table is missing in a group"
    for group in memory.groups:
        for request in requests if group.window is not None else ():
            ids = group.get_block_ids(request.request_id)
            num_null = sum(block_id == NULL_BLOCK_ID for block_id in ids)
            num_unseen = group.num_unseen_blocks(request.num_computed_tokens)
            assert num_null <= num_unseen, f"{request} lost visible blocks"
            assert all(ids[num_null:]), f"{request} has a hole in group {group.group}"


def check_published_in_groups(memory: GroupedKVMemory, requests: list[Request]) -> None:
    assert memory.cache is not None
    assert memory._num_published.keys() <= memory.groups[0]._tables.keys(), "without tables"
    places: dict[int, tuple[object, int, int]] = {}
    for name in memory.groups[0]._tables:
        for number, ids in enumerate(memory.get_tables(name)):
            for index, block_id in enumerate(ids):
                is_known = block_id in memory.cache._by_block_id
                is_shared = is_known or name not in memory._num_published
                place = ("shared" if is_shared else name, number, index)
                is_alone = places.setdefault(block_id, place) == place
                assert is_alone or block_id == NULL_BLOCK_ID, (name, place)
    for request in requests:
        num_blocks = memory._num_published.get(request.request_id, 0)
        links = memory._chains.chain(request, num_blocks)
        tokens = list(chain.from_iterable(of_block for _, of_block in links))
        assert tokens == request.all_token_ids[: len(tokens)], request
        for group in memory.groups:
            blocks = group.held(request.request_id)
            first = group.num_given_up[request.request_id]
            for index, block in zip(range(first, num_blocks), blocks):
                known = memory.cache._by_block_id[block.block_id]
                assert known.key == (group.group, links[index][0]), (request, known)
