"""KV that does not fit into the engine's memory: copied to host memory and disk, and loaded back.

    device   a PrefixCache; evicts a block     |                     ^ loaded before admission
    host     HostTier                          v copied down         |
    disk     DiskTier, a checked file each     v pushed out of host  |

A `TieredCache` listens to the device's prefix cache. Blocks that are evicted there are copied to
the host first (write-back). Blocks that do not fit into the host go to disk; blocks that do not fit
on disk are lost.

The way back is a `KVConnector`: a request whose prefix continues in a lower tier waits for it,
while others pass. Threads read the blocks, and verify those from disk; the engine's thread writes
them to the device. Copies in lower tiers stay, so a block that is evicted again needs no second
copy.

Invariants: those of `store_connector.py`; no tier exceeds its limit; a block that is corrupt, or
does not arrive in time, ends the load before it, and is computed.

SGLang's HiCache and vLLM's offloading connectors do this with pinned memory and copy streams, and
overlap the copies with the layers of the forward pass.

See 03_prefix_cache/beyond/README.md"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from block_pool import Block
from kv_tiers import DiskTier, HostTier
from prefix_cache_local import compute_block_hash
from request import check_integers, require
from request_chain import Link, root_keys
from store_connector import StoreConnector


@dataclass(frozen=True, slots=True)
class KVTierConfig:
    """Sizes of the tiers below the device, in blocks; 0 leaves one out.

    `disk_path` is a folder, which outlives the engine and serves the next one; None: a temporary
    one. A load that takes longer than `load_timeout_s` ends with the blocks that have arrived.
    Raises `ValueError` that names field and value.
    """

    host_blocks: int
    disk_blocks: int = 0
    disk_path: str | Path | None = None
    load_timeout_s: float = 5.0

    def __post_init__(self) -> None:
        check_integers(0, host_blocks=self.host_blocks, disk_blocks=self.disk_blocks)
        is_path = isinstance(self.disk_path, str | Path) and not Path(self.disk_path).is_file()
        has_tier = self.host_blocks + self.disk_blocks > 0
        require(has_tier, "host_blocks", self.host_blocks, "> 0 if disk_blocks is 0")
        rule = "None or the path of a folder"
        require(self.disk_path is None or is_path, "disk_path", self.disk_path, rule)
        require(self.load_timeout_s > 0, "load_timeout_s", self.load_timeout_s, "> 0")


class TieredCache(StoreConnector):
    """Host and disk tiers: the listener of a `PrefixCache`, and a `KVConnector`. Raises `OSError`
    if the folder cannot be made."""

    def __init__(self, config: KVTierConfig) -> None:
        self.config = config
        self.disk: DiskTier | None = None
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        if config.disk_blocks:
            folder = config.disk_path
            if folder is None:
                self._temporary = tempfile.TemporaryDirectory(prefix="kv-tier-")
                folder = self._temporary.name
            self.disk = DiskTier(folder, config.disk_blocks)
        self.host = HostTier(config.host_blocks, self.disk)
        super().__init__(self.host, config.load_timeout_s)
        self._link_of: dict[int, Link] = {}  # of every cached block on the device

    # -- down: notifications of the device's cache

    def block_cached(
        self,
        block: Block,
        parent: Block | None,
        token_ids: tuple[int, ...],
        extra_keys: tuple[tuple[str, str], ...],
    ) -> None:
        """O(1): the parent's hash is known."""
        if parent is None:
            keys = root_keys(self.namespace, extra_keys)
            block_hash = compute_block_hash(None, token_ids, keys)
        else:
            block_hash = compute_block_hash(self._link_of[parent.block_id][0], token_ids)
        self._link_of[block.block_id] = (block_hash, token_ids)

    def blocks_evicted(self, blocks: Sequence[Block]) -> None:
        """Children come first, so in the lower tiers they are older than their parents, and leave
        first too."""
        for block in blocks:
            link = self._link_of.pop(block.block_id)
            if link[0] not in self._refused and self.host.has([link]) == 0:
                self.host.put(link, self.io.read_block(block.block_id))

    def blocks_invalidated(self, blocks: Sequence[Block]) -> None:
        """Remove the blocks here too, above all from a file that serves the next engine."""
        for block in blocks:
            link = self._link_of.pop(block.block_id, None)
            if link is not None:
                self.host.drop(link)

    # -- up

    def num_loaded_blocks(self) -> Mapping[str, int]:
        num_from_disk = 0 if self.disk is None else self.disk.num_read
        return {"host": self.host.num_read, "disk": num_from_disk}

    def close(self) -> None:
        """A named folder stays, for the next engine. Can be called again."""
        super().close()
        if self._temporary is not None:
            self._temporary.cleanup()
