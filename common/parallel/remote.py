"""The scheduling process's side of an engine whose model runs in other processes.

    LLMEngine, scheduler, KV manager, tokenizer, outputs     this process: computes nothing
        RemoteRunner.execute(plan) -> RemoteStep              a `ModelRunner` (chapter 1)
            Executor                                          plan to all ranks, output from one
                worker 0 .. N-1                               `common/parallel/worker.py`

`execute` returns when every worker has the plan, so a loop that plans ahead (`runner/overlap.py`)
needs no thread. KV tiers and connectors get the bytes of a block from all ranks.

See common/parallel/README.md#processes"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from common.assembly.assembly import Limits, Namespace, RunnerParts, find_limits
from common.engine_config import SHIPPED_CHECKPOINT, EngineConfig, is_instance_arg
from common.models.loader import Checkpoint, LoadedModel, read_checkpoint
from common.models.model import DecoderModel
from common.models.ranks import Ranks
from common.parallel import message
from common.parallel.executor import OF_THE_USER, START_TIMEOUT_S, Executor, WorkerError
from common.parallel.remote_launch import StartedWorkers, launch
from common.parallel.sharded_model import rank_config
from common.requests.tokenizer import Tokenizer, load_tokenizer
from scheduler_interface import RunnerInput, StepOutput

# -- the runner


class RemoteRunner:
    """A `ModelRunner` over the workers."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor

    def execute(self, plan: RunnerInput) -> RemoteStep:
        step = self.executor.ask("plan", plan=message.runner_half(plan))
        return RemoteStep(self.executor, step)


@dataclass(frozen=True, slots=True)
class RemoteStep:
    """A step whose plan the workers have received."""

    executor: Executor
    step: int

    def wait(self) -> StepOutput:
        """Wait for the output. Raises `WorkerError` if a worker exited, is stuck or raised."""
        return self.executor.wait_for_output(self.step)


# -- KV


@dataclass(frozen=True, slots=True)
class KVSizeOfRanks:
    """The size of the KV memory. A block id names a block on every rank."""

    num_blocks: int
    block_size: int
    bytes_of_ranks: tuple[int, ...]  # of one block

    @property
    def kv_bytes_per_block(self) -> int:
        return sum(self.bytes_of_ranks)


class RemoteBlockIO:
    """A `KVBlockIO` (chapter 3) over all ranks: a block's bytes are those of rank 0, then those of
    rank 1, and so on. So a store has all parts of a block under one key and one checksum, or does
    not have it."""

    def __init__(self, executor: Executor, kv_cache: KVSizeOfRanks) -> None:
        self.executor = executor
        self.bytes_of_ranks = kv_cache.bytes_of_ranks
        self.block_nbytes: int = kv_cache.kv_bytes_per_block

    def read_block(self, block_id: int) -> bytes:
        """The block's bytes after the steps so far."""
        number = self.executor.ask("read_block", block_id=block_id)
        parts = self.executor.answers(number, "reading a KV block")
        return b"".join(part["data"] for part in parts)

    def write_block(self, block_id: int, data: bytes | memoryview) -> None:
        """Write a block of `block_nbytes` bytes, before later steps run."""
        first = 0
        messages = []
        for num_bytes in self.bytes_of_ranks:
            part = bytes(data[first : first + num_bytes])
            messages.append(message.pack("write_block", block_id=block_id, data=part))
            first += num_bytes
        self.executor.send(messages)


class RemoteAdapters:
    """An `AdapterLoader` over all ranks: each reads a directory that all can see."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self._loaded: set[str] = set()  # digests

    def load(self, directory: str | Path) -> str:
        path = str(Path(directory).expanduser().resolve())
        number = self.executor.ask("load_adapter", directory=path)
        answers = self.executor.answers(number, "reading an adapter", START_TIMEOUT_S)
        digests = {answer["digest"] for answer in answers if not answer["kind_of_error"]}
        wrong = next((answer for answer in answers if answer["kind_of_error"]), None)
        if wrong is not None or len(digests) > 1:
            for digest in digests - self._loaded:  # of ranks that could read it
                self.drop(digest)
        if wrong is not None:
            raise OF_THE_USER[wrong["kind_of_error"]](wrong["sentence"])
        if len(digests) > 1:
            raise ValueError(f"{path} must be the same on all ranks: the file has changed")
        (digest,) = digests
        self._loaded.add(digest)
        return digest

    def drop(self, digest: str) -> None:
        """Drop the adapter. Ranks that are gone have lost it: the next step reports them."""
        self._loaded.discard(digest)
        with suppress(WorkerError):
            self.executor.send(message.pack("drop_adapter", digest=digest))


# -- the start


def start_runner(
    config: EngineConfig,
    loaded: LoadedModel | None,
    draft: LoadedModel | None,
    tokenizer: Tokenizer | None,
) -> RunnerParts:
    """Start the workers and make a runner for them. Raises the same errors about configuration
    and checkpoint as a single process, whichever process finds them."""
    if loaded is not None or draft is not None:
        raise ValueError("cannot send a loaded model to other processes; name its directory")
    checkpoint = read_checkpoint(config.model or SHIPPED_CHECKPOINT)
    tokenizer = tokenizer or load_tokenizer(checkpoint.path)
    limits = find_limits(config, checkpoint, tokenizer)
    all_ranks = [
        Ranks(config.tensor_parallel_size, config.pipeline_parallel_size, rank)
        for rank in range(config.num_ranks)
    ]
    for ranks in all_ranks:
        rank_config(checkpoint.config, ranks)  # raises if there is no such part
    device = config.resolve_device()
    if device.index is not None and config.num_ranks > 1:
        raise ValueError(f"device must not name one, got {config.device!r}: each rank has its own")
    num_parameters = DecoderModel(checkpoint.config, device="meta").num_parameters  # no memory
    started = launch(config.num_ranks, device, num_parameters, config.num_threads)
    output_ranks = [ranks.rank for ranks in all_ranks if ranks.is_last_stage]
    executor = Executor(
        links=started.links,
        folder=started.folder,
        output_ranks=output_ranks if config.check_invariants else output_ranks[:1],
        timeout_s=config.worker_timeout_s,
    )
    try:
        facts = executor.start(_start_messages(config, checkpoint, device, started, limits))
        return _make_runner(
            config=config,
            checkpoint=checkpoint,
            tokenizer=tokenizer,
            executor=executor,
            facts=facts,
            limits=limits,
            num_parameters=num_parameters,
        )
    except BaseException:
        executor.close()
        raise


def _start_messages(
    config: EngineConfig,
    checkpoint: Checkpoint,
    device: torch.device,
    started: StartedWorkers,
    limits: Limits,
) -> list[bytes]:
    has_connector = config.kv_tiers is not None or config.kv_connector is not None
    return [
        message.pack(
            "start",
            config=worker_config(config, checkpoint, device),
            rank=link.rank,
            limits=limits,
            store_port=started.store.port,
            threads=started.num_threads,
            log_level=logging.getLogger().getEffectiveLevel(),
            has_connector=has_connector,
        )
        for link in started.links
    ]


def worker_config(
    config: EngineConfig, checkpoint: Checkpoint, device: torch.device
) -> EngineConfig:
    """The configuration of a worker: without what plans, caches and stores, which stays here."""
    return replace(
        config,
        model=str(checkpoint.path.resolve()),
        device=device.type,
        adapters={} if config.takes_adapters else None,  # they come later
        policy="fcfs",
        prefix_cache="hash",
        kv_tiers=None,
        kv_connector=None,
        events=None,
        scheduler="two_phase" if is_instance_arg(config.scheduler) else config.scheduler,
        chunked_prefill=is_instance_arg(config.chunked_prefill) or config.chunked_prefill,
    )


def _make_runner(
    config: EngineConfig,
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    executor: Executor,
    facts: Sequence[dict[str, Any]],
    limits: Limits,
    num_parameters: int,
) -> RunnerParts:
    bytes_of_ranks = tuple(fact["kv_bytes_per_block"] for fact in facts)
    kv_cache = KVSizeOfRanks(facts[0]["num_blocks"], config.block_size, bytes_of_ranks)
    lookahead = [f["num_lookahead_tokens"] for f in facts if f["num_lookahead_tokens"] is not None]

    def block_io() -> tuple[RemoteBlockIO, Namespace]:
        namespace = [
            (f"rank {rank} of {len(facts)}: {name}", value)
            for rank, fact in enumerate(facts)
            for name, value in fact["namespace"]
        ]
        return RemoteBlockIO(executor, kv_cache), tuple(namespace)

    return RunnerParts(
        runner=RemoteRunner(executor),
        model_config=checkpoint.config,
        num_parameters=num_parameters,
        device=facts[0]["device"],
        dtype=facts[0]["dtype"],
        limits=limits,
        tokenizer=tokenizer,
        kv_cache=kv_cache,
        block_io=block_io,
        is_queued=True,
        num_lookahead_tokens=max(lookahead, default=None),
        adapters=RemoteAdapters(executor) if config.takes_adapters else None,
        close=executor.close,
    )
