"""Requests that share prefixes: made to measure, and read from a published trace.

Prompts share their beginnings for a few reasons only, and each has a different tree:

    shared system prompt    S0 u, S0 u, S1 u, S0 u ...        a few long trunks, many short twigs
    multi-turn chat         u0, u0 a0 u1, u0 a0 u1 a1 u2      one growing branch a user
    few-shot template       I E0 q, I E0 q, I E1 q ...        a trunk, branches, twigs
    unique prompt           u, u, u ...                       nothing shared: the cost of a cache

Texts that are not meant to be shared differ in their very first token. So the hits of a cache
without bounds are known in advance, to the token. A later turn of a chat contains the answers to
the turns before it, which only the engine knows; `PlannedRequest.prompt` inserts them.

A trace in the form of the Mooncake FAST'25 release has lengths and block identities instead of
tokens: `hash_ids[i]` represents 512 tokens and everything before them, the last one the remaining
tokens. So equal ids have equal predecessors, and `read_trace` checks this.

Invariants: equal seeds give equal requests; sessions keep their order in any mix.

Source: Mooncake, arXiv 2407.00079, and the traces released with its FAST'25 paper.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TypeGuard

TRACE_BLOCK_SIZE = 512


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request to come. Its prompt is `new_token_ids`, after the conversation so far if it
    `follows` an earlier request."""

    request_id: str
    family: str
    new_token_ids: tuple[int, ...]
    output_len: int
    history: tuple[PlannedRequest, ...] = ()  # the turns before this one, in order

    def prompt(self, answers: Mapping[str, Sequence[int]]) -> list[int]:
        """The prompt's token ids. `answers` has the output of each earlier turn by request id.

        Raises `ValueError` if an earlier turn has no answer yet.
        """
        token_ids: list[int] = []
        for turn in self.history:
            if turn.request_id not in answers:
                raise ValueError(
                    f"{self.request_id} follows {turn.request_id}, which has no answer"
                )
            token_ids += turn.new_token_ids
            token_ids += answers[turn.request_id]
        return token_ids + list(self.new_token_ids)


Session = list[PlannedRequest]  # to be sent in this order; most have a single request


class PrefixWorkload:
    """Makes families of requests over random token ids from `range(vocab_size)`, all from one seed.

    Each family method returns sessions. Families of one workload share nothing with each other.
    Raises `ValueError` if more texts must differ in their first token than there are tokens.
    """

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        if vocab_size < 1:
            raise ValueError(f"vocab_size must be >= 1, got {vocab_size}")
        self.vocab_size = vocab_size
        self._num_requests = 0
        self._random = random.Random(seed)
        self._first_tokens = iter(self._random.sample(range(vocab_size), vocab_size))

    def shared_system_prompts(
        self,
        num_groups: int,
        requests_per_group: int,
        system_len: int,
        user_len: int,
        output_len: int,
    ) -> list[Session]:
        """Draw `num_groups` applications with a system prompt each, and their users' questions."""
        sessions: list[Session] = []
        for system in self._roots(num_groups, system_len):
            for user in self._texts(requests_per_group, user_len):
                sessions.append([self._request("system", system + user, output_len)])
        return sessions

    def chats(
        self, num_chats: int, num_turns: int, first_len: int, user_len: int, output_len: int
    ) -> list[Session]:
        """Draw users with `num_turns` turns: `first_len` tokens, then `user_len` at each turn."""
        sessions: list[Session] = []
        for first in self._roots(num_chats, first_len):
            turns: Session = []
            for turn in range(num_turns):
                text = self._text(user_len) if turn else first
                turns.append(self._request("chat", text, output_len, tuple(turns)))
            sessions.append(turns)
        return sessions

    def few_shot(
        self,
        num_tasks: int,
        questions_per_task: int,
        instruction_len: int,
        examples_len: int,
        question_len: int,
        output_len: int,
    ) -> list[Session]:
        """Draw one instruction for all, examples for each task, and questions."""
        (instruction,) = self._roots(1, instruction_len)
        sessions: list[Session] = []
        for examples in self._texts(num_tasks, examples_len):
            for question in self._texts(questions_per_task, question_len):
                text = instruction + examples + question
                sessions.append([self._request("few-shot", text, output_len)])
        return sessions

    def unique_prompts(self, num_requests: int, prompt_len: int, output_len: int) -> list[Session]:
        """Draw prompts that all differ in their first token."""
        return [
            [self._request("unique", text, output_len)]
            for text in self._roots(num_requests, prompt_len)
        ]

    def arrive(self, sessions: Sequence[Session]) -> list[PlannedRequest]:
        """Return all requests in a random order of arrival; each session keeps its order."""
        turns = [index for index, session in enumerate(sessions) for _ in session]
        self._random.shuffle(turns)
        queues = [iter(session) for session in sessions]
        return [next(queues[index]) for index in turns]

    def _request(
        self,
        family: str,
        text: tuple[int, ...],
        output_len: int,
        history: tuple[PlannedRequest, ...] = (),
    ) -> PlannedRequest:
        request_id = f"{family}-{self._num_requests}"
        self._num_requests += 1
        return PlannedRequest(request_id, family, text, output_len, history)

    def _text(self, length: int) -> tuple[int, ...]:
        return tuple(self._random.choices(range(self.vocab_size), k=length))

    def _texts(self, count: int, length: int) -> list[tuple[int, ...]]:
        firsts = self._random.sample(range(self.vocab_size), min(count, self.vocab_size))
        return self._behind(iter(firsts), count, length)

    def _roots(self, count: int, length: int) -> list[tuple[int, ...]]:
        """Return texts as `_texts` does, but different from all roots before."""
        return self._behind(self._first_tokens, count, length)

    def _behind(self, firsts: Iterator[int], count: int, length: int) -> list[tuple[int, ...]]:
        if length < 1:
            raise ValueError(f"a text must have at least one token, got {length}")
        heads = list(islice(firsts, count))
        if len(heads) < count:
            raise ValueError(f"vocab_size must give enough first tokens, got {self.vocab_size}")
        return [(head, *self._text(length - 1)) for head in heads]


# -- traces


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One line of a trace. Lengths in tokens."""

    timestamp_ms: int
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]

    def num_tokens_in(self, num_blocks: int) -> int:
        """Tokens in the first `num_blocks` blocks: the last block of a prompt is rarely full."""
        return min(num_blocks * TRACE_BLOCK_SIZE, self.input_length)


def read_trace(path: str | Path) -> list[TraceRequest]:
    """Read all requests, in the order of the file. Empty lines are skipped.

    Raises `FileNotFoundError`, and `ValueError` that names the line and its error.
    """
    requests: list[TraceRequest] = []
    parents: dict[int, int | None] = {}
    with Path(path).open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                request = _parse_line(line)
                _check_parents(request, parents)
                if requests and request.timestamp_ms < requests[-1].timestamp_ms:
                    raise ValueError(f"timestamp must not go backwards, got {request.timestamp_ms}")
            except ValueError as error:
                raise ValueError(f"{Path(path).name}, line {number}: {error}") from None
            requests.append(request)
    if not requests:
        raise ValueError(f"{Path(path).name} must have requests")
    return requests


def _parse_line(line: str) -> TraceRequest:
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"must be JSON: {error.msg}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"must be a JSON object, got {type(fields).__name__}")
    lowest = {"timestamp": 0, "input_length": 1, "output_length": 0}
    for name, low in lowest.items():
        value = fields.get(name)
        if not _is_count(value) or value < low:
            raise ValueError(f"{name} must be an integer >= {low}, got {value!r}")
    ids = fields.get("hash_ids")
    if not isinstance(ids, list) or not all(map(_is_count, ids)):
        raise ValueError(f"hash_ids must be a list of integers >= 0, got {ids!r}")
    num_blocks = -(-fields["input_length"] // TRACE_BLOCK_SIZE)
    if len(ids) != num_blocks:
        raise ValueError(f"hash_ids must have {num_blocks} ids for input_length, got {len(ids)}")
    timestamp_ms, input_length, output_length = (fields[name] for name in lowest)
    return TraceRequest(timestamp_ms, input_length, output_length, tuple(ids))


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _check_parents(request: TraceRequest, parents: dict[int, int | None]) -> None:
    """Check that an id always follows the same one: it means everything up to its block."""
    before = None
    for hash_id in request.hash_ids:
        if parents.setdefault(hash_id, before) != before:
            raise ValueError(f"hash id {hash_id} follows both {before} and {parents[hash_id]}")
        before = hash_id
