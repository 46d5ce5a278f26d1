"""Engines in different processes share a real store, and outlive it, with `transformers`' tokens.

Without the store this is skipped, except in a CI, where it has to be there.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from bounded_loops import as_long_as
from common.engine import EngineConfig, LLMEngine
from common.models.loader import load_model
from common.requests.output_processor import RequestOutput
from common.tests.engine_oracle import Oracle
from common.tests.forked import Forked
from conftest import need
from mooncake_master import MooncakeAddress, MooncakeMaster
from mooncake_pool import MooncakePool
from pool_connector import PoolConnector
from request import SamplingParams

BLOCK_SIZE = 4
MAX_TOKENS = 6
LATE_S = 60.0  # a loaded machine's tolerance


def work(ours: Connection, path: Path, address: MooncakeAddress) -> None:
    """An engine's process: jobs come, and what is said of each step and of the end goes."""
    pool = MooncakePool(address, segment_nbytes=32 << 20)
    config = EngineConfig(
        block_size=BLOCK_SIZE,
        num_blocks=400,
        max_num_seqs=2,
        check_invariants=True,
        kv_connector=PoolConnector(pool, "node", load_timeout_s=30),
    )
    engine = LLMEngine(config, loaded=load_model(path, torch.float64, torch.device("cpu")))
    ours.send("ready")
    while (job := ours.recv()) is not None:
        prompts, salt = job
        params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
        for index, prompt in enumerate(prompts):
            engine.add_request(str(index), prompt, params, cache_salt=salt)
        outputs: dict[int, RequestOutput] = {}
        before = engine.stats().scheduled_tokens
        for _ in as_long_as(engine.has_unfinished_requests):
            done = [output for output in engine.step() if output.finished]
            outputs.update((int(output.request_id), output) for output in done)
            ours.send({"num_finished": len(outputs)})
        found = [outputs[index] for index in sorted(outputs)]
        said = {"tokens": [output.outputs[0].token_ids for output in found]}
        said["num_cached_tokens"] = [output.num_cached_tokens for output in found]
        said["num_scheduled_tokens"] = engine.stats().scheduled_tokens - before
        ours.send(said | {"down_reason": pool.down_reason})
    engine.close()
    pool.close()


class EngineProcess:
    """An engine in a process of its own."""

    def __init__(self, path: Path, master: MooncakeMaster) -> None:
        self.connection, theirs = Pipe()
        self.process = Forked(work, theirs, path, master.address)
        theirs.close()
        self.read = self.connection.recv

    def start(self, prompts: list[list[int]], salt: str | None = None) -> None:
        self.connection.send((prompts, salt))

    def finish(self) -> dict:
        while "tokens" not in (said := self.read()):
            pass
        return said

    def serve(self, prompts: list[list[int]], salt: str | None = None) -> dict:
        self.start(prompts, salt)
        return self.finish()


@pytest.fixture
def master() -> Iterator[MooncakeMaster]:
    need("Mooncake")
    with MooncakeMaster() as master:
        yield master


@pytest.fixture
def engines(family_oracle: Oracle, master: MooncakeMaster) -> Iterator[list[EngineProcess]]:
    engines = [EngineProcess(family_oracle.path, master) for _ in range(2)]
    try:
        for engine in engines:
            assert engine.read() == "ready"
        yield engines
    finally:
        for engine in engines:
            engine.process.kill()


def test_a_cold_engine_takes_prefixes_from_the_store_and_computes_them_when_it_is_killed(
    engines: list[EngineProcess], master: MooncakeMaster, family_oracle: Oracle
) -> None:
    first, second = engines
    prompts = family_oracle.prompts[:14]
    expected = [family_oracle.expected(index, MAX_TOKENS) for index in range(len(prompts))]
    reusable = [(len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE for prompt in prompts]

    computed = first.serve(prompts)
    assert computed["tokens"] == expected and computed["down_reason"] is None
    loaded = second.serve(prompts)
    assert loaded["tokens"] == expected and loaded["down_reason"] is None
    assert loaded["num_cached_tokens"] == reusable
    # What is left to compute: the end of each prompt, and its outputs but for the last.
    num_own = sum(map(len, prompts)) - sum(reusable) + len(prompts) * (MAX_TOKENS - 1)
    assert loaded["num_scheduled_tokens"] == num_own < computed["num_scheduled_tokens"]

    # Again, under another salt, so that nothing is in the second engine's own cache. Its first
    # step is over when the store dies, and most of what it has asked for is still to come.
    assert first.serve(prompts, salt="again")["tokens"] == expected
    start = time.monotonic()
    second.start(prompts, salt="again")
    assert second.read()["num_finished"] < len(prompts)
    master.process.kill()
    orphaned = second.finish()
    assert orphaned["tokens"] == expected
    assert orphaned["down_reason"], "the store was not missed"
    assert orphaned["num_scheduled_tokens"] >= num_own
    # Both go on without it, as one engine alone does.
    for engine in engines:
        alone = engine.serve(prompts, salt="alone")
        assert alone["tokens"] == expected and alone["down_reason"]
        assert alone["num_scheduled_tokens"] == computed["num_scheduled_tokens"]
    assert time.monotonic() - start < LATE_S
    for engine in engines:
        engine.connection.send(None)
        assert engine.process.wait(LATE_S) == 0
