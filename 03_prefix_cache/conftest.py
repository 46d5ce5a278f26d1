"""Fixtures that run a test for each prefix cache of the chapter."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from kv_slots import PREFIX_CACHES, MakeCache
from kv_world import World


@pytest.fixture
def make_caches() -> dict[str, MakeCache]:
    """Every cache of the chapter, by name."""
    return PREFIX_CACHES


@pytest.fixture(params=["hash", "radix"])
def make_cache(request: pytest.FixtureRequest, make_caches: dict[str, MakeCache]) -> MakeCache:
    """`make_cache(pool, block_size)`: the test runs once for each cache."""
    return make_caches[request.param]


@pytest.fixture
def world_of() -> type[World]:
    """The class that `make_world` makes."""
    return World


@pytest.fixture
def make_world(make_cache: MakeCache, world_of: type[World]) -> Iterator[Callable[..., World]]:
    """`make_world(num_usable_blocks, block_size)`. After the test, every world is checked and
    drained."""
    worlds: list[World] = []

    def make(num_usable: int, block_size: int) -> World:
        worlds.append(world_of(make_cache, num_usable, block_size))
        return worlds[-1]

    yield make
    for world in worlds:
        world.check()
        world.drain()
