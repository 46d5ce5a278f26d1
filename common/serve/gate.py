"""`Gate`: checks every request before the application sees it.

Loopback requests are not trusted: a foreign page in a browser on this machine can send requests
here, too. Such requests carry an `Origin`, or a `Host` that is a foreign name.

See common/serve/README.md#what-one-client-can-take-from-others"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
import uuid
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.serve.errors import ApiError
from common.serve.large_json import json_response
from common.serve.server_metrics import ServerMetrics
from common.serve.streams import within

logger = logging.getLogger(__name__)
POLLED = ("/health", "/metrics")  # logged only if the status is not 200
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
LITTLE = "/little"  # prefix of the small engine's routes, which have the same rules
MAX_ID = 200
# A number in a list blocks the loop as long as this many bytes of a text do.
BYTES_OF_A_VALUE = 32
MAX_STRINGS = 1 << 16  # including keys; each costs a parser more than a number


@dataclass(frozen=True, slots=True)
class GateConfig:
    host: str = "127.0.0.1"
    api_key: str | None = None
    max_body_bytes: int = 16 << 20
    body_seconds: float = 30.0  # for all of a body to arrive
    allowed_hosts: tuple[str, ...] = ()  # additional names: of a proxy, of a container's host
    allowed_origins: tuple[str, ...] = ()  # of pages that may send requests; "*": all pages
    metrics_need_key: bool = True

    @property
    def is_local(self) -> bool:
        """Whether only this machine reaches the server."""
        return self.host in (*LOOPBACK, "::1") or self.host.startswith("127.")


def error_response(error: ApiError) -> Response:
    return json_response(error.content(), error.status, error.headers())


class Gate:
    """Wraps the application: checks key, host, origin and body size, and gives each request an
    id."""

    def __init__(self, app: ASGIApp, config: GateConfig) -> None:
        self.app, self.config = app, config
        self.is_draining = False
        self.num_posts = 0  # without a complete answer
        self.posts: Collection[str] | None = None  # paths that take a body; None: all
        self.metrics: ServerMetrics | None = None  # counts the responses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        name = headers.get("x-request-id", "")
        if not (0 < len(name) <= MAX_ID and name.isascii() and name.isprintable()):
            name = uuid.uuid4().hex

        scope.setdefault("state", {})["request_id"] = name
        more = [(b"x-request-id", name.encode()), *self._cors(headers)]
        begin, status = time.monotonic(), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *more]
                status = message["status"]
            await send(message)

        self.num_posts += scope["method"] == "POST"
        try:
            app, received = self.app, _again(b"", receive)
            try:
                self._check(scope, headers)
                if scope["method"] == "OPTIONS" and len(more) > 1:
                    app = Response(status_code=204)
                elif scope["method"] == "POST" and self._takes_body(scope["path"]):
                    received = _again(await self._body(receive, headers), receive)
            except ApiError as error:
                app = error_response(error)
            await app(scope, received, send_with_id)
        finally:
            self.num_posts -= scope["method"] == "POST"
            self._note(scope, status, time.monotonic() - begin)

    def _note(self, scope: Scope, status: int, seconds: float) -> None:
        """Log and count a response. `status` is 0 if the application has failed without one."""
        method, path = scope["method"], scope["path"]
        if self.metrics is not None and path not in POLLED:
            route = getattr(scope.get("route"), "path", path)
            known = "route" in scope or path in (self.posts or ())
            self.metrics.on_response(route if known else "none", method, status or 500, seconds)
        if status == 200 and path in POLLED:
            return
        host, port = scope.get("client") or ("-", 0)
        shown = _shown(scope.get("raw_path", path.encode("utf-8", "replace"))[:MAX_ID])
        name, ms = scope["state"]["request_id"], seconds * 1e3
        logger.info("%s:%d %s %s %d in %.0f ms, %s", host, port, method, shown, status, ms, name)

    def _takes_body(self, path: str) -> bool:
        return self.posts is None or path in self.posts

    def _cors(self, headers: Headers) -> list[tuple[bytes, bytes]]:
        """Return the headers that let a browser give the answer to a page of another origin."""
        origin = headers.get("origin")
        if origin is None or not self._is_allowed(origin):
            return []
        found = {
            "access-control-allow-origin": origin,
            "access-control-allow-methods": "GET, POST",
            "access-control-allow-headers": headers.get("access-control-request-headers", "*"),
            "access-control-expose-headers": "x-request-id, retry-after",
            "vary": "Origin",
        }
        return [(key.encode(), value.encode("latin-1")) for key, value in found.items()]

    def _is_allowed(self, origin: str) -> bool:
        allowed = self.config.allowed_origins
        return origin in allowed or "*" in allowed

    def _check(self, scope: Scope, headers: Headers) -> None:
        path, method, config = scope["path"].removeprefix(LITTLE), scope["method"], self.config
        draining = ApiError(503, "the server is being shut down and takes no new requests")
        if path == "/health":
            if self.is_draining:  # makes load balancers stop sending requests here
                raise draining
            return
        is_free = path == "/"  # a page without data, which asks for the key
        is_free |= path == "/metrics" and not config.metrics_need_key
        is_free |= method == "OPTIONS" and self._is_allowed(headers.get("origin", ""))
        if config.api_key is not None and not is_free:
            scheme, _, given = headers.get("authorization", "").partition(" ")
            is_key = hmac.compare_digest(given.encode("latin-1"), config.api_key.encode())
            if scheme.lower() != "bearer" or not is_key:
                raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key")
        if method == "POST" or path in ("/", "/events"):
            self._check_origin(headers)
        is_open = config.is_local and _host_name(headers) in (*LOOPBACK, config.host)
        if path == "/events" and config.api_key is None and not is_open:
            raise ApiError(403, "cannot show events: only on loopback or with --api-key")
        if method != "POST":
            return
        if self.is_draining:
            raise draining
        if not self._takes_body(path):
            return
        kind = headers.get("content-type", "").split(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(415, "Content-Type must be application/json")

    def _check_origin(self, headers: Headers) -> None:
        server_host, host = self.config.host, headers.get("host", "")
        names = (*LOOPBACK, server_host, *map(str.lower, self.config.allowed_hosts))
        if self.config.is_local and _host_name(headers) not in names:
            raise ApiError(403, f"Host must be {server_host} or one of --allowed-host")
        origin = headers.get("origin")
        if origin in (None, f"http://{host}", f"https://{host}") or self._is_allowed(origin):
            return
        raise ApiError(403, "Origin must be this server or one of --allowed-origin")

    async def _body(self, receive: Receive, headers: Headers) -> bytes:
        max_bytes = self.config.max_body_bytes
        too_large = ApiError(413, f"the body must have at most {max_bytes} bytes")
        declared = headers.get("content-length", "0")
        if not declared.isdecimal() or int(declared[:20]) > max_bytes:
            raise too_large
        try:
            body = await within(self.config.body_seconds, _read(receive, max_bytes, too_large))
        except asyncio.TimeoutError as error:
            raise ApiError(408, "the body did not arrive in time") from error
        if body.count(b",") > max_bytes // BYTES_OF_A_VALUE:
            max_commas = max_bytes // BYTES_OF_A_VALUE
            raise ApiError(413, f"the body must have at most {max_commas} commas")
        num_escaped = body.replace(rb"\\", b"").count(b'\\"')  # without escaped backslashes
        if body.count(b'"') - num_escaped > 2 * MAX_STRINGS:
            raise ApiError(413, f"the body must have at most {MAX_STRINGS} strings")
        return body


def _host_name(headers: Headers) -> str:
    host = headers.get("host", "")
    return (host.rsplit(":", 1)[0] if not host.endswith("]") else host).lower()


def _shown(path: bytes) -> str:
    """Return a path as one word of printable ASCII, without the query, which can hold anything."""
    return quote(path.partition(b"?")[0], safe="/%:,;=@-._~+&$!*'()")


async def _read(receive: Receive, max_bytes: int, too_large: ApiError) -> bytes:
    """Read a body, and check its actual size whatever its `Content-Length` was."""
    body, is_more = bytearray(), True
    while is_more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ApiError(400, "the body is incomplete: the client disconnected")
        body += message.get("body", b"")
        is_more = message.get("more_body", False)
        if len(body) > max_bytes:
            raise too_large
    return bytes(body)


def _again(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that yields the body, which was read here, and then later messages."""
    first: list[dict[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]

    async def received() -> Message:
        return first.pop() if first else await receive()

    return received
