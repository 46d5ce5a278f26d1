"""Exhibits of chapter 1: who runs, what is sampled, when it ends."""

from __future__ import annotations

from common.workshop.museum.exhibit import Exhibit, Guest, Workload
from common.workshop.museum.props import GUESS, SONG, request, steps


def more_runners_than_seats() -> str:
    from fcfs_scheduler import FCFSScheduler

    scheduler, counts = FCFSScheduler(max_num_seqs=2), []
    for number in range(6):
        scheduler.add_request(request(f"r{number}", 3, max_tokens=9))
    for _ in steps(scheduler, most=3):
        counts.append(scheduler.get_request_counts()[0])
    return f"2 seats, 6 requests; running after each of 3 steps: {counts}"


def a_long_queue() -> str:
    from fcfs_scheduler import FCFSScheduler

    scheduler = FCFSScheduler(max_num_seqs=2)
    for number in range(5):
        scheduler.add_request(request(f"r{number}", 3, max_tokens=2))
    computed = sum(sum(plan.values()) for plan in steps(scheduler, most=50))
    return (
        f"2 seats, 5 requests, 50 steps allowed: {computed} tokens computed, "
        f"{scheduler.get_num_unfinished_requests()} requests unfinished"
    )


def prompts_that_never_stop_coming() -> str:
    from fcfs_scheduler import FCFSScheduler

    scheduler, first = FCFSScheduler(max_num_batched_tokens=8), request("first", 3, max_tokens=50)
    scheduler.add_request(first)
    for number, _ in enumerate(steps(scheduler, most=21)):
        scheduler.add_request(request(f"r{number}", 6, max_tokens=1))
    return f"one new prompt a step; tokens of `first` in 21 steps: {first.num_output_tokens}"


def a_second_end() -> str:
    from request import Request, SamplingParams

    answer = Request("r", [1, 2], SamplingParams(max_tokens=6), eos_token_ids=[100, 101])
    for token in (7, 8, 101, 9, 9, 9):  # 101: end of turn
        if not answer.is_finished:
            answer.append_output_token(token)
    return (
        f"the model says 7 8 101; the answer is {answer.output_token_ids}, {answer.finish_reason}"
    )


def greedy_is_asked_for() -> str:
    from request import SamplingParams

    return f"temperature=0 is greedy: {SamplingParams(temperature=0).is_greedy}"


def behind_the_end() -> str:
    from fcfs_scheduler import FCFSScheduler
    from request import Request, SamplingParams
    from scheduler_interface import StepOutput

    scheduler = FCFSScheduler()
    scheduler.add_request(Request("r", [1, 2], SamplingParams(), eos_token_ids=[5]))
    plan = scheduler.schedule()
    (result,) = scheduler.update_from_output(plan, StepOutput({"r": [8, 5, 8, 9]}))
    return f"a step brings 8, the end (5), 8, 9; the user gets {result.new_token_ids}"


def two_engines() -> str:
    from fcfs_scheduler import FCFSScheduler

    one, other = FCFSScheduler(), FCFSScheduler()
    lines = []
    for name, scheduler in (("first", one), ("second", other)):
        scheduler.add_request(request("a", 5))
        plan = scheduler.schedule()
        prompts = [len(new.prompt_token_ids) for new in plan.scheduled_new_reqs]
        lines.append(f"{name} engine, request `a`: prompts sent to its runner: {prompts}")
    return "\n".join(lines)


EXHIBITS = (
    Exhibit(
        trap=17,
        origin="nano-vllm #265 #271",
        title="More requests run than there are seats",
        seen="`max_num_seqs` held for the newcomers of one step and not for all who run. Under "
        "load the batch outgrew the buffers that were made for it; requests beyond the limit got "
        "their first token and then starved.",
        lesson="A limit on a state has to count the state, not the changes made to it just now.",
        demonstrate=more_runners_than_seats,
        wrong="2 seats, 6 requests; running after each of 3 steps: [2, 4, 6]",
        right="2 seats, 6 requests; running after each of 3 steps: [2, 2, 2]",
        watch=Workload(
            look="Two seats: count the requests that run in step 2.",
            parts="step 2, taken, c",
            guests=(
                Guest("a", "def f(x):", 6),
                Guest("b", "def f(x):", 6, 1),
                Guest("c", "def f(x):", 6, 2),
                Guest("d", "def f(x):", 6, 3),
            ),
            config={
                "scheduler": "fcfs",
                "prefix_cache": None,
                "max_num_seqs": 2,
                "chunked_prefill": False,
            },
            has_chapter_2s_scheduler=True,
        ),
    ),
    Exhibit(
        trap=23,
        origin="vLLM #53130",
        title="The queue counts against the seats",
        seen="Once more requests waited than there are seats, nobody was admitted any more. The "
        "health check stayed green, the GPU idle, and the queue grew.",
        lesson="A server that does nothing looks healthy. Test a queue that is longer than "
        "everything else, and look at progress, not at errors.",
        demonstrate=a_long_queue,
        wrong="2 seats, 5 requests, 50 steps allowed: 0 tokens computed, 5 requests unfinished",
        right="2 seats, 5 requests, 50 steps allowed: 20 tokens computed, 0 requests unfinished",
        watch=Workload(
            look="Five wait and two seats are free; look at what each step computes.",
            parts="step 0, planned, a",
            guests=(
                Guest("a", "def f(x):", 4),
                Guest("b", "def f(x):", 4),
                Guest("c", "def f(x):", 4),
                Guest("d", "def f(x):", 4),
                Guest("e", "def f(x):", 4),
            ),
            config={
                "scheduler": "fcfs",
                "prefix_cache": None,
                "max_num_seqs": 2,
                "chunked_prefill": False,
            },
            has_chapter_2s_scheduler=True,
        ),
    ),
    Exhibit(
        trap=18,
        origin="nano-vllm, SGLang #32549 #34058",
        title="New prompts first, and nobody else ever",
        seen="As long as prompts arrived, every step was a prefill, and whoever was in the "
        "middle of an answer stood still: in the report, one token in 21 steps.",
        lesson="Prefill first is a policy with a price. Mix both in a step, or bound how many "
        "prefills may follow each other.",
        demonstrate=prompts_that_never_stop_coming,
        wrong="one new prompt a step; tokens of `first` in 21 steps: 1",
        right="one new prompt a step; tokens of `first` in 21 steps: 21",
        watch=Workload(
            look="Follow the row of a: it gets a token in each step, or only when no prompt is "
            "there.",
            parts="step 1, planned, a",
            guests=(
                Guest("a", "import os\n", 12),
                Guest("b", "def f(x):", 2, 1),
                Guest("c", "def f(x):", 2, 2),
                Guest("d", "def f(x):", 2, 3),
                Guest("e", "def f(x):", 2, 4),
                Guest("f", "def f(x):", 2, 5),
                Guest("g", "def f(x):", 2, 6),
            ),
            config={"scheduler": "fcfs", "chunked_prefill": False},
        ),
    ),
    Exhibit(
        trap=49,
        origin="nano-vllm",
        title="A model with two ends, and only one is known",
        seen="A chat model may end a turn with one token and a document with another. Only the "
        "first was honoured: answers ran on behind their end, up to `max_tokens`, often into a "
        "conversation of the model with itself.",
        lesson="`eos_token_id` in a configuration may be a list. Read what the format allows, "
        "not what the first model has.",
        demonstrate=a_second_end,
        wrong="the model says 7 8 101; the answer is [7, 8, 101, 9, 9, 9], length",
        right="the model says 7 8 101; the answer is [7, 8, 101], stop",
        watch="The model that ships with the repository knows one end only.",
    ),
    Exhibit(
        trap=45,
        origin="nano-vllm #249, SGLang #31214",
        title="Greedy decoding is forbidden",
        seen="`temperature=0` was refused, or silently replaced by another number. "
        "Nobody could compare the engine with a reference any more, token by token.",
        lesson="Greedy decoding is how an engine is checked. It is a case of its own, not a "
        "small temperature.",
        demonstrate=greedy_is_asked_for,
        wrong="ValueError: temperature is 0: it must be a finite number in (0.0, inf)",
        right="temperature=0 is greedy: True",
        watch="The request is refused before it reaches an engine.",
    ),
    Exhibit(
        trap=38,
        origin="SGLang #31599 #33758, vLLM #47616",
        title="Words behind the end",
        seen="With speculation a step may bring several tokens, and the end may be the second of "
        "four. The request ended, but what was sampled behind it reached the user.",
        lesson="Whatever decides that a request is over also decides which tokens are its own: "
        "ids, text and log-probabilities are cut together, in one place.",
        demonstrate=behind_the_end,
        wrong="a step brings 8, the end (5), 8, 9; the user gets [8, 5, 8, 9]",
        right="a step brings 8, the end (5), 8, 9; the user gets [8, 5]",
        watch=Workload(
            look="Four guesses of a are right in step 1, and the second of them is its end: which "
            "tokens are its own?",
            parts="step 1, computed, a",
            guests=(Guest("a", SONG, 14, sampling={"stop_token_ids": (200,)}),),
            config={"speculative": GUESS},
        ),
    ),
    Exhibit(
        trap=50,
        origin="nano-vllm",
        title="Two engines, one memory of who was served",
        seen="What should belong to an engine belonged to the process. A second engine, in a "
        "test or a notebook, took over counters of the first, and answered for requests that it "
        "never saw.",
        lesson="A default value is made once, when the function is defined. State lives in "
        "objects that somebody makes, never in a class, a module or a default.",
        demonstrate=two_engines,
        wrong="first engine, request `a`: prompts sent to its runner: [5]\n"
        "second engine, request `a`: prompts sent to its runner: []",
        right="first engine, request `a`: prompts sent to its runner: [5]\n"
        "second engine, request `a`: prompts sent to its runner: [5]",
        watch="It takes two engines, and a film is of one. The engine's scheduler brings a memory "
        "of its own.",
    ),
)
