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

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from request import Request
from scheduler_interface import CachedRequestData, KVMemory, NewRequestData, SchedulerOutput


@dataclass(slots=True)
class StepPlan:
    """A plan while it is made. `num_tokens` is in the order of planning; taking a request out again
    is one `pop`."""

    budget: int
    num_tokens: dict[str, int] = field(default_factory=dict)
    admitted: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    num_left: dict[str, int] = field(default_factory=dict)  # tokens of a cut prompt, for later

    def add(self, request: Request, num_tokens: int) -> None:
        self.num_tokens[request.request_id] = num_tokens
        self.budget -= num_tokens

    def remove(self, request: Request) -> None:
        self.budget += self.num_tokens.pop(request.request_id, 0)
        self.num_left.pop(request.request_id, None)


@dataclass(slots=True)
class _Sent:
    """What the runner knows of a request. Of a preempted one: that it exists, and nothing more."""

    num_tokens: int
    num_blocks: int
    block_ids: Sequence[int]  # the request's table itself, which grows


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
        known: list[Request] = []
        for request in requests:
            if request.request_id in self._sent:
                known.append(request)
            else:
                self._encode_new(request, output)
        self._encode_known(known, output.scheduled_cached_reqs)

    def _encode_new(self, request: Request, output: SchedulerOutput) -> None:
        block_ids = self._kv_memory.get_block_ids(request.request_id)
        self._sent[request.request_id] = _Sent(request.num_tokens, len(block_ids), block_ids)
        output.scheduled_new_reqs.append(
            NewRequestData(
                request.request_id,
                request.prompt_token_ids,
                request.sampling_params,
                request.num_computed_tokens,
                list(block_ids),
            )
        )

    def _encode_known(self, requests: list[Request], cached: CachedRequestData) -> None:
        """Most have one new token and no new block, so this is written for speed: by column."""
        cached.req_ids = [request.request_id for request in requests]
        cached.num_computed_tokens = [request.num_computed_tokens for request in requests]
        cached.num_output_tokens = [len(request.output_token_ids) for request in requests]
        new_token_ids, new_block_ids = cached.new_token_ids, cached.new_block_ids
        for request in requests:
            sent, tokens = self._sent[request.request_id], request.all_token_ids
            if sent.num_tokens == 0:
                cached.resumed_req_ids.add(request.request_id)
                sent.block_ids = self._kv_memory.get_block_ids(request.request_id)
            new_token_ids.append(tokens[sent.num_tokens :])
            sent.num_tokens = len(tokens)
            num_blocks = len(sent.block_ids)
            if num_blocks == sent.num_blocks:
                new_block_ids.append([])
            else:
                new_block_ids.append(list(sent.block_ids[sent.num_blocks :]))
                sent.num_blocks = num_blocks
