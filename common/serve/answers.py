"""Responses to clients: OpenAI's objects, complete or as chunks of a stream.

All chunks have the same id, `created` and `model`; only the first has the role; `finish_reason` is
null until the last; `usage` comes in a separate chunk if the client requested it.

See common/serve/README.md#what-it-answers"""

from __future__ import annotations

import math
import time
import uuid
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from common.requests.tokenizer import Tokenizer
from common.sampling.distributions import TokenLogprobs
from common.serve.deltas import CompletionDelta, RequestDelta
from common.serve.large_json import json_chunks, to_json
from common.serve.text_places import TextPlaces
from common.serve.tool_calls import Reader, Reply, ThoughtSpan
from common.serve.wire import GenerateBody
from request import SamplingParams

DONE = b"data: [DONE]\n\n"
NO_LOGPROB = -9999.0  # JSON has no infinity
BYTES_OF_AN_ENTRY = 80  # approximate size of one log-probability


def event(content: Any) -> bytes:
    return b"data: %b\n\n" % to_json(content)


def event_chunks(content: Any) -> Iterator[bytes]:
    """Yield the same bytes in small parts."""
    return chain([b"data: "], json_chunks(content), [b"\n\n"])


@dataclass(slots=True)
class Usage:
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int | None = None  # None: not a chat

    def content(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
        if self.reasoning_tokens is not None:
            found["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens}
        return found


class ThoughtTokens:
    """Counts the tokens of one choice's thought: those that begin between its marks, as in vLLM. A
    mark can be several tokens. (The count can differ by one after bytes that are not UTF-8.)"""

    def __init__(self, tokenizer: Tokenizer, skips_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skips_special_tokens else frozenset[int]()
        self._begins: list[int] = []  # of each token, in bytes of the text
        self._num_bytes = self._num = 0
        self._is_over = False

    def append(self, token_ids: Sequence[int]) -> None:
        for token_id in () if self._is_over else token_ids:
            self._begins.append(self._num_bytes)
            if token_id not in self._skipped:
                self._num_bytes += len(self._tokenizer.token_bytes(token_id))

    def num_new(self, thought: ThoughtSpan) -> int:
        """Return how many tokens are in `thought`, minus the result of the previous calls."""
        if self._is_over or thought.begin is None:
            return 0
        end = self._num_bytes + 1 if thought.end is None else thought.end
        num = bisect_left(self._begins, end) - bisect_left(self._begins, thought.begin)
        new = num - self._num
        self._num = num
        if thought.end is not None:
            self._is_over = True
            self._begins = []
        return new


@dataclass(slots=True)
class Answer:
    """The response to one HTTP request, `body`: `n` choices for each of its prompts."""

    kind: str  # "chat" or "completion"
    model: str
    tokenizer: Tokenizer
    body: GenerateBody
    params: SamplingParams
    prompts: Sequence[str] = ()  # texts of the prompts, if they are echoed
    only_echo: bool = False
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    reader: Reader | None = None  # parses a chat's texts; None: the text is the content
    prompt_end: str = ""  # of a chat, for its `Reply`
    ignored_fields: list[str] = field(default_factory=list)  # of a chat's body
    usage: Usage = field(default_factory=Usage)
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))
    _begun: set[int] = field(default_factory=set)  # choices whose first text was written
    _places: dict[int, TextPlaces] = field(default_factory=dict)  # choices with log-probabilities
    _prompt_ids: dict[int, list[int]] = field(default_factory=dict)
    _replies: list[Reply] = field(default_factory=list)
    _thoughts: list[ThoughtTokens] = field(default_factory=list)

    def __post_init__(self) -> None:
        prefix = "chatcmpl" if self.kind == "chat" else "cmpl"
        self.id = f"{prefix}-{self.request_id}"
        self.usage.reasoning_tokens = 0 if self.kind == "chat" else None

    def count(self, prompt: int, delta: RequestDelta) -> None:
        if delta.prompt_token_ids is not None:
            self.usage.prompt_tokens += len(delta.prompt_token_ids)
            self._prompt_ids[prompt] = delta.prompt_token_ids
            if self.reader is not None:  # a chat, which has one prompt
                end = self.prompt_end
                skips = self.params.skip_special_tokens
                self._replies = [Reply(self.reader, end) for _ in range(self.params.n)]
                self._thoughts = [ThoughtTokens(self.tokenizer, skips) for _ in self._replies]
        if not self.only_echo:
            new = (len(completion.token_ids) for completion in delta.completions.values())
            self.usage.completion_tokens += sum(new)
        if self.reader is not None and self.reader.has_reasoning:
            for completion in delta.completions.values():
                self._thoughts[completion.index].append(completion.token_ids)
        if delta.finished:
            self.usage.cached_tokens += delta.num_cached_tokens

    def num_bytes(self, prompt: int, delta: RequestDelta) -> int:
        """Return the approximate size of the JSON for `delta`, in bytes."""
        num = 0
        width = 1 + (self.params.logprobs or 0)
        n = self.params.n
        for completion in delta.completions.values():
            num += len(completion.text) + 8 * len(completion.token_ids)
            num += len(completion.logprobs or ()) * width * BYTES_OF_AN_ENTRY
        num_first = sum(prompt * n + i not in self._begun for i in delta.completions)
        width = (1 + (self.params.prompt_logprobs or 0)) * BYTES_OF_AN_ENTRY
        ids = delta.prompt_token_ids if self.body.return_token_ids else None
        return num + num_first * len(delta.prompt_logprobs or ()) * width + 8 * n * len(ids or ())

    # -- whole

    def whole(self, totals: list[RequestDelta]) -> dict[str, Any]:
        choices: list[dict[str, Any]] = []
        for prompt, total in enumerate(totals):
            self.count(prompt, total)
            completions = map(total.completions.__getitem__, range(self.params.n))
            choices += [self._choice(prompt, completion, total) for completion in completions]
        response = self._object("chat.completion", choices) | {"usage": self.usage.content()}
        return response | self._of_the_prompt(0, totals[0]) if self.kind == "chat" else response

    # -- as chunks

    def chunks(self, prompt: int, delta: RequestDelta) -> list[dict[str, Any]]:
        """Return the chunks for one delta of a prompt. A chat's first chunks have the role. A chunk
        without text marks the end of its choice."""
        self.count(prompt, delta)
        role_chunks: list[dict[str, Any]] = []
        if self.kind == "chat" and delta.prompt_token_ids is not None:
            role = {"role": "assistant", "content": ""}
            about = self._of_the_prompt(0, delta)
            choices = [self._chat_choice(i, "delta", role, None) for i in range(self.params.n)]
            role_chunks = [self._chunk([choice]) | about for choice in choices]
        sends_empty_text = self.params.logprobs is not None or self.body.return_token_ids
        choices = [
            self._choice(prompt, completion, delta, "delta")
            for completion in delta.completions.values()
            if completion.text or completion.finish_reason or sends_empty_text
        ]
        return role_chunks + [
            self._chunk([choice])
            for choice in choices
            if choice.get("delta", True) or choice["finish_reason"] or sends_empty_text
        ]

    def usage_chunk(self) -> dict[str, Any]:
        return self._chunk([]) | {"usage": self.usage.content()}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._object("chat.completion.chunk", choices)

    def _object(self, of_a_chat: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": of_a_chat if self.kind == "chat" else "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    # -- a choice

    def _choice(
        self, prompt: int, completion: CompletionDelta, of: RequestDelta, key: str = "message"
    ) -> dict[str, Any]:
        index = prompt * self.params.n + completion.index
        reason = completion.finish_reason
        if self.kind == "chat":
            is_complete = key == "message"
            text = completion.text
            message: dict[str, Any] = {"content": text}
            if self._replies:
                reply = self._replies[completion.index]
                is_last = reason is not None
                message = reply.message(text) if is_complete else reply.delta(text, is_last)
                reason = reply.finish_reason(reason)
                new = self._thoughts[completion.index].num_new(reply.thought)
                self.usage.reasoning_tokens = (self.usage.reasoning_tokens or 0) + new
            if is_complete:
                message = {"role": "assistant", "refusal": None} | message
            choice = self._chat_choice(index, key, message, completion)
        else:
            choice = self._text_choice(index, prompt, completion, of)
        choice |= {"finish_reason": reason, "stop_reason": completion.stop_reason}
        if self.body.return_token_ids:
            choice["token_ids"] = completion.token_ids
        return choice

    def _of_the_prompt(self, prompt: int, of: RequestDelta) -> dict[str, Any]:
        """Return the fields about the request. As in vLLM, a chat has them once, a completion in
        each choice."""
        fields: dict[str, Any] = {}
        if self.ignored_fields:
            fields["ignored_fields"] = self.ignored_fields
        if self.body.return_token_ids:
            fields["prompt_token_ids"] = self._prompt_ids[prompt]
        if self.body.prompt_logprobs is not None:
            fields["prompt_logprobs"] = map(self._scored, of.prompt_logprobs or [])
        return fields

    def _chat_choice(
        self, index: int, key: str, content: dict[str, Any], completion: CompletionDelta | None
    ) -> dict[str, Any]:
        logprobs = None
        if completion is not None and completion.logprobs is not None:
            logprobs = {"content": map(self._chat_logprobs, completion.logprobs)}
        return {"index": index, key: content, "logprobs": logprobs, "finish_reason": None}

    def _text_choice(
        self, index: int, prompt: int, completion: CompletionDelta, of: RequestDelta
    ) -> dict[str, Any]:
        is_first = index not in self._begun
        self._begun.add(index)
        about = self._of_the_prompt(prompt, of) if is_first else {}
        text = "" if self.only_echo else completion.text
        entries: list[TokenLogprobs | None] | None = None
        if completion.logprobs is not None:
            entries = [] if self.only_echo else [*completion.logprobs]
        if self.prompts and is_first:
            text = self.prompts[prompt] + text
            entries = None if entries is None else (of.prompt_logprobs or []) + entries
        logprobs = None
        if entries is not None:
            prompt_ids = self._prompt_ids[prompt]
            if is_first:
                echoed = self.prompts[prompt] if self.prompts else None
                skips = self.params.skip_special_tokens
                self._places[index] = TextPlaces(self.tokenizer, prompt_ids, echoed, skips)
            first = prompt_ids[0]
            ids = [first if entry is None else entry.token_id for entry in entries]
            logprobs = self._text_logprobs(entries, self._places[index].take(ids), prompt)
        return about | {"index": index, "text": text, "logprobs": logprobs}

    # -- log-probabilities

    def _chat_logprobs(self, entry: TokenLogprobs) -> dict[str, Any]:
        top = [self._token(i, p) for i, p in entry.top.items()]
        return self._token(entry.token_id, entry.logprob) | {"top_logprobs": top}

    def _scored(self, entry: TokenLogprobs | None) -> dict[int, dict[str, Any]] | None:
        """Return a prompt position's log-probabilities by token id, as in vLLM."""
        if entry is None:
            return None
        found = {token_id: [p, rank + 1] for rank, (token_id, p) in enumerate(entry.top.items())}
        found[entry.token_id] = [entry.logprob, entry.rank]
        return {
            i: {"logprob": finite(p), "rank": rank, "decoded_token": token_text(self.tokenizer, i)}
            for i, (p, rank) in found.items()
        }

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = list(self.tokenizer.token_bytes(token_id))
        return {"token": self._text(token_id), "logprob": finite(logprob), "bytes": data}

    def _text_logprobs(
        self, entries: list[TokenLogprobs | None], offsets: list[int], prompt: int
    ) -> dict[str, Any]:
        tokens, logprobs = [], []
        for entry in entries:
            if entry is None:  # the first token of a prompt, which has no preceding token
                token = self._text(self._prompt_ids[prompt][0])
                logprobs.append(None)
            else:
                token = self._text(entry.token_id)
                logprobs.append(finite(entry.logprob))
            tokens.append(token)
        return {
            "text_offset": offsets,
            "token_logprobs": logprobs,
            "tokens": tokens,
            "top_logprobs": map(self._top, entries),
        }

    def _top(self, entry: TokenLogprobs | None) -> dict[str, float] | None:
        if entry is None:
            return None
        top = {entry.token_id: entry.logprob} | entry.top  # includes the token itself
        return {self._text(i): finite(p) for i, p in top.items()}

    def _text(self, token_id: int) -> str:
        if self.body.return_tokens_as_token_ids:  # two tokens can have the same text
            return f"token_id:{token_id}"
        return token_text(self.tokenizer, token_id)


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    return tokenizer.token_bytes(token_id).decode("utf-8", "replace")


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else NO_LOGPROB
