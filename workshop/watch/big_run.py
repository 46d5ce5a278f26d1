"""Synthetic events of a run with any number of requests and steps, for tests of the page.

An engine could have produced them (`State` applies each event before the next is chosen): a queue,
`max_num_seqs`, prompts in chunks, blocks that fill up and are published, kept and evicted."""

from __future__ import annotations

import random

from common.events.event_kinds import (
    VERSION,
    Admitted,
    Arrived,
    Computed,
    Event,
    Evicted,
    Finished,
    Freed,
    Planned,
    Published,
    Run,
    Table,
    Taken,
    Updated,
)
from workshop.watch.replay.film import State

BLOCK_SIZE, NUM_BLOCKS, SEATS, BUDGET, LONGEST = 16, 1500, 24, 256, 160


class BigRun:
    """A very small engine: first come, first served, without preemption."""

    def __init__(self, num_requests: int, num_steps: int, seed: int) -> None:
        self.rng = random.Random(seed)
        run = Run(
            VERSION, 0.0, "two_phase", "fcfs", "hash", BLOCK_SIZE, NUM_BLOCKS, SEATS, BUDGET,
            False, {}, {"architecture": "none"}, {},
        )  # fmt: skip
        self.events: list[Event] = [run]
        self.state = State(run)
        self.num_requests, self.num_steps, self.time = num_requests, num_steps, 0.0
        # The mean number of output tokens of a request, if every slot is used in every step.
        self.mean = SEATS * num_steps // num_requests

    def note(self, event: Event) -> None:
        self.state.apply(event)
        self.events.append(event)

    def make(self) -> list[Event]:
        step, num_arrived = 0, 0
        while step < self.num_steps or self.state.running or self.state.waiting:
            due = 1 + step * self.num_requests // max(1, self.num_steps * 2 // 3)
            while num_arrived < min(due, self.num_requests):
                self.arrive(f"r{num_arrived}")
                num_arrived += 1
            if not (self.state.running or self.state.waiting):
                self.arrive(f"r{self.rng.randrange(num_arrived)}")  # its name comes again
            self.step(step)
            step += 1
        return self.events

    def arrive(self, name: str) -> None:
        prompt = [self.rng.randrange(1000) for _ in range(self.rng.randint(20, LONGEST))]
        length = self.rng.randint(self.mean // 2, self.mean * 3 // 2)
        self.note(Arrived(self.time, name, prompt, [f" w{t}" for t in prompt], length, 0))

    def step(self, step: int) -> None:
        state, budget = self.state, BUDGET
        planned: dict[str, tuple[int, int]] = {}
        for name in state.running:
            budget -= self.plan(name, planned, budget)
        while state.waiting and budget and len(state.running) < SEATS:
            name = state.waiting[0]
            if not self.has_room(name):
                break
            self.note(Admitted(name, 0))
            budget -= self.plan(name, planned, budget)
        stop = None
        if state.waiting:
            full = len(state.running) == SEATS
            stop = ["seat" if full else "blocks" if budget else "budget", state.waiting[0]]
        starts, nums = zip(*planned.values()) if planned else ((), ())
        plan = Planned(step, self.time, 0.3, list(planned), list(starts), list(nums), stop=stop)
        self.note(plan)
        self.finish(step, planned)

    def has_room(self, name: str) -> bool:
        request = self.state.requests[name]
        needed = -(-(len(request.prompt) + request.max_tokens) // BLOCK_SIZE)
        kept = sum(self.owed(other) for other in self.state.running)
        return needed + kept <= len(self.state.free) + len(self.state.eviction_order())

    def owed(self, name: str) -> int:
        request = self.state.requests[name]
        most = -(-(len(request.prompt) + request.max_tokens) // BLOCK_SIZE)
        return most - len(request.table)

    def plan(self, name: str, planned: dict[str, tuple[int, int]], budget: int) -> int:
        request = self.state.requests[name]
        start = request.num_computed_tokens
        num = min(len(request.tokens) - start, budget)
        if num == 0:
            return 0
        missing = -(-(start + num) // BLOCK_SIZE) - len(request.table)
        if missing > 0:
            if (short := missing - len(self.state.free)) > 0:
                self.note(Evicted(self.state.eviction_order()[: max(short, 8)]))
            blocks = list(self.state.free)[:missing]
            self.note(Taken(name, blocks))
            self.note(Table(name, len(request.table), blocks))
        planned[name] = (start, num)
        return num

    def finish(self, step: int, planned: dict[str, tuple[int, int]]) -> None:
        state, forward_ms = self.state, 2 + self.rng.random()
        self.time = round(self.time + 0.003 + forward_ms / 1e3, 6)
        said = {
            name: [self.rng.randrange(1000)]
            for name, (start, num) in planned.items()
            if start + num == len(state.requests[name].tokens)
        }
        pieces = {name: [f" w{tokens[0]}"] for name, tokens in said.items()}
        times = {"prepare_ms": 0.4, "forward_ms": round(forward_ms, 3), "sample_ms": 0.2}
        self.note(Computed(step, self.time, times, said, pieces))
        for name, (start, num) in planned.items():
            request = state.requests[name]
            first, end = start // BLOCK_SIZE, (start + num) // BLOCK_SIZE
            if end > first:
                blocks = request.table[first:end]
                hashes = [f"{self.rng.getrandbits(32):08x}" for _ in blocks]
                self.note(Published(name, first, blocks, blocks, hashes))
            if len(request.outputs) >= request.max_tokens:
                self.note(Finished(self.time, name, "length"))
                self.note(Freed(name, list(request.table)))
                self.note(Table(name, 0, []))
        self.note(Updated(step, self.time, 0.2))


def make_big_run(num_requests: int, num_steps: int, seed: int) -> list[Event]:
    return BigRun(num_requests, num_steps, seed).make()
