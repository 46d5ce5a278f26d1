"""A chapter's film in the browser: its caption, buttons and questions, alone and in the book."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from workshop.watch.conftest import OpenPage, RunPage, until
from workshop.watch.films import BEYOND, FILMS, Shot, page_of
from workshop.watch.watch_command import main

Name = int | str
Opened = Callable[..., RunPage]
ALL = pytest.mark.parametrize("name", FILMS | BEYOND)


@pytest.fixture
def opened(open_page: OpenPage, shots: dict[Name, Shot], tmp_path: Path) -> Opened:
    def opened(name: Name, at: str = "") -> RunPage:
        path = tmp_path / f"film_{name}.html"
        path.write_text(page_of(shots[name]), encoding="utf-8")
        return RunPage(open_page(path, at=at))

    return opened


@ALL
def test_a_film_opens_at_its_first_moment_and_its_buttons_lead_to_all(
    name: Name, opened: Opened, shots: dict[Name, Shot]
) -> None:
    """In both languages, all of it on a screen of 1280 x 800."""
    shot, run = shots[name], opened(name)
    assert run.shown("step") == [shot.film.moments[0].step]
    assert run.text(".film-caption .text") == shot.caption[0]
    assert shot.film.title[0] in run.page.title()
    assert run.ask("document.documentElement.scrollHeight") <= 800
    run.press("End")
    for number, moment in enumerate(shot.film.moments):
        button = run.page.locator(".film-caption .look").nth(number)
        button.click()
        run.settle()
        assert run.shown("step", "request") == [moment.step, moment.request]
        pressed = run.texts(".film-caption .look[aria-pressed=true]")
        assert pressed == [button.inner_text()] and moment.words[0] in pressed[0]
    run.show(language="zh")
    assert run.text(".film-caption .text") == shot.caption[1]
    assert shot.film.title[1] in run.page.title() == run.text("h1")
    assert shot.film.moments[0].words[1] in run.text(".film-caption button")


SAID = [  # film, where, selector, and what it says there
    ("adapters", "step=6&request=d", ".queue-list", "adapter half"),
    ("adapters", "step=6&request=d", ".tokens-row", "outputs 0 · adapter half"),
    ("adapters", "step=2&lang=zh", ".words-list", "附带：适配器 half"),
    ("grammars", "step=2&request=b", ".queue-list", "grammar json · grammar compiling"),
    ("windows", "step=6&request=c", ".words-list", "finds blocks 8, 11–12 in group 1"),
    ("windows", "step=6&request=c", ".pool-table", "group 1, window 10\t–\t–\t–\t8\t11\t12"),
    ("windows", "step=2&block=3", ".pool-about", "positions 0–3 · group 1, window 10"),
    (4, "lang=zh", "output.now", "6"),  # an address that names no step opens at the first moment
]


def test_what_a_request_brings_and_each_group_of_layers_are_said(opened: Opened) -> None:
    for name, at, selector, words in SAID:
        assert words in "\n".join(opened(name, at).texts(selector)), (name, at, selector)


LAST_PAINTED = """() => { const seen = new Set(); const {cellOf} = Watch;
    Watch.cellOf = (film, id, step) => { seen.add(step); return cellOf(film, id, step); };
    Watch.redraw();
    return new Promise((done) => requestAnimationFrame(() => setTimeout(() => {
        Watch.cellOf = cellOf; done(Math.max(...seen)); }))); }"""


@pytest.mark.parametrize(("chapter", "given"), [(4, "a"), (3, 6)])
def test_it_asks_before_the_decisive_step_and_tells_what_happened(
    chapter: int, given: int | str, opened: Opened, shots: dict[Name, Shot]
) -> None:
    shot, run = shots[chapter], opened(chapter)
    moment = shot.film.moments[0]
    run.click(".film-caption .ask")
    run.page.wait_for_selector(".film-caption .look", state="hidden")
    assert run.text(".film-caption .text") == moment.ask[0]
    assert run.shown("step") == [moment.step - 1]
    assert run.ask(LAST_PAINTED) == moment.step - 1, "what comes next can be seen"
    kind, right = moment.answer or ("", "")
    run.show(**{kind: given})
    text = run.text(".film-caption .text")
    assert text.startswith("Right, it is " if given == right else "It is ") and str(right) in text
    assert moment.why[0] in text and run.shown("step") == [moment.step]


# -- in a page of the book

# The site's frame around a film that asks.
CHAPTER = """<body style="margin: 0; height: 3000px"><iframe src="film.html#ask"
width="736" height="544" style="border: 0"></iframe>"""
SHOW = """async (language) => {
    Watch.set({language});
    for (let i = 0; i < 3; i++) {
        await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
    }
}"""
BOXES = """(part) => [...document.querySelectorAll(part)].map((one) => one.getBoundingClientRect())
    .map(({left, right, top, bottom}) => [left, right, top, bottom])"""


@ALL
def test_in_the_book_a_question_and_what_to_point_at_are_in_sight_together(
    name: Name, open_page: OpenPage, shots: dict[Name, Shot], tmp_path: Path
) -> None:
    moment = next(moment for moment in shots[name].film.moments if moment.answer)
    kind, _ = moment.answer or ("", "")
    of_blocks = ".scene-cache .cache-scroll" if name == 3 else ".scene-pool .pool-cells"
    place = ".scene-grid .root:last-child .grid-box" if kind == "request" else of_blocks
    (tmp_path / "film.html").write_text(page_of(shots[name]), encoding="utf-8")
    (tmp_path / "chapter.html").write_text(CHAPTER, encoding="utf-8")
    page = open_page(tmp_path / "chapter.html", 800, 600)
    frame = page.frames[1]
    until(frame, "document.querySelector('[data-ready] .asking') !== null")
    for number, (width, language) in enumerate(((736, "en"), (358, "zh"))):
        page.locator("iframe").evaluate(
            "(one, width) => { one.style.width = width; }", f"{width}px"
        )
        frame.evaluate(SHOW, language)
        assert frame.inner_text(".film-caption .text") == moment.ask[number]
        above = 0.0
        for part in (".transport", ".film-caption", place):
            for left, right, top, bottom in frame.evaluate(BOXES, part):
                assert above - 1 <= top and bottom <= 544 and left >= 0 and right <= width, part
                above = bottom
        assert frame.evaluate("document.documentElement.scrollWidth") <= width
    frame.click("text=直接看")
    frame.click(".film-caption .ask")
    assert frame.evaluate("scrollY") == page.evaluate("scrollY") == 0


# -- `make watch`

# The film and that of another setting, in the step before the one shown, and in that.
ARE_ALIKE = """() => [-1, 0].map((more) => {
    const [one, other] = [window.own, Watch.store.films[0]].map((film) => {
        const {tables, running, waiting, outputs} = film.stateAfter(Watch.store.step + more);
        return JSON.stringify([tables, running, waiting, outputs]);
    });
    return one === other;
})"""


def test_make_watch_opens_one_idea_and_all_else_is_one_click_away(
    tmp_path: Path, open_page: OpenPage, shots: dict[Name, Shot]
) -> None:
    """Another setting is shown at the first step that differs; any other run has no caption."""
    assert main(["--out", str(tmp_path / "watch.html")]) == 0
    run = RunPage(open_page(tmp_path / "watch.html"))
    assert run.page.title().startswith("Chapter 4: memory runs out")
    setting = run.page.get_by_label("Change one setting")
    own, *labels = setting.locator("option").all_inner_texts()
    run.ask("() => { [window.own] = Watch.store.films; }")
    for label in labels:
        setting.select_option(label)
        run.settle()
        assert run.ask(ARE_ALIKE) == [True, False], label
        assert f"{label}:" in run.text(".head .about")
        assert shots[4].caption[0] != run.text(".film-caption .text")
        assert run.page.locator(".film-caption .look").count() > 0
        setting.select_option(own)
        run.settle()
        assert shots[4].caption[0] == run.text(".film-caption .text")
    run.page.set_input_files("input[type=file]", shots[2].paths[0])
    until(run.page, "Watch.store.films[0].run.num_blocks === 15")
    run.page.wait_for_selector(".film-caption", state="hidden")
    run.page.goto("about:blank")
    run = RunPage(open_page(tmp_path / "watch.html"))
    run.page.click("a:has-text('Everything in one run')")
    until(run.page, "document.documentElement.dataset.ready && Watch.requestIds().length > 4")
    assert run.page.locator("section.scene:visible").count() == 6
    run.page.click("a:has-text('Chapter 4')")
    until(run.page, "document.documentElement.dataset.ready && Watch.requestIds().length === 4")
