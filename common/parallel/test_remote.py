"""Two ranks in processes of their own, against one process: the same tokens whatever is switched
on. And what comes of a rank that is killed, stuck, raises or differs.

Starting workers takes seconds, so a test puts the same two to many uses, and to their end last."""

from __future__ import annotations

import os
import signal
import time
import weakref
from dataclasses import replace

import pytest

from common.engine import EngineConfig, LLMEngine
from common.loader import read_checkpoint
from common.parallel import message, remote
from common.parallel.executor import Executor, WorkerError
from common.tests.remote_cases import (
    BLOCK_SIZE,
    PROMPTS,
    WORKERS,
    engine_around,
    everything_said,
    executor_of,
    is_there,
    one_process,
    pids_of,
    side_of,
    signal_in_step,
)
from request import SamplingParams
from scheduler_interface import NewRequestData, PlanMessage
from tiered_cache import KVTierConfig

DRIVERS = {
    "ahead": dict(overlap_scheduling=True, prefix_cache="radix"),
    "scarce": dict(num_blocks=26, chunked_prefill=3, preempt_every=4, shuffle_waiting=True),
}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
FEW = SamplingParams(temperature=0, max_tokens=2)


def must_be_dead(engine: LLMEngine, pids: list[int], names: str, within_s: float) -> None:
    """The step raises what names the rank, soon; so does every later call; nobody is left."""
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=names) as caught:
        engine.generate_batch(PROMPTS, GREEDY)
    assert time.monotonic() - began < within_s
    assert not any(map(is_there, pids))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the engine is dead: ") as again:
            engine.generate_batch(PROMPTS, GREEDY)
        assert str(caught.value) in str(again.value)
    assert not engine.has_unfinished_requests()
    engine.add_request("running or waiting", [1, 2], GREEDY)  # who serves on is not held up
    with pytest.raises(RuntimeError, match="the engine is dead: "):
        engine.step()
    (output,) = engine.step()
    assert output.outputs[0].finish_reason == "abort" and not engine.has_unfinished_requests()
    engine.close()


def test_two_ranks_say_what_one_process_says_and_one_that_is_killed_is_named(
    shipped_loaded, shipped_tokenizer, tmp_path
) -> None:
    config = EngineConfig(
        tensor_parallel_size=2,
        check_invariants=True,
        shuffle_batch=True,
        kv_tiers=KVTierConfig(host_blocks=1),
        **WORKERS,
    )
    engine = LLMEngine(config, tokenizer=shipped_tokenizer)
    side, pids = side_of(engine), pids_of(executor_of(engine))
    assert engine.num_parameters == shipped_loaded.model.num_parameters
    assert engine.dtype == shipped_loaded.model.embed_weight.dtype
    alone = one_process(shipped_loaded, shipped_tokenizer)
    assert engine.kv_cache.kv_bytes_per_block == alone.kv_cache.kv_bytes_per_block

    for name, changes in DRIVERS.items():
        changes = {"check_invariants": True, **changes}
        here = one_process(shipped_loaded, shipped_tokenizer, **changes)
        there = engine_around(side, shipped_tokenizer, **changes)
        expected, said = everything_said(here), everything_said(there)
        assert said == expected, name
        found, right = there.stats(), here.stats()
        for counter in ("num_steps", "num_preemptions", "cached_tokens", "discarded_tokens"):
            assert getattr(found, counter) == getattr(right, counter), (name, counter)
        assert (name == "scarce") == (right.num_preemptions > 0), name
        assert right.cached_tokens > 0, name
    must_bring_blocks_back(side, shipped_loaded, shipped_tokenizer, tmp_path / "kv")
    must_survive_an_interrupt(engine, alone)

    executor_of(engine).timeout_s = 2.0
    signal_in_step(engine, pids[1], signal.SIGKILL)
    must_be_dead(engine, pids, rf"rank 1 \(process {pids[1]}\) was killed by SIGKILL", 2 + 3)


def must_bring_blocks_back(side, loaded, tokenizer, path) -> None:
    """Tiers in the driver, blocks in the ranks: what one rank has lost of a block is a miss."""
    tiers = KVTierConfig(host_blocks=0, disk_blocks=60, disk_path=path)
    few = dict(num_blocks=20, overlap_scheduling=True)
    here = one_process(loaded, tokenizer, **few)
    there = engine_around(side, tokenizer, kv_tiers=tiers, **few)
    connector, greedy = there._connector, SamplingParams(temperature=0, max_tokens=8)
    expected = here.generate_batch(PROMPTS[:2], greedy).values()
    others = [[i] * 30 for i in range(5, 9)]

    def num_back() -> int:
        """Blocks that come back. The tokens are right in any case."""
        before = connector.stats.num_disk_hits
        outputs = there.generate_batch(PROMPTS[:2], greedy).values()
        num_hits = connector.stats.num_disk_hits - before
        assert [o.outputs[0].token_ids for o in outputs] == [
            o.outputs[0].token_ids for o in expected
        ]
        there.generate_batch(others, FEW)  # and everything is evicted
        return num_hits

    assert num_back() == 0 and num_back() > 0
    disk, nbytes = connector.disk, side.kv_cache.bytes_of_ranks[1]
    for slot in range(disk.max_blocks):  # rank 1's part, which is the last one
        end = disk._offset(slot) + disk._record_nbytes
        disk._map[end - nbytes : end] = bytes(nbytes)
    assert num_back() == 0 and disk.num_corrupt > 0
    assert num_back() > 0, "it has been computed, and stored again"
    there.close()


def must_survive_an_interrupt(engine: LLMEngine, alone: LLMEngine) -> None:
    """Ctrl-C while the ranks compute: what nobody waits for is thrown away, in its turn."""
    executor, wait = executor_of(engine), executor_of(engine).wait_for_output
    for pid in pids_of(executor):  # a terminal sends it to them too
        os.kill(pid, signal.SIGINT)

    def interrupted(step: int):
        executor.wait_for_output = wait
        raise KeyboardInterrupt

    executor.wait_for_output = interrupted
    with pytest.raises(KeyboardInterrupt):
        engine.generate_batch(PROMPTS, GREEDY)
    found, right = (e.generate_batch(PROMPTS, GREEDY).values() for e in (engine, alone))
    tokens = [[o.outputs[0].token_ids for o in outputs] for outputs in (found, right)]
    assert tokens[0] == tokens[1]


NGRAM = {"method": "ngram", "min_ngram": 1}
DRAFT = {"method": "draft", "num_spec_tokens": 3}


@pytest.mark.parametrize("how", [NGRAM, DRAFT], ids=["look-up", "draft"])
def test_ranks_guess_alike_and_one_that_is_stuck_or_raises_is_named(
    how, shipped_loaded, shipped_tokenizer
) -> None:
    """How much is guessed depends on a clock (`adaptive`): on one, or the ranks would differ."""
    config = EngineConfig(tensor_parallel_size=2, check_invariants=True, speculative=how, **WORKERS)
    engine = LLMEngine(config, tokenizer=shipped_tokenizer)
    executor, pids = executor_of(engine), pids_of(executor_of(engine))
    here = one_process(shipped_loaded, shipped_tokenizer)
    # What the engine draws a seed for may be another draw where guesses have probabilities.
    expected, said = everything_said(here), everything_said(engine)
    drawn = {name for name in said if how is DRAFT and int(name) % 8 == 7}
    assert all(said[name] == expected[name] for name in said.keys() - drawn)
    stats = engine.stats()
    assert stats.num_drafted_tokens > stats.num_accepted_tokens > 0
    assert stats.output_tokens <= stats.num_passes + stats.num_accepted_tokens

    executor.timeout_s = 2.0
    if how is NGRAM:
        signal_in_step(engine, pids[0], signal.SIGSTOP)
        names = rf"rank 0 \(process {pids[0]}\) is stuck: no sign of life, .* in 2 s"
        must_be_dead(engine, pids, names, 2 + 1 + 3)
        return
    new = NewRequestData("x", [1, 2, 3], GREEDY, 0, ([5],))
    right = PlanMessage([new], num_scheduled_tokens={"x": 3})
    wrong = PlanMessage([new], num_scheduled_tokens={"y": 3})  # and rank 0 waits for rank 1
    executor.send(
        [
            message.pack("plan", step=10**6, plan=message.plan_to_map(plan), times=[])
            for plan in (right, wrong)
        ]
    )
    must_be_dead(engine, pids, rf"rank 1 \(process {pids[1]}\) raised KeyError: 'x'", 2 + 1 + 3)


def test_two_engines_at_once_one_forgotten_one_whose_ranks_differ(
    shipped_tokenizer, monkeypatch
) -> None:
    make, sizes = remote._start_messages, {**WORKERS, "num_blocks": None, "max_model_len": 256}

    def start_messages(config, *rest) -> list[bytes]:
        fewer = replace(config, max_num_seqs=config.max_num_seqs // 2)
        return [make(c, *rest)[i] for i, c in enumerate((config, fewer))]

    with monkeypatch.context() as patch:  # rank 1 has use for half as much memory
        patch.setattr(remote, "_start_messages", start_messages)
        config = EngineConfig(tensor_parallel_size=2, check_invariants=True, **sizes)
        engine = LLMEngine(config, tokenizer=shipped_tokenizer)
    assert engine.kv_cache.num_blocks == 1 + (config.max_num_seqs // 2) * 256 // BLOCK_SIZE
    with monkeypatch.context() as patch:  # one rank, in a process all the same
        patch.setattr(EngineConfig, "has_workers", True)
        other = LLMEngine(EngineConfig(**WORKERS), tokenizer=shipped_tokenizer)
    pids, others = pids_of(executor_of(engine)), pids_of(executor_of(other))
    assert len({*pids, *others}) == 3
    found = [e.generate_batch(PROMPTS, GREEDY) for e in (engine, other)]
    tokens = [[o.outputs[0].token_ids for o in outputs.values()] for outputs in found]
    assert tokens[0] == tokens[1]

    known = weakref.ref(other)
    del other
    assert known() is None and not any(map(is_there, others))
    assert all(map(is_there, pids))

    params = [SamplingParams(seed=seed, temperature=5.0, max_tokens=9) for seed in (1, 2)]
    plans = [PlanMessage([NewRequestData("x", [1, 2, 3], p, 0, ([5],))]) for p in params]
    for plan in plans:
        plan.num_scheduled_tokens = {"x": 3}
    step, executor = 10**6, executor_of(engine)
    executor.send(
        [message.pack("plan", step=step, plan=message.plan_to_map(p), times=[]) for p in plans]
    )
    names = rf"rank 1 \(process {pids[1]}\) has sampled other tokens in step {step} than rank 0"
    with pytest.raises(WorkerError, match=names):
        executor.wait_for_output(step)
    assert not any(map(is_there, pids))


def test_guesses_are_counted_from_plans_and_outputs_as_where_they_are_made(
    shipped_loaded, shipped_tokenizer
) -> None:
    engine = one_process(shipped_loaded, shipped_tokenizer, speculative=NGRAM)
    counting = remote.CountingRunner(engine.core.runner)
    engine.core.runner = counting
    everything_said(engine, aborts=True)
    assert counting.stats == engine.speculation.stats and counting.stats.num_accepted > 0


# -- the start


def test_ranks_with_other_checkpoints_are_refused(random_oracle, family_oracle, monkeypatch):
    """Of one shape, with other weights: such ranks would answer, in gibberish."""
    make = remote._start_messages

    def start_messages(config, checkpoint, *rest) -> list[bytes]:
        other = replace(checkpoint, path=random_oracle.path)
        return [make(config, c, *rest)[i] for i, c in enumerate((checkpoint, other))]

    monkeypatch.setattr(remote, "_start_messages", start_messages)
    config = EngineConfig(model=family_oracle.path, tensor_parallel_size=2, **WORKERS)
    with pytest.raises(ValueError, match="the ranks do not have the same checkpoint"):
        LLMEngine(config, tokenizer=NoTokenizer())


@pytest.mark.parametrize(
    "name, other", [("checkpoint", "b"), ("dtype", "bfloat16"), ("num_blocks", 41)]
)
def test_ranks_that_say_different_things_of_themselves_are_refused(
    name: str, other: object, random_oracle
) -> None:
    """A block that one rank lacks would be another's memory there."""
    config, facts = EngineConfig(**WORKERS), {"checkpoint": "a", "dtype": "float64"}
    facts = facts | {"num_blocks": 40, "kv_bytes_per_block": 8}
    executor, ranks = Executor([], 0, 1.0), [facts, facts | {name: other}]
    with pytest.raises(ValueError, match=f"the ranks do not have the same {name}: "):
        remote._make_side(config, read_checkpoint(random_oracle.path), executor, ranks, 64, 97, {})


class NoTokenizer:
    vocab_size = 97
