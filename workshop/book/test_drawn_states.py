"""A drawing of a state agrees with the classes: ids, counts, colours, orders."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from batch_layout import Queries
from block_delta import PagedRunnerState
from block_pool import BlockPool
from bounded_loops import as_long_as
from cache_words import TreeRig
from exact_law import step_laws
from fcfs_scheduler import FCFSScheduler
from kv_cache_manager import KVCacheManager
from mixed_batch import compose
from rejection_sampler import rejection_sample
from request import Request
from scheduler import Scheduler
from scheduler_interface import StepOutput
from scheduler_steps import SchedulerLoop, make_memory, preempted_ids
from workshop.book.tests.picture import Picture


def test_two_counters() -> None:
    picture, prompt, output = Picture("two_counters"), [11, 12, 13, 14, 15], [21, 22, 23]
    key = picture.key()
    scheduler = FCFSScheduler()
    request = Request.from_tokens("a", prompt, max_new_tokens=len(output))
    scheduler.add_request(request)
    label = "it waits"
    for row in range(3):
        if row:
            plan = scheduler.schedule()
            label = f"step {row} computed {plan.num_scheduled_tokens['a']}"
            scheduler.update_from_output(plan, StepOutput({"a": [output[row - 1]]}))
        known, computed = request.num_tokens, request.num_computed_tokens
        cells = [(key["prompt token"], str(token)) for token in prompt]
        cells += [(key["output token"], str(token)) for token in output]
        cells[known:] = [(key["not known yet"], "?")] * (len(cells) - known)
        assert picture.shown(f"row-{row}") == cells
        counts = [f"num_tokens = {known}", f"num_computed_tokens = {computed}"]
        assert picture.texts(f"row-{row}") == [label, *counts, f"{known - computed} uncomputed"]


def test_position_to_slot() -> None:
    picture, block_size, num_blocks, num_tokens, position = Picture("position_to_slot"), 4, 9, 10, 6
    manager = KVCacheManager(BlockPool(num_blocks), block_size)
    requests = {name: Request.from_tokens(name, [0] * 40) for name in "ABCDEFG"}
    for name, size in zip("CBDEDFG", (4, 4, 8, 4, 12, 4, 4)):  # others come and go
        assert manager.allocate_slots(requests[name], size)
    for name in "FBEG":
        manager.free(requests[name])
    requests["A"].num_computed_tokens = 0
    assert manager.allocate_slots(requests["A"], num_tokens)
    table, slots = manager.get_block_ids("A"), manager.slot_mapping("A", 0, num_tokens)
    index, offset = divmod(position, block_size)

    of_a, here = picture.key()["A's"], "prompt"
    marked = {"positions": (range(num_tokens), position), "table": (table, index)}
    for group, (numbers, chosen) in marked.items():
        fills = [here if i == chosen else of_a for i in range(len(numbers))]
        assert picture.shown(group) == list(zip(fills, map(str, numbers), strict=True))
    memory = [fill for fill, _ in picture.shown("memory")]
    written = {slot for slot, fill in enumerate(memory) if fill in (of_a, here)}
    assert written == {*slots} and memory[slots[position]] == here
    assert picture.texts("blocks") == [str(block) for block in range(num_blocks)]
    sums = f"{table[index] * block_size} + {offset} = {slots[position]}"
    assert f"slot = {table[index]} * 4 + {position} % 4 = {sums}" in picture.texts()


def test_radix_split() -> None:
    """A letter is a page, as in `cache_words.py`."""
    picture, rig = Picture("radix_split"), TreeRig(num_pages=7)
    key = picture.key()

    def compare(number: int, lost: dict[str, str]) -> None:
        cells, locks = [("paper", "root")], []
        nodes = rig.nodes()
        for path in sorted(nodes, key=lambda path: (path.count("."), path)):
            fill = key["in use" if nodes[path] else "cached, idle"]
            cells += [(fill, letter) for letter in path.rpartition(".")[2]]
            cells += [(key["evicted"], letter) for letter in lost.get(path, "")]
            locks.append(f"lock_ref {nodes[path]}")
        assert picture.shown(f"tree-{number}") == cells
        assert picture.texts(f"tree-{number}")[1:] == locks

    rig.warm("ABCD")
    compare(1, {})
    rig.hold("ABX")
    compare(2, {})
    before = set(rig.nodes())
    rig.cache.evict(1)
    (was,), (now,) = before - set(rig.nodes()), set(rig.nodes()) - before
    compare(3, {now: was.removeprefix(now)})


def make_loop(num_blocks: int, kind: type = Scheduler, **options) -> SchedulerLoop:
    return SchedulerLoop(kind(kv_memory=make_memory(None, num_blocks, 4), **options))


@pytest.mark.parametrize(
    ("group", "options"), [("filled", {"watermark": 0.0}), ("reserved", {"max_preemptions": 0})]
)
def test_preemption(group: str, options: dict) -> None:
    """Four requests of 6 tokens that generate 14 each. A cell is a block over some steps."""
    picture, num_blocks = Picture("preemption"), 12
    key, loop = picture.key(), make_loop(num_blocks, **options)
    for name in "abcd":
        loop.add(name, 6, 14)
    fills, went, number = {}, [], 0
    for number in as_long_as(loop.scheduler.has_unfinished_requests, 100):
        plan = loop.schedule()
        tables = {r: loop.scheduler.kv_memory.get_block_ids(r) for r in loop.scheduler.running}
        owners = {block: name for name, blocks in tables.items() for block in blocks}
        for block in range(num_blocks):
            fills[number, block] = key[owners.get(block + 1, "free")]
        went += [(number, name) for name in preempted_ids(plan)]
        loop.update(plan)
    drawn = {
        (int(cell.x) + step, int(cell.y)): cell.fill
        for cell in picture.cells(group)
        for step in range(int(cell.width))
    }
    assert drawn == fills
    steps = [int((cell.x - 100) // 24) for cell in picture.cells(f"{group}-preempted")]
    names = picture.texts(f"{group}-preempted")
    assert list(zip(steps, names, strict=True)) == went
    titles = [text for text in picture.texts() if text.endswith(" steps")]
    assert f"{number + 1} steps" in titles[group == "reserved"]


def test_accept_and_residual() -> None:
    """Chances that each token comes out first, as an accepted draft token and drawn after a
    rejection: exact, asked of the chapter's verification."""
    picture = Picture("accept_and_residual")
    texts = picture.texts("chances")
    p, q = ([float(x[2:]) for x in texts if x.startswith(f"{name} ")] for name in "pq")
    p, q = (torch.tensor(values, dtype=torch.float64) for values in (p, q))
    laws = step_laws(rejection_sample, lambda *_: p, lambda *_: q, [()], 1)[()]
    chances = {"accepted": [0.0] * len(p), "residual": [0.0] * len(p)}
    for run, chance in laws.items():
        chances["accepted" if len(run) == 2 else "residual"][run[0]] += chance
    for group, heights in chances.items():
        drawn = {int(cell.x): cell.height for cell in picture.cells(group)}
        seen = {token: height for token, height in enumerate(heights) if height > 1e-4}
        assert drawn == pytest.approx(seen, abs=1e-4), group
    note = f"A draft token is accepted in {sum(chances['accepted']):.0%} of all cases."
    assert any(text.startswith(note) for text in picture.texts())


def test_mixed_mask() -> None:
    """In the order of the plan: first position, tokens of this step, rows of logits."""
    step = {"A": (0, 4, 1), "E": (2, 3, 0), "B": (5, 1, 1), "C": (2, 1, 1)}
    columns = (np.array(column) for column in zip(*step.values(), strict=True))
    state = PagedRunnerState(len(step), 4)
    state.widen(16)
    layout = compose(state, Queries(np.arange(len(step)), *columns), 4)
    batch = layout.on(torch.device("cpu"))
    (metadata,) = batch.attention
    assert metadata.num_short is not None

    picture = Picture("mixed_mask")
    key = picture.key()
    names = [list(step)[i] for i in layout.order]
    assert picture.texts("requests") == [f"keys of {name}" for name in names]
    for i, (first, stop) in enumerate(pairwise(list(metadata.query_starts))):
        meaning = "a decode sees" if i < metadata.num_short else "a chunk sees"
        for row in range(first, stop):
            position = int(batch.positions[row])
            cells = [
                (key[meaning], str(p)) if p <= position else (key["later, masked"], "")
                for p in range(int(metadata.host_seq_lens[i]))
            ]
            assert picture.shown(f"row-{row}") == cells
            logits = ["logits"] if row in batch.logit_indices.tolist() else []
            assert picture.texts(f"row-{row}") == [f"{names[i]} at {position}", *logits]
