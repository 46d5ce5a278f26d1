"""Exhibits of chapter 4: memory runs out, and somebody has to make room."""

from __future__ import annotations

from typing import Any

from common.workshop.museum.exhibit import Exhibit, Guest, Workload
from common.workshop.museum.props import blocks, steps


def make_scheduler(num_blocks: int, **options: Any) -> Any:
    """Over blocks of four positions, so many of them to use, and nothing is cached."""
    from block_pool import BlockPool
    from kv_memory import KVMemory
    from scheduler import Scheduler

    return Scheduler(kv_memory=KVMemory(BlockPool(num_blocks + 1), 4), watermark=0, **options)


def add(scheduler: Any, name: str, num_prompt: int, max_tokens: int = 8, priority: int = 0) -> Any:
    from request import Request

    request = Request.from_tokens(name, [ord(name[0])] * num_prompt, max_tokens, priority)
    scheduler.add_request(request)
    return request


def a_list_that_changes_under_the_loop() -> str:
    scheduler = make_scheduler(6, policy="priority")
    for name, priority in (("v", 9), ("u", 0), ("w", 1)):  # v comes first, and can wait longest
        add(scheduler, name, 5, priority=priority)
        next(steps(scheduler))
    plans = [plan for plan in steps(scheduler, most=4) if "v" not in plan]
    names = sorted(plans[0])
    return f"v, the first in the list, is preempted; in that step there are tokens for {names}"


def a_victim_in_the_plan() -> str:
    scheduler = make_scheduler(5, policy="priority", max_num_batched_tokens=12)
    for name, num_prompt, priority in (("v", 3, 5), ("u", 5, 1), ("o", 4, 2)):
        add(scheduler, name, num_prompt, priority=priority)
        next(steps(scheduler))
    plan = scheduler.schedule()
    lost = [request.request_id for request in plan.preempted_requests]
    return f"preempted in this step: {lost}; planned in this step: {plan.num_scheduled_tokens}"


def urgent_and_not_served() -> str:
    scheduler = make_scheduler(40, max_num_seqs=1, policy="priority")
    add(scheduler, "patient", 4, max_tokens=30, priority=9)
    next(steps(scheduler))
    add(scheduler, "urgent", 4, priority=0)
    plans = list(steps(scheduler))
    first = next(number for number, plan in enumerate(plans, 1) if "urgent" in plan)
    return f"one seat, taken; an urgent request comes and computes its first token in step {first}"


def equals_in_one_seat() -> str:
    scheduler = make_scheduler(40, max_num_seqs=1, policy="priority", max_preemptions=1000)
    for name in ("a", "b"):
        add(scheduler, name, 4, max_tokens=6, priority=1)
    seats = [name for plan in steps(scheduler, most=12) for name in plan]
    return f"two equals, one seat, 12 steps: {' '.join(seats)}"


def what_was_said_before() -> str:
    from scheduler_interface import StepOutput

    scheduler, said = make_scheduler(4), {"a": [], "b": []}
    for name in said:
        add(scheduler, name, 7, max_tokens=8)
    for _ in range(200):
        if not scheduler.has_unfinished_requests():
            break
        plan = scheduler.schedule()
        ready = [r for r in plan.scheduled_requests if r.num_computed_tokens == r.num_tokens]
        # The model counts: each token says at which place it stands.
        output = StepOutput({r.request_id: [r.num_tokens] for r in ready})
        for result in scheduler.update_from_output(plan, output):
            said[result.request_id] += result.new_token_ids
    return f"b was preempted, and came back; it has said: {said['b']}"


def back_and_forth() -> str:
    scheduler = make_scheduler(8, max_preemptions=1)
    requests = [add(scheduler, name, 4, max_tokens=24) for name in "abcdef"]
    list(steps(scheduler))
    most = max(request.num_preemptions for request in requests)
    num_recomputed = scheduler.get_stats().total_recomputed_tokens
    return (
        f"one preemption each is allowed; the most of any request: {most}\n"
        f"tokens computed again: {num_recomputed}"
    )


def a_seat_for_nobody() -> str:
    scheduler = make_scheduler(8, max_num_seqs=2, policy="priority")
    for name, num_prompt, priority in (("a", 13, 1), ("b", 5, 5)):
        add(scheduler, name, num_prompt, max_tokens=4, priority=priority)
    next(steps(scheduler))
    add(scheduler, "urgent", 20, max_tokens=1, priority=0)
    plan = next(steps(scheduler))
    return f"a and b run in 2 seats, urgent does not fit the memory; computed now: {plan}"


SCHEDULER, BASE = "04_scheduler/scheduler.py", "04_scheduler/scheduler_base.py"

EXHIBITS = (
    Exhibit(
        trap=20,
        origin="vLLM #49097",
        title="Somebody is skipped when a victim leaves the list",
        seen="The loop went through the live list of running requests by index. When a victim "
        "was taken out, everybody behind it moved up by one, and the next was passed over: no "
        "token in this step, though memory and budget were there.",
        lesson="Walk over a copy, and ask of each whether it is still there. A lost step shows "
        "in no output, only in latency: test what each request gets in each step.",
        demonstrate=a_list_that_changes_under_the_loop,
        wrong="v, the first in the list, is preempted; in that step there are tokens for ['w']",
        right="v, the first in the list, is preempted; in that step there are tokens for ['u', "
        "'w']",
        watch=Workload(
            look="In step 4 v makes room. Look at what u, who stands behind it, computes in that "
            "step.",
            parts="step 4, planned, u",
            guests=(
                Guest("v", blocks("a", " the"), 12, 0, 9),
                Guest("u", blocks("b", " the"), 12, 1, 0),
                Guest("w", blocks("c", " the"), 12, 2, 1),
            ),
            config={"policy": "priority", "num_blocks": 7, "prefix_cache": None},
        ),
    ),
    Exhibit(
        trap=21,
        origin="vLLM",
        title="Preempted, and computed all the same",
        seen="A victim had been given its token earlier in the same step. Its blocks went to "
        "somebody else, its entry stayed in the plan: the model computed a request that had no "
        "memory, into memory that was another's.",
        lesson="Whatever planning has given, preemption takes back: budget, blocks, guesses, and "
        "the entry in the plan.",
        demonstrate=a_victim_in_the_plan,
        wrong="preempted in this step: ['v']; planned in this step: {'v': 1, 'u': 1, 'o': 1}",
        right="preempted in this step: ['v']; planned in this step: {'u': 1, 'o': 1}",
        watch=Workload(
            look="In step 3 v is preempted, and stands in the plan of the same step.",
            parts="step 3, planned, v",
            guests=(
                Guest("v", " and are all", 12, 0, 5),
                Guest("u", blocks("b", " the"), 12, 1, 1),
                Guest("o", blocks("c"), 12, 2, 2),
            ),
            config={"policy": "priority", "num_blocks": 6, "max_num_batched_tokens": 12},
        ),
    ),
    Exhibit(
        trap=22,
        origin="vLLM #40004",
        title="Urgent, and at the end of the line",
        seen="Priorities ordered the queue, and the queue does not move while the batch is full. "
        "An urgent request waited until somebody unimportant had written its last word.",
        lesson="A priority that holds only among those who wait is a wish. Say what it does to "
        "those who run.",
        demonstrate=urgent_and_not_served,
        wrong="one seat, taken; an urgent request comes and computes its first token in step 30",
        right="one seat, taken; an urgent request comes and computes its first token in step 1",
        watch=Workload(
            look="One seat. An urgent request comes in step 2: look at when it computes its first "
            "token.",
            parts="step 2, planned, patient",
            guests=(
                Guest("patient", "def f(x):", 16, 0, 9),
                Guest("urgent", "import os\n", 4, 2, 0),
            ),
            config={"policy": "priority", "max_num_seqs": 1},
        ),
    ),
    Exhibit(
        trap=22,
        origin="vLLM #41951",
        title="Two equals in one seat",
        seen="A request could take the place of an equal. The equal came back and took it again: "
        "both were computed anew and anew, the machine was busy, and nobody got on.",
        lesson="Only a strict order ends. Wherever one thing may replace another, ask what "
        "happens to ties.",
        demonstrate=equals_in_one_seat,
        wrong="two equals, one seat, 12 steps: a b a b a b a b a b a b",
        right="two equals, one seat, 12 steps: a a a a a a b b b b b b",
        watch=Workload(
            look="One seat and two equals: count the preemptions.",
            parts="step 1, preempted, a",
            guests=(
                Guest("a", "def f(x):", 6, 0, 1),
                Guest("b", "import os\n", 6, 0, 1),
            ),
            config={"policy": "priority", "max_num_seqs": 1},
        ),
    ),
    Exhibit(
        trap=24,
        origin="vLLM #28787",
        title="What was said before is forgotten",
        seen="A request was preempted in the middle of its answer. When it came back its history "
        "had been cut to the prompt: it began its answer again, behind what the user had already "
        "read.",
        lesson="Preemption takes keys and values, never tokens. Prompt and outputs are computed "
        "again as if they were one prompt.",
        demonstrate=what_was_said_before,
        wrong="b was preempted, and came back; it has said: [7, 8, 7, 8, 9, 10, 11, 12, 13, 14]",
        right="b was preempted, and came back; it has said: [7, 8, 9, 10, 11, 12, 13, 14]",
        watch=Workload(
            look="Memory runs out and b is preempted. Look at its tokens when it comes back.",
            parts="step 11, taken, b",
            guests=(
                Guest("a", "def f(x):", 16),
                Guest("b", "import os\n", 16),
            ),
            config={"num_blocks": 8, "prefix_cache": None},
        ),
    ),
    Exhibit(
        trap=26,
        origin="SGLang #26248",
        title="Back and forth",
        seen="Under steady load one retraction led to the next: who came back found the memory "
        "as full as before, and was thrown out again after a few tokens. Throughput fell to a "
        "fourteenth.",
        lesson="Recomputation is paid for by the same machine that is too small already. Bound "
        "how often anybody makes room, and plot it over time: an average hides it.",
        demonstrate=back_and_forth,
        wrong="one preemption each is allowed; the most of any request: 3\n"
        "tokens computed again: 96",
        right="one preemption each is allowed; the most of any request: 1\n"
        "tokens computed again: 40",
        watch=Workload(
            look="One seat, and a makes room for whoever is more urgent, again and again. Look at "
            "what it reserves when it has made room three times.",
            parts="step 15, taken, a",
            guests=(
                Guest("a", "def f(x):", 30, 0, 9),
                Guest("b", "import os\n", 3, 2, 0),
                Guest("c", "import os\n", 3, 7, 0),
                Guest("d", "import os\n", 3, 12, 0),
                Guest("e", "import os\n", 3, 17, 0),
                Guest("f", "import os\n", 3, 22, 0),
                Guest("g", "import os\n", 3, 27, 0),
            ),
            config={"policy": "priority", "max_num_seqs": 1},
        ),
    ),
    Exhibit(
        trap=60,
        origin="ours",
        title="A seat is cleared, and nobody sits in it",
        seen="A running request was preempted for a more urgent one, and only then was the "
        "memory asked, which had no room for the newcomer even so. One request had lost its KV, "
        "the other still waited, and in the next step it began again.",
        lesson="An exchange is one change: ask for all of it before you do the first half.",
        demonstrate=a_seat_for_nobody,
        wrong="a and b run in 2 seats, urgent does not fit the memory; computed now: {'a': 1}",
        right="a and b run in 2 seats, urgent does not fit the memory; computed now: {'a': 1, "
        "'b': 1}",
        watch=Workload(
            look="Two seats. An urgent prompt that does not fit the memory comes in step 1: look "
            "at whether b has made room, and for whom.",
            parts="step 1, preempted, b",
            guests=(
                Guest("a", blocks("abc", " the"), 4, 0, 1),
                Guest("b", blocks("d", " the"), 4, 0, 5),
                Guest("urgent", blocks("efghi"), 1, 1, 0),
            ),
            config={"policy": "priority", "num_blocks": 9, "max_num_seqs": 2},
        ),
    ),
)
