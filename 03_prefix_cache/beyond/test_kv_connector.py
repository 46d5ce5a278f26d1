"""A chain of connectors asks all, loads from one, and saves to all."""

from __future__ import annotations

from unittest.mock import Mock, call

import pytest

from kv_connector import ConnectorChain, KVConnector
from request import Request
from tiered_cache import KVTierConfig, TieredCache

A, B = (Request.from_tokens(name, [1, 2, 3]) for name in "ab")
LOADED = call.update_state_after_alloc


class Recorder(Mock):
    """A connector that records its calls."""

    bind, is_bound = KVConnector.bind, KVConnector.is_bound


def make(num_connectors: int) -> tuple[ConnectorChain, list[Recorder]]:
    connectors = [Recorder(spec=KVConnector) for _ in range(num_connectors)]
    return ConnectorChain(connectors), connectors


def ask(chain: ConnectorChain, request: Request, *offers: int) -> tuple[int, bool]:
    """Ask all, of which each has so many tokens; 12 are there at once. Forgets all calls."""
    for connector, num_tokens in zip(chain.connectors, offers, strict=True):
        connector.get_num_new_matched_tokens.return_value = (num_tokens, num_tokens != 12)
    answer = chain.get_num_new_matched_tokens(request, 4)
    asked = [[call.get_num_new_matched_tokens(request, 4)]] * len(offers)
    assert take(chain.connectors) == asked
    return answer


def take(connectors: list[Recorder]) -> list[list]:
    """The calls of each connector since the last time."""
    calls = [list(connector.mock_calls) for connector in connectors]
    for connector in connectors:
        connector.reset_mock()
    return calls


CHOICES = [((8,), 0), ((0, 8), 1), ((8, 4), 0), ((4, 8, 8, 2), 1), ((8, 12), 1), ((0, 0), None)]


@pytest.mark.net
@pytest.mark.parametrize(("offers", "chosen"), CHOICES)
def test_the_first_of_those_with_the_most_tokens_loads(offers, chosen):
    """The last answer counts: asked again after the cache has evicted blocks, another connector
    can have more, or none any."""
    for before in (0, 4, 16):
        chain, connectors = make(len(offers))
        ask(chain, A, *[before] * len(offers))
        best = max(offers)
        assert ask(chain, A, *offers) == (best, best not in (0, 12))
        if chosen is None:
            chain.wait_for_load(1.0)
        else:
            chain.update_state_after_alloc(A, [7, 9], best)
            connectors[chosen].get_finished_load.side_effect = [None, 4]
            assert [chain.get_finished_load("a") for _ in range(2)] == [None, 4]
        calls = take(connectors)
        expected = [LOADED(A, [7, 9], best)] + [call.get_finished_load("a")] * 2
        assert chosen is None or calls.pop(chosen) == expected
        assert not any(calls) and not chain._chosen, "the others are not troubled"


def test_loads_share_a_wait_and_all_connectors_are_told_and_counted():
    chain, connectors = make(2)
    ask(chain, A, 4, 8)
    ask(chain, B, 16, 8)
    told = [call.request_finished(A, [1, 2]), call.invalidate(A, 1, 2), call.clear(), call.close()]
    for one, expected in (
        (call.wait_for_load(1.0), [[call.wait_for_load(0.5)]] * 2),
        (call.cancel_load("b"), [[call.cancel_load("b")]] * 2),
        (call.wait_for_load(1.0), [[], [call.wait_for_load(1.0)]]),
        *[(one, [[one], [one]]) for one in told],
    ):
        getattr(chain, one[0])(*one[1])
        assert take(connectors) == expected
    for connector, counts in zip(connectors, ({"host": 1}, {"disk": 2}), strict=True):
        connector.num_loaded_blocks.return_value = counts
    assert chain.num_loaded_blocks() == {"host": 1, "disk": 2}


def test_a_connector_is_bound_to_one_memory():
    """The first engine would load into the second's, and save what is there: wrong tokens."""
    (chain, connectors), (other, (free, _)) = make(2), make(2)
    tiers, io = TieredCache(KVTierConfig(host_blocks=1)), object()
    tiers.bind(io, 4, [])
    chain.bind(io, 4, [("model", "m")])
    other.connectors[1] = connectors[1]
    for connector in (chain, *connectors, tiers, other):
        with pytest.raises(ValueError, match="must belong to this engine"):
            connector.bind(object(), 4, [])
        assert connector is other or (connector.io, connector.block_size) == (io, 4)
    assert not free.is_bound, "all of a chain, or none"
