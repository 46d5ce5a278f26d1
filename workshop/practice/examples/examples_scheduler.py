"""Evening 4: scheduling order, preemption victims, and how a preempted request resumes."""

from __future__ import annotations

from typing import Any

from workshop.practice.examples.example_tools import Lines, request, steps

# Two of the demo's prompts and their answers do not fit into it: one must be preempted.


def _scheduler(num_blocks: int, **options: Any) -> Any:
    from block_pool import BlockPool
    from kv_memory import UncachedKVCacheManager
    from scheduler import Scheduler

    memory = UncachedKVCacheManager(BlockPool(num_blocks + 1), 4)
    return Scheduler(kv_memory=memory, watermark=0.0, **options)


def turns() -> Lines:
    from kv_memory import KeyedRequest
    from own_policy import TakeTurns
    from request import SamplingParams

    scheduler = _scheduler(20, max_num_seqs=1, policy=TakeTurns(), max_overtakes=None)
    params = SamplingParams(temperature=0, max_tokens=1)
    for name, num_tokens in (("zoe 1", 5), ("zoe 2", 2), ("zoe 3", 3), ("amy 1", 4)):
        tenant = name.partition(" ")[0]
        scheduler.add_request(
            KeyedRequest(name, [1] * num_tokens, params, extra_keys=[("salt", tenant)])
        )
    served = [name for plan in steps(scheduler, most=9) for name in plan]
    yield f"three of the tenant zoe arrive, then one of amy; served: {', '.join(served)}"


def victims() -> Lines:
    row = "{:10}{:17}{:9}{:20}{}".format
    yield "a, b and c were admitted in this order; c had arrived before b"
    yield row("policy", "priority a b c", "victim", "if it is excluded", "if it is pinned")
    for policy, priorities in (
        ("fcfs", (0, 0, 0)),
        ("priority", (9, 1, 9)),
        ("priority", (9, 1, 1)),
        ("fcfs", (9, 1, 1)),
    ):
        scheduler = _scheduler(20, policy=policy)
        made = [
            request(name, 3, priority=priority, arrival_time=time)
            for time, name, priority in zip((0.0, 2.0, 1.0), "abc", priorities)
        ]
        for one in made:
            scheduler.add_request(one)
            scheduler.schedule()
        chosen = [scheduler._choose_victim()]
        chosen.append(scheduler._choose_victim(exclude=[chosen[0]]))
        scheduler._num_displacements[chosen[0].request_id] = scheduler.max_preemptions
        chosen.append(scheduler._choose_victim())
        names = [str(one and one.request_id) for one in chosen]
        yield row(policy, " ".join(map(str, priorities)), *names)
    yield f"if all are excluded: {scheduler._choose_victim(made)}"


def room() -> Lines:
    from step_plan import StepPlan

    for num_blocks, prompts in ((4, {"a": 5, "b": 7}), (6, {"a": 7, "b": 7, "c": 7})):
        scheduler = _scheduler(num_blocks)
        for name, num_tokens in prompts.items():
            scheduler.add_request(request(name, num_tokens, max_tokens=8))
        yield f"{num_blocks} blocks of 4, prompts {prompts}"
        for number, plan in enumerate(steps(scheduler, most=4), 1):
            tables = {r: len(scheduler.kv_memory.get_block_ids(r)) for r in scheduler.running}
            yield f"  step {number}: {plan}, blocks of who runs: {tables}"
            try:
                scheduler.check_invariants()
            except AssertionError:
                yield "  the scheduler's books do not add up"
                break
    scheduler = _scheduler(4)
    made = [request(name, 7 if name == "a" else 3, max_tokens=9) for name in "abc"]
    for one in made:
        scheduler.add_request(one)
    scheduler.schedule()
    given = scheduler._allocate_or_preempt(made[0], 9, 0, StepPlan(6, lambda one: 6))
    held, running = len(scheduler.kv_memory.get_block_ids("a")), list(scheduler.running)
    yield f"a, with 7 tokens, asks for memory for 9 more, which b and c have: {given} get it"
    yield f"  a has {held} blocks, and there run {running}"


def a_preempted_one() -> Lines:
    scheduler = _scheduler(4)
    one, other = request("a", 7, max_tokens=8), request("b", 7, max_tokens=8)
    late = request("late", 1)
    scheduler.add_request(one)
    scheduler.add_request(other)
    list(steps(scheduler, most=2))
    scheduler.add_request(late)
    scheduler.schedule()
    waiting = [r.request_id for r in scheduler.waiting]
    yield (
        f"b was preempted: {other.status.name}, {other.num_computed_tokens} computed, "
        f"{other.num_output_tokens} outputs, preempted {other.num_preemptions} times\n"
        f"its blocks {list(scheduler.kv_memory.get_block_ids('b'))}, running "
        f"{list(scheduler.running)}, waiting {waiting}\n"
        f"tokens that were lost: {scheduler._num_preempted_tokens}, the runner has "
        f"{scheduler.delta._num_sent.get('b')} of b"
    )


def adapters() -> Lines:
    from adapter_limit import MaxLoRAs
    from kv_memory import KeyedRequest
    from request import SamplingParams

    def asks(name: str, adapter: str | None) -> KeyedRequest:
        keys = [] if adapter is None else [("lora", adapter)]
        return KeyedRequest(name, [1], SamplingParams(), extra_keys=keys)

    yield "room for two adapters; who may start?"
    for running in ((), ("x",), ("x", "x"), ("x", "y"), ("x", None)):
        plugin = MaxLoRAs(2)
        for i, adapter in enumerate(running):
            plugin.on_start(asks(str(i), adapter))
        may = {name: plugin.can_start(asks("new", name)) for name in (None, "x", "z")}
        yield f"adapters that run: {running}; a new one with: {may}"


def allowed_tokens() -> Lines:
    import torch

    from common.sampling.sampling_constraints import forbid

    bits = torch.tensor([[0b10110, 1], [-(2**31), 0]], dtype=torch.int32)
    yield "row 2 may have tokens 1, 2, 4 and 32; row 0 token 31; row 1 has no grammar"
    for vocab_size in (34, 70):
        logits = torch.arange(-3.0, 3 * vocab_size - 3).view(3, vocab_size)
        given = logits.clone()
        changed = forbid(logits, torch.tensor([2, 0]), bits)
        for row in range(3):
            left = torch.isfinite(changed[row]).nonzero().flatten().tolist()
            shown = left if len(left) < 9 else f"{len(left)} of them"
            kept = bool((changed[row, left] == given[row, left]).all())
            yield f"{vocab_size} tokens, row {row}: left {shown}, as they were: {kept}"
        yield f"the logits that were given are as they were: {torch.equal(logits, given)}"
