"""The page as a reader uses it: keys, scrubber, links, pointer, languages, files, two runs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from common.events.frames import REASONS, reasons_to_wait
from workshop.watch.conftest import OpenRun, RunPage, until
from workshop.watch.replay.film import Film
from workshop.watch.test_page_maker import words

OpenDefault = Callable[..., RunPage]


@pytest.fixture
def open_default(open_run: OpenRun, default_run_text: str) -> OpenDefault:
    return lambda **how: open_run(default_run_text, **how)


@pytest.fixture
def film(default_film: Film) -> Film:
    return default_film


def text_of(lines: list[dict[str, Any]]) -> str:
    return "".join(f"{json.dumps(line)}\n" for line in lines)


def first_steps(film: Film, num_steps: int) -> list[dict[str, Any]]:
    """The run, cut after `num_steps` steps."""
    ends = [n for n, line in enumerate(film.lines, 1) if line["at"] in ("result", "failed")]
    return [vars(film.run), *film.lines[: ends[num_steps - 1]]]


@pytest.mark.parametrize(
    ("language", "said"),
    [
        ("en", "17 of 24 functions of this engine are yours. "),
        ("zh", "这个引擎的 24 个函数里，有 17 个是你写的。 "),
    ],
)
def test_the_functions_origin_is_first(open_default: OpenDefault, language: str, said: str) -> None:
    plain = open_default(language=language).text(".head .about")
    run = open_default(settings={"mine": [17, 24]}, language=language)
    assert run.text(".head .about") == said + plain


# -- steps


def test_it_loads_at_the_first_step_and_keys_stop_at_both_ends(
    open_default: OpenDefault, film: Film
) -> None:
    run, last = open_default(), film.num_steps - 1
    scenes = run.ask(
        "() => [...document.querySelectorAll('[data-scene]')].map((e) => e.dataset.scene)"
    )
    assert sorted(scenes) == ["cache", "clock", "grid", "pool", "queue", "words"]
    assert run.text("output.now") == f"step 0 of {last}"
    run.press("ArrowLeft")
    assert run.step == 0
    run.press("ArrowRight", "ArrowRight", "ArrowRight", "ArrowLeft")
    assert run.step == 2
    run.press("End", "ArrowRight")
    assert run.step == last
    run.press("ArrowLeft")
    assert run.step == last - 1
    run.press("Home")
    assert run.step == 0


def test_brackets_jump_to_important_steps(open_default: OpenDefault, film: Film) -> None:
    preempted = [
        step.number for step in film.steps() if any(what["preempted"] for what in step.happened)
    ]
    run, seen = open_default(), []
    for _ in range(film.num_steps):
        before = run.step
        run.press("]")
        if run.step == before:
            break
        seen.append(run.step)
    assert seen == sorted(seen) and set(preempted) <= set(seen)
    assert len(seen) < film.num_steps
    run.press("[")
    assert run.step == seen[-2]


def test_the_scrubber_goes_anywhere(open_default: OpenDefault, film: Film) -> None:
    run = open_default()
    box = run.page.locator("input[type=range]").bounding_box()
    assert box is not None
    y = box["y"] + box["height"] / 2
    run.page.mouse.move(box["x"] + 10, y)
    run.page.mouse.down()
    run.page.mouse.move(box["x"] + box["width"] / 2, y, steps=3)
    run.page.mouse.up()
    run.settle()
    assert abs(run.step - (film.num_steps - 1) / 2) <= 1
    run.page.locator("input[type=range]").focus()
    run.press("End")
    assert run.step == film.num_steps - 1
    run.press("ArrowLeft")
    assert run.step == film.num_steps - 2
    run.press("[")
    assert run.step < film.num_steps - 2, "it leaves the page's own keys alone"


def test_play_goes_on_to_the_end_and_stops(open_default: OpenDefault, film: Film) -> None:
    run, last = open_default(at=f"step={film.num_steps - 4}"), film.num_steps - 1
    run.page.select_option("select[aria-label=Speed]", "8")
    run.ask("""() => {
        globalThis.seen = [];
        const button = document.querySelector("button.play");
        Watch.onDraw(() => globalThis.seen.push([Watch.store.step, button.textContent]));
    }""")
    run.page.locator("button.play").click()
    run.page.wait_for_selector(f"output.now:text-is('step {last} of {last}')")
    run.page.wait_for_selector("button.play:text-is('Play')")
    run.page.wait_for_timeout(100)
    seen = [tuple(pair) for pair in run.ask("() => globalThis.seen")]
    assert seen == sorted(seen, key=lambda pair: pair[0])
    assert "Pause" in {word for step, word in seen if step < last}
    assert seen[-1] == (last, "Play")


def test_space_plays_and_stops(open_default: OpenDefault) -> None:
    run = open_default()
    run.page.select_option("select[aria-label=Speed]", "2")  # a run that ended would start over
    run.ask("() => document.activeElement.blur()")
    run.press(" ")
    run.page.wait_for_selector("button.play:text-is('Pause')")
    until(run.page, "Watch.store.step >= 1")
    run.press(" ")
    stopped = run.step
    run.page.wait_for_timeout(150)
    assert run.step == stopped


# -- links


def test_a_link_opens_its_target(open_default: OpenDefault) -> None:
    run = open_default(at="step=12&request=c&block=7&lang=zh")
    assert run.ask("() => [Watch.store.step, Watch.store.request, Watch.store.block]") == [
        12,
        "c",
        7,
    ]
    assert run.page.locator("html").get_attribute("lang") == "zh-CN"
    assert run.hash == "#step=12&request=c&block=7&lang=zh"


def test_the_address_follows_the_shown_step(open_default: OpenDefault) -> None:
    run = open_default()
    run.press("ArrowRight", "ArrowRight")
    assert run.hash == "#step=2"
    run.page.select_option("select[aria-label=Request]", "b")
    run.settle()
    assert run.hash == "#step=2&request=b"
    run.ask("() => { location.hash = '#step=5'; }")
    run.settle()
    run.settle()
    assert run.step == 5
    assert run.ask("() => Watch.store.request") is None


def test_a_browser_that_refuses_to_write_the_address_stops_nothing(
    open_default: OpenDefault,
) -> None:
    """Safari does, past 100 times in 30 s. And so the page writes seldom while much changes."""
    run = open_default()
    run.ask("""() => {
        globalThis.calls = 0;
        history.replaceState = () => {
            globalThis.calls += 1;
            throw new DOMException("too often", "SecurityError");
        };
    }""")
    run.ask("() => { for (let step = 1; step <= 12; step++) Watch.set({step}); }")
    run.settle()
    assert run.step == 12
    assert run.ask("() => globalThis.calls") < 12


def test_an_address_that_makes_no_sense_does_no_harm(open_default: OpenDefault, film: Film) -> None:
    run, last = open_default(at="step=9999&request=nobody"), film.num_steps - 1
    assert run.step == last
    assert run.ask("() => Watch.store.request") is None
    for address in ("step=-3", "step=x", "=", "step=1e3", "block=zz", "lang=fr&step="):
        run.ask("(address) => { location.hash = address; }", address)
        run.settle()
        run.settle()
        assert run.step == last
        assert run.ask("() => [Watch.store.request, Watch.store.block]") == [None, None]


# -- the pointer, and the selected request


def test_a_click_into_the_grid_goes_there(open_default: OpenDefault) -> None:
    run = open_default()
    run.page.locator(".grid-box canvas").click(position={"x": 200, "y": 60})
    run.settle()
    step, request = run.ask("() => [Watch.store.step, Watch.store.request]")
    assert step > 0 and request is not None
    run.press("Escape")
    assert run.ask("() => Watch.store.request") is None


def test_the_grid_describes_a_cell(open_default: OpenDefault, film: Film) -> None:
    """Waiting requests with their reasons, and the tokens that running ones computed: for every
    cell of a step."""
    step = next(s for s in range(film.num_steps) if len(film.state_after(s)["waiting"]) >= 3)
    part = film.step(step)
    (frame,) = (after for at, _, after in part.frames if at == "plan")
    waits = reasons_to_wait(frame)
    assert len(waits) >= 3
    run = open_default(at=f"step={step}")
    run.page.locator(".grid-box").focus()
    said = {}
    for name in film.requests():
        run.show(request=name)
        said[name] = run.ask("() => document.querySelector('.grid-body [aria-live]').textContent")
    for name, reason in waits.items():
        assert REASONS[reason or ""] in said[name]
    (plan,) = part.plans
    for name, num, start in zip(plan["requests"], plan["num_tokens"], plan["starts"]):
        numbers = list(map(int, re.findall(r"\d+", said[name].partition(":")[2])))
        assert numbers and str(start) in said[name], (said[name], num, start)


def test_a_stop_string_ends_a_request_in_the_step_that_completes_it(
    open_default: OpenDefault, film: Film
) -> None:
    """In words, with the line that finds it, and in the grid."""
    requests = film.requests().items()
    name = next(name for name, row in requests if row["finish"]["text_length"] is not None)
    computed = [
        step.number
        for step in film.steps()
        if any(name in what["tokens"] for what in step.happened)
    ]
    run = open_default(at=f"step={computed[-1]}&request={name}")
    run.page.locator(".grid-box").focus()
    run.settle()
    story = run.page.locator(f".words-group[data-group={name}]")
    assert "ends at the stop string" in story.inner_text()
    assert "output_processor.py" in story.locator("[data-key='say.cut']").inner_text()
    assert "end token" not in run.text(".words-list")
    cell = run.page.locator(".grid-body [aria-live]")
    assert "ends here" in (cell.text_content() or "")
    run.press("ArrowRight")
    assert run.page.locator(f".words-group[data-group={name}]").count() == 0


# -- languages


def test_the_language_changes_and_changes_back(open_default: OpenDefault) -> None:
    run = open_default()
    english = run.text("body")
    run.page.get_by_role("button", name="中文").click()
    run.settle()
    chinese = run.text("body")
    assert run.page.locator("html").get_attribute("lang") == "zh-CN"
    assert run.hash.endswith("lang=zh")
    assert len(re.findall(r"[\u4e00-\u9fff]", chinese)) > 100
    run.page.get_by_role("button", name="English").click()
    run.settle()
    assert run.text("body") == english


def test_no_text_is_shown_by_its_key(open_default: OpenDefault, film: Film) -> None:
    """As one would be that has no words. In both languages they are: `test_page_maker.py`."""
    run = open_default()
    keys = {key for key, _ in run.ask("() => [...Watch.wordTable()]")}
    assert len(keys) > 100 and keys <= words().keys()
    families = "|".join(sorted({key.partition(".")[0] for key in keys}))
    for step in range(0, film.num_steps, 7):
        for language in ("en", "zh"):
            run.show(step=step, language=language)
            shown = re.findall(rf"(?<![\w/.])(?:{families})\.\w+", run.text("body"))
            assert [word for word in shown if not word.endswith((".py", ".js"))] == []


# -- files


_DROP = """([files, kinds]) => {
    const data = new DataTransfer();
    for (const [name, text] of files) data.items.add(new File([text], name));
    for (const kind of kinds) {
        const event = new DragEvent(kind, {dataTransfer: data, bubbles: true, cancelable: true});
        document.querySelector("main").dispatchEvent(event);
    }
}"""


def drop(run: RunPage, *files: tuple[str, str]) -> None:
    """Files are read in the background; the result is drawn."""
    kinds = ["dragenter", "dragover", "drop"]
    drawn = f"(what) => new Promise((done) => {{ Watch.onDraw(done); ({_DROP})(what); }})"
    run.ask(drawn, [list(files), kinds])
    run.settle()


def test_a_file_that_is_dropped_is_shown(open_default: OpenDefault, film: Film) -> None:
    """While it is held over the page, a curtain says what may be dropped."""
    run = open_default(at="step=20&request=b")
    curtain = run.page.locator(".curtain")
    for kind, is_down in (("dragenter", True), ("dragleave", False)):
        run.ask(_DROP, [[("a.jsonl", "")], [kind]])
        run.settle()
        assert curtain.is_visible() == is_down
        assert not is_down or "Drop" in curtain.inner_text()
    drop(run, ("short.jsonl", text_of(first_steps(film, 7))))
    assert run.text("output.now") == "step 0 of 6"
    assert run.hash == "#step=0"
    run.press("End")
    assert run.step == 6
    assert curtain.is_hidden()
    assert run.text(".notice").startswith("short is not whole: it ends behind step 6, and a, b,")
    lines = text_of(first_steps(film, 7)).splitlines(keepends=True)
    at = max(i for i, line in enumerate(lines) if '"plan"' in line)
    drop(run, ("cut.jsonl", "".join(lines[: at + 1])))
    assert "cut is not whole: it ends in the middle of step 6." in run.text(".notice")
    whole = text_of([vars(film.run), *film.lines])
    drop(run, ("whole.jsonl", whole))
    assert run.page.locator(".notice").is_hidden()


NO_RUNS = {  # what a file has, and what the page says about it
    "": "no run line",
    "Hello\n": "Line 1",
    '{"kind":"run","version":99}\n': "version 99",
    "RUN{}\n": "Line 2",
    'RUN{"at":"plan","changes":[]}\n': "no frame",
    'RUN{"at":"walked","changes":{}}\n': "no frame",
    "RUN[1]\n": "no JSON object",
    "RUNRUN": "the only one",
}


def test_a_file_that_is_no_run_is_refused_and_the_page_goes_on(
    open_default: OpenDefault, film: Film
) -> None:
    run = open_default(at="step=3")
    notice = run.page.locator(".notice")
    for text, said in NO_RUNS.items():
        drop(run, ("note.txt", text.replace("RUN", text_of([vars(film.run)]))))
        assert "note.txt" in notice.inner_text() and said in notice.inner_text(), text
        assert 'LLM(events="run.jsonl")' in notice.inner_text(), "what it should have been"
        assert run.step == 3
    drop(run, *((f"{n}.jsonl", "") for n in range(3)))
    assert "3 files" in notice.inner_text() and run.step == 3
    run.press("ArrowRight")
    assert run.step == 4
    notice.get_by_role("button").click()
    run.settle()
    assert notice.is_hidden()


def test_a_file_can_be_chosen_without_a_pointer(open_default: OpenDefault, film: Film) -> None:
    run = open_default()
    with run.page.expect_file_chooser() as chooser:
        run.page.get_by_role("button", name="Open a run").press("Enter")
    text = text_of(first_steps(film, 5))
    chooser.value.set_files({"name": "a.jsonl", "mimeType": "", "buffer": text.encode()})
    run.page.wait_for_selector("output.now:text-is('step 0 of 4')")


def test_a_run_without_steps_is_no_error(open_run: OpenRun, film: Film) -> None:
    run = open_run(text_of([vars(film.run)]))
    assert run.text("output.now") == "no steps"
    run.press("ArrowRight", "End", " ", "]", "Home")
    assert run.text("output.now") == "no steps"


def test_columns_are_as_wide_as_their_time(open_run: OpenRun, film: Film) -> None:
    run = open_run(text_of(first_steps(film, 12)))
    run.page.click(".by-time")
    run.settle()
    assert "columns=time" in run.hash
    wide = run.ask(
        """() => { const box = document.querySelector(".grid-box");
            const {left, right, top} = box.getBoundingClientRect();
            const counts = Array(Watch.numSteps()).fill(0);
            for (let x = left; x < right; x++) { // a click on a label stays at step 0
                Watch.set({step: 0, request: null});
                box.dispatchEvent(new MouseEvent("click", {clientX: x, clientY: top + 30}));
                if (Watch.store.request !== null) counts[Watch.store.step] += 1;
            }
            return counts; }"""
    )
    times = run.ask("Watch.stepTimes(Watch.store.films[0])")
    scale = sum(wide[1:]) / sum(times[1:])  # the first bar is partly covered by the labels
    assert all(abs(n - max(5, ms * scale)) < 4 for n, ms in zip(wide[1:], times[1:])), (wide, times)
    assert max(wide[1:]) > min(wide[1:])


# -- two runs


def test_two_runs_share_one_axis(open_run: OpenRun, default_run_text: str, film: Film) -> None:
    short = text_of(first_steps(film, 20))
    run = open_run(default_run_text, short, at="step=10")
    assert run.page.locator("[data-scene=pool] .root").count() == 2
    assert run.text("output.now") == f"step 10 of {film.num_steps - 1}"
    heads = run.texts("[data-scene=pool] .of")
    assert heads == ["this run", "the other"]
    run.press("End")
    assert run.texts("[data-scene=pool] .of") == ["this run", "the other (ended at step 19)"]
    counts = run.texts(".pool-counts")
    assert len(counts) == 2 and counts[0] != counts[1]


def test_it_says_where_two_runs_part_and_goes_there(
    open_run: OpenRun, default_run_text: str, film: Film
) -> None:
    step = next(step for step in film.steps() if any(what["evicted"] for what in step.happened))
    step = step.number
    lines = first_steps(film, film.num_steps)
    place = len(first_steps(film, step)) + 1
    changes = lines[place]["changes"]
    changes = {**changes, "loaded": {"store": [1]}}
    lines[place] = {**lines[place], "changes": changes}
    run = open_run(default_run_text, text_of(lines))
    assert f"up to step {step - 1}" in run.text(".compare")
    run.page.get_by_role("button", name="Go there").click()
    run.settle()
    assert run.step == step


def test_two_equal_runs_are_said_to_be_equal(
    open_run: OpenRun, default_run_text: str, film: Film
) -> None:
    """Times, and keys of the queue that are made of them, are no difference."""
    lines = [json.loads(line) for line in default_run_text.splitlines()]
    for line in lines[1:]:
        line["time"] += 1.5
        for change in line["changes"].get("requests", {}).values():
            if isinstance(change, list):
                change[0]["order_key"] = f"(0, {line['time']})"
    run = open_run(default_run_text, text_of(lines))
    assert f"the same, in all {film.num_steps} steps" in run.text(".compare")


def test_it_says_which_requests_one_run_lacks(open_run: OpenRun, default_run_text: str) -> None:
    other = default_run_text.replace('"b"', '"other b"')
    run = open_run(default_run_text, other, at="step=10&request=b")
    said = run.text(".compare")
    assert "Only the left film has b. Only the right film has other b." in said
    assert "The texts of all that both have are the same." in said
    assert "b is not in this run." in run.texts(".words-tokens")[1]
    assert "it is not in this run." in run.texts(".pool-about")[-1]
    words = run.ask("Watch.store.films.map((film) => Watch.cellWords(film, 'b', 10))")
    assert ["not in this run" in text for text in words] == [False, True]
