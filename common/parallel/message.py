"""The messages between the scheduling process and the computing processes, pickled, as vLLM does.

To a worker, a message is the name of a method of `Rank` (`worker_rank.py`) and its arguments; from
a worker, a kind and its content:

    ready     number, facts                              what the worker's model is
    answer    number, and what was asked for             `StepOutput`, a KV block, a digest
    error     kind_of_error, sentence, is_collective     the worker has failed

Unpickling runs code that the bytes name, so only this user may write to the sockets (`channel.py`).
A `SchedulerOutput` points to requests and their whole history: only its half for the runner is sent
(`runner_half`).

See common/parallel/README.md#processes"""

from __future__ import annotations

import pickle
from dataclasses import fields
from typing import Any

from scheduler_interface import RunnerInput

START = 0  # the number of "start", and of its answer
_RUNNER_FIELDS = [field.name for field in fields(RunnerInput)]


def runner_half(plan: RunnerInput) -> RunnerInput:
    """The plan without what only its scheduler uses."""
    return RunnerInput(**{name: getattr(plan, name) for name in _RUNNER_FIELDS})


def pack(kind: str, **content: Any) -> bytes:
    return pickle.dumps((kind, content), pickle.HIGHEST_PROTOCOL)


def unpack(data: bytes) -> tuple[str, dict[str, Any]]:
    return pickle.loads(data)


def pack_error(error: BaseException) -> bytes:
    """Pack an error. `is_collective`: another rank, gone or late, is at fault."""
    chain = [error, error.__cause__, error.__context__]
    return pack(
        "error",
        kind_of_error=type(error).__name__,
        sentence=str(error),
        is_collective=any(type(e).__name__ == "CollectiveError" for e in chain),
    )
