"""Stages of a pipeline in threads of one process: the engine's own runners, models and messages,
and queues in place of a network. For tests that would start too many processes."""

from __future__ import annotations

import queue
import threading
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from common.assembly.assembly import RunnerParts, find_limits, make_runner
from common.engine import EngineConfig, LLMEngine
from common.models.collectives import Collectives
from common.models.loader import LoadedModel, load_model
from common.models.ranks import Ranks
from common.parallel import message, remote
from common.parallel.sharded_model import ShardedModel
from common.requests.tokenizer import Tokenizer
from scheduler_interface import RunnerInput, StepOutput

PATIENCE_S = 30.0


class Line(Collectives):
    """One stage's `Collectives`; `lines` are those of all stages."""

    def __init__(self, ranks: Ranks, lines: list[Line]) -> None:
        super().__init__(ranks)
        self.lines = lines
        self.arrived: queue.Queue[torch.Tensor] = queue.Queue()
        lines.append(self)

    def send(self, tensor: torch.Tensor) -> None:
        self.lines[self.ranks.stage + 1].arrived.put(tensor)

    def receive(self, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        tensor = self.arrived.get(timeout=PATIENCE_S)
        assert tensor.shape == tuple(shape) and tensor.dtype == dtype
        return tensor.clone()  # it is overwritten


class Stage:
    """Computes plans in a thread, in order, each from its bytes."""

    def __init__(self, local: RunnerParts) -> None:
        self.local = local
        self.plans = queue.Queue()
        threading.Thread(target=self._serve, daemon=True).start()

    def execute(self, plan: bytes) -> Future[StepOutput]:
        future: Future[StepOutput] = Future()
        self.plans.put((plan, future))
        return future

    def _serve(self) -> None:
        while (work := self.plans.get()) is not None:
            plan, future = work
            try:
                _, content = message.unpack(plan)
                handle = self.local.runner.execute(content["plan"])
                future.set_result(handle.wait())
            except BaseException as error:
                future.set_exception(error)


class LocalStages:
    """A `ModelRunner`: what `RemoteRunner` is to workers."""

    def __init__(self, stages: list[Stage]) -> None:
        self.stages = stages

    def execute(self, plan: RunnerInput) -> LocalStep:
        data = message.pack("plan", plan=message.runner_half(plan))
        return LocalStep([stage.execute(data) for stage in self.stages])

    def close(self) -> None:
        for stage in self.stages:
            stage.plans.put(None)


class LocalStep:
    def __init__(self, futures: list[Future[StepOutput]]) -> None:
        self.futures = futures

    def wait(self) -> StepOutput:
        outputs = [future.result(PATIENCE_S) for future in self.futures]
        assert not any(output.token_ids for output in outputs[:-1]), "only the last one samples"
        return outputs[-1]


def stages_of(engine: LLMEngine) -> list[Stage]:
    runner: Any = engine.core.runner
    while not isinstance(runner, LocalStages):
        runner = runner.runner
    return runner.stages


def pipelined_engine(
    monkeypatch: pytest.MonkeyPatch,
    path: Path,
    draft: LoadedModel | None = None,
    tokenizer: Tokenizer | None = None,
    **options: Any,
) -> LLMEngine:
    """An engine over stages of this process, which checks itself after every step."""

    def make_parts(config: EngineConfig, loaded: Any, draft: Any, tokenizer: Any):
        lines: list[Line] = []
        parts: list[RunnerParts] = []
        for stage in range(config.pipeline_parallel_size):
            line = Line(Ranks(1, config.pipeline_parallel_size, stage), lines)
            part = load_model(
                path, torch.float64, torch.device("cpu"), partial(ShardedModel, collectives=line)
            )
            parts.append(make_runner(config, part, draft, find_limits(config, part, tokenizer)))
        runner = LocalStages([Stage(local) for local in parts])
        return replace(
            parts[-1],
            close=runner.close,
            runner=runner,
            block_io=lambda: pytest.fail("no connectors here"),
            is_queued=True,
            tokenizer=tokenizer,
        )

    monkeypatch.setattr(remote, "start_runner", make_parts)
    config = EngineConfig(check_invariants=True, **{"pipeline_parallel_size": 2, **options})
    return LLMEngine(config, draft=draft, tokenizer=tokenizer)
