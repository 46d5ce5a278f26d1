"""SGLang's names: requests handed over chunk by chunk, sizes in tokens, pictures of the tree."""

from __future__ import annotations

import pytest

from prefix_cache import PrefixPath
from radix_words import Rig as WordRig
from radix_words import ids
from sglang_radix_cache import SGLangRadixCache, shorten


class Rig(WordRig):
    cache: SGLangRadixCache

    def __init__(self, page_size: int = 4, num_pages: int = 40) -> None:
        super().__init__(page_size, num_pages, SGLangRadixCache)


@pytest.fixture
def rig():
    rig = Rig()
    yield rig
    rig.cache.check_invariants()
    rig.pool.check_invariants()


# requests


def test_a_chunked_request_shares_what_it_has_and_goes_on(rig):
    """Trap 15: three chunks of a prompt, then the request is aborted in the middle of the third.
    The tree keeps pages that are valid, nobody uses them, and the rest is free."""
    path = PrefixPath()
    table = rig.pool.allocate(5)
    given = list(table)
    table = rig.cache.cache_unfinished_request(rig.spell("AB", 1), table, path=path)
    assert table == given and rig.hits("ABCD") == 2 and rig.nodes() == {"AB": 1}
    table = rig.cache.cache_unfinished_request(rig.spell("ABC", 3), table, path=path)
    assert rig.hits("ABCD") == 3 and rig.nodes() == {"ABC": 1}
    again = rig.cache.cache_unfinished_request(rig.spell("ABC", 3), table, path=path)
    assert again == table and [block.ref_cnt for block in table] == [2, 2, 2, 1, 1]
    rig.cache.cache_finished_request(rig.spell("ABC", 3), table, path=path)
    assert rig.nodes() == {"ABC": 0}
    assert [block.ref_cnt for block in table] == [1, 1, 1, 0, 0]
    assert ids(rig.pool.free_order())[-2:] == ids(table[:2:-1])  # the deepest first
    assert rig.cache.evict(9) == 3 and rig.pool.num_free_blocks == rig.pool.num_usable_blocks


def test_a_table_that_is_cached_whole_may_be_given_again(rig):
    table = rig.cache.cache_unfinished_request(rig.spell("AB"), rig.pool.allocate(2))
    assert rig.cache.cache_unfinished_request(rig.spell("AB"), table) == table
    rig.cache.cache_finished_request(rig.spell("AB"), table)
    assert rig.nodes() == {"AB": 0} and [block.ref_cnt for block in table] == [1, 1]


def test_a_request_decodes_from_the_canonical_pages(rig):
    """Trap 2: two requests compute one prompt. The table that comes back names no freed block."""
    first = rig.cache.cache_unfinished_request(rig.spell("AB"), rig.pool.allocate(3))
    own = rig.pool.allocate(3)
    table = rig.cache.cache_unfinished_request(rig.spell("AB", 2), own)
    assert table == [*first[:2], own[2]] and [block.ref_cnt for block in own] == [0, 0, 1]
    assert rig.nodes() == {"AB": 2}
    rig.cache.cache_finished_request(rig.spell("ABC"), table)
    assert rig.nodes() == {"AB": 1, "AB.C": 0}
    rig.cache.cache_finished_request(rig.spell("AB"), first)
    assert rig.pool.num_free_blocks == rig.pool.num_usable_blocks - 3


def test_a_finished_request_gives_back_its_duplicates_and_its_tail(rig):
    """Trap 8: an unaligned tail is truncated down, in pages, and returned."""
    rig.warm("AB")
    num_free = rig.pool.num_free_blocks
    rig.cache.cache_finished_request(rig.spell("ABC", 3), rig.pool.allocate(5))
    assert rig.pool.num_free_blocks == num_free - 1
    assert rig.nodes() == {"ABC": 0} and rig.hits("ABC") == 3
    rig.cache.cache_finished_request(rig.spell("A")[:-1], rig.pool.allocate(1))
    assert rig.pool.num_free_blocks == num_free - 1


# what it shows


def test_sizes_are_in_tokens(rig):
    """Trap 8: as in SGLang. `num_*_blocks` are pages."""
    rig.warm("ABCDE")
    held = rig.hold("AB")
    assert (rig.cache.evictable_size, rig.cache.protected_size) == (12, 8)
    assert (rig.cache.num_evictable_blocks, rig.cache.num_cached_blocks) == (3, 5)
    rig.cache.touch(held)
    assert rig.cache.protected_size == 8  # a second user protects no more
    rig.cache.release(held), rig.cache.release(held)
    assert (rig.cache.evictable_size, rig.cache.protected_size) == (20, 0)


def test_pretty_print_shows_tokens_pages_and_locks(capsys):
    cache = SGLangRadixCache(page_size=2, num_pages=20)
    cache.pretty_print()
    assert capsys.readouterr().out == ("RadixCache, page_size 2: 0 tokens protected, 0 evictable\n")
    cache.cache_computed_blocks([1, 2, 3, 4, 5, 6, 7, 8])
    cache.cache_computed_blocks([1, 2, 3, 4, 9, 9])
    cache.cache_computed_blocks([1, 2], (("salt", "x"), ("lora", 7)))
    cache.touch(cache.match_prefix([1, 2, 3, 4, 9, 9]).blocks)
    cache.pretty_print()
    assert capsys.readouterr().out == (
        "RadixCache, page_size 2: 6 tokens protected, 6 evictable\n"
        "root\n"
        "  [1 2 3 4] pages 1 2, lock_ref 1\n"
        "    [5 6 7 8] pages 3 4, lock_ref 0\n"
        "    [9 9] pages 5, lock_ref 1\n"
        "root lora=int:7 salt=str:x\n"
        "  [1 2] pages 6, lock_ref 0\n"
    )


def test_long_lists_show_their_front_and_their_last():
    assert shorten([]) == ""
    assert shorten([1, 2, 3, 4, 5, 6]) == "1 2 3 4 5 6"
    assert shorten([1, 2, 3, 4, 5, 6, 7]) == "1 2 3 4 5 .. 7"
    assert shorten(range(100), 3) == "0 1 .. 99"
