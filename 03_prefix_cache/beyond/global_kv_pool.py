"""A pool of KV blocks that several engines share: blocks that one computed can be copied by others.

A block hash identifies a whole prefix, so it means the same on every machine. Each node (an
engine's machine) keeps some blocks; the pool knows which:

    chain of a prompt   | h0      | h1      | h2      | h3      |
    node "a"            | block   | block   |         |         |
    node "b"            |         | block   | block   |         |
    query               | on "a"  | on "a"  | on "b"  | miss: the match ends here, 3 blocks

A request's missing blocks are copied to its own node in the background. A copy may fail, hang or
bring wrong bytes: each block carries a checksum, each transfer has a deadline, and a failed
transfer is reported with the blocks that did arrive, from the front. The rest is computed.

An engine's connector uses the pool as the store of its node (`at_node`). `async_transfer` copies
blocks to any node.

Invariants: a node holds at most `max_blocks_per_node` blocks and drops the least recently used one;
all copies of a hash have the same tokens; a transfer pins the blocks it reads, so none is lost in
flight; its blocks are intact and from the front of the chain.

Mooncake keeps this index in a master process and moves bytes by RDMA or TCP (`mooncake_pool.py`).
vLLM's LMCache and SGLang's HiCache use such stores as a last tier. Source: Mooncake, arXiv
2407.00079.

See 03_prefix_cache/beyond/README.md"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from kv_store import KVStore, LRUBlocks, compute_checksum
from request_chain import Link
from store_loads import Loads

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KVBlock:
    """One node's copy of one block: the keys and values of all layers, as bytes, for `token_ids`
    after the prefix that `block_hash` identifies."""

    block_hash: bytes
    node_id: str
    token_ids: tuple[int, ...]
    kv_data: bytes = field(repr=False)
    checksum: bytes = field(repr=False)

    @classmethod
    def create(
        cls, block_hash: bytes, node_id: str, token_ids: Sequence[int], kv_data: bytes
    ) -> KVBlock:
        """Copy the data into a new block, and compute the checksum."""
        token_ids, kv_data = tuple(token_ids), bytes(kv_data)
        checksum = compute_checksum((block_hash, token_ids), kv_data)
        return cls(block_hash, node_id, token_ids, kv_data, checksum)

    @property
    def is_intact(self) -> bool:
        """Whether hash, tokens and bytes are unchanged since the block was made. O(bytes)."""
        link = self.block_hash, self.token_ids
        return self.checksum == compute_checksum(link, self.kv_data)


@dataclass(frozen=True, slots=True)
class TransferResult:
    """The blocks that arrived: intact, from the front of the chain. `error` is the reason why there
    are not more; None: all arrived."""

    blocks: tuple[KVBlock, ...]
    error: str | None = None


Transport = Callable[[KVBlock], bytes]
"""Brings the `kv_data` of a block from `block.node_id`. May be slow, raise, or be wrong."""


def copy_in_process(block: KVBlock) -> bytes:
    return block.kv_data


class Callback(Protocol):
    def __call__(self, request_id: str, *, success: bool) -> object: ...


class _CallOnce:
    """Reports the end of a transfer: the first call counts."""

    def __init__(self, request_id: str, callback: Callback) -> None:
        self._request_id = request_id
        self._callbacks = [callback]  # `pop` is atomic: no lock that Ctrl-C could leave taken
        self._timer: threading.Timer | None = None

    def __call__(self, success: bool) -> None:
        try:
            callback = self._callbacks.pop()
        except IndexError:
            return
        if self._timer is not None:
            self._timer.cancel()
        try:
            callback(self._request_id, success=success)
        except Exception:
            logger.exception("the callback of transfer %r raised", self._request_id)

    def by(self, timeout_s: float) -> None:
        """Report a failure after `timeout_s`, unless the end was reported before."""
        self._timer = threading.Timer(timeout_s, self, [False])
        self._timer.daemon = True
        if self._callbacks:
            self._timer.start()


class GlobalKVPool:
    """A pool of KV blocks within one process. Every method can be called from any thread.

    A block is used when it is published, when a query returns its node, or when a transfer reads or
    writes it. Among the blocks of one call the first count as used last, so a full node loses a
    chain's tail before its head. `transport` copies bytes from node to node; `transfer_timeout_s`
    is the deadline of an `async_transfer`: loads of an engine have that of its connector. Raises
    `ValueError` for a number that is not positive.
    """

    def __init__(
        self,
        max_blocks_per_node: int = 100,
        transport: Transport = copy_in_process,
        transfer_timeout_s: float = 10.0,
        num_transfer_threads: int = 4,
    ) -> None:
        for name, value in (
            ("max_blocks_per_node", max_blocks_per_node),
            ("transfer_timeout_s", transfer_timeout_s),
            ("num_transfer_threads", num_transfer_threads),
        ):
            if not value > 0:
                raise ValueError(f"{name} must be > 0, got {value}")
        self.max_blocks_per_node = max_blocks_per_node
        self._transport = transport
        self.num_transfer_threads = num_transfer_threads
        self._transfers = Loads[KVBlock](transfer_timeout_s, num_transfer_threads)
        self._lock = threading.Lock()
        self._nodes: dict[str, LRUBlocks[KVBlock]] = {}
        self._copies: dict[bytes, dict[str, KVBlock]] = {}  # hash -> node id, earliest first
        self._is_closed = False

    # -- the index

    def query(self, block_hashes: Sequence[bytes]) -> tuple[int, list[str]]:
        """Return `(num_matched_tokens, node_ids)` for the longest prefix of this chain that is in
        the pool. `node_ids[i]` is a node that has the i-th matched block: the same one for as long
        as possible, starting with the one that published first. The blocks count as used, but they
        are not pinned."""
        matched: list[KVBlock] = []
        with self._lock:
            for block_hash in block_hashes:
                copies = self._copies.get(block_hash)
                if copies is None:
                    break
                same_node = copies.get(matched[-1].node_id) if matched else None
                matched.append(same_node or next(iter(copies.values())))
            self._use(matched)
        num_matched_tokens = sum(len(block.token_ids) for block in matched)
        return num_matched_tokens, [block.node_id for block in matched]

    def publish(
        self, block_hash: bytes, node_id: str, token_ids: Sequence[int], kv_data: bytes
    ) -> bool:
        """Keep a copy on `node_id`. Returns False, and only marks it as used, if the node already
        has the block. Raises `ValueError` if `token_ids` is empty or differs from the pool's tokens
        for this hash."""
        with self._lock:
            if self._has(block_hash, node_id, tuple(token_ids)):
                return False
        block = KVBlock.create(block_hash, node_id, token_ids, kv_data)  # slow: without the lock
        with self._lock:
            if self._has(block_hash, node_id, block.token_ids):
                return False
            self._store(block)
        return True

    def invalidate(self, block_hashes: Sequence[bytes]) -> None:
        """Remove every copy of these blocks. Copies that were already read are not affected.
        Unknown hashes are ignored."""
        with self._lock:
            for block_hash in block_hashes:
                for node_id in self._copies.pop(block_hash, {}):
                    del self._nodes[node_id][block_hash]

    @property
    def total_cached_blocks(self) -> int:
        """Blocks on all nodes together, counting each copy."""
        with self._lock:
            return sum(map(len, self._nodes.values()))

    def _has(self, block_hash: bytes, node_id: str, token_ids: tuple[int, ...]) -> bool:
        if self._is_closed:
            raise RuntimeError("cannot use the pool: the pool is closed")
        copies = self._copies.get(block_hash, {})
        known = next(iter(copies.values())).token_ids if copies else token_ids
        if not token_ids or known != token_ids:
            raise ValueError(f"token_ids must be {known or 'non-empty'} here, got {token_ids}")
        if node_id not in copies:
            return False
        self._use([copies[node_id]])
        return True

    def _use(self, blocks: Sequence[KVBlock]) -> None:
        for block in reversed(blocks):
            self._nodes[block.node_id].move_to_end(block.block_hash)

    def _store(self, block: KVBlock) -> None:
        blocks = self._nodes.setdefault(block.node_id, LRUBlocks())
        if len(blocks) == self.max_blocks_per_node:
            dropped, _ = blocks.pop_oldest()
            del self._copies[dropped][block.node_id]
            if not self._copies[dropped]:
                del self._copies[dropped]
        blocks[block.block_hash] = block
        self._copies.setdefault(block.block_hash, {})[block.node_id] = block

    # -- copies

    def at_node(self, node_id: str) -> KVStore:
        """Return the pool as the engine on this node uses it."""
        return _PoolAtNode(self, node_id)

    def read(self, block_hashes: Sequence[bytes], target_node_id: str) -> Iterator[KVBlock]:
        """Yield copies of these blocks for `target_node_id`, which are pinned from now on. The
        iteration may be slow, and raises at the first block that does not arrive intact. At its end
        the blocks that arrived are kept on the target, but not if it is stopped before: cancelled
        or past its deadline."""
        with self._lock:
            sources = [self._sources(block_hash, target_node_id) for block_hash in block_hashes]
            num_found = sources.index([]) if [] in sources else len(sources)
            self._use([copies[0] for copies in sources[:num_found]])
        return self._fetch_all(sources, target_node_id)

    def async_transfer(
        self,
        request_id: str,
        block_hashes: Sequence[bytes],
        target_node_id: str,
        callback: Callback | None = None,
    ) -> None:
        """Copy these blocks, consecutive ones of a chain, to `target_node_id` in the background.
        `callback` is called once, as `callback(request_id, success=...)`, when all have arrived,
        when no more will, or at the deadline. Its result can be taken then. It runs in a background
        thread (at `close`, in the caller's), and an exception that it raises is logged. Raises
        `ValueError` if a transfer with this `request_id` has a result that was not taken."""
        parts = self.read(block_hashes, target_node_id)
        if callback is None:
            self._transfers.start(request_id, parts)
            return
        report = _CallOnce(request_id, callback)
        self._transfers.start(request_id, parts, report)
        report.by(self._transfers.timeout_s)

    def is_transfer_complete(self, request_id: str) -> bool:
        """Whether the transfer has ended, successfully or not, or its deadline has passed. Raises
        `ValueError` for an id that is not, or no longer, known."""
        return self._transfers.has_ended(request_id)

    def transfer_result(self, request_id: str) -> TransferResult:
        """Take the result of a complete transfer. Raises `ValueError` for one that is in flight or
        unknown."""
        blocks, error = self._transfers.take(request_id)
        return TransferResult(tuple(blocks), error)

    def _sources(self, block_hash: bytes, target_node_id: str) -> list[KVBlock]:
        """Every copy, the target's own first. Copies stay readable when evicted."""
        copies = self._copies.get(block_hash, {}).values()
        return sorted(copies, key=lambda block: block.node_id != target_node_id)

    def _fetch_all(self, sources: list[list[KVBlock]], target_node_id: str) -> Iterator[KVBlock]:
        """Runs in a transfer's thread, without the lock."""
        arrived: list[KVBlock] = []
        try:
            for index, copies in enumerate(sources):
                if not copies:
                    raise LookupError(f"cannot transfer block {index}: not in the pool")
                arrived.append(self._fetch(copies, target_node_id))
                yield arrived[-1]
        except Exception:  # not `GeneratorExit`: cancelled, or the reader rejects a block
            self._keep(arrived)
            raise
        self._keep(arrived)

    def _fetch(self, copies: Sequence[KVBlock], target_node_id: str) -> KVBlock:
        """Return the first copy that arrives intact."""
        errors = []
        for block in copies:
            try:
                is_here = block.node_id == target_node_id
                kv_data = block.kv_data if is_here else bytes(self._transport(block))
            except Exception as failure:
                errors.append(f"node {block.node_id!r}: {failure!r}")
                continue
            arrived = replace(block, node_id=target_node_id, kv_data=kv_data)
            if arrived.is_intact:
                return arrived
            errors.append(f"node {block.node_id!r}: wrong checksum")
        raise ConnectionError("; ".join(errors))

    def _keep(self, arrived: Sequence[KVBlock]) -> None:
        with self._lock:
            if self._is_closed:
                return
            for block in reversed(arrived):
                if not self._has(block.block_hash, block.node_id, block.token_ids):
                    self._store(block)

    def close(self) -> None:
        """Stop. An `async_transfer` in flight ends with an error, and its callback is called. Can
        be called again."""
        with self._lock:
            self._is_closed = True
        self._transfers.close()
        with self._lock:
            self._nodes.clear()
            self._copies.clear()

    def check_invariants(self) -> None:
        """Raise `AssertionError` if the pool is inconsistent. O(bytes held)."""
        with self._lock:
            num_copies = 0
            for node_id, blocks in self._nodes.items():
                assert len(blocks) <= self.max_blocks_per_node, node_id
                for block_hash, block in blocks.items():
                    assert (block.block_hash, block.node_id) == (block_hash, node_id), block
                    assert self._copies[block_hash][node_id] is block, block
                    assert block.is_intact, block
                num_copies += len(blocks)
            assert num_copies == sum(map(len, self._copies.values())), "a copy is not on any node"
            for copies in self._copies.values():
                assert len({block.token_ids for block in copies.values()}) == 1, copies


class _PoolAtNode(KVStore):
    """The pool as the store of one node, on which loaded blocks are kept."""

    def __init__(self, pool: GlobalKVPool, node_id: str) -> None:
        self.pool = pool
        self.node_id = node_id
        self.num_read_threads = pool.num_transfer_threads

    def has(self, links: Sequence[Link]) -> int:
        return len(self.pool.query([block_hash for block_hash, _ in links])[1])

    def get(self, links: Sequence[Link]) -> Iterator[bytes]:
        blocks = self.pool.read([block_hash for block_hash, _ in links], self.node_id)
        return (block.kv_data for block in blocks)

    def put(self, link: Link, data: bytes) -> bool:
        return self.pool.publish(link[0], self.node_id, link[1], data)

    def drop(self, link: Link) -> None:
        self.pool.invalidate([link[0]])
