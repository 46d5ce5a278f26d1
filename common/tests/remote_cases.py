"""Engines whose model is in other processes, for tests: started once, put to many uses."""

from __future__ import annotations

import multiprocessing
import signal
from dataclasses import replace
from multiprocessing.connection import Connection
from unittest import mock

import psutil

from common.assembly.assembly import RunnerParts
from common.engine import EngineConfig, LLMEngine
from common.models.loader import LoadedModel
from common.parallel import remote, worker
from common.parallel.executor import Executor, Link
from common.parallel.remote import KVSizeOfRanks, RemoteRunner
from common.requests.tokenizer import Tokenizer
from common.tests.forked import Forked

BLOCK_SIZE = 4
WORKERS = dict(block_size=BLOCK_SIZE, num_blocks=300, dtype="float64", max_num_seqs=8)


def start_forked(folder: str, rank: int) -> Link:
    """In place of `remote_launch.start_process`: a worker that need not load PyTorch."""
    its_end, ours = multiprocessing.Pipe(duplex=False)
    with its_end:
        process = Forked(_work, folder, rank, its_end)
    return Link(rank, process, ours)  # type: ignore


def _work(folder: str, rank: int, lifeline: Connection) -> None:
    worker.main([folder, str(rank), str(lifeline.fileno())])


def executor_of(engine: LLMEngine) -> Executor:
    runner = engine.core.runner
    while not isinstance(runner, RemoteRunner):
        runner = runner.runner
    return runner.executor


def side_of(engine: LLMEngine) -> RunnerParts:
    """What computes for it, which is not ended with another engine that uses it."""
    return replace(engine.parts.runner, close=int)


def engine_around(side: RunnerParts, tokenizer: Tokenizer, **config) -> LLMEngine:
    """Another scheduler, memory and loop, in front of the same workers."""
    made = EngineConfig(**{**WORKERS, **config})
    kv_cache = side.kv_cache
    assert isinstance(kv_cache, KVSizeOfRanks) and made.num_blocks <= kv_cache.num_blocks
    side = replace(side, kv_cache=replace(kv_cache, num_blocks=made.num_blocks))

    def make(*_) -> RunnerParts:
        return replace(side, tokenizer=tokenizer)

    with mock.patch.object(remote, "start_runner", make):
        return LLMEngine(made)


def one_process(loaded: LoadedModel, tokenizer: Tokenizer, **config) -> LLMEngine:
    made = EngineConfig(**{**WORKERS, **config})
    return LLMEngine(made, loaded=loaded, tokenizer=tokenizer)


def pids_of(executor: Executor) -> list[int]:
    return [link.process.pid for link in executor.links]


def is_there(pid: int) -> bool:
    """Zombies do not count."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def signal_in_step(engine: LLMEngine, pid: int, number: signal.Signals, step: int = 3) -> None:
    """The process gets the signal when the engine has made so many steps more."""
    stop_at = engine.num_steps + step

    def on_step(record) -> None:
        if record.step + 1 == stop_at:
            psutil.Process(pid).send_signal(number)

    engine.on_step = on_step
