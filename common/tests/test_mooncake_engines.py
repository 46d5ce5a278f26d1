"""Engines share a real store, and outlive it, with `transformers`' tokens.

Without the store this is skipped, except in a CI, where it has to be there.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from common.engine import LLMEngine
from common.requests.output_processor import RequestOutput
from common.tests.engine_oracle import Oracle, checked_engine, finish, greedy_params
from conftest import need
from mooncake_master import MooncakeMaster
from mooncake_pool import MooncakePool
from pool_connector import PoolConnector

BLOCK_SIZE = 4
MAX_TOKENS = 6


@pytest.fixture
def master() -> Iterator[MooncakeMaster]:
    need("Mooncake")
    with MooncakeMaster() as master:
        yield master


def test_a_cold_engine_takes_prefixes_from_the_store_and_computes_them_when_it_is_killed(
    master: MooncakeMaster, family_oracle: Oracle, family_loaded
) -> None:
    prompts = family_oracle.prompts[:14]
    expected = [family_oracle.expected(index, MAX_TOKENS) for index in range(len(prompts))]
    reusable = [(len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE for prompt in prompts]
    pools = [MooncakePool(master.address, segment_nbytes=32 << 20) for _ in range(2)]
    how = dict(block_size=BLOCK_SIZE, num_blocks=400, max_num_seqs=2)
    first, second = (
        checked_engine(family_loaded, kv_connector=connector, **how)
        for connector in (PoolConnector(pool, load_timeout_s=30) for pool in pools)
    )

    def add(engine: LLMEngine, salt: str | None) -> None:
        engine.reset_stats()
        for index, prompt in enumerate(prompts):
            engine.add_request(str(index), prompt, greedy_params(MAX_TOKENS), cache_salt=salt)

    def end(engine: LLMEngine) -> list[RequestOutput]:
        outputs = finish(engine)
        found = [outputs[str(index)] for index in range(len(prompts))]
        assert [output.outputs[0].token_ids for output in found] == expected
        return found

    add(first, None), end(first)
    num_all = first.stats().scheduled_tokens
    add(second, None)
    assert [output.num_cached_tokens for output in end(second)] == reusable
    # What is left to compute: the end of each prompt, and its outputs but for the last.
    num_own = sum(map(len, prompts)) - sum(reusable) + len(prompts) * (MAX_TOKENS - 1)
    assert second.stats().scheduled_tokens == num_own < num_all
    assert [pool.down_reason for pool in pools] == [None, None]

    # Again, under another salt, so that nothing is in the second engine's own cache. Its first
    # step is over when the store dies, and most of what it has asked for is still to come.
    add(first, "again"), end(first)
    add(second, "again"), second.step()
    master.process.kill()
    end(second)
    assert second.stats().scheduled_tokens >= num_own
    assert pools[1].down_reason, "the store was not missed"
    for engine, pool in zip((first, second), pools):  # both go on, as one engine alone does
        add(engine, "alone"), end(engine)
        assert engine.stats().scheduled_tokens == num_all and pool.down_reason
        engine.close(), pool.close()
