"""The plan of one step: its sums, its emptiness, and that no two plans share a list."""

from __future__ import annotations

import dataclasses
from typing import get_type_hints

import pytest

from fcfs_scheduler import FCFSScheduler
from request import Request, SamplingParams
from scheduler_interface import (
    BlockCopy,
    CachedRequestData,
    KVMemory,
    NewRequestData,
    SchedulerInterface,
    SchedulerOutput,
    UnlimitedKVMemory,
)


def test_a_plan_without_tokens_is_empty_even_if_it_carries_news():
    assert SchedulerOutput().is_empty
    assert SchedulerOutput(finished_req_ids={"a"}).is_empty
    assert not SchedulerOutput(num_scheduled_tokens={"a": 1}).is_empty


def test_the_total_is_the_sum_over_requests_under_both_names():
    output = SchedulerOutput(num_scheduled_tokens={"a": 5, "b": 1, "c": 3})
    assert output.total_num_scheduled_tokens == output.total_tokens == 9
    assert SchedulerOutput().total_num_scheduled_tokens == 0


def test_no_two_plans_share_a_container():
    """Trap 50: a mutable default is state of the whole process."""
    for make in (
        SchedulerOutput,
        CachedRequestData.make_empty,
        lambda: NewRequestData("a", [1], SamplingParams()),
    ):
        one, other = make(), make()
        for field in dataclasses.fields(one):
            value = getattr(one, field.name)
            if isinstance(value, (list, dict, set)) and field.name != "prompt_token_ids":
                assert value is not getattr(other, field.name), field.name
                assert not value, field.name


def test_cached_data_counts_its_requests():
    assert CachedRequestData.make_empty().num_reqs == 0
    data = CachedRequestData(["a", "b"], [[1], [2]], [3, 4], [1, 1], [[], []])
    assert data.num_reqs == 2


def test_a_block_copy_is_a_value():
    copy = BlockCopy("a", 1, src_block_id=2, dst_block_id=3)
    assert copy == BlockCopy(*("a", 1, 2, 3))
    with pytest.raises(dataclasses.FrozenInstanceError):
        copy.dst_block_id = 4


def methods(protocol: type) -> set[str]:
    return {name for name, value in vars(protocol).items() if callable(value) and name[0] != "_"}


@pytest.mark.parametrize(
    ("implementation", "protocol"),
    [(FCFSScheduler, SchedulerInterface), (UnlimitedKVMemory, KVMemory)],
)
def test_an_implementation_has_every_method_with_the_same_types(implementation, protocol):
    assert len(methods(protocol)) >= 6
    for name in methods(protocol):
        promised = get_type_hints(getattr(protocol, name))
        given = get_type_hints(getattr(implementation, name))
        given.setdefault("return", promised.get("return"))
        assert given == promised, name


def test_unlimited_memory_grants_everything_and_shares_nothing():
    memory = UnlimitedKVMemory()
    parent = Request.from_tokens("p", [1, 2, 3])
    child = Request.from_tokens("c", [1, 2, 3])
    child.num_computed_tokens = 2
    assert memory.fits_when_empty(10**9)
    assert memory.allocate_slots(parent, 10**9, 10**9)
    memory.fork(parent, child)
    assert child.num_computed_tokens == 0
    assert list(memory.get_block_ids("p")) == []
    assert memory.take_block_copies() == []
