"""Calls of a `World` in any order, drawn from numbers of hypothesis, or from a seed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import count

from kv_world import World

OPERATIONS = [
    *(["submit", "probe"] * 3 + ["admit"] * 5 + ["advance", "advance_all", "step"] * 3),
    *["leave", "abort_waiting", "reset"],
]


class Chaos:
    """Any order of anything, drawn by `pick(low, high)` and `choose(items)`."""

    def __init__(self, world: World, pick: Callable[[int, int], int]) -> None:
        self.world, self.pick = world, pick
        self.ids = map(str, count())

    def choose(self, items: Iterable[str]) -> str | None:
        items = sorted(items)
        return items[self.pick(0, len(items) - 1)] if items else None

    def tokens(self, low: int, high: int) -> list[int]:
        return [self.pick(0, 1) for _ in range(self.pick(low, high))]

    def submit(self) -> None:
        world, size = self.world, self.world.block_size
        if len(world.waiting) + len(world.running) < 5:
            known = self.choose([*world.waiting, *world.running])
            head: list[int] = []
            if known is not None:
                tokens = (world.waiting | world.running)[known].all_token_ids
                head = tokens[: self.pick(0, len(tokens))]
            salt = [None, "s"][self.pick(0, 1)]
            world.submit(next(self.ids), head + self.tokens(1, 2 * size + 1), salt)

    def admit(self) -> None:
        request_id = self.choose(self.world.waiting)
        if request_id is not None:
            num_new = 10**9 if self.pick(0, 1) else self.pick(1, 2 * self.world.block_size)
            self.world.admit(request_id, num_new, max(0, self.pick(-4, 3)))

    def probe(self) -> None:
        """Ask for any number of tokens, or for one that just fits, or just does not. While blocks
        are held outside of tables, only for requests that were preempted."""
        world, is_calm = self.world, not self.world.held_outside()
        request_id = self.choose(
            r for r, q in world.waiting.items() if is_calm or q.num_preemptions
        )
        if request_id is not None:
            freeing = self.choose(world.running) if self.pick(0, 1) else None
            watermark = max(0, self.pick(-2, 2))
            num_tokens = self.pick(1, 4 * world.block_size)
            if freeing is not None or self.pick(0, 1):
                limit = world.limit(world.waiting[request_id], watermark, freeing)
                num_tokens = max(1, limit + self.pick(0, 1))
            world.probe(request_id, num_tokens, watermark, freeing)

    def advance(self) -> None:
        request_id = self.choose(self.world.running.keys() - self.world.plan.keys())
        if request_id is not None:
            self.world.advance(request_id, self.pick(1, 2 * self.world.block_size))

    def advance_all(self) -> None:
        for request_id in sorted(self.world.running.keys() - self.world.plan.keys()):
            self.world.advance(request_id)

    def leave(self) -> None:
        request_id = self.choose(self.world.running)
        if request_id is not None:
            leave = self.world.preempt if self.pick(0, 1) else self.world.free
            leave(request_id)

    def abort_waiting(self) -> None:
        request_id = self.choose(self.world.waiting)
        if request_id is not None and self.pick(0, 1):
            self.world.free(request_id)

    def step(self) -> None:
        world = self.world
        abort = [r for r in sorted(world.plan) if self.pick(0, 9) == 0]
        world.step(lambda _: self.pick(0, 1), abort)
        size = world.block_size
        for request_id in [r for r, q in world.running.items() if q.num_tokens > 7 * size + 2]:
            world.free(request_id)

    def reset(self) -> None:
        if self.pick(0, 4) == 0:
            is_reset = self.world.manager.reset_prefix_cache()
            assert not is_reset or self.world.cache.num_cached_blocks == 0
            if not self.world.held():
                assert is_reset
