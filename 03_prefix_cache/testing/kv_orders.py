"""Random orders of calls of a world, from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any

BLOCK_SIZES = (1, 2, 4)


class Chaos:
    """Any order of anything, drawn by `pick(low, high)` and `choose(items)`. An operation is a
    method."""

    def __init__(self, world: Any, pick: Callable[[int, int], int]) -> None:
        self.world, self.pick = world, pick
        self.ids = map(str, count())

    def choose(self, items: Iterable[str]) -> str | None:
        items = sorted(items)
        return items[self.pick(0, len(items) - 1)] if items else None

    def tokens(self, low: int, high: int) -> list[int]:
        return [self.pick(0, 1) for _ in range(self.pick(low, high))]


def check_long_run(
    make_world: Callable[[int, int], Any],
    kind: type[Chaos],
    operations: Sequence[str],
    seed: int,
    block_size: int,
) -> None:
    """`make_world(num_usable_blocks, block_size)`."""
    rng = random.Random(f"{seed} {block_size}")
    world = make_world(rng.choice([4, 9, 20]), block_size)
    chaos = kind(world, rng.randint)
    for _ in range(250):
        getattr(chaos, rng.choice(operations))()
        world.check()
    world.drain()
