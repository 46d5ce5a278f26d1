"""A pool of KV blocks that several engines share: blocks that one computed can be copied by others.

A block hash identifies a whole prefix, so it means the same on every machine. Each node (an
engine's machine) keeps some blocks; the pool knows which:

    chain of a prompt   | h0      | h1      | h2      | h3      |
    node "a"            | block   | block   |         |         |
    node "b"            |         | block   | block   |         |
    has                 | on "a"  | on "a"  | on "b"  | miss: the match ends here, 3 blocks

An engine's connector uses the pool as the store of its node (`at_node`). A block that is read from
another node is brought by `transport`, and kept on the reader's node if the reader goes on, so a
record that its reader rejects spreads no further.

Invariants: a node holds at most `max_blocks_per_node` blocks and drops the least recently used one;
a block that was found is read, even if its node drops it in the meantime.

Mooncake keeps this index in a master process and moves bytes by RDMA or TCP (`mooncake_pool.py`).
vLLM's LMCache and SGLang's HiCache use such stores as a last tier. Source: Mooncake, arXiv
2407.00079.

See 03_prefix_cache/beyond/README.md"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kv_store import KVStore
from kv_tiers import HostTier
from request_chain import Link

Transport = Callable[[bytes], bytes]
"""Brings a block's bytes from another node. May be slow, raise, or be wrong."""


def copy_in_process(data: bytes) -> bytes:
    return data


class GlobalKVPool:
    """A pool of KV blocks within one process. Every method can be called from any thread. Raises
    `ValueError` if `max_blocks_per_node` is not positive."""

    def __init__(
        self, max_blocks_per_node: int = 100, transport: Transport = copy_in_process
    ) -> None:
        if not max_blocks_per_node > 0:
            raise ValueError(f"max_blocks_per_node must be > 0, got {max_blocks_per_node}")
        self.max_blocks_per_node = max_blocks_per_node
        self.transport = transport
        self.nodes: dict[str, HostTier] = {}

    def at_node(self, node_id: str) -> KVStore:
        """Return the pool as the engine on this node uses it."""
        self.nodes.setdefault(node_id, HostTier(self.max_blocks_per_node))
        return _PoolAtNode(self, node_id)

    @property
    def total_cached_blocks(self) -> int:
        """Blocks on all nodes together, counting each copy."""
        return sum(map(len, self.nodes.values()))


class _PoolAtNode(KVStore):
    def __init__(self, pool: GlobalKVPool, node_id: str) -> None:
        self.pool = pool
        self.own = pool.nodes[node_id]

    def has(self, links: Sequence[Link]) -> int:
        num_found = 0
        while num_found < len(links) and self._node_with(links[num_found]) is not None:
            num_found += 1
        for node in list(self.pool.nodes.values()):
            node.use(links[:num_found])
        return num_found

    def _node_with(self, link: Link) -> HostTier | None:
        """A node that has the block, this one if it has."""
        nodes = [self.own, *self.pool.nodes.values()]
        return next((node for node in nodes if link[0] in node), None)

    def get(self, links: Sequence[Link]) -> Iterator[bytes]:
        found: list[tuple[Link, bool, Iterator[bytes]]] = []
        for link in links:
            node = self._node_with(link) or self.own
            found.append((link, node is self.own, node.get([link])))
        return self._brought(found)

    def _brought(self, found: Sequence[tuple[Link, bool, Iterator[bytes]]]) -> Iterator[bytes]:
        for link, is_here, parts in found:
            for data in parts:
                if is_here:
                    yield data
                else:
                    brought = self.pool.transport(data)
                    yield brought
                    self.put(link, brought)  # after the reader has checked it

    def put(self, link: Link, data: bytes) -> bool:
        return self.own.put(link, data)

    def drop(self, link: Link) -> None:
        for node in list(self.pool.nodes.values()):
            node.drop(link)
