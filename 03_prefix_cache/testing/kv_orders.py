"""Random orders of calls for the tests of managers: long runs from a seed, and a state machine."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from kv_chaos import Chaos
from kv_world import World

BLOCK_SIZES = (1, 2, 4)
MakeWorld = Callable[[int, int], World]  # arguments: the number of usable blocks, and their size


def run_machine(
    make_machine: Callable[[], RuleBasedStateMachine], max_examples: int, num_steps: int
) -> None:
    """The same examples every time."""
    run_state_machine_as_test(
        make_machine,  # pyright: ignore[reportArgumentType]  # anything that makes one will do
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=num_steps,
            deadline=None,
            derandomize=True,
            database=None,
        ),
    )


def check_long_run(
    make_world: MakeWorld, kind: type[Chaos], operations: Sequence[str], seed: int, block_size: int
) -> None:
    rng = random.Random(f"{seed} {block_size}")
    world = make_world(rng.choice([4, 9, 20]), block_size)
    chaos = kind(world, rng.randint)
    for _ in range(250):
        getattr(chaos, rng.choice(operations))()
        world.check()
    world.drain()


def check_any_order(make_world: MakeWorld, kind: type[Chaos], operations: Sequence[str]) -> None:
    class ManagerMachine(RuleBasedStateMachine):
        @initialize(num_usable=st.integers(3, 12), block_size=st.sampled_from(BLOCK_SIZES))
        def start(self, num_usable: int, block_size: int) -> None:
            self.chaos = kind(make_world(num_usable, block_size), lambda low, _: low)

        @rule(operation=st.sampled_from(operations), data=st.data())
        def operate(self, operation: str, data: st.DataObject) -> None:
            self.chaos.pick = lambda low, high: data.draw(st.integers(low, high))
            getattr(self.chaos, operation)()

        @invariant()
        def consistent(self) -> None:
            self.chaos.world.check()

        def teardown(self) -> None:
            if hasattr(self, "chaos"):
                self.chaos.world.drain()

    run_machine(ManagerMachine, max_examples=16, num_steps=30)
