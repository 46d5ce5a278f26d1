"""Evening 4: who is served first, who makes room, and how a request comes back."""

from __future__ import annotations

from typing import Any

from common.workshop.museum.props import request, steps
from common.workshop.tasks.task import Task

# Two of the demo's prompts and their answers do not fit into it: somebody has to make room.
SMALL_MEMORY = {"num_blocks": 15, "block_size": 4}


def _scheduler(num_blocks: int, **options: Any) -> Any:
    from block_pool import BlockPool
    from kv_memory import UncachedKVCacheManager
    from scheduler import Scheduler

    memory = UncachedKVCacheManager(BlockPool(num_blocks + 1), 4)
    return Scheduler(kv_memory=memory, watermark=0.0, **options)


def turns() -> str:
    from kv_memory import KeyedRequest
    from own_policy import TakeTurns
    from request import SamplingParams

    scheduler = _scheduler(20, max_num_seqs=1, policy=TakeTurns(), max_overtakes=None)
    params = SamplingParams(temperature=0, max_tokens=1)
    for name, num_tokens in (("big 1", 5), ("big 2", 2), ("big 3", 3), ("small 1", 4)):
        tenant = name.partition(" ")[0]
        scheduler.add_request(
            KeyedRequest(name, [1] * num_tokens, params, extra_keys=[("salt", tenant)])
        )
    served = [name for plan in steps(scheduler, most=9) for name in plan]
    return f"three of the tenant big arrive, then one of small; served: {', '.join(served)}"


def victims() -> str:
    lines = []
    for policy, priorities in (
        ("fcfs", (0, 0, 0)),
        ("priority", (9, 1, 9)),
        ("priority", (9, 1, 1)),
    ):
        scheduler = _scheduler(20, policy=policy)
        made = [
            request(name, 3, priority=priority, arrival_time=float(time))
            for time, (name, priority) in enumerate(zip("abc", priorities))
        ]
        for one in made:
            scheduler.add_request(one)
            scheduler.schedule()
        chosen = [scheduler._choose_victim()]
        chosen.append(scheduler._choose_victim(spared=[chosen[0]]))
        chosen[0].num_preemptions = scheduler.max_preemptions
        chosen.append(scheduler._choose_victim())
        names = [None if one is None else one.request_id for one in chosen]
        lines.append(
            f"{policy}, a b c have priorities {priorities}: {names[0]}; if that is spared, "
            f"{names[1]}; if it is pinned, {names[2]}"
        )
    return "\n".join(lines)


def room() -> str:
    lines = []
    for num_blocks, prompts in ((4, {"a": 7, "b": 7}), (5, {"a": 8, "b": 8})):
        scheduler = _scheduler(num_blocks)
        for name, num_tokens in prompts.items():
            scheduler.add_request(request(name, num_tokens, max_tokens=8))
        lines.append(f"{num_blocks} blocks of 4, prompts {prompts}")
        for number, plan in enumerate(steps(scheduler, most=4), 1):
            lines.append(f"  step {number}: {plan}, running {list(scheduler.running)}")
            try:
                scheduler.check_invariants()
            except AssertionError:
                lines.append("  the scheduler's books do not add up")
                break
    return "\n".join(lines)


def a_preempted_one() -> str:
    scheduler = _scheduler(4)
    one, other = request("a", 7, max_tokens=8), request("b", 7, max_tokens=8)
    late = request("late", 1)
    scheduler.add_request(one)
    scheduler.add_request(other)
    list(steps(scheduler, most=2))
    scheduler.add_request(late)
    scheduler.schedule()
    waiting = [r.request_id for r in scheduler.waiting]
    return (
        f"b was preempted: {other.status.name}, {other.num_computed_tokens} computed, "
        f"{other.num_output_tokens} outputs, preempted {other.num_preemptions} times\n"
        f"its blocks {list(scheduler.kv_memory.get_block_ids('b'))}, running "
        f"{list(scheduler.running)}, waiting {waiting}\n"
        f"tokens that were lost: {scheduler._num_lost}"
    )


_CHOICE_OF_A_VICTIM = (  # the whole body of the function of task 4.2
    "        running = reversed(self.running.values())\n"
    "        candidates = (r for r in running if not self.is_pinned(r) and r not in "
    "spared)\n"
    "        if self._has_priorities:\n"
    "            return max(candidates, key=lambda r: (r.priority, r.arrival_time), "
    "default=None)\n"
    "        return next(candidates, None)\n"
)

TASKS = (
    Task(
        number="4.1",
        title="A policy of your own: tenants take turns",
        minutes=12,
        difficulty=1,
        module="own_policy",
        place="TakeTurns.key",
        write="One tenant sends a hundred requests, another sends one. First come, first served "
        "would let the second wait for all hundred. Let the tenants take turns instead.\n\n"
        "A policy gives each request a `key` when it arrives, and the smallest is served "
        "first. Among equals, the one that came first is served first. A request names its "
        "tenant in its cache salt (chapter 3: only requests with the same salt share a cache). "
        "Get it with `dict(extra_keys_of(request)).get('salt', '')`. `self._num_requests` is "
        "a Counter, and empty at the start.\n\n"
        "Keep this: the first request of every tenant comes before the second of any tenant. "
        "A key is asked for once, so this is the place to count.",
        hints=(
            "The hundredth request of one tenant is its hundredth. What is the only request of "
            "the other?",
            "Count the requests of each tenant. The count is the key.",
            "self._num_requests[tenant] += 1; return self._num_requests[tenant]",
        ),
        test_module="test_own_policy",
        tests=("test_tenants_take_turns",),
        probe=turns,
        engine=None,
    ),
    Task(
        number="4.2",
        title="Which request makes room?",
        minutes=12,
        difficulty=2,
        module="scheduler",
        place="Scheduler._choose_victim",
        write="The memory is full, and somebody has to give up its blocks. Choose who.\n\n"
        "`self.running` is a dictionary of the running requests in order of admission. Never "
        "choose one that is pinned (`self.is_pinned(request)`: it made room often enough), nor "
        "one of `spared` (requests that the caller wants to keep). Without priorities, it is the "
        "one that was admitted last. With "
        "priorities (`self._has_priorities`), it is the least urgent, which is the one with "
        "the largest `priority`; of several, the one that arrived last (`arrival_time`). "
        "Return None if there is nobody to choose.\n\n"
        "Keep this: the one that has run longest is chosen last. So it finishes, gives up all "
        "it has, and the engine always moves on.",
        hints=(
            "First say who may be chosen at all; then which of them.",
            "reversed(self.running.values()) goes from the last admitted to the first. max() "
            "and next() both take a `default`.",
            "max(candidates, key=lambda r: (r.priority, r.arrival_time), default=None) with "
            "priorities, else next(candidates, None)",
        ),
        test_module="test_scheduler",
        tests=(
            "test_the_last_admitted_makes_room_and_comes_back_with_its_outputs",
            "test_who_makes_room_for_itself_is_not_running_as_well",
            "test_the_victim_is_the_least_urgent_and_of_those_the_latest",
            "test_a_pinned_request_is_not_displaced",
            "test_nobody_is_preempted_more_often_than_allowed",
        ),
        probe=victims,
        engine=SMALL_MEMORY,
    ),
    Task(
        number="4.3",
        title="Make room, or give up your own",
        minutes=25,
        difficulty=3,
        module="scheduler",
        place="Scheduler._get_room",
        write="A running request wants memory for `num_tokens` more positions. Get it, from "
        "others if need be.\n\n"
        "`self.kv_memory.allocate_slots(request, num_tokens)` gives it, or returns False and "
        "changes nothing. While it refuses, choose a victim (`self._choose_victim()`; there is "
        "always one) and preempt it (`self._preempt(victim, step)`), which frees its blocks. "
        "Then ask again: one victim may not be enough.\n\n"
        "The victim may be the request itself, if it was admitted last. Then it is out, and "
        "gets nothing: return 0. Otherwise return `num_tokens`.\n\n"
        "You may skip the question inside a block that is held already: `block_size = "
        "self.block_size`, and 0 < computed % block_size <= block_size - num_tokens.\n\n"
        "Keep this: what is returned has memory, all of it. A request that was preempted is "
        "never planned in the same step.",
        hints=(
            "It is a `while not`, not an `if not`.",
            "After the request has preempted itself, it is no longer running. Asking the "
            "memory for it would give blocks to a request that waits.",
            "while not self.kv_memory.allocate_slots(request, num_tokens): victim = ...; "
            "self._preempt(victim, step); if victim is request: return 0",
        ),
        test_module="test_scheduler",
        tests=(
            "test_the_last_admitted_makes_room_and_comes_back_with_its_outputs",
            "test_who_makes_room_for_itself_is_not_running_as_well",
            "test_a_request_after_the_victim_still_gets_its_token",
            "test_a_victim_that_was_planned_gives_everything_back",
            "test_nobody_is_preempted_more_often_than_allowed",
            "test_what_came_back_may_be_larger_than_any_step",
        ),
        probe=room,
        engine=SMALL_MEMORY,
    ),
    Task(
        number="4.4",
        title="Take a running request's memory away",
        minutes=15,
        difficulty=2,
        module="scheduler_base",
        place="SchedulerBase.preempt",
        write="A request was chosen to make room. It loses its keys and values, keeps its tokens, "
        "and will be computed again later, prompt and outputs together.\n\n"
        "Free its blocks (`self.kv_memory.free(request)`). Note in "
        "`self._num_lost[request.request_id]` how many tokens it had computed. Then its "
        "counters: nothing is computed, and it was preempted once more (`num_preemptions`). "
        "Its status is `RequestStatus.PREEMPTED`, and `routine_until` is -1. Take it out of "
        "`self.running`, tell `self.delta.request_preempted(request.request_id)`, put it back "
        "into the queue with `self.waiting.prepend_request(request)`, and count it in "
        "`self._stats.total_preempted`.\n\n"
        "Keep this: only running requests have memory. No output is lost: the user has seen "
        "those tokens. It had its turn, so it waits in front of the newcomers.",
        hints=(
            "The order matters in one place: a counter has to be read before it is set to 0.",
            "`num_computed_tokens = 0` says everything about the recomputation. The tokens "
            "themselves stay as they are.",
            "free; _num_lost[id] = num_computed_tokens; num_computed_tokens = 0; "
            "num_preemptions += 1; status; routine_until = -1; del running[id]; "
            "delta.request_preempted(id); waiting.prepend_request; total_preempted += 1",
        ),
        test_module="test_scheduler",
        tests=(
            "test_the_last_admitted_makes_room_and_comes_back_with_its_outputs",
            "test_who_makes_room_for_itself_is_not_running_as_well",
            "test_a_victim_that_was_planned_gives_everything_back",
            "test_what_came_back_may_be_larger_than_any_step",
            "test_the_runner_forgets_who_was_preempted_and_then_aborted",
            "test_scheduler_runs::test_pools_of_exactly_enough_and_one_more_or_less",
        ),
        probe=a_preempted_one,
        engine=SMALL_MEMORY,
    ),
)
