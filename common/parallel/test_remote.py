"""Ranks and stages in their own processes, against one process: the same tokens whatever is
switched on. Also: a rank that is killed, stuck, raises or differs.

Starting workers takes seconds, so a test uses the same two many times, and ends them last."""

from __future__ import annotations

import os
import signal
import weakref
from dataclasses import replace
from pathlib import Path

import pytest

from common.engine import EngineConfig, LLMEngine
from common.engine_config import SHIPPED_CHECKPOINT
from common.parallel import message, remote, remote_launch
from common.parallel.executor import WorkerError
from common.requests.tokenizer import Tokenizer
from common.tests.adapter_cases import KINDS, edited, save_adapter
from common.tests.every_kind import DRAWN, PROMPTS, everything_said, must_say_the_same
from common.tests.remote_cases import (
    BLOCK_SIZE,
    WORKERS,
    engine_around,
    executor_of,
    is_there,
    one_process,
    pids_of,
    side_of,
    signal_in_step,
    start_forked,
)
from grammars import Choice, Json, Regex
from pipeline_plugin import PipelinePlugin
from request import SamplingParams
from scheduler_interface import NewRequestData, RunnerInput
from tiered_cache import KVTierConfig

RANKS, STAGES = dict(tensor_parallel_size=2), dict(pipeline_parallel_size=2)
SCARCE = dict(num_blocks=26, chunked_prefill=3, preempt_every=4)
DRIVERS = {  # what is in the driver only, for the same workers
    "two ranks": [SCARCE, dict(overlap_scheduling=True, prefix_cache="radix")],
    "two stages": [SCARCE, dict(scheduler="fcfs", prefix_cache=None)],
}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
STEP = 10**6  # the number of a plan that no scheduler made
FEW = SamplingParams(temperature=0, max_tokens=2)
OTHER_SUMS = 1e-6  # of log-probabilities: ranks add in another order than one process


@pytest.fixture(autouse=True)
def forked_workers(monkeypatch) -> None:
    """As they are started for users: test_remote_launch.py."""
    monkeypatch.setattr(remote_launch, "start_process", start_forked)


def tokens_of(
    engine: LLMEngine, prompts: list, params: SamplingParams | list[SamplingParams], **how
) -> list[list[int]]:
    outputs = engine.generate_batch(prompts, params, **how).values()
    return [output.outputs[0].token_ids for output in outputs]


def plan_message(plan: RunnerInput) -> bytes:
    return message.pack("plan", number=STEP, plan=plan)


def must_be_dead(engine: LLMEngine, pids: list[int], names: str) -> None:
    """The step raises an error that names the rank; so does every later call; no process is
    left."""
    with pytest.raises(RuntimeError, match=names) as caught:
        engine.generate_batch(PROMPTS, GREEDY)
    assert not any(map(is_there, pids)) and not engine.has_unfinished_requests()
    engine.add_request("running or waiting", [1, 2], GREEDY)  # who serves on is not held up
    with pytest.raises(RuntimeError, match="the engine has failed: ") as again:
        engine.step()
    assert str(caught.value) in str(again.value)
    (output,) = engine.step()
    assert output.outputs[0].finish_reason == "error" and not engine.has_unfinished_requests()
    engine.close()


@pytest.mark.parametrize(("name", "sizes"), [("two ranks", RANKS), ("two stages", STAGES)])
def test_two_ranks_equal_one_process_and_a_killed_or_stuck_one_is_named(
    name, sizes, shipped_loaded, shipped_tokenizer, tmp_path, adapters
) -> None:
    options = dict(check_invariants=True, shuffle_batch=True, max_loras=2)
    tiers = KVTierConfig(host_blocks=1)
    config = EngineConfig(**sizes, **options, **WORKERS, kv_tiers=tiers)
    engine = LLMEngine(config, tokenizer=shipped_tokenizer)
    side = side_of(engine)
    assert isinstance(engine.parts.in_flight_plans, PipelinePlugin) == (sizes == STAGES)
    assert engine.num_parameters == shipped_loaded.model.num_parameters
    assert engine.dtype == shipped_loaded.model.embed_weight.dtype
    alone = one_process(shipped_loaded, shipped_tokenizer)
    assert engine.kv_cache.kv_bytes_per_block == alone.kv_cache.kv_bytes_per_block

    of_ranks = ["num_steps", "num_preemptions", "cached_tokens"] if sizes == RANKS else []
    for changes in DRIVERS[name]:
        changes = {"check_invariants": True, **changes}
        here = one_process(shipped_loaded, shipped_tokenizer, **changes)
        there = engine_around(side, shipped_tokenizer, **sizes, **changes)
        must_say_the_same(everything_said(there), everything_said(here), OTHER_SUMS)
        found, right = there.stats(), here.stats()
        for counter in ["output_tokens", "discarded_tokens", *of_ranks]:
            assert getattr(found, counter) == getattr(right, counter), (changes, counter)
        assert ("preempt_every" in changes) == (found.num_preemptions > 0)
    if sizes == RANKS:  # before `engine` caches what another one would write over
        arguments = side, shipped_loaded, shipped_tokenizer, tmp_path / "kv"
        must_bring_blocks_back(*arguments, **sizes, overlap_scheduling=True)
    must_survive_an_interrupt(engine, alone)
    must_load_adapters(engine, shipped_loaded, shipped_tokenizer, adapters, tmp_path / "broken")
    if sizes == RANKS:
        must_keep_to_grammars(engine, shipped_loaded, shipped_tokenizer)

    pids = pids_of(executor_of(engine))
    rank = 1
    number = signal.SIGKILL
    said = "was killed by SIGKILL"
    if sizes == STAGES:
        rank = 0
        number = signal.SIGSTOP
        said = "is stopped: no end of step .* in 2 s"
    executor_of(engine).timeout_s = 2.0
    signal_in_step(engine, pids[rank], number)
    must_be_dead(engine, pids, rf"rank {rank} \(process {pids[rank]}\) {said}")


@pytest.fixture(scope="module")
def adapters(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    names = [*KINDS][:2]
    return {n: save_adapter(SHIPPED_CHECKPOINT, folder / n, **KINDS[n]) for n in names}


def must_keep_to_grammars(engine, loaded, tokenizer) -> None:
    """Each rank that samples makes masks of its own."""
    grammars = [Choice(["yes", "no", "none"]), Regex("[ab]{3,9}!"), Json({"type": "integer"}, 0)]
    params = [SamplingParams(temperature=0, max_tokens=9, grammar=g) for g in (*grammars, None)]
    here = one_process(loaded, tokenizer)
    assert tokens_of(engine, PROMPTS[:4], params) == tokens_of(here, PROMPTS[:4], params)


def must_load_adapters(engine, loaded, tokenizer, adapters, broken: Path) -> None:
    """Each rank its part. What one refuses, all do not have."""
    edited(adapters["attention"], broken, dict(r=3))
    here = one_process(loaded, tokenizer, adapters=adapters, max_loras=2)
    for name, path in adapters.items():
        with pytest.raises(ValueError, match="it is for another model"):
            engine.load_adapter(name, broken)
        engine.load_adapter(name, path)
    asked = PROMPTS[:3] * 2
    names = [None, *adapters, *adapters, None]
    found, right = (tokens_of(e, asked, GREEDY, adapter=names) for e in (engine, here))
    assert found == right and len(set(map(tuple, right))) > 4
    for name in adapters:
        engine.unload_adapter(name)


def must_bring_blocks_back(side, loaded, tokenizer, path, **options) -> None:
    """Tiers in the driver, blocks in the ranks: what one rank has lost of a block is a miss."""
    tiers = KVTierConfig(host_blocks=0, disk_blocks=60, disk_path=path)
    here = one_process(loaded, tokenizer, num_blocks=20)
    there = engine_around(side, tokenizer, kv_tiers=tiers, num_blocks=20, **options)
    connector = there.parts.connector
    greedy = SamplingParams(temperature=0, max_tokens=8)
    expected = tokens_of(here, PROMPTS[:2], greedy)
    others = [[i] * 30 for i in range(5, 9)]

    def num_back() -> int:
        """Blocks that come back. The tokens are right in any case."""
        before = connector.disk.num_read
        assert tokens_of(there, PROMPTS[:2], greedy) == expected
        num_hits = connector.disk.num_read - before
        there.generate_batch(others, FEW)  # and everything is evicted
        return num_hits

    assert num_back() == 0 and num_back() > 0
    nbytes = side.kv_cache.bytes_of_ranks[1]
    for file in connector.disk.folder.iterdir():  # rank 1's part, which is the last one
        file.write_bytes(file.read_bytes()[:-nbytes] + bytes(nbytes))
    assert num_back() == 0
    assert num_back() > 0, "it has been computed, and stored again"
    there.close()


def must_survive_an_interrupt(engine: LLMEngine, alone: LLMEngine) -> None:
    """Ctrl-C while the ranks compute: the results of the interrupted step are dropped in their
    turn."""
    executor = executor_of(engine)
    wait = executor_of(engine).wait_for_output
    for pid in pids_of(executor):  # a terminal sends it to them too
        os.kill(pid, signal.SIGINT)

    def interrupted(step: int):
        executor.wait_for_output = wait
        raise KeyboardInterrupt

    executor.wait_for_output = interrupted
    with pytest.raises(KeyboardInterrupt):
        engine.generate_batch(PROMPTS, GREEDY)
    assert tokens_of(engine, PROMPTS, GREEDY) == tokens_of(alone, PROMPTS, GREEDY)


def test_ranks_draft_alike_and_one_that_raises_is_named(shipped_loaded, shipped_tokenizer) -> None:
    """The number of drafts depends on a clock (`adaptive`): on one, or the ranks would differ."""
    options = {"method": "draft", "num_spec_tokens": 3}
    config = EngineConfig(**RANKS, check_invariants=True, speculative=options, **WORKERS)
    engine = LLMEngine(config, tokenizer=shipped_tokenizer)
    executor = executor_of(engine)
    pids = pids_of(executor)
    here = one_process(shipped_loaded, shipped_tokenizer)
    # A seed drawn by the engine can be another draw where drafts have probabilities.
    expected, said = everything_said(here), everything_said(engine)
    for name in DRAWN:
        del expected[name], said[name]
    must_say_the_same(said, expected, OTHER_SUMS)
    stats = engine.stats()
    assert stats.num_drafted_tokens > stats.num_accepted_tokens > 0
    assert stats.output_tokens <= stats.num_passes + stats.num_accepted_tokens

    new = NewRequestData("x", [1, 2, 3], GREEDY, 0, ([5],))
    right = RunnerInput([new], num_scheduled_tokens={"x": 3})
    wrong = RunnerInput([new], num_scheduled_tokens={"y": 3})  # and rank 0 waits for rank 1
    executor.send([plan_message(plan) for plan in (right, wrong)])
    must_be_dead(engine, pids, rf"rank 1 \(process {pids[1]}\) raised KeyError: 'x'")


def test_two_engines_at_once_one_forgotten_one_whose_ranks_differ(
    shipped_loaded, shipped_tokenizer, monkeypatch
) -> None:
    """Trap 81: ranks know the EOS that only the tokenizer has, and make it impossible before
    `min_tokens`."""
    greedy = replace(GREEDY, ignore_eos=False, min_tokens=3)
    alone = one_process(shipped_loaded, shipped_tokenizer)
    eos_token_id = tokens_of(alone, PROMPTS[:1], greedy)[0][1]
    tokenizer = Tokenizer(shipped_tokenizer.backend, eos_token_id)
    right = tokens_of(one_process(shipped_loaded, tokenizer), PROMPTS, greedy)
    assert eos_token_id not in right[0][:3]
    make = remote._start_messages
    sizes = {**WORKERS, "num_blocks": None, "max_model_len": 256}

    def start_messages(config, *rest) -> list[bytes]:
        fewer = replace(config, max_num_seqs=config.max_num_seqs // 2)
        return [make(c, *rest)[i] for i, c in enumerate((config, fewer))]

    with monkeypatch.context() as patch:  # rank 1 has use for half as much memory
        patch.setattr(remote, "_start_messages", start_messages)
        config = EngineConfig(tensor_parallel_size=2, check_invariants=True, **sizes)
        engine = LLMEngine(config, tokenizer=tokenizer)
    assert engine.kv_cache.num_blocks == 1 + (config.max_num_seqs // 2) * 256 // BLOCK_SIZE
    with monkeypatch.context() as patch:  # one rank, in a process all the same
        patch.setattr(EngineConfig, "has_workers", True)
        other = LLMEngine(EngineConfig(**WORKERS), tokenizer=tokenizer)
    pids, others = pids_of(executor_of(engine)), pids_of(executor_of(other))
    assert len({*pids, *others}) == 3
    assert tokens_of(engine, PROMPTS, greedy) == tokens_of(other, PROMPTS, greedy) == right
    known = weakref.ref(other)
    del other
    assert known() is None and not any(map(is_there, others))
    assert all(map(is_there, pids))

    params = [SamplingParams(seed=seed, temperature=5.0, max_tokens=9) for seed in (1, 2)]
    news = [NewRequestData("x", [1, 2, 3], p, 0, ([5],)) for p in params]
    plans = [RunnerInput([new], num_scheduled_tokens={"x": 3}) for new in news]
    executor = executor_of(engine)
    executor._answers[STEP] = {}
    executor.send(list(map(plan_message, plans)))
    names = rf"rank 1 \(process {pids[1]}\) has sampled other tokens in step {STEP} than rank 0"
    with pytest.raises(WorkerError, match=names):
        executor.wait_for_output(STEP)
    assert not any(map(is_there, pids))
