"""`AsyncLLM`: the engine for asyncio programs.

    async for delta in llm.generate(prompt, SamplingParams(max_tokens=64)):
        print(delta.completions[0].text, end="")

Prompts are tokenized here, not in the engine's thread. A step delivers the deltas of all requests
together. Each request has a mailbox that merges unread deltas, so a slow reader gets several deltas
merged into one and never blocks other requests.

See common/serve/README.md"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.engine import LLMEngine
from common.engine_config import EngineConfig, EngineStats
from common.requests.input_processor import plain
from common.requests.token_rules import without_texts
from common.serve.deltas import RequestDelta
from common.serve.engine_loop import (
    EngineError,
    EngineLoop,
    EngineStopped,
    PromptTooLong,
    QueueFull,
)
from request import SamplingParams

if TYPE_CHECKING:
    from typing import Unpack

    from common.requests.input_processor import RequestOptions

__all__ = ["AsyncLLM", "EngineError", "PromptTooLong", "QueueFull", "RequestDelta"]
LONG_TEXT = 4096  # characters; a longer prompt is tokenized outside the loop
CLOSED = "the engine is closed; create a new one"
_LONG_TEXTS = ThreadPoolExecutor(1, "long texts")  # texts of callers that have left are never done


class Mailbox:
    """The unread deltas of one request, merged into one. Belongs to the event loop."""

    def __init__(self) -> None:
        self._delta: RequestDelta | None = None
        self._is_full = asyncio.Event()

    def put(self, delta: RequestDelta) -> None:
        if self._delta is None:
            self._delta = delta
        elif not self._delta.finished:  # a delta that was in flight at the end is dropped
            self._delta.extend(delta)
        self._is_full.set()

    async def take(self) -> RequestDelta:
        await self._is_full.wait()
        self._is_full.clear()
        delta = self._delta
        self._delta = None
        assert delta is not None
        return delta


class AsyncLLM:
    """The engine with an asyncio interface. Takes the arguments of `LLM`, and `max_waiting`: the
    number of sequences that may wait in addition to `max_num_seqs`; None: no limit. The constructor
    returns when the engine is ready, and raises what `LLM` does. All methods are for one event loop
    at a time."""

    def __init__(
        self, model: str | Path | None = None, *, max_waiting: int | None = None, **config: Any
    ) -> None:
        self.config = EngineConfig(model=model, **config)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._mailboxes: dict[str, Mailbox] = {}  # by the request's name
        self._num_requests = 0
        self._calls: set[asyncio.Future] = set()
        self._is_closed = False
        self.max_per_request: int | None = None  # sequences; some places are left for others
        if max_waiting is not None:
            num_places = self.config.max_num_seqs + max_waiting
            self.max_per_request = max(1, max_waiting, num_places // 2)
        make_engine = partial(LLMEngine, self.config)
        self._engine_loop = EngineLoop(make_engine, self._deliver, max_waiting)
        engine = self._engine = self._engine_loop.made.result()
        assert engine.tokenizer is not None
        self.tokenizer = engine.tokenizer
        self._max_token_chars = max(map(len, self.tokenizer.backend.get_vocab()))
        self.max_model_len = engine.max_model_len
        self.model_config = engine.model_config
        self.default_sampling_params = engine.default_sampling_params
        self.stats = engine.stats()  # as of the engine's last delivery
        self._vocab_size = engine.vocab_size  # tokens that can be sampled

    # -- requests

    async def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncIterator[RequestDelta]:
        """Yield the deltas of a request: the first reports acceptance, the last the end. Leaving
        the loop early, or being cancelled, aborts the request. Raises `ValueError` if the request
        cannot be served, `QueueFull` if too many wait, `EngineError` if it cannot continue."""
        self._bind()
        options.setdefault("arrival_time", time.monotonic())
        self._num_requests += 1
        name = f"request-{self._num_requests}"
        mailbox = self._mailboxes[name] = Mailbox()
        try:
            params = await self.without_texts(params or self.default_sampling_params)
            is_text = isinstance(prompt, str)
            token_ids = await self.prompt_ids(prompt, params) if is_text else plain(prompt)
            self._engine_loop.add(name, token_ids, params, dict(options))
            is_finished = False
            while not is_finished:
                delta = await mailbox.take()
                is_finished = delta.finished
                if delta.completions or delta.error is None:
                    yield delta
                if delta.error is not None:
                    raise delta.error
        finally:
            del self._mailboxes[name]
            self._engine_loop.abort(name)  # nothing, if it has come to its end

    async def without_texts(self, params: SamplingParams) -> SamplingParams:
        """Return `params` with `bad_words` as token ids. Otherwise the engine's thread would
        tokenize them while other requests wait. Raises `ValueError`."""
        words = params.bad_words
        if not isinstance(words, list | tuple) or not any(isinstance(w, str) for w in words):
            return params
        ids = await asyncio.to_thread(without_texts, words, self.tokenizer, self._vocab_size)
        return replace(params, bad_words=ids)

    async def prompt_ids(
        self,
        prompt: str | list[int],
        params: SamplingParams,
        add_special_tokens: bool = True,
    ) -> list[int]:
        """Return the token ids of a prompt. Raises `ValueError` for invalid text, and
        `PromptTooLong`."""
        if isinstance(prompt, str):
            if params.truncate_prompt_tokens is None:
                self._check_length(prompt)
            prompt = await self.encode(prompt, add_special_tokens)
        if params.truncate_prompt_tokens is None and len(prompt) >= self.max_model_len:
            raise PromptTooLong(
                f"the prompt has {len(prompt)} tokens, but this model takes at most "
                f"{self.max_model_len - 1}, since prompt and output together may have "
                f"{self.max_model_len}"
            )
        return prompt

    def _check_length(self, text: str) -> None:
        """Refuse a text that is too long whatever its tokens are, as vLLM does: 16 MB take a minute
        of a core."""
        num_tokens = len(text) // self._max_token_chars
        if num_tokens >= self.max_model_len:
            raise PromptTooLong(
                f"the prompt has at least {num_tokens} tokens, but this model takes at most "
                f"{self.max_model_len - 1}"
            )

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text. Raises `ValueError` for invalid text."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError("prompt contains an unpaired surrogate") from error
        if len(text) < LONG_TEXT:
            return self.tokenizer.encode(text, add_special_tokens)
        # As a batch, because for a single text the library holds Python's lock until the end.
        encode = self.tokenizer.backend.encode_batch_fast
        call = partial(encode, [text], add_special_tokens=add_special_tokens)
        return (await asyncio.get_running_loop().run_in_executor(_LONG_TEXTS, call))[0].ids

    def abort_all(self, reason: str) -> None:
        """Abort all requests. Their readers get the output so far, and an `EngineStopped` that
        gives `reason`."""
        for name in self._mailboxes:
            self._engine_loop.abort(name)
            self._end(name, reason)

    def _end(self, name: str, reason: str) -> None:
        error = EngineStopped(reason)
        self._mailboxes[name].put(RequestDelta(name, finished=True, error=error))

    @property
    def num_unfinished(self) -> int:
        return len(self._mailboxes)

    # -- the engine

    @property
    def death_reason(self) -> str | None:
        """The reason why the engine has stopped; None while it runs."""
        return self._engine_loop.death_reason

    @property
    def adapters(self) -> list[str]:
        """The names of the adapters that are loaded."""
        return self._engine.adapters

    async def load_adapter(self, name: str, directory: str | Path) -> None:
        """`LLMEngine.load_adapter`, between two steps."""
        await self.call(LLMEngine.load_adapter, name, directory)

    async def unload_adapter(self, name: str) -> None:
        """`LLMEngine.unload_adapter`, between two steps."""
        await self.call(LLMEngine.unload_adapter, name)

    async def call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        """Return `method(engine, *arguments)`, run between two steps. Raises what it raises."""
        self._bind()
        future = asyncio.wrap_future(self._engine_loop.call(method, *arguments))
        self._calls.add(future)
        try:
            return await future
        finally:
            self._calls.discard(future)

    def close(self) -> None:
        """End all requests and the engine. Can be called from any thread."""
        self._is_closed = True
        self._engine_loop.close()

    # -- between the engine's thread and the loop

    def _bind(self) -> None:
        if self._is_closed:
            raise EngineStopped(CLOSED)
        self._loop = asyncio.get_running_loop()

    def _deliver(self, deltas: list[RequestDelta], stats: EngineStats, is_last: bool) -> None:
        """Pass deltas to the event loop. Runs in the engine's thread."""
        self.stats = stats
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop has ended, so there are no readers
                self._loop.call_soon_threadsafe(self._receive, deltas, is_last)

    def _receive(self, deltas: list[RequestDelta], is_last: bool) -> None:
        for delta in deltas:
            if (mailbox := self._mailboxes.get(delta.request_id)) is not None:
                mailbox.put(delta)
        if is_last:
            reason = self.death_reason or CLOSED
            for name in self._mailboxes:
                self._end(name, reason)
            for future in self._calls:
                if not future.done():
                    future.set_exception(EngineStopped(reason))
