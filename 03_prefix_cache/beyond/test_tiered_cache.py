"""Blocks that move down and up between the tiers, as a table; and what a file and a configuration
promise. Random prompts over tiers: `test_pool_connector.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from block_pool import Block, BlockPool
from kv_stores import MODEL, ByteEngine, ByteMemory, make_request
from prefix_cache_local import compute_hash_chain
from request_chain import Link
from tiered_cache import KVTierConfig, TieredCache

BLOCK_SIZE = 2
PROMPT = [1] * 16  # of the blocks A to H
CHAIN = compute_hash_chain(PROMPT, BLOCK_SIZE, [(f"engine {tag}", value) for tag, value in MODEL])
LINKS: dict[str, Link] = dict(zip("ABCDEFGH", CHAIN, strict=True))
LINKS |= {name: (name.encode() * 32, (ord(name),)) for name in "XYZ"}  # other prompts'
NAMES = {link[0]: name for name, link in LINKS.items()}
SALT = (("salt", "x"),)


class TierWords:
    """Tiers that do what is said. A word is an action and the blocks that it is about.

    host, disk   put these blocks there        find, load   look up, and load, this prompt's blocks
    evict        the device evicts them        drop         the device's cache invalidates them
    """

    def __init__(self, num_host: int, num_disk: int) -> None:
        self.io = ByteMemory()
        self.tiers = TieredCache(KVTierConfig(num_host, num_disk))
        self.tiers.bind(self.io, BLOCK_SIZE, MODEL)

    def say(self, action: str, names: str) -> None:
        tiers = self.tiers
        request = make_request("r", PROMPT[: len(names) * BLOCK_SIZE + 1])
        called = {"evict": tiers.blocks_evicted, "drop": tiers.blocks_invalidated}
        if action in ("find", "load"):
            num_found, is_slow = tiers.get_num_new_matched_tokens(request, 0)
            assert num_found == len(names) * BLOCK_SIZE
            assert is_slow
        if action == "load":
            tiers.update_state_after_alloc(request, range(len(names)), num_found)
            tiers.wait_for_load(20.0)
            assert tiers.get_finished_load("r") == num_found
        for name in names:
            block = Block(ord(name))
            data = name.encode() * self.io.block_nbytes
            if action in called:
                tiers._link_of[block.block_id] = LINKS[name]
                self.io.data[block.block_id] = data
                called[action]([block])
            elif action in ("host", "disk"):
                getattr(tiers, action).put(LINKS[name], data)
        assert len(tiers.host) <= tiers.config.host_blocks


MOVES = [  # host and disk: their sizes, and their blocks at the end, the next to be lost first
    # A prompt is evicted from the device tail first, and so it leaves each tier (Trap 11).
    (2, 9, "evict DCBA", "BA", "DC"),
    (0, 9, "evict DCBA", "", "DCBA"),
    (2, 2, "evict FEDCBA", "BA", "DC"),
    # A look-up marks the head as used last, also where tiers alternate.
    (2, 4, "host AC, disk BD, find ABCD", "CA", "DB"),
    (2, 4, "host BD, disk AC, find ABCD", "DB", "CA"),
    (9, 4, "disk ABCD, find ABC", "", "DCBA"),
    # Blocks that were loaded are in the host then.
    (3, 9, "disk ABCDE, load ABCDE", "CDE", "EDCAB"),
    (3, 9, "disk ABC, load ABC, host X", "BCX", "CBA"),
    (3, 9, "host A, disk BC, load ABC, host X", "BCX", "CBA"),
    (2, 9, "host A, disk BC, load ABC", "BC", "CBA"),
    # An eviction from a higher tier is a use of the copy below, which is not written again.
    (0, 4, "disk ABCD, evict A", "", "BCDA"),
    (1, 4, "disk ABCD, load A, host X", "X", "BCDA"),
    (9, 9, "host AB, evict A", "BA", ""),
    (1, 3, "host X, disk YZ, host A", "A", "YZX"),
    # What the device's cache invalidates is nowhere; an unknown block is not an error.
    (2, 9, "evict DCBA, drop AC, drop E", "B", "D"),
]


@pytest.mark.net
@pytest.mark.parametrize("row", MOVES, ids=lambda row: f"{row[0]} {row[1]} {row[2]}")
def test_blocks_move_between_tiers(row: tuple[int, int, str, str, str]):
    num_host, num_disk, script, *expected = row
    words = TierWords(num_host, num_disk)
    host, disk = tiers = words.tiers.host, words.tiers.disk
    for sentence in script.split(", "):
        words.say(*sentence.split())
    kept = [[NAMES[name] for name in of_tier] for of_tier in (host._kept, disk._kept)]
    assert ["".join(names) for names in kept] == expected, "the least recently used first"
    for tier, names in zip(tiers, kept, strict=True):
        for name in names:
            assert list(tier.get([LINKS[name]])) == [name.encode() * words.io.block_nbytes]
    words.tiers.close()


@pytest.mark.parametrize(
    ("model", "keys", "num_found"), [("tiny", SALT, 4), ("another", SALT, 0), ("tiny", (), 0)]
)
def test_a_folder_serves_the_next_engine_of_the_model(make_cache, model, keys, num_found, tmp_path):
    """And the same tenant. Its blocks are not written again. A temporary folder is removed."""

    def make_engine(namespace) -> ByteEngine:
        tiers = TieredCache(config)
        engine = ByteEngine(tiers, make_cache(BlockPool(9), BLOCK_SIZE), namespace)
        engine.cache.listener = tiers
        return engine

    for config in (KVTierConfig(0, 10), KVTierConfig(0, 50, tmp_path / "kv")):
        first = make_engine(MODEL)
        is_kept = config.disk_path is not None
        assert first.serve([3] * 10, SALT) == first.serve([4] * 16) == 0
        assert first.connector.disk.folder.exists()
        assert len(first.io.read) == 5  # what was evicted for the second prompt
        assert first.manager.reset_prefix_cache()
        assert len(first.io.read) == 13
        first.connector.close()
        assert first.connector.disk.folder.exists() == is_kept
    second = make_engine((("model", model), MODEL[1]))
    assert second.serve([3] * 10, keys) == num_found * BLOCK_SIZE
    assert second.connector.num_loaded_blocks() == {"host": 0, "disk": num_found}
    assert second.manager.reset_prefix_cache()
    assert len(second.io.read) == (0 if num_found else 5)
    second.connector.close()


WRONG = [
    {"host_blocks": -1},
    {"host_blocks": 1.5},
    {"host_blocks": 0},
    {"host_blocks": 1, "disk_blocks": True},
    {"host_blocks": 1, "load_timeout_s": 0},
    {"host_blocks": 1, "disk_path": 3},
    {"host_blocks": 1, "disk_path": Path(__file__)},
]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: " ".join(wrong))
def test_wrong_configurations_are_named(wrong: dict[str, object]):
    with pytest.raises(ValueError, match=f"{list(wrong)[-1]} .*must be .*, got"):
        KVTierConfig(**wrong)
