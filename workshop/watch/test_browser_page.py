"""The page as a reader uses it: keys, scrubber, links, pointer, files, two runs, large runs."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from common.engine import LLMEngine
from common.engine_config import EngineConfig
from request import SamplingParams
from workshop.measure.bench.random_weights import random_model, shape_of
from workshop.watch.conftest import OpenPage, OpenRun, RunPage, expect, until
from workshop.watch.replay.film import Film
from workshop.watch.tests.scene_runs import Pages, shown_run

OpenDefault = Callable[..., RunPage]


@pytest.fixture
def open_default(open_page: OpenPage, shown: Pages) -> OpenDefault:
    return lambda **how: RunPage(open_page(shown["everything"].page, **how))


@pytest.fixture
def film(default_film: Film) -> Film:
    return default_film


def first_steps(film: Film, num_steps: int) -> str:
    """The run, cut after `num_steps` steps."""
    ends = [n for n, line in enumerate(film.lines, 1) if line["at"] in ("result", "failed")]
    kept = film.lines[: ends[num_steps - 1]] if num_steps else []
    return "".join(f"{json.dumps(line)}\n" for line in [vars(film.run), *kept])


def test_keys_walk_through_steps_requests_blocks_and_boxes(
    open_default: OpenDefault, film: Film
) -> None:
    run, last = open_default(), film.num_steps - 1
    forth, back = "ArrowRight", "ArrowLeft"
    walks = [([back], 0), ([forth, forth, forth, back], 2), (["End", forth], last), (["Home"], 0)]
    for keys, step in walks:
        run.press(*keys)
        assert run.text("output.now") == f"step {step} of {last}"
    jumps = [0]
    for _ in range(film.num_steps):
        run.press("]")
        jumps += run.shown("step")
    jumps = sorted(set(jumps))
    preempted = {s.number for s in film.steps() if any(what["preempted"] for what in s.happened)}
    assert preempted <= set(jumps) and len(jumps) < film.num_steps
    run.press("[")
    assert run.shown("step") == [jumps[-2]]

    run.show(step=20, request=None)
    for panel, keys, shown in (  # a panel's keys step nothing
        (".grid-box", ["ArrowDown", "ArrowDown"], ["b", None]),
        (".grid-box", ["Escape"], [None, None]),
        (".pool-cells", [forth, "Home", forth, forth], [None, 2]),
        (".pool-cells", ["End", forth], [None, film.run.num_blocks - 1]),
        (".pool-cells", ["Escape"], [None, None]),
    ):
        run.page.focus(panel)
        run.press(*keys)
        assert run.shown("request", "block", "step") == [*shown, 20], (panel, keys)
    cached = film.state_after(20)["cached"]
    run.page.focus(".cache-scroll")
    run.press(forth)
    for _ in range(3):
        (at,) = run.shown("block")
        run.press(forth)
        (now,) = run.shown("block")
        assert now == at or cached[str(now)].get("parent") == at
    run.press(*[back] * 5)
    (root,) = run.shown("block")
    assert cached[str(root)].get("parent") is None and root != now
    active = run.page.get_attribute(".cache-scroll", "aria-activedescendant")
    assert run.page.get_attribute(f"#{active}", "data-blocks") == str(root)


def test_a_source_window_and_the_help_are_opened_and_closed_by_keys(
    open_default: OpenDefault,
) -> None:
    """Meanwhile no key goes through to the page."""
    run = open_default(at="step=6&request=a")
    link = run.page.locator(".source-link").first
    link.press("Enter")
    run.page.wait_for_selector(".source")
    box = run.page.locator(".source").bounding_box()
    assert box and min(box["x"], box["y"]) >= 0 and box["y"] + box["height"] <= 800
    title = re.fullmatch(r"(\S+), line (\d+), in (\S+)", run.text("#source-title"))
    assert title is not None and link.inner_text() == f"{Path(title[1]).name}:{title[2]}"
    first = run.page.locator(f".source-line[data-line='{title[2]}']")
    assert f"def {title[3].rpartition('.')[2]}(" in first.inner_text()
    run.press("ArrowRight", "Escape")
    run.page.wait_for_selector(".source", state="hidden")
    assert run.shown("step", "request") == [6, "a"]
    assert link.evaluate("(link) => link === document.activeElement")
    run.press("?")
    dialog = run.page.get_by_role("dialog")
    assert "play, pause" in dialog.inner_text()
    run.press("ArrowRight", "Tab", "Tab", "Tab")
    assert run.ask("document.activeElement.closest('body > :not(dialog)') === null")
    run.press("Escape")
    assert dialog.is_hidden() and run.shown("step") == [6]


def test_play_goes_on_to_the_end_and_space_stops_it(open_default: OpenDefault, film: Film) -> None:
    run, last = open_default(), film.num_steps - 1
    run.press(" ")
    until(run.page, "Watch.store.step >= 1")
    run.press(" ")
    run.page.wait_for_selector("button.play:text-is('Play')")
    run.page.select_option("select[aria-label=Speed]", "8")
    run.show(step=last - 3)
    run.ask("() => { globalThis.seen = []; Watch.onDraw(() => seen.push(Watch.store.step)); }")
    run.click("button.play")
    run.page.wait_for_selector(f"output.now:text-is('step {last} of {last}')")
    run.page.wait_for_selector("button.play:text-is('Play')")
    seen = run.ask("() => globalThis.seen")
    assert seen == sorted(seen) and {last - 2, last - 1, last} <= set(seen)


def test_an_address_and_what_is_shown_follow_each_other(
    open_default: OpenDefault, film: Film
) -> None:
    """One that makes no sense does no harm."""
    run, names = open_default(at="step=12&request=c&block=7&lang=zh"), ("step", "request", "block")
    assert run.shown(*names) == [12, "c", 7]
    assert run.page.get_attribute("html", "lang") == "zh-CN"
    run.show(language="en", block=None)
    run.press("ArrowRight", "ArrowRight")
    run.page.select_option("select[aria-label=Request]", "b")
    run.settle()
    until(run.page, "location.hash === '#step=14&request=b'")
    wrong = ["step=9999&request=nobody", "step=-3", "step=x", "=", "block=zz", "lang=fr&step="]
    for address in ["step=5", *wrong]:
        run.ask("(address) => { location.hash = address; }", address)
        run.settle()
        step = film.num_steps - 1 if address in wrong else 5
        assert run.shown(*names) == [step, None, None], address


def test_what_is_pointed_at_is_followed_and_what_is_clicked_is_chosen(
    open_default: OpenDefault, film: Film
) -> None:
    run = open_default(at="step=20")
    name = film.state_after(20)["running"][0]
    run.page.hover(f".queue-list button[data-request={name}]")
    run.page.wait_for_selector(".pool-cell.is-lit")
    lit = run.page.locator(".pool-cell.is-lit").evaluate_all(
        "all => all.map((c) => +c.dataset.block)"
    )
    assert sorted(lit) == sorted(film.state_after(20)["tables"][name]["0"])
    run.page.hover(".pool-cell[data-block='5']")
    run.page.wait_for_selector(".pool-about b:text-is('Block 5')")
    run.page.mouse.move(5, 5)
    run.page.wait_for_selector(".pool-cell.is-lit", state="detached")
    chip = run.page.locator(".words-tokens .request-chip").first
    name = chip.get_attribute("data-request")
    chip.click()
    run.page.wait_for_selector(f".words-tokens .tokens-row:not(.is-short)[data-request={name}]")
    run.page.locator(".grid-box canvas").click(position={"x": 200, "y": 60})
    run.settle()
    step, request = run.shown("step", "request")
    assert step not in (0, 20) and request is not None
    run.press("Escape")
    assert run.shown("request") == [None]


DROP = """([files, kinds]) => new Promise((done) => {
    Watch.onDraw(done);
    const data = new DataTransfer();
    for (const [name, text] of files) data.items.add(new File([text], name));
    for (const kind of kinds) {
        const event = new DragEvent(kind, {dataTransfer: data, bubbles: true, cancelable: true});
        document.querySelector("main").dispatchEvent(event);
    }
    if (!kinds.includes("drop")) done();
})"""


def drop(run: RunPage, *files: tuple[str, str]) -> None:
    """Files are read in the background; the result is drawn."""
    run.ask(DROP, [list(files), ["dragenter", "dragover", "drop"]])
    run.settle()


def test_a_file_that_is_dropped_or_chosen_is_shown(open_default: OpenDefault, film: Film) -> None:
    """While it is held over the page, a curtain says what may be dropped."""
    run = open_default(at="step=20&request=b")
    curtain, notice = run.page.locator(".curtain"), run.page.locator(".notice")
    run.ask(DROP, [[("a.jsonl", "")], ["dragenter"]])
    expect(curtain).to_be_visible()
    drop(run, ("short.jsonl", first_steps(film, 7)))
    expect(run.page.locator("output.now")).to_have_text("step 0 of 6")
    until(run.page, "location.hash === '#step=0'")
    expect(notice).to_contain_text("short is not whole: it ends behind step 6, and a, b,")
    for text, said in (("Hello\n", "Line 1"), ('{"kind":"run","version":99}\n', "version 99")):
        drop(run, ("note.txt", text))
        expect(notice).to_contain_text(said)
        assert run.shown("step") == [0], "the page goes on"
    drop(run, ("none.jsonl", first_steps(film, 0)))
    expect(run.page.locator("output.now")).to_have_text("no steps")
    run.press("ArrowRight", "End", " ", "]", "Home")
    with run.page.expect_file_chooser() as chooser:
        run.page.get_by_role("button", name="Open a run").press("Enter")
    whole = first_steps(film, film.num_steps).encode()
    chooser.value.set_files({"name": "a.jsonl", "mimeType": "", "buffer": whole})
    run.page.wait_for_selector(f"output.now:text-is('step 0 of {film.num_steps - 1}')")
    expect(notice).to_be_hidden()


def test_two_runs_share_one_axis_and_it_says_where_they_part(
    open_run: OpenRun, default_run_text: str, film: Film
) -> None:
    """Times are no difference, nor are keys of the queue that are made of them."""
    lines = [json.loads(line) for line in default_run_text.splitlines()]
    for line in lines[1:]:
        line["time"] += 1.5
        for change in line["changes"].get("requests", {}).values():
            if isinstance(change, list):
                change[0]["order_key"] = f"(0, {line['time']})"
    run = open_run(default_run_text, "\n".join(map(json.dumps, lines)) + "\n")
    compare = run.page.locator(".compare").first
    expect(compare).to_contain_text(f"the same, in all {film.num_steps} steps")
    place = len(first_steps(film, 30).splitlines()) + 1
    lines[place]["changes"]["loaded"] = {"store": [1]}
    run = open_run(default_run_text, "\n".join(map(json.dumps, lines)) + "\n")
    expect(compare).to_contain_text("up to step 29")
    run.page.get_by_role("button", name="Go there").click()
    run.settle()
    assert run.shown("step") == [30]
    renamed = first_steps(film, 20).replace('"b"', '"other b"')
    run = open_run(default_run_text, renamed, at="step=10&request=b")
    expect(compare).to_contain_text("Only the left film has b. Only the right film has other b.")
    run.press("End")
    assert run.texts("[data-scene=pool] .of") == ["this run", "the other (ended at step 19)"]


COUNT = """async (step) => {
    let frames = 0;
    const {frames: F} = Watch, {apply} = F;
    F.apply = (before, changes) => {
        frames += changes.computed !== undefined; // a line, and not a part of one
        return apply(before, changes);
    };
    Watch.set({step});
    await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
    F.apply = apply;
    return [frames, document.querySelectorAll("main *").length];
}"""


def make_big_run(path: Path) -> None:
    """A real engine with a model of a few numbers; blocks are published and evicted."""
    config = EngineConfig(
        device="cpu", max_num_seqs=24, num_blocks=700, overlap_scheduling=False, events=path
    )
    shape = shape_of(1, 4, 4, 1, 1, 2, vocab=64, max_position_embeddings=1024)
    engine, rng = LLMEngine(config, loaded=random_model(shape)), random.Random(3)
    for number in range(200):
        params = SamplingParams(temperature=0, max_tokens=rng.randint(70, 180), ignore_eos=True)
        prompt = [rng.randrange(64) for _ in range(rng.randint(20, 160))]
        engine.add_request(f"r{number}", prompt, params)
    while engine.has_unfinished_requests():
        engine.step()
    engine.close()


def test_a_jump_in_a_run_of_1000_steps_costs_as_much_as_a_step(
    tmp_path: Path, open_page: OpenPage
) -> None:
    """At most 32 lines from the last frame that is kept, three times; the page does not grow."""
    make_big_run(tmp_path / "run.jsonl")
    run = RunPage(open_page(shown_run(tmp_path / "run.jsonl").page))
    assert run.page.get_attribute("[data-label]", "data-encoding") == "gzip"
    for step in (999, 3, 500, 501, 64, 31, 750):
        num_frames, num_elements = run.ask(COUNT, step)
        assert run.shown("step") == [step] and num_frames <= 96 and num_elements < 4000
