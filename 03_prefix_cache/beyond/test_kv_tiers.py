"""Tiers against a dictionary; a file that lies, is cut off, or belongs to somebody else."""

from __future__ import annotations

import random
from collections import OrderedDict
from pathlib import Path

import pytest

from kv_tiers import _FILE_HEADER, _RECORD_HEADER, DiskTier, HostTier

NBYTES = 24


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def content(number: int, version: int = 0) -> bytes:
    return random.Random(f"{number} {version}").randbytes(NBYTES)


def test_host_tier_against_a_naive_lru():
    rng = random.Random(0)
    tier, naive = HostTier(5), OrderedDict()
    for _ in range(2000):
        number = rng.randrange(12)
        if rng.random() < 0.5:
            expected = naive.get(number)
            if expected is not None:
                naive.move_to_end(number)
            assert tier.get(key(number)) == expected
        else:
            data = content(number, rng.randrange(3))
            naive[number] = data
            naive.move_to_end(number)
            left = [naive.popitem(last=False)] if len(naive) > 5 else []
            assert tier.put(key(number), data) == [(key(n), d) for n, d in left]
        assert len(tier) == len(naive) and all((key(n) in tier) == (n in naive) for n in range(12))


def test_what_is_dropped_is_gone_from_memory_and_file_and_nothing_else_is(tmp_path: Path):
    """Not only from the index: the next process reads the file."""
    host, disk = HostTier(4), DiskTier(tmp_path / "kv", 4, NBYTES)
    for number in range(4):
        host.put(key(number), content(number))
        disk.put(key(number), content(number))
    for number in (2, 2, 7):  # twice, and one that is not there
        host.drop(key(number))
        disk.drop(key(number))
        disk.check_invariants()
    for tier in (host, disk):
        assert [key(n) in tier for n in range(4)] == [True, True, False, True]
    assert disk.read(key(2)) is None and disk.num_corrupt == 0
    disk.close()
    disk = DiskTier(tmp_path / "kv", 4, NBYTES)
    assert [disk.read(key(n)) for n in range(4)] == [content(0), content(1), None, content(3)]
    disk.put(key(8), content(8))
    assert len(disk) == 4 and disk.read(key(0)) == content(0), "there was room"
    disk.close()


def test_the_slot_of_a_put_that_was_interrupted_is_free_again(tmp_path: Path, monkeypatch):
    disk = DiskTier(tmp_path / "kv", 3, NBYTES)
    disk.put(key(0), content(0))

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("kv_tiers._checksum", interrupted)
        disk.put(key(1), content(1))
    disk.clear()
    disk.check_invariants()
    for number in (1, 2):
        disk.put(key(number), content(number))
    assert [disk.read(key(n)) for n in range(3)] == [content(n) for n in range(3)]
    disk.close()


def test_a_slot_that_was_just_written_anew_is_not_dropped(tmp_path: Path):
    """The reader has seen bad bytes; before it says so, the block is put again. Then the record is
    good, and its slot is in use."""
    disk = DiskTier(tmp_path / "kv", 3, NBYTES)
    disk.put(key(0), content(0))
    disk.put(key(1), content(1))
    old_slot = disk._slots[key(0)]
    disk.drop(key(0))
    disk.put(key(2), content(2))  # into the slot of block 0
    disk.put(key(0), content(0))
    assert disk._slots[key(0)] != old_slot
    disk._drop(key(0), old_slot)
    disk.check_invariants()
    assert disk.num_corrupt == 0
    assert [disk.read(key(n)) for n in range(3)] == [content(n) for n in range(3)]
    disk.close()


def test_a_host_tier_without_room_passes_everything_on():
    tier = HostTier(0)
    assert tier.put(key(1), b"x") == [(key(1), b"x")]
    assert len(tier) == 0


def test_disk_tier_against_a_naive_lru(tmp_path: Path):
    rng = random.Random(1)
    tier, naive = DiskTier(tmp_path / "kv", 5, NBYTES), OrderedDict()
    for _ in range(1500):
        number = rng.randrange(12)
        action = rng.choice(["read", "put", "use"])
        if action == "put":
            naive[number] = content(number, rng.randrange(3))
            naive.move_to_end(number)
            if len(naive) > 5:
                naive.popitem(last=False)
            tier.put(key(number), naive[number])
        elif action == "use":
            tier.use(key(number))
        else:
            assert tier.read(key(number)) == naive.get(number)
        if number in naive:
            naive.move_to_end(number)
        assert {n for n in range(12) if key(n) in tier} == set(naive) and len(tier) == len(naive)
        tier.check_invariants()
    assert tier.num_corrupt == 0
    tier.close()
    tier.close()


def write_tier(path: Path, num_put: int) -> None:
    """What a process leaves that had room for 8 blocks."""
    tier = DiskTier(path, 8, NBYTES)
    for number in range(num_put):
        tier.put(key(number), content(number))
    tier.close()


def test_a_file_is_taken_over_by_the_next_process(tmp_path: Path):
    write_tier(tmp_path / "kv", 11)
    second = DiskTier(tmp_path / "kv", 8, NBYTES)
    second.check_invariants()
    assert [second.read(key(n)) for n in range(11)] == [None] * 3 + [
        content(n) for n in range(3, 11)
    ]
    second.put(key(20), content(20))
    assert len(second) == 8
    second.close()


def test_a_smaller_tier_takes_over_what_fits_it(tmp_path: Path):
    write_tier(tmp_path / "kv", 8)
    second = DiskTier(tmp_path / "kv", 3, NBYTES)
    found = [n for n in range(8) if second.read(key(n)) is not None]
    assert len(found) == len(second) == 3
    assert all(second.read(key(n)) == content(n) for n in found)
    second.close()


def test_a_file_of_other_blocks_is_begun_anew(tmp_path: Path):
    first = DiskTier(tmp_path / "kv", 4, NBYTES)
    first.put(key(1), content(1))
    first.close()
    second = DiskTier(tmp_path / "kv", 4, NBYTES + 8)
    assert len(second) == 0 and second.read(key(1)) is None
    second.close()


def test_a_file_that_is_no_tier_is_begun_anew(tmp_path: Path):
    (tmp_path / "kv").write_bytes(b"something else entirely" * 100)
    tier = DiskTier(tmp_path / "kv", 4, NBYTES)
    assert len(tier) == 0
    tier.put(key(1), content(1))
    assert tier.read(key(1)) == content(1)
    tier.close()


def test_every_damaged_byte_of_a_record_is_a_miss(tmp_path: Path):
    """The magic, the hash, the length, the checksum, the block: one flipped bit each."""
    record_nbytes = _RECORD_HEADER.size + NBYTES
    for place in range(record_nbytes):
        path = tmp_path / f"kv{place}"
        tier = DiskTier(path, 2, NBYTES)
        tier.put(key(1), content(1))
        tier.put(key(2), content(2))
        offset = tier._offset(tier._slots[key(1)]) + place
        tier._map[offset] ^= 0x10
        assert tier.read(key(1)) is None, place
        assert tier.num_corrupt == 1 and key(1) not in tier
        assert tier.read(key(2)) == content(2), "the neighbour is as it was"
        tier.check_invariants()
        tier.put(key(1), content(1))
        assert tier.read(key(1)) == content(1)
        tier.close()


@pytest.mark.parametrize("num_kept", [0, 5, _FILE_HEADER.size, _FILE_HEADER.size + 60, 150])
def test_a_file_that_was_cut_off_has_misses_and_no_wrong_bytes(tmp_path: Path, num_kept: int):
    first = DiskTier(tmp_path / "kv", 4, NBYTES)
    for number in range(4):
        first.put(key(number), content(number))
    first.close()
    whole = (tmp_path / "kv").read_bytes()
    (tmp_path / "kv").write_bytes(whole[:num_kept])
    second = DiskTier(tmp_path / "kv", 4, NBYTES)
    for number in range(4):
        assert second.read(key(number)) in (None, content(number))
    num_whole = max(0, num_kept - _FILE_HEADER.size) // (_RECORD_HEADER.size + NBYTES)
    assert len(second) == num_whole
    second.close()


def test_a_write_that_was_interrupted_is_a_miss(tmp_path: Path):
    """The process dies after a part of the new bytes: neither old nor new block is found."""

    class Dies(Exception):
        pass

    class Fragile:
        def __init__(self, inner, num_writes):
            self.inner, self.left = inner, num_writes

        def __getattr__(self, name):
            return getattr(self.inner, name)

        def __getitem__(self, where):
            return self.inner[where]

        def __setitem__(self, where, value):
            if self.left == 0:
                raise Dies
            self.left -= 1
            self.inner[where] = value

    for num_writes in range(3):
        path = tmp_path / f"kv{num_writes}"
        tier = DiskTier(path, 1, NBYTES)
        tier.put(key(1), content(1))
        inner = tier._map
        tier._map = Fragile(inner, num_writes)
        with pytest.raises(Dies):
            tier.put(key(2), content(2))
        tier._map = inner
        tier.close()
        after = DiskTier(path, 1, NBYTES)
        assert after.read(key(2)) is None
        assert after.read(key(1)) == (content(1) if num_writes == 0 else None)
        after.close()


def test_wrong_sizes_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="max_blocks"):
        DiskTier(tmp_path / "kv", 0, NBYTES)
    tier = DiskTier(tmp_path / "kv", 1, NBYTES)
    with pytest.raises(ValueError, match="bytes"):
        tier.put(key(1), b"short")
    assert len(tier) == 0
    tier.close()


def test_a_record_under_the_name_of_another_is_a_miss(tmp_path: Path):
    """A damaged hash can spell another hash: the checksum covers the name too."""
    first = DiskTier(tmp_path / "kv", 2, NBYTES)
    first.put(key(1), content(1))
    offset = first._offset(first._slots[key(1)]) + 8
    first._map[offset : offset + 32] = key(2)
    first.close()
    second = DiskTier(tmp_path / "kv", 2, NBYTES)
    assert key(2) in second and second.read(key(2)) is None
    second.close()
