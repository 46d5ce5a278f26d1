"""From plan to rows to tensors, and what stands in the padding."""

from __future__ import annotations

import random

import pytest
import torch

from fcfs_scheduler import FCFSScheduler
from input_batch import InputBatch, prepare_inputs_from_scheduler_output
from request import Request, SamplingParams
from scheduler_interface import CachedRequestData, NewRequestData, SchedulerOutput


def new(req_id: str, prompt: list[int], num_computed_tokens: int = 0) -> NewRequestData:
    return NewRequestData(req_id, prompt, SamplingParams(), num_computed_tokens)


@pytest.fixture
def mixed() -> InputBatch:
    """Two requests that arrive and two that run, as a scheduler with a budget of 20 plans them."""
    scheduler = FCFSScheduler(max_num_batched_tokens=20)
    for tokens in ({"c": [9, 10]}, {"d": [13, 14, 15, 16]}):
        ((req_id, prompt),) = tokens.items()
        scheduler.add_request(Request.from_tokens(req_id, prompt))
        sampled = {"c": [11]} if req_id == "c" else {"c": [12], "d": [17]}
        scheduler.update_from_output(scheduler.schedule(), sampled)
    scheduler.add_request(Request.from_tokens("a", [1, 2, 3, 4, 5]))
    scheduler.add_request(Request.from_tokens("b", [6, 7, 8]))
    plan = scheduler.schedule()
    assert plan.total_num_scheduled_tokens == 10
    return prepare_inputs_from_scheduler_output(plan)


def test_the_worked_example(mixed):
    """Trap 29: c knows 4 tokens, [9,10] and [11,12]. It feeds back the last one, which stands at
    position 3; d knows 5 and feeds back position 4."""
    assert mixed.req_ids == mixed.logit_req_ids == ["a", "b", "c", "d"]
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


def test_padding_never_holds_what_was_in_memory():
    """Trap 33. In this mode PyTorch fills memory that it does not initialise with a huge number."""
    rng = random.Random(0)
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(50):
            lengths = [rng.randint(1, 9) for _ in range(rng.randint(1, 6))]
            rows = [[rng.randint(1, 60) for _ in range(n)] for n in lengths]
            starts = [rng.randint(0, 9) for _ in rows]
            ids = [str(i) for i in range(len(rows))]
            batch = InputBatch(ids, rows, starts, [True] * len(rows), lengths)
            tensors = batch.to_tensors("cpu")
            mask = tensors[1].bool()
            assert mask.sum(dim=1).tolist() == lengths
            assert all(t.shape == (len(rows), max(lengths)) for t in tensors)
            assert [row[m].tolist() for row, m in zip(tensors[0], mask)] == rows
            assert all(not t[~mask].any() for t in tensors)
    finally:
        torch.use_deterministic_algorithms(False)


def test_making_tensors_changes_nothing(mixed):
    before = [list(row) for row in mixed.token_ids]
    one, other = mixed.to_tensors("cpu"), mixed.to_tensors("cpu")
    one[0].zero_()
    assert mixed.token_ids == before
    assert other[0].any()


def test_an_empty_plan_is_an_empty_batch():
    batch = prepare_inputs_from_scheduler_output(SchedulerOutput(finished_req_ids={"a"}))
    assert (batch.batch_size, batch.num_tokens, batch.logit_req_ids) == (0, 0, [])
    assert all(t.shape == (0, 0) for t in batch.to_tensors("cpu"))


def test_a_new_request_starts_behind_what_is_computed_already():
    """As a child of a forked request does, or one that hits a prefix cache (chapter 3)."""
    plan = SchedulerOutput([new("a", [1, 2, 3, 4], 3)], num_scheduled_tokens={"a": 1})
    batch = prepare_inputs_from_scheduler_output(plan)
    assert (batch.token_ids, batch.start_positions) == ([[4]], [3])
    assert (batch.is_prefill, batch.prompt_lens) == ([True], [4])


@pytest.mark.parametrize("num_computed", [0, 2])
def test_a_resumed_request_computes_its_outputs_again(num_computed):
    """Trap 19: it has outputs and is five tokens behind all the same. Only counters say so."""
    cached = CachedRequestData(["a"], [[1, 2, 3, 8, 9]], [num_computed], [2], [[]], {"a"})
    plan = SchedulerOutput(
        scheduled_cached_reqs=cached, num_scheduled_tokens={"a": 5 - num_computed}
    )
    batch = prepare_inputs_from_scheduler_output(plan)
    assert batch.token_ids == [[1, 2, 3, 8, 9][num_computed:]]
    assert batch.start_positions == [num_computed]
    assert (batch.is_prefill, batch.prompt_lens) == ([True], [3])


def test_a_resumed_request_with_its_prompt_computed_is_no_prefill():
    cached = CachedRequestData(["a"], [[1, 2, 3, 8, 9]], [3], [2], [[]], {"a"})
    plan = SchedulerOutput(scheduled_cached_reqs=cached, num_scheduled_tokens={"a": 2})
    batch = prepare_inputs_from_scheduler_output(plan)
    assert (batch.token_ids, batch.is_prefill) == ([[8, 9]], [False])


@pytest.mark.parametrize(
    "plan",
    [
        SchedulerOutput([new("a", [1, 2, 3])], num_scheduled_tokens={"a": 4}),
        SchedulerOutput([new("a", [1, 2, 3], 2)], num_scheduled_tokens={"a": 2}),
        SchedulerOutput(
            scheduled_cached_reqs=CachedRequestData(["a"], [[]], [3], [1], [[]]),
            num_scheduled_tokens={"a": 1},
        ),
        SchedulerOutput(
            scheduled_cached_reqs=CachedRequestData(["a"], [[5, 6]], [3], [1], [[]]),
            num_scheduled_tokens={"a": 1},
        ),
    ],
)
def test_a_plan_that_does_not_carry_its_tokens_is_an_error(plan):
    with pytest.raises(ValueError, match=r"'a': \d tokens are scheduled and the plan carries \d"):
        prepare_inputs_from_scheduler_output(plan)


def test_preparing_a_plan_twice_gives_the_same_batch():
    plan = SchedulerOutput([new("a", [1, 2, 3])], num_scheduled_tokens={"a": 3})
    assert prepare_inputs_from_scheduler_output(plan) == prepare_inputs_from_scheduler_output(plan)
