"""A connector to a pool of KV blocks, configured as JSON:

--kv-connector '{"kind": "mooncake", "master": "HOST:PORT", "metadata": "HOST:PORT"}'

See common/serve/README.md"""

from __future__ import annotations

import atexit
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kv_connector import KVConnector


def make_connector(fields: Mapping[str, Any]) -> KVConnector:
    """Return a connector whose store client lives until the process ends. Raises `ValueError` for
    invalid fields, and if there is no store."""
    from mooncake_client import MooncakeUnavailableError

    if fields.get("kind") != "mooncake":
        raise ValueError(f"kv_connector must have kind 'mooncake', got {fields.get('kind')!r}")
    try:
        return _mooncake(**fields)
    except (TypeError, MooncakeUnavailableError) as error:
        raise ValueError(f"kv_connector: {error}") from error


def _mooncake(
    kind: str,
    master: str,
    metadata: str,
    segment_mbytes: int = 256,
    host: str = "127.0.0.1",
    load_timeout_s: float = 10.0,
) -> KVConnector:
    """Connect to the store at `master` and `metadata`, and contribute `segment_mbytes` MiB of this
    process's memory to it. `host` is the name of this machine for the others."""
    from mooncake_client import MooncakeAddress
    from mooncake_pool import MooncakePool
    from pool_connector import PoolConnector

    address = MooncakeAddress(master, metadata)
    pool = MooncakePool(address, segment_mbytes << 20, host)
    atexit.register(pool.close)
    return PoolConnector(pool, load_timeout_s)
