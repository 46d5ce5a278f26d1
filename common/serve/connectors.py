"""A connector to a pool of KV blocks, said in JSON:

--kv-connector '{"kind": "mooncake", "master": "HOST:PORT", "metadata": "HOST:PORT"}'"""

from __future__ import annotations

import atexit
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kv_connector import KVConnector


def make_connector(fields: Mapping[str, Any]) -> KVConnector:
    """A client of the store, until the process ends. Raises `ValueError` for fields that are wrong,
    and if there is no store."""
    from mooncake_master import MooncakeUnavailableError

    others = dict(fields)
    if (kind := others.pop("kind", None)) != "mooncake":
        raise ValueError(f"kv_connector must have kind 'mooncake', got {kind!r}")
    try:
        return _mooncake(**others)
    except (TypeError, MooncakeUnavailableError) as error:
        raise ValueError(f"kv_connector: {error}") from error


def _mooncake(
    master: str,
    metadata: str,
    segment_mbytes: int = 256,
    host: str = "127.0.0.1",
    node_id: str | None = None,
    load_timeout_s: float = 10.0,
) -> KVConnector:
    """Where the store is, what this process lends to it, and this machine's name for others."""
    from mooncake_master import MooncakeAddress
    from mooncake_pool import MooncakePool
    from pool_connector import PoolConnector

    address = MooncakeAddress(master, metadata)
    pool = MooncakePool(address, segment_mbytes << 20, host, transfer_timeout_s=load_timeout_s)
    atexit.register(pool.close)
    return PoolConnector(pool, node_id or uuid.uuid4().hex, load_timeout_s)
