"""A request over HTTP with as little work as possible."""

from __future__ import annotations

import asyncio


async def open_request(
    port: int, path: str, body: bytes | None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send it. The caller reads the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
    method, content = ("GET", b"") if body is None else ("POST", body)
    writer.write(
        f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n".encode()
        + content
    )
    return reader, writer
