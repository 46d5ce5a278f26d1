"""Engines that plan a step while the ones before it run, on one device or in stages: what happens
between two steps. The stages are threads here; as processes: `common/parallel/test_remote.py`.
Tokens of whole runs are compared in the array (`equivalence.py`)."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from common.engine import LLMEngine
from common.tests.engine_oracle import checked_engine, finish, greedy_params, paged_runner
from common.tests.local_stages import pipelined_engine, stages_of
from tiered_cache import KVTierConfig


def overlapped_engine(loaded, **config) -> LLMEngine:
    return checked_engine(loaded, overlap_scheduling=True, **{"num_blocks": 200} | config)


def test_a_load_waits_for_the_steps_under_way(oracle, loaded, tmp_path) -> None:
    """They may still write to the blocks that it is given."""
    engine = overlapped_engine(loaded, block_size=4, num_blocks=30, kv_tiers=KVTierConfig(1000))
    lengths = [len(prompt) for prompt in oracle.prompts]
    first = lengths.index(max(lengths))
    engine.generate_batch([oracle.prompts[first]], greedy_params(2))
    others = [i for i in range(len(lengths)) if i != first]
    for i in others[:12]:  # it is evicted
        engine.generate_batch([oracle.prompts[i]], greedy_params(2))
    connector = engine.kv_manager.connector
    forward = paged_runner(engine).forward
    load = connector.update_state_after_alloc
    events = []

    def slow_forward(batch):
        time.sleep(0.05)
        logits = forward(batch)
        events.append("written")
        return logits

    def noted_load(*arguments):
        events.append(("load", len(engine.core.in_flight)))
        return load(*arguments)

    paged_runner(engine).forward = slow_forward
    connector.update_state_after_alloc = noted_load
    engine.add_request("a", list(range(90, 70, -1)), greedy_params(3))
    engine.step()
    engine.add_request("b", oracle.prompts[first], greedy_params(2))
    outputs = finish(engine)
    assert events[:3] == ["written", "written", ("load", 1)], "both were begun before it"
    assert outputs["b"].outputs[0].token_ids == oracle.expected(first, 2)
    engine.close()


def test_a_close_ends_all_and_says_nothing_of_a_step_that_is_nobodys(
    random_oracle, random_loaded
) -> None:
    engine = overlapped_engine(random_loaded)
    engine.add_request("a", random_oracle.prompts[1], greedy_params(9))
    engine.step()
    engine.core.runner.wait_for_steps()
    paged_runner(engine).forward = None
    engine.step()  # another one is begun
    for _ in range(2):
        engine.close()
        assert not engine.core.in_flight and engine.kv_manager.num_blocks_in_use == 0
    engine.check_invariants()


def test_a_name_that_is_free_again_gets_nothing_of_its_predecessor(
    random_oracle, random_loaded
) -> None:
    """Trap 82: the first request's step ends when its name is the second one's. The second one's
    entries are of its own prompt, and it was not scheduled before it arrived."""
    engine = overlapped_engine(random_loaded)
    scored = replace(greedy_params(4), prompt_logprobs=0)
    engine.add_request("other", random_oracle.prompts[2], greedy_params(9))
    engine.step()
    engine.add_request("a", random_oracle.prompts[5], scored)
    engine.step()  # the plan that computes "a" is in flight
    engine.abort_request("a")
    engine.add_request("a", random_oracle.prompts[1], scored)
    output = finish(engine)["a"]  # the last of two
    assert output.outputs[0].token_ids == random_oracle.expected(1, 4)
    assert output.metrics.queue_time is not None and output.metrics.queue_time > 0
    assert output.prompt_logprobs is not None
    scored_ids = [entry.token_id for entry in output.prompt_logprobs[1:]]
    assert scored_ids == random_oracle.prompts[1][1:]


# -- stages


@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_that_raises_ends_who_ran_and_the_engine_does_not_hang(
    stage, oracle, monkeypatch
) -> None:
    """Both micro-batches are lost; who waits loses nothing."""
    engine = pipelined_engine(monkeypatch, oracle.path, num_blocks=200, max_num_seqs=2)
    for i in range(4):
        engine.add_request(str(i), oracle.prompts[i], greedy_params(6))
    engine.step(), engine.step()
    engine.core.runner.wait_for_steps()
    paged = stages_of(engine)[stage].local.runner
    monkeypatch.setattr("common.tests.local_stages.PATIENCE_S", 0.5)  # for what never comes
    with monkeypatch.context() as patch, pytest.raises(TypeError):
        patch.setattr(paged, "forward", None)
        for _ in range(3):
            engine.step()
    engine.check_invariants()
    assert engine.kv_manager.num_blocks_in_use == 0 and not engine.core.in_flight
    assert set(engine.scheduler.requests) == {"2", "3"}
    engine.close()
