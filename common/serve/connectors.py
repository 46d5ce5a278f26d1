"""A connector to a pool of KV blocks, configured as JSON:

--kv-connector '{"kind": "mooncake", "master": "HOST:PORT", "metadata": "HOST:PORT"}'

See common/serve/README.md"""

from __future__ import annotations

import atexit
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kv_connector import KVConnector


def make_connector(
    kind: str,
    master: str,
    metadata: str,
    segment_mbytes: int = 256,
    host: str = "127.0.0.1",
    load_timeout_s: float = 10.0,
) -> KVConnector:
    """Connect to the store at `master` and `metadata`, and contribute `segment_mbytes` MiB of this
    process's memory to it, until the process ends. `host` is the name of this machine for the
    others. Raises `ValueError` for another kind, and if there is no store."""
    from mooncake_client import MooncakeAddress, MooncakeUnavailableError
    from mooncake_pool import MooncakePool
    from pool_connector import PoolConnector

    if kind != "mooncake":
        raise ValueError(f"kv_connector must have kind 'mooncake', got {kind!r}")
    try:
        pool = MooncakePool(MooncakeAddress(master, metadata), segment_mbytes << 20, host)
    except MooncakeUnavailableError as error:
        raise ValueError(f"kv_connector: {error}") from error
    atexit.register(pool.close)
    return PoolConnector(pool, load_timeout_s)
