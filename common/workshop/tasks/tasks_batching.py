"""Evening 1: requests, the loop that admits them, the rectangle that a model wants."""

from __future__ import annotations

from common.workshop.museum.props import request, steps
from common.workshop.tasks.task import Task


def endings() -> str:
    from request import Request, SamplingParams

    cases = (
        ("three tokens, and 3 are allowed", [5, 6, 7], 1),
        ("the model's end of text", [5, 8], 1),
        ("a stop token", [9], 1),
        ("a stop token in the last place", [5, 6, 9], 1),
        ("a stop token, and min_tokens is 2", [9, 5], 2),
    )
    lines = []
    for name, tokens, least in cases:
        params = SamplingParams(max_tokens=3, min_tokens=least, stop_token_ids=[9])
        one = Request("r", [1, 2], params, eos_token_ids=[8])
        for token in tokens:
            one.append_output_token(token)
        ended = f"{one.finish_reason} (stop_reason {one.stop_reason})"
        lines.append(f"{name}: {ended}, {one.num_tokens} tokens known")
    return "\n".join(lines)


def admissions() -> str:
    from fcfs_scheduler import FCFSScheduler

    cases = (
        ("10 tokens a step, prompts of 4, 6 and 3", 8, {"a": 4, "b": 6, "c": 3}),
        ("10 tokens a step, prompts of 4, 9 and 3", 8, {"a": 4, "b": 9, "c": 3}),
        ("2 seats, prompts of 1, 1 and 1", 2, {"a": 1, "b": 1, "c": 1}),
    )
    lines = []
    for name, num_seats, prompts in cases:
        scheduler = FCFSScheduler(num_seats, 10)
        for request_id, num_tokens in prompts.items():
            scheduler.add_request(request(request_id, num_tokens, max_tokens=9))
        (first,) = steps(scheduler, most=1)
        left = [waiting.request_id for waiting in scheduler.waiting]
        lines.append(f"{name}: the first step computes {first}, waiting {left}")
    return "\n".join(lines)


def rectangles() -> str:
    from input_batch import InputBatch

    batch = InputBatch(["new", "old"], [[6, 7, 8], [12]], [0, 3], [True, False], [3, 2])
    lines = []
    for time in ("first", "second"):
        ids, mask, positions = batch.to_tensors("cpu", pad_token_id=99)
        lines.append(f"{time} call: ids {ids.tolist()}")
        lines.append(f"   mask {mask.tolist()}, positions {positions.tolist()}")
    return "\n".join(lines)


def messages() -> str:
    from fcfs_scheduler import FCFSScheduler
    from scheduler_interface import StepOutput

    scheduler = FCFSScheduler(max_num_seqs=2)
    scheduler.add_request(request("a", 3, max_tokens=2))
    scheduler.add_request(request("b", 2, max_tokens=4))
    lines = []
    for number in range(1, 5):
        plan = scheduler.schedule()
        new = {entry.req_id: entry.prompt_token_ids for entry in plan.scheduled_new_reqs}
        cached = plan.scheduled_cached_reqs
        known = dict(zip(cached.req_ids, cached.new_token_ids))
        gone = sorted(plan.finished_req_ids)
        lines.append(f"step {number}: new {new}, more of {known}, finished {gone}")
        scheduler.update_from_output(
            plan, StepOutput({r.request_id: [7] for r in plan.scheduled_requests})
        )
    return "\n".join(lines)


TASKS = (
    Task(
        number="1.1",
        title="When has a request ended?",
        minutes=10,
        difficulty=1,
        module="request",
        place="Request.append_output_token",
        write="A token was sampled for this request. Take it, and find out whether it is the "
        "last one.\n\n"
        "Append the token to `output_token_ids` and to `all_token_ids`. Then set `status`, if "
        "the request has ended. It ends with `RequestStatus.FINISHED_STOPPED` at a token that "
        "is in `end_ids`, but not before it has `sampling_params.min_tokens` outputs; then "
        "`stop_reason` is the token if it is one of `sampling_params.stop_token_ids`, and None "
        "if it is the model's own end of text. It ends with "
        "`RequestStatus.FINISHED_LENGTH_CAPPED` when it has `max_tokens` outputs.\n\n"
        "Keep this: `all_token_ids` is the prompt followed by the outputs. A token that is a "
        "stop token and the last one allowed is a stop.",
        hints=(
            "There are two lists to append to and two reasons to end. Which reason is asked "
            "first, if both hold?",
            "Count the outputs after the token was appended. `min_tokens=2` means: the second "
            "output may be the last, the first may not.",
            "if token_id in self.end_ids and num_outputs >= self.sampling_params.min_tokens: "
            "...  elif num_outputs == self.max_tokens: ...",
        ),
        test_module="test_request",
        tests=(
            "test_max_tokens_caps_the_length",
            "test_every_eos_id_of_the_model_stops",
            "test_a_stop_token_names_itself_and_eos_does_not",
            "test_ignore_eos_ignores_eos_but_not_stop_tokens",
            "test_nothing_stops_before_min_tokens",
            "test_a_stop_token_at_the_last_place_is_a_stop_and_not_a_length",
        ),
        probe=endings,
    ),
    Task(
        number="1.2",
        title="The loop that admits requests",
        minutes=20,
        difficulty=2,
        module="fcfs_scheduler",
        place="FCFSScheduler._admit",
        write="This is continuous batching: in every step, requests move from the front of the "
        "waiting queue into the batch for as long as they fit.\n\n"
        "`budget` is the number of tokens that this step may still compute. While somebody "
        "waits and fewer than `max_num_seqs` run, look at the first in line "
        "(`self.waiting.peek_request()`). Its whole prompt, `request.num_tokens`, must fit the "
        "budget, `self.may_start(request)` must be true (a feature may hold it back), and "
        "`self._has_room(request)` too. If so, take it out "
        "(`self.waiting.pop_request()`), seat it (`self._seat(request)`), and note how many "
        "tokens it computes. If not, stop.\n\n"
        "Return a dictionary from request id to number of tokens, in the order of admission.\n\n"
        "Keep this: nobody overtakes. The first that does not fit ends the loop, even if a "
        "shorter one behind it would fit. Look before you take: a request that does not fit "
        "must still be in the queue.",
        hints=(
            "It is one `while` loop with one `break` in it.",
            "Three things change when a request is admitted: the queue, the batch, and the "
            "budget that is left for the next one.",
            "while self.waiting and len(self.running) < self.max_num_seqs: peek; break if "
            "num_tokens > budget, or not self.may_start(request), or not self._has_room(request); "
            "seat what pop_request gives; admitted[request.request_id] = num_tokens; "
            "budget -= num_tokens",
        ),
        test_module="test_fcfs_scheduler",
        tests=(
            "test_running_requests_get_their_token_before_anyone_is_admitted",
            "test_the_budget_left_over_by_running_requests_is_the_limit_for_prompts",
            "test_a_short_prompt_does_not_overtake_a_long_one",
            "test_running_never_exceeds_max_num_seqs_however_many_arrive_in_one_step",
            "test_a_freed_slot_is_taken_in_the_very_next_step",
            "test_the_largest_request_that_fits_is_served_to_its_last_token",
        ),
        probe=admissions,
        engine=None,
    ),
    Task(
        number="1.3",
        title="The rectangle that a model wants",
        minutes=15,
        difficulty=2,
        module="input_batch",
        place="InputBatch.to_tensors",
        write="Requests compute different numbers of tokens in a step. A plain model wants a "
        "rectangle, so short rows are padded on the right.\n\n"
        "`self.token_ids` has a list of tokens for each request, and `self.start_positions` the "
        "position of the first of them. Make three tensors of int64 on `device`, each "
        "`[batch_size, max_len]`: the token ids, with `pad_token_id` behind them; a mask, 1 "
        "for a token and 0 for padding; the positions, with 0 in the padding. A batch of no "
        "requests makes three tensors of shape `[0, 0]`. Begin with `import torch`: this file "
        "does without it elsewhere.\n\n"
        "Keep this: a row counts on from where its request stands, not from 0. The batch "
        "itself stays as it is, so that calling this twice gives the same.",
        hints=(
            "Work on lists, row by row, and make tensors at the end. `max(..., default=0)` is "
            "there for the empty batch.",
            "`row + [x] * n` makes a new list. `row += [x] * n` changes the one that the batch "
            "still needs.",
            "positions of a row: [*range(start, start + len(row))] + [0] * num_padding; for the "
            "empty batch: torch.tensor(ids, device=device).long().view(self.batch_size, max_len)",
        ),
        test_module="test_input_batch",
        tests=(
            "test_the_worked_example_as_tensors",
            "test_padding_never_holds_what_was_in_memory",
            "test_making_tensors_changes_nothing",
            "test_an_empty_plan_is_an_empty_batch",
        ),
        probe=rectangles,
        engine=None,
    ),
    Task(
        number="1.4",
        title="Tell the runner only what is new",
        minutes=20,
        difficulty=2,
        module="scheduler_books",
        place="RunnerDelta.encode",
        write="The scheduler decides, the runner computes. The runner keeps a copy of each "
        "request, so a plan carries only what that copy lacks.\n\n"
        "First hand over the ids of the requests that have ended since the last plan: "
        "`plan.finished_req_ids` gets the set `self._finished_req_ids`, and a new empty set "
        "takes its place. Then go through `plan.scheduled_requests`. `self._num_sent` maps the "
        "id of a request to the number of its tokens that the runner has.\n\n"
        "Not in it: append `self.describe(request)` to `plan.scheduled_new_reqs`. In it: append "
        "to the four lists of `plan.scheduled_cached_reqs`: the id to `req_ids`, the tokens "
        "that the runner lacks to `new_token_ids`, `request.num_computed_tokens` to "
        "`num_computed_tokens`, the number of outputs to `num_output_tokens`.\n\n"
        "Keep this: after the plan, the runner's copy has all of `request.all_token_ids`, so "
        "`_num_sent` says how many those are. Each token is sent once.",
        hints=(
            "The tokens that the runner lacks are a slice of `request.all_token_ids`.",
            "`a, b = b, set()` hands a set over and puts a new one in its place. If both sides "
            "kept the same set, old ends would be told again and again.",
            "num_known = self._num_sent.get(id); if None: describe, else: "
            "new_token_ids.append(tokens[num_known:]) and the other three; in both cases "
            "self._num_sent[id] = len(tokens)",
        ),
        test_module="test_fcfs_scheduler",
        tests=(
            "test_a_request_that_never_ran_is_not_reported_as_finished",
            "test_an_id_can_be_used_again_even_while_its_last_step_is_under_way",
            "TestFCFSMachine::runTest",
        ),
        probe=messages,
        engine=None,
    ),
)
