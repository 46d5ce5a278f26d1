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
    connectors = [Recorder(num_tokens) for num_tokens in offers]
    return ConnectorChain(connectors), connectors


def request(request_id: str = "a") -> Request:
    return Request.from_tokens(request_id, [1, 2, 3])


@pytest.mark.parametrize(
    "offers, chosen", [([8], 0), ([0, 8], 1), ([8, 4], 0), ([4, 8, 8, 2], 1), ([8, 8], 0)]
)
@pytest.mark.parametrize("num_arrived", [4, 0])
def test_the_first_of_those_with_the_most_tokens_loads(offers, chosen, num_arrived):
    chain, connectors = make(*offers)
    assert chain.get_num_new_matched_tokens(request(), 4) == (8, True)
    assert [connector.take() for connector in connectors] == [[("ask", "a", 4)]] * len(offers)
    chain.update_state_after_alloc(request(), [7, 9], 8)
    connectors[chosen].finished = None
    assert chain.get_finished_load("a") is None
    connectors[chosen].finished = num_arrived
    assert chain.get_finished_load("a") == num_arrived and not chain._chosen
    calls = [connector.take() for connector in connectors]
    assert calls.pop(chosen) == [("load", "a", [7, 9], 8), ("poll", "a"), ("poll", "a")]
    assert not any(calls), "the others are not troubled"


def test_load_async_of_the_chosen_connector_is_returned():
    connectors = [Recorder(4, True), Recorder(8, False)]
    assert ConnectorChain(connectors).get_num_new_matched_tokens(request(), 0) == (8, False)


def test_nothing_to_load_chooses_no_connector():
    chain, connectors = make(0, 0)
    assert chain.get_num_new_matched_tokens(request(), 0) == (0, False)
    assert [connector.take() for connector in connectors] == [[("ask", "a", 0)]] * 2
    assert not chain._chosen


def test_the_end_of_a_request_reaches_every_connector_that_was_asked():
    chain, connectors = make(4, 8)
    chain.get_num_new_matched_tokens(request(), 0)
    chain.update_state_after_alloc(request(), [1, 2], 8)
    for connector in connectors:
        connector.take()
    chain.cancel_load("a")
    assert [connector.take() for connector in connectors] == [[("cancel", "a")]] * 2
    assert not chain._chosen
    chain.cancel_load("never seen")


def test_the_connector_is_chosen_by_request():
    chain, connectors = make(4, 8)
    chain.get_num_new_matched_tokens(request("a"), 0)
    connectors[0].offer = (12, True)
    chain.get_num_new_matched_tokens(request("b"), 0)
    for connector in connectors:
        connector.take()
    chain.update_state_after_alloc(request("a"), [1, 2], 8)
    chain.update_state_after_alloc(request("b"), [3, 4, 5], 12)
    assert connectors[0].take() == [("load", "b", [3, 4, 5], 12)]
    assert connectors[1].take() == [("load", "a", [1, 2], 8)]


def test_the_last_answer_counts():
    """Asked again after the cache has evicted blocks, another connector can have more, or none
    any."""
    chain, connectors = make(4, 8)
    chain.get_num_new_matched_tokens(request(), 4)
    connectors[0].offer = (12, True)
    assert chain.get_num_new_matched_tokens(request(), 0) == (12, True)
    chain.update_state_after_alloc(request(), [1, 2, 3], 12)
    assert connectors[0].take()[-1][0] == "load"
    for connector in connectors:
        connector.offer = (0, False)
    chain.get_num_new_matched_tokens(request(), 0)
    assert not chain._chosen


def test_all_save_and_all_close():
    chain, connectors = make(0, 8)
    chain.request_finished(request(), [1, 2])
    chain.invalidate(request(), 1, 2)
    chain.close()
    calls = [("save", "a", [1, 2]), ("invalidate", "a", 1, 2), ("close",)]
    assert [connector.take() for connector in connectors] == [calls] * 2


def test_all_are_bound_to_one_memory():
    chain, connectors = make(0, 8)
    io = object()
    chain.bind(io, 4, [("model", "m")])
    for connector in (chain, *connectors):
        assert connector.io is io and connector.block_size == 4
        assert connector.namespace == (("model", "m"),)


def test_a_connector_is_bound_to_one_memory():
    """The first engine would load into the second's, and save what is there: wrong tokens."""
    (chain, connectors), (other, (free, _)) = make(0, 8), make(0, 8)
    chain.bind(object(), 4, [])
    tiers = TieredCache(KVTierConfig(host_blocks=1))
    tiers.bind(io := object(), 4, [])
    other.connectors[1] = connectors[1]
    for connector in (chain, *connectors, tiers, other):
        with pytest.raises(ValueError, match="must belong to this engine"):
            connector.bind(object(), 4, [])
    assert tiers.io is io and not free.is_bound, "all of a chain, or none"


def test_connectors_with_loads_share_the_timeout():
    chain, connectors = make(8, 4)
    chain.wait_for_load(1.0)
    assert [connector.take() for connector in connectors] == [[], []]
    for request_id in "ab":
        chain.get_num_new_matched_tokens(request(request_id), 0)
        chain.update_state_after_alloc(request(request_id), [1, 2], 8)
    connectors[0].take(), connectors[1].take()
    chain.wait_for_load(1.0)
    assert [connector.take() for connector in connectors] == [[("wait", 1.0)], []]
    connectors[1].offer = (12, True)
    chain.get_num_new_matched_tokens(request("c"), 0)
    connectors[0].take(), connectors[1].take()
    chain.wait_for_load(1.0)
    assert [connector.take() for connector in connectors] == [[("wait", 0.5)]] * 2
