"""The runner's state built from plans, the rows and tensors built from a plan, and the padding."""

from __future__ import annotations

import pytest
import torch

from fcfs_scheduler import FCFSScheduler
from input_batch import (
    InputBatch,
    RunnerState,
    prepare_inputs_from_scheduler_output,
)
from request import Request, SamplingParams
from scheduler_interface import CachedRequestData, NewRequestData, SchedulerOutput, StepOutput


def new(req_id: str, prompt: list[int], num_computed_tokens: int = 0) -> NewRequestData:
    return NewRequestData(req_id, prompt, SamplingParams(), num_computed_tokens)


def state_of(outputs: dict[str, list[int]]) -> RunnerState:
    """The state after these outputs by request. Each request has the prompt [1, 2, 3]."""
    state = RunnerState()
    for req_id, token_ids in outputs.items():
        state.admit(new(req_id, [1, 2, 3]))
        state.requests[req_id].output_token_ids += token_ids
    return state


def prepare(plan: SchedulerOutput, state: RunnerState | None = None) -> InputBatch:
    return prepare_inputs_from_scheduler_output(plan, state or RunnerState())


@pytest.fixture
def mixed() -> InputBatch:
    """Two requests that arrive and two that run, as a scheduler with a budget of 20 plans them."""
    scheduler, state = FCFSScheduler(max_num_batched_tokens=20), RunnerState()
    for tokens in ({"c": [9, 10]}, {"d": [13, 14, 15, 16]}):
        ((req_id, prompt),) = tokens.items()
        scheduler.add_request(Request.from_tokens(req_id, prompt))
        sampled = {"c": [11]} if req_id == "c" else {"c": [12], "d": [17]}
        plan = scheduler.schedule()
        prepare(plan, state)
        scheduler.update_from_output(plan, StepOutput(sampled))
    scheduler.add_request(Request.from_tokens("a", [1, 2, 3, 4, 5]))
    scheduler.add_request(Request.from_tokens("b", [6, 7, 8]))
    plan = scheduler.schedule()
    assert plan.total_num_scheduled_tokens == 10
    return prepare(plan, state)


def test_the_worked_example(mixed):
    """Trap 29: c knows 4 tokens, [9,10] and [11,12]. It feeds back the last one, at position 3; d
    knows 5 and feeds back position 4."""
    assert mixed.req_ids == ["a", "b", "c", "d"]
    assert mixed.token_ids == [[1, 2, 3, 4, 5], [6, 7, 8], [12], [17]]
    assert mixed.start_positions == [0, 0, 3, 4]
    assert mixed.is_prefill == [True, True, False, False]
    assert mixed.prompt_lens == [5, 3, 2, 4]
    assert (mixed.batch_size, mixed.num_tokens) == (4, 10)


def test_the_worked_example_as_tensors(mixed):
    token_ids, attention_mask, positions = mixed.to_tensors("cpu", pad_token_id=60)
    assert token_ids.tolist() == [
        [1, 2, 3, 4, 5],
        [6, 7, 8, 60, 60],
        [12, 60, 60, 60, 60],
        [17, 60, 60, 60, 60],
    ]
    assert attention_mask.tolist() == [
        [1, 1, 1, 1, 1],
        [1, 1, 1, 0, 0],
        [1, 0, 0, 0, 0],
        [1, 0, 0, 0, 0],
    ]
    assert positions.tolist() == [
        [0, 1, 2, 3, 4],
        [0, 1, 2, 0, 0],
        [3, 0, 0, 0, 0],
        [4, 0, 0, 0, 0],
    ]
    assert {t.dtype for t in (token_ids, attention_mask, positions)} == {torch.int64}
    # The longest row is not the first, and a prompt has the token that pads.
    batch = InputBatch([*"ab"], [[9], [60, 8]], [4, 0], [True, True], [5, 2])
    token_ids, attention_mask, positions = batch.to_tensors("cpu", pad_token_id=60)
    assert token_ids.tolist() == [[9, 60], [60, 8]]
    assert attention_mask.tolist() == [[1, 0], [1, 1]]
    assert positions.tolist() == [[4, 0], [0, 1]]
    assert {t.device.type for t in batch.to_tensors("meta")} == {"meta"}


def test_padding_never_holds_what_was_in_memory():
    """Trap 33. In this mode PyTorch fills memory that it does not initialise with a huge number."""
    rows, lengths = [[5, 6, 7], [8], [9, 4]], [3, 1, 2]
    torch.use_deterministic_algorithms(True)
    try:
        tensors = InputBatch([*"abc"], rows, [0, 7, 2], [True] * 3, lengths).to_tensors("cpu")
    finally:
        torch.use_deterministic_algorithms(False)
    mask = tensors[1].bool()
    assert mask.sum(dim=1).tolist() == lengths
    assert [row[m].tolist() for row, m in zip(tensors[0], mask)] == rows
    assert all(not t[~mask].any() for t in tensors)


def test_making_tensors_changes_nothing(mixed):
    before = [list(row) for row in mixed.token_ids]
    one, other = mixed.to_tensors("cpu"), mixed.to_tensors("cpu")
    one[0].zero_()
    assert mixed.token_ids == before
    assert other[0].any()


def test_an_empty_plan_is_an_empty_batch():
    batch = prepare(SchedulerOutput(finished_req_ids={"a"}))
    assert (batch.batch_size, batch.num_tokens, batch.req_ids) == (0, 0, [])
    assert all(t.shape == (0, 0) for t in batch.to_tensors("cpu"))


def test_a_new_request_starts_after_its_computed_tokens():
    """As one that hits a prefix cache does (chapter 3)."""
    plan = SchedulerOutput([new("a", [1, 2, 3, 4], 3)], num_scheduled_tokens={"a": 1})
    batch = prepare(plan)
    assert (batch.token_ids, batch.start_positions) == ([[4]], [3])
    assert (batch.is_prefill, batch.prompt_lens) == ([True], [4])


@pytest.mark.parametrize("num_computed", [0, 2])
def test_a_resumed_request_computes_its_outputs_again(num_computed):
    """Trap 19: it has outputs and is five tokens behind all the same. Only counters say so."""
    cached = CachedRequestData(["a"], [[1, 2, 3, 8, 9]], [num_computed], [2], [()], {"a"})
    plan = SchedulerOutput(
        scheduled_cached_reqs=cached, num_scheduled_tokens={"a": 5 - num_computed}
    )
    batch = prepare(plan, state_of({"a": [8]}))
    assert batch.token_ids == [[1, 2, 3, 8, 9][num_computed:]]
    assert batch.start_positions == [num_computed]
    assert (batch.is_prefill, batch.prompt_lens) == ([True], [3])


def test_a_resumed_request_with_its_prompt_computed_is_no_prefill():
    cached = CachedRequestData(["a"], [[1, 2, 3, 8, 9]], [3], [2], [()], {"a"})
    plan = SchedulerOutput(scheduled_cached_reqs=cached, num_scheduled_tokens={"a": 2})
    batch = prepare(plan, state_of({"a": [8]}))
    assert (batch.token_ids, batch.is_prefill) == ([[8, 9]], [False])


@pytest.mark.parametrize(
    "plan",
    [
        SchedulerOutput([new("a", [1, 2, 3], 2)], num_scheduled_tokens={"a": 2}),
        SchedulerOutput(
            scheduled_cached_reqs=CachedRequestData(["a"], [[5, 6]], [3], [2], [()]),
            num_scheduled_tokens={"a": 1},
        ),
    ],
)
def test_a_plan_that_does_not_end_at_the_last_known_token_is_an_error(plan):
    message = r"'a': positions \[\d, \d\) are scheduled, .*\d tokens"
    with pytest.raises(ValueError, match=message):
        prepare(plan, state_of({"a": []}))


def test_preparing_a_plan_does_not_change_it():
    """Two runners of one plan, as two ranks are: what one appends later is not in the other's."""
    plan = SchedulerOutput([new("a", [1, 2, 3])], num_scheduled_tokens={"a": 3})
    one, other = RunnerState(), RunnerState()
    assert prepare(plan, one) == prepare(plan, other)
    cached = CachedRequestData(["a"], [[7]], [3], [1])
    prepare(SchedulerOutput(scheduled_cached_reqs=cached, num_scheduled_tokens={"a": 1}), one)
    assert one.requests["a"].output_token_ids == [7]
    assert other.requests["a"].output_token_ids == []
    assert (plan.scheduled_new_reqs[0].prompt_token_ids, cached.new_token_ids) == ([1, 2, 3], [[7]])


@pytest.mark.parametrize(
    ("known", "num_outputs", "sent", "outputs"),
    [
        ([8, 9], 3, [10], [8, 9, 10]),
        ([8, 9], 2, [], [8, 9]),
        ([8, 9, 10], 2, [], [8, 9]),  # tokens after the last known one are dropped
        ([8, 9], 3, [9, 10], [8, 9, 10]),  # sent again from an earlier token on
        ([8, 9, 10], 3, [11, 12], [8, 11, 12]),
        ([8, 9], 2, [3, 8, 9], [8, 9]),  # from within the prompt on
        ([8], 3, [1, 2, 3, 8, 9, 10], [8, 9, 10]),  # whole
        ([8], 0, [1, 2, 3], []),
    ],
)
def test_the_tokens_that_are_sent_overlay_those_that_are_known(known, num_outputs, sent, outputs):
    """The last of them is output number `num_outputs`."""
    state = state_of({"a": known, "b": [8]})
    before = state.requests["a"].output_token_ids
    cached = CachedRequestData(["b", "a"], [[9], sent], [0, 0], [2, num_outputs])
    state.apply(SchedulerOutput(scheduled_cached_reqs=cached))
    assert state.requests["a"].output_token_ids == outputs
    assert state.requests["a"].output_token_ids is before, "appended to, not copied, at every step"
    assert state.requests["b"].output_token_ids == [8, 9]


def test_an_id_may_end_and_begin_again_in_one_plan():
    """And begin again though the plan that finished it was lost: it is released all the same."""
    released = []

    class Listening(RunnerState):
        def release(self, req_id):
            super().release(req_id)
            released.append(req_id)

    state = Listening()
    state.apply(SchedulerOutput([new("a", [1]), new("b", [2])]))
    plan = SchedulerOutput([new("a", [5, 6]), new("b", [7])], finished_req_ids={"a", "never here"})
    state.apply(plan)
    assert released == ["a", "b"]
    assert [state.requests[name].tokens(0, 9) for name in "ab"] == [[5, 6], [7]]
