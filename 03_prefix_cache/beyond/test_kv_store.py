"""Every store against a dictionary and an order of use; a record, and a file with one, that is
damaged, cut off, or left by another process."""

from __future__ import annotations

import random
import shutil
import threading
from collections import OrderedDict
from contextlib import nullcontext, suppress
from pathlib import Path
from unittest.mock import Mock

import pytest

from kv_store import KVStore, compute_checksum, make_record, open_record
from kv_stores import NBYTES, STORES, FaultyStore
from kv_tiers import DiskTier, HostTier
from request_chain import Link

LINKS: list[Link] = [(number.to_bytes(32, "big"), (number, 7, 2**40)) for number in range(12)]


def content(number: int, version: int = 0) -> bytes:
    return random.Random(f"{number} {version}").randbytes(NBYTES)


def read(store: KVStore, numbers: list[int]) -> tuple[list[bytes], bool]:
    """The blocks before the first that is missing or damaged, and whether the iterator raised."""
    blocks: list[bytes] = []
    with suppress(LookupError, ValueError, OSError):
        blocks.extend(store.get([LINKS[number] for number in numbers]))
        return blocks, False
    return blocks, True


def read_all(store: KVStore) -> dict[int, bytes]:
    found = {number: read(store, [number])[0] for number in range(12)}
    return {number: data[0] for number, data in found.items() if data}


def check(store: KVStore, max_blocks: int, num_turns: int, seed: int) -> OrderedDict[int, bytes]:
    """Random calls of a store that is empty, or has lost blocks of its own. Trap 9: what is put is
    a copy. Trap 11: of one chain the tail is the oldest."""
    rng = random.Random(seed)
    naive = OrderedDict[int, bytes]()
    for _ in range(num_turns):
        chain = rng.sample(range(12), rng.randint(1, 5))
        first = chain[0]
        links = [LINKS[number] for number in chain]
        num_there = next((i for i, number in enumerate(chain) if number not in naive), len(chain))
        match rng.choice("ppphgd"):
            case "p":
                buffer = bytearray(content(first))
                assert store.put(links[0], buffer) == (first not in naive)
                buffer[:] = bytes(len(buffer))
                naive[first] = content(first)
                naive.move_to_end(first)
                if len(naive) > max_blocks:
                    naive.popitem(last=False)
            case "h" | "g" as call:
                assert store.has(links) == num_there
                for number in reversed(chain[:num_there]):
                    naive.move_to_end(number)
                if call == "g":
                    there = [naive[number] for number in chain[:num_there]]
                    assert read(store, chain) == (there, num_there < len(chain))
            case "d" if rng.random() < 0.3:
                store.drop(links[0])
                naive.pop(first, None)
        if isinstance(store, HostTier):
            assert {n for n in range(12) if LINKS[n][0] in store} == set(naive)
    assert store.has([]) == 0 and read(store, []) == ([], False)
    return naive


def make_disk(folder: Path, max_blocks: int, numbers: range = range(0)) -> DiskTier:
    disk = DiskTier(folder / "kv", max_blocks)
    for number in numbers:
        disk.put(LINKS[number], content(number))
    return disk


@pytest.mark.net
def test_a_store_is_a_dictionary(pool: FaultyStore) -> None:
    check(pool, 30, num_turns=150, seed=0)


@pytest.mark.net
@pytest.mark.parametrize("kind", ["host", "disk", "pool"])
def test_a_full_store_loses_what_is_least_recently_used(kind: str, tmp_path: Path) -> None:
    """The next process finds in the folder what was there."""
    for seed in range(6):
        store = STORES[kind](tmp_path, 5)
        naive = check(store, 5, num_turns=150, seed=seed)
        if isinstance(store, DiskTier):
            assert read_all(make_disk(tmp_path, 5)) == naive
            shutil.rmtree(tmp_path / "kv")


# -- a record


def test_a_record_is_opened_only_if_it_is_exactly_what_was_made() -> None:
    """Every byte changed, every length cut, a longer one; another hash, other tokens (Trap 1)."""
    mine = LINKS[1]
    data = b"key and value bytes"
    record = make_record(mine, data)
    assert open_record(record, mine) == open_record(bytes(record), mine) == data
    damaged = [(record[:n], mine) for n in range(len(record))] + [(record + b"\0", mine)]
    for index, byte in enumerate(record):
        flipped = bytes([byte ^ 1 << index % 8])
        damaged.append((record[:index] + flipped + record[index + 1 :], mine))
    others = [(record, (LINKS[2][0], mine[1])), (record, (mine[0], (1, 7)))]
    for wrong, wanted in damaged + others:
        with pytest.raises(ValueError, match="record"):
            open_record(wrong, wanted)


def test_a_checksum_covers_hash_tokens_and_bytes_and_tells_where_each_ends() -> None:
    blocks = [(b"ab", (1, 2), b"kv"), (b"ac", (1, 2), b"kv"), (b"ab", (2, 1), b"kv")]
    blocks += [(b"ab", (1, 2), b"kw"), (b"abkv", (), b""), (b"ab", (), b"kv")]
    blocks += [(b"ab", (1,), bytes(8)), (b"ab", (1, 0), b"")]
    assert len({compute_checksum(block[:2], block[2]) for block in blocks}) == len(blocks)


# -- a tier that threads share, and what a file holds


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_another_thread_drops_a_block_before_a_look_up_or_after_it(kind: str, tmp_path: Path):
    tier = STORES[kind](tmp_path, 5)
    for number in range(3):
        tier.put(LINKS[number], content(number))
    reader = threading.Thread(target=tier.drop, args=[LINKS[1]])

    class Links(list[Link]):
        def __getitem__(self, index):
            """Let the reader come between the block that it drops and the next."""
            if index == 2:
                reader.start()
                reader.join(0.05)
            return super().__getitem__(index)

    assert tier.has(Links(LINKS[:3])) == 3
    reader.join()
    assert tier.has(LINKS[:3]) == 1


@pytest.mark.parametrize("failure", [KeyboardInterrupt, OSError])
def test_a_write_that_is_interrupted_or_fails_changes_nothing(tmp_path, monkeypatch, failure):
    """With a part of the new bytes written."""
    disk = make_disk(tmp_path, 3, range(2))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", Mock(side_effect=failure))
        for number in (1, 2):
            with pytest.raises(failure) if failure is not OSError else nullcontext():
                assert not disk.put(LINKS[number], content(number, version=1))
    expected = {number: content(number) for number in range(2)}
    assert read_all(disk) == read_all(make_disk(tmp_path, 3)) == expected


def test_every_damaged_byte_of_a_record_is_a_miss(tmp_path: Path):
    """The checksum, the block: one flipped bit each."""
    disk = make_disk(tmp_path, 2, range(2))
    file = tmp_path / "kv" / f"{LINKS[1][0].hex()}.kv"
    record = bytearray(file.read_bytes())
    for place in range(len(record)):
        record[place] ^= 0x10
        file.write_bytes(record)
        record[place] ^= 0x10
        assert read_all(disk) == {0: content(0)}, place
        assert not file.exists()
        disk.put(LINKS[1], content(1))
        assert read(disk, [1]) == ([content(1)], False)


@pytest.mark.parametrize("num_kept", [0, 5, 50, None])
def test_the_next_process_takes_over_the_blocks_that_fit(tmp_path, num_kept):
    """Whatever is missing is a miss, and no wrong bytes."""
    make_disk(tmp_path, 8, range(11))
    file = tmp_path / "kv" / f"{LINKS[9][0].hex()}.kv"
    file.write_bytes(file.read_bytes()[:num_kept])
    disk = DiskTier(tmp_path / "kv", 4)
    right = [7, 8, 10] if num_kept is not None else [7, 8, 9, 10]
    assert read_all(disk) == {number: content(number) for number in right}
    assert len(disk) == len(list((tmp_path / "kv").iterdir())) == len(right)


def test_a_folder_may_have_other_files_and_be_written_by_nobody(tmp_path: Path, caplog) -> None:
    """Files with other names stay. A file that cannot be removed is a warning, not an error in the
    middle of a step."""
    (tmp_path / "mine.kv").write_text("precious")
    link = (b"x" * 32, ())
    disk = DiskTier(tmp_path, 1)
    disk.put(link, b"data")
    assert DiskTier(tmp_path, 1).has([link]) == 1
    disk._file(link).unlink()
    disk._file(link).mkdir()
    disk.drop(link)
    assert "cannot remove a KV block" in caplog.text and disk.has([link]) == 0
    assert (tmp_path / "mine.kv").read_text() == "precious"
