"""The rows and tensors built from a plan, and the padding."""

from __future__ import annotations

import pytest
import torch

from fcfs_scheduler import FCFSScheduler
from input_batch import InputBatch, RunnerState, prepare_inputs_from_scheduler_output
from request import Request, SamplingParams
from scheduler_interface import CachedRequestData, NewRequestData, SchedulerOutput, StepOutput


def new(req_id: str, prompt: list[int], num_computed_tokens: int = 0) -> NewRequestData:
    return NewRequestData(req_id, prompt, SamplingParams(), num_computed_tokens)


def resumed(num_computed: int) -> SchedulerOutput:
    """Trap 19: it has outputs and is behind all the same. Only counters say so."""
    cached = CachedRequestData(["a"], [[1, 2, 3, 8, 9]], [num_computed], [2], [()], {"a"})
    counts = {"a": 5 - num_computed}
    return SchedulerOutput(scheduled_cached_reqs=cached, num_scheduled_tokens=counts)


def prepare(plan: SchedulerOutput, state: RunnerState | None = None) -> InputBatch:
    """After a step in which `a` had the prompt [1, 2, 3] and the output 8, if there is no state."""
    if state is None:
        state = RunnerState()
        state.admit(new("a", [1, 2, 3]))
        state.requests["a"].output_token_ids.append(8)
    return prepare_inputs_from_scheduler_output(plan, state)


def test_the_worked_example():
    """Two requests that arrive and two that run, as a scheduler with a budget of 20 plans them.
    Trap 29: c knows 4 tokens, [9,10] and [11,12]. It feeds back the last one, at position 3; d
    knows 5 and feeds back position 4."""
    scheduler = FCFSScheduler(max_num_batched_tokens=20)
    state = RunnerState()
    for name, prompt, sampled in (
        ("c", [9, 10], {"c": [11]}),
        ("d", [13, 14, 15, 16], {"c": [12], "d": [17]}),
    ):
        scheduler.add_request(Request.from_tokens(name, prompt))
        plan = scheduler.schedule()
        prepare(plan, state)
        scheduler.update_from_output(plan, StepOutput(sampled))
    scheduler.add_request(Request.from_tokens("a", [1, 2, 3, 4, 5]))
    scheduler.add_request(Request.from_tokens("b", [6, 7, 8]))
    mixed = prepare(plan := scheduler.schedule(), state)
    assert mixed.req_ids == ["a", "b", "c", "d"]
    assert mixed.token_ids == [[1, 2, 3, 4, 5], [6, 7, 8], [12], [17]]
    assert mixed.start_positions == [0, 0, 3, 4]
    assert (mixed.batch_size, plan.total_num_scheduled_tokens, plan.is_empty) == (4, 10, False)


BATCHES = {  # rows and start positions
    "worked example": ([[1, 2, 3, 4, 5], [6, 7, 8], [12], [17]], [0, 0, 3, 4]),
    "the longest is not the first, and a prompt has the token that pads": ([[9], [60, 8]], [4, 0]),
    "empty": ([], []),
}


@pytest.mark.net
@pytest.mark.parametrize("name", BATCHES)
def test_rows_become_tensors_as_often_as_they_are_asked_for(name):
    """Trap 33: in deterministic mode PyTorch fills memory that it does not initialise."""
    rows, starts = BATCHES[name]
    batch = InputBatch([*map(str, starts)], [*map(list, rows)], starts)
    longest = max(map(len, rows), default=0)
    expected = [[], [], []]
    for row, start in zip(rows, starts, strict=True):
        padding = longest - len(row)
        expected[0].append(row + [60] * padding)
        expected[1].append([1] * len(row) + [0] * padding)
        expected[2].append([start + i for i in range(len(row))] + [0] * padding)
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(2):
            tensors = batch.to_tensors("cpu", pad_token_id=60)
            assert [tensor.tolist() for tensor in tensors] == expected
            assert all(t.dtype == torch.int64 and t.shape == (len(rows), longest) for t in tensors)
            tensors[0].zero_()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("plan", "row", "start"),
    [
        (SchedulerOutput([new("a", [1, 2, 3, 4], 3)], num_scheduled_tokens={"a": 1}), [4], 3),
        (resumed(0), [1, 2, 3, 8, 9], 0),
        (resumed(2), [3, 8, 9], 2),
        (resumed(3), [8, 9], 3),
    ],
    ids=["new, with a cached prefix", "resumed", "resumed, cached", "resumed, its prompt cached"],
)
def test_a_row_begins_where_the_plan_says(plan, row, start):
    batch = prepare(plan)
    assert (batch.token_ids, batch.start_positions) == ([row], [start])


@pytest.mark.parametrize("count", [2, 0])
def test_a_plan_that_does_not_end_at_the_last_known_token_is_an_error(count):
    plan = SchedulerOutput([new("a", [1, 2, 3], 2)], num_scheduled_tokens={"a": count})
    with pytest.raises(ValueError, match=r"'a': positions \[\d, \d\) are scheduled, .*\d tokens"):
        prepare(plan)
