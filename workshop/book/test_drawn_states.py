"""A drawing of a state agrees with the classes: ids, counts, colours, orders."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch

import mixed_attention
import prefill_first_runs
from batch_layout import Queries
from block_delta import PagedRunnerState
from block_pool import BlockPool
from bounded_loops import as_long_as
from common.features.adapters.adapter_columns import ordered
from common.features.adapters.adapter_files import LowRank
from common.features.adapters.adapter_slots import Addition
from common.features.grammars.grammar_masks import GrammarMasks
from common.features.grammars.lark_text import compile_source
from common.features.grammars.vocabulary import Vocabulary, tokenizer_of
from common.models.rows_by_owner import in_order
from common.sampling.runner_plugin import UploadBuffer
from common.sampling.sampling_constraints import forbid
from exact_law import step_laws
from fcfs_scheduler import FCFSScheduler
from grammars import Choice, source_of
from grouped_kv_memory import GroupedKVMemory
from grouped_prefix_cache import GroupedPrefixCache
from kv_cache_manager import KVCacheManager
from mixed_batch import MixedMetadata, compose
from prefill_first_scheduler import PrefillFirstScheduler
from prefix_cache_local import compute_hash_chain
from radix_cache import RadixCache
from radix_words import TreeRig
from rejection_sampler import rejection_sample
from request import Request, RequestStatus
from scheduler import Scheduler
from scheduler_interface import StepOutput
from scheduler_steps import SchedulerLoop, make_memory, preempted_ids
from sglang_policies import DFSWeight
from spec_decode import verify_and_sample
from workshop.book.drawings import ROOT, drawings
from workshop.book.picture import Picture


def test_a_file_that_is_drawn_is_there() -> None:
    for path in drawings():
        for name in re.findall(r"[\w/]+\.py\b", path.read_text(encoding="utf-8")):
            assert any(ROOT.glob(f"[0-9c]*/**/{name}")), f"{path.name} shows {name}"


# -- chapter 1


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


# -- chapter 2


def test_position_to_slot() -> None:
    """Others have come and gone, and A is somewhere between."""
    picture, block_size, num_blocks, num_tokens, position = Picture("position_to_slot"), 4, 9, 10, 6
    manager = KVCacheManager(BlockPool(num_blocks), block_size)
    requests = {name: Request.from_tokens(name, [0] * 40) for name in "ABCDEFG"}
    sizes = ("C", 4), ("B", 4), ("D", 8), ("E", 4), ("D", 12), ("F", 4), ("G", 4)
    for name, size in sizes:
        assert manager.allocate_slots(requests[name], size)
    for name in "FBEG":
        manager.free(requests[name])
    requests["A"].num_computed_tokens = 0
    assert manager.allocate_slots(requests["A"], num_tokens)
    owners = {block: name for name in "ACD" for block in manager.get_block_ids(name)}
    table, slots = manager.get_block_ids("A"), manager.slot_mapping("A", 0, num_tokens)
    index, offset = divmod(position, block_size)

    key, here = picture.key(), "prompt"
    of_a, empty, others = key["A's"], key["A's, not written"], key["others'"]
    fills = [here if p == position else of_a for p in range(num_tokens)]
    assert picture.shown("positions") == [(fill, str(p)) for p, fill in enumerate(fills)]
    fills = [here if i == index else of_a for i in range(len(table))]
    assert picture.shown("table") == list(zip(fills, map(str, table), strict=True))
    written = {slot: of_a for slot in slots} | {slots[position]: here}
    by_owner = {"A": empty, "": "paper"}
    memory = [
        written.get(slot, by_owner.get(owners.get(slot // block_size, ""), others))
        for slot in range(num_blocks * block_size)
    ]
    assert picture.shown("memory") == [(fill, "") for fill in memory]
    assert picture.texts("blocks") == [str(block) for block in range(num_blocks)]
    assert picture.texts("owners") == ["never"] + [
        owners.get(block, "free") for block in range(1, num_blocks)
    ]
    assert picture.texts("positions")[-1] == f"{position} // {block_size} = {index}"
    assert picture.texts("table")[-1] == f"table[{index}] = {table[index]}"
    sums = f"{table[index] * block_size} + {offset} = {slots[position]}"
    assert f"slot = {table[index]} * 4 + {position} % 4 = {sums}" in picture.texts()


def test_window() -> None:
    picture, block_size, window, num_blocks = Picture("window"), 4, 6, 9
    steps = ((0, 4), (4, 8), (8, 10), (10, 11), (11, 12), (12, 13), (13, 14))
    key = picture.key()
    pool = BlockPool(num_blocks + 1)
    blocks = pool.allocate(num_blocks)
    assert blocks is not None
    for number in (5, 9, 3, 8):  # in this order they are handed out again
        pool.free([blocks[number - 1]])
    memory, request = GroupedKVMemory(pool, block_size, [window], 4), Request.from_tokens("A", [0])
    for number, (start, stop) in enumerate(steps):
        request.num_computed_tokens = start
        assert memory.allocate_slots(request, stop - start)
        table, cells = memory.get_block_ids("A"), list[tuple[str, str]]()
        for position in range(len(table) * block_size):
            is_seen = position > start - window
            meaning = "seen by the first" if is_seen else "held, not seen"
            meaning = "computed" if position >= start else meaning
            meaning = "not written" if position >= stop else meaning
            meaning = meaning if table[position // block_size] else "given up"
            is_empty = meaning in ("not written", "given up")
            cells.append((key[meaning], "" if is_empty else str(position)))
        assert picture.shown(f"step-{number}") == cells
        span = f"{start}-{stop - 1}" if stop - start > 1 else f"{start}"
        assert picture.texts(f"step-{number}") == [span]
        assert picture.texts(f"table-{number}") == [" ".join(str(b or "-") for b in table)]


# -- chapter 3


def test_groups_hit() -> None:
    picture, block_size, windows, there = Picture("groups_hit"), 4, (None, 6), ("xxx-", "x-xx")
    key = picture.key()
    cache = GroupedPrefixCache(BlockPool(9), block_size, windows)
    chain, blocks = compute_hash_chain(range(16), block_size), iter(cache.pool.blocks[1:])
    for group, cached_here in enumerate(there):
        for index, is_there in enumerate(cached_here):
            if is_there == "x":
                cache.publish(group, chain, index, next(blocks))
    hashes, turn, limit, length = [name for name, _ in chain], 0, 4, 0
    while turn < 2 or limit != length:  # until all agree
        group, limit = turn % 2, len(hashes)
        length = cache._longest_in(group, hashes)
        hashes = hashes[:length]
        first = 0 if windows[group] is None else max(0, length - 2)
        cells = []
        for index in range(4):
            is_there = "there" if there[group][index] == "x" else "gone"
            meaning = "there, and seen from its end" if first <= index < length else is_there
            cells.append((key[meaning], f"{index * block_size}-{index * block_size + 3}"))
        name = f"turn-{turn}"
        assert picture.shown(name) == cells
        texts = picture.texts(name)
        assert (texts[0], texts[-1]) == (f"group {group}", f"says {length * block_size} tokens")
        cuts = [
            sum(cell.x < x for cell in picture.cells(name)) for (x, _), *_ in picture.lines(name)
        ]
        assert cuts == ([limit] if limit < 4 else [])
        turn += 1
    assert len(hashes) == cache.longest_hit(chain)


def test_radix_split() -> None:
    """A letter is a page, as in `radix_words.py`."""
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


def test_radix_tree() -> None:
    """Its tokens are words."""
    system, page = "You are a helpful assistant .", "What is a page ? The same ."
    block = "What is a block ? Sixteen tokens ."
    texts = [f"{system} {block}", f"{system} {page}", f"{system} Say hello in French : bonjour"]
    for name, sign in (("add", "+"), ("mul", "*")):
        texts.append(f"Complete the code : def {name} ( a , b ) : return a {sign} b")
    texts.append(f"{system} {block} Why sixteen ?")
    words = list(dict.fromkeys(" ".join(texts).split()))
    cache = RadixCache(page_size=1, num_pages=100)
    for text in texts:
        last = cache.cache_computed_blocks([words.index(word) for word in text.split()])
    cache.touch(last)

    picture = Picture("radix_tree")
    key = picture.key()
    nodes, edges = {"root": "paper"}, set()
    for node in cache.tree.nodes():
        if not node.is_root:
            name, above = (
                "root" if n.is_root else " ".join(words[token] for token in n.key)
                for n in (node, node.above)
            )
            nodes[name] = key["in use" if node.lock_ref else "evictable"]
            edges.add((above, name))
    cells = picture.cells("nodes")
    assert {cell.text.replace("\n", " "): cell.fill for cell in cells} == nodes
    assert len(cells) == len(nodes)
    ends = [_boxes_at(line, cells) for line in picture.lines("edges")]
    assert {(a.replace("\n", " "), b.replace("\n", " ")) for a, b in ends} == edges
    free = cache.num_evictable_blocks
    counts = f"{cache.num_cached_blocks} tokens cached, {cache.num_cached_blocks - free} in use"
    assert f"Six requests: {counts}, {free} evictable" in picture.texts()


def _boxes_at(line: list, cells: Sequence) -> tuple[str, str]:
    """Where a line begins and ends."""
    start, stop = ([c.text for c in cells if c.holds(point)] for point in (line[0], line[-1]))
    assert len(start) == len(stop) == 1, line
    return start[0], stop[0]


def test_dfs_weight() -> None:
    """The example of `DFSWeight`'s docstring, ordered by it."""
    picture = Picture("dfs_weight")
    ways = {"r1": "D", "r2": "A", "r3": "AB", "r4": "ABC", "r5": "D"}
    blocks = {letter: number for number, letter in enumerate("ABCD", 1)}
    requests = [Request.from_tokens(name, list(range(40))) for name in ways]
    policy = DFSWeight(
        lambda request: [blocks[letter] for letter in ways[request.request_id]],
        block_size=4,
        min_cached=0,
    )
    weights = [f"{letter}: {sum(letter in way for way in ways.values())}" for letter in blocks]
    assert picture.labels("tree") == ["root", *weights]
    cells = picture.cells("tree")
    edges = {_boxes_at(line, cells) for line in picture.lines("edges")}
    assert edges == {("root", "A: 3"), ("root", "D: 2"), ("A: 3", "B: 2"), ("B: 2", "C: 1")}
    for letter in blocks:
        ends = [name for name, way in ways.items() if way[-1] == letter]
        assert picture.labels(f"ends-{letter}") == ends
    assert picture.labels("arrival") == list(ways)
    assert picture.labels("service") == [r.request_id for r in policy.order(requests)]


# -- chapter 4


def make_loop(num_blocks: int, kind: type = Scheduler, **options) -> SchedulerLoop:
    return SchedulerLoop(kind(kv_memory=make_memory(None, num_blocks, 4), **options))


@pytest.mark.parametrize(
    ("group", "options"), [("filled", {"watermark": 0.0}), ("reserved", {"reserve_all": True})]
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


def test_starvation() -> None:
    """A new request in every step; points are steps and output tokens of the first."""
    picture, num_steps = Picture("starvation"), 24
    kinds = [(Scheduler, {})]
    kinds += [(PrefillFirstScheduler, {"max_consecutive_prefills": limit}) for limit in (3, None)]
    for (kind, options), line, label in zip(
        kinds, picture.lines("curves"), picture.texts("labels"), strict=True
    ):
        loop = make_loop(400, kind, max_num_seqs=100, max_num_batched_tokens=100, **options)
        first, counts = loop.add("first", 8, 40), []
        for number in range(num_steps):
            loop.add(f"n{number}", 8, 40)
            loop.step()
            counts.append(first.num_output_tokens)
        after = {int(step): count for step, count in line}  # the last of a step counts
        drawn = [after[max(s for s in after if s <= step)] for step in range(1, num_steps + 1)]
        assert drawn == counts
        assert label.endswith(f": {counts[-1]}")


def test_step_budget() -> None:
    """Three requests decode, one comes in, and one does not fit."""
    picture, budget = Picture("step_budget"), 16
    key, loop = picture.key(), make_loop(40, max_num_seqs=8, max_num_batched_tokens=budget)
    for name in "abc":
        loop.add(name, 5, 9)
        loop.step()
    loop.add("d", 7, 9)
    loop.add("e", 9, 9)
    plan = loop.schedule()
    cells = [
        (key["decode" if num_tokens == 1 else "prompt"], name)
        for name, num_tokens in sorted(plan.num_scheduled_tokens.items())
        for _ in range(num_tokens)
    ]
    num_budget = budget - plan.total_num_scheduled_tokens
    assert picture.shown("budget") == cells + [(key["not used"], "")] * num_budget
    assert plan.admission_stop is not None
    reason, name = plan.admission_stop
    texts = picture.texts()
    assert (
        f'admission_stop = ("{reason}", "{name}")' in texts and f"left over: {num_budget}" in texts
    )


def test_mixed_adapters() -> None:
    """The example of `beyond/ADAPTERS.md`; W is the identity."""
    rows = [((1, 2), "a"), ((4, 0), "a"), ((5, 5), ""), ((1, 2), "b"), ((0, 9), ""), ((0, 1), "a")]
    matrices = {"a": ((1, 1), (2, 0)), "b": ((0, 1), (1, 1))}
    addition = Addition(torch.eye(2), ["W"], [2], 1 + len(matrices), 1)
    for slot, (a, b) in enumerate(matrices.values(), 1):
        addition.fill(slot, {"W": LowRank(torch.tensor([a]), torch.tensor([b]).T)})
    slots = [["", *matrices].index(name) for _, name in rows]
    found = ordered(np.array(slots), buffer := UploadBuffer(torch.device("cpu")))
    buffer.send()
    x = torch.tensor([row for row, _ in rows], dtype=torch.float32)
    y, by_adapter = addition.add(found(), x, x.clone()), found()
    assert by_adapter.order is not None

    picture = Picture("mixed_adapters")
    key = picture.key()
    fills = {"a": key["adapter a"], "b": key["adapter b"], "": key["none"]}
    cells = [(fills[name], f"({a},{b})") for (a, b), name in rows]
    assert picture.shown("rows") == cells
    segments = [(start, stop) for _, start, stop in by_adapter.segments]
    order = [by_adapter.order.tolist()[start:stop] for start, stop in segments]
    assert picture.shown("ordered") == [cells[row] for part in order for row in part]
    sums = [(fill, f"({a:g},{b:g})") for (fill, _), (a, b) in zip(cells, y.tolist(), strict=True)]
    assert picture.shown("sums") == sums


def test_grammar_mask() -> None:
    picture, texts, so_far = Picture("grammar_mask"), ["yes", "no", "none"], "no"
    tokens = picture.labels("token")
    token_bytes = tuple(token.strip('"').encode() for token in tokens[:-1])
    vocabulary = Vocabulary((*token_bytes, b""), (len(token_bytes),))
    compiled = compile_source(source_of(Choice(texts)), tokenizer_of(vocabulary))
    bits = np.zeros((2, 1), dtype=np.int32)
    GrammarMasks(vocabulary).match(compiled).fill(bits, 0, [token_bytes.index(so_far.encode())])
    is_allowed = [bool(bits[1, 0] >> i & 1) for i in range(len(tokens))]
    fills = ["decode-75" if allowed else "paper" for allowed in is_allowed]
    assert picture.shown("bit") == [(f, str(int(a))) for f, a in zip(fills, is_allowed)]
    logits = [float(text.replace("−", "-")) for text in picture.labels("logit")]
    after = forbid(torch.tensor([logits]), torch.tensor([0]), torch.from_numpy(bits[1:]))[0]
    drawn = [float(x.replace("−", "-").replace("∞", "inf")) for x in picture.labels("logit-masked")]
    assert torch.equal(torch.tensor(drawn), after)
    assert [fill for fill, _ in picture.shown("logit-masked")] == fills
    best = [tokens[int(row.argmax())] for row in (torch.tensor(logits), after)]
    assert f"the highest: {best[0]} before, {best[1]} after" in picture.texts()

    nodes = {f'"{text[:i]}"' for text in texts for i in range(len(text) + 1)}
    labels = picture.labels("tree")
    assert set(labels) == nodes | {"EOS"} and labels.count("EOS") == len(texts)
    allowed = {token for token, allowed in zip(tokens, is_allowed) if allowed}
    assert set(picture.texts("next")) == allowed - {"EOS"}
    cells = [cell for cell in picture.cells("tree") if cell.text == f'"{so_far}"']
    ends = [line[-1] for line in picture.lines("tree") if cells[0].holds(line[0])]
    reached = [cell.text for cell in picture.cells("tree") if any(cell.holds(end) for end in ends)]
    assert reached == ["EOS"]


def test_prefill_first_states() -> None:
    """An arrow for each two kinds of steps that follow each other; random runs find them. Nothing
    after nothing is not drawn."""
    picture = Picture("prefill_first_states")
    cells = picture.cells("steps")
    kinds = {cell.text: cell.text.partition("\n")[0] for cell in cells} | {"nothing to do": ""}
    drawn = [_boxes_at(line, cells) for line in picture.lines("steps")]
    transitions = prefill_first_runs.mode_transitions(mixing=False) - {("", "")}
    assert sorted((kinds[a], kinds[b]) for a, b in drawn) == sorted(transitions)


def test_next_batch_says_the_default() -> None:
    loop = make_loop(10, PrefillFirstScheduler)
    (caption,) = (text for text in Picture("next_batch").labels("boxes") if "in a row" in text)
    assert f"{loop.scheduler.max_consecutive_prefills} prefills in a row" in caption


def test_three_batches() -> None:
    picture, new, old = Picture("three_batches"), "prompt-85", "decode-55"
    for number, now in enumerate(prefill_first_runs.six_iterations(), 1):
        spans = [f"{r} {a}-{b}" if a < b else f"{r} {a}" for r, (a, b) in now.computed.items()]
        fill = new if now.mode == "EXTEND" else old
        cells = [("paper", ""), *(("soft", name) for name in now.arrived)]
        cells += [(new, name) for name in now.last_batch]
        cells += [(old, name) for name in now.running_batch]
        cells += [(fill, "\n".join([now.mode, *spans])), *(("soft", name) for name in now.ended)]
        group = f"iteration-{number}"
        assert picture.shown(group) == cells
        goes_on = [f"{now.chunked_req} goes on"] if now.chunked_req else []
        assert picture.texts(group) == [str(number), *goes_on]
        chips = picture.cells(group)[1:]
        joined = [_boxes_at(line, chips)[0] for line in picture.lines(group)]
        assert joined == [name for name in now.last_batch if name in now.joined]


@pytest.mark.parametrize(("group", "mixing"), [("chunks", False), ("mixed", True)])
def test_page_chunks(group: str, mixing: bool) -> None:
    picture, runs = Picture("page_chunks"), prefill_first_runs.six_iterations(mixing)
    spans = [now.computed["c"] for now in runs if "c" in now.computed]
    sizes = [b - a + 1 for a, b in spans if b < 14]
    labels = [f"chunk {number}: {size}" for number, size in enumerate(sizes, 1)]
    assert picture.labels(group) == labels
    positions = picture.cells("prompt")
    for (a, b), cell in zip(spans, picture.cells(group)):
        under = [p.text for p in positions if cell.holds((p.x + p.width / 2, cell.y))]
        assert under == [str(position) for position in range(a, b + 1)]
    size = prefill_first_runs.PAGE_SIZE
    starts = {p.text for p in positions for (x, _), *_ in picture.lines("pages") if p.x == x}
    assert starts == {str(position) for position in range(0, 14, size)}


@pytest.mark.parametrize("ratio", [0.5, 0.1])
def test_budget_bar(ratio: float) -> None:
    picture, budget = Picture("budget_bar"), prefill_first_runs.worked_budget(ratio)
    key = picture.key()
    assert f"new_token_ratio = {ratio}" in picture.texts()
    for line in budget.lines:
        bars = {"pages in use": line.in_use, "expected outputs": line.expected, "free": line.free}
        *cells, needs = picture.cells(f"{line.request_id}-at-{ratio}")
        for cell, (meaning, amount) in zip(cells, bars.items(), strict=True):
            assert cell.fill == key[meaning]
            assert cell.width / 12.4 == pytest.approx(amount, abs=0.01)
            assert not cell.text or float(cell.text) == pytest.approx(amount)
        assert (needs.fill, needs.text) == (key["what it would need"], str(line.needs))
        assert needs.x == pytest.approx(cells[-1].x, abs=0.1)
        free = f"{round(line.free, 1):g}"
        fits = f"{line.needs} <= {free}: in" if line.result == "CONTINUE" else ""
        assert picture.texts(f"{line.request_id}-at-{ratio}") == [
            line.request_id,
            fits or f"{line.needs} > {free}: waits",
        ]


def test_new_token_ratio() -> None:
    """The points are steps and shares."""
    picture, run = Picture("new_token_ratio"), prefill_first_runs.ratio_run()
    for group, values in (("ratios", run.ratios), ("usage", run.usage)):
        xs, ys = zip(*picture.lines(group)[0], strict=True)
        assert np.allclose(np.interp(range(len(values)), xs, ys), values, atol=1e-3), group
    jumps = [(n, names[0], run.ratios[n]) for n, names in enumerate(run.retracted) if names]
    labels = [f"{name} retracted: {ratio:.2f}" for _, name, ratio in jumps]
    assert picture.texts("retracted") == labels
    steps = [(x - 60) / 750 * len(run.ratios) for (x, _), *_ in picture.lines("retracted")]
    assert steps == pytest.approx([step for step, *_ in jumps], abs=0.1)


def test_retraction() -> None:
    picture, now = Picture("retraction"), prefill_first_runs.one_retraction()
    (victim,) = now.retracted
    for group, holders in (("before", now.before), ("after", now.after)):
        owner = {block: holder.name for holder in holders for block in holder.blocks}
        labels = [owner.get(block, "") for block in range(1, now.num_pages + 1)]
        fills = {"": "paper", victim: "preempted-70"}
        cells = [(fills.get(name, "decode-55"), name) for name in labels]
        assert picture.shown(group) == cells
    order = sorted(now.before, key=lambda h: (-h.num_outputs, h.num_prompt))
    assert picture.labels("order") == [
        f"{h.name}\n{h.num_outputs} outputs\n{h.num_prompt} prompt tokens" for h in order
    ]
    assert order[-1].name == victim
    asks = [h for h in now.before if h.num_computed % prefill_first_runs.PAGE_SIZE == 0]
    texts = [" ".join(text.split()) for text in picture.texts()]
    position = f"{asks[0].name}: position {asks[0].num_computed}"
    assert len(asks) == 1 and any(text.startswith(position) for text in texts)
    num_free = now.num_pages - sum(len(h.blocks) for h in now.after)
    assert f"{victim} waits, in front; {num_free} pages are free" in texts
    outputs = " + ".join(f"({h.num_outputs} + 20)" for h in now.after)
    limit, value = [h.max_tokens for h in now.after], sum(h.num_outputs + 20 for h in now.after)
    total = " + ".join(map(str, limit))
    assert f"{outputs} over {total} = {value / sum(limit):.2f}: at most 1" in texts
    assert f"new_token_ratio: {now.ratio_before:g} before, {now.ratio_after:g} now" in texts


# -- chapter 5


def test_accept_and_residual() -> None:
    """Chances that each token comes out first, as an accepted draft token and drawn after a
    rejection: exact, asked of the chapter's verification."""
    picture = Picture("accept_and_residual")
    texts = picture.texts("chances")
    p, q = ([float(x[2:]) for x in texts if x.startswith(f"{name} ")] for name in "pq")
    p, q = (torch.tensor(values, dtype=torch.float64) for values in (p, q))
    laws = step_laws(rejection_sample, lambda *_: p, lambda *_: q, [()], 1)[()]
    accepted, drawn = [0.0] * len(p), [0.0] * len(p)
    for run, chance in laws.items():
        (accepted if len(run) == 2 else drawn)[run[0]] += chance
    above = (q - p).clamp(min=0).tolist()
    starts = {"accepted": [0.0] * len(p), "residual": accepted, "q": p.tolist()}
    for group, heights in (("accepted", accepted), ("residual", drawn), ("q", above)):
        cells = {int(cell.x): cell for cell in picture.cells(group)}
        for token, height in enumerate(heights):
            assert (token in cells) == (height > 1e-4), (group, token)
            if token in cells:
                assert cells[token].height == pytest.approx(height, abs=1e-4)
                assert cells[token].y == pytest.approx(starts[group][token], abs=1e-4)
    assert [y for (_, y), _ in picture.lines("p")] == pytest.approx(p.tolist())
    note = f"A draft token is accepted in {sum(accepted):.0%} of all cases."
    assert any(text.startswith(note) for text in picture.texts())


class ScriptedLM:
    """Says the next word of a sentence, whatever it is asked."""

    def __init__(self, after: dict[tuple[int, ...], int], vocab_size: int) -> None:
        self.after, self.vocab_size = after, vocab_size

    def get_logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        logits = torch.zeros(len(token_ids), self.vocab_size, dtype=torch.float64)
        for i in range(len(token_ids)):
            logits[i, self.after[tuple(token_ids[: i + 1])]] = 1
        return logits


def test_which_row_verifies() -> None:
    picture = Picture("which_row_verifies")
    fed, rows = picture.labels("fed"), picture.labels("rows")
    context, drafts = fed[: len(fed) - len(rows) + 1], fed[len(fed) - len(rows) + 1 :]
    outputs = [*fed[1 : len(context)], *rows]  # after each token that is fed
    words = list(dict.fromkeys(fed + rows))
    ids = [words.index(word) for word in fed]
    after = {tuple(ids[: n + 1]): words.index(word) for n, word in enumerate(outputs)}
    tokens, num_accepted = verify_and_sample(
        ScriptedLM(after, len(words)), ids[: len(context)], ids[len(context) :], temperature=0.0
    )
    fills = ["decode-50" if i <= num_accepted else "paper" for i in range(len(rows))]
    assert picture.shown("rows") == list(zip(fills, rows, strict=True))
    verdicts = [
        ("accepted", f"{word}: right") if i < num_accepted else ("rejected", f"{word}: wrong")
        for i, word in enumerate(drafts)
    ]
    assert num_accepted == len(drafts) - 1, "else some are not reached"
    assert picture.shown("judged") == verdicts
    fills = ["accepted"] * num_accepted + ["decode"]
    assert picture.shown("out") == [(f, words[t]) for f, t in zip(fills, tokens, strict=True)]


# -- chapter 6


def test_mixed_mask() -> None:
    """In the order of the plan: first position, tokens of this step, rows of logits."""
    step = {"A": (0, 4, 1), "E": (2, 3, 0), "B": (5, 1, 1), "C": (2, 1, 1)}
    columns = (np.array(column) for column in zip(*step.values(), strict=True))
    state = PagedRunnerState(len(step), 4)
    state.widen(16)
    layout = compose(state, Queries(np.arange(len(step)), *columns), 4)
    batch = layout.on(torch.device("cpu"))
    (metadata,) = batch.attention
    assert isinstance(metadata, MixedMetadata)

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


def test_online_softmax() -> None:
    """One query of size 1, so that a key is a score. Chapter 6 keeps the logarithm of the sum; the
    sum relative to the largest score is made of it here."""
    picture, running, largest = Picture("online_softmax"), None, -math.inf
    seen: list[list[float]] = [[], []]
    for number in (1, 2, 3):
        *cells, box = picture.labels(f"tile-{number}")
        scores, values = [[float(x) for x in part] for part in (cells[:2], cells[2:])]
        keys, held = (
            torch.tensor(row, dtype=torch.float64).reshape(1, 1, 2, 1) for row in (scores, values)
        )
        query = torch.ones(1, 1, 1, 1, dtype=torch.float64)
        part = mixed_attention._attend_tile(query, keys, held, 1.0, False)
        if running is None:
            running = part
        else:
            running.merge(part)
        before, largest = largest, max(largest, *scores)
        total = math.exp(float(running.lse) - largest)
        assert box == f"m = {largest:g}\nl = {total:.3f}\no = {float(running.output):.2f}"
        if number > 1:
            assert picture.texts("kept")[number - 2] == f"l x {math.exp(before - largest):.3f}"
        seen[0] += scores
        seen[1] += values
    scores, values = (torch.tensor(row, dtype=torch.float64) for row in seen)
    whole = float(scores.softmax(0) @ values)
    assert f"All six scores at once give the same: {whole:.2f}" in picture.texts()


# -- the engine


def test_experts_read() -> None:
    """The first three rows are those of the page's example."""
    picture, num_experts, rng = Picture("experts_read"), 8, random.Random(0)
    key = picture.key()
    choices = [(2, 5), (7, 2), (5, 2)]
    choices += [tuple(rng.sample(range(num_experts), 2)) for _ in range(13)]
    for num_rows in (1, 3, 16):
        order = in_order(np.array(choices[:num_rows]).flatten())[1]
        segments = {expert: str(stop - start) for expert, start, stop in order}
        meanings = ["read in this step" if e in segments else "not read" for e in range(8)]
        cells = [(key[m], segments.get(e, "")) for e, m in enumerate(meanings)]
        assert picture.shown(f"rows-{num_rows}") == cells
        assert picture.texts(f"rows-{num_rows}")[-1] == f"{len(segments)} read"


def test_every_status_of_a_request_is_drawn_once() -> None:
    picture, drawn = Picture("request_life"), list[str]()
    for group in ("waits", "ended"):
        ((_, *statuses),) = (text.split("\n") for text in picture.labels(group))
        drawn += statuses
    assert picture.labels("runs") == ["runs"] and picture.labels("preempted") == ["preempted"]
    names = [status.name.removeprefix("FINISHED_") for status in RequestStatus]
    assert sorted([*drawn, "RUNNING", "PREEMPTED"]) == sorted(names)
