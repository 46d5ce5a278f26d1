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
from collections.abc import Callable, Collection
from dataclasses import dataclass
from urllib.parse import quote

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.serve.errors import ApiError, bad
from common.serve.large_json import LARGE, json_response
from common.serve.server_metrics import ServerMetrics
from common.serve.streams import CLIENT_DISCONNECTED, within

logger = logging.getLogger(__name__)
POLLED = ("/health", "/metrics")  # logged only if the status is not 200
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
LITTLE = "/little"  # prefix of the small engine's routes, which have the same rules
MAX_ID = 200
# A number in a list blocks the loop as long as this many bytes of a text do.
BYTES_OF_A_VALUE = 32
MAX_STRINGS = 1 << 16  # including keys; each costs a parser more than a number
MAX_BODIES = 16  # the largest bodies that may be in memory at the same time; see `Body`


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
        self.app = app
        self.config = config
        self.is_draining = False
        self.num_posts = 0  # without a complete answer
        self.posts: Collection[str] | None = None  # paths that take a body; None: all
        self.num_body_bytes = 0  # of all bodies that are not parsed yet
        self.metrics: ServerMetrics | None = None  # counts the responses
        self.on_abandoned: Callable[[Scope], None] = lambda scope: None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        name = headers.get("x-request-id", "")
        if not (0 < len(name) <= MAX_ID and name.isascii() and name.isprintable()):
            name = uuid.uuid4().hex

        scope.setdefault("state", {})["request_id"] = name
        cors = self._cors(headers)
        more = [(b"x-request-id", name.encode()), *cors]
        if _has_two_lengths(headers):
            more.append((b"connection", b"close"))
        begin = time.monotonic()
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *more]
                status = message["status"]
            await send(message)

        self.num_posts += scope["method"] == "POST"
        body = Body(self, receive)
        try:
            app = self.app
            try:
                self._check(scope, headers)
                if scope["method"] == "OPTIONS" and cors:
                    app = Response(status_code=204)
                elif scope["method"] == "POST" and self._takes_body(scope["path"]):
                    await self._read(body, headers)
            except ApiError as error:
                app = error_response(error)
            except ClientDisconnect:
                app = CLIENT_DISCONNECTED
            await app(scope, body.receive, send_with_id)
        finally:
            body.drop()
            self.num_posts -= scope["method"] == "POST"
            if status == CLIENT_DISCONNECTED.status_code:
                self.on_abandoned(scope)
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
        name = scope["state"]["request_id"]
        ms = seconds * 1e3
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
        if _has_two_lengths(headers):
            raise bad("Content-Length and Transfer-Encoding must not both be given")
        path = scope["path"].removeprefix(LITTLE)
        method = scope["method"]
        config = self.config
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
        server_host = self.config.host
        host = headers.get("host", "")
        names = (*LOOPBACK, server_host, *map(str.lower, self.config.allowed_hosts))
        if self.config.is_local and _host_name(headers) not in names:
            raise ApiError(403, f"Host must be {server_host} or one of --allowed-host")
        origin = headers.get("origin")
        if origin in (None, f"http://{host}", f"https://{host}") or self._is_allowed(origin):
            return
        raise ApiError(403, "Origin must be this server or one of --allowed-origin")

    async def _read(self, body: Body, headers: Headers) -> None:
        max_bytes = self.config.max_body_bytes
        declared = headers.get("content-length", "0")
        if not declared.isdecimal() or int(declared[:20]) > max_bytes:
            raise _too_large(max_bytes)
        try:
            content = await within(self.config.body_seconds, body.read())
        except asyncio.TimeoutError as error:
            raise ApiError(408, "the body did not arrive in time") from error
        if content.count(b",") > max_bytes // BYTES_OF_A_VALUE:
            max_commas = max_bytes // BYTES_OF_A_VALUE
            raise ApiError(413, f"the body must have at most {max_commas} commas")
        num_escaped = content.replace(rb"\\", b"").count(b'\\"')  # without escaped backslashes
        if content.count(b'"') - num_escaped > 2 * MAX_STRINGS:
            raise ApiError(413, f"the body must have at most {MAX_STRINGS} strings")


class Body:
    """A request's body, which the gate reads and the application reads again. Until the application
    has parsed it and waits for what comes next, it counts in the gate's `num_body_bytes`; beyond
    `MAX_BODIES` times the largest body, those of more than `LARGE` bytes are refused."""

    def __init__(self, gate: Gate, receive: Receive) -> None:
        self._gate = gate
        self._receive = receive
        self._content = b""
        self._num_bytes = 0  # counted
        self._is_read_again = False

    async def read(self) -> bytes:
        """Read all, and check the actual size whatever `Content-Length` was. Raises `ApiError`, and
        `ClientDisconnect`."""
        gate = self._gate
        max_bytes = gate.config.max_body_bytes
        found = bytearray()
        is_more = True
        while is_more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            part = message.get("body", b"")
            is_more = message.get("more_body", False)
            found += part
            self._num_bytes += len(part)
            gate.num_body_bytes += len(part)
            if len(found) > max_bytes:
                raise _too_large(max_bytes)
            if len(found) > LARGE and gate.num_body_bytes > MAX_BODIES * max_bytes:
                raise ApiError(429, "too many large bodies arrive at the same time")
        self._content = bytes(found)
        return self._content

    async def receive(self) -> Message:
        """`receive` of the application: the whole body, and then later messages."""
        if self._is_read_again:
            self.drop()
            return await self._receive()
        content = self._content
        self._content = b""
        self._is_read_again = True
        return {"type": "http.request", "body": content, "more_body": False}

    def drop(self) -> None:
        self._gate.num_body_bytes -= self._num_bytes
        self._num_bytes = 0


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"the body must have at most {max_bytes} bytes")


def _has_two_lengths(headers: Headers) -> bool:
    """Whether proxies and servers can disagree where this request ends (RFC 9112, 6.3)."""
    return "content-length" in headers and "transfer-encoding" in headers


def _host_name(headers: Headers) -> str:
    host = headers.get("host", "")
    return (host.rsplit(":", 1)[0] if not host.endswith("]") else host).lower()


def _shown(path: bytes) -> str:
    """Return a path as one word of printable ASCII, without the query, which can hold anything."""
    return quote(path.partition(b"?")[0], safe="/%:,;=@-._~+&$!*'()")
