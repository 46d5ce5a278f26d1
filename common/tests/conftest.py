from __future__ import annotations

from collections.abc import Iterator

import pytest

from global_kv_pool import GlobalKVPool


@pytest.fixture
def pool() -> Iterator[GlobalKVPool]:
    pool = GlobalKVPool(max_blocks_per_node=5000)
    yield pool
    pool.close()
