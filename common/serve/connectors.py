"""A connector to a pool of KV blocks, said in JSON:

--kv-connector '{"kind": "mooncake", "master": "HOST:PORT", "metadata": "HOST:PORT"}'"""

from __future__ import annotations

import atexit
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kv_connector import KVConnector


@dataclass(frozen=True, slots=True)
class MooncakeFields:
    """Where the store is, what this process lends to it, and this machine's name for others."""

    master: str
    metadata: str
    segment_mbytes: int = 256
    host: str = "127.0.0.1"
    node_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    load_timeout_s: float = 10.0


def make_connector(fields: Mapping[str, Any]) -> KVConnector:
    """A client of the store, until the process ends. Raises `ValueError` for fields that are wrong,
    and if there is no store."""
    from mooncake_master import MooncakeAddress, MooncakeUnavailableError
    from mooncake_pool import MooncakePool
    from pool_connector import PoolConnector

    kind = fields.get("kind")
    if kind != "mooncake":
        raise ValueError(f"kv_connector has kind {kind!r}: it must be 'mooncake'")
    try:
        how = MooncakeFields(**{name: value for name, value in fields.items() if name != "kind"})
        address = MooncakeAddress(how.master, how.metadata)
        pool = MooncakePool(
            address,
            how.segment_mbytes << 20,
            how.host,
            transfer_timeout_s=how.load_timeout_s,
        )
    except (TypeError, MooncakeUnavailableError) as error:
        raise ValueError(f"kv_connector: {error}") from error
    atexit.register(pool.close)
    return PoolConnector(pool, how.node_id, how.load_timeout_s)
