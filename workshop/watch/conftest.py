"""The page in a real browser. A test opens it and drives it; an unnoticed error (on the console, an
exception, a look at the network) fails the test in which it happened."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from bounded_loops import as_long_as
from conftest import need
from workshop.watch.chromium import started_browser
from workshop.watch.films import BEYOND, FILMS, Shot, shoot
from workshop.watch.page_maker import Reel, make_page
from workshop.watch.replay.film import Film
from workshop.watch.tests.scene_runs import Pages
from workshop.watch.workloads import Cast, load_cast

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, LocatorAssertions, Page

OpenPage = Callable[..., "Page"]
OpenRun = Callable[..., "RunPage"]
_CHECKS = (Path(__file__).parent / "page_checks.js").read_text(encoding="utf-8").strip()
LIMIT_MS = 30_000  # for anything that a test waits for, on a busy machine
LOCALES = {"en": "en-US", "zh": "zh-CN"}


def until(page: Page, expression: str, argument: Any = None) -> None:
    """Wait until it is true in the page. Playwright's `wait_for_function` polls by `eval`, which
    the page's policy forbids."""
    for _ in as_long_as(lambda: not page.evaluate(expression, argument), seconds=LIMIT_MS / 1000):
        page.wait_for_timeout(20)


def expect(locator: Locator) -> LocatorAssertions:
    """Playwright's `expect`, which waits until it is so: a page draws after what a test waited for.
    Imported late, since playwright is optional."""
    from playwright.sync_api import expect

    expect.set_options(timeout=LIMIT_MS)
    return expect(locator)


class RunPage:
    """A page with a run on it, and how a reader uses it."""

    def __init__(self, page: Page) -> None:
        self.page, self.ask = page, page.evaluate
        page.wait_for_selector("html[data-ready]", state="attached")
        self.settle()

    def settle(self) -> None:
        """Wait until every requested change is drawn."""
        for _ in range(2):
            self.ask("() => new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")

    def check(self, name: str, argument: Any = None) -> Any:
        """Result of a function of `page_checks.js`."""
        return self.ask(f"(argument) => ({_CHECKS})[{name!r}](argument)", argument)

    def press(self, *keys: str) -> None:
        for key in keys:
            self.page.keyboard.press(key)
        self.settle()

    def click(self, selector: str) -> None:
        self.page.click(selector)
        self.settle()

    def show(self, **changes: Any) -> None:
        """As a link or a click would: `show(step=3, request="b")`."""
        self.ask("(changes) => Watch.set(changes)", changes)
        self.settle()

    def text(self, selector: str) -> str:
        """The visible text of the element."""
        return self.page.locator(selector).first.inner_text()

    def texts(self, selector: str) -> list[str]:
        return self.page.locator(selector).all_inner_texts()

    def shown(self, *names: str) -> list[Any]:
        """Of what the page shows: "step", "request", "block"."""
        return self.ask("(names) => names.map((name) => Watch.store[name])", names)


def browser_for_tests() -> Iterator[Browser]:
    """While the browser is open, this thread cannot use asyncio."""
    need("browser")
    with started_browser() as started:
        yield started


browser = pytest.fixture(scope="package")(browser_for_tests)  # one for the tests of this folder


@pytest.fixture(scope="package")
def tab(browser: Browser) -> tuple[Page, list[str]]:
    """A page for all tests, since opening another takes longer; and its errors so far."""
    context = browser.new_context(locale=LOCALES["en"], reduced_motion="reduce", offline=True)
    context.set_default_timeout(LIMIT_MS)
    page, found = context.new_page(), list[str]()
    page.on("console", lambda message: _note_console(message, found))
    page.on("pageerror", lambda error: found.append(f"exception: {error}"))
    page.on("request", lambda request: _note_request(request.url, found))
    return page, found


@pytest.fixture
def open_page(tab: tuple[Page, list[str]]) -> Iterator[OpenPage]:
    """`open_page(path, at="step=3")`: the page of an HTML file, replacing the one before."""
    page, complaints = tab

    def _open(
        path: Path, width: int = 1280, height: int = 800, at: str = "", colours: Any = "light"
    ) -> Page:
        page.goto("about:blank")
        page.set_viewport_size({"width": width, "height": height})
        page.emulate_media(color_scheme=colours)
        page.mouse.move(0, 0)
        page.goto(f"{path.resolve().as_uri()}#{at}" if at else path.resolve().as_uri())
        return page

    yield _open
    page.goto("about:blank")  # what still runs there may complain
    found = [*complaints]
    complaints.clear()
    assert found == []


@pytest.fixture
def open_run(open_page: OpenPage, tmp_path: Path) -> OpenRun:
    """`open_run(text, other)`: the page of one run or of two, each the text of a file of events."""

    def _open(*texts: str, **how: Any) -> RunPage:
        reels = [Reel(label, text) for label, text in zip(("this run", "the other"), texts)]
        path = tmp_path / "run.html"
        path.write_text(make_page(reels), encoding="utf-8", newline="\n")
        return RunPage(open_page(path, **how))

    return _open


def _note_console(message: Any, complaints: list[str]) -> None:
    # As a file, a frame has another origin, and may not take the focus.
    if message.type in ("error", "warning") and "Blocked autofocusing" not in message.text:
        complaints.append(f"console, {message.type}: {message.text}")


def _note_request(url: str, complaints: list[str]) -> None:
    if not url.startswith(("file:", "data:", "blob:")):
        complaints.append(f"request: {url}")


@pytest.fixture(scope="session")
def cast() -> Cast:
    """The objects that recorded runs are made with."""
    return load_cast()


@pytest.fixture(scope="session")
def default_film(shown: Pages) -> Film:
    """The small run that `make watch` shows: a real engine, and a little of everything."""
    return shown["everything"].film


@pytest.fixture(scope="session")
def default_run_text(shown: Pages) -> str:
    return shown["everything"].page.with_suffix(".jsonl").read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def shown(tmp_path_factory: pytest.TempPathFactory, cast: Cast) -> Pages:
    """The pages of `scene_runs.py`."""
    return Pages(tmp_path_factory.mktemp("shown"), cast)


@pytest.fixture(scope="session")
def shots(tmp_path_factory: pytest.TempPathFactory, cast: Cast) -> dict[int | str, Shot]:
    """Each film that has a page, made once."""
    folder = tmp_path_factory.mktemp("films")
    return {name: shoot(film, folder, cast) for name, film in (FILMS | BEYOND).items()}
