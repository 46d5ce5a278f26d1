"""A chain of connectors asks all, loads from one, and saves to all."""

from __future__ import annotations

import pytest

from kv_connector import ConnectorChain, KVConnector
from request import Request
from tiered_cache import KVTierConfig, TieredCache


class Recorder(KVConnector):
    """Offers what it is told to, and writes down what it is asked."""

    def __init__(self, num_tokens: int = 0, load_async: bool = True) -> None:
        self.offer = (num_tokens, load_async)
        self.finished: int | None = None
        self.calls: list[tuple] = []

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        self.calls.append(("ask", request.request_id, num_computed_tokens))
        return self.offer

    def update_state_after_alloc(self, request, block_ids, num_external_tokens):
        self.calls.append(("load", request.request_id, list(block_ids), num_external_tokens))

    def get_finished_load(self, request_id):
        self.calls.append(("poll", request_id))
        return self.finished

    def cancel_load(self, request_id):
        self.calls.append(("cancel", request_id))

    def request_finished(self, request, block_ids):
        self.calls.append(("save", request.request_id, list(block_ids)))

    def invalidate(self, request, start, end):
        self.calls.append(("invalidate", request.request_id, start, end))

    def wait_for_load(self, timeout_s):
        self.calls.append(("wait", timeout_s))

    def close(self):
        self.calls.append(("close",))

    def take(self) -> list[tuple]:
        calls, self.calls = self.calls, []
        return calls


def make(*offers: int) -> tuple[ConnectorChain, list[Recorder]]:
    members = [Recorder(num_tokens) for num_tokens in offers]
    return ConnectorChain(members), members


def request(request_id: str = "a") -> Request:
    return Request.from_tokens(request_id, [1, 2, 3])


@pytest.mark.parametrize(
    "offers, chosen", [([8], 0), ([0, 8], 1), ([8, 4], 0), ([4, 8, 8, 2], 1), ([8, 8], 0)]
)
@pytest.mark.parametrize("num_arrived", [4, 0])
def test_the_first_of_those_with_the_most_tokens_loads(offers, chosen, num_arrived):
    chain, members = make(*offers)
    assert chain.get_num_new_matched_tokens(request(), 4) == (8, True)
    assert [member.take() for member in members] == [[("ask", "a", 4)]] * len(offers)
    chain.update_state_after_alloc(request(), [7, 9], 8)
    members[chosen].finished = None
    assert chain.get_finished_load("a") is None
    members[chosen].finished = num_arrived
    assert chain.get_finished_load("a") == num_arrived and not chain._chosen
    calls = [member.take() for member in members]
    assert calls.pop(chosen) == [("load", "a", [7, 9], 8), ("poll", "a"), ("poll", "a")]
    assert not any(calls), "the others are not troubled"


def test_what_the_chosen_one_says_about_the_background_is_passed_on():
    members = [Recorder(4, True), Recorder(8, False)]
    assert ConnectorChain(members).get_num_new_matched_tokens(request(), 0) == (8, False)


def test_nothing_to_load_chooses_nobody():
    chain, members = make(0, 0)
    assert chain.get_num_new_matched_tokens(request(), 0) == (0, False)
    assert [member.take() for member in members] == [[("ask", "a", 0)]] * 2
    assert not chain._chosen


def test_an_empty_chain_has_nothing():
    chain, _ = make()
    assert chain.get_num_new_matched_tokens(request(), 0) == (0, False)
    chain.cancel_load("a"), chain.request_finished(request(), [1]), chain.wait_for_load(1.0)
    chain.close()


def test_all_that_were_asked_about_a_request_are_told_that_it_is_over():
    chain, members = make(4, 8)
    chain.get_num_new_matched_tokens(request(), 0)
    chain.update_state_after_alloc(request(), [1, 2], 8)
    for member in members:
        member.take()
    chain.cancel_load("a")
    assert [member.take() for member in members] == [[("cancel", "a")]] * 2
    assert not chain._chosen
    chain.cancel_load("never seen")


def test_each_request_has_its_own_choice():
    chain, members = make(4, 8)
    chain.get_num_new_matched_tokens(request("a"), 0)
    members[0].offer = (12, True)
    chain.get_num_new_matched_tokens(request("b"), 0)
    for member in members:
        member.take()
    chain.update_state_after_alloc(request("a"), [1, 2], 8)
    chain.update_state_after_alloc(request("b"), [3, 4, 5], 12)
    assert members[0].take() == [("load", "b", [3, 4, 5], 12)]
    assert members[1].take() == [("load", "a", [1, 2], 8)]


def test_the_last_answer_counts():
    """Asked again, after the cache has lost something, another may have more, or nobody any."""
    chain, members = make(4, 8)
    chain.get_num_new_matched_tokens(request(), 4)
    members[0].offer = (12, True)
    assert chain.get_num_new_matched_tokens(request(), 0) == (12, True)
    chain.update_state_after_alloc(request(), [1, 2, 3], 12)
    assert members[0].take()[-1][0] == "load"
    for member in members:
        member.offer = (0, False)
    chain.get_num_new_matched_tokens(request(), 0)
    assert not chain._chosen


def test_all_save_and_all_close():
    chain, members = make(0, 8)
    chain.request_finished(request(), [1, 2])
    chain.invalidate(request(), 1, 2)
    chain.close()
    calls = [("save", "a", [1, 2]), ("invalidate", "a", 1, 2), ("close",)]
    assert [member.take() for member in members] == [calls] * 2


def test_all_are_bound_to_one_memory():
    chain, members = make(0, 8)
    io = object()
    chain.bind(io, 4, [("model", "m")])
    for connector in (chain, *members):
        assert connector.io is io and connector.block_size == 4
        assert connector.namespace == (("model", "m"),)


def test_nobody_is_bound_to_two_memories():
    """The first engine would load into the second's, and save what is there: wrong tokens."""
    (chain, members), (other, (free, _)) = make(0, 8), make(0, 8)
    chain.bind(object(), 4, [])
    tiers = TieredCache(KVTierConfig(host_blocks=1))
    tiers.bind(io := object(), 4, [])
    other.connectors[1] = members[1]
    for connector in (chain, *members, tiers, other):
        with pytest.raises(ValueError, match="must belong to this engine"):
            connector.bind(object(), 4, [])
    assert tiers.io is io and not free.is_bound, "all of a chain, or none"


def test_those_who_load_share_the_time_to_wait():
    chain, members = make(8, 4)
    chain.wait_for_load(1.0)
    assert [member.take() for member in members] == [[], []]
    for request_id in "ab":
        chain.get_num_new_matched_tokens(request(request_id), 0)
        chain.update_state_after_alloc(request(request_id), [1, 2], 8)
    members[0].take(), members[1].take()
    chain.wait_for_load(1.0)
    assert [member.take() for member in members] == [[("wait", 1.0)], []]
    members[1].offer = (12, True)
    chain.get_num_new_matched_tokens(request("c"), 0)
    members[0].take(), members[1].take()
    chain.wait_for_load(1.0)
    assert [member.take() for member in members] == [[("wait", 0.5)]] * 2
