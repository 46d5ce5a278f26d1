"""The HTTP routes. Each converts a request to arguments of `AsyncLLM` and its deltas to a response;
none accesses the engine directly.

See common/serve/README.md"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_type_hints

from fastapi import FastAPI, Request
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse, Response

from common.sampling.sampling_defaults import sampling_defaults
from common.serve.answers import DONE, Answer, event, token_text
from common.serve.async_llm import AsyncLLM
from common.serve.chat import ChatPrompts
from common.serve.deltas import RequestDelta
from common.serve.engine_loop import EngineError, QueueFull
from common.serve.errors import ApiError, api_error, bad, error_response, json_response
from common.serve.gate import Gate, GateConfig
from common.serve.live_page import LivePage
from common.serve.server_metrics import ServerMetrics
from common.serve.streams import (
    CLIENT_DISCONNECTED,
    EventStream,
    accepted,
    close_all,
    gathered,
    merged,
    unless_disconnected,
)
from common.serve.wire import (
    Body,
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
ERRORS: dict[int | str, Any] = {code: {"description": "an error"} for code in ("4XX", "5XX")}


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """Settings of the routes. Adapters may be loaded over HTTP from below `adapter_root`; None: no
    adapter."""

    model_name: str
    gate: GateConfig = field(default_factory=GateConfig)
    chat_template: str | None = None  # its text
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    adapter_root: Path | None = None


class Server:
    """The handlers of the routes, and the state that they share."""

    def __init__(self, llm: AsyncLLM, config: ServeConfig, gate: Gate) -> None:
        self.llm = llm
        self.config = config
        self.defaults = sampling_defaults(llm.config)
        self.chat = ChatPrompts(
            llm.tokenizer,
            config.chat_template,
            config.tool_call_parser,
            config.reasoning_parser,
        )
        self.metrics = ServerMetrics(llm, config.model_name)
        self.live = LivePage(llm, gate)

    # -- generating

    async def completions(self, body: CompletionBody, request: Request) -> Response:
        model = self._model(body)
        params = body.params(self.defaults)
        params = await self.llm.without_texts(params)  # once for all prompts
        ids = await self._ids(body, params)
        echoed = body.prompts() if body.echo else []
        texts = [p if isinstance(p, str) else await self._decode(p) for p in echoed]
        answer = Answer(
            kind="completion",
            model=model,
            tokenizer=self.llm.tokenizer,
            body=body,
            params=params,
            prompts=texts,
            only_echo=body.only_echo,
            request_id=_name_of(body, request),
        )
        return await self._generate(answer, ids)

    async def chat_completions(self, body: ChatBody, request: Request) -> Response:
        model = self._model(body)
        params = body.params(self.defaults)
        tools = body.tool_use()
        has_grammar = params.grammar is not None
        shows = body.include_reasoning is not False
        reader = await asyncio.to_thread(self.chat.reader, tools, has_grammar, shows)
        if reader is not None and self.chat.hides_marks:
            params = replace(params, skip_special_tokens=False)
        params = await self.llm.without_texts(params)
        text, ids = await self._chat_prompt(body, params, request)
        answer = Answer(
            kind="chat",
            model=model,
            tokenizer=self.llm.tokenizer,
            body=body,
            params=params,
            request_id=_name_of(body, request),
            reader=reader,
            prompt_end=self.chat.prompt_end(
                text, body.messages[-1] if body.continue_final_message else None
            ),
        )
        return await self._generate(answer, [ids])

    async def _generate(self, answer: Answer, prompts: list[list[int]]) -> Response:
        answer.params = answer.body.within_entries(list(map(len, prompts)), answer.params)
        num = len(prompts) * answer.params.n
        limit = self.llm.max_per_request
        if limit is not None and num > limit:
            name = "prompt" if answer.params.n == 1 else "n"
            raise bad(f"{name}: prompts x n must be <= {limit} (--max-waiting), got {num}", name)
        options = answer.body.options()
        if answer.model != self.config.model_name:
            options["adapter"] = answer.model
        calls = [self.llm.generate(ids, answer.params, **options) for ids in prompts]
        requests = [self.metrics.counted(call, answer.params) for call in calls]
        try:
            deltas = merged(await accepted(requests), requests)
            if answer.body.stream:
                return EventStream(self._events(answer, deltas), [deltas, *requests])
            totals = await gathered(deltas)
            return await asyncio.to_thread(lambda: json_response(answer.whole(totals)))
        except BaseException:
            await close_all(requests)
            raise

    async def _events(
        self, answer: Answer, deltas: AsyncIterator[tuple[int, RequestDelta]]
    ) -> AsyncIterator[bytes]:
        options = answer.body.stream_options or StreamOptions()
        try:
            async for i, delta in deltas:
                if answer.params.prompt_logprobs is None:
                    chunks = answer.chunks(i, delta)
                else:  # an echo, which has one for each token of the prompt
                    chunks = await asyncio.to_thread(answer.chunks, i, delta)
                for chunk in chunks if options.include_usage else ():
                    chunk["usage"] = answer.usage() if options.continuous_usage_stats else None
                yield b"".join(map(event, chunks))
            if options.include_usage:
                yield event(answer.usage_chunk())
        except Exception as error:  # the answer has begun, so its status cannot change
            yield event(answer.body.error(error).content())
        yield DONE

    async def _ids(self, body: CompletionBody, params: SamplingParams) -> list[list[int]]:
        adds = body.add_special_tokens is not False
        found = list[list[int]]()
        for prompt in body.prompts():
            await asyncio.sleep(0)  # each can take a millisecond, and there can be thousands
            if not isinstance(prompt, str):
                self._check_ids(prompt, "prompt")
            found.append(await self.llm.prompt_ids(prompt, params, adds))
            if not found[-1]:  # an empty text is served if the tokenizer adds a BOS
                raise bad("prompt must have at least one token", "prompt")
        return found

    async def _chat_prompt(
        self, body: ChatBody, params: SamplingParams, request: Request
    ) -> tuple[str, list[int]]:
        """Return the prompt's text and token ids."""
        text = await self._chat_text(body, request)
        return text, await self.llm.prompt_ids(text, params, bool(body.add_special_tokens))

    async def _chat_text(self, body: ChatBody | TokenizeBody, request: Request) -> str:
        assert body.messages is not None
        names = {"documents", "reasoning_effort", "enable_thinking", "tools"}
        given = body.model_dump(include=names, exclude_unset=True, exclude_none=True)
        kwargs = (body.chat_template_kwargs or {}) | given
        if body.reasoning_effort is not None:  # for the templates that can turn thinking off
            kwargs.setdefault("enable_thinking", body.reasoning_effort != "none")
        return await asyncio.to_thread(
            self.chat.text,
            body.messages,
            body.add_generation_prompt,
            body.continue_final_message,
            kwargs,
        )

    def _model(self, body: GenerateBody | TokenizeBody | DetokenizeBody) -> str:
        return self._served(body.model or self.config.model_name)

    def _served(self, model: str) -> str:
        """Return `model`. Raises `ApiError` if this server does not serve it."""
        known = [self.config.model_name, *self.llm.adapters]
        if model not in known:
            message = f"model must be one of {', '.join(known)}, got {model!r}"
            raise ApiError(404, message, "model", "model_not_found")
        return model

    # -- tokens

    async def tokenize(self, body: TokenizeBody, request: Request) -> Response:
        self._model(body)
        body.check_extra()
        if (body.prompt is None) == (body.messages is None):
            raise bad("give either prompt or messages")
        text = body.prompt
        adds = body.add_special_tokens is not False
        if text is None:
            text = await self._chat_text(body, request)
            adds = bool(body.add_special_tokens)
        ids = await self.llm.encode(text, adds)
        found = {"count": len(ids), "max_model_len": self.llm.max_model_len, "tokens": ids}
        if body.return_token_strs:
            found["token_strs"] = [token_text(self.llm.tokenizer, i) for i in ids]
        return json_response(found)

    async def detokenize(self, body: DetokenizeBody, request: Request) -> Response:
        self._model(body)
        self._check_ids(body.tokens, "tokens")
        text = await self._decode(body.tokens)
        return json_response({"prompt": text})

    def _check_ids(self, ids: list[int], field: str) -> None:
        vocab_size = self.llm.model_config.vocab_size
        if ids and max(ids) >= vocab_size:
            raise bad(f"{field} must be < {vocab_size}, got {max(ids)}", field)

    async def _decode(self, ids: list[int]) -> str:
        decode = self.llm.tokenizer.backend.decode_batch  # releases Python's lock
        return (await asyncio.to_thread(decode, [ids], skip_special_tokens=False))[0]

    async def render_completion(self, body: CompletionBody, request: Request) -> Response:
        """Return the token ids of each prompt, for routers that match prefixes."""
        model = self._model(body)
        params = body.params(self.defaults)
        all_ids = await self._ids(body, params)
        return json_response([{"model": model, "token_ids": ids} for ids in all_ids])

    async def render_chat(self, body: ChatBody, request: Request) -> Response:
        model = self._model(body)
        params = body.params(self.defaults)
        _, ids = await self._chat_prompt(body, params, request)
        return json_response({"model": model, "token_ids": ids})

    # -- the server

    async def model(self, name: str) -> dict[str, Any]:
        self._served(name)
        return next(model for model in (await self.models())["data"] if model["id"] == name)

    async def models(self) -> dict[str, Any]:
        name = self.config.model_name
        created = int(self.metrics.started_at)
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

    async def load_adapter(self, body: LoadAdapterBody, request: Request) -> Response:
        assert self.config.adapter_root is not None, "else there is no such route"
        root = self.config.adapter_root.resolve()
        if body.lora_name == self.config.model_name:
            raise bad("lora_name must not be the name of the model", "lora_name")
        path = root
        try:
            path = (root / body.lora_path).resolve()
            if not path.is_relative_to(root):
                raise ApiError(403, "lora_path must be below the folder of adapters", "lora_path")
            await self.llm.load_adapter(body.lora_name, path)
        except OSError as error:
            message = f"lora_path must exist, got {body.lora_path!r}"
            status = 404 if isinstance(error, FileNotFoundError) else 400
            raise ApiError(status, message, "lora_path") from error
        except ValueError as error:  # a sentence about a file names its folder on the server
            message = str(error).replace(f"{path}", body.lora_path)
            raise bad(message, None if message == str(error) else "lora_path") from error
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload_adapter(self, body: UnloadAdapterBody, request: Request) -> Response:
        if body.lora_name not in self.llm.adapters:
            raise ApiError(404, f"adapter {body.lora_name!r} is not loaded", "lora_name")
        await self.llm.unload_adapter(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    async def health(self) -> Response:
        if (reason := self.llm.death_reason) is not None:
            return error_response(ApiError(503, reason))
        return Response()

    async def version(self) -> dict[str, str]:
        return {"version": VERSION}

    async def metrics_text(self) -> Response:
        return Response(self.metrics.text(), media_type=self.metrics.content_type)


def _name_of(body: GenerateBody, request: Request) -> str:
    """Return the request's name, which the answer's id ends with: the header's, as in vLLM, else
    the body's."""
    is_given = "x-request-id" in request.headers
    return request.state.request_id if is_given else body.request_id or request.state.request_id


class BodyRoute(APIRoute):
    """A route whose work ends when its client leaves, which FastAPI does not do."""

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # pyright: ignore[reportIncompatibleMethodOverride]
        hints = get_type_hints(self.endpoint)
        if "body" not in hints:
            return super().get_route_handler()

        async def handle(request: Request) -> Response:
            body: Body = hints["body"].parsed(request.state.body)
            try:
                answer = await unless_disconnected(request.receive, self.endpoint(body, request))
            except ValueError as error:
                raise body.error(error) from error
            return answer or CLIENT_DISCONNECTED

        return handle


def make_app(llm: AsyncLLM, config: ServeConfig) -> tuple[FastAPI, Gate]:
    """Return the application, and the gate that wraps it, which is the ASGI app to serve."""
    app = FastAPI(title="vllm-from-scratch", version=VERSION, docs_url=None, redoc_url=None)
    app.router.route_class = BodyRoute
    gate = Gate(app, config.gate)
    server = app.state.server = Server(llm, config, gate)
    post: dict[str, Any] = {
        "/v1/completions": server.completions,
        "/v1/chat/completions": server.chat_completions,
        "/v1/completions/render": server.render_completion,
        "/v1/chat/completions/render": server.render_chat,
        "/tokenize": server.tokenize,
        "/detokenize": server.detokenize,
    }
    if config.adapter_root is not None:
        post["/v1/load_lora_adapter"] = server.load_adapter
        post["/v1/unload_lora_adapter"] = server.unload_adapter
    get: dict[str, Any] = {
        "/v1/models": server.models,
        "/v1/models/{name:path}": server.model,
        "/health": server.health,
        "/version": server.version,
        "/metrics": server.metrics_text,
        "/": server.live.page,
        "/events": server.live.events,
    }
    for path, route in [*post.items(), *get.items()]:
        app.add_api_route(
            path,
            route,
            methods=["POST" if path in post else "GET"],
            response_model=None,
            responses=ERRORS,
            include_in_schema=path != "/events",
        )
    for kind in (ApiError, QueueFull, EngineError, Exception):
        app.add_exception_handler(kind, _on_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    return app, gate


def _on_error(request: Request, error: Exception) -> Response:
    return error_response(api_error(error))


def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    answer = error_response(ApiError(error.status_code, message))
    answer.headers.update(error.headers or {})  # such as `Allow` for a 405
    return answer
