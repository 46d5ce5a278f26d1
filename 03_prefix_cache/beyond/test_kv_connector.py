"""A chain of connectors asks all, loads from one, and saves to all."""

from __future__ import annotations

from unittest.mock import Mock, call

import pytest

from kv_connector import ConnectorChain, KVConnector
from request import Request
from tiered_cache import KVTierConfig, TieredCache

A, B = (Request.from_tokens(name, [1, 2, 3]) for name in "ab")
asked, loaded = call.get_num_new_matched_tokens, call.update_state_after_alloc


class Recorder(Mock):
    """A connector that records its calls."""

    bind, is_bound = KVConnector.bind, KVConnector.is_bound


def make(*offers: int) -> tuple[ConnectorChain, list[Recorder]]:
    connectors = [Recorder(spec=KVConnector) for _ in offers]
    for connector, num_tokens in zip(connectors, offers, strict=True):
        connector.get_num_new_matched_tokens.return_value = (num_tokens, True)
    return ConnectorChain(connectors), connectors


def take(connectors: list[Recorder]) -> list[list]:
    """The calls of each connector since the last time."""
    calls = [list(connector.mock_calls) for connector in connectors]
    for connector in connectors:
        connector.reset_mock()
    return calls


@pytest.mark.parametrize(
    "offers, chosen", [([8], 0), ([0, 8], 1), ([8, 4], 0), ([4, 8, 8, 2], 1), ([8, 8], 0)]
)
@pytest.mark.parametrize("num_arrived", [4, 0])
def test_the_first_of_those_with_the_most_tokens_loads(offers, chosen, num_arrived):
    chain, connectors = make(*offers)
    assert chain.get_num_new_matched_tokens(A, 4) == (8, True)
    assert take(connectors) == [[asked(A, 4)]] * len(offers)
    chain.update_state_after_alloc(A, [7, 9], 8)
    connectors[chosen].get_finished_load.side_effect = [None, num_arrived]
    assert chain.get_finished_load("a") is None
    assert chain.get_finished_load("a") == num_arrived and not chain._chosen
    calls = take(connectors)
    assert calls.pop(chosen) == [loaded(A, [7, 9], 8)] + [call.get_finished_load("a")] * 2
    assert not any(calls), "the others are not troubled"


def test_load_async_of_the_chosen_connector_is_returned():
    chain, connectors = make(4, 8)
    connectors[1].get_num_new_matched_tokens.return_value = (8, False)
    assert chain.get_num_new_matched_tokens(A, 0) == (8, False)


def test_nothing_to_load_chooses_no_connector():
    chain, connectors = make(0, 0)
    assert chain.get_num_new_matched_tokens(A, 0) == (0, False)
    assert take(connectors) == [[asked(A, 0)]] * 2
    assert not chain._chosen


def test_the_end_of_a_request_reaches_every_connector_that_was_asked():
    chain, connectors = make(4, 8)
    chain.get_num_new_matched_tokens(A, 0)
    chain.update_state_after_alloc(A, [1, 2], 8)
    take(connectors)
    chain.cancel_load("a")
    assert take(connectors) == [[call.cancel_load("a")]] * 2
    assert not chain._chosen
    chain.cancel_load("never seen")


def test_the_connector_is_chosen_by_request():
    chain, connectors = make(4, 8)
    chain.get_num_new_matched_tokens(A, 0)
    connectors[0].get_num_new_matched_tokens.return_value = (12, True)
    chain.get_num_new_matched_tokens(B, 0)
    take(connectors)
    chain.update_state_after_alloc(A, [1, 2], 8)
    chain.update_state_after_alloc(B, [3, 4, 5], 12)
    assert take(connectors) == [[loaded(B, [3, 4, 5], 12)], [loaded(A, [1, 2], 8)]]


def test_the_last_answer_counts():
    """Asked again after the cache has evicted blocks, another connector can have more, or none
    any."""
    chain, connectors = make(4, 8)
    chain.get_num_new_matched_tokens(A, 4)
    connectors[0].get_num_new_matched_tokens.return_value = (12, True)
    assert chain.get_num_new_matched_tokens(A, 0) == (12, True)
    chain.update_state_after_alloc(A, [1, 2, 3], 12)
    assert loaded(A, [1, 2, 3], 12) in connectors[0].mock_calls
    for connector in connectors:
        connector.get_num_new_matched_tokens.return_value = (0, False)
    chain.get_num_new_matched_tokens(A, 0)
    assert not chain._chosen


def test_all_save_and_all_close():
    chain, connectors = make(0, 8)
    chain.request_finished(A, [1, 2])
    chain.invalidate(A, 1, 2)
    chain.close()
    calls = [call.request_finished(A, [1, 2]), call.invalidate(A, 1, 2), call.close()]
    assert take(connectors) == [calls] * 2


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
    assert take(connectors) == [[], []]
    for request in (A, B):
        chain.get_num_new_matched_tokens(request, 0)
        chain.update_state_after_alloc(request, [1, 2], 8)
    take(connectors)
    chain.wait_for_load(1.0)
    assert take(connectors) == [[call.wait_for_load(1.0)], []]
    connectors[1].get_num_new_matched_tokens.return_value = (12, True)
    chain.get_num_new_matched_tokens(B, 0)
    take(connectors)
    chain.wait_for_load(1.0)
    assert take(connectors) == [[call.wait_for_load(0.5)]] * 2
