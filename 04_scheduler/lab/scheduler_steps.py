"""What the tests of every scheduler need: requests, a step that preempts, a look at a plan."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kv_memory import KeyedRequest
from request import Request
from scheduler_base import SchedulerBase
from scheduler_interface import SchedulerOutput

# For both schools: each is an error that names its field.
WRONG_OPTIONS: list[dict[str, Any]] = [
    {"preempt_every": 0},
    {"max_num_seqs": 0},
    {"max_num_seqs": 2.5},
    {"max_num_batched_tokens": 0},
    {"max_preemptions": 0},
    {"max_model_len": 0},
    {"policy": "fastest"},
]


def named_request(
    name: str, num_prompt: int, max_new_tokens: int = 8, arrival_time: float = 0.0, **more: Any
) -> Request:
    """Its prompt begins with its name, so that no two have a prefix in common. `more` are fields
    that are set afterwards."""
    prompt = [ord(c) for c in name] + list(range(num_prompt - len(name)))
    request = KeyedRequest.from_tokens(name, prompt, max_new_tokens, arrival_time=arrival_time)
    for field, value in more.items():
        setattr(request, field, value)
    return request


@contextmanager
def preempting(scheduler: SchedulerBase) -> Iterator[None]:
    """Steps in here preempt somebody, if anybody may be."""
    scheduler.preempt_every = 1
    yield
    scheduler.preempt_every = None


def planned(output: SchedulerOutput) -> dict[str, int]:
    return dict(output.num_scheduled_tokens)


def preempted(output: SchedulerOutput) -> list[str]:
    return [request.request_id for request in output.preempted_requests]
