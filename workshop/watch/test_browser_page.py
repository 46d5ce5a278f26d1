"""The page as a reader uses it: keys, scrubber, links, pointer, files, two runs, large runs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from bounded_loops import as_long_as
from workshop.watch.conftest import OpenPage, OpenRun, RunPage, until
from workshop.watch.replay.film import Film
from workshop.watch.source_lines import ROOT
from workshop.watch.tests.big_run import make_big_run
from workshop.watch.tests.scene_runs import shown_run

OpenDefault = Callable[..., RunPage]


@pytest.fixture
def open_default(open_run: OpenRun, default_run_text: str) -> OpenDefault:
    return lambda **how: open_run(default_run_text, **how)


@pytest.fixture
def film(default_film: Film) -> Film:
    return default_film


def first_steps(film: Film, num_steps: int) -> str:
    """The run, cut after `num_steps` steps."""
    ends = [n for n, line in enumerate(film.lines, 1) if line["at"] in ("result", "failed")]
    kept = film.lines[: ends[num_steps - 1]] if num_steps else []
    return "".join(f"{json.dumps(line)}\n" for line in [vars(film.run), *kept])


FAULTS = {  # without which all of these tests would say nothing
    "<script>console.warn('hm')</script>": "console, warning: hm",
    "<script>setTimeout(() => nothing())</script>": "exception: nothing is not defined",
    "<img src='http://127.0.0.1:9/a.png'>": "request: http://127.0.0.1:9/a.png",
}


def test_what_goes_wrong_in_a_page_is_noticed(
    open_page: OpenPage, complaints: list[str], tmp_path: Path
) -> None:
    (tmp_path / "page.html").write_text(f"<!doctype html><title>t</title>{''.join(FAULTS)}")
    page = open_page(tmp_path / "page.html")
    for _ in as_long_as(lambda: not all(f in "".join(complaints) for f in FAULTS.values())):
        page.wait_for_timeout(30)
    page.goto("about:blank")  # what the old page had still to say has been said
    complaints.clear()


# -- keys


def test_keys_walk_through_steps_requests_blocks_and_boxes(
    open_default: OpenDefault, film: Film
) -> None:
    run, last = open_default(), film.num_steps - 1
    for keys, step in (
        (["ArrowLeft"], 0),
        (["ArrowRight", "ArrowRight", "ArrowRight", "ArrowLeft"], 2),
        (["End", "ArrowRight"], last),
        (["ArrowLeft"], last - 1),
        (["Home"], 0),
    ):
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
        (".pool-cells", ["ArrowRight", "Home", "ArrowRight", "ArrowRight"], [None, 2]),
        (".pool-cells", ["End", "ArrowRight"], [None, film.run.num_blocks - 1]),
        (".pool-cells", ["Escape"], [None, None]),
    ):
        run.page.focus(panel)
        run.press(*keys)
        assert run.shown("request", "block", "step") == [*shown, 20], (panel, keys)
    parents = {int(b): row.get("parent") for b, row in film.state_after(20)["cached"].items()}
    run.page.focus(".cache-scroll")
    run.press("ArrowRight")
    for _ in range(3):
        (at,) = run.shown("block")
        run.press("ArrowRight")
        assert run.shown("block")[0] in ([b for b in parents if parents[b] == at] or [at])
    run.press(*["ArrowLeft"] * 5)
    (root,) = run.shown("block")
    assert parents[root] is None
    active = run.page.get_attribute(".cache-scroll", "aria-activedescendant")
    assert run.page.get_attribute(f"#{active}", "data-blocks") == str(root)


def test_a_source_window_and_the_help_are_opened_and_closed_by_keys(
    open_default: OpenDefault,
) -> None:
    """Meanwhile no key goes through to the page. The window shows the function as it is."""
    run = open_default(at="step=6&request=a")
    link = run.page.locator(".source-link").first
    link.press("Enter")
    run.page.wait_for_selector(".source")
    box = run.page.locator(".source").bounding_box()
    assert box and min(box["x"], box["y"]) >= 0 and box["y"] + box["height"] <= 800
    title = re.fullmatch(r"(\S+), line (\d+), in (\S+)", run.text("#source-title"))
    assert title is not None and link.inner_text() == f"{Path(title[1]).name}:{title[2]}"
    source = (ROOT / title[1]).read_text(encoding="utf-8").splitlines()
    lines = run.page.locator(".source-line").evaluate_all(
        "all => all.map((one) => [+one.dataset.line, one.lastChild.textContent])"
    )
    assert lines[0][0] == int(title[2]) and f"def {title[3].rpartition('.')[2]}(" in lines[0][1]
    assert [source[n - 1].strip() for n, _ in lines] == [text.strip() for _, text in lines]
    run.press("ArrowRight", "Escape")
    run.page.wait_for_selector(".source", state="hidden")
    assert run.shown("step", "request") == [6, "a"]
    assert link.evaluate("(link) => link === document.activeElement")
    run.press("?")
    dialog = run.page.get_by_role("dialog")
    assert "play, pause" in dialog.inner_text()
    run.press("ArrowRight", "Tab", "Tab", "Tab")
    is_inside = (
        "document.activeElement === document.body || document.activeElement.closest('dialog')"
    )
    assert run.ask(f"!!({is_inside})")
    run.press("Escape")
    assert dialog.is_hidden() and run.shown("step") == [6]


# -- the scrubber, and time


def test_play_goes_on_to_the_end_and_space_stops_it(open_default: OpenDefault, film: Film) -> None:
    run, last = open_default(), film.num_steps - 1
    run.page.select_option("select[aria-label=Speed]", "2")
    run.ask("() => document.activeElement.blur()")
    run.press(" ")
    run.page.wait_for_selector("button.play:text-is('Pause')")
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


# -- addresses


def test_an_address_and_what_is_shown_follow_each_other(
    open_default: OpenDefault, film: Film
) -> None:
    """One that makes no sense does no harm."""
    run, names = open_default(at="step=12&request=c&block=7&lang=zh"), ("step", "request", "block")
    assert run.shown(*names) == [12, "c", 7]
    assert run.page.get_attribute("html", "lang") == "zh-CN"
    assert run.hash == "#step=12&request=c&block=7&lang=zh"
    run.show(language="en", block=None)
    run.press("ArrowRight", "ArrowRight")
    run.page.select_option("select[aria-label=Request]", "b")
    run.settle()
    assert run.hash == "#step=14&request=b"
    last = film.num_steps - 1
    for address, step in (("step=5", 5), ("step=9999&request=nobody", last), ("step=-3", last),
                          ("step=x", last), ("=", last), ("step=1e3", last), ("block=zz", last),
                          ("lang=fr&step=", last)):  # fmt: skip
        run.ask("(address) => { location.hash = address; }", address)
        run.settle()
        assert run.shown(*names) == [step, None, None], address


# -- the pointer


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


# -- files

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
    for kind, is_down in (("dragenter", True), ("dragleave", False)):
        run.ask(DROP, [[("a.jsonl", "")], [kind]])
        assert curtain.is_visible() == is_down
    drop(run, ("short.jsonl", short := first_steps(film, 7)))
    assert run.text("output.now") == "step 0 of 6" and run.hash == "#step=0"
    assert notice.inner_text().startswith("short is not whole: it ends behind step 6, and a, b,")
    for text, said in (("Hello\n", "Line 1"), ('{"kind":"run","version":99}\n', "version 99")):
        drop(run, ("note.txt", text))
        assert "note.txt" in notice.inner_text() and said in notice.inner_text()
        assert run.shown("step") == [0], "the page goes on"
    lines = short.splitlines(keepends=True)
    at = max(i for i, line in enumerate(lines) if '"plan"' in line)
    drop(run, ("cut.jsonl", "".join(lines[: at + 1])))
    assert "cut is not whole: it ends in the middle of step 6." in notice.inner_text()
    drop(run, ("none.jsonl", first_steps(film, 0)))
    assert run.text("output.now") == "no steps"
    run.press("ArrowRight", "End", " ", "]", "Home")
    with run.page.expect_file_chooser() as chooser:
        run.page.get_by_role("button", name="Open a run").press("Enter")
    whole = first_steps(film, film.num_steps).encode()
    chooser.value.set_files({"name": "a.jsonl", "mimeType": "", "buffer": whole})
    run.page.wait_for_selector(f"output.now:text-is('step 0 of {film.num_steps - 1}')")
    assert notice.is_hidden()


# -- two runs


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
    later = "".join(f"{json.dumps(line)}\n" for line in lines)
    run = open_run(default_run_text, later)
    assert f"the same, in all {film.num_steps} steps" in run.text(".compare")
    place = len(first_steps(film, 30).splitlines()) + 1
    lines[place]["changes"]["loaded"] = {"store": [1]}
    run = open_run(default_run_text, "".join(f"{json.dumps(line)}\n" for line in lines))
    assert "up to step 29" in run.text(".compare")
    run.page.get_by_role("button", name="Go there").click()
    run.settle()
    assert run.shown("step") == [30]
    run = open_run(default_run_text, first_steps(film, 20), at="step=10")
    assert run.texts("[data-scene=pool] .of") == ["this run", "the other"]
    run.press("End")
    assert run.texts("[data-scene=pool] .of") == ["this run", "the other (ended at step 19)"]
    renamed = default_run_text.replace('"b"', '"other b"')
    run = open_run(default_run_text, renamed, at="step=10&request=b")
    assert "Only the left film has b. Only the right film has other b." in run.text(".compare")
    assert "b is not in this run." in run.texts(".words-tokens")[1]


# -- long runs


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


def test_a_jump_in_a_run_of_1000_steps_costs_as_much_as_a_step(
    tmp_path: Path, open_page: OpenPage
) -> None:
    """At most 32 lines from the last frame that is kept, three times; the page does not grow."""
    make_big_run(tmp_path / "run.jsonl", num_requests=200, num_steps=1000, seed=3)
    run = RunPage(open_page(shown_run(tmp_path / "run.jsonl").page))
    assert run.page.get_attribute("[data-label]", "data-encoding") == "gzip"
    for step in (999, 3, 500, 501, 64, 31, 750):
        num_frames, num_elements = run.ask(COUNT, step)
        assert run.shown("step") == [step] and num_frames <= 96 and num_elements < 1250
