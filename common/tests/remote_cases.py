"""Engines whose model is in other processes, for tests: started once, put to many uses."""

from __future__ import annotations

import random
import signal
from dataclasses import replace
from unittest import mock

import psutil

import common.engine
from common.engine import EngineConfig, LLMEngine
from common.loader import LoadedModel
from common.parallel.executor import Executor
from common.parallel.remote import KVSizeOfRanks, RemoteRunner
from common.scheduler_assembly import RunnerSide, assemble_around
from common.tokenizer import Tokenizer
from request import SamplingParams

BLOCK_SIZE = 4
WORKERS = dict(block_size=BLOCK_SIZE, num_blocks=300, dtype="float64", max_num_seqs=8)

PROMPTS = [
    "def area(width, height):\n    return width",
    "def area(width, height):\n    return height",
    "import os\nimport sys\n",
    "x = [1, 2, 1, 2, 1, 2, 1,",
    "class A",
]
EVERYTHING = [
    SamplingParams(temperature=0, max_tokens=8, ignore_eos=True),
    SamplingParams(seed=1, max_tokens=7, top_p=0.9, ignore_eos=True),
    SamplingParams(seed=2, max_tokens=5, top_k=5, min_p=0.05, logprobs=2),
    SamplingParams(seed=3, max_tokens=9, repetition_penalty=1.4, presence_penalty=0.3),
    SamplingParams(temperature=0, max_tokens=9, frequency_penalty=1.9, min_tokens=4, logprobs=0),
    SamplingParams(seed=5, n=2, max_tokens=5, temperature=1.5),
    SamplingParams(temperature=0, max_tokens=12, stop=["e", "self"]),
    SamplingParams(max_tokens=6),  # the engine draws a seed
]


def executor_of(engine: LLMEngine) -> Executor:
    runner = engine.core.runner
    while not isinstance(runner, RemoteRunner):
        runner = runner.runner
    return runner.executor


def side_of(engine: LLMEngine) -> RunnerSide:
    """What computes for it, which is not ended with another engine that uses it."""
    return replace(engine._side, close=None)


def engine_around(side: RunnerSide, tokenizer: Tokenizer, **config) -> LLMEngine:
    """Another scheduler, memory and loop, in front of the same workers."""
    made = EngineConfig(**{"tensor_parallel_size": 2, **WORKERS, **config})
    kv_cache = side.kv_cache
    assert isinstance(kv_cache, KVSizeOfRanks) and made.num_blocks <= kv_cache.num_blocks
    side = replace(side, kv_cache=replace(kv_cache, num_blocks=made.num_blocks))

    def make(*_) -> tuple:
        return assemble_around(made, side), tokenizer

    with mock.patch.object(common.engine, "_make_remote_parts", make):
        return LLMEngine(made)


def one_process(loaded: LoadedModel, tokenizer: Tokenizer, **config) -> LLMEngine:
    made = EngineConfig(**{**WORKERS, **config})
    return LLMEngine(made, loaded=loaded, tokenizer=tokenizer)


def everything_said(engine: LLMEngine, seed: int = 0, aborts: bool = False) -> dict:
    """Requests of every kind, arriving over some steps; of each what came of it."""
    rng, outputs = random.Random(seed), {}
    coming = [(rng.randrange(6), i) for i in range(2 * len(EVERYTHING))]
    for step in range(400):
        if step > 6 and not engine.has_unfinished_requests():
            break
        for when, i in coming:
            if when == step:
                prompt, params = PROMPTS[i % len(PROMPTS)], EVERYTHING[i % len(EVERYTHING)]
                engine.add_request(str(i), prompt, params)
        if aborts and step == 4:
            engine.abort_request("3")
        outputs |= {o.request_id: o for o in engine.step() if o.finished}
    assert not engine.has_unfinished_requests() and engine.stats().kv_blocks_in_use == 0
    return {
        name: [
            (c.token_ids, c.text, c.finish_reason, c.stop_reason, _logprobs(c.logprobs))
            for c in output.outputs
        ]
        for name, output in outputs.items()
    }


def _logprobs(entries: list | None) -> list | None:
    """Ranks sum in another order than one process: the last digits differ."""
    if entries is None:
        return None
    return [(e.token_id, round(e.logprob, 6), e.rank, sorted(e.top)) for e in entries]


def pids_of(executor: Executor) -> list[int]:
    return [link.process.pid for link in executor.links if link.process is not None]


def is_there(pid: int) -> bool:
    """Zombies do not count."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def signal_in_step(engine: LLMEngine, pid: int, number: signal.Signals, step: int = 3) -> None:
    """The process gets the signal when the engine has made so many steps more."""
    stop_at = engine.recorder.num_steps + step

    def on_step(record) -> None:
        if record.step + 1 == stop_at:
            psutil.Process(pid).send_signal(number)

    engine.on_step = on_step
