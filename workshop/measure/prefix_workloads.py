"""Requests that share prefixes, made to measure.

Prompts share their beginnings for a few reasons only, and each has a different tree:

    shared system prompt    S0 u, S0 u, S1 u, S0 u ...        a few long trunks, many short twigs
    multi-turn chat         u0, u0 a0 u1, u0 a0 u1 a1 u2      one growing branch a user
    few-shot template       I E0 q, I E0 q, I E1 q ...        a trunk, branches, twigs
    unique prompt           u, u, u ...                       nothing shared: the cost of a cache

Texts that are not meant to be shared differ in their very first token. So the hits of a cache
without bounds are known in advance, to the token. A later turn of a chat contains the answers to
the turns before it, which only the engine knows; `PlannedRequest.prompt` inserts them."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request to come. Its prompt is `new_token_ids`, after the turns of its `history`."""

    request_id: str
    family: str
    new_token_ids: tuple[int, ...]
    output_len: int
    history: tuple[PlannedRequest, ...] = ()  # the turns before this one, in order

    def prompt(self, answers: Mapping[str, Sequence[int]]) -> list[int]:
        """The prompt's token ids. `answers` has the output of each earlier turn by request id."""
        turns = [(*turn.new_token_ids, *answers[turn.request_id]) for turn in self.history]
        return [token for turn in (*turns, self.new_token_ids) for token in turn]


Session = list[PlannedRequest]  # to be sent in this order; most have a single request


class PrefixWorkload:
    """Makes families of requests over random token ids from `range(vocab_size)`, all from one seed.

    Each family method returns sessions. Families of one workload share nothing with each other.
    """

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
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
        return [
            [self._request("system", system + user, output_len)]
            for system in self._roots(num_groups, system_len)
            for user in self._texts(requests_per_group, user_len)
        ]

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
        return [
            [self._request("few-shot", instruction + examples + question, output_len)]
            for examples in self._texts(num_tasks, examples_len)
            for question in self._texts(questions_per_task, question_len)
        ]

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
        self._num_requests += 1
        request_id = f"{family}-{self._num_requests - 1}"
        return PlannedRequest(request_id, family, text, output_len, history)

    def _text(self, length: int) -> tuple[int, ...]:
        return tuple(self._random.choices(range(self.vocab_size), k=length))

    def _texts(self, count: int, length: int) -> list[tuple[int, ...]]:
        """Return texts with different first tokens."""
        firsts = self._random.sample(range(self.vocab_size), count)
        return [(first, *self._text(length - 1)) for first in firsts]

    def _roots(self, count: int, length: int) -> list[tuple[int, ...]]:
        """Return texts as `_texts` does, but different from all roots before."""
        return [(next(self._first_tokens), *self._text(length - 1)) for _ in range(count)]
