"""Which requests the gate admits, without a server."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest

from common.serve.gate import MAX_BODIES, Gate, GateConfig
from common.serve.large_json import LARGE

JSON = {"content-type": "application/json", "host": "localhost"}


class Asked:
    """One request, in parts, at a gate, with its result. `body`: the part that the application
    read."""

    def __init__(
        self, config: GateConfig, headers: dict[str, str], *parts: Any, **scope: Any
    ) -> None:
        self.sent: list[Any] = []
        self.read: list[Any] = []
        self._parts = [*parts]
        self.gate = Gate(self._app, config)
        self.gate.is_draining = scope.pop("is_draining", False)
        held = self.gate.num_body_bytes = scope.pop("held", 0)
        self.counted: list[int] = []
        self.abandoned: list[Any] = []
        self.gate.on_abandoned = self.abandoned.append
        own = [(name.encode(), value.encode()) for name, value in headers.items()]
        about = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": own}
        asyncio.run(self.gate(about | scope, self._receive, self._send))
        assert self.gate.num_posts == 0 and self.gate.num_body_bytes == held
        self.status = self.sent[0]["status"]
        self.headers = {k.decode(): v.decode() for k, v in self.sent[0]["headers"]}

    async def _receive(self) -> Any:
        if not self._parts:
            await asyncio.Event().wait()
        part = self._parts.pop(0)
        if isinstance(part, bytes):
            return {
                "type": "http.request",
                "body": part,
                "more_body": bytes in map(type, self._parts),
            }
        return part

    async def _send(self, reason: Any) -> None:
        self.sent.append(reason)

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        assert self.gate.num_posts == (scope["method"] == "POST"), "a shutdown waits for it"
        if scope["method"] == "POST":
            self.read.append(await receive())
            self.counted.append(self.gate.num_body_bytes)
        if self._parts:
            self.read.append(await receive())
            self.counted.append(self.gate.num_body_bytes)
        await send({"type": "http.response.start", "status": 204, "headers": []})

    @property
    def error(self) -> dict[str, Any]:
        return json.loads(self.sent[1]["body"])["error"]


@pytest.mark.parametrize(
    ("config", "headers", "status"),
    [
        *((GateConfig(), {"host": name}, 204) for name in ("LocalHost", "127.0.0.1:8", "[::1]:8")),
        (GateConfig(), {"host": "evil.example:8"}, 403),
        (GateConfig(), {}, 403),
        *((GateConfig("::1"), {"host": name}, 204) for name in ("[::1]", "[::1]:8", "localhost")),
        (GateConfig("::1"), {"host": "evil.example"}, 403),
        (GateConfig("127.0.0.7"), {"host": "127.0.0.7:8"}, 204),
        (GateConfig("127.0.0.7"), {"host": "evil.example"}, 403),
        *((GateConfig(own), {"host": "my.name:8"}, 204) for own in ("0.0.0.0", "::", "10.0.0.7")),
        *(
            (GateConfig("0.0.0.0"), {"host": "my.name:8", "origin": origin}, status)
            for origin, status in (
                ("http://my.name:8", 204),
                ("https://my.name:8", 204),
                ("http://my.name", 403),
            )
        ),
        (GateConfig("::", "schlüssel"), {"authorization": "Bearer schlüssel"}, 204),
        (GateConfig("::", "schlüssel"), {"authorization": "Bearer schlussel"}, 401),
        (GateConfig("::", "plain"), {"authorization": "Bearer schlüssel"}, 401),
    ],
)
def test_the_gate_knows_its_names_and_its_key(
    config: GateConfig, headers: dict[str, str], status: int
) -> None:
    for path in ("/events", "/"):
        key_is_asked = path == "/events" or status != 401
        is_off = path == "/events" and not (config.is_local or config.api_key)
        found = Asked(config, headers, method="GET", path=path)
        assert found.status == (403 if is_off else status if key_is_asked else 204), path


def test_events_are_off_beyond_loopback_without_a_key() -> None:
    """Trap 86."""
    sent = JSON | {"authorization": "Bearer k"}
    for host, key, status in (
        ("0.0.0.0", None, 403),
        ("::", None, 403),
        ("10.0.0.7", None, 403),
        ("0.0.0.0", "k", 204),
        ("localhost", None, 204),
        ("127.0.0.1", None, 204),
    ):
        found = Asked(GateConfig(host, key), sent, method="GET", path="/events")
        assert found.status == status, host
        assert status == 204 or "--api-key" in found.error["message"]


def test_a_body_is_read_here_and_again_by_the_application() -> None:
    disconnect = {"type": "http.disconnect"}
    found = Asked(GateConfig(), JSON, b'{"a"', b": 1}", disconnect)
    assert found.status == 204
    assert found.read == [
        {"type": "http.request", "body": b'{"a": 1}', "more_body": False},
        disconnect,
    ]
    assert found.counted == [8, 0] and found.abandoned == [], "the second time it is parsed"
    part = {"body": b"{", "more_body": True, "type": ""}
    found = Asked(GateConfig(), JSON, part, disconnect)
    assert found.status == 499 and len(found.abandoned) == 1 and not found.read


@pytest.mark.parametrize(
    ("reason", "body", "status"),
    [
        ("10", b"x" * 10, 204),
        ("11", b"", 413),
        ("9" * 5000, b"", 413),
        ("x", b"", 413),
        ("0", b"x" * 10, 204),  # whatever was said
        ("0", b"x" * 11, 413),
    ],
)
def test_a_body_has_its_limit(reason: str, body: bytes, status: int) -> None:
    parts = [bytes([byte]) for byte in body] or [b""]
    config = GateConfig(max_body_bytes=10)
    assert Asked(config, JSON | {"content-length": reason}, *parts).status == status
    many = GateConfig(max_body_bytes=320)
    assert Asked(many, JSON, b"," * 10).status == 204
    assert "commas" in Asked(many, JSON, b"," * 11).error["message"]


def test_bodies_have_a_common_limit_for_large_ones() -> None:
    config = GateConfig(max_body_bytes=300_000)
    limit = MAX_BODIES * 300_000
    large = LARGE + 1
    for held, size, status in (
        (limit - large, large, 204),
        (limit - large + 1, large, 429),
        (limit, LARGE, 204),
    ):
        assert Asked(config, JSON, b"x" * size, held=held).status == status, held


def test_two_lengths_of_a_body_close_the_connection() -> None:
    """RFC 9112, 6.3."""
    both = JSON | {"content-length": "2", "transfer-encoding": "chunked"}
    for method, path in ("POST", "/v1/completions"), ("POST", "/nothing"), ("GET", "/health"):
        found = Asked(GateConfig(), both, b"{}", method=method, path=path)
        assert (found.status, found.headers["connection"]) == (400, "close")
    one = Asked(GateConfig(), JSON | {"transfer-encoding": "chunked"}, b"{}")
    assert one.status == 204 and "connection" not in one.headers


def test_a_late_body_is_not_waited_for() -> None:
    assert (
        Asked(
            GateConfig(body_seconds=0.05), JSON, {"type": "http.request", "more_body": True}
        ).status
        == 408
    )


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("application/json", 204),
        ("Application/JSON ; charset=utf-8", 204),
        ("text/plain", 415),
        ("", 415),
    ],
)
def test_a_body_is_json(kind: str, status: int) -> None:
    assert Asked(GateConfig(), JSON | {"content-type": kind}, b"{}").status == status


def test_origins_are_looked_at_where_something_is_done_or_shown() -> None:
    evil = JSON | {"origin": "http://evil.example"}
    for method, path, status in (
        ("POST", "/tokenize", 403),
        ("GET", "/", 403),
        ("GET", "/events", 403),
        ("GET", "/health", 204),
        ("GET", "/v1/models", 204),
    ):
        assert Asked(GateConfig(), evil, b"{}", method=method, path=path).status == status, path
    for origin, status in ("", 403), ("null", 403), ("http://localhost", 204):
        assert Asked(GateConfig(), JSON | {"origin": origin}, b"{}").status == status, origin


def test_other_names_and_pages_are_allowed_by_a_flag() -> None:
    """A container calls its host by a name of its own; a page of another origin asks first."""
    page = "http://localhost:3000"
    config = GateConfig(allowed_hosts=("Host.Docker.internal",), allowed_origins=(page,))
    docker = JSON | {"host": "host.docker.internal:8000"}
    assert Asked(config, docker, b"{}").status == 204
    assert Asked(config, docker | {"host": "evil.example"}, b"{}").status == 403
    shown = Asked(config, docker, method="GET", path="/events")
    assert shown.status == 403, "Trap 86: who comes by that name is not on this machine"
    found = Asked(config, JSON | {"origin": page}, b"{}")
    assert (found.status, found.headers["access-control-allow-origin"]) == (204, page)
    evil = Asked(config, JSON | {"origin": "http://evil.example"}, b"{}")
    assert evil.status == 403 and "access-control-allow-origin" not in evil.headers
    with_key = GateConfig(api_key="k", allowed_origins=(page,))
    asks = JSON | {"origin": page, "access-control-request-headers": "authorization,x-y"}
    preflight = Asked(with_key, asks, method="OPTIONS")
    assert preflight.status == 204 and not preflight.read
    assert preflight.headers["access-control-allow-headers"] == "authorization,x-y"
    refused = Asked(with_key, JSON | {"origin": page}, b"{}")
    assert refused.status == 401 and refused.headers["access-control-allow-origin"] == page
    assert Asked(with_key, asks | {"origin": "null"}, method="OPTIONS").status == 401
    any_origin = GateConfig(allowed_origins=("*",))
    assert Asked(any_origin, JSON | {"origin": "http://a.example"}, b"{}").status == 204


def test_metrics_are_shown_without_the_key_by_a_flag() -> None:
    config = GateConfig(api_key="k", metrics_need_key=False)
    for path, status in ("/metrics", 204), ("/v1/models", 401), ("/events", 401):
        assert Asked(config, JSON, method="GET", path=path).status == status, path


def test_each_request_has_a_line_in_the_log_without_its_texts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Trap 86: neither query nor body nor key; a path cannot begin another line."""
    caplog.set_level("INFO")
    sent = JSON | {"authorization": "Bearer secret", "x-request-id": "mine"}
    query = {"raw_path": b"/v1/completions?secret=1", "client": ("10.0.0.7", 5123)}
    Asked(GateConfig(), sent, b'{"prompt": "secret"}', **query)
    Asked(GateConfig(), sent, method="GET", path="/a\nb\u00e9", raw_path=b"/a%0Ab\n\xe9")
    Asked(GateConfig(), sent, method="GET", path="/health", raw_path=b"/health")
    lines = [record.getMessage() for record in caplog.records]
    one, other, health = lines
    assert re.fullmatch(r"10.0.0.7:5123 POST /v1/completions 204 in \d+ ms, mine", one)
    assert other.startswith("-:0 GET /a%0Ab%0A%E9 204 in ") and "204" in health
    assert "secret" not in "".join(lines) and "\n" not in "".join(lines)


def test_the_key_is_asked_for_everywhere_but_at_health_and_by_the_page() -> None:
    config = GateConfig(api_key="k")
    for path, status in ("/health", 204), ("/", 204), ("/v1/models", 401), ("/nothing", 401):
        found = Asked(config, JSON, method="GET", path=path)
        assert found.status == status, path
    error = found.error
    assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
    assert found.headers["www-authenticate"] == "Bearer"
    right = [(f"{scheme} k", 204) for scheme in ("Bearer", "bearer", "BEARER")]
    wrong = ("Bearer ", "", "Bearer kk", "Basic k", "k", "Bearer  k", "Bearer k ")
    for given, status in [*right, *((one, 401) for one in wrong)]:
        sent = JSON | {"authorization": given}
        assert Asked(config, sent, method="GET", path="/metrics").status == status, given


def test_while_draining_new_requests_are_refused_and_health_reports_it() -> None:
    for method, path, status in (
        ("POST", "/v1/completions", 503),
        ("GET", "/health", 503),
        ("GET", "/metrics", 204),
        ("GET", "/events", 204),
    ):
        found = Asked(GateConfig(), JSON, b"{}", method=method, path=path, is_draining=True)
        assert found.status == status, path
        assert ("Retry-After" in {k.title() for k in found.headers}) == (status == 503)


@pytest.mark.parametrize("name", ["mine", "", "x" * 201, "a\tb", "ä"])
def test_an_id_is_taken_if_it_is_one(name: str) -> None:
    found = Asked(GateConfig(), JSON | {"x-request-id": name}, method="GET", path="/health")
    given = found.headers["x-request-id"]
    assert given == name if name == "mine" else len(given) == 32
    again = Asked(GateConfig(), JSON, method="GET", path="/health").headers["x-request-id"]
    assert again != given, "another one each time"
