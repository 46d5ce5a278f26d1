"""The record against what really happened."""

from __future__ import annotations

from itertools import count

from bounded_loops import as_long_as
from engine_core import EngineCore
from fcfs_scheduler import FCFSScheduler
from hf_model_runner import HFModelRunner
from scheduler_interface import SchedulerOutput, StepOutput
from step_record import make_record
from test_engine_core import Answers, ScriptedRunner, make


def test_the_record_of_a_run_by_hand():
    """Two slots and three requests: c takes the slot of b in the step after b's last."""
    records = []
    engine = EngineCore(FCFSScheduler(max_num_seqs=2), ScriptedRunner())
    for name, prompt, max_tokens in (("a", [1, 2], 3), ("b", [4], 1), ("c", [5, 6], 2)):
        engine.add_request(make(name, prompt, max_tokens=max_tokens))
    for _ in as_long_as(engine.has_unfinished_requests):
        engine.step()
        records.append(make_record(engine, len(records)))
    facts = [(r.num_scheduled_tokens, r.start_positions, r.admitted, r.finished) for r in records]
    assert facts == [
        ({"a": 2, "b": 1}, {"a": 0, "b": 0}, ["a", "b"], {"b": "length"}),
        ({"c": 2, "a": 1}, {"c": 0, "a": 2}, ["c"], {}),
        ({"a": 1, "c": 1}, {"a": 3, "c": 2}, [], {"a": "length", "c": "length"}),
    ]
    assert records[1].new_token_ids == {"c": [20], "a": [30]}
    assert [(r.num_running, r.num_waiting) for r in records] == [(1, 1), (2, 0), (0, 0)]
    assert [r.step for r in records] == [0, 1, 2]
    assert [r.kv_tokens_written for r in records] == [2 + 1, 2 + 3, 4 + 3]


def test_the_times_are_those_of_the_five_parts(qwen3, monkeypatch):
    """On a clock of seconds that only goes on when it is read."""
    clock = count(100)
    monkeypatch.setattr("scheduler_interface.time.monotonic", lambda: next(clock))
    engine = EngineCore(FCFSScheduler(), HFModelRunner(qwen3))
    engine.add_request(make("a", [1], max_tokens=1))
    records = []
    for number in range(2):  # the second one is empty
        engine.step()
        records.append(make_record(engine, number))
    names = ("start_time", "schedule_ms", "prepare_ms", "forward_ms", "sample_ms", "update_ms")
    times = [[getattr(record, name) for name in names[1:]] for record in records]
    assert times == [[1e3] * 5, [1e3, 1e3, 0, 0, 1e3]]
    assert [r.step_ms for r in records] == [5e3, 3e3]


def test_what_later_chapters_put_in_a_plan_is_in_the_record(monkeypatch):
    """A run of k + 1 tokens accepts k drafts; a failed row accepts none."""
    plan = SchedulerOutput(
        num_scheduled_tokens={"a": 4, "b": 3},
        scheduled_draft_token_ids={"a": [5, 6, 7], "b": [8, 9]},
        start_positions=[1, 10],
        preempted_requests=[make("c", [1])],
        num_recomputed_tokens=7,
        num_kv_blocks_in_use=4,
    )
    monkeypatch.setattr(scheduler := FCFSScheduler(), "schedule", lambda: plan)
    output = StepOutput({"a": [5, 6, 1]}, times={"forward_ms": 2.0, "propose_ms": 3.0})
    engine = EngineCore(scheduler, Answers(output))
    engine.step()
    record = make_record(engine, 0)
    assert record.drafts == {"a": (3, 2), "b": (2, 0)}
    assert record.kv_tokens_written == (1 + 4) + (10 + 3)
    assert (record.preempted, record.num_recomputed_tokens) == (["c"], 7)
    assert (record.kv_blocks_in_use, record.forward_ms, record.propose_ms) == (4, 2.0, 3.0)
