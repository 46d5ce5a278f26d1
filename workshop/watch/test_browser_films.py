"""A chapter's film in the browser: its caption, and the buttons that lead to where to look."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from common.events.frames import eviction_order
from workshop.watch.conftest import until
from workshop.watch.films import BEYOND, FILMS, Shot, page_of
from workshop.watch.page_maker import Reel, make_page
from workshop.watch.replay.film import Film
from workshop.watch.scene_runs import go
from workshop.watch.sentence_needs import TOLD, unproven
from workshop.watch.watch_command import main

if TYPE_CHECKING:
    from playwright.sync_api import Frame, Page

CHAPTERS = pytest.mark.parametrize("chapter", FILMS)
ALL = pytest.mark.parametrize("name", FILMS | BEYOND)
Opened = Callable[..., "Page"]


@pytest.fixture
def opened(open_page: Any, shots: dict[int | str, Shot], tmp_path: Path) -> Opened:
    def opened(name: int | str, at: str = "", language: str = "en") -> Page:
        path = tmp_path / f"film_{name}.html"
        path.write_text(page_of(shots[name]), encoding="utf-8")
        page = open_page(path, at=at, language=language)
        page.wait_for_selector("html[data-ready]", state="attached")
        page.wait_for_selector(".film-caption .text")
        return page

    return opened


@ALL
def test_a_film_opens_at_its_first_moment_and_its_buttons_lead_to_all(
    name: int | str, opened: Opened, shots: dict[int | str, Shot]
) -> None:
    """With its caption, in both languages; all of it is on a screen of 1280 x 800. (Two films side
    by side scroll.)"""
    shot, page = shots[name], opened(name)
    assert page.evaluate("Watch.store.step") == shot.step(shot.film.moments[0])
    assert page.inner_text(".film-caption .text") == shot.caption[0]
    chapter = f"Chapter {name}: " if shot.film.chapter else ""
    assert page.title() == chapter + shot.film.title[0]
    assert page.is_visible(".film-caption .note") == bool(shot.film.note[0])
    assert page.evaluate("document.documentElement.scrollHeight") <= 800
    caption = page.locator(".film-caption").bounding_box()
    assert caption is not None and caption["height"] < 120
    buttons = page.locator(".film-caption .look")
    assert buttons.count() == len(shot.film.moments)
    page.keyboard.press("End")
    for number, moment in enumerate(shot.film.moments):
        buttons.nth(number).click()
        is_pressed = "n => document.querySelectorAll('.film-caption .look')[n].ariaPressed"
        until(page, f"{is_pressed} === 'true'", number)
        request = None if moment.request is None else shot.facts[moment.request]
        there = page.evaluate("[Watch.store.step, Watch.store.request]")
        assert there == [shot.step(moment), request]
        pressed = page.locator(".film-caption .look[aria-pressed=true]")
        assert pressed.all_inner_texts() == [buttons.nth(number).inner_text()]
        assert shot.say(moment.words)[0] in buttons.nth(number).inner_text()
    go(page, language="zh")
    assert page.inner_text(".film-caption .text") == shot.caption[1]
    assert page.title() == page.inner_text("h1") and shot.film.title[1] in page.title()
    assert shot.say(shot.film.moments[0].words)[1] in page.inner_text(".film-caption button")


def test_what_a_request_brings_is_said_wherever_it_is_named(opened: Opened) -> None:
    page = opened("adapters", at="step=6&request=d")
    assert page.evaluate("[...'abd'].map(Watch.tagOf)") == ["", "tests", "half"]
    text = page.evaluate("Watch.cellWords(Watch.store.films[0], 'd', 6)")
    assert text.startswith("d (half), step 6: waits: no slot is free for its adapter")
    chips = page.locator(".queue-list .chip")
    words = {words.split()[0]: words for words in chips.all_inner_texts()}
    assert "adapter half" in words["d"] and "adapter tests" in words["b"]
    assert "adapter" not in words["a"]
    assert "outputs 0 · adapter half" in page.inner_text(".tokens-row")
    assert unproven(page.evaluate(TOLD)) == []
    go(page, step=2, language="zh")
    assert "附带：适配器 half" in page.inner_text(".words-list")
    page = opened("grammars", at="step=2&request=b")
    assert "is skipped: its grammar is being compiled" in page.inner_text(".words-list")
    assert "grammar json · grammar compiling" in page.inner_text(".queue-list")


def test_a_request_has_a_table_for_each_group_of_layers(
    opened: Opened, shots: dict[int | str, Shot]
) -> None:
    (film,) = map(Film.read, shots["windows"].paths)
    page = opened("windows", at="step=6&request=c")
    rows = page.locator(".pool-table tr")
    for name, step in (("c", 6), ("a", 6), ("a", 11), ("b", 17)):
        go(page, step=step, request=name)
        by_group = film.state_after(step)["tables"].get(name, {"0": [], "1": []})
        tables = [by_group["0"], by_group["1"]]
        for row, words, table in zip((1, 2), ("0, sees all", "1, window 10"), tables):
            if table:
                shown = [str(block or "–") for block in table]
                assert rows.nth(row).locator("td").all_inner_texts() == shown
                assert rows.nth(row).locator("th").inner_text() == f"group {words}"
        lit = page.locator(".pool-cell.is-lit").evaluate_all(
            "cells => cells.map((cell) => Number(cell.dataset.block))"
        )
        assert sorted(lit) == sorted(block for table in tables for block in table if block)
    go(page, step=6, request="c")
    found = [rows.nth(row).locator("td.is-found").all_inner_texts() for row in (1, 2)]
    assert found == [["1", "2", "5", "6", "9", "10"], ["8", "11", "12"]]
    label = page.locator(".pool-cell[data-block='8'] .pool-label").inner_text()
    assert label == "3₁"
    state = film.state_after(6)
    idle, free = len(eviction_order(state, is_grouped=True)), len(state["free"])
    counts = f"{39 - free} in use · {idle} cached, unused · {free - idle} free · of 39"
    assert page.inner_text(".pool-counts") == counts
    boxes = page.locator(".cache-box.is-windowed:not(.is-gone)").evaluate_all(
        "boxes => boxes.map((box) => Number(box.dataset.blocks))"
    )
    there = {int(block) for block, row in state["cached"].items() if row["group"] == 1}
    assert set(boxes) <= there and {8, 11, 12} <= set(boxes)
    text = page.inner_text(".words-list")
    assert "finds blocks 8, 11–12 in group 1" in text
    assert unproven(page.evaluate(TOLD)) == []
    assert page.evaluate("Watch.store.films[0].contradiction") is None
    go(page, step=2, request="a", block=3)
    about = page.inner_text(".pool-about")
    assert "cached, and no request uses it · positions 0–3 · group 1, window 10" in about


@pytest.mark.parametrize(("chapter", "given"), [(4, "a"), (3, 6)])
def test_it_asks_before_the_decisive_step_and_tells_what_happened(
    chapter: int, given: int | str, opened: Opened, shots: dict[int | str, Shot]
) -> None:
    shot, page = shots[chapter], opened(chapter)
    moment = shot.film.moments[0]
    page.click(".film-caption .ask")
    page.wait_for_selector(".film-caption .look", state="hidden")
    assert page.inner_text(".film-caption .text") == shot.say(moment.ask)[0]
    assert page.evaluate("Watch.store.step") == shot.step(moment) - 1
    painted = page.evaluate(
        """() => { const seen = new Set(); const {cellOf} = Watch;
            Watch.cellOf = (film, id, step) => { seen.add(step); return cellOf(film, id, step); };
            Watch.redraw();
            return new Promise((done) => requestAnimationFrame(() => setTimeout(() => {
                Watch.cellOf = cellOf; done(Math.max(...seen)); }))); }"""
    )
    assert painted == shot.step(moment) - 1, "what comes next can be seen"
    kind, right = shot.answer(moment) or ("", "")
    page.evaluate("(changes) => Watch.set(changes)", {kind: given})
    page.wait_for_selector(".film-caption .look", state="visible")
    text = page.inner_text(".film-caption .text")
    assert text.startswith("Right, it is " if given == right else "It is ") and str(right) in text
    assert shot.say(moment.why)[0] in text, "and why"
    assert not re.search(r"\. [a-z]", text)
    assert page.evaluate("Watch.store.step") == shot.step(moment)


# -- in a page of the book


@pytest.fixture
def embedded(
    open_page: Any, shots: dict[int | str, Shot], tmp_path: Path, complaints: list[str]
) -> Iterator[Callable[..., tuple[Page, Frame]]]:
    """The site's frame around a film that asks, and the film in it."""

    def embedded(name: int | str, width: int = 736, language: str = "en") -> tuple[Page, Frame]:
        (tmp_path / "film.html").write_text(page_of(shots[name]), encoding="utf-8")
        path = tmp_path / "chapter.html"
        path.write_text(
            f"""<body style="margin: 0; height: 3000px"><iframe src="film.html#lang={language}&ask"
            style="width: {width}px; height: 544px; border: 0"></iframe>""",
            encoding="utf-8",
        )
        page = open_page(path, 800, 600)
        frame = page.frames[1]
        until(frame, "document.documentElement.dataset.ready === 'true'")
        until(frame, "document.querySelector('.asking') !== null")
        return page, frame

    yield embedded
    # The frame was requested; as a file, it has another origin, and may not take the focus.
    expected = ("film.html", "Blocked autofocusing")
    complaints[:] = [x for x in complaints if not any(part in x for part in expected)]


def drawn(frame: Frame) -> None:
    for _ in range(3):
        frame.evaluate("() => new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")


@ALL
@pytest.mark.parametrize("width", [736, 358])
def test_in_the_book_a_question_and_what_to_point_at_are_in_sight_together(
    name: int | str, width: int, embedded: Any, shots: dict[int | str, Shot]
) -> None:
    page, frame = embedded(name, width)
    moment = next(moment for moment in shots[name].film.moments if moment.answer)
    kind, _ = shots[name].answer(moment) or ("", "")
    for language in (0, 1):
        frame.evaluate("(language) => Watch.set({language})", ["en", "zh"][language])
        drawn(frame)
        assert frame.inner_text(".film-caption .text") == shots[name].say(moment.ask)[language]
        place = ".scene-grid .root:last-child .grid-box" if kind == "request" else (
            ".scene-cache .cache-scroll" if name == 3 else ".scene-pool .pool-cells"
        )  # fmt: skip
        top = 0.0
        for part in (".transport", ".film-caption", place):
            for box in frame.evaluate(BOXES, part):
                assert box["top"] >= top - 1 and box["bottom"] <= 544, part
                assert box["left"] >= 0 and box["right"] <= width, part
            top = box["bottom"]
        assert frame.evaluate("document.documentElement.scrollWidth") <= width
    frame.evaluate("scrollTo(0, 300)")
    drawn(frame)
    (box,) = frame.evaluate(BOXES, ".film-caption")
    assert 0 <= box["top"] < 60, "it stays when the reader scrolls"
    frame.click("text=直接看")
    frame.click(".film-caption .ask")
    drawn(frame)
    assert frame.evaluate("scrollY") == page.evaluate("scrollY") == 0


BOXES = """(part) => [...document.querySelectorAll(part)].map((one) => one.getBoundingClientRect())
    .map(({left, right, top, bottom}) => ({left, right, top, bottom}))"""


@pytest.mark.parametrize(
    ("name", "other", "hint"),
    [(2, {"request": "a", "step": 3}, "a block"), (4, {"block": 3}, "a request")],
)
def test_a_question_stays_when_something_of_another_kind_is_pointed_at(
    name: int, other: dict[str, Any], hint: str, embedded: Any, shots: dict[int | str, Shot]
) -> None:
    _, frame = embedded(name)
    step = frame.evaluate("Watch.store.step")
    question = frame.inner_text(".film-caption .text")
    frame.evaluate("(changes) => Watch.set(changes)", other)
    drawn(frame)
    assert frame.inner_text(".film-caption .text") == f"Point at {hint}. {question}"
    assert frame.evaluate("[Watch.store.step, Watch.store.request, Watch.store.block]") == [
        *(step, None, None)
    ]
    moment = next(moment for moment in shots[name].film.moments if moment.answer)
    kind, right = shots[name].answer(moment) or ("", "")
    frame.evaluate("(changes) => Watch.set(changes)", {kind: right})
    drawn(frame)
    assert frame.inner_text(".film-caption .text").startswith("Right, it is")


def test_what_a_cell_says_goes_with_the_step(embedded: Any) -> None:
    page, frame = embedded(4)

    def point() -> tuple[float, float]:
        (box,) = frame.evaluate(BOXES, ".grid-box")
        place = box["left"] + 80, box["top"] + 30
        page.mouse.move(*place)
        until(frame, "!document.querySelector('.grid-tip').hidden")
        return place

    page.mouse.click(*point())  # an answer
    until(frame, "!Watch.isAsking()")
    drawn(frame)
    assert frame.is_hidden(".grid-tip")
    point()
    page.keyboard.press("ArrowRight")
    drawn(frame)
    assert frame.is_hidden(".grid-tip")


def test_in_the_step_that_preempted_and_no_other_that_is_why_nobody_is_admitted(
    opened: Opened, shots: dict[int | str, Shot]
) -> None:
    step, page = shots[4].step(shots[4].film.moments[0]), opened(4)
    rule = "none is admitted, 1 waiting: a step that preempts admits none"
    assert rule in page.inner_text(".words-list")
    assert "d\npreemption" in page.inner_text(".queue-lists")
    go(page, step=step + 1)
    assert rule not in page.inner_text(".words-list")
    assert "d\nno blocks" in page.inner_text(".queue-lists")
    assert "admission stops at d: too few KV blocks were free" in page.inner_text(".words-list")


# -- `make watch`


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its page."""
    path = tmp_path_factory.mktemp("watched") / "watch.html"
    assert main(["--out", str(path)]) == 0
    return path


def test_make_watch_opens_one_idea_and_everything_is_one_click_away(
    watched: Path, open_page: Any, complaints: list[str]
) -> None:
    page = open_page(watched)
    title = page.locator("h1")
    until(page, "document.title.startsWith('Chapter 4: memory runs out')")
    assert "is preempted" in page.inner_text(".film-caption .text")
    page.click("a:has-text('Everything in one run')")
    until(
        page, "document.documentElement.dataset.ready && Watch.store.films[0].requests.length > 4"
    )
    assert page.locator("section.scene:visible").count() == 6
    page.click("a:has-text('Chapter 4')")
    until(
        page, "document.documentElement.dataset.ready && Watch.store.films[0].requests.length === 4"
    )
    assert title.inner_text().startswith("Chapter 4")
    complaints.clear()  # another page was asked for: that one


def test_the_whole_cache_is_in_sight_where_the_page_says_to_look(
    watched: Path, open_page: Any
) -> None:
    page = open_page(watched.with_name("watch_everything.html"), 1440, 900)
    page.wait_for_selector(".film-caption .look")
    inside = """() => {
        const frame = document.querySelector(".cache-scroll").getBoundingClientRect();
        return [...document.querySelectorAll(".cache-box")].filter((box) => {
            const {left, right, top, bottom} = box.getBoundingClientRect();
            return left >= frame.left && right <= frame.right && top >= frame.top
                && bottom <= frame.bottom;
        }).map((box) => [box.querySelector(".cache-name").innerText,
            box.scrollWidth <= box.clientWidth, box.classList.contains("is-gone")]);
    }"""
    for look in page.locator(".film-caption .look").all():
        look.click()
        go(page)
        boxes = page.evaluate(inside)
        num_cached = int(re.findall(r"\d+", page.inner_text(".cache-about"))[0])
        assert len([name for name, _, has_exited in boxes if not has_exited]) == num_cached > 0
        assert [name for name, is_whole, _ in boxes if not is_whole] == []
        if "evicted block" in (did := page.inner_text(".cache-details")):
            exited = [name for name, _, has_exited in boxes if has_exited]
            assert exited == re.findall(r"\d+", did.partition("evicted block")[2].splitlines()[0])


# The film and that of another setting, in the step before the one shown, and in that.
ARE_ALIKE = """() => [-1, 0].map((more) => {
    const [one, other] = [window.own, Watch.store.films[0]].map((film) => {
        const {tables, running, waiting, outputs} = film.stateAfter(Watch.store.step + more);
        return JSON.stringify([tables, running, waiting, outputs]);
    });
    return one === other;
})"""


def test_another_setting_has_a_name_its_own_number_and_its_own_places_to_look(
    watched: Path, open_page: Any, shots: dict[int | str, Shot]
) -> None:
    page = open_page(watched, language="en")
    page.wait_for_selector(".film-caption .text")
    setting = page.get_by_label("Change one setting")
    labels = setting.locator("option").all_inner_texts()
    assert len(labels) == 4
    step = page.evaluate("[window.own] = Watch.store.films, Watch.store.step")
    for label in [*labels[1:], labels[0]]:
        before = page.evaluate("Watch.store.step")
        setting.select_option(label)
        go(page)
        if label == labels[0]:
            assert page.evaluate("Watch.store.step") == before
        else:
            assert page.evaluate(ARE_ALIKE) == [True, False], "the first step that differs"
        is_told = label == labels[0]
        assert is_told == (shots[4].caption[0] == page.inner_text(".film-caption .text"))
        assert is_told or f"{label}:" in page.inner_text(".head .about"), "it is not one less"
        buttons = page.locator(".film-caption .look")
        assert buttons.count() > 0 and page.get_by_text("Look at").is_visible()
        for number, text in enumerate(buttons.all_inner_texts()):
            buttons.nth(number).click()
            go(page)
            found = re.match(r"Step (\d+): (\w+) (was preempted|came back|begins|ended)", text)
            assert is_told or found, text
            if found:
                assert page.inner_text("output.now").startswith(f"step {found[1]} of")
                group = page.inner_text(f".words-group[data-group='{found[2]}']")
                phrases = {"was preempted": "is preempted", "came back": "returns"}
                phrases |= {"begins": "is admitted", "ended": "ends"}
                assert phrases[found[3]] in group
        page.evaluate(f"Watch.set({{step: {step}, request: null}})")


@pytest.mark.parametrize(("address", "step"), [("lang=zh", None), ("step=2&lang=zh", 2)])
def test_an_address_opens_at_the_first_moment_unless_it_names_a_step(
    address: str, step: int | None, opened: Opened, shots: dict[int | str, Shot]
) -> None:
    shot, page = shots[4], opened(4, at=address)
    first = shot.step(shot.film.moments[0])
    assert page.inner_text(".film-caption .text") == shot.caption[1]
    assert page.evaluate("Watch.store.step") == (first if step is None else step)
    assert first not in (0, step)


def test_another_run_takes_the_caption_away(
    opened: Opened, shots: dict[int | str, Shot], tmp_path: Path
) -> None:
    page = opened(4)
    page.set_input_files("input[type=file]", shots[2].paths[0])
    until(page, "Watch.store.films[0].run.num_blocks === 15")
    page.wait_for_selector(".film-caption", state="hidden")


def test_a_run_that_is_no_film_has_no_caption(
    open_page: Any, shots: dict[int | str, Shot], tmp_path: Path
) -> None:
    path = tmp_path / "run.html"
    text = shots[2].paths[0].read_text(encoding="utf-8")
    path.write_text(make_page([Reel("run", text)]), encoding="utf-8")
    page = open_page(path)
    page.wait_for_selector("html[data-ready]", state="attached")
    assert page.locator(".film-caption").count() == 0
