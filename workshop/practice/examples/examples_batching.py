"""Evening 1: requests, the loop that admits them, the padded batch that a model needs."""

from __future__ import annotations

from workshop.practice.examples.example_tools import Lines, request, steps


def endings() -> Lines:
    from request import Request, SamplingParams

    cases = (
        ("three tokens, and 3 are allowed", [5, 6, 7], 1),
        ("the model's end of text", [5, 8], 1),
        ("a stop token", [9], 1),
        ("a stop token in the last place", [5, 6, 9], 1),
        ("a stop token, and min_tokens is 2", [9, 5], 2),
    )
    for name, tokens, least in cases:
        params = SamplingParams(max_tokens=3, min_tokens=least, stop_token_ids=[9])
        one = Request("r", [1, 2], params, eos_token_ids=[8])
        for token in tokens:
            one.append_output_token(token)
        ended = f"{one.finish_reason} (stop_reason {one.stop_reason})"
        yield f"{name}: {ended}, {one.num_tokens} tokens, {one.num_output_tokens} outputs"
    one = Request("r", [1, 2], SamplingParams(max_tokens=3))
    one.max_tokens = 1  # the model has no more positions
    one.append_output_token(5)
    yield f"3 are allowed, and the model has room for 1: {one.finish_reason}"


def admissions() -> Lines:
    from fcfs_scheduler import FCFSScheduler

    cases = (
        ("10 tokens a step, prompts of 4, 6 and 3", 8, {"a": 4, "b": 6, "c": 3}),
        ("10 tokens a step, prompts of 4, 9 and 3", 8, {"a": 4, "b": 9, "c": 3}),
        ("2 slots, prompts of 1, 1 and 1", 2, {"a": 1, "b": 1, "c": 1}),
    )
    for name, num_seats, prompts in cases:
        scheduler = FCFSScheduler(num_seats, 10)
        for request_id, num_tokens in prompts.items():
            scheduler.add_request(request(request_id, num_tokens, max_tokens=9))
        (first,) = steps(scheduler, most=1)
        left = [waiting.request_id for waiting in scheduler.waiting]
        yield f"{name}: the first step computes {first}, waiting {left}"
    for name, told in (("can_start", "held back by a feature"), ("_allocate", "without room")):
        scheduler = FCFSScheduler(8, 10)
        scheduler.add_request(request("r", 4))
        setattr(scheduler, name, lambda request: False)
        yield f"{told}: the first step computes {next(steps(scheduler, most=1))}"
    scheduler, asked = FCFSScheduler(8, 10), []
    setattr(scheduler, "_allocate", lambda request: not asked.append(request.request_id))  # noqa: B010
    for request_id, num_tokens in cases[1][2].items():
        scheduler.add_request(request(request_id, num_tokens))
    next(steps(scheduler, most=1))
    yield f"prompts of 4, 9 and 3: room is asked for {asked}"


def rectangles() -> Lines:
    from input_batch import InputBatch

    batch = InputBatch(["old", "new"], [[12], [6, 99, 8]], [3, 0], [False, True], [2, 3])
    for time in ("first", "second"):
        ids, mask, positions = batch.to_tensors("cpu", pad_token_id=99)
        yield f"{time} call: ids {ids.tolist()}"
        yield f"   mask {mask.tolist()}, positions {positions.tolist()}"
    shapes = [tuple(t.shape) for t in InputBatch([], [], [], [], []).to_tensors("cpu")]
    yield f"all of {ids.dtype}, {mask.dtype}, {positions.dtype}; of no requests {shapes}"


def messages() -> Lines:
    from base_scheduler import DeltaEncoder
    from fcfs_scheduler import FCFSScheduler
    from scheduler_interface import SchedulerOutput, StepOutput

    delta = DeltaEncoder()
    scheduler = FCFSScheduler(max_num_seqs=2)
    scheduler.add_request(request("a", 3, max_tokens=2))
    scheduler.add_request(request("b", 2, max_tokens=4))
    for number in range(1, 5):
        plan = scheduler.schedule()
        new = {entry.req_id: entry.prompt_token_ids for entry in plan.scheduled_new_reqs}
        cached = plan.scheduled_cached_reqs
        known = dict(zip(cached.req_ids, cached.new_token_ids))
        gone = sorted(plan.finished_req_ids)
        yield f"step {number}: new {new}, more of {known}, finished {gone}"
        scheduler.update_from_output(
            plan, StepOutput({r.request_id: [7] for r in plan.scheduled_requests})
        )
    one = request("c", 2, max_tokens=9)
    for count in (1, 2, 1):
        for token in range(count):
            one.append_output_token(5 + token)
        delta.encode(plan := SchedulerOutput(scheduled_requests=[one]))
        cached = plan.scheduled_cached_reqs
        told = f"{cached.new_token_ids}, outputs {cached.num_output_tokens}"
        yield f"c has {count} tokens more: new {len(plan.scheduled_new_reqs)}, {told}"


# -- exhibits
