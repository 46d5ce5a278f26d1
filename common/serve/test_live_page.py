"""`GET /events` and the page of it: recording starts and ends with its viewers, and costs the other
clients nothing."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from common.events.frame_recorder import FrameRecorder
from common.events.frames import Frame
from common.llm import LLM, SamplingParams
from common.serve import live_page
from common.serve.app import ServeConfig
from common.serve.conftest import MODEL, TEMPLATE, Running, fail_next, running, wait_for
from common.serve.errors import ApiError
from common.serve.gate import Gate, GateConfig
from common.serve.live_page import FILES, SCRIPTS, server_sent
from common.serve.streams import EventStream, close_all
from workshop.watch.conftest import (
    LIMIT_MS,
    LOCALES,
    _note_console,
    browser_for_tests,
    expect,
    until,
)
from workshop.watch.replay.film import Film
from workshop.watch.test_page_maker import ASKED, SAID, words

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

STACK = "class Stack:\n    def __init__(self):\n        self.items = []\n\n"
PROMPTS = [f"{STACK}    def {name}(self" for name in ("pop", "peek", "size", "clear")]
PROMPTS += ["def is_prime(n):\n    for", "import os\nimport", "def mean(values):", "with open("]
EIGHT = {"model": MODEL, "prompt": PROMPTS, "max_tokens": 14, "temperature": 0, "ignore_eos": True}


def gate_of(server: Running) -> Gate:
    return server.app.state.server.live.gate


class Onlooker:
    """A reader of `/events` in a thread, which reads nothing while not `is_awake`."""

    def __init__(self, server: Running, receive_buffer: int | None = None, **headers: str) -> None:
        self.is_awake = threading.Event()
        self.lines = list[str]()
        self.is_awake.set()
        self._socket = server.connect(timeout=600, receive_buffer=receive_buffer)
        connection = server.http()
        connection.sock = self._socket
        key = {"Authorization": f"Bearer {gate_of(server).config.events_key}"}
        connection.request("GET", "/events", headers=key | headers)
        self.answer = connection.getresponse()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        wait_for(lambda: self.lines)

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

    def film(self) -> Film:
        """The last film, as far as it has come."""
        return Film(f"{line}\n" for line in self.films()[-1])

    def state(self) -> Frame | None:
        return self.film().last_state()

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


def watch_of(server: Running) -> FrameRecorder | None:
    return server.call(lambda engine: engine.frame_recorder)


@pytest.fixture
def unwatched(tight: Running) -> Iterator[None]:
    """All leave when the test ends, and the engine is as it was."""
    yield
    wait_for(lambda: watch_of(tight) is None)


@pytest.fixture
def look(tight: Running, unwatched: None) -> Iterator[Callable[..., Onlooker]]:
    """`look()`: another one."""
    with ExitStack() as stack:
        yield lambda **about: stack.enter_context(closing(Onlooker(tight, **about)))


@pytest.fixture(scope="module")
def keyed() -> Iterator[Running]:
    with running(ServeConfig(MODEL, GateConfig(api_key="secret"))) as found:
        yield found


def in_background(server: Running, body: dict[str, Any]) -> threading.Thread:
    thread = threading.Thread(target=lambda: server.post("/v1/completions", body), daemon=True)
    thread.start()
    return thread


ACTS = "come come core come leave books leave leave"


@pytest.mark.net
def test_each_viewer_has_the_present_state_whatever_it_and_the_engine_do(
    tight: Running, look: Callable[..., Onlooker]
) -> None:
    """Who comes, in the middle of a run, gets it first. A step that fails ends no film. The last to
    leave takes the recorder out."""
    inside = lambda e: (e.kv_manager.pool, e.scheduler)  # noqa: E731
    parts = tight.call(inside)
    served = tight.app.state.server.live.viewers
    onlookers: dict[Onlooker, int] = {}  # with the number of its films
    happened: list[dict[str, Any]] = []
    for act in ACTS.split():
        watch = watch_of(tight)
        if act == "come":
            thread = in_background(tight, EIGHT)
            onlookers[look(receive_buffer=4096)] = 1
            thread.join(60)
        first = next(iter(onlookers))
        if act == "leave":
            happened += [one for step in first.film().steps() for one in step.happened]
            first.close()
            del onlookers[first]
        elif act in ("core", "books"):
            tight.call(fail_next, ZeroDivisionError(), act)
            status, answer = tight.post("/v1/completions", EIGHT)
            assert (status, answer["error"]["message"][-17:]) == (500, "ZeroDivisionError")
            wait_for(lambda: all('"at":"failed"' in "".join(one.lines) for one in onlookers))
            assert tight.post("/v1/completions", EIGHT)[0] == 200
        wait_for(lambda: len(served) == len(onlookers))
        wait_for(lambda: (watch_of(tight) is None) == (not onlookers))
        wait_for(lambda: all(len(one.films()) == num for one, num in onlookers.items()))
        wait_for(
            lambda one=[*onlookers]: all(present(o.state()) == present(one[0].state()) for o in one)
        )
        assert not watch or not onlookers or watch_of(tight) is watch
    assert any(one["preempted"] for one in happened) and any(one["shared"] for one in happened)
    assert tight.call(inside) == parts


def test_the_stream_of_a_viewer_that_reads_nothing_ends(
    tight: Running, look: Callable[..., Onlooker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So nothing is kept for it."""
    monkeypatch.setattr(live_page, "MAX_BEHIND", 5)
    onlooker = look(receive_buffer=4096)
    onlooker.is_awake.clear()
    viewers = tight.app.state.server.live.viewers
    for i in range(30):
        tight.post("/v1/completions", EIGHT | {"prompt": [f"# {i}\n{p}" for p in PROMPTS]})
        if not viewers:
            break
    assert not viewers
    onlooker.is_awake.set()
    onlooker._thread.join(10)
    assert not onlooker._thread.is_alive()


def test_an_event_is_one_write() -> None:
    assert server_sent('{"a":1}\n{"b":"\u2028"}\n').decode() == (
        'data: {"a":1}\ndata: {"b":"\u2028"}\n\n'
    )
    assert server_sent('{"a":"\ud800"}\n') == b'data: {"a":"\\ud800"}\n\n'
    assert server_sent("") == b""


# -- who may read


def test_events_need_the_key_that_the_server_prints(tight: Running) -> None:
    """Trap 86."""
    for headers in ({}, {"Authorization": "Bearer "}, {"Authorization": "Bearer x"}):
        assert tight.request("GET", "/events", headers=headers)[0] == 401


KEY = {"Authorization": "Bearer secret"}


def test_with_the_key_everything_is_read_until_the_end(
    keyed: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    onlookers = [Onlooker(keyed)]
    keyed.request("POST", "/v1/completions", {"prompt": "said by some", "max_tokens": 2}, KEY)
    wait_for(lambda: all('"finish":' in "".join(o.lines) for o in onlookers))
    rows = [row for o in onlookers for row in o.film().requests().values()]
    assert ["".join(row["prompt_pieces"]) for row in rows] == ["said by some"]
    for headers in ({}, KEY):
        assert keyed.request("GET", "/events", headers=headers)[0] == 401
    live = keyed.app.state.server.live
    long = EIGHT | {"max_tokens": 500}
    with ThreadPoolExecutor(1) as pool:
        pool.submit(keyed.request, "POST", "/v1/completions", long, KEY)
        wait_for(lambda: keyed.llm.num_unfinished)
        monkeypatch.setattr(live.gate, "is_draining", True)
        keyed.loop.call_soon_threadsafe(keyed.llm.abort_all, "enough")
    for onlooker in onlookers:
        onlooker._thread.join(10)
        assert not onlooker._thread.is_alive(), "the stream ends when the server is shut down"


def test_the_page_may_run_its_own_script_and_ask_its_own_server(keyed: Running) -> None:
    status, headers, content = keyed.request("GET", "/")
    page = content.decode()
    policy = headers["content-security-policy"]
    assert status == 200 and headers["content-type"].startswith("text/html")
    assert "frame-ancestors 'none'" in policy and "secret" not in page
    for says in "default-src 'none'", "connect-src 'self'":
        assert says in page
    assert set(re.findall(r"https?://[\w./-]+", page)) <= {"http://www.w3.org/2000/svg"}
    assert not any(name.lower().startswith("access-control") for name in headers)


def test_only_so_many_may_look_and_none_where_the_run_is_recorded_elsewhere(
    tight: Running, look: Callable[..., Onlooker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three that come at the same time two."""
    monkeypatch.setattr(live_page, "MAX_VIEWERS", 3)
    look()

    async def three() -> list[Any]:
        each = (tight.app.state.server.live.events() for _ in range(3))
        found = await asyncio.gather(*each, return_exceptions=True)
        await close_all(
            [answer.generators[0] for answer in found if isinstance(answer, EventStream)]
        )
        return [type(answer) for answer in found]

    found = asyncio.run_coroutine_threadsafe(three(), tight.loop).result(20)
    assert found == [EventStream, EventStream, ApiError]
    monkeypatch.setattr(tight.llm, "config", replace(tight.llm.config, events="run.jsonl"))
    key = {"Authorization": f"Bearer {gate_of(tight).config.events_key}"}
    status, _, content = tight.request("GET", "/events", headers=key)
    assert status == 409 and "elsewhere" in json.loads(content)["error"]["message"]


# -- the page in a real browser: what it says is what the engine did


browser = pytest.fixture(scope="module")(browser_for_tests)
NOW = "JSON.stringify(Watch.store.films[0].now)"
RESULT = ".run:not([disabled])"


@pytest.fixture
def open_tab(tight: Running, browser: Browser, unwatched: None) -> Iterator[Callable[..., Page]]:
    """`open_tab()`: another one, when its film has begun. What goes wrong in it fails the test."""
    contexts = []
    complaints = list[str]()

    def _open(
        server: Running = tight, path: str = "/", may_be_refused: bool = False, has_key: bool = True
    ) -> Page:
        context = browser.new_context(locale=LOCALES["en"], viewport={"width": 1280, "height": 800})
        context.set_default_timeout(LIMIT_MS)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: complaints.append(f"exception: {error}"))
        if may_be_refused:
            page.clock.install()
        else:  # a browser complains of each answer that is an error
            page.on("console", lambda message: _note_console(message, complaints))
        gate = gate_of(server).config
        page.goto(f"{server.url}{path}" + (f"#key={gate.events_key}" if has_key else ""))
        if server is tight:
            until(page, "Watch.store.films.length === 1")
        return page

    yield _open
    for context in contexts:
        context.close()
    assert complaints == []


def write(page: Page, prompts: list[str] = PROMPTS) -> None:
    page.fill("textarea >> nth=0", "\n---\n".join(prompts))
    page.fill("[name=max_tokens]", str(EIGHT["max_tokens"]))


def run_all(*pages: Page) -> None:
    for page in pages:
        page.click(".run")
    for page in pages:
        page.evaluate("new Promise(requestAnimationFrame)")  # from then on the button says so
        page.wait_for_selector(".run:not([disabled])")


def test_two_tabs_see_one_engine_and_each_its_own_answers(
    tight: Running, open_tab: Callable[..., Page], look: Callable[..., Onlooker], alone: LLM
) -> None:
    """In frames and in words, as the engine has it, also after a reload in mid run."""
    tight.call(lambda engine: engine.reset_prefix_cache())
    one = open_tab()
    other = open_tab(path="/?lang=zh")
    onlooker = look()
    write(one)
    write(other, PROMPTS[:3])
    run_all(one, other)
    wait_for(lambda: json.loads(one.evaluate(NOW)) == onlooker.state())
    assert one.evaluate("Watch.store.films[0].contradiction") is None
    params = SamplingParams(temperature=0, max_tokens=EIGHT["max_tokens"])
    expected = [o.outputs[0].text for o in alone.generate(PROMPTS, params, use_tqdm=False)]
    for page, num in ((one, 8), (other, 3)):
        expect(page.locator(".answers .text")).to_have_text(expected[:num])
    expect(one.locator(".answers .chip .quiet:has-text('ended: ')")).to_have_count(8)
    for said in "found in the cache", "preempted":
        expect(one.locator(f".answers .chip .quiet:has-text('{said}')").first).to_be_visible()
    expect(other.locator(".answers .chip").first).to_contain_text("结束：")
    prompts = """Watch.store.films[0].requests.map(({id}) =>
        Watch.store.films[0].requestIn(Watch.store.films[0].now, id, Infinity)
            .prompt_pieces.join(''))"""
    for page in one, other:
        assert sorted(page.evaluate(prompts)) == sorted(PROMPTS + PROMPTS[:3])
    # A card leads to its request.
    one.click(".answers li:nth-child(2) .chip")
    chosen = "new Watch.View(Watch.store.films[0], 0).request(Watch.store.request)"
    assert "".join(one.evaluate(f"{chosen}.prompt_pieces")) == PROMPTS[1]
    thread = in_background(tight, EIGHT | {"max_tokens": 30})
    one.reload()
    until(one, "Watch.store.films[0]?.requests.length > 0")
    thread.join(60)
    wait_for(lambda: present(json.loads(one.evaluate(NOW))) == present(onlooker.state()))


def test_the_page_asks_for_the_key_once(keyed: Running, open_tab: Callable[..., Page]) -> None:
    """Nothing is asked again, nor every second."""

    def is_quiet(says: str) -> None:
        expect(page.locator(f":text('{says}'):visible").first).to_be_visible()
        requested: list[str] = []
        page.on("request", lambda request: requested.append(request.url))
        page.clock.fast_forward(30_000)
        page.evaluate("new Promise(requestAnimationFrame)")
        assert not requested

    page = open_tab(keyed, may_be_refused=True, has_key=False)
    is_quiet("wants the key")
    for key in "wrong", gate_of(keyed).config.events_key:
        page.fill(".key-form input", key)
        page.click(".key-form button")
        if key == "wrong":
            is_quiet("This key is wrong")
    for _ in range(2):
        until(page, "Watch.store.films.length === 1")
        expect(page.locator(".key-form")).to_be_hidden()
        page.reload()


def test_an_error_is_shown_input_is_kept_and_a_run_can_be_stopped(
    tight: Running, open_tab: Callable[..., Page]
) -> None:
    page = open_tab(may_be_refused=True)
    may_go = threading.Event()
    write(page, PROMPTS[:1])
    page.click("summary")
    page.fill(".schema", "{")
    page.press("textarea >> nth=0", "Control+Enter")
    expect(page.locator(".problem")).to_contain_text("no JSON")
    page.fill(".schema", '{"const": 7}')
    page.fill("[name=temperature]", "0")
    page.reload()
    page.wait_for_selector(".model option", state="attached")
    page.press("textarea >> nth=0", "Control+Enter")
    expect(page.locator(".answers .text")).to_have_text("7")
    tight.call(fail_next, ZeroDivisionError())
    page.click(".run")
    page.wait_for_selector(".problem:has-text('ZeroDivisionError')")
    held = tight.llm.call(lambda engine: may_go.wait(30))
    future = asyncio.run_coroutine_threadsafe(held, tight.loop)
    before = tight.llm._num_requests
    page.evaluate("for (const i of [1, 2]) document.querySelector('.prompts').requestSubmit()")
    wait_for(lambda: tight.llm._num_requests > before)
    page.click(".go button[type=button]")
    expect(page.locator(".answers .chip")).to_contain_text("stopped")
    may_go.set()
    assert future.result(30) and tight.llm._num_requests == before + 1
    expect(page.locator(".problem")).to_be_hidden()


def test_the_examples_invite_and_then_say_where_to_look(open_tab: Callable[..., Page]) -> None:
    """With little memory, sharing and preemption are seen in the first try. A tool call has the
    API's answer."""
    config = ServeConfig(MODEL, chat_template=TEMPLATE)
    with running(config, num_blocks=28) as server:
        page = open_tab(server)
        room = "27 blocks of 16 tokens: room for 432 tokens"
        until(page, "Watch.store.films.length === 1")
        page.wait_for_selector(".film-caption .text:has-text('Press “Eight at once”, then “Run”')")
        expect(page.locator(".head .about")).to_have_text(room)
        page.click("[data-example=eight]")
        run_all(page)
        expect(page.locator(".film-caption .text")).to_contain_text("The engine is idle")
        expect(page.locator(".pool-counts")).to_contain_text("0 in use")
        expect(page.locator(".queue-list .chip")).to_have_count(0)
        looks = " ".join(page.locator(".film-caption .look").all_inner_texts())
        assert "found 32 tokens in the cache" in looks and "came back" in looks
        page.click(".film-caption .look:has-text('was preempted')")
        page.wait_for_selector(".words-list:has-text('is preempted')")
        page.fill("[name=max_tokens]", "90")
        page.click("[data-example=tool]")
        run_all(page)
        called = re.compile(r'^get_weather \{\s*"city"\s*:\s*"(Oslo|Lima|Nairobi)"')
        expect(page.locator(".answers .text")).to_have_text(called)
        page.click("[data-example=one]")
        kept = [page.input_value(f"[name={name}]") for name in ("kind", "schema")]
        assert kept == ["text", ""], "the tool's schema is no one else's"
        page.context.close()


def test_every_text_is_there_in_english_and_chinese() -> None:
    text = "".join((FILES / name).read_text(encoding="utf-8") for name in SCRIPTS)
    said = {key for key, english, chinese in SAID.findall(text) if english and chinese}
    assert set(ASKED.findall(text)) <= said | words().keys()
