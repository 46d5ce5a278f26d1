"""Rows against lists: plans of all kinds go through the runner's columns, and through chapter 1's
`RunnerState` and a plain dictionary of block tables, one for each group of layers. A plugin is told
the same."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from batch_layout import compose_in_order
from common.runner.batch_state import BatchState
from common.runner.model_runner import PagedModelRunner
from common.sampling.runner_plugin import DeviceArgs, RunnerPlugin, StepRows
from common.sampling.sampler import Sampler
from common.sampling.sampling_columns import SamplingColumns
from input_batch import RunnerState
from mixed_batch import compose
from paged_attention import PagedKVCache
from request import SamplingParams
from scheduler_interface import BlockTableUpdate, NewRequestData, SchedulerOutput

MODEL = SimpleNamespace(embed_weight=torch.zeros(1))
MAX_BLOCKS = 40


class Plans:
    """A scheduler's side: plans that are lawful, and otherwise as wild as can be. `known` is what
    it knows of the requests, `lists` what chapter 1's runner made of the plans."""

    def __init__(self, rng: random.Random, block_size: int, num_groups: int) -> None:
        self.rng = rng
        self.block_size = block_size
        self.num_groups = num_groups
        self.known = RunnerState()
        self.lists = RunnerState()
        self.tables: dict[str, list[list[int]]] = {}  # of each group

    def next(self) -> SchedulerOutput:
        rng = self.rng
        plan = SchedulerOutput()
        names = list(self.tables)
        removed = rng.sample(names, min(len(names), rng.choice([0, 0, 0, 1, 2])))
        again = rng.sample(names, min(len(names), rng.choice([0, 0, 1])))
        plan.finished_req_ids = {*removed, *again}
        if rng.random() < 0.1:
            plan.reset = True
            plan.finished_req_ids = set()
            removed = names
        for name in {*removed, *again}:
            self.known.release(name)
            del self.tables[name]
        fresh = [f"r{rng.randrange(10**6)}" for _ in range(rng.choice([0, 1, 1, 3]))]
        for name in dict.fromkeys(again + fresh):
            self.admit(plan, name)
        admitted = {new.req_id for new in plan.scheduled_new_reqs}
        rest = [name for name in self.tables if name not in admitted]
        for name in rng.sample(rest, rng.randint(0, len(rest))):
            self.change(plan, name)
        for name in rng.sample(sorted(self.tables), min(len(self.tables), rng.choice([0, 0, 2]))):
            group = rng.randrange(self.num_groups)
            if table := self.tables[name][group]:  # in the plan, or not
                block_id = rng.choice([0, self.block()])
                move = BlockTableUpdate(name, rng.randrange(len(table)), block_id, group)
                plan.block_moves.append(move)
                table[move.block_index] = move.block_id
        self.lists.apply(plan)
        for name, request in self.known.requests.items():
            if name in plan.num_scheduled_tokens:
                assert request == self.lists.requests[name], "what it is sent is what is known"
        return plan

    def block(self) -> int:
        return self.rng.randrange(1, 10**6)

    def admit(self, plan: SchedulerOutput, name: str) -> None:
        rng = self.rng
        prompt = [rng.randrange(10**5) for _ in range(rng.choice([1, 2, 5, 9, 40]))]
        params = SamplingParams(temperature=rng.random(), seed=rng.randrange(10**6))
        new = NewRequestData(name, prompt, params, rng.randrange(len(prompt)))
        new.features = {"told": [name]}
        self.tables[name] = [[] for _ in range(self.num_groups)]
        self.known.admit(new)
        self.schedule(plan, name, new.num_computed_tokens)
        new.block_ids = self.news(name)
        plan.scheduled_new_reqs.append(new)

    def change(self, plan: SchedulerOutput, name: str) -> None:
        rng = self.rng
        cached = plan.scheduled_cached_reqs
        request = self.known.requests[name]
        prompt = request.prompt_token_ids
        outputs = request.output_token_ids
        num_before = len(prompt + outputs)
        sampled = self.lists.requests[name].output_token_ids[len(outputs) :]
        outputs += sampled[: rng.randint(0, len(sampled))]  # it stays, or some of it does
        outputs += [rng.randrange(10**5) for _ in range(rng.choice([0, 1, 1, 1, 3]))]
        tokens = prompt + outputs
        num_blocks = [len(table) for table in self.tables[name]]
        first = num_before if rng.random() < 0.7 else rng.randint(0, num_before)
        if rng.random() < 0.15:
            cached.resumed_req_ids.add(name)
            first = 0
            num_blocks = [0] * self.num_groups
            self.tables[name] = [[] for _ in range(self.num_groups)]
        start = rng.randrange(len(tokens))
        self.schedule(plan, name, start)
        cached.req_ids.append(name)
        cached.new_token_ids.append(tokens[first:])
        cached.num_computed_tokens.append(start)
        cached.num_output_tokens.append(len(outputs))
        news = self.news(name, num_blocks)
        cached.new_block_ids.append(news if any(news) else rng.choice([(), news]))

    def news(self, name: str, first_blocks: Sequence[int] = ()) -> tuple[list[int], ...]:
        """Its tables, each from an entry on."""
        return tuple(t[n:] for t, n in zip_longest(self.tables[name], first_blocks, fillvalue=0))

    def schedule(self, plan: SchedulerOutput, name: str, start: int) -> None:
        """Some tokens from `start` on, with the blocks that they need."""
        rng = self.rng
        num_uncomputed_tokens = self.known.requests[name].num_tokens - start
        num_tokens = rng.choice(
            [num_uncomputed_tokens, num_uncomputed_tokens, rng.randint(1, num_uncomputed_tokens)]
        )
        if num_tokens == num_uncomputed_tokens and rng.random() < 0.3:
            drafts = [rng.randrange(10**5) for _ in range(rng.randint(1, 4))]
            plan.scheduled_draft_token_ids[name] = drafts
            num_tokens += len(drafts)
        plan.num_scheduled_tokens[name] = num_tokens
        for table in self.tables[name]:
            num_blocks = -(-(start + num_tokens) // self.block_size) + rng.choice([0, 0, 1])
            table += [self.block() for _ in range(num_blocks - len(table))]

    def sample(self) -> dict[str, list[int]]:
        """Append sampled tokens to the known ones in the runner, as chapter 5's does."""
        rng = self.rng
        names = rng.sample(sorted(self.tables), rng.randint(0, len(self.tables)))
        sampled = {name: [rng.randrange(10**5) for _ in range(rng.randint(1, 4))] for name in names}
        for name, tokens in sampled.items():
            self.lists.requests[name].output_token_ids += tokens
        return sampled


@dataclass(eq=False)
class Staged(DeviceArgs):
    rows: Any


class Told(RunnerPlugin):
    """Knows the rows from what it is told, and from nothing else."""

    name = "told"
    is_in_forward = True

    def __init__(self) -> None:
        self.num_rows = 0
        self.rows: dict[int, tuple[str, list[int]]] = {}

    def grow(self, num_rows: int) -> None:
        assert num_rows >= self.num_rows
        self.num_rows = num_rows

    def admit(self, row: int, new: NewRequestData) -> None:
        assert row < self.num_rows and row not in self.rows
        assert new.features[self.name] == [new.req_id]
        self.rows[row] = new.req_id, list(new.prompt_token_ids)

    def release(self, row: int) -> None:
        self.rows.pop(row, None)

    def concerns(self, rows: np.ndarray) -> bool:
        return True

    def stage(self, step: StepRows) -> Staged | None:
        if len(step.req_ids) == 3:
            return None
        return Staged(np.repeat(step.queries.rows, step.queries.num_tokens))

    def check(self, state: BatchState, plans: Plans) -> None:
        known = {state.row_of[r]: (r, q.prompt_token_ids) for r, q in plans.known.requests.items()}
        assert self.rows == known and self.num_rows == len(state.num_tokens)


def check_state(state: BatchState, plans: Plans) -> None:
    rows = set(state.row_of.values())
    assert state.row_of.keys() == state.requests.keys() == plans.tables.keys()
    assert len(rows) == len(state.row_of) and rows.isdisjoint(state._free_rows)
    assert rows | {*state._free_rows} == set(range(len(state.num_tokens)))
    columns = [state.token_ids, state.sampling.seed, *state.block_tables, *state.num_blocks]
    assert {len(column) for column in columns} == {len(state.num_tokens)}
    for name, request in plans.lists.requests.items():
        found, row = state.requests[name], state.row_of[name]
        assert found.params is request.params
        assert found.prompt_token_ids == request.prompt_token_ids
        assert found.output_token_ids == request.output_token_ids
        num_tokens = found.num_tokens
        assert num_tokens == request.num_tokens == state.num_tokens[row]
        for span in ((0, num_tokens), (1, num_tokens + 9), (num_tokens - 1, num_tokens), (2, 4)):
            assert found.tokens(*span) == request.tokens(*span)
        for group, table in enumerate(plans.tables[name]):
            assert state.block_ids(name, group=group) == table
            assert state.block_ids(name, 1, group) == table[1:]
        assert state.block_ids(name) == plans.tables[name][0]
        assert state.sampling.seed[row] == request.params.seed
        assert state.sampling.shaping[0, row] == request.params.temperature


def check_batch(runner: PagedModelRunner, plan: SchedulerOutput, plans: Plans, order) -> None:
    batch = runner.prepare(plan)
    size = plans.block_size
    check_state(runner.state, plans)
    if not plan.num_scheduled_tokens:
        assert batch is None
        return
    starts = plan.starts()
    ids = []
    positions = []
    logit_indices = []
    borders = [0]
    slots: list[list[int]] = [[] for _ in range(plans.num_groups)]
    rows: list[tuple[str, int, int]] = []  # of logits
    for name in order(starts):
        request = plans.lists.requests[name]
        drafts = plan.scheduled_draft_token_ids.get(name, [])
        start = starts[name]
        stop = starts[name] + plan.num_scheduled_tokens[name]
        positions += range(start, stop)
        ids += request.tokens(start, stop - len(drafts)) + drafts
        for slots_of_group, table in zip(slots, plans.tables[name], strict=True):
            slots_of_group += [table[p // size] * size + p % size for p in range(start, stop)]
        borders.append(len(positions))
        if stop - len(drafts) == request.num_tokens:
            num = 1 + len(drafts)
            logit_indices += range(borders[-1] - num, borders[-1])
            num_outputs = len(request.output_token_ids)
            row = runner.state.row_of[name]
            rows += [(name, row, num_outputs + i) for i in range(num)]
    assert batch.input_ids.tolist() == ids and batch.input_ids.dtype == torch.int64
    assert batch.positions.tolist() == positions
    assert batch.logit_indices.tolist() == logit_indices
    stops = [starts[name] + plan.num_scheduled_tokens[name] for name in order(starts)]
    for group, (attention, slots_of_group) in enumerate(zip(batch.attention, slots, strict=True)):
        assert attention.slot_mapping.tolist() == slots_of_group
        assert attention.query_start_loc.tolist() == borders
        assert attention.seq_lens.tolist() == stops and attention.max_seq_len == max(stops)
        assert attention.max_query_len == max(plan.num_scheduled_tokens.values())
        for name, stop, table in zip(order(starts), stops, attention.block_tables.tolist()):
            num_blocks = -(-stop // size)
            assert table[:num_blocks] == plans.tables[name][group][:num_blocks]
    row_of = runner.state.row_of
    step = batch.step
    owners = [name for name in order(starts) for _ in range(plan.num_scheduled_tokens[name])]
    staged = {"told": [row_of[name] for name in owners]} if len(starts) != 3 else {}
    assert {name: data.rows.tolist() for name, data in batch.staged.items()} == staged
    assert list(step.req_ids) == order(starts) and step.drafts == plan.scheduled_draft_token_ids
    assert step.queries.starts.tolist() == [starts[name] for name in step.req_ids]
    logit_owners = np.repeat(step.req_ids, step.queries.num_logit_rows).tolist()
    assert logit_owners == [name for name, _, _ in rows]
    sampling = batch.sampling
    found = sampling.req_ids, sampling.rows.tolist(), sampling.num_outputs.tolist()
    assert list(zip(*found, strict=True)) == rows
    assert sampling.drafts == plan.scheduled_draft_token_ids


def in_order(starts: dict[str, int], plan: SchedulerOutput) -> list[str]:
    return list(starts)


def short_in_front(starts: dict[str, int], plan: SchedulerOutput) -> list[str]:
    return sorted(starts, key=lambda name: plan.num_scheduled_tokens[name] > 2)


LAYOUTS = {
    "chapter 2": (compose_in_order, in_order),
    "chapter 6": (partial(compose, decode_threshold=2), short_in_front),
}


@pytest.mark.net
@pytest.mark.sample
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("first_seed", range(0, 45, 15))
def test_whatever_is_planned_rows_are_what_lists_would_be(layout: str, first_seed: int) -> None:
    """Traps 24, 29: outputs from before a preemption are computed again, at their positions."""
    layout_of, order = LAYOUTS[layout]
    for seed in range(first_seed, first_seed + 15):
        rng = random.Random(seed)
        plans = Plans(rng, rng.randint(1, 5), rng.choice([1, 1, 2, 3]))
        shuffle_seed = rng.choice([None, seed])
        shuffles = random.Random(seed)
        cache = PagedKVCache(1, 1, plans.block_size, 1, 1)
        recorder = Told()
        runner = PagedModelRunner(
            MODEL, cache, None, BatchState(2, 400, SamplingColumns(), [recorder], plans.num_groups),
            Sampler(30), compose=layout_of, shuffle_seed=shuffle_seed,
        )  # fmt: skip
        for step in range(25):
            plan = plans.next()
            given = list(plan.starts())
            if shuffle_seed is not None and given:
                given = shuffles.sample(given, len(given))
            ordered = order(dict.fromkeys(given), plan)
            try:
                check_batch(runner, plan, plans, lambda _, ordered=ordered: ordered)
                recorder.check(runner.state, plans)
            except BaseException as error:
                error.args = (f"seed {seed}, step {step}: {error}",)
                raise
            state = runner.state
            sampled = plans.sample() if rng.random() < 0.3 else {}
            rows = state.rows_of(sampled)
            state.num_tokens[rows] = state.write_tokens(
                rows, state.num_tokens[rows], list(sampled.values())
            )
            check_state(state, plans)


def test_a_plugin_that_could_not_be_made_is_made_for_the_next_request() -> None:
    """Else a grammar would constrain nothing after a step that failed."""
    made = [Told()]

    def make() -> RunnerPlugin:
        if made:
            return made.pop()
        raise MemoryError

    state = BatchState(2, 4, SamplingColumns(), late={"told": make})
    new = NewRequestData("a", [1], SamplingParams(), 0, ([1],))
    new.features["told"] = ["a"]
    told = made.pop()
    with pytest.raises(MemoryError):
        state.admit(new)
    state.reset()
    made.append(told)
    state.admit(new)
    assert told in state.plugins
