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
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from common.engine import LLMEngine
from common.engine_config import EngineConfig, EngineStats
from common.requests.input_processor import plain
from common.requests.token_rules import without_texts
from common.serve.deltas import EngineUpdate, RequestDelta
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
MAX_SHORT = 64 << 10  # characters; tokenizing them takes about 50 ms
MAX_DELTAS_PER_TURN = 8  # deltas delivered before the loop can run something else
MAX_OWNERS = 10_000  # requests whose owner is remembered
# Texts are tokenized and rendered here, so that megabytes delay neither the loop nor short texts.
_SHORT_TEXTS = ThreadPoolExecutor(1, "short texts")
_LONG_TEXTS = ThreadPoolExecutor(1, "long texts")


T = TypeVar("T")


async def run_on_text(num_chars: int, call: Callable[..., T], *arguments: Any) -> T:
    """Return `call(*arguments)`, run in the thread for texts of this length."""
    executor = _SHORT_TEXTS if num_chars <= MAX_SHORT else _LONG_TEXTS
    return await asyncio.get_running_loop().run_in_executor(executor, call, *arguments)


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
    returns when the engine is ready, and raises what `LLM` does. All methods belong to one event
    loop, that of the first call."""

    def __init__(
        self, model: str | Path | None = None, *, max_waiting: int | None = None, **config: Any
    ) -> None:
        self.config = EngineConfig(model=model, **config)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._mailboxes: dict[str, Mailbox] = {}  # by the engine's request name
        self._names: dict[str, str] = {}  # the engine's request name, by the caller's
        self.owners: dict[str, str] = {}  # by the engine's request name, the newest last
        self._num_requests = 0
        self._calls: set[asyncio.Future] = set()
        self._given: deque[RequestDelta] = deque()
        self._is_closed = False
        self.stats = EngineStats()  # as of the engine's last delivery
        self.max_per_request: int | None = None  # sequences; some places are left for others
        if max_waiting is not None:
            num_places = self.config.max_num_seqs + max_waiting
            self.max_per_request = max(1, max_waiting, num_places // 2)
        self._engine_loop = EngineLoop(self._make_engine, self._deliver, max_waiting)
        engine = self._engine_loop.made.result()
        assert engine.tokenizer is not None
        self.tokenizer = engine.tokenizer
        self._max_token_chars = max(map(len, self.tokenizer.backend.get_vocab()))
        self.max_model_len = engine.max_model_len
        self.model_config = engine.model_config
        self.stats = engine.stats()
        self._vocab_size = engine.vocab_size  # tokens that can be sampled
        self.adapters = engine.adapters  # names that are loaded

    def _make_engine(self) -> LLMEngine:
        """Create the engine. Runs in the engine's thread."""
        engine = LLMEngine(self.config)
        self.default_sampling_params = engine.default_sampling_params
        return engine

    # -- requests

    async def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        owner: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncIterator[RequestDelta]:
        """Yield the deltas of a request: the first reports acceptance, the last the end. Leaving
        the loop early, or being cancelled, aborts the request. `owner` is a secret of the client: a
        live page that knows it may show the request's text. Raises `ValueError` if the request
        cannot be served, `QueueFull` if too many wait, `EngineError` if it cannot continue."""
        self._bind()
        options.setdefault("arrival_time", time.monotonic())
        self._num_requests += 1
        if request_id in self._names:
            raise ValueError(f"request_id must be unique, got {request_id!r}, which is in use")
        while f"request-{self._num_requests}" in self._names:  # a name that a client has chosen
            self._num_requests += 1
        name = f"{request_id or 'request'}-{self._num_requests}"
        request_id = request_id or name
        # Deltas in flight for an aborted request must not reach the next request of that name.
        self._names[request_id] = name
        if owner is not None:
            self.owners[name] = owner
            if len(self.owners) > MAX_OWNERS:
                del self.owners[next(iter(self.owners))]
        mailbox = self._mailboxes[name] = Mailbox()
        try:
            params = await self.without_texts(params or self.default_sampling_params)
            is_text = isinstance(prompt, str)
            token_ids = await self.prompt_ids(prompt, params) if is_text else plain(prompt)
            self._engine_loop.add(name, token_ids, params, dict(options))
            is_finished = False
            while not is_finished:
                delta = await mailbox.take()
                delta.request_id = request_id
                is_finished = delta.finished
                if delta.completions or delta.error is None:
                    yield delta
                if delta.error is not None:
                    raise delta.error
        finally:
            del self._mailboxes[name], self._names[request_id]
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
        return (await run_on_text(len(text), call))[0].ids

    async def abort(self, request_id: str) -> None:
        """Abort a request. Its reader gets the output so far, and an `EngineError`."""
        if (name := self._names.get(request_id)) is not None:
            self._engine_loop.abort(name)
            self._fail(name, EngineError("the request was aborted"))

    def abort_all(self, reason: str) -> None:
        """Abort all requests, as `abort` does, with an `EngineStopped` that gives `reason`."""
        for name in self._mailboxes:
            self._engine_loop.abort(name)
            self._fail(name, EngineStopped(reason))

    def _fail(self, name: str, error: EngineError) -> None:
        self._mailboxes[name].put(RequestDelta(name, finished=True, error=error))

    @property
    def num_unfinished(self) -> int:
        return len(self._mailboxes)

    # -- the engine

    @property
    def death_reason(self) -> str | None:
        """The reason why the engine has stopped; None while it runs."""
        return self._engine_loop.death_reason

    async def load_adapter(self, name: str, directory: str | Path) -> None:
        """`LLMEngine.load_adapter`, between two steps."""
        await self._change_adapters(LLMEngine.load_adapter, name, directory)

    async def unload_adapter(self, name: str) -> None:
        """`LLMEngine.unload_adapter`, between two steps."""
        await self._change_adapters(LLMEngine.unload_adapter, name)

    async def _change_adapters(self, method: Callable[..., None], *arguments: Any) -> None:
        def change(engine: LLMEngine) -> None:  # to its end, even if the caller is cancelled
            method(engine, *arguments)
            self.adapters = engine.adapters

        await self.call(change)

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

    def _bind(self) -> asyncio.AbstractEventLoop:
        if self._is_closed:
            raise EngineStopped("the engine is closed; create a new one")
        loop = asyncio.get_running_loop()
        if self._loop is None or self._loop.is_closed():
            self._loop = loop
            self._given.clear()  # deltas for readers in the previous loop
        if self._loop is not loop:
            raise RuntimeError("cannot use this AsyncLLM: another event loop owns it")
        return loop

    def _deliver(self, engine_update: EngineUpdate) -> None:
        """Pass an update to the event loop. Runs in the engine's thread."""
        self.stats = engine_update.stats
        loop = self._loop
        if loop is not None:
            with suppress(RuntimeError):  # the loop has ended, so there are no readers
                loop.call_soon_threadsafe(self._receive, engine_update)

    def _receive(self, engine_update: EngineUpdate) -> None:
        if engine_update.is_last:
            error = EngineStopped(self.death_reason or "the engine is closed; create a new one")
            engine_update.deltas += [
                RequestDelta(name, finished=True, error=error) for name in self._mailboxes
            ]
            for future in self._calls:
                if not future.done():
                    future.set_exception(error)
        is_busy = bool(self._given)
        self._given += engine_update.deltas
        if not is_busy:
            self._give_out()

    def _give_out(self) -> None:
        for _ in range(min(MAX_DELTAS_PER_TURN, len(self._given))):
            delta = self._given.popleft()
            if (mailbox := self._mailboxes.get(delta.request_id)) is not None:
                mailbox.put(delta)
        if self._given and self._loop is not None:
            self._loop.call_soon(self._give_out)
