"""Exhibits of chapter 2: blocks, block tables, and the slot of a token."""

from __future__ import annotations

from workshop.practice.examples.example_tools import request, say, steps


def larger_than_the_memory() -> str:
    from block_pool import BlockPool
    from kv_cache_manager import KVCacheManager
    from paged_fcfs_scheduler import PagedFCFSScheduler

    scheduler = PagedFCFSScheduler(KVCacheManager(BlockPool(5), block_size=4))
    lines = []
    for name, num_prompt in (("large", 30), ("small", 3)):
        try:
            scheduler.add_request(request(name, num_prompt))
        except ValueError:
            lines.append(f"{name}: refused immediately, with a reason")
    list(steps(scheduler, most=200))
    lines += [f"{name}: waits after 200 steps" for name in scheduler.requests]
    return "\n".join(lines)


def freed_twice() -> str:
    from block_pool import BlockPool

    pool = BlockPool(5)
    shared = (pool.allocate(1) or [])[0]
    pool.touch([shared])  # two tables name it
    error = "accepted"
    try:
        pool.free([shared, shared])  # one of them ends, and by mistake frees the block twice
    except ValueError:
        error = "refused"
    given = [block.block_id for block in pool.allocate(pool.num_free_blocks) or []]
    return (
        f"releasing a block twice in one call: {error}\n"
        f"block {shared.block_id} is still read by another request; free for others: {given}"
    )


def one_position_too_late() -> str:
    return f"'The quick brown fox' continues: {say(['The quick brown fox'])[0]}"


def one_counter_for_the_batch() -> str:
    first, second = say(["Once upon a time", "def fibonacci(n):"])
    return f"first  of the batch: {first}\nsecond of the batch: {second}"


def the_last_steps_tensors() -> str:
    import numpy as np
    import torch

    from batch_layout import all_to_device

    cpu = torch.device("cpu")
    (one,) = all_to_device(cpu, np.array([11, 12, 13]))
    before = one.tolist()
    all_to_device(cpu, np.array([21, 22, 23]))
    return f"step 1 was laid out as {before}; when step 2 is laid out it reads {one.tolist()}"
