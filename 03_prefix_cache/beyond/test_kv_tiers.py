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


def link(number: int) -> Link:
    return number.to_bytes(32, "big"), (number, 7)


def key(number: int) -> bytes:
    return link(number)[0]


def read(tier: HostTier | DiskTier, number: int) -> bytes | None:
    """A block's bytes, or None for a miss."""
    try:
        return next(tier.get([link(number)]))
    except (LookupError, ValueError):
        return None


def content(number: int, version: int = 0) -> bytes:
    return random.Random(f"{number} {version}").randbytes(NBYTES)


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_a_tier_against_a_naive_lru(kind, tmp_path: Path):
    rng = random.Random(kind)
    tier = HostTier(5) if kind == "host" else DiskTier(tmp_path / "kv", 5, NBYTES)
    naive, changes = OrderedDict(), []
    tier.on_change = lambda block_hash, is_here: changes.append((block_hash, is_here))
    for _ in range(1500):
        number, expected_changes = rng.randrange(12), []
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
        if kind == "disk":
            tier.check_invariants()
            assert tier.num_corrupt == 0
    if kind == "disk":
        tier.close()
        tier.close()


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_another_thread_drops_a_block_before_a_look_up_or_after_it(kind, tmp_path: Path):
    tier = HostTier(5) if kind == "host" else DiskTier(tmp_path / "kv", 5, NBYTES)
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


@pytest.mark.parametrize("max_blocks", [0, 2])
def test_a_block_that_the_host_evicts_goes_to_disk_unless_it_is_there(max_blocks, tmp_path: Path):
    host, disk = HostTier(max_blocks), DiskTier(tmp_path / "kv", 3, NBYTES)
    host.below = disk
    for number in (0, 1, 2):
        disk.put(link(number), content(number, version=1))
    for number in (0, 1, 2, 3)[: 2 + max_blocks]:
        host.put(link(number), content(number))
    assert len(host) == max_blocks
    assert [read(disk, n) for n in range(2)] == [content(n, version=1) for n in range(2)]
    disk.put(link(9), content(9))
    assert key(2) not in disk, "the copies of blocks that come down count as used"
    for number in (5, 6, 7):
        host.put(link(number), content(number))
    assert read(disk, 5) == content(5)
    disk.close()


def test_drop_removes_a_block_from_memory_and_file_and_no_other(tmp_path: Path):
    """Not only from the index: the next process reads the file."""
    host, disk = HostTier(4), DiskTier(tmp_path / "kv", 4, NBYTES)
    for number in range(4):
        host.put(link(number), content(number))
        disk.put(link(number), content(number))
    for number in (2, 2, 7):  # twice, and one that is not there
        host.drop(link(number))
        disk.drop(link(number))
        disk.check_invariants()
    for tier in (host, disk):
        assert [key(n) in tier for n in range(4)] == [True, True, False, True]
    assert read(disk, 2) is None and disk.num_corrupt == 0
    disk.close()
    disk = DiskTier(tmp_path / "kv", 4, NBYTES)
    assert [read(disk, n) for n in range(4)] == [content(0), content(1), None, content(3)]
    disk.put(link(8), content(8))
    assert len(disk) == 4 and read(disk, 0) == content(0), "there was room"
    disk.close()


def test_a_write_that_was_interrupted_is_a_miss_and_its_slot_is_free_again(
    tmp_path: Path, monkeypatch
):
    """With a part of the new bytes written, neither the old block nor the new one is found."""
    disk = DiskTier(tmp_path / "kv", 3, NBYTES)
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
    disk = DiskTier(tmp_path / "kv", 3, NBYTES)
    assert [read(disk, n) for n in range(3)] == [content(0), None, None] and len(disk) == 1
    for number in (1, 2):
        disk.put(link(number), content(number))
    assert [read(disk, n) for n in range(3)] == [content(n) for n in range(3)]
    disk.close()


def test_a_slot_that_was_just_rewritten_is_not_dropped(tmp_path: Path):
    """The reader has seen bad bytes; before it says so, the block is put again. Then the record is
    good, and its slot is in use."""
    disk = DiskTier(tmp_path / "kv", 3, NBYTES)
    disk.put(link(0), content(0))
    disk.put(link(1), content(1))
    old_slot = disk._slots[key(0)]
    disk.drop(link(0))
    disk.put(link(2), content(2))  # into the slot of block 0
    disk.put(link(0), content(0))
    assert disk._slots[key(0)] != old_slot
    disk._drop_corrupt(key(0), old_slot)
    disk.check_invariants()
    assert disk.num_corrupt == 0
    assert [read(disk, n) for n in range(3)] == [content(n) for n in range(3)]
    disk.close()


@pytest.mark.parametrize(
    ("max_blocks", "nbytes", "num_found"), [(8, NBYTES, 8), (3, NBYTES, 3), (8, NBYTES + 8, 0)]
)
def test_the_next_process_takes_over_the_blocks_that_fit(tmp_path, max_blocks, nbytes, num_found):
    first = DiskTier(tmp_path / "kv", 8, NBYTES)
    for number in range(11):
        first.put(link(number), content(number))
    first.close()
    second = DiskTier(tmp_path / "kv", max_blocks, nbytes)
    second.check_invariants()
    assert len(second) == num_found
    found = {n: data for n in range(11) if (data := read(second, n)) is not None}
    assert len(found) == num_found
    assert all(data == content(number) for number, data in found.items())
    second.close()


def test_every_damaged_byte_of_a_record_is_a_miss(tmp_path: Path):
    """The magic, the hash, the length, the checksum, the block: one flipped bit each."""
    record_nbytes = RECORD_HEADER.size + NBYTES
    for place in range(record_nbytes):
        path = tmp_path / f"kv{place}"
        tier = DiskTier(path, 2, NBYTES)
        tier.put(link(1), content(1))
        tier.put(link(2), content(2))
        offset, changes = tier._offset(tier._slots[key(1)]) + place, []
        tier.on_change = lambda *change, changes=changes: changes.append(change)
        tier._map[offset] ^= 0x10
        assert read(tier, 1) is None, place
        assert tier.num_corrupt == 1 and changes == [(key(1), False)] and key(1) not in tier
        assert read(tier, 2) == content(2), "the neighbour is as it was"
        tier.check_invariants()
        tier.put(link(1), content(1))
        assert read(tier, 1) == content(1)
        tier.close()


@pytest.mark.parametrize("num_kept", [0, 5, _FILE_HEADER.size, _FILE_HEADER.size + 60, 150])
def test_a_file_that_was_cut_off_has_misses_and_no_wrong_bytes(tmp_path: Path, num_kept: int):
    first = DiskTier(tmp_path / "kv", 4, NBYTES)
    for number in range(4):
        first.put(link(number), content(number))
    first.close()
    whole = (tmp_path / "kv").read_bytes()
    (tmp_path / "kv").write_bytes(whole[:num_kept])
    second = DiskTier(tmp_path / "kv", 4, NBYTES)
    for number in range(4):
        assert read(second, number) in (None, content(number))
    num_whole = max(0, num_kept - _FILE_HEADER.size) // (RECORD_HEADER.size + NBYTES)
    assert len(second) == num_whole
    second.close()


def test_wrong_sizes_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="max_blocks"):
        DiskTier(tmp_path / "kv", 0, NBYTES)
    tier = DiskTier(tmp_path / "kv", 1, NBYTES)
    with pytest.raises(ValueError, match="bytes"):
        tier.put(link(1), b"short")
    assert len(tier) == 0
    tier.close()
