"""Stages in processes of their own, against one process: the same tokens whatever is switched on.
And what comes of a stage that is killed, stuck, or raises.

Starting workers takes seconds, so a test puts the same ones to many uses, and to their end last.
In threads, with more settings: `common/tests/test_pipeline_engine.py`."""

from __future__ import annotations

import signal

import pytest

from common.engine import EngineConfig, LLMEngine
from common.parallel import message
from common.parallel.pipeline import PipelinedEngineCore
from common.parallel.test_remote import FEW, GREEDY, NGRAM, must_be_dead, must_survive_an_interrupt
from common.tests.remote_cases import (
    PROMPTS,
    WORKERS,
    engine_around,
    everything_said,
    executor_of,
    one_process,
    pids_of,
    side_of,
    signal_in_step,
)
from request import SamplingParams
from scheduler_interface import NewRequestData, PlanMessage
from tiered_cache import KVTierConfig

STAGES = dict(tensor_parallel_size=1, pipeline_parallel_size=2)
DRIVERS = {
    "scarce": dict(num_blocks=26, chunked_prefill=3, preempt_every=4, shuffle_waiting=True),
    "prefill-first": dict(scheduler="prefill_first", mixing=True, prefix_cache="radix"),
    "fcfs": dict(scheduler="fcfs", prefix_cache=None),
}


def test_two_stages_say_what_one_process_says_and_one_that_is_killed_is_named(
    shipped_loaded, shipped_tokenizer, tmp_path
) -> None:
    config = EngineConfig(
        check_invariants=True,
        shuffle_batch=True,
        kv_tiers=KVTierConfig(host_blocks=1),
        **STAGES,
        **WORKERS,
    )
    engine = LLMEngine(config, tokenizer=shipped_tokenizer)
    side, pids = side_of(engine), pids_of(executor_of(engine))
    assert isinstance(engine.core, PipelinedEngineCore)
    assert engine.num_parameters == shipped_loaded.model.num_parameters
    alone = one_process(shipped_loaded, shipped_tokenizer)
    assert engine.kv_cache.kv_bytes_per_block == alone.kv_cache.kv_bytes_per_block

    for name, changes in DRIVERS.items():
        changes = {"check_invariants": True, **changes}
        here = one_process(shipped_loaded, shipped_tokenizer, **changes)
        there = engine_around(side, shipped_tokenizer, **changes, **STAGES)
        expected, said = everything_said(here), everything_said(there)
        assert said == expected, name
        found = there.stats()
        assert found.output_tokens == here.stats().output_tokens and found.discarded_tokens == 0
        assert (name == "scarce") == (found.num_preemptions > 0), name
        assert (name == "fcfs") == (found.cached_tokens == 0), name
    must_bring_blocks_back(side, shipped_loaded, shipped_tokenizer, tmp_path / "kv")
    must_survive_an_interrupt(engine, alone)

    executor_of(engine).timeout_s = 2.0
    signal_in_step(engine, pids[0], signal.SIGKILL)
    must_be_dead(engine, pids, rf"rank 0 \(process {pids[0]}\) was killed by SIGKILL", 2 + 3)


def must_bring_blocks_back(side, loaded, tokenizer, path) -> None:
    """Tiers in the driver, a block's layers in two stages: both parts come back, or none."""
    tiers = KVTierConfig(host_blocks=0, disk_blocks=60, disk_path=path)
    here = one_process(loaded, tokenizer, num_blocks=20)
    there = engine_around(side, tokenizer, kv_tiers=tiers, num_blocks=20, **STAGES)
    greedy = SamplingParams(temperature=0, max_tokens=8)
    expected = [o.outputs[0].token_ids for o in here.generate_batch(PROMPTS[:2], greedy).values()]
    others = [[i] * 30 for i in range(5, 9)]
    for _ in range(3):
        outputs = there.generate_batch(PROMPTS[:2], greedy).values()
        assert [o.outputs[0].token_ids for o in outputs] == expected
        there.generate_batch(others, FEW)  # and everything is evicted
    assert there._connector.stats.num_disk_hits > 0
    there.close()


@pytest.mark.slow  # two ranks that guess, and two stages, are in the normal run
def test_two_stages_of_two_ranks_guess_and_one_that_is_stuck_is_named(
    shipped_loaded, shipped_tokenizer
) -> None:
    sizes = dict(tensor_parallel_size=2, pipeline_parallel_size=2)
    config = EngineConfig(check_invariants=True, speculative=NGRAM, **sizes, **WORKERS)
    engine = LLMEngine(config, tokenizer=shipped_tokenizer)
    executor, pids = executor_of(engine), pids_of(executor_of(engine))
    assert len(pids) == 4
    here = one_process(shipped_loaded, shipped_tokenizer)
    assert everything_said(engine) == everything_said(here)
    stats = engine.stats()
    assert stats.num_drafted_tokens > stats.num_accepted_tokens > 0

    executor.timeout_s = 2.0
    signal_in_step(engine, pids[1], signal.SIGSTOP)
    names = rf"rank 1 \(process {pids[1]}\) is stuck: no sign of life, .* in 2 s"
    must_be_dead(engine, pids, names, 2 + 1 + 3)


@pytest.mark.slow  # in threads it is in the normal run
def test_a_stage_that_raises_is_named_while_the_other_waits_for_it(shipped_tokenizer) -> None:
    engine = LLMEngine(EngineConfig(**STAGES, **WORKERS), tokenizer=shipped_tokenizer)
    executor, pids = executor_of(engine), pids_of(executor_of(engine))
    executor.timeout_s = 2.0
    new = NewRequestData("x", [1, 2, 3], GREEDY, 0, ([5],))
    right = PlanMessage([new], num_scheduled_tokens={"x": 3})
    wrong = PlanMessage([new], num_scheduled_tokens={"y": 3})
    executor.send(
        [
            message.pack("plan", step=10**6, plan=message.plan_to_map(plan), times=[])
            for plan in (wrong, right)
        ]
    )
    must_be_dead(engine, pids, rf"rank 0 \(process {pids[0]}\) raised KeyError: 'x'", 2 + 1 + 3)
