"""An engine that plans a step while the one before it runs says what a plain one says."""

from __future__ import annotations

import inspect
import logging
import threading
from dataclasses import replace

import pytest

from common.engine import EngineConfig, LLMEngine
from common.runner.overlap import OverlappedEngineCore, QueuedRunner
from common.tests.engine_oracle import (
    checked_engine,
    finish,
    greedy_params,
    lines_run,
    paged_runner,
)
from engine_core import EngineCore
from tiered_cache import KVTierConfig


def overlapped_engine(loaded, **config) -> LLMEngine:
    return checked_engine(loaded, overlap_scheduling=True, **config)


def test_the_lines_of_chapter_1_run_once_a_step_unless_steps_overlap(
    random_oracle, random_loaded
) -> None:
    """The book says so: of the loop, and of who runs instead."""
    source = inspect.getsource(EngineCore.step).split('"""')[-1]
    three_lines = [line.strip() for line in source.splitlines() if line.strip()]
    engine = LLMEngine(EngineConfig(num_blocks=50), loaded=random_loaded)
    prompts, params = random_oracle.prompts[:3], greedy_params(5)
    ran = lines_run(EngineCore.step, engine, prompts, params)
    assert ran == dict.fromkeys(three_lines, engine.stats().num_steps) and len(three_lines) == 3
    engine = overlapped_engine(random_loaded, num_blocks=50)
    assert not lines_run(EngineCore.step, engine, prompts, params)
    engine.reset_stats()
    ran = lines_run(OverlappedEngineCore.step, engine, prompts, params)
    assert ran["return self._finish()"] == engine.stats().num_steps > 0


def test_a_load_waits_for_the_steps_under_way(oracle, loaded, tmp_path) -> None:
    """They may still write to the blocks that it is given."""
    tiers = KVTierConfig(1000)
    engine = overlapped_engine(loaded, block_size=4, num_blocks=30, kv_tiers=tiers)
    lengths = [len(prompt) for prompt in oracle.prompts]
    first = lengths.index(max(lengths))
    engine.generate_batch([oracle.prompts[first]], greedy_params(2))
    others = [i for i in range(len(lengths)) if i != first]
    for i in others[:12]:  # it is evicted
        engine.generate_batch([oracle.prompts[i]], greedy_params(2))
    connector, forward = engine.kv_manager.connector, paged_runner(engine).forward
    load, may_go_on, events = connector.update_state_after_alloc, threading.Event(), []

    def slow_forward(batch):
        may_go_on.wait(0.2)
        logits = forward(batch)
        events.append("written")
        return logits

    def noted_load(*arguments):
        events.append(("load", len(engine.core._in_flight)))
        return load(*arguments)

    paged_runner(engine).forward, connector.update_state_after_alloc = slow_forward, noted_load
    engine.add_request("a", list(range(90, 70, -1)), greedy_params(8))
    engine.step()
    engine.add_request("b", oracle.prompts[first], greedy_params(4))
    num_begun = 2  # by now
    outputs = finish(engine)
    at = events.index(next(event for event in events if event != "written"))
    assert events[at] == ("load", 1) and events[:at].count("written") == num_begun
    may_go_on.set()
    assert outputs["b"].outputs[0].token_ids == oracle.expected(first, 4)
    engine.close()


@pytest.mark.parametrize(
    "option",
    [{"speculative": {"method": "ngram"}}, {"target_step_ms": 5.0}],
    ids=lambda o: next(iter(o)),
)
def test_what_must_know_how_a_step_ended_runs_step_by_step_and_says_so(
    option, random_oracle, random_loaded, caplog
) -> None:
    with caplog.at_level(logging.WARNING):
        engine = overlapped_engine(random_loaded, **option)
    assert type(engine.core) is EngineCore
    assert f"overlap_scheduling has no effect with {next(iter(option))}" in caplog.text
    (output,) = engine.generate_batch([random_oracle.prompts[1]], greedy_params(5)).values()
    assert output.outputs[0].token_ids == random_oracle.expected(1, 5)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        LLMEngine(EngineConfig(**option), loaded=random_loaded)
    assert "overlap" not in caplog.text, "nobody asked for it"


def test_tokens_are_accounted_for_and_nothing_runs_behind_a_close(
    random_oracle, random_loaded
) -> None:
    """Scheduled = prompt + outputs - 1 + discarded."""
    engine = overlapped_engine(random_loaded, num_blocks=200, prefix_cache=None)
    stop = random_oracle.expected(2, 5)[-1]
    params = replace(greedy_params(40), stop_token_ids=[stop])
    (output,) = engine.generate_batch([random_oracle.prompts[2]], params).values()
    num_outputs = len(output.outputs[0].token_ids)
    assert not engine.has_unfinished_requests()
    assert len(engine.core._in_flight) == 1, "nobody needs it"
    assert engine.step() == [] and not engine.core._in_flight
    stats = engine.stats()
    needed = len(random_oracle.prompts[2]) + num_outputs - 1
    assert stats.discarded_tokens == 1 and stats.scheduled_tokens == needed + 1
    engine.reset_stats()
    assert engine.stats().discarded_tokens == 0
    engine.add_request("a", random_oracle.prompts[1], greedy_params(9))
    engine.step()
    engine.close()
    assert not engine.core._in_flight and engine.kv_manager.num_blocks_in_use == 0


def test_a_close_ends_all_and_says_nothing_of_a_step_that_is_nobodys(
    random_oracle, random_loaded
) -> None:
    engine = overlapped_engine(random_loaded, num_blocks=200)
    engine.add_request("a", random_oracle.prompts[1], greedy_params(9))
    engine.step()
    engine.core.runner.wait_for_steps()
    thread = engine.core.runner._thread._thread

    def fail(_):
        raise MemoryError

    paged_runner(engine).forward = fail
    engine.step()  # another one is begun
    engine.close()
    assert not engine.core._in_flight and not thread.is_alive()
    assert engine.kv_manager.num_blocks_in_use == 0
    engine.check_invariants()
    engine.close()


def test_who_is_aborted_before_its_first_step_is_over(random_oracle, random_loaded) -> None:
    engine = overlapped_engine(random_loaded, num_blocks=200)
    engine.add_request("a", random_oracle.prompts[1], greedy_params(9))
    engine.step()
    engine.add_request("b", random_oracle.prompts[2], greedy_params(9))
    engine.add_request("c", random_oracle.prompts[3], greedy_params(9))
    engine.step()
    for name in ("b", "c"):  # they are in a plan whose results nobody has seen
        engine.abort_request(name)
    engine.add_request("b", random_oracle.prompts[0], greedy_params(4))
    outputs = finish(engine)
    assert outputs["a"].outputs[0].token_ids == random_oracle.expected(1, 9)
    assert outputs["b"].outputs[0].token_ids == random_oracle.expected(0, 4)


@pytest.mark.parametrize("num_top", [None, 0])
def test_a_name_that_is_free_again_gets_nothing_of_its_predecessor(
    num_top, random_oracle, random_loaded
) -> None:
    """Trap 82: the first request's step ends when its name is the second one's. The second one's
    entries are of its own prompt, and it was not scheduled before it arrived."""
    engine = overlapped_engine(random_loaded, num_blocks=200)
    engine.add_request("other", random_oracle.prompts[2], greedy_params(9))
    engine.step()
    scored = replace(greedy_params(9), prompt_logprobs=0)
    engine.add_request("a", random_oracle.prompts[5], scored)
    engine.step()  # the plan that computes "a" is in flight
    engine.abort_request("a")
    prompt = random_oracle.prompts[1]
    engine.add_request("a", prompt, replace(greedy_params(4), prompt_logprobs=num_top))
    output = finish(engine)["a"]  # the last of two
    assert output.outputs[0].token_ids == random_oracle.expected(1, 4)
    assert output.metrics.queue_time is not None and output.metrics.queue_time > 0
    entries = output.prompt_logprobs and [
        entry and entry.token_id for entry in output.prompt_logprobs
    ]
    assert entries == (None if num_top is None else [None, *prompt[1:]])


def test_why_a_request_has_no_token_left_is_not_asked_of_the_next_one_of_its_name(
    random_oracle, random_loaded, monkeypatch
) -> None:
    """Trap 82. As on a GPU, the next plan is laid out when the step is read. Positions after the
    second request's prompt hold anything."""
    monkeypatch.setattr("common.runner.overlap.ThreadedRunner", QueuedRunner)
    engine = overlapped_engine(random_loaded, num_blocks=200)
    rules = {"allowed_token_ids": [5], "bad_words": [[5, 5]]}
    engine.add_request("a", random_oracle.prompts[1], replace(greedy_params(9), **rules))
    engine.step()  # the step in which no token is left is in flight
    engine.abort_request("a")
    engine.add_request("a", random_oracle.prompts[0], greedy_params(4))
    state = paged_runner(engine).state
    admit = state.admit

    def poisoned(new):
        state.token_ids[:] = -50
        admit(new)

    state.admit = poisoned
    assert finish(engine)["a"].outputs[0].token_ids == random_oracle.expected(0, 4)
