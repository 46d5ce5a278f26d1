"""Every store against a dictionary, and a record that is damaged."""

from __future__ import annotations

import random

import pytest

from kv_store import KVStore, LRUBlocks, compute_checksum, make_record, open_record
from kv_stores import RECORD_NBYTES, FaultyStore
from request_chain import Link


def make_link(number: int) -> Link:
    return random.Random(number).randbytes(32), (number, 7, 2**40)


def content(number: int) -> bytes:
    return random.Random(f"content {number}").randbytes(RECORD_NBYTES)


LINKS = [make_link(number) for number in range(8)]


def read(store: KVStore, links: list[Link]) -> tuple[list[bytes], bool]:
    """The blocks before the first missing one, and whether the iterator raised there."""
    blocks: list[bytes] = []
    try:
        for data in store.get(links):
            blocks.append(data)
    except LookupError:
        return blocks, True
    return blocks, False


@pytest.mark.net
def test_a_store_is_a_dictionary(pool: FaultyStore) -> None:
    """Trap 9: what is put is a copy; the caller's buffers are rewritten by the next request."""
    rng, kept = random.Random(0), set[int]()
    for _ in range(150):
        chain = rng.sample(range(8), rng.randint(1, 8))
        num_there = next((i for i, number in enumerate(chain) if number not in kept), len(chain))
        links = [LINKS[number] for number in chain]
        match rng.choice("pphgd"):
            case "p":
                buffer = bytearray(content(chain[0]))
                assert pool.put(links[0], buffer) == (chain[0] not in kept)
                buffer[:] = bytes(len(buffer))
                kept.add(chain[0])
            case "h":
                assert pool.has(links) == num_there
            case "g":
                expected = [content(number) for number in chain[:num_there]]
                assert read(pool, links) == (expected, num_there < len(links))
            case "d":
                pool.drop(links[0])
                kept.discard(chain[0])
    assert pool.has([]) == 0 and read(pool, []) == ([], False)


def test_blocks_of_several_kinds_of_use_in_the_order_of_their_use() -> None:
    """Trap 11: of one chain the tail is the oldest."""
    blocks = LRUBlocks({link[0]: None for link in LINKS[:5]})
    assert blocks.num_leading([LINKS[1], LINKS[3], LINKS[7], LINKS[0]]) == 2
    assert list(blocks) == [LINKS[number][0] for number in (0, 2, 4, 3, 1)]
    assert blocks.pop_oldest()[0] == LINKS[0][0]


def test_a_record_is_opened_only_if_it_is_exactly_what_was_made() -> None:
    """Every byte changed, every length cut, a longer one; another hash, and other tokens (Trap
    1)."""
    link, data = make_link(1), b"key and value bytes"
    record = make_record(link, data)
    assert open_record(record, link) == open_record(bytearray(record), link) == data
    damaged = [record[:n] for n in range(len(record))] + [record + b"\0", b""]
    for index in range(len(record)):
        flipped = bytearray(record)
        flipped[index] ^= 1 << index % 8
        damaged.append(bytes(flipped))
    for wrong in damaged:
        with pytest.raises(ValueError, match="record"):
            open_record(wrong, link)
    for other in (make_link(2), (link[0], (1, 7)), (make_link(2)[0], link[1])):
        with pytest.raises(ValueError, match="record"):
            open_record(record, other)


def test_a_checksum_covers_hash_tokens_and_bytes_and_tells_where_each_ends() -> None:
    blocks = [
        ((b"ab", (1, 2)), b"kv"),
        ((b"ac", (1, 2)), b"kv"),
        ((b"ab", (2, 1)), b"kv"),
        ((b"ab", (1, 2)), b"kw"),
        ((b"abkv", ()), b""),
        ((b"ab", ()), b"kv"),
        ((b"ab", (1,)), bytes(8)),
        ((b"ab", (1, 0)), b""),
    ]
    assert len({compute_checksum(link, data) for link, data in blocks}) == len(blocks)
