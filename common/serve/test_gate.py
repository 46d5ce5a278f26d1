"""Which requests the gate admits, without a server."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest

from common.serve.gate import MAX_CHUNKS, Gate, GateConfig

JSON = {"content-type": "application/json", "host": "localhost"}
DISCONNECT = {"type": "http.disconnect"}
PAGE, EVIL = "http://localhost:3000", "http://evil.example"
COMPLETIONS = "POST /v1/completions"


class Asked:
    """One request, in parts, at a gate, with its result. `read`: what the application read."""

    def __init__(
        self, config: GateConfig, headers: dict[str, str], *parts: Any, **scope: Any
    ) -> None:
        self.sent = []
        self.read = []
        self._parts: list[Any] = [*parts]
        self.gate = Gate(self._app, config)
        self.gate.is_draining = scope.pop("is_draining", False)
        own = [(name.encode(), value.encode()) for name, value in headers.items()]
        about = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": own}
        asyncio.run(self.gate(about | scope, self._receive, self._send))
        assert self.gate.num_posts == 0
        self.status = self.sent[0]["status"]
        self.headers = {k.decode().lower(): v.decode() for k, v in self.sent[0]["headers"]}

    async def _receive(self) -> Any:
        if not self._parts:
            await asyncio.Event().wait()
        part = self._parts.pop(0)
        if not isinstance(part, bytes):
            return part
        has_more = bool(self._parts) and isinstance(self._parts[0], bytes)
        return {"type": "http.request", "body": part, "more_body": has_more}

    async def _send(self, reason: Any) -> None:
        self.sent.append(reason)

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        assert self.gate.num_posts == (scope["method"] == "POST"), "a shutdown waits for it"
        self.read = [scope["state"].get("body")]
        await send({"type": "http.response.start", "status": 204, "headers": []})

    @property
    def error(self) -> dict[str, Any]:
        return json.loads(self.sent[1]["body"])["error"]


def bearer(key: str) -> dict[str, str]:
    return JSON | {"authorization": key}


LOCAL = GateConfig()
KEY = GateConfig(api_key="k")
OWN = GateConfig("0.0.0.0", "k")
OTHERS = GateConfig(allowed_hosts=("Host.Docker.internal",), allowed_origins=(PAGE,))
DOCKER = JSON | {"host": "host.docker.internal:8000"}
OPEN_METRICS = GateConfig(api_key="k", metrics_need_key=False)
SEEN = "GET /health"
WRONG = ("Bearer ", "", "Bearer kk", "Basic k", "k", "Bearer  k", "Bearer k ")
ANYWHERE = GateConfig("0.0.0.0")
MY = {"host": "my.name:8"}
# Who may ask for what: the gate, the headers, the request; the status.
ADMITTED: list[tuple[GateConfig, dict[str, str], str, int]] = [
    # by its name
    *((LOCAL, {"host": name}, "GET /", 204) for name in ("LocalHost", "127.0.0.1:8", "[::1]:8")),
    *((LOCAL, headers, "GET /", 403) for headers in ({"host": "evil.example:8"}, {})),
    (GateConfig("127.0.0.7"), {"host": "127.0.0.7:8"}, "GET /", 204),
    *((GateConfig(own), {"host": "evil.example"}, "GET /", 403) for own in ("::1", "127.0.0.7")),
    *((GateConfig(own), MY, "GET /", 204) for own in ("0.0.0.0", "::")),
    (OTHERS, DOCKER, COMPLETIONS, 204),
    # trap 86: events need the key of the address that the server prints, and no other
    *((GateConfig(host), JSON, "GET /events", 401) for host in ("0.0.0.0", "127.0.0.1")),
    (GateConfig(events_key="own"), bearer("Bearer own"), "GET /events", 204),
    (GateConfig(api_key="k", events_key="own"), bearer("Bearer own"), "GET /events", 204),
    (GateConfig(api_key="k", events_key="own"), bearer("Bearer own"), "GET /v1/models", 204),
    (OWN, bearer("Bearer k"), "GET /events", 401),
    (OTHERS, DOCKER, "GET /events", 401),
    # by its key, but at health and by the page
    *((KEY, JSON, f"GET {path}", 204) for path in ("/health", "/")),
    *((KEY, JSON, f"GET {path}", 401) for path in ("/v1/models", "/nothing", "/metrics")),
    (OWN, JSON, "GET /events", 401),
    (OPEN_METRICS, JSON, "GET /metrics", 204),
    *((OPEN_METRICS, JSON, f"GET {path}", 401) for path in ("/v1/models", "/events")),
    *((KEY, bearer(f"{name} k"), "GET /metrics", 204) for name in ("Bearer", "bearer", "BEARER")),
    *((KEY, bearer(wrong), "GET /metrics", 401) for wrong in WRONG),
    (GateConfig("::", "schlüssel"), bearer("Bearer schlüssel"), "GET /v1/models", 204),
    (GateConfig("::", "plain"), bearer("Bearer schlüssel"), "GET /v1/models", 401),
    # from another page, where something is done or shown
    *((ANYWHERE, MY | {"origin": f"{s}://my.name:8"}, "GET /", 204) for s in ("http", "https")),
    (ANYWHERE, MY | {"origin": "http://my.name"}, "GET /", 403),
    *((LOCAL, JSON | {"origin": EVIL}, asked, 403) for asked in ("POST /tokenize", "GET /")),
    *((LOCAL, JSON | {"origin": EVIL}, asked, 204) for asked in (SEEN, "GET /v1/models")),
    *((LOCAL, JSON | {"origin": origin}, COMPLETIONS, 403) for origin in ("", "null")),
    (LOCAL, JSON | {"origin": "http://localhost"}, COMPLETIONS, 204),
    (OTHERS, JSON | {"origin": PAGE}, COMPLETIONS, 204),
    (OTHERS, JSON | {"origin": EVIL}, COMPLETIONS, 403),
    (GateConfig(allowed_origins=("*",)), JSON | {"origin": EVIL}, COMPLETIONS, 204),
    # a body is JSON
    (LOCAL, JSON | {"content-type": "Application/JSON ; charset=utf-8"}, COMPLETIONS, 204),
    *((LOCAL, JSON | {"content-type": kind}, COMPLETIONS, 415) for kind in ("text/plain", "")),
    (LOCAL, JSON | {"transfer-encoding": "chunked"}, COMPLETIONS, 204),
]


@pytest.mark.parametrize(("config", "headers", "asked", "status"), ADMITTED)
def test_who_is_admitted(
    config: GateConfig, headers: dict[str, str], asked: str, status: int
) -> None:
    method, path = asked.split()
    found = Asked(config, headers, b"{}", method=method, path=path)
    assert found.status == status
    if status == 401:
        assert found.error["code"] == "invalid_api_key"
        assert found.headers["www-authenticate"] == "Bearer"


def test_another_page_asks_first() -> None:
    with_key = GateConfig(api_key="k", allowed_origins=(PAGE,))
    asks = JSON | {"origin": PAGE, "access-control-request-headers": "authorization,x-y"}
    asks |= {"access-control-request-method": "POST"}
    preflight = Asked(with_key, asks, method="OPTIONS")
    assert preflight.status == 200 and not preflight.read
    assert preflight.headers["access-control-allow-headers"] == "authorization,x-y"
    for origin, name in (PAGE, PAGE), ("null", None):
        refused = Asked(with_key, JSON | {"origin": origin}, b"{}")
        assert refused.headers.get("access-control-allow-origin") == name
    assert Asked(with_key, asks | {"origin": "null"}, method="OPTIONS").status == 400


def test_a_body_is_read_before_the_application_runs() -> None:
    found = Asked(LOCAL, JSON, b'{"a"', b": 1}", DISCONNECT)
    assert found.status == 204 and found.read == [b'{"a": 1}']
    part = {"body": b"{", "more_body": True, "type": ""}
    found = Asked(LOCAL, JSON, part, DISCONNECT)
    assert found.status == 499 and not found.read
    late = Asked(GateConfig(body_seconds=0.05), JSON, {"type": "http.request", "more_body": True})
    assert late.status == 408


@pytest.mark.parametrize(
    ("chunks", "status"),
    [
        ([b"x", b"x" * 9], 204),
        ([b"x", b"x" * 10], 413),
    ],
)
def test_a_body_has_its_limit(chunks: list[bytes], status: int) -> None:
    said = JSON | {"content-length": "10"}  # whatever was said
    assert Asked(GateConfig(max_body_bytes=10), said, *chunks).status == status
    for num, expected in (MAX_CHUNKS - 1, 204), (MAX_CHUNKS + 1, 413):
        assert Asked(LOCAL, JSON, *[b"x"] * num).status == expected


def test_each_request_has_a_line_in_the_log_without_its_texts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Trap 86: neither query nor body nor key; a path cannot begin another line."""
    caplog.set_level("INFO")
    sent = bearer("Bearer secret") | {"x-request-id": "mine"}
    query = {"query_string": b"secret=1", "client": ("10.0.0.7", 5123)}
    Asked(LOCAL, sent, b'{"prompt": "secret"}', **query)
    Asked(LOCAL, sent, method="GET", path="/a\nb\u00e9")
    one, other = (record.getMessage() for record in caplog.records)
    assert re.fullmatch(r"10.0.0.7:5123 POST /v1/completions 204 in \d+ ms, mine", one)
    assert other.startswith("-:0 GET /a%0Ab%C3%A9 204 in ") and "\n" not in other


def test_while_draining_new_requests_are_refused_and_health_reports_it() -> None:
    for asked, status in (COMPLETIONS, 503), (SEEN, 503), ("GET /metrics", 204), ("GET /", 204):
        method, path = asked.split()
        found = Asked(LOCAL, JSON, b"{}", method=method, path=path, is_draining=True)
        assert found.status == status and ("retry-after" in found.headers) == (status == 503)


def test_an_id_is_taken_if_it_is_one() -> None:
    names = ("mine", "", "x" * 201, "a\tb", "ä", "ä")
    asked = (Asked(LOCAL, JSON | {"x-request-id": name}, b"{}") for name in names)
    mine, *made = (one.headers["x-request-id"] for one in asked)
    assert mine == "mine" and len(set(made)) == 5 and {*map(len, made)} == {32}
