from __future__ import annotations

import pytest

from global_kv_pool import GlobalKVPool


@pytest.fixture
def pool() -> GlobalKVPool:
    return GlobalKVPool(max_blocks=5000)
