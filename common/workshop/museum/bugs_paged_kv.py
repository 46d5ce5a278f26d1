"""Exhibits of chapter 2: blocks, tables, and where a token stands."""

from __future__ import annotations

from common.workshop.museum.exhibit import Exhibit, Guest, Workload
from common.workshop.museum.props import blocks, request, say, steps


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
            lines.append(f"{name}: refused at once, with a reason")
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
        pool.free([shared, shared])  # one of them ends, and a slip names the block twice
    except ValueError:
        error = "refused"
    given = [block.block_id for block in pool.allocate(pool.num_free_blocks) or []]
    return (
        f"releasing a block twice in one call: {error}\n"
        f"block {shared.block_id} is still read by another request; free for others: {given}"
    )


def one_position_too_late() -> str:
    return f"'The quick brown fox' goes on: {say(['The quick brown fox'])[0]}"


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


EXHIBITS = (
    Exhibit(
        trap=16,
        origin="nano-vllm #274 #277",
        title="A request that can never fit waits for ever",
        seen="A prompt larger than the whole KV memory was queued. The engine tried again at "
        "every step, or stopped with an assertion; everybody behind it waited too.",
        lesson="What can never be served is refused where it comes in, with the numbers in the "
        "message. A queue is for those who will get their turn.",
        demonstrate=larger_than_the_memory,
        wrong="large: waits after 200 steps\nsmall: waits after 200 steps",
        right="large: refused at once, with a reason",
        watch=Workload(
            look="Request b is larger than all the memory there is. Look at who waits behind it.",
            parts="step 1, arrived, b",
            guests=(
                Guest("a", "def f(x):", 12),
                Guest("b", blocks("abcdefghil"), 8, 1),
                Guest("c", "import os\n", 8, 3),
            ),
            config={"num_blocks": 10, "scheduler": "fcfs", "chunked_prefill": False},
        ),
    ),
    Exhibit(
        trap=10,
        origin="vLLM #42571",
        title="A block released twice in one call",
        seen="A list of blocks to release named one of them twice. It counted as two releases, "
        "the block was given to the next request while the first still read it, and both answers "
        "mixed.",
        lesson="Reference counts are only as good as the discipline of those who count down. "
        "Check the whole list before touching anything.",
        demonstrate=freed_twice,
        wrong="releasing a block twice in one call: accepted\n"
        "block 1 is still read by another request; free for others: [2, 3, 4, 1]",
        right="releasing a block twice in one call: refused\n"
        "block 1 is still read by another request; free for others: [2, 3, 4]",
        watch="No caller in this engine names a block twice; the check is for the one that will.",
    ),
    Exhibit(
        trap=29,
        origin="nano-vllm #67",
        title="Every new token stands one place too late",
        seen="Fluent, wrong text. Prompts were computed at their positions, and each decoded "
        "token at the number of known tokens instead of one less. Nothing crashes, no shape is "
        "wrong, and a small model sounds much the same.",
        lesson="Only an oracle sees it. Compare tokens with an implementation that nobody here "
        "wrote; never judge an engine by whether its text reads well.",
        demonstrate=one_position_too_late,
        wrong="'The quick brown fox' goes on: \" and the user can't be used to\\n    the user\"",
        right="'The quick brown fox' goes on: ' and fob.  If the fob is'",
        watch=Workload(
            look="The books are the same to the last block. Read the tokens from step 1 on.",
            parts="step 1, computed, a",
            guests=(
                Guest("a", "The quick brown fox", 12),
                Guest("b", "def f(x):", 10),
            ),
        ),
    ),
    Exhibit(
        trap=32,
        origin="mlx-lm #1805",
        title="One position counter for the whole batch",
        seen="Alone, every request was right. In a batch all of them stood where the first one "
        "did, so what a prompt was answered with depended on who else was served.",
        lesson="Test with requests of different lengths that arrive at different times. A batch "
        "of equals hides every mistake about whose counter it is.",
        demonstrate=one_counter_for_the_batch,
        wrong='first  of the batch: \' time time.time() is called.\\n        """\\n        if\'\n'
        "second of the batch: \"\\n        if fj = n.find(':')\\n        \"",
        right='first  of the batch: \' time time.time() is called.\\n        """\\n        if\'\n'
        "second of the batch: '\\n        return self.tk.call(self._w,'",
        watch=Workload(
            look="Request b comes when a is on its way. Read its tokens.",
            parts="step 6, computed, b",
            guests=(
                Guest("a", "Once upon a time", 12),
                Guest("b", "def fibonacci(n):", 12, 2),
            ),
        ),
    ),
    Exhibit(
        trap=34,
        origin="mini-sglang #58 #67 #103, vLLM #32799",
        title="A buffer is used again while it is still read",
        seen="The host kept one staging buffer for the inputs of a step. The copy to the device "
        "is asynchronous, so the next step was written into it before the copy had ended: now and "
        "then, under load, a request computed another one's tokens.",
        lesson="An asynchronous copy borrows its source until it is over. Fresh memory for each "
        "step costs little; a race costs a week.",
        demonstrate=the_last_steps_tensors,
        wrong="step 1 was laid out as [11, 12, 13]; when step 2 is laid out it reads [21, 22, 23]",
        right="step 1 was laid out as [11, 12, 13]; when step 2 is laid out it reads [11, 12, 13]",
        watch=Workload(
            look="The first step already reads what was laid out behind it.",
            parts="step 0, failed",
            guests=(
                Guest("a", "def f(x):", 6),
                Guest("b", "import os\n", 6, 1),
            ),
        ),
    ),
)
