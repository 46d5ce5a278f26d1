"""Fixtures that run a test for each prefix cache of the chapter."""

from __future__ import annotations

import pytest

from kv_slots import PREFIX_CACHES, MakeCache


@pytest.fixture
def make_caches() -> dict[str, MakeCache]:
    """Every cache of the chapter, by name."""
    return PREFIX_CACHES


@pytest.fixture(params=["hash", "radix"])
def make_cache(request: pytest.FixtureRequest, make_caches: dict[str, MakeCache]) -> MakeCache:
    """`make_cache(pool, block_size)`: the test runs once for each cache."""
    return make_caches[request.param]
