"""A fixture that runs a test for each prefix cache of the chapter."""

from __future__ import annotations

import pytest

from kv_slots import PREFIX_CACHES, MakeCache


@pytest.fixture(params=PREFIX_CACHES)
def make_cache(request: pytest.FixtureRequest) -> MakeCache:
    """`make_cache(pool, block_size)`."""
    return PREFIX_CACHES[request.param]
