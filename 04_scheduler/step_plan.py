"""A plan while it is made, and the message that the runner gets of it.

The runner keeps a copy of every request, so the message is a delta (chapter 1): a request's prompt
once, and then only what is new. `RunnerDelta` remembers what the runner knows:

    never sent                  -> NewRequestData: prompt, whole block table
    sent before                 -> CachedRequestData: new tokens, new blocks
    preempted, now resumed      -> CachedRequestData: all tokens, whole block table; its new table
                                   has nothing in common with the one that the runner has

Invariant: after each plan the runner's copy of a scheduled request is the scheduler's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from request import Request
from scheduler_interface import CachedRequestData, KVMemory, NewRequestData, SchedulerOutput


@dataclass(slots=True)
class StepPlan:
    """A plan while it is made. `num_tokens` is in the order of planning; taking a request out again
    is one `pop`."""

    budget: int
    num_tokens: dict[str, int] = field(default_factory=dict)
    preempted: list[Request] = field(default_factory=list)

    def add(self, request: Request, num_tokens: int) -> None:
        self.num_tokens[request.request_id] = num_tokens
        self.budget -= num_tokens

    def remove(self, request: Request) -> None:
        self.budget += self.num_tokens.pop(request.request_id, 0)


@dataclass(slots=True)
class _Sent:
    """What the runner knows of a request. Of a preempted one: that it exists, and nothing more."""

    num_tokens: int = 0
    num_blocks: int = 0


class RunnerDelta:
    """What one runner knows of a scheduler's requests."""

    def __init__(self, kv_memory: KVMemory) -> None:
        self._kv_memory = kv_memory
        self._sent: dict[str, _Sent] = {}
        self._finished_req_ids: set[str] = set()  # since the last message

    def knows(self, request: Request) -> bool:
        return request.request_id in self._sent

    def request_preempted(self, request: Request) -> None:
        if (sent := self._sent.get(request.request_id)) is not None:
            sent.num_tokens = sent.num_blocks = 0

    def request_finished(self, request: Request) -> None:
        if self._sent.pop(request.request_id, None) is not None:  # the runner has state of it
            self._finished_req_ids.add(request.request_id)

    def encode(self, requests: Iterable[Request], output: SchedulerOutput) -> None:
        """Put what is new about the scheduled `requests` into the plan's message."""
        output.finished_req_ids, self._finished_req_ids = self._finished_req_ids, set()
        known: list[tuple[Request, _Sent]] = []
        for request in requests:
            sent = self._sent.get(request.request_id)
            if sent is None:
                self._encode_new(request, output)
            else:
                known.append((request, sent))
        self._encode_known(known, output.scheduled_cached_reqs)

    def _encode_new(self, request: Request, output: SchedulerOutput) -> None:
        block_ids = list(self._kv_memory.get_block_ids(request.request_id))
        self._sent[request.request_id] = _Sent(request.num_tokens, len(block_ids))
        output.scheduled_new_reqs.append(
            NewRequestData(
                request.request_id,
                request.prompt_token_ids,
                request.sampling_params,
                request.num_computed_tokens,
                block_ids,
            )
        )

    def _encode_known(self, known: list[tuple[Request, _Sent]], cached: CachedRequestData) -> None:
        get_block_ids = self._kv_memory.get_block_ids
        for request, sent in known:
            request_id, tokens = request.request_id, request.all_token_ids
            if sent.num_tokens == 0:
                cached.resumed_req_ids.add(request_id)
            cached.req_ids.append(request_id)
            cached.new_token_ids.append(tokens[sent.num_tokens :])
            cached.num_computed_tokens.append(request.num_computed_tokens)
            cached.num_output_tokens.append(len(request.output_token_ids))
            block_ids = get_block_ids(request_id)
            cached.new_block_ids.append(list(block_ids[sent.num_blocks :]))
            sent.num_tokens, sent.num_blocks = len(tokens), len(block_ids)
