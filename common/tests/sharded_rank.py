"""What a rank does in a process of its own: the same steps as the others. It saves what it got.

The folder has a checkpoint for each case. A world is a set of processes that make one engine; each
process is in several, one after the other, and keeps the connections of all."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch.distributed import FileStore, PrefixStore

from common.features.adapters.adapter_slots import AdapterSlots, Ordered, StepAdapters
from common.models.collectives import CollectiveError, Collectives
from common.models.loader import load_model
from common.models.ranks import Ranks
from common.parallel.sharded_layers import vocab_parallel_embedding
from common.parallel.sharded_model import ShardedModel
from common.tests.paged_harness import PagedHarness

CPU = torch.device("cpu")
TIMEOUT_S = 120.0


@dataclass(slots=True)
class Communication:
    """What one rank has passed in: the whole tensor of an `all_reduce` or a `send`, its own part of
    an `all_gather`."""

    num_all_reduces: int = 0
    num_all_gathers: int = 0
    num_sends: int = 0
    num_bytes: int = 0


def count(collectives: Collectives) -> Communication:
    """The communication of this rank from now on."""
    counts = Communication()

    def counted(operation: Callable, field: str) -> Callable:
        def call(tensor: torch.Tensor) -> torch.Tensor | None:
            setattr(counts, field, getattr(counts, field) + 1)
            counts.num_bytes += tensor.nbytes
            return operation(tensor)

        return call

    if collectives.ranks.tensor_parallel_size > 1:
        collectives.all_reduce = counted(collectives.all_reduce, "num_all_reduces")
        collectives.all_gather = counted(collectives.all_gather, "num_all_gathers")
    collectives.send = counted(collectives.send, "num_sends")
    return counts


def load_sharded(path: Path, dtype: torch.dtype, collectives: Collectives) -> ShardedModel:
    model = load_model(path, dtype, make=partial(ShardedModel, collectives=collectives)).model
    assert isinstance(model, ShardedModel)
    return model


def run_steps(
    model: ShardedModel, collectives: Collectives, steps: list, **staged: object
) -> list[dict]:
    harness = PagedHarness(model, 3)
    found = []
    counted = ("all_reduce", "all_gather", "send")
    for work, logit_indices in steps:
        counts = count(collectives)
        num_tokens = sum(len(ids) for _, _, ids in work)
        inputs = None
        if not collectives.ranks.is_first_stage:
            shape = (num_tokens, model.config.hidden_size)
            inputs = collectives.receive(shape, model.embed_weight.dtype)
        output = harness.step(work, logit_indices, inputs, **staged)
        if not collectives.ranks.is_last_stage:
            collectives.send(output)
        for name in counted:
            collectives.__dict__.pop(name, None)
        found.append({"output": output.clone(), "said": asdict(counts)})
    return found


def run_case(folder: Path, name: str, plan: dict, collectives: Collectives) -> dict:
    steps = plan["steps"]
    others = [torch.float32, torch.bfloat16] if name in plan["in_every_dtype"] else []
    result: dict = {}
    for dtype in (torch.float64, *others):
        model = load_sharded(folder / name, dtype, collectives)
        result[str(dtype)] = run_steps(model, collectives, steps)
        if dtype is torch.float32:
            before = dict(model.named_weights())
            model.pack_weights()
            after = dict(model.named_weights())
            assert before.keys() == after.keys()
            assert all(torch.equal(before[n], after[n]) for n in before)
            result["packed"] = run_steps(model, collectives, steps)
    return result


def run_adapters(folder: Path, plan: dict, collectives: Collectives) -> dict:
    """Prompts in one step, by the directories of their adapters."""
    found = {}
    for name, prompts in plan["adapted"].items():
        model = load_sharded(folder / name, torch.float64, collectives)
        slots = AdapterSlots(model, len(prompts), 16)
        start = 0
        segments = []
        digests = [slots.load(directory) for directory in prompts]
        slot_of = slots.bring_in(digests)
        for digest, prompt in zip(digests, prompts.values()):
            segments.append((slot_of[digest], start, start := start + len(prompt)))
        rows = Ordered(None, segments)
        step = [(i, 0, prompt) for i, prompt in enumerate(prompts.values())], None
        staged = StepAdapters(slots, rows, rows)
        (found[name],) = run_steps(model, collectives, [step], adapter=staged)
    return found


def embedding_example(collectives: Collectives) -> dict:
    """A vocabulary of 10,000 on two ranks, and the tokens 123 and 6789."""
    whole = torch.randn(10_000, 8, generator=torch.Generator().manual_seed(0))
    tp_rank = collectives.ranks.tp_rank
    part = whole[5000 * tp_rank : 5000 * (tp_rank + 1)]
    ids = torch.tensor([123, 6789])
    found = vocab_parallel_embedding(ids, part, 5000 * tp_rank, collectives)
    return {"found": found, "wanted": whole[ids]}


def run_rank(folder: Path, plan: dict, rank: int) -> None:
    torch.set_num_threads(1)
    store = FileStore(str(folder / "store"), plan["num_processes"])
    results, worlds = {}, {}
    for name, (first, tp_size, num_stages, cases) in plan["worlds"].items():
        if not first <= rank < first + tp_size * num_stages:
            continue
        ranks = Ranks(tp_size, num_stages, rank - first)
        worlds[name] = Collectives.connect(ranks, PrefixStore(name, store), CPU, TIMEOUT_S)
        results[name] = {case: run_case(folder, case, plan, worlds[name]) for case in cases}
        results[name]["least"] = worlds[name].min_across(100 - ranks.rank)
        if (tp_size, num_stages) == (2, 1):
            results[name]["embedding"] = embedding_example(worlds[name])
    results["adapted"] = run_adapters(folder, plan, worlds["4 ranks"])
    results["late"] = late_and_gone(store, worlds["4 ranks"])
    torch.save(results, folder / f"{rank}.pt")
    worlds["4 ranks"].min_across(0)  # nobody leaves before everybody is done


def late_and_gone(store: FileStore, everybody: Collectives) -> dict:
    """A pause longer than the timeout is nothing; a rank that does not come, or is gone, is."""
    ranks = everybody.ranks
    timeout_s = 1.5
    late, gone = (
        Collectives.connect(ranks, PrefixStore(name, store), CPU, timeout_s)
        for name in ("late", "gone")
    )
    everybody.min_across(0)  # nobody has long to wait for the others
    late.all_reduce(torch.ones(2))
    time.sleep(1.5 * timeout_s)
    everybody.min_across(0)
    found: dict = {"after a pause": late.all_reduce(torch.ones(2)).tolist()}
    if ranks.rank == ranks.world_size - 1:
        gone.close()
        time.sleep(2.5 * timeout_s)
        return found
    for name, call in (("late", late.all_reduce), ("gone", gone.all_gather)):
        try:
            call(torch.ones(2))
        except CollectiveError as error:
            found[name] = str(error)
    return found
