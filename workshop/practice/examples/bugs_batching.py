"""Exhibits of chapter 1: scheduling, sampling, and the end of a request."""

from __future__ import annotations

from workshop.practice.examples.example_tools import request, steps


def more_runners_than_seats() -> str:
    from fcfs_scheduler import FCFSScheduler

    scheduler, counts = FCFSScheduler(max_num_seqs=2), []
    for number in range(6):
        scheduler.add_request(request(f"r{number}", 3, max_tokens=9))
    for _ in steps(scheduler, most=3):
        counts.append(scheduler.get_request_counts()[0])
    return f"max_num_seqs=2, 6 requests; running after each of 3 steps: {counts}"


def a_long_queue() -> str:
    from fcfs_scheduler import FCFSScheduler

    scheduler = FCFSScheduler(max_num_seqs=2)
    for number in range(5):
        scheduler.add_request(request(f"r{number}", 3, max_tokens=2))
    computed = sum(sum(plan.values()) for plan in steps(scheduler, most=50))
    return (
        f"max_num_seqs=2, 5 requests, 50 steps: {computed} tokens computed, "
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
    return f"one step returns 8, 5 (the end), 8, 9; the user gets {result.new_token_ids}"


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
