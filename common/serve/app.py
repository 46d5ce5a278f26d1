"""The routes. Each makes of a request what `AsyncLLM` takes, and of what comes back an answer; none
touches the engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, PlainTextResponse, Response

from common.engine_config import SHIPPED_CHECKPOINT
from common.loader import read_json, resolve_checkpoint
from common.serve.answers import DONE, Answer, event, json_response, token_text
from common.serve.async_llm import AsyncLLM
from common.serve.chat import ChatPrompts
from common.serve.deltas import RequestDelta
from common.serve.engine_loop import EngineError, QueueFull
from common.serve.errors import ApiError, ErrorAnswer, api_error, bad
from common.serve.gate import Gate, GateConfig, error_response
from common.serve.live_page import LivePage, watch_token
from common.serve.server_metrics import ServerMetrics
from common.serve.streams import (
    CLIENT_IS_GONE,
    Deltas,
    EventStream,
    accepted,
    close_all,
    gathered,
    merged,
    unless_gone,
)
from common.serve.tool_calls import schemas_of
from common.serve.wire import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerateBody,
    LoadAdapterBody,
    StreamOptions,
    TokenizeBody,
    UnloadAdapterBody,
)
from request import SamplingParams

logger = logging.getLogger(__name__)
VERSION = "0.1.0"
# By the makers of a model, in its generation_config.json.
RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
# What the schema says besides: answers that are errors, and those that may be streams.
ERRORS: dict[int | str, dict[str, Any]] = {
    code: {"model": ErrorAnswer, "description": "OpenAI's error object"} for code in ("4XX", "5XX")
}
STREAMS: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}
MAY_STREAM = ("/v1/completions", "/v1/chat/completions")


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """`adapter_root`: the folder below which adapters may be loaded over HTTP; None: none may."""

    model_name: str
    gate: GateConfig = field(default_factory=GateConfig)
    chat_template: str | None = None  # its text
    adapter_root: Path | None = None
    uses_generation_config: bool = True
    heartbeat_seconds: float | None = None
    reads_calls: bool | None = None  # this and the next; None: as the chat template writes them
    reads_reasoning: bool | None = None


class Server:
    """What the routes share."""

    def __init__(self, llm: AsyncLLM, config: ServeConfig, gate: Gate) -> None:
        self.llm, self.config = llm, config
        self.defaults = sampling_defaults(llm.config.model) if config.uses_generation_config else {}
        how = config.chat_template, config.reads_calls, config.reads_reasoning
        self.chat = ChatPrompts(llm.tokenizer, *how)
        self.metrics = ServerMetrics(llm, config.model_name)
        self.live = LivePage(llm, gate)

    # -- generating

    async def completions(self, body: CompletionBody, request: Request) -> Response:
        model, params = self._model(body), body.params(self.defaults)
        ids = await self._ids(body, params)
        echoed = body.prompts() if body.echo else []
        texts = [p if isinstance(p, str) else await self._decode(p, "prompt") for p in echoed]
        tokenizer = self.llm.tokenizer
        answer = Answer("completion", model, tokenizer, body, params, texts, body.only_echo)
        return await self._generate(answer, ids, request)

    async def chat_completions(self, body: ChatBody, request: Request) -> Response:
        model, params = self._model(body), body.params(self.defaults)
        has_grammar = params.grammar is not None
        reader = await asyncio.to_thread(self.chat.reader, body.tool_use(), has_grammar)
        if reader is not None and self.chat.hides_marks:
            params = replace(params, skip_special_tokens=False)
        ids = await self._chat_ids(body, params)
        answer = Answer("chat", model, self.llm.tokenizer, body, params, reader=reader)
        return await self._generate(answer, [ids], request)

    async def _generate(
        self, answer: Answer, prompts: list[list[int]], request: Request
    ) -> Response:
        options = answer.body.options()
        if answer.model != self.config.model_name:
            options["adapter"] = answer.model
        owner = watch_token(request)
        calls = [self.llm.generate(ids, answer.params, owner=owner, **options) for ids in prompts]
        requests = [self.metrics.counted(call) for call in calls]
        is_theirs = False  # the stream's, to be closed
        try:
            firsts = await accepted(requests)
            if answer.body.stream:
                events = self._events(answer, firsts, requests)
                is_theirs = True
                return EventStream(events, self.config.heartbeat_seconds, requests)
            totals = await unless_gone(request.receive, gathered(firsts, requests))
            return CLIENT_IS_GONE if totals is None else json_response(answer.whole(totals))
        except ValueError as error:
            raise answer.body.error(error) from error
        finally:
            if not is_theirs:
                await close_all(requests)

    async def _events(
        self, answer: Answer, firsts: list[RequestDelta], requests: Sequence[Deltas]
    ) -> AsyncIterator[bytes]:
        how = answer.body.stream_options or StreamOptions()

        def made(pieces: list[dict[str, Any]]) -> bytes:
            for piece in pieces if how.include_usage else ():
                piece["usage"] = answer.usage.content() if how.continuous_usage_stats else None
            return b"".join(map(event, pieces))

        try:
            for i, first in enumerate(firsts):
                if data := made(answer.pieces(i, first)):
                    yield data
            async for i, delta in merged(requests):
                if data := made(answer.pieces(i, delta)):
                    yield data
            if how.include_usage:
                yield event(answer.usage_piece())
        except Exception as error:  # the answer has begun: its status can not change
            yield event(answer.body.error(error).content())
        yield DONE

    async def _ids(self, body: CompletionBody, params: SamplingParams) -> list[list[int]]:
        adds, found = body.add_special_tokens is not False, list[list[int]]()
        for prompt in body.prompts():
            await asyncio.sleep(0)  # each may take a millisecond, and there may be thousands
            found.append(await self.llm.prompt_ids(prompt, params, adds))
        return found

    async def _chat_ids(self, body: ChatBody, params: SamplingParams) -> list[int]:
        text = await self._chat_text(body)
        try:
            return await self.llm.prompt_ids(text, params, bool(body.add_special_tokens))
        except ValueError as error:
            raise body.error(error) from error

    async def _chat_text(self, body: ChatBody | TokenizeBody) -> str:
        assert body.messages is not None
        schemas_of(body.tools or ())
        names = ("documents", "reasoning_effort", "enable_thinking", "tools")
        given = {name: getattr(body, name) for name in names if getattr(body, name) is not None}
        kwargs = (body.chat_template_kwargs or {}) | given
        how = body.add_generation_prompt, body.continue_final_message, kwargs
        return await asyncio.to_thread(self.chat.text, body.messages, *how)

    def _model(self, body: GenerateBody | TokenizeBody | DetokenizeBody) -> str:
        """The one that is asked for. Raises `ApiError` if it is not here."""
        known = [self.config.model_name, *self.llm.adapters]
        model = body.model or known[0]
        if model not in known:
            message = f"model is {model!r}: this server has {', '.join(known)}"
            raise ApiError(404, message, "model", "model_not_found")
        return model

    # -- tokens: as bytes, since what FastAPI does to a list takes ten times as long

    async def tokenize(self, body: TokenizeBody) -> Response:
        self._model(body)
        body.check_extra()
        if (body.prompt is None) == (body.messages is None):
            raise bad("give prompt or messages, and not both")
        text, adds = body.prompt, body.add_special_tokens is not False
        if text is None:
            text, adds = await self._chat_text(body), bool(body.add_special_tokens)
        ids = await self.llm.encode(text, adds)
        found = {"count": len(ids), "max_model_len": self.llm.max_model_len, "tokens": ids}
        if body.return_token_strs:
            text_of = partial(token_text, self.llm.tokenizer)
            found["token_strs"] = await asyncio.to_thread(lambda: [*map(text_of, ids)])
        return json_response(found)

    async def detokenize(self, body: DetokenizeBody) -> Response:
        self._model(body)
        return json_response({"prompt": await self._decode(body.tokens, "tokens")})

    async def _decode(self, ids: list[int], field: str) -> str:
        vocab_size = self.llm.model_config.vocab_size
        if ids and max(ids) >= vocab_size:
            raise bad(f"{field} holds {max(ids)}: ids are below {vocab_size}", field)
        decode = self.llm.tokenizer.backend.decode_batch  # gives up Python's lock
        return (await asyncio.to_thread(decode, [ids], skip_special_tokens=False))[0]

    async def render_completion(self, body: CompletionBody) -> Response:
        """Token ids of each prompt, for routers that look for the same prefix."""
        model, params = self._model(body), body.params(self.defaults)
        all_ids = await self._ids(body, params)
        return json_response([{"model": model, "token_ids": ids} for ids in all_ids])

    async def render_chat(self, body: ChatBody) -> Response:
        model, params = self._model(body), body.params(self.defaults)
        ids = await self._chat_ids(body, params)
        return json_response({"model": model, "token_ids": ids})

    # -- the server

    async def models(self) -> dict[str, Any]:
        name, created = self.config.model_name, int(self.metrics.started_at)
        names = {name: None} | dict.fromkeys(self.llm.adapters, name)
        data = [
            {
                "id": model,
                "object": "model",
                "created": created,
                "owned_by": "vllm-from-scratch",
                "root": name,
                "parent": parent,
                "max_model_len": self.llm.max_model_len,
            }
            for model, parent in names.items()
        ]
        return {"object": "list", "data": data}

    async def load_adapter(self, body: LoadAdapterBody) -> Response:
        root = self.config.adapter_root
        if root is None:
            raise ApiError(403, "adapters are not loaded over HTTP: see --adapter-root")
        if body.lora_name == self.config.model_name:
            raise bad("lora_name is the model's own name", "lora_name")
        try:
            path = (root / body.lora_path).resolve()
            if not path.is_relative_to(root.resolve()):
                raise ApiError(403, "lora_path is not below the folder of adapters", "lora_path")
            await self.llm.load_adapter(body.lora_name, path)
        except OSError as error:
            message = f"lora_path is {body.lora_path!r}: it is not there"
            raise ApiError(404, message, "lora_path") from error
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload_adapter(self, body: UnloadAdapterBody) -> Response:
        if self.config.adapter_root is None:
            raise ApiError(403, "adapters are not unloaded over HTTP: see --adapter-root")
        if body.lora_name not in self.llm.adapters:
            raise ApiError(404, f"adapter {body.lora_name!r} is not loaded", "lora_name")
        await self.llm.unload_adapter(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    async def health(self) -> Response:
        if (why := self.llm.why_dead) is not None:
            return error_response(ApiError(503, why))
        return Response()

    async def version(self) -> dict[str, str]:
        return {"version": VERSION}

    async def metrics_text(self) -> Response:
        return Response(self.metrics.text(), media_type=self.metrics.content_type)


def make_app(llm: AsyncLLM, config: ServeConfig) -> tuple[FastAPI, Gate]:
    """The application, and the gate around it, which is what is served."""
    app = FastAPI(title="vllm-from-scratch", version=VERSION, docs_url=None, redoc_url=None)
    gate = Gate(app, config.gate)
    server = app.state.server = Server(llm, config, gate)
    post: dict[str, Any] = {
        "/v1/completions": server.completions,
        "/v1/chat/completions": server.chat_completions,
        "/v1/completions/render": server.render_completion,
        "/v1/chat/completions/render": server.render_chat,
        "/v1/load_lora_adapter": server.load_adapter,
        "/v1/unload_lora_adapter": server.unload_adapter,
        "/tokenize": server.tokenize,
        "/detokenize": server.detokenize,
    }
    get: dict[str, Any] = {
        "/v1/models": server.models,
        "/health": server.health,
        "/version": server.version,
        "/metrics": server.metrics_text,
        "/": server.live.page,
        "/events": server.live.events,
    }
    for path, route in [*post.items(), *get.items()]:
        is_json = path not in ("/metrics", "/health") and "lora" not in path
        app.add_api_route(
            path,
            route,
            methods=["POST" if path in post else "GET"],
            response_model=None,
            response_class=JSONResponse if is_json else Response,
            responses={**ERRORS, **(STREAMS if path in MAY_STREAM else {})},
            include_in_schema=path not in ("/", "/events"),  # for people
        )
    # A `ValueError`: of a text that is none, or a path. Of others the log says where they were.
    for kind in (ApiError, ValueError, QueueFull, EngineError, Exception):
        app.add_exception_handler(kind, partial(_on_error, post))
    app.add_exception_handler(RequestValidationError, _on_wrong_body)
    app.add_exception_handler(HTTPException, _on_http_error)
    return app, gate


def _on_error(routes: Mapping[str, Any], request: Request, error: Exception) -> Response:
    """`routes`: by path, those with a body."""
    route = routes.get(request.url.path)
    body = None if route is None else get_type_hints(route)["body"]
    return error_response(api_error(error, () if body is None else body.model_fields))


def sampling_defaults(model: str | Path | None) -> dict[str, Any]:
    """What its makers recommend where a request says nothing, as vLLM reads it. Raises
    `ValueError`."""
    path = resolve_checkpoint(model or SHIPPED_CHECKPOINT) / "generation_config.json"
    found = read_json(path) if path.is_file() else {}
    defaults = {name: found[name] for name in RECOMMENDED if found.get(name) is not None}
    SamplingParams(**defaults)
    if defaults:
        logger.info("%s, where a request says nothing: %s", path.name, defaults)
    return defaults


def _on_wrong_body(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = [str(part) for part in first["loc"] if part != "body"]
    field = next((name for name in where if not name.isdecimal()), None)
    place = ".".join(where)
    message = f"{place}: {first['msg']}" if place else f"the body: {first['msg']}"
    return error_response(bad(message, field))


def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    answer = error_response(ApiError(error.status_code, str(error.detail)))
    answer.headers.update(error.headers or {})  # `Allow` of a 405
    return answer
