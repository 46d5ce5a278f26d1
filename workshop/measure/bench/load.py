"""Requests over HTTP at given moments, and the outcome of each."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import httpx

from workshop.measure.bench.bench_record import rounded

TIMEOUT_SECONDS = 120


@dataclass(frozen=True, slots=True)
class Planned:
    at: float  # seconds after the first
    prompt: list[int]
    max_tokens: int


@dataclass(slots=True)
class Outcome:
    """Seconds, from the first planned moment. `error`: None if the answer was complete."""

    sent: float
    first_token: float | None = None
    ended: float = 0.0
    error: str | None = None

    def content(self) -> dict[str, Any]:
        return rounded(asdict(self))


async def replay(
    url: str, model: str, requests: Sequence[Planned], halfway: Callable[[], None] | None = None
) -> list[Outcome]:
    """Send each request at its moment. `halfway` is called right after half of them are sent."""
    start = time.monotonic()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_SECONDS, limits=limits) as client:
        tasks = []
        for i, request in enumerate(requests):
            await asyncio.sleep(max(0.0, start + request.at - time.monotonic()))
            if halfway is not None and i == len(requests) // 2:
                halfway()
            tasks.append(asyncio.ensure_future(_send(client, model, request, start)))
        return list(await asyncio.gather(*tasks))


async def _send(client: httpx.AsyncClient, model: str, request: Planned, start: float) -> Outcome:
    outcome = Outcome(time.monotonic() - start)
    body = {
        "model": model,
        "prompt": request.prompt,
        "max_tokens": request.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    reason = None
    try:
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            if not answer.is_success:
                reason = f"status {answer.status_code}"
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    piece = json.loads(line.removeprefix("data: "))
                    if "error" in piece:
                        reason = "an error in the stream"
                    elif outcome.first_token is None:
                        outcome.first_token = time.monotonic() - start
                elif line == "data: [DONE]":
                    break
            else:
                reason = reason or "the stream broke off"
    except httpx.HTTPError as error:
        reason = type(error).__name__
    outcome.ended, outcome.error = time.monotonic() - start, reason
    return outcome


async def open_request(
    port: int, path: str, body: bytes | None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a request with as little work as possible. The caller reads the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
    method, content = ("GET", b"") if body is None else ("POST", body)
    writer.write(
        f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n".encode()
        + content
    )
    return reader, writer
