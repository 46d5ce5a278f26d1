"""`Gate` checks every request before the application sees it, names it and logs it.

Loopback requests are not trusted: a foreign page in a browser on this machine can send requests
here, too. Such requests carry an `Origin`, or a `Host` that is a foreign name.

See common/serve/README.md#what-one-client-can-take-from-others"""

from __future__ import annotations

import hmac
import logging
import secrets
import time
import uuid
from dataclasses import dataclass, field
from urllib.parse import quote

import anyio
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.serve.errors import ApiError, error_response
from common.serve.streams import CLIENT_DISCONNECTED

logger = logging.getLogger(__name__)
POLLED = ("/health", "/metrics")  # logged only if the status is not 200
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
MAX_ID = 200
MAX_CHUNKS = 20_000  # in which a body arrives; 16 MB in packets are 11,000


@dataclass(frozen=True, slots=True)
class GateConfig:
    host: str = "127.0.0.1"
    api_key: str | None = None
    max_body_bytes: int = 16 << 20
    body_seconds: float = 30.0  # for all of a body to arrive
    allowed_hosts: tuple[str, ...] = ()  # additional names: of a proxy, of a container's host
    allowed_origins: tuple[str, ...] = ()  # of pages that may send requests; "*": all pages
    metrics_need_key: bool = True
    # Opens `/events`, with all users' prompts, and the rest; the server prints it.
    events_key: str = field(default_factory=secrets.token_urlsafe, compare=False, repr=False)

    @property
    def is_local(self) -> bool:
        """Whether only this machine reaches the server."""
        return self.host in (*LOOPBACK, "::1") or self.host.startswith("127.")


class Gate:
    """Wraps the application: checks each request's key, host, origin and body, gives it an id and a
    line in the log, and counts those that a shutdown waits for. `request.state` gets `request_id`
    and, of a POST, `body`."""

    def __init__(self, app: ASGIApp, config: GateConfig) -> None:
        self.app = app
        self.config = config
        self.is_draining = False
        self.num_posts = 0  # without a complete answer
        self._admits = CORSMiddleware(  # lets a browser give the answer to a page of these
            self._admit,
            allow_origins=config.allowed_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = Headers(scope=scope).get("x-request-id", "")
        if not (0 < len(name) <= MAX_ID and name.isascii() and name.isprintable()):
            name = uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = name
        begin = time.monotonic()
        status = 500

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", name.encode())]
                status = message["status"]
            await send(message)

        is_post = scope["method"] == "POST"
        self.num_posts += is_post
        try:
            await self._admits(scope, receive, send_with_id)
        finally:
            self.num_posts -= is_post
            if status != 200 or scope["path"] not in POLLED:
                _log(scope, status, time.monotonic() - begin)

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self.app
        try:
            self._check(scope["path"], scope["method"] == "POST", Headers(scope=scope))
            if scope["method"] == "POST":
                scope["state"]["body"] = await self._body(Request(scope, receive))
        except ApiError as error:
            app = error_response(error)
        except ClientDisconnect:
            app = CLIENT_DISCONNECTED
        await app(scope, receive, send)

    def _check(self, path: str, is_post: bool, headers: Headers) -> None:
        config = self.config
        if self.is_draining and (is_post or path == "/health"):  # asked by load balancers
            raise ApiError(503, "the server is being shut down and takes no new requests")
        # The page has no data, and asks for the key.
        is_free = path in ("/", "/health") or (path == "/metrics" and not config.metrics_need_key)
        keys = [config.events_key]
        if path != "/events" and config.api_key is not None:
            keys.append(config.api_key)
        if path == "/events" or (config.api_key is not None and not is_free):
            scheme, _, given = headers.get("authorization", "").partition(" ")
            is_key = [hmac.compare_digest(given.encode("latin-1"), key.encode()) for key in keys]
            if scheme.lower() != "bearer" or not any(is_key):
                raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key")
        host = headers.get("host", "")
        name = (host if host.endswith("]") else host.rsplit(":", 1)[0]).lower()
        if is_post or path in ("/", "/events"):
            names = (*LOOPBACK, config.host, *map(str.lower, config.allowed_hosts))
            if config.is_local and name not in names:
                raise ApiError(403, f"Host must be {config.host} or one of --allowed-host")
            allowed = (None, f"http://{host}", f"https://{host}", *config.allowed_origins)
            if headers.get("origin") not in allowed and "*" not in allowed:
                raise ApiError(403, "Origin must be this server or one of --allowed-origin")
        kind = headers.get("content-type", "").split(";")[0].strip().lower()
        if is_post and kind != "application/json":
            raise ApiError(415, "Content-Type must be application/json")

    async def _body(self, request: Request) -> bytes:
        max_bytes = self.config.max_body_bytes
        body = bytearray()
        num_chunks = 0
        try:
            with anyio.fail_after(self.config.body_seconds):
                async for chunk in request.stream():
                    body += chunk
                    num_chunks += 1
                    if len(body) > max_bytes or num_chunks > MAX_CHUNKS:
                        limits = f"{max_bytes} bytes and {MAX_CHUNKS} chunks"
                        raise ApiError(413, f"the body must have at most {limits}")
        except TimeoutError as error:
            raise ApiError(408, "the body did not arrive in time") from error
        return bytes(body)


def _log(scope: Scope, status: int, seconds: float) -> None:
    """Log a response. The path is one word of ASCII without the query, which can hold anything."""
    host, port = scope.get("client") or ("-", 0)
    path = quote(scope["path"][:MAX_ID])
    name = scope["state"]["request_id"]
    ms = seconds * 1e3
    logger.info(
        "%s:%d %s %s %d in %.0f ms, %s", host, port, scope["method"], path, status, ms, name
    )
