"""The server's page in a real browser: what it says is what the engine did."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from common.llm import LLM, SamplingParams
from common.serve.app import ServeConfig
from common.serve.conftest import MODEL, Running, fail_next, running, wait_for
from common.serve.gate import GateConfig
from common.serve.live_page import FILES, SCRIPTS, TOKEN_HEADER
from common.serve.test_events_route import (
    EIGHT,
    PROMPTS,
    Onlooker,
    in_background,
    watch_of,
)
from workshop.watch.conftest import LIMIT_MS, LOCALES, _note_console, browser_for_tests
from workshop.watch.test_page_maker import ASKED, SAID, words

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


browser = pytest.fixture(scope="module")(browser_for_tests)
NOW = "JSON.stringify(Watch.store.films[0].now)"
RESULT = ".run:not([disabled])"


@pytest.fixture
def open_tab(tight: Running, browser: Browser) -> Iterator[Callable[..., Page]]:
    """`open_tab()`: another one, when its film has begun. What goes wrong in it fails the test."""
    contexts, complaints = [], list[str]()

    def _open(
        server: Running = tight,
        path: str = "/",
        language: str = "en",
        width: int = 1280,
        may_be_refused: bool = False,
    ) -> Page:
        size: Any = {"width": width, "height": 800}
        context = browser.new_context(locale=LOCALES[language], viewport=size)
        context.set_default_timeout(LIMIT_MS)
        contexts.append(context)
        page = context.new_page()
        if may_be_refused:
            page.clock.install()
        page.on("pageerror", lambda error: complaints.append(f"exception: {error}"))
        if not may_be_refused:  # a browser complains of each answer that is an error
            page.on("console", lambda message: _note_console(message, complaints))
        page.goto(f"{server.url}{path}")
        if server is tight:
            until(page, "Watch.store.films.length === 1")
        return page

    yield _open
    for context in contexts:
        context.close()
    assert complaints == []
    wait_for(lambda: watch_of(tight) is None)


@pytest.fixture
def look(tight: Running, open_tab: Callable[..., Page]) -> Iterator[Callable[..., Onlooker]]:
    """The same events, read by Python."""
    del open_tab  # whose tabs are closed after these
    with ExitStack() as stack:

        def _look(**headers: str) -> Onlooker:
            onlooker = stack.enter_context(closing(Onlooker(tight, **headers)))
            wait_for(lambda: onlooker.lines)
            return onlooker

        yield _look


def until(page: Page, expression: str) -> None:
    """Wait for the expression from outside: the page's policy forbids evaluating a text in it."""
    wait_for(lambda: page.evaluate(expression))


def write(page: Page, prompts: list[str] = PROMPTS) -> None:
    page.fill("textarea >> nth=0", "\n---\n".join(prompts))
    page.fill("[name=max_tokens]", str(EIGHT["max_tokens"]))


def run_all(*pages: Page) -> None:
    for page in pages:
        page.click(".run")
    for page in pages:
        page.evaluate("new Promise(requestAnimationFrame)")  # from then on the button says so
        page.wait_for_selector(RESULT)


def shows_the_present(page: Page, onlooker: Onlooker) -> None:
    """The page's film and Python's of the same events: as the engine has it now."""
    keys = ("refs", "free", "waiting", "running", "evictable", "tables")
    seen = lambda frame: frame and {key: frame[key] for key in keys}  # noqa: E731
    wait_for(lambda: seen(json.loads(page.evaluate(NOW))) == seen(onlooker.state()))
    assert page.evaluate("Watch.store.films[0].contradiction") is None


def test_eight_concurrent_prompts_equal_the_engines_recorded_run(
    tight: Running, open_tab: Callable[..., Page], look: Callable[..., Onlooker], alone: LLM
) -> None:
    tight.call(lambda engine: engine.reset_prefix_cache())
    page = open_tab()
    onlooker = look(**{TOKEN_HEADER: page.evaluate("sessionStorage.getItem('watch-token')")})
    write(page)
    run_all(page)
    wait_for(lambda: json.loads(page.evaluate(NOW)) == onlooker.state())
    assert page.evaluate("[Watch.store.step, Watch.store.films[0].contradiction]") == [
        page.evaluate("Watch.numSteps()") - 1,
        None,
    ]
    # In words, beside each answer and in the pool: as the engine counts it.
    params = SamplingParams(temperature=0, max_tokens=EIGHT["max_tokens"])
    expected = [o.outputs[0].text for o in alone.generate(PROMPTS, params, use_tqdm=False)]
    assert [card.text_content() for card in page.locator(".answers .text").all()] == expected
    notes = " | ".join(page.locator(".answers .chip .quiet").all_inner_texts())
    assert notes.count("ended: ") == 8
    assert "found in the cache" in notes and "preempted" in notes
    stats = tight.call(lambda engine: engine.stats())
    pool = page.locator(".pool-counts").inner_text()
    cached, free = stats.kv_blocks_cached, stats.kv_blocks_total - stats.kv_blocks_cached
    assert pool == f"0 in use · {cached} cached, unused · {free} free · of {stats.kv_blocks_total}"
    preempted = """Watch.store.films[0].steps.flatMap(({frames}) =>
        frames.flatMap(({preempted}) => preempted ?? [])).length"""
    assert page.evaluate(preempted) > 0


def test_a_card_leads_to_its_request_and_the_film_may_be_wound_back(
    open_tab: Callable[..., Page],
) -> None:
    page, second = open_tab(), ".answers li:nth-child(2) .chip:not([disabled])"
    page.wait_for_selector(".model option", state="attached")
    write(page, PROMPTS[:2])
    run_all(page)
    page.click(second)
    name = page.evaluate("Watch.store.request")
    chosen = "new Watch.View(Watch.store.films[0], 0).request(Watch.store.request)"
    assert "".join(page.evaluate(f"{chosen}.prompt_pieces")) == PROMPTS[1]
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("Home")
    num_steps = page.evaluate("Watch.numSteps()")
    run_all(page)
    until(page, f"Watch.numSteps() > {num_steps}")
    assert page.evaluate("[Watch.store.step, Watch.store.request]") == [0, name]
    page.click("button.live")
    page.click(second)
    assert page.evaluate("Watch.store.request") not in (None, name), "the new one of two alike"
    last = page.evaluate("Watch.numSteps()") - 1
    assert page.evaluate("Watch.store.step") == last and last >= num_steps


def test_two_tabs_see_one_engine_and_each_its_own_answers(
    tight: Running, open_tab: Callable[..., Page], look: Callable[..., Onlooker]
) -> None:
    """And a reload in mid run shows the present state."""
    one, other = open_tab(), open_tab(path="/?lang=zh")
    write(one, [PROMPTS[0], *PROMPTS[:2]])
    write(other, PROMPTS[3:])
    run_all(one, other)
    for page, num in ((one, 3), (other, 5)):
        assert page.locator(".answers li").count() == num
    wait_for(lambda: len(set(one.locator(".answers .chip b").all_inner_texts())) == 3)
    # Trap 86: each reads its own requests; of the others it sees how long they are.
    prompts = """Watch.store.films[0].requests.map(({id}) =>
        Watch.store.films[0].requestIn(Watch.store.films[0].now, id, Infinity)
            .prompt_pieces.join(''))"""
    assert sorted(one.evaluate(prompts)) == sorted([""] * 5 + [PROMPTS[0], *PROMPTS[:2]])
    assert sorted(other.evaluate(prompts)) == sorted([""] * 3 + PROMPTS[3:])
    assert one.evaluate("Watch.pieceOf(Watch.store.films[0], -1)") == "▒"
    assert "结束：" in other.locator(".answers .chip").first.inner_text()
    assert other.evaluate("document.documentElement.lang") == "zh-CN"
    thread = in_background(tight, EIGHT | {"max_tokens": 30})
    one.reload()
    until(one, "Watch.store.films[0]?.requests.length > 0")
    assert one.evaluate("Watch.store.films[0].lines[0].at") == "start"
    thread.join(60)
    onlooker = look()
    shows_the_present(one, onlooker)
    shows_the_present(other, onlooker)


def test_a_full_recorded_run_restarts_when_it_has_no_viewer(
    tight: Running, open_tab: Callable[..., Page], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A viewer of a finished run keeps it, and requests the next one."""
    live, begun = tight.app.state.server.live, list[Any]()
    begin, page_text = live._begin, live._page[0].replace("MAX_STEPS = 2000", "MAX_STEPS = 30")
    monkeypatch.setattr(live, "_begin", lambda *args: begun.append(args) or begin(*args))
    monkeypatch.setitem(vars(live), "_page", (page_text, "connect-src 'self'"))
    page = open_tab()
    notice, button = page.locator(".notice"), page.locator("button.live")
    write(page, PROMPTS[:1])
    page.fill("[name=max_tokens]", "60")
    assert len(begun) == 1 and not notice.is_visible()
    run_all(page)
    wait_for(lambda: len(begun) > 1)
    until(page, "Watch.store.films[0].lines[0]?.at === 'start' && Watch.numSteps() < 30")
    page.wait_for_selector("button.live[aria-pressed=true]")
    assert not notice.is_visible()
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("Home")
    num_begun = len(begun)
    run_all(page)
    wait_for(lambda: notice.is_visible() and not live.viewers)
    num_steps = page.evaluate("Watch.numSteps()")
    assert num_steps >= 30 and f"{num_steps} steps and ends here" in notice.inner_text()
    assert page.evaluate("Watch.store.step") == 0 and len(begun) == num_begun
    assert button.get_attribute("aria-pressed") == "false"
    button.click()
    wait_for(lambda: len(begun) > num_begun)
    until(page, "Watch.numSteps() < 30")
    page.wait_for_selector("button.live[aria-pressed=true]")
    assert not notice.is_visible()


def asks_nothing_more(page: Page) -> None:
    """Nor every second."""
    requested: list[str] = []
    page.on("request", lambda request: requested.append(request.url))
    page.clock.fast_forward(30_000)
    page.evaluate("new Promise(requestAnimationFrame)")
    assert not requested


def test_the_page_asks_for_the_key(open_tab: Callable[..., Page]) -> None:
    with running(ServeConfig(MODEL, GateConfig(api_key="secret"))) as server:
        page = open_tab(server, may_be_refused=True)
        page.wait_for_selector(".notice:has-text('wants an API key')")
        for key in "wrong", "wrong, too":
            page.fill(".key-form input", key)
            page.click(".key-form button")
            page.wait_for_selector(".notice:has-text('This API key is wrong')")
            page.wait_for_selector(".key-form label:visible:has-text('This API key is wrong')")
        assert page.evaluate("Watch.store.films.length") == 0
        asks_nothing_more(page)
        page.fill(".key-form input", "secret")
        page.click(".key-form button")
        page.wait_for_selector(".model option", state="attached")
        assert page.locator(".model option").all_inner_texts() == [MODEL]
        for _ in range(2):
            until(page, "Watch.store.films.length === 1")
            assert not page.locator(".key-form").is_visible()
            page.reload()
        page.context.close()


def test_a_server_that_shows_no_events_says_so_once(open_tab: Callable[..., Page]) -> None:
    """Trap 86: beyond loopback, without a key. Prompts can be tried all the same."""
    with running() as server:
        gate = server.app.state.server.live.gate
        gate.config = replace(gate.config, host="0.0.0.0")
        page = open_tab(server, may_be_refused=True)
        page.wait_for_selector(".notice:has-text('does not show its engine')")
        asks_nothing_more(page)
        write(page, PROMPTS[:1])
        run_all(page)
        assert page.locator(".answers .text").text_content()
        page.context.close()


def test_an_error_is_shown_a_schema_kept(tight: Running, open_tab: Callable[..., Page]) -> None:
    page = open_tab(may_be_refused=True)
    write(page, ["", *PROMPTS[:1], ""])
    until(page, "document.querySelector('.prompts .quiet').textContent.startsWith('1 prompt.')")
    page.click("summary")
    page.fill(".schema", "{")
    page.click(".run")
    assert "no JSON" in page.locator(".problem").inner_text()
    page.fill(".schema", '{"type": "array", "items": {"const": 7}, "minItems": 2, "maxItems": 2}')
    page.fill("[name=temperature]", "-1")
    page.click(".run")
    page.wait_for_selector(".problem:has-text('temperature')")
    page.fill("[name=temperature]", "0")
    run_all(page)
    assert re.sub(r"\s", "", page.locator(".answers .text").text_content() or "") == "[7,7]"
    assert not page.locator(".problem").is_visible()
    tight.call(fail_next, ZeroDivisionError)
    page.click(".run")
    page.wait_for_selector(".problem:has-text('ZeroDivisionError')")


def test_a_prompt_may_be_stopped(tight: Running, open_tab: Callable[..., Page]) -> None:
    page, may_go = open_tab(), threading.Event()
    write(page, ["1, 2, 3,"])
    page.fill("[name=stop]", "\\n")
    page.fill("[name=max_tokens]", "60")
    run_all(page)
    assert "\n" not in (page.locator(".answers .text").text_content() or "")
    held = tight.llm.call(lambda engine: may_go.wait(30))
    future = asyncio.run_coroutine_threadsafe(held, tight.loop)
    before = tight.llm._num_requests
    page.evaluate("for (const i of [1, 2]) document.querySelector('.prompts').requestSubmit()")
    wait_for(lambda: tight.llm._num_requests > before)
    page.click(".go button[type=button]")
    page.wait_for_selector(RESULT)
    may_go.set()
    assert future.result(30) and "stopped" in page.locator(".answers .chip").inner_text()
    assert not page.locator(".problem").is_visible() and tight.llm._num_requests == before + 1
    page.fill("textarea >> nth=0", "---")
    page.wait_for_selector(".run:disabled")


def test_a_chat_and_a_tool_call_can_be_tried(
    server: Running, open_tab: Callable[..., Page]
) -> None:
    """The page shows what the API answers to the same messages."""
    page = open_tab(server)
    page.wait_for_selector(".model option", state="attached")
    page.fill("[name=max_tokens]", "90")
    fields = {"model": MODEL, "max_tokens": 90, "temperature": 0}
    user = {"role": "user", "content": page.evaluate("Watch.examples.chat")[0]}
    turns = [user, {"role": "assistant", "content": "total"}, {"role": "user", "content": "and?"}]
    page.click("[data-example=chat]")
    page.fill("[name=prompts]", "\n---\n".join(turn["content"] for turn in turns))
    run_all(page)
    _, answer = server.post("/v1/chat/completions", fields | {"messages": turns})
    expected = answer["choices"][0]["message"]["content"]
    assert page.locator(".answers .text").all_text_contents() == [expected] != [""]
    page.wait_for_selector(".answers .chip:not([disabled])")
    page.click("[data-example=tool]")
    run_all(page)
    name, arguments = page.inner_text(".answers .text").split(" ", 1)
    assert name == "get_weather" and json.loads(arguments)["city"] in ("Oslo", "Lima", "Nairobi")
    assert "ended: tool_calls" in page.inner_text(".answers .chip")
    page.click("[data-example=one]")
    kept = [page.input_value(f"[name={name}]") for name in ("kind", "schema")]
    assert kept == ["text", ""], "the tool's schema is no one else's"


@pytest.fixture(scope="module")
def with_little() -> Iterator[Running]:
    """A large memory, and the small engine beside it."""
    with running(has_little=True, num_blocks=5000) as found:
        yield found


def test_the_page_invites_and_then_says_where_to_look(
    with_little: Running, open_tab: Callable[..., Page]
) -> None:
    """With little memory, sharing and preemption are seen in the first try; an engine that is idle
    runs nothing."""
    page, room = open_tab(with_little), "4,999 blocks of 16 tokens: room for 79,984 tokens"
    until(page, "Watch.store.films.length === 1")
    page.wait_for_selector(".film-caption .text:has-text('Press “Eight at once”, then “Run”')")
    assert page.inner_text(".head .about") == room in page.inner_text(".pool-about")
    page.check("[name=little]")
    until(page, "Watch.store.films[0].run.num_blocks === 28")
    page.click("[data-example=eight]")
    run_all(page)
    preempted = page.locator(".film-caption .look:has-text('was preempted')")
    wait_for(lambda: "The engine is idle" in page.inner_text(".film-caption .text"))
    assert page.inner_text(".pool-counts").startswith("0 in use")
    assert page.locator(".queue-list .chip").count() == 0
    looks = " ".join(page.locator(".film-caption .look").all_inner_texts())
    assert "found 32 tokens in the cache" in looks and "came back" in looks
    step = int(preempted.inner_text().split()[1].strip(":"))
    preempted.click()
    until(page, f"Watch.store.step === {step}")
    page.wait_for_selector(".words-list:has-text('is preempted')")
    assert with_little.call(lambda engine: engine.stats().num_steps) == 0, "it is not disturbed"
    page.uncheck("[name=little]")
    until(page, "Watch.store.films[0].run.num_blocks === 5000")


def test_input_is_kept_and_checked(tight: Running, open_tab: Callable[..., Page]) -> None:
    """Ctrl+Enter sends; a reload keeps."""
    page, before = open_tab(), tight.llm._num_requests
    write(page, ["1, 2, 3,"])
    page.fill("[name=max_tokens]", "5")
    page.fill("[name=temperature]", "0,5")
    page.press("textarea >> nth=0", "Control+Enter")
    page.wait_for_selector(".problem:has-text('temperature must be a number, got “0,5”')")
    assert tight.llm._num_requests == before
    page.fill("[name=temperature]", "0")
    page.reload()
    page.wait_for_selector(".model option", state="attached")
    names = ("prompts", "max_tokens", "temperature")
    assert [page.input_value(f"[name={name}]") for name in names] == ["1, 2, 3,", "5", "0"]
    page.press("textarea >> nth=0", "Control+Enter")
    wait_for(lambda: "ended: " in page.inner_text(".answers .chip"))


def test_every_text_is_there_in_english_and_chinese() -> None:
    text = "".join((FILES / name).read_text(encoding="utf-8") for name in SCRIPTS)
    sentences = {key: both for key, *both in SAID.findall(text)}
    assert len(sentences) == len(SAID.findall(text)) > 20
    for key, (english, chinese) in sentences.items():
        assert english and not re.search(r"[\u4e00-\u9fff]", english), key
        assert re.search(r"[\u3000-\uffef]", chinese), key
        holes = [set(re.findall(r"\{(\w+)\}", one)) for one in (english, chinese)]
        assert holes[0] == holes[1], key
    assert (
        set(ASKED.findall(text)) <= sentences.keys() | words().keys()
    )  # those of the watch page, too
