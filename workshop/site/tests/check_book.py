"""Tests of the built site, in a browser: `make book ARGS=--check`. Not collected by `make test`,
because the site has to be built first, and not of what `make lint` installs.

Every page is opened once, served on this machine, with all other hosts out of reach."""

# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from functools import partial
from html import unescape
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urljoin, urlsplit

import pytest

from workshop.site.make_book import OUT
from workshop.site.page_tree import LANGUAGES

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Request

PAGES = sorted(str(page.relative_to(OUT)) for page in OUT.glob("??/**/*.html"))
# Pages of which one has to be first or second, and the words that a reader looks for.
SEARCHES = [
    ("04_scheduler/", "preemption", "抢占"),
    ("03_prefix_cache/", "prefix cache", "前缀缓存"),
    ("02_paged_kv/", "block table", "块表"),
    ("01_batching/", "continuous batching", "连续批处理"),
    ("INCIDENTS|workshop/measure/bench/", "why slow", "为什么慢"),
    ("06_chunked_prefill/|04_scheduler/beyond/PREFILL_FIRST", "prefill", "预填充"),
    ("03_prefix_cache/", "radix", "radix"),
]


ADDRESS = re.compile(r'<[^>]* (?:href|src)="([^"]+)"')
ANCHOR = re.compile(r'<[^>]* id="([^"]+)"')


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(OUT)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Opens a page that sees no host but this one; the test fails if it asks for another."""
    contexts, urls = [], []

    def is_elsewhere(request: Request) -> bool:
        parts = urlsplit(request.url)
        return parts.scheme in ("http", "https") and parts.hostname != "127.0.0.1"

    def open_page(url: str, width: int = 1400, height: int = 1000, **options: Any) -> Page:
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        contexts.append(context)
        context.route("**/*", lambda r: r.abort() if is_elsewhere(r.request) else r.continue_())
        context.on("request", lambda r: urls.append(r.url) if is_elsewhere(r) else None)
        page = context.new_page()
        page.goto(url)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not urls


def test_every_link_leads_to_a_page_and_an_anchor() -> None:
    texts = {OUT / name: (OUT / name).read_text(encoding="utf-8") for name in PAGES}
    anchors = {page: {*map(unescape, ANCHOR.findall(text))} for page, text in texts.items()}
    for name in PAGES:
        for target in map(unescape, ADDRESS.findall(texts[OUT / name])):
            parts = urlsplit(urljoin(f"/{name}", target))
            found, anchor = OUT / unquote(parts.path).lstrip("/"), unquote(parts.fragment)
            is_ours = not (parts.netloc or parts.scheme)
            assert not is_ours or found.is_file(), f"{name}: {target}"
            if is_ours and anchor and found in anchors:
                assert anchor in anchors[found], f"{name}: {target}, no such anchor"


def test_every_page_exists_in_both_languages() -> None:
    first, second = ({p.partition("/")[2] for p in PAGES if p.startswith(x)} for x in LANGUAGES)
    assert first == second and len(first) >= 48


def test_no_page_asks_for_another_host_or_is_wider_than_a_telephone(
    address: str, open_page: Callable[..., Page]
) -> None:
    page = open_page(f"{address}en/index.html", width=390, height=800)
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    too_wide = []
    for name in PAGES:
        page.goto(address + name)
        width = page.evaluate(
            "() => Math.max(...[document.scrollingElement, document.querySelector('article')]"
            ".map((one) => one.scrollWidth - one.clientWidth))"
        )
        if width > 8:  # of the theme's own margin
            too_wide.append(f"{name}: {width}")
    assert not errors
    assert not too_wide, "\n".join(too_wide)


@pytest.mark.parametrize("row", SEARCHES, ids=lambda row: row[1])
@pytest.mark.parametrize("language", ["en", "zh"])
def test_search_finds_the_page(
    language: str, row: tuple[str, str, str], address: str, open_page: Callable[..., Page]
) -> None:
    page = open_page(f"{address}{language}/index.html")
    page.fill("#book-search input", row[1] if language == "en" else row[2])
    link = page.locator("#book-search .pagefind-ui__result-inner > .pagefind-ui__result-title a")
    link.first.wait_for()
    page.locator("#book-search .pagefind-ui__loading").first.wait_for(state="detached")
    found = [urlsplit(a).path for a in link.evaluate_all("(all) => all.map((a) => a.href)")][:2]
    assert any(re.match(f"/{language}/({row[0]})", path) for path in found), found
    titles = page.locator("#book-search .pagefind-ui__result-link").all_inner_texts()
    assert not {"#", "¶"} & set("".join(titles))


def test_a_ticket_is_found_in_the_list_at_the_top(
    address: str, open_page: Callable[..., Page]
) -> None:
    for language, words in (("en", "Ticket 7"), ("zh", "工单 7")):
        page = open_page(f"{address}{language}/INCIDENTS.html")
        page.locator("ol.tickets a").nth(6).click()
        assert page.evaluate("document.querySelector(':target').textContent").startswith(words)


def test_the_language_link_leads_to_the_same_page_and_section(
    address: str, open_page: Callable[..., Page]
) -> None:
    page = open_page(f"{address}en/04_scheduler/beyond/PREFILL_FIRST.html")
    page.click("a.language")
    assert page.url == f"{address}zh/04_scheduler/beyond/PREFILL_FIRST.html"
    page = open_page(f"{address}en/04_scheduler/beyond/PREFILL_FIRST.html#which-batch")
    page.locator(".toc-tree .scroll-current a[href='#which-batch']").wait_for()  # scrolled there
    page.click("a.language")
    page.wait_for_url("**/zh/**")
    assert page.evaluate("document.querySelector(':target').innerText") == "3. 选哪个批"


def test_a_film_asks_inside_its_chapter_and_the_home_page_shows_the_preemption(
    address: str, open_page: Callable[..., Page]
) -> None:
    for language, words in (("en", "Point at"), ("zh", "指出")):
        page = open_page(f"{address}{language}/04_scheduler/index.html")
        page.locator("figure.film iframe").scroll_into_view_if_needed()
        film = page.frame_locator("figure.film iframe")
        film.locator("html[data-ready]").wait_for(state="attached")
        film.get_by_text(words).first.wait_for()
        home = open_page(f"{address}{language}/index.html")
        film = home.frame_locator("figure.film iframe")
        film.locator("html[data-ready]").wait_for(state="attached")
        film.locator("output.now", has_text=re.compile(r"\b6\b|第 6 步")).wait_for()
