"""The pool's nodes: one chain over several of them, and copies. As a store it is tested in
`test_kv_store.py`, with engines in `test_pool_connector.py`."""

from __future__ import annotations

import pytest

from global_kv_pool import GlobalKVPool
from request_chain import Link

LINKS: list[Link] = [(bytes([i]) * 32, (i, i + 1)) for i in range(6)]


def test_a_chain_over_several_nodes_is_found_and_copied_once():
    """A copy is the node's own from then on, and leaves the other node where it was."""
    sent: list[bytes] = []

    def transport(data: bytes) -> bytes:
        sent.append(data)
        return data

    pool = GlobalKVPool(max_blocks_per_node=4, transport=transport)
    a, b = pool.at_node("a"), pool.at_node("b")
    for node, numbers in ((a, (1, 0)), (b, (3, 2, 1))):
        for number in numbers:
            assert node.put(LINKS[number], bytes([number]))
    assert not a.put(LINKS[0], bytes([0])) and pool.total_cached_blocks == 5
    assert a.has(LINKS) == b.has(LINKS) == 4 and a.has(LINKS[4:]) == 0
    for expected in ([2, 3], []):
        assert list(a.get(LINKS[:4])) == [bytes([number]) for number in range(4)]
        assert list(map(ord, sent)) == expected
        sent.clear()
    assert pool.total_cached_blocks == 7
    a.drop(LINKS[1])
    assert b.has(LINKS) == 1 and pool.total_cached_blocks == 5


@pytest.mark.parametrize("moment", ["found", "sent"])
def test_a_block_evicted_while_it_is_sent_arrives_all_the_same(moment):
    pool = GlobalKVPool(1, lambda data: evict() or data if moment == "sent" else data)
    a, b = pool.at_node("a"), pool.at_node("b")
    evict = lambda: a.put(LINKS[1], b"another") and None  # noqa: E731
    a.put(LINKS[0], b"data")
    parts = b.get(LINKS[:1])
    if moment == "found":
        evict()
    assert list(parts) == [b"data"]
    assert a.has(LINKS[1:]) == 1 and b.has(LINKS[:1]) == 1


def test_a_block_that_its_reader_rejects_or_that_is_lost_is_not_kept():
    def transport(data: bytes) -> bytes:
        if data == b"lost":
            raise OSError("cable cut")
        return data

    pool = GlobalKVPool(9, transport)
    a, b = pool.at_node("a"), pool.at_node("b")
    a.put(LINKS[0], b"rejected")
    a.put(LINKS[1], b"lost")
    parts = b.get(LINKS[:2])
    assert next(parts) == b"rejected"
    parts.close()
    with pytest.raises(OSError, match="cable cut"):
        next(b.get(LINKS[1:2]))
    with pytest.raises(LookupError, match="not in"):
        next(b.get(LINKS[2:3]))
    assert pool.total_cached_blocks == 2
    with pytest.raises(ValueError, match="max_blocks_per_node must be > 0, got 0"):
        GlobalKVPool(0)
