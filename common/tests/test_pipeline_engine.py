"""An engine whose layers are in stages says what `transformers` says. The stages are threads here;
as processes: `common/parallel/test_remote.py`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.engine import EngineConfig
from common.runner.pipeline import PipelinedEngineCore
from common.runner.stage import StageRunner
from common.tests.engine_oracle import finish, greedy_params, lines_run
from common.tests.local_stages import pipelined_engine, stages_of
from scheduler_interface import NewRequestData


def test_the_last_stage_alone_drafts(oracle, draft, monkeypatch) -> None:
    how = {"num_blocks": 100, "speculative": {"method": "draft"}}
    engine = pipelined_engine(monkeypatch, oracle.path, draft, **how)
    first, last = stages_of(engine)
    assert first.local.speculation is None and last.local.speculation is not None
    engine.close()


def test_each_stage_has_its_layers_and_several_steps_are_under_way(oracle, monkeypatch) -> None:
    engine = pipelined_engine(monkeypatch, oracle.path, num_blocks=100)
    for i in range(4):
        engine.add_request(str(i), oracle.prompts[i], greedy_params(6))
    most = 0
    for _ in range(60):
        if not engine.has_unfinished_requests():
            break
        engine.step()
        most = max(most, len(engine.core._in_flight))
    assert most == 1, "after a step; two while it waits"
    engine.reset_stats()
    params = [greedy_params(6)] * 2
    ran = lines_run(PipelinedEngineCore.step, engine, oracle.prompts[:2], params)
    assert ran["results = self._finish()"] >= engine.stats().num_steps > 0, "the loop is its own"
    stages = [stage.local for stage in stages_of(engine)]
    assert [s.paged.model.layer_range for s in stages] == [range(0, 1), range(1, 2)]
    assert all(isinstance(s.paged, StageRunner) for s in stages)
    assert [len(s.kv_cache.key_cache) for s in stages] == [1, 1]
    first, last = (s.paged.state for s in stages)
    (first_tables,), (last_tables,) = first.groups, last.groups
    assert first.row_of == last.row_of
    assert (first_tables.block_tables == last_tables.block_tables).all()
    engine.close()


def test_only_the_last_stage_makes_what_is_for_logits(oracle, monkeypatch) -> None:
    engine = pipelined_engine(monkeypatch, oracle.path, num_blocks=100)
    params = replace(greedy_params(3), prompt_logprobs=1)
    outputs = engine.generate_batch(oracle.prompts[:2], params).values()
    assert [len(o.prompt_logprobs) for o in outputs] == [len(p) for p in oracle.prompts[:2]]
    first, last = (stage.local.paged.state for stage in stages_of(engine))
    first.admit(NewRequestData("x", [1], params, features={"grammar": "nobody matches it"}))
    found = [[plugin.name for plugin in state.plugins.plugins] for state in (first, last)]
    assert found == [["token_rules"], ["token_rules", "prompt_logprobs"]]
    engine.close()


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("error", [MemoryError, OSError])
def test_a_stage_that_raises_ends_who_ran_and_the_engine_does_not_hang(
    stage, error, oracle, monkeypatch
) -> None:
    """Both micro-batches are lost; who waits loses nothing."""
    engine = pipelined_engine(monkeypatch, oracle.path, num_blocks=200, max_num_seqs=2)
    for i in range(4):
        engine.add_request(str(i), oracle.prompts[i], greedy_params(6))
    engine.step(), engine.step()
    engine.core.runner.wait_for_steps()
    paged = stages_of(engine)[stage].local.paged
    monkeypatch.setattr("common.tests.local_stages.PATIENCE_S", 0.5)  # for what never comes
    failing = paged.compute

    def fail(batch):
        raise error("no more")

    paged.compute = fail
    with pytest.raises(error, match="no more"):
        for _ in range(3):
            engine.step()
    paged.compute = failing
    engine.check_invariants()
    assert engine.kv_manager.num_blocks_in_use == 0 and not engine.core._in_flight
    assert set(engine.scheduler.requests) == {"2", "3"}
    engine.close()


def test_what_does_not_go_with_stages_is_said() -> None:
    with pytest.raises(ValueError, match=r"target_step_ms must .*pipeline.*, got 5.0"):
        EngineConfig(pipeline_parallel_size=2, target_step_ms=5.0)


def test_overlap_is_no_part_of_a_pipeline_and_that_is_said(oracle, monkeypatch, caplog) -> None:
    engine = pipelined_engine(monkeypatch, oracle.path, num_blocks=99, overlap_scheduling=True)
    assert "overlap_scheduling has no effect with pipeline_parallel_size" in caplog.text
    engine.add_request("a", oracle.prompts[1], greedy_params(5))
    assert finish(engine)["a"].outputs[0].token_ids == oracle.expected(1, 5)
    engine.close()
