"""Exhibits of the server: the bytes on the wire, and requests that wait for each other."""

from __future__ import annotations

import asyncio
from typing import Any

from workshop.practice.examples.example_tools import Lines, served


def a_reader_that_left() -> Lines:
    from common.llm import SamplingParams

    async def leave(llm: Any) -> str:
        request = llm.generate([5, 6], SamplingParams(max_tokens=500, ignore_eos=True))
        await anext(request)
        await request.aclose()
        counts = await llm.call(lambda engine: engine.core.get_request_counts())
        return f"the only client disconnected; requests in the engine: {sum(counts)}"

    yield served(leave)


def a_prompt_that_never_fits() -> Lines:
    async def ask(llm: Any) -> str:
        try:
            await asyncio.wait_for(anext(llm.generate([5] * 9_999)), 1)
        except ValueError:
            return "a prompt of 9,999 tokens: refused"
        except asyncio.TimeoutError:
            return "a prompt of 9,999 tokens: no answer, and no refusal"
        return "a prompt of 9,999 tokens: accepted"

    yield served(ask)


def a_reason() -> Lines:
    reasons = [choice["finish_reason"] for choice in _choices("completion")]
    yield f"an answer cut off after two tokens; finish_reason of its deltas: {reasons}"


def a_role() -> Lines:
    role = "".join(choice["delta"].get("role", "") for choice in _choices("chat"))
    yield f"the deltas of a chat, concatenated; role: {role}"


def _choices(kind: str) -> list[dict[str, Any]]:
    """Return the choices in a client's deltas: two tokens, and no more are allowed."""
    from common.serve.answers import Answer
    from common.serve.deltas import CompletionDelta, RequestDelta
    from common.serve.wire import GenerateBody
    from request import SamplingParams

    none: Any = None  # of ids, no text is made here
    answer = Answer(kind, "tiny", none, GenerateBody.model_validate({}), SamplingParams())
    deltas = CompletionDelta(0, "one", [5]), CompletionDelta(0, " two", [6], None, "length")
    pieces = answer.chunks(0, RequestDelta("r", prompt_token_ids=[1]))
    for delta in deltas:
        pieces += answer.chunks(0, RequestDelta("r", {0: delta}))
    return [piece["choices"][0] for piece in pieces]


def a_number_that_json_has_not() -> Lines:
    from common.serve.answers import finite, to_json

    try:
        sent = to_json({"logprob": finite(float("-inf"))}).decode()
    except ValueError as error:
        sent = f"status 500, {type(error).__name__}"
    yield f"a token that is forbidden: {sent}"


def forty_milliseconds() -> Lines:
    import socket

    from common.serve.ports import open_port

    async def connect() -> int:
        found = asyncio.get_running_loop().create_future()

        def accept(reader: object, writer: asyncio.StreamWriter) -> None:
            own = writer.get_extra_info("socket")
            found.set_result(own.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        listener = open_port("127.0.0.1", 0)
        async with await asyncio.start_server(accept, sock=listener):
            _, writer = await asyncio.open_connection(*listener.getsockname())
            writer.close()
            return await found

    yield f"TCP_NODELAY of a connection: {asyncio.run(connect()) > 0}"
