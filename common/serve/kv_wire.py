"""KV events in vLLM's format: a batch is `[time, events, rank]`, an event a map.

    BlockStored        block_hashes, parent_block_hash (None: the first of a prompt), token_ids,
                       block_size, lora_id (None; vLLM keeps it for old readers), medium, lora_name
                       and, only with an adapter or a salt, extra_keys: one entry for each block
    BlockRemoved       block_hashes, medium
    AllBlocksCleared

Blocks that follow each other are one event. vLLM caches by an adapter's name, this engine by its
content. So a block of an adapter with several names is published under each, with the name in its
hash.

See common/serve/KV_EVENTS.md"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import msgpack

Event = dict[str, Any]
CLEARED: Event = {"type": "AllBlocksCleared"}
GPU = "GPU"  # media
CPU = "CPU"
STORAGE = "STORAGE"


@dataclass(slots=True, eq=False)
class HeldBlock:
    """The content of a block on any medium: its parent's hash, its tokens, and the other inputs on
    which its KV depends."""

    parent: bytes | None
    token_ids: tuple[int, ...]
    adapter: str | None  # its digest
    salts: tuple[str, ...]  # of a first block
    media: tuple[str, ...] = ()

    def lora_names(self, by_digest: Mapping[str, list[str]]) -> Sequence[str | None]:
        """Return the names under which the block is published."""
        adapter = self.adapter
        return [None] if adapter is None else by_digest.get(adapter, [adapter])


def wire_hash(block_hash: bytes, lora_name: str | None = None) -> int:
    """Return the last 64 bits of a hash as an integer, as vLLM converts a longer hash."""
    if lora_name is not None:
        block_hash = sha256(block_hash + lora_name.encode(errors="replace")).digest()
    return int.from_bytes(block_hash[-8:], "big")


def add_stored(
    events: list[Event], block_hash: bytes, block: HeldBlock, medium: str, lora_name: str | None
) -> None:
    """Add a stored block to `events`: to the last event if that ends where `block` begins, else as
    a new event."""
    parent = None if block.parent is None else wire_hash(block.parent, lora_name)
    adapter = [] if lora_name is None else [lora_name]
    extra_keys = [*adapter, *block.salts] or None
    last = events[-1] if events else CLEARED
    if (
        last.get("medium") == medium
        and last.get("token_ids")
        and last["block_hashes"][-1] == parent
    ):
        last["block_hashes"].append(wire_hash(block_hash, lora_name))
        last["token_ids"] += block.token_ids
        if "extra_keys" in last:
            last["extra_keys"].append(extra_keys)
        return
    event = {
        "type": "BlockStored",
        "block_hashes": [wire_hash(block_hash, lora_name)],
        "parent_block_hash": parent,
        "token_ids": list(block.token_ids),
        "block_size": len(block.token_ids),
        "lora_id": None,
        "medium": medium,
        "lora_name": lora_name,
    }
    if extra_keys:
        event["extra_keys"] = [extra_keys]
    events.append(event)


def add_removed(events: list[Event], block_hash: bytes, medium: str, lora_name: str | None) -> None:
    last = events[-1] if events else CLEARED
    if last.get("medium") == medium and "token_ids" not in last:
        last["block_hashes"].append(wire_hash(block_hash, lora_name))
    else:
        hashes = [wire_hash(block_hash, lora_name)]
        events.append({"type": "BlockRemoved", "block_hashes": hashes, "medium": medium})


def pack_batch(events: list[Event], now: float) -> bytes:
    batch = msgpack.packb([now, events, 0])
    assert batch is not None
    return batch
