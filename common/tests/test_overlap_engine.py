"""An engine that plans a step while the one before it runs says what a plain one says."""

from __future__ import annotations

import inspect
import logging
import random
import threading
from dataclasses import replace

import pytest

from common.engine import EngineConfig, LLMEngine
from common.runner.overlap import OverlappedEngineCore
from common.sampling.sampler import UnreadStep
from common.tests.engine_oracle import (
    checked_engine,
    finish,
    greedy_params,
    lines_run,
    paged_runner,
    scarce,
    serve_a_crowd,
)
from engine_core import EngineCore
from request import SamplingParams
from tiered_cache import KVTierConfig

SCHEDULERS = ("two_phase", "prefill_first", "fcfs")
EVERYTHING = [
    SamplingParams(temperature=0, max_tokens=9, ignore_eos=True),
    SamplingParams(seed=1, max_tokens=12, top_p=0.9, ignore_eos=True),
    SamplingParams(seed=2, max_tokens=7, top_k=5, min_p=0.05, logprobs=3),
    SamplingParams(seed=3, max_tokens=15, repetition_penalty=1.4, presence_penalty=0.3),
    SamplingParams(seed=4, max_tokens=15, frequency_penalty=1.9, min_tokens=6),
    SamplingParams(temperature=0, max_tokens=14, frequency_penalty=2.0, logprobs=0),
    SamplingParams(seed=5, n=3, max_tokens=8, temperature=1.5),
    SamplingParams(temperature=0, max_tokens=20, stop=["e", "self"]),
    SamplingParams(seed=7, max_tokens=20, stop_token_ids=list(range(0, 200, 3))),
]


def overlapped_engine(loaded, **config) -> LLMEngine:
    return checked_engine(loaded, overlap_scheduling=True, **config)


def everything_said(engine: LLMEngine, prompts: list, seed: int, aborts: bool = False) -> dict:
    """Requests of every kind, arriving over some steps."""
    rng, outputs = random.Random(seed), {}
    coming = [(rng.randrange(12), i) for i in range(2 * len(EVERYTHING))]
    gone = {str(i): rng.randrange(3, 12) for _, i in coming if aborts and rng.random() < 0.3}
    for step in range(800):
        if step > 12 and not engine.has_unfinished_requests():
            break
        for when, i in coming:
            if when == step:
                params = EVERYTHING[i % len(EVERYTHING)]
                engine.add_request(str(i), prompts[i % len(prompts)], params, priority=i % 3)
        for name, when in gone.items():
            if when == step:
                engine.abort_request(name)
        outputs |= {o.request_id: o for o in engine.step() if o.finished}
    assert not engine.has_unfinished_requests() and engine.stats().kv_blocks_in_use == 0
    return {
        name: [
            (c.token_ids, c.text, c.finish_reason, c.stop_reason, c.logprobs)
            for c in output.outputs
        ]
        for name, output in outputs.items()
    }


def tokens_and_reasons(said: dict) -> dict:
    return {name: [completion[:4] for completion in found] for name, found in said.items()}


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


@pytest.mark.sample
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("seed", range(2))
def test_every_kind_of_request_gets_the_same_tokens_text_and_reasons(
    scheduler, seed, shipped_loaded, shipped_tokenizer
) -> None:
    """In float64: penalties count tokens that the host has not seen, seeds draw for them."""
    prompts = ["def f(x):\n", "import os", "class A", "# a", "x = [1, 2"]
    found = []
    for overlap in (False, True):
        config = EngineConfig(
            scheduler=scheduler,
            max_num_seqs=4,
            overlap_scheduling=overlap,
            check_invariants=True,
            shuffle_batch=True,
            block_size=4,
            num_blocks=400,
        )
        engine = LLMEngine(config, loaded=shipped_loaded, tokenizer=shipped_tokenizer)
        found.append(everything_said(engine, prompts, seed))
        assert isinstance(engine.core, OverlappedEngineCore) is overlap
        assert (engine.stats().discarded_tokens > 0) is overlap
    plain, overlapped = found
    assert tokens_and_reasons(plain) == tokens_and_reasons(overlapped)
    for name, completions in plain.items():
        for one, other in zip(completions, overlapped[name], strict=True):
            assert (one[4] is None) == (other[4] is None)
            for entry, same in zip(one[4] or (), other[4] or (), strict=True):
                assert (entry.token_id, entry.rank) == (same.token_id, same.rank)
                assert entry.logprob == pytest.approx(same.logprob, abs=1e-9)


@pytest.mark.sample(seed=3)
@pytest.mark.parametrize("seed", range(6))
def test_a_crowd_in_scarce_memory(seed: int, oracle, loaded) -> None:
    """Pools of hardly more than one request, forced preemption, aborts, samples."""
    rng = random.Random(seed)
    config = scarce(rng, oracle, rng.choice([1, 3, 16]))
    kind = SCHEDULERS[seed % 2]
    if kind != "two_phase":
        config.pop("watermark")
    engine = overlapped_engine(
        loaded, scheduler=kind, prefix_cache=(None, "hash", "radix")[seed % 3], **config
    )
    serve_a_crowd(engine, oracle, rng, seed)


@pytest.mark.sample(seed=2)
@pytest.mark.parametrize("seed", range(4))
def test_kv_that_is_loaded_is_not_written_over_by_a_step_under_way(
    seed: int, oracle, loaded, tmp_path
) -> None:
    rng = random.Random(seed)
    tiers = KVTierConfig(40, 500, tmp_path / "kv")
    config = scarce(rng, oracle, 4) | {"kv_tiers": tiers, "prefix_cache": "hash"}
    engine = overlapped_engine(loaded, **config)
    for _ in range(2):
        serve_a_crowd(engine, oracle, rng, seed)
    engine.close()


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
        events.append(("load", len(engine.core._under_way)))
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


@pytest.mark.sample
@pytest.mark.parametrize("stage", ["prepare", "forward", "sample"])
@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_step_that_raises_ends_who_ran_and_nobody_else(
    scheduler, stage, error, random_oracle, random_loaded, monkeypatch
) -> None:
    """Two steps were under way; the tokens of both are lost, and those who wait lose nothing."""
    engine = overlapped_engine(random_loaded, num_blocks=200, max_num_seqs=2, scheduler=scheduler)
    for i in range(4):
        engine.add_request(str(i), random_oracle.prompts[i], greedy_params(6))
    engine.step()
    runner = paged_runner(engine)
    part, name = (UnreadStep, "begin") if stage == "sample" else (runner, stage)

    def fail(*_: object) -> None:
        raise error

    engine.core.runner.wait_for_steps()
    monkeypatch.setattr(part, name, fail)
    with pytest.raises(error):
        for _ in range(2):
            engine.step()
    monkeypatch.undo()
    engine.check_invariants()
    assert engine.kv_manager.num_blocks_in_use == 0
    outputs = {r: o.outputs[0] for r, o in finish(engine).items()}
    for i in range(4):
        expected = random_oracle.expected(i, 6)
        if i < 2:
            assert outputs[str(i)].finish_reason == "abort"
            assert outputs[str(i)].token_ids == expected[: len(outputs[str(i)].token_ids)]
        else:
            assert outputs[str(i)].token_ids == expected
    assert engine.stats().num_aborted == 2


def test_a_request_with_bad_logits_fails_alone(random_oracle, random_loaded) -> None:
    """What it sampled is no token, and the next step has begun with it."""
    engine = overlapped_engine(random_loaded, num_blocks=200)
    runner = paged_runner(engine)
    forward, num_steps = runner.forward, []

    def spoiled(batch):
        logits = forward(batch)
        num_steps.append(1)
        if len(num_steps) == 3:
            logits = logits.clone()
            logits[batch.sampling.req_ids.index("0")] = float("nan")
        return logits

    runner.forward = spoiled
    for i in range(3):
        engine.add_request(str(i), random_oracle.prompts[i], greedy_params(6))
    outputs = {r: o.outputs[0] for r, o in finish(engine).items()}
    assert outputs["0"].finish_reason == "error"
    assert outputs["0"].token_ids == random_oracle.expected(0, 2)
    for i in (1, 2):
        assert outputs[str(i)].token_ids == random_oracle.expected(i, 6)


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
    assert len(engine.core._under_way) == 1, "nobody needs it"
    assert engine.step() == [] and not engine.core._under_way
    stats = engine.stats()
    needed = len(random_oracle.prompts[2]) + num_outputs - 1
    assert stats.discarded_tokens == 1 and stats.scheduled_tokens == needed + 1
    engine.reset_stats()
    assert engine.stats().discarded_tokens == 0
    engine.add_request("a", random_oracle.prompts[1], greedy_params(9))
    engine.step()
    engine.close()
    assert not engine.core._under_way and engine.kv_manager.num_blocks_in_use == 0


def test_a_close_ends_all_and_says_nothing_of_a_step_that_is_nobodys(
    random_oracle, random_loaded
) -> None:
    engine = overlapped_engine(random_loaded, num_blocks=200)
    engine.add_request("a", random_oracle.prompts[1], greedy_params(9))
    engine.step()
    engine.core.runner.wait_for_steps()
    (thread,) = engine.core.runner._thread._threads

    def fail(_):
        raise MemoryError

    paged_runner(engine).forward = fail
    engine.step()  # another one is begun
    engine.close()
    assert not engine.core._under_way and not thread.is_alive()
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
