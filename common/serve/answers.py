"""Responses to clients: OpenAI's objects, complete or as chunks of a stream.

All chunks have the same id, `created` and `model`; only the first has the role; `finish_reason` is
null until the last; `usage` comes in a separate chunk if the client requested it.

See common/serve/README.md#what-it-answers"""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from common.requests.tokenizer import Tokenizer
from common.sampling.distributions import TokenLogprobs
from common.serve.deltas import CompletionDelta, RequestDelta
from common.serve.errors import to_json
from common.serve.tool_calls import END_THINK, THINK, Reader, Reply
from common.serve.wire import GenerateBody
from request import SamplingParams

DONE = b"data: [DONE]\n\n"
NO_LOGPROB = -9999.0  # JSON has no infinity


def event(content: Any) -> bytes:
    return b"data: %b\n\n" % to_json(content)


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
    created: int = field(default_factory=lambda: int(time.time()))
    num_completion_tokens: int = 0
    num_cached_tokens: int = 0
    _num_characters: dict[int, int] = field(default_factory=dict)  # by choice: of tokens so far
    _prompt_ids: dict[int, list[int]] = field(default_factory=dict)
    _replies: list[Reply] = field(default_factory=list)

    def count(self, prompt: int, delta: RequestDelta) -> None:
        if delta.prompt_token_ids is not None:
            self._prompt_ids[prompt] = delta.prompt_token_ids
            if self.reader is not None:  # a chat, which has one prompt
                end = self.prompt_end
                self._replies = [Reply(self.reader, end) for _ in range(self.params.n)]
        if not self.only_echo:
            new = (len(completion.token_ids) for completion in delta.completions.values())
            self.num_completion_tokens += sum(new)
        if delta.finished:
            self.num_cached_tokens += delta.num_cached_tokens

    def usage(self) -> dict[str, Any]:
        num_prompt_tokens = sum(map(len, self._prompt_ids.values()))
        usage: dict[str, Any] = {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": self.num_completion_tokens,
            "total_tokens": num_prompt_tokens + self.num_completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }
        if self.kind == "chat":
            num = sum(reply.num_thought_tokens for reply in self._replies if reply.has_thought)
            usage["completion_tokens_details"] = {"reasoning_tokens": num}
        return usage

    # -- whole

    def whole(self, totals: list[RequestDelta]) -> dict[str, Any]:
        choices: list[dict[str, Any]] = []
        for prompt, total in enumerate(totals):
            self.count(prompt, total)
            completions = map(total.completions.__getitem__, range(self.params.n))
            choices += [self._choice(prompt, one, total, "message") for one in completions]
        response = self._object("chat.completion", choices) | {"usage": self.usage()}
        return response | self._of_the_prompt(0, totals[0]) if self.kind == "chat" else response

    # -- as chunks

    def chunks(self, prompt: int, delta: RequestDelta) -> list[dict[str, Any]]:
        """Return the chunks for one delta of a prompt. A chat's first chunks have the role. A chunk
        without text marks the end of its choice."""
        self.count(prompt, delta)
        chunks: list[dict[str, Any]] = []
        if self.kind == "chat" and delta.prompt_token_ids is not None:
            about = self._of_the_prompt(0, delta)
            for i in range(self.params.n):
                role = {"role": "assistant", "content": ""}
                choice = {"index": i, "delta": role, "logprobs": None, "finish_reason": None}
                chunks.append(self._chunk([choice]) | about)
        sends_empty_text = self.params.logprobs is not None or self.body.return_token_ids
        for completion in delta.completions.values():
            choice = self._choice(prompt, completion, delta, "delta")
            texts = choice["delta"].values() if self.kind == "chat" else [choice["text"]]
            if any(texts) or choice["finish_reason"] or sends_empty_text:
                chunks.append(self._chunk([choice]))
        return chunks

    def usage_chunk(self) -> dict[str, Any]:
        return self._chunk([]) | {"usage": self.usage()}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._object("chat.completion.chunk", choices)

    def _object(self, of_a_chat: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        is_chat = self.kind == "chat"
        return {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{self.request_id}",
            "object": of_a_chat if is_chat else "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    # -- a choice

    def _choice(
        self, prompt: int, completion: CompletionDelta, of: RequestDelta, key: str
    ) -> dict[str, Any]:
        """`key`: what a chat calls its text, "message" if it is complete, else "delta"."""
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
                self._count_thought(reply, completion.token_ids)
            if is_complete:
                message = {"role": "assistant", "refusal": None} | message
            logprobs = None
            if completion.logprobs is not None:
                logprobs = {"content": [self._chat_logprobs(one) for one in completion.logprobs]}
            choice = {"index": completion.index, key: message, "logprobs": logprobs}
        else:
            choice = self._text_choice(prompt, completion, of)
        choice |= {"finish_reason": reason, "stop_reason": completion.stop_reason}
        if self.body.return_token_ids:
            choice["token_ids"] = completion.token_ids
        return choice

    def _of_the_prompt(self, prompt: int, of: RequestDelta) -> dict[str, Any]:
        """Return the fields about the request. As in vLLM, a chat has them once, a completion in
        each choice."""
        fields: dict[str, Any] = {}
        if self.body.return_token_ids:
            fields["prompt_token_ids"] = self._prompt_ids[prompt]
        if self.body.prompt_logprobs is not None:
            fields["prompt_logprobs"] = [self._scored(entry) for entry in of.prompt_logprobs or ()]
        return fields

    def _text_choice(
        self, prompt: int, completion: CompletionDelta, of: RequestDelta
    ) -> dict[str, Any]:
        index = prompt * self.params.n + completion.index
        is_first = index not in self._num_characters
        self._num_characters.setdefault(index, 0)
        about = self._of_the_prompt(prompt, of) if is_first else {}
        text = "" if self.only_echo else completion.text
        entries: list[TokenLogprobs | None] = []
        if not self.only_echo:
            entries += completion.logprobs or ()
        if self.prompts and is_first:
            text = self.prompts[prompt] + text
            entries = [*(of.prompt_logprobs or ()), *entries]
        logprobs = None
        if completion.logprobs is not None:
            logprobs = self._text_logprobs(entries, index)
        return about | {"index": index, "text": text, "logprobs": logprobs}

    def _count_thought(self, reply: Reply, token_ids: Sequence[int]) -> None:
        """Count the tokens up to the mark that ends the thought, if it is a token, as in vLLM."""
        token_id_of = self.tokenizer.backend.token_to_id
        begin = token_id_of(THINK)
        end = token_id_of(END_THINK)
        for token_id in token_ids:
            reply.is_thought_over |= end in (None, token_id)
            reply.num_thought_tokens += not (reply.is_thought_over or token_id == begin)

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

    def _text_logprobs(self, entries: list[TokenLogprobs | None], index: int) -> dict[str, Any]:
        """Return the log-probabilities of a completion. As in vLLM, a token's offset is the sum of
        the lengths of the tokens before it. An entry is None for a prompt's first token."""
        first = self._prompt_ids[index // self.params.n][0]
        ids = [first if entry is None else entry.token_id for entry in entries]
        offset = self._num_characters[index]
        offsets = []
        for token_id in ids:
            offsets.append(offset)
            offset += len(token_text(self.tokenizer, token_id))
        self._num_characters[index] = offset
        return {
            "text_offset": offsets,
            "token_logprobs": [None if e is None else finite(e.logprob) for e in entries],
            "tokens": [self._text(token_id) for token_id in ids],
            "top_logprobs": [self._top(entry) for entry in entries],
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
