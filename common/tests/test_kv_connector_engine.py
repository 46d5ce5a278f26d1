"""Engines whose KV comes from lower tiers or from each other say what `transformers` says; what
fails on the way costs time, and no token."""

from __future__ import annotations

import threading

import pytest
import torch
from transformers import Qwen3ForCausalLM

from bounded_loops import as_long_as
from common.engine import LLMEngine
from common.models.loader import load_model
from common.tests.engine_oracle import (
    MAX_TOKENS,
    checked_engine,
    finish,
    greedy_params,
    make_oracle,
    serve,
    spoil_kv,
)
from common.tests.small_models import CPU
from global_kv_pool import GlobalKVPool
from pool_connector import PoolConnector
from tiered_cache import KVTierConfig


def make_engine(loaded, connector=None, tiers=None, **changes) -> LLMEngine:
    config = {"block_size": 4, "num_blocks": 800, "kv_connector": connector, "kv_tiers": tiers}
    return checked_engine(loaded, **config | changes)


class SlowPool(GlobalKVPool):
    """`transport` brings each record, or something else, or nothing."""

    def __init__(self, transport) -> None:
        super().__init__(5000)
        self.transport = transport

    def get(self, links):
        return map(self.transport, super().get(links))


@pytest.mark.parametrize("prefix_cache", ["hash", "radix"])
def test_a_cold_engine_takes_what_another_has_computed(prefix_cache, oracle, loaded, pool):
    """Disaggregation, too: the first computes prompts and a few tokens, the second the rest. Nobody
    finds what has another salt."""
    first = make_engine(loaded, PoolConnector(pool), prefix_cache=prefix_cache)
    second = make_engine(loaded, PoolConnector(pool), prefix_cache=prefix_cache)
    everyone = list(range(len(oracle.prompts)))
    serve(first, oracle, everyone, 1)
    outputs = serve(second, oracle, everyone, MAX_TOKENS)
    assert [o.num_cached_tokens for o in outputs] == [(len(p) - 1) // 4 * 4 for p in oracle.prompts]
    num_computed = sum(len(p) - (len(p) - 1) // 4 * 4 + MAX_TOKENS - 1 for p in oracle.prompts)
    assert second.stats().scheduled_tokens <= num_computed
    (output,) = serve(make_engine(loaded, PoolConnector(pool)), oracle, [2], 4, salt="mine")
    assert output.num_cached_tokens == 0


@pytest.mark.parametrize("shared", ["disk", "pool"])
def test_checkpoints_that_differ_in_one_number_exchange_no_kv(
    shared, oracle, loaded, pool, tmp_path
):
    """Trap 59: the number is where a sample of every third element does not see it."""
    prompt = oracle.prompts[2]
    row = prompt[0]
    column = next(j for j in range(32) if (prompt[0] * 32 + j) % 3)
    model = Qwen3ForCausalLM.from_pretrained(oracle.path, dtype=torch.float64)
    with torch.no_grad():
        model.get_input_embeddings().weight[row, column] += 5
    model.save_pretrained(tmp_path / "other")
    other = make_oracle(tmp_path / "other", [prompt])
    assert other.continuations[0] != oracle.continuations[2]

    def make(model) -> LLMEngine:
        if shared == "pool":
            return make_engine(model, PoolConnector(pool))
        tiers = KVTierConfig(0, 500, tmp_path / "kv")
        return make_engine(model, tiers=tiers)

    theirs = load_model(other.path, torch.float64, CPU)
    expected = [(loaded, oracle, 2, 0), (theirs, other, 0, 0), (loaded, oracle, 2, 44)]
    for model, says, index, num_cached in expected:
        engine = make(model)
        (output,) = serve(engine, says, [index], MAX_TOKENS)
        assert output.num_cached_tokens == num_cached
        engine.reset_prefix_cache()  # everything is evicted
        engine.close()


# -- transfers that are late, or fail


def test_a_request_that_is_loading_holds_up_nobody_and_can_be_aborted(oracle, loaded):
    gate = threading.Event()
    pool = SlowPool(lambda data: data if gate.wait(20) else b"")
    serve(make_engine(loaded, PoolConnector(pool)), oracle, [2], 2)
    engine = make_engine(loaded, PoolConnector(pool, load_timeout_s=30))
    params = greedy_params(3)
    done = {}
    engine.add_request("gone", oracle.prompts[2], params)
    engine.step()
    assert engine.stats().kv_blocks_in_use == 11
    engine.abort_request("gone")
    assert engine.stats().kv_blocks_in_use == 0
    engine.add_request("loads", oracle.prompts[2], params)
    engine.add_request("runs", oracle.prompts[-1], params)
    for _ in as_long_as(lambda: "runs" not in done):
        done |= {o.request_id: o for o in engine.step() if o.finished}
    assert "loads" not in done
    gate.set()
    done |= finish(engine)
    assert done["loads"].num_cached_tokens == 44
    for name, index in (("loads", 2), ("runs", len(oracle.prompts) - 1)):
        assert done[name].outputs[0].token_ids == oracle.expected(index, 3)


@pytest.mark.parametrize("fault", ["raises", "corrupts", "never comes"])
def test_a_failed_transfer_costs_time_and_no_token(fault, oracle, loaded):
    stop = threading.Event()

    def faulty(data: bytes) -> bytes:
        if fault == "raises":
            raise OSError("made up")
        if fault == "never comes":
            stop.wait(20)
        return bytes(len(data))

    pool = SlowPool(faulty)
    try:
        serve(make_engine(loaded, PoolConnector(pool)), oracle, [2, 5, 9], 3)
        engine = make_engine(loaded, PoolConnector(pool, load_timeout_s=0.2))
        for output in serve(engine, oracle, [2, 5, 9], MAX_TOKENS):
            assert output.outputs[0].finish_reason == "length"
    finally:
        stop.set()


# -- KV that is bad


def test_kv_of_a_request_that_ended_in_an_error_is_in_no_tier(oracle, loaded, tmp_path):
    """Nor in the file, with which the next engine begins. What it had found below leaves too."""
    tiers = KVTierConfig(10, 500, tmp_path / "kv")
    for turn in range(2):
        engine = make_engine(loaded, tiers=tiers, num_blocks=60)
        spoil_kv(engine, "bad", turn)
        engine.add_request("bad", oracle.prompts[2], greedy_params(MAX_TOKENS))
        assert finish(engine)["bad"].outputs[0].finish_reason == "error"
        serve(engine, oracle, [5, 9, 4, 6], 2)  # what is cached has to leave the device
        serve(engine, oracle, [2], MAX_TOKENS)
        serve(engine, oracle, [5, 9, 4, 6], 2)
        engine.close()


def test_kv_of_a_request_that_ended_in_an_error_leaves_the_pool(oracle, loaded, pool):
    """One engine's aborted request has offered it: it costs one error, in whatever engine."""
    prompt = oracle.prompts[2]
    first = make_engine(loaded, PoolConnector(pool), max_num_batched_tokens=8)
    spoil_kv(first, "bad")
    first.add_request("bad", prompt, greedy_params(MAX_TOKENS))
    assert finish(first)["bad"].outputs[0].finish_reason == "error"
    assert len(pool) == 0
    another = make_engine(loaded, PoolConnector(pool), max_num_batched_tokens=8)
    spoil_kv(another, "aborted")
    another.add_request("aborted", prompt, greedy_params(MAX_TOKENS))
    another.step(), another.step(), another.abort_request("aborted")
    assert len(pool) == 4
    second = make_engine(loaded, PoolConnector(pool))
    (output,) = second.generate_batch([prompt], greedy_params(2)).values()
    assert (output.outputs[0].finish_reason, output.num_cached_tokens) == ("error", 16)
    assert len(pool) == 0
    for _ in range(2):
        serve(make_engine(loaded, PoolConnector(pool)), oracle, [2], MAX_TOKENS)
