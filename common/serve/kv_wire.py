"""KV events in vLLM's format: a batch is `[time, events, rank]`, an event a map.

    BlockStored        block_hashes, parent_block_hash (None: the first of a prompt), token_ids,
                       block_size, lora_id (None; vLLM keeps it for old readers), medium, lora_name
                       and, only with an adapter or a salt, extra_keys: one entry for each block
    BlockRemoved       block_hashes, medium
    AllBlocksCleared

Blocks that follow each other are one event.

See common/serve/KV_EVENTS.md"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgpack

Event = dict[str, Any]
CLEARED: Event = {"type": "AllBlocksCleared"}
GPU = "GPU"  # the medium, whatever the device is


@dataclass(frozen=True, slots=True)
class HeldBlock:
    """The content of a cached block: its hash, its parent's, its tokens, and the other inputs on
    which its KV depends."""

    block_id: int
    name: int
    parent: int | None
    token_ids: tuple[int, ...]
    lora_name: str | None
    salts: list[str]  # of a first block


def wire_hash(block_hash: bytes) -> int:
    """Return the last 64 bits of a hash as an integer, as vLLM converts a longer hash."""
    return int.from_bytes(block_hash[-8:], "big")


def add_stored(events: list[Event], block: HeldBlock) -> None:
    """Add a stored block to `events`: to the last event if that ends where `block` begins, else as
    a new event."""
    extra_keys = [*filter(None, [block.lora_name]), *block.salts] or None
    last = events[-1] if events else CLEARED
    if last.get("token_ids") and last["block_hashes"][-1] == block.parent:
        last["block_hashes"].append(block.name)
        last["token_ids"] += block.token_ids
        if "extra_keys" in last:
            last["extra_keys"].append(extra_keys)
        return
    event = {
        "type": "BlockStored",
        "block_hashes": [block.name],
        "parent_block_hash": block.parent,
        "token_ids": list(block.token_ids),
        "block_size": len(block.token_ids),
        "lora_id": None,
        "medium": GPU,
        "lora_name": block.lora_name,
    }
    if extra_keys:
        event["extra_keys"] = [extra_keys]
    events.append(event)


def add_removed(events: list[Event], block: HeldBlock) -> None:
    last = events[-1] if events else CLEARED
    if last["type"] == "BlockRemoved":
        last["block_hashes"].append(block.name)
    else:
        events.append({"type": "BlockRemoved", "block_hashes": [block.name], "medium": GPU})


def pack_batch(events: list[Event], now: float) -> bytes:
    batch = msgpack.packb([now, events, 0])
    assert batch is not None
    return batch
