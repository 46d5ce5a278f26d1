"""`GET /events`: recording starts and ends with its viewers, and costs the other clients
nothing."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import http.client
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from starlette.requests import Request

from common.events.frame_recorder import FrameRecorder
from common.events.frames import Frame
from common.events.hidden_frames import HIDDEN
from common.serve import live_page
from common.serve.app import ServeConfig
from common.serve.conftest import MODEL, Running, fail_next, running, wait_for
from common.serve.errors import ApiError
from common.serve.gate import GateConfig
from common.serve.live_page import TOKEN_HEADER, server_sent
from common.serve.streams import EventStream, close_all
from workshop.watch.replay.film import Film

STACK = "class Stack:\n    def __init__(self):\n        self.items = []\n\n"
PROMPTS = [f"{STACK}    def {name}(self" for name in ("pop", "peek", "size", "clear")]
PROMPTS += ["def is_prime(n):\n    for", "import os\nimport", "def mean(values):", "with open("]
EIGHT = {"model": MODEL, "prompt": PROMPTS, "max_tokens": 14, "temperature": 0, "ignore_eos": True}


class Onlooker:
    """A reader of `/events` in a thread, which reads nothing while not `is_awake`."""

    def __init__(self, server: Running, receive_buffer: int | None = None, **headers: str) -> None:
        self.is_awake, self.lines = threading.Event(), list[str]()
        self.is_awake.set()
        self._socket = server.connect(timeout=600, receive_buffer=receive_buffer)
        connection = server.http()
        connection.sock = self._socket
        connection.request("GET", "/events", headers=headers)
        self.answer = connection.getresponse()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with suppress(OSError, ValueError, http.client.HTTPException):  # it was closed
            for line in self.answer:
                self.is_awake.wait()
                if line.startswith(b"data: "):
                    self.lines.append(line.removeprefix(b"data: ").decode())

    def films(self) -> list[list[str]]:
        """The lines of each, from its `run` line on."""
        films: list[list[str]] = []
        for line in list(self.lines):
            if line.startswith('{"kind":"run"'):
                films.append([])
            films[-1].append(line)
        return films

    def film(self) -> Film | None:
        """The last film, as far as it has come."""
        films = self.films()
        return Film(f"{line}\n" for line in films[-1]) if films else None

    def state(self) -> Frame | None:
        film = self.film()
        return None if film is None else film.last_state()

    def close(self) -> None:
        self.is_awake.set()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)
        self._socket.close()


def present(state: Frame | None) -> Any:
    """The part of a frame that does not depend on where a recorded run began."""
    if state is None:
        return None
    aside = {"requests", "pieces", "loaded", "result", "cached"}  # who published a block, say
    rows = state["requests"]
    found = {name: state[name] for name in state.keys() - aside}
    for name in ("computed", "outputs"):  # an ended request stays for one frame
        found[name] = {n: value for n, value in state[name].items() if not rows[n].get("finish")}
    return found | {"cached": {b: row["tokens"] for b, row in state["cached"].items()}}


@pytest.fixture
def look(tight: Running) -> Iterator[Callable[..., Onlooker]]:
    """`look()`: another one. All leave when the test ends, and the engine is as it was."""
    onlookers: list[Onlooker] = []

    def _look(server: Running = tight, **headers_of: Any) -> Onlooker:
        onlooker = Onlooker(server, **headers_of)
        onlookers.append(onlooker)
        wait_for(lambda: onlooker.lines)
        return onlooker

    yield _look
    for onlooker in onlookers:
        onlooker.close()
    wait_for(lambda: watch_of(tight) is None)


def watch_of(server: Running) -> FrameRecorder | None:
    return server.call(lambda engine: engine._plugins.get("watch"))


def in_background(server: Running, body: dict[str, Any]) -> threading.Thread:
    thread = threading.Thread(target=lambda: server.post("/v1/completions", body), daemon=True)
    thread.start()
    return thread


def test_watching_is_put_in_for_the_first_and_taken_out_after_the_last(
    tight: Running, look: Callable[..., Onlooker]
) -> None:
    parts = tight.call(lambda engine: (engine.kv_manager.pool, engine.recorder.scheduler))
    assert watch_of(tight) is None
    first = look()
    watch = watch_of(tight)
    second = look()
    assert watch is not None and watch_of(tight) is watch
    first.close()
    wait_for(lambda: len(tight.app.state.server.live.viewers) == 1)
    assert watch_of(tight) is watch
    second.close()
    wait_for(lambda: watch_of(tight) is None)
    assert tight.call(lambda e: (e.kv_manager.pool, e.recorder.scheduler)) == parts


def test_a_late_viewer_gets_the_present_state_first_and_disturbs_no_other(
    tight: Running, look: Callable[..., Onlooker]
) -> None:
    first, others = look(), []
    thread = in_background(tight, EIGHT)
    for _ in range(4):
        others.append(look())
    thread.join(60)
    others.append(look())
    wait_for(lambda: all(present(o.state()) == present(first.state()) for o in others))
    assert [len(o.films()) for o in (first, *others)] == [1] * 6
    assert all(o.films()[0][1].startswith('{"at":"start"') for o in others)
    film = first.film()
    assert film is not None
    found = [happened for step in film.steps() for happened in step.happened]
    for name in ("preempted", "shared", "evicted"):
        assert any(happened[name] for happened in found), "nothing happened that could go wrong"
    assert sum(map(len, others[1].films())) < len(first.lines)


def test_a_viewer_that_reads_nothing_is_dropped_and_starts_over_when_it_reads(
    tight: Running, look: Callable[..., Onlooker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine is asked for nothing meanwhile, and no text is kept."""
    monkeypatch.setattr(live_page, "MAX_BEHIND", 60_000)  # two rounds: who is awake takes more
    beginnings, beginning = list[float](), FrameRecorder.beginning
    counted = lambda watch: beginnings.append(time.monotonic()) or beginning(watch)  # noqa: E731
    monkeypatch.setattr(FrameRecorder, "beginning", counted)
    awake, viewers = look(), tight.app.state.server.live.viewers
    before = set(viewers)
    sleeper = look(receive_buffer=4096)
    (viewer,) = viewers - before
    sleeper.is_awake.clear()
    for i in range(20):
        tight.post("/v1/completions", EIGHT | {"prompt": [f"# {i}\n{p}" for p in PROMPTS]})
        if viewer.lags:
            break
    num_before = len(beginnings)
    tight.post("/v1/completions", EIGHT)
    assert viewer.lags and viewer._texts == [] and len(beginnings) == num_before
    assert len(sleeper.films()) == 1
    sleeper.is_awake.set()
    wait_for(lambda: len(sleeper.films()) == 2)
    wait_for(lambda: present(sleeper.state()) == present(awake.state()))
    assert len(awake.films()) == 1 and len(beginnings) == num_before + 1
    viewer.lags = True
    wait_for(lambda: len(beginnings) == num_before + 2)
    assert beginnings[-1] - beginnings[-2] > 0.9, "a snapshot costs the engine's thread something"


@pytest.mark.parametrize("place", ["core", "books"])
def test_an_engine_that_recovers_is_recorded_again(
    place: str, tight: Running, look: Callable[..., Onlooker]
) -> None:
    """If state is inconsistent, watching ends by itself. Otherwise the same recorded run goes
    on."""
    onlookers = [look(), look()]
    tight.post("/v1/completions", EIGHT)
    tight.call(fail_next, ZeroDivisionError, 1, place)
    status, received = tight.post("/v1/completions", EIGHT)
    assert status == 500 and received["error"]["message"].endswith("has failed: ZeroDivisionError")
    num_films = 2 if place == "books" else 1
    wait_for(lambda: [len(o.films()) for o in onlookers] == [num_films] * 2)
    assert tight.post("/v1/completions", EIGHT)[0] == 200
    later = look()
    for onlooker in onlookers:
        assert sum('"at":"failed"' in line for line in onlooker.lines) == 1
        wait_for(lambda one=onlooker: present(one.state()) == present(later.state()))
    assert [len(o.films()) for o in onlookers] == [num_films] * 2


def test_an_event_is_one_write() -> None:
    assert (
        server_sent('{"a":1}\n{"b":"\u2028"}\n')
        == 'data: {"a":1}\ndata: {"b":"\u2028"}\n\n'.encode()
    )
    assert server_sent('{"a":"\ud800"}\n') == b'data: {"a":"\\ud800"}\n\n'
    assert server_sent("") == b""


# -- who may read

MINE, YOURS = ({"X-Watch-Token": letter * 32} for letter in "my")


def test_a_viewer_reads_its_own_requests_and_the_lengths_of_others(
    tight: Running, look: Callable[..., Onlooker]
) -> None:
    """Trap 86: who came first, in the middle and after the end; with a token, another, or none."""
    tight.call(lambda engine: engine.reset_prefix_cache())
    words = {"mine": "my dear diary:", "yours": "your own secret:", "": "some program said:"}
    headers: dict[str, dict[str, str]] = {"mine": MINE, "yours": YOURS, "": {}}
    prompts = {viewer_id: f"{STACK}    # {text}" for viewer_id, text in words.items()}
    ids = {viewer_id: tight.llm.tokenizer.encode(prompt) for viewer_id, prompt in prompts.items()}
    first = {viewer_id: look(**headers[viewer_id]) for viewer_id in words}
    bodies = [EIGHT | {"prompt": [p, p], "n": 2, "max_tokens": 40} for p in prompts.values()]
    threads = [
        threading.Thread(target=tight.post, args=("/v1/completions", body), kwargs=header)
        for body, header in zip(bodies, headers.values(), strict=True)
    ]
    with tight.slowed():  # they still run when the next ones come to look
        for thread in threads:
            thread.start()
        wait_for(lambda: sum(line.count('"prompt":') for line in first["mine"].lines) == 12)
        late = {viewer_id: look(**headers[viewer_id]) for viewer_id in words}
    for thread in threads:
        thread.join(60)
    after = {viewer_id: look(**headers[viewer_id]) for viewer_id in words}
    assert '"prompt":' in late["mine"].lines[1], "it came too late"

    def free(viewer: Onlooker) -> list[int]:
        state = viewer.state()
        assert state is not None
        return state["free"]

    for viewers in (first, late, after):
        for viewer_id, viewer in viewers.items():
            wait_for(lambda viewer=viewer: free(viewer) == free(after[""]))
            received, film, num_mine = "\n".join(viewer.lines), viewer.film(), 0
            assert film is not None
            for other in words.keys() - {viewer_id}:
                tail = ",".join(map(str, ids[other][-4:]))
                assert tail not in received, "not anywhere in a line"
            for row in film.requests().values():
                is_mine = viewer_id != "" and row["prompt"] == ids[viewer_id]
                assert is_mine or set(row["prompt"] + row["outputs"]) == {HIDDEN}
                assert ("".join(row["prompt_pieces"]) == prompts.get(viewer_id)) == is_mine
                num_mine += is_mine
            assert viewers is not first or num_mine == (4 if viewer_id else 0)


KEY = {"Authorization": "Bearer secret"}


def test_with_the_key_and_no_token_everything_is_read_until_the_end() -> None:
    with running(ServeConfig(MODEL, GateConfig(api_key="secret"))) as server:
        onlookers = [Onlooker(server, **KEY), Onlooker(server, **KEY, **MINE)]
        wait_for(lambda: all(o.lines for o in onlookers))
        server.request("POST", "/v1/completions", {"prompt": "said by some", "max_tokens": 2}, KEY)
        wait_for(lambda: all('"finish":' in "".join(o.lines) for o in onlookers))
        films = [onlooker.film() for onlooker in onlookers]
        rows = [row for film in films if film for row in film.requests().values()]
        assert ["".join(row["prompt_pieces"]) for row in rows] == ["said by some", ""]
        status, _, page = server.request("GET", "/")
        assert status == 200 and b"said by" not in page and b"secret" not in page
        for headers, expected in (
            (KEY | {TOKEN_HEADER: "short"}, 400),
            ({}, 401),
            (KEY | {"Origin": "http://evil.example"}, 403),
        ):
            assert server.request("GET", "/events", headers=headers)[0] == expected
        live, long = server.app.state.server.live, EIGHT | {"max_tokens": 500}
        with ThreadPoolExecutor(1) as pool:
            pool.submit(server.request, "POST", "/v1/completions", long, KEY)
            wait_for(lambda: server.llm.num_unfinished)
            live.gate.is_draining = True
            assert not live._is_over(), "what still runs is shown"
            server.loop.call_soon_threadsafe(server.llm.abort_all, "enough")
        for onlooker in onlookers:
            onlooker._thread.join(10)
            assert not onlooker._thread.is_alive(), "the stream ends when the server is shut down"


def test_the_page_may_run_its_own_script_and_ask_its_own_server(tight: Running) -> None:
    status, headers, content = tight.request("GET", "/")
    page, policy = content.decode(), headers["content-security-policy"]
    assert status == 200 and headers["content-type"].startswith("text/html")
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(scripts[0].encode()).digest()).decode()
    assert len(scripts) == 1 and f"script-src 'sha256-{digest}'" in policy
    assert "frame-ancestors 'none'" in policy
    assert policy.startswith("default-src 'none'") and "connect-src 'self'" in policy
    assert set(re.findall(r"https?://[\w./-]+", page)) <= {"http://www.w3.org/2000/svg"}
    assert not any(name.lower().startswith("access-control") for name in headers)


def test_only_so_many_may_look(
    tight: Running, look: Callable[..., Onlooker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_page, "MAX_VIEWERS", 3)
    look(), look()
    live, nothing = tight.app.state.server.live, Request({"type": "http", "headers": []})

    async def two_at_once() -> list[Any]:
        both = live.events(nothing), live.events(nothing)
        found = await asyncio.gather(*both, return_exceptions=True)
        await close_all([answer.events for answer in found if isinstance(answer, EventStream)])
        return [type(answer) for answer in found]

    running = asyncio.run_coroutine_threadsafe(two_at_once(), tight.loop)
    assert running.result(20) == [EventStream, ApiError]
    look()
    assert tight.request("GET", "/events")[0] == 429


def test_the_run_of_another_recorder_is_kept(
    tight: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tight.llm, "config", replace(tight.llm.config, events="run.jsonl"))
    status, _, content = tight.request("GET", "/events")
    assert status == 409 and "elsewhere" in json.loads(content)["error"]["message"]
