"""Tiers against a dictionary; a file that is corrupt, truncated, or owned by another process."""

from __future__ import annotations

import random
import threading
from collections import OrderedDict
from pathlib import Path

import pytest

from kv_store import RECORD_HEADER
from kv_tiers import _FILE_HEADER, DiskTier, HostTier
from request_chain import Link

NBYTES = 24
RECORD_NBYTES = RECORD_HEADER.size + NBYTES


def link(number: int) -> Link:
    return number.to_bytes(32, "big"), (number, 7)


def key(number: int) -> bytes:
    return link(number)[0]


def content(number: int, version: int = 0) -> bytes:
    return random.Random(f"{number} {version}").randbytes(NBYTES)


def make_tier(kind: str, folder: Path, max_blocks: int = 5) -> HostTier | DiskTier:
    is_host = kind == "host"
    return HostTier(max_blocks) if is_host else DiskTier(folder / "kv", max_blocks, NBYTES)


def read(tier: HostTier | DiskTier, number: int) -> bytes | None:
    """A block's bytes, or None for a miss."""
    try:
        return next(tier.get([link(number)]))
    except (LookupError, ValueError):
        return None


def read_all(tier: HostTier | DiskTier, count: int) -> dict[int, bytes]:
    found = {number: read(tier, number) for number in range(count)}
    return {number: data for number, data in found.items() if data is not None}


@pytest.mark.net
@pytest.mark.parametrize("kind", ["host", "disk"])
def test_a_tier_against_a_naive_lru(kind, tmp_path: Path):
    """Now and then the file is closed, and the next process finds in it what was there."""
    rng = random.Random(kind)
    tier, changes = make_tier(kind, tmp_path), []
    naive = OrderedDict()
    for turn in range(1500):
        number, expected_changes = rng.randrange(12), []
        tier.on_change = lambda block_hash, is_here: changes.append((block_hash, is_here))
        match rng.choice(["get", "put", "has", "drop"]):
            case "put":
                is_new, data = number not in naive, content(number, rng.randrange(3))
                naive[number] = data
                naive.move_to_end(number)
                expected_changes = [(key(number), True)]
                if len(naive) > 5:
                    expected_changes.append((key(naive.popitem(last=False)[0]), False))
                assert tier.put(link(number), data) == is_new
            case "has":
                chain = [number, *rng.sample(range(12), 2)]
                num_here = next((i for i, n in enumerate(chain) if n not in naive), 3)
                assert tier.has([link(n) for n in chain]) == num_here
                for n in reversed(chain[:num_here]):
                    naive.move_to_end(n)
            case "get":  # `has` was the use
                assert read(tier, number) == naive.get(number)
            case "drop" if rng.random() < 0.3:
                tier.drop(link(number))
                expected_changes = [(key(number), False)] if naive.pop(number, None) else []
        assert sorted(changes) == sorted(expected_changes)
        changes.clear()
        assert {n for n in range(12) if key(n) in tier} == set(naive) and len(tier) == len(naive)
        if isinstance(tier, DiskTier):
            tier.check_invariants()
            assert tier.num_corrupt == 0
            if turn % 100 == 99:
                tier.close()
                tier.close()
                tier = make_tier(kind, tmp_path)
                assert read_all(tier, 12) == dict(naive)
                for number in naive:
                    tier.has([link(number)])  # the order of use is not in the file


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_another_thread_drops_a_block_before_a_look_up_or_after_it(kind, tmp_path: Path):
    tier = make_tier(kind, tmp_path)
    for number in range(3):
        tier.put(link(number), content(number))
    reader = threading.Thread(target=tier.drop, args=[link(1)])

    class Links(list[Link]):
        def __getitem__(self, index):
            """Take the block right after it was found, so that the reader interleaves."""
            reader.start()
            reader.join(0.05)
            return super().__getitem__(index)

    assert tier.has(Links(map(link, range(3)))) == 3
    reader.join()
    assert tier.has([link(n) for n in range(3)]) == 1


def test_a_write_that_was_interrupted_is_a_miss_and_its_slot_is_free_again(
    tmp_path: Path, monkeypatch
):
    """With a part of the new bytes written, neither the old block nor the new one is found."""
    disk = make_tier("disk", tmp_path, 3)
    for number in (0, 1):
        disk.put(link(number), content(number))

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("kv_tiers.record_header", interrupted)
        for number in (1, 2):  # in its own slot, and in a free one
            with pytest.raises(KeyboardInterrupt):
                disk.put(link(number), content(number, version=1))
    disk.clear()
    disk.check_invariants()
    disk.close()
    disk = make_tier("disk", tmp_path, 3)
    assert read_all(disk, 3) == {0: content(0)} and len(disk) == 1
    for number in (1, 2):
        disk.put(link(number), content(number))
    assert read_all(disk, 3) == {number: content(number) for number in range(3)}


def test_a_slot_that_was_just_rewritten_is_not_dropped(tmp_path: Path):
    """The reader has seen bad bytes; before it says so, the block is put again. Then the record is
    good, and its slot is in use."""
    disk = make_tier("disk", tmp_path, 3)
    for number in (0, 1):
        disk.put(link(number), content(number))
    old_slot = disk._slots[key(0)]
    disk.drop(link(0))
    for number in (2, 0):  # block 2 into the slot of block 0
        disk.put(link(number), content(number))
    assert disk._slots[key(0)] != old_slot
    disk._drop_corrupt(key(0), old_slot)
    disk.check_invariants()
    assert disk.num_corrupt == 0 and len(read_all(disk, 3)) == 3


# -- what a file holds


@pytest.mark.parametrize(
    ("max_blocks", "nbytes", "num_found"), [(8, NBYTES, 8), (3, NBYTES, 3), (8, NBYTES + 8, 0)]
)
def test_the_next_process_takes_over_the_blocks_that_fit(tmp_path, max_blocks, nbytes, num_found):
    first = make_tier("disk", tmp_path, 8)
    for number in range(11):
        first.put(link(number), content(number))
    first.close()
    second = DiskTier(tmp_path / "kv", max_blocks, nbytes)
    second.check_invariants()
    found = read_all(second, 11)
    assert len(second) == len(found) == num_found
    assert all(data == content(number) for number, data in found.items())


def test_every_damaged_byte_of_a_record_is_a_miss(tmp_path: Path):
    """The magic, the hash, the length, the checksum, the block: one flipped bit each."""
    tier, changes = make_tier("disk", tmp_path, 2), []
    for number in (1, 2):
        tier.put(link(number), content(number))
    for place in range(RECORD_NBYTES):
        tier.on_change = lambda *change: changes.append(change)
        tier._map[tier._offset(tier._slots[key(1)]) + place] ^= 0x10
        assert read(tier, 1) is None and changes == [(key(1), False)], place
        assert tier.num_corrupt == place + 1 and key(1) not in tier
        assert read(tier, 2) == content(2), "the neighbour is as it was"
        tier.check_invariants()
        tier.put(link(1), content(1))
        assert read(tier, 1) == content(1)
        changes.clear()


@pytest.mark.parametrize("num_kept", [0, 5, _FILE_HEADER.size, _FILE_HEADER.size + 60, 150])
def test_a_file_that_was_cut_off_has_misses_and_no_wrong_bytes(tmp_path: Path, num_kept: int):
    first = make_tier("disk", tmp_path, 4)
    for number in range(4):
        first.put(link(number), content(number))
    first.close()
    whole = (tmp_path / "kv").read_bytes()
    (tmp_path / "kv").write_bytes(whole[:num_kept])
    second = make_tier("disk", tmp_path, 4)
    assert all(data == content(number) for number, data in read_all(second, 4).items())
    assert len(second) == max(0, num_kept - _FILE_HEADER.size) // RECORD_NBYTES


def test_wrong_sizes_are_refused(tmp_path: Path):
    for name, sizes in (("max_blocks", (0, NBYTES)), ("block_nbytes", (1, 0))):
        with pytest.raises(ValueError, match=f"{name} must be >= 1, got 0"):
            DiskTier(tmp_path / "kv", *sizes)
    tier = make_tier("disk", tmp_path)
    with pytest.raises(ValueError, match="must have 24 bytes, got 5"):
        tier.put(link(1), b"short")
    assert len(tier) == 0
