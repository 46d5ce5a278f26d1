"""How the page stands: nothing jumps, no label is cut or covered, all of it can be read, reached by
keyboard, and has a name."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pytest

from workshop.watch.conftest import OpenRun, RunPage, until
from workshop.watch.replay.film import Film

SIZES = [(1024, 768), (1280, 800), (1920, 1080)]


@pytest.fixture
def num_steps(default_film: Film) -> int:
    return default_film.num_steps


# -- nothing jumps


def moved(places: list[list[list[Any]]]) -> dict[str, set[int]]:
    """Elements that are elsewhere than in the step before, with the steps. An element that is only
    hidden in a step has no size there."""
    found: dict[str, set[int]] = {}
    for step, (before, now) in enumerate(pairwise(places), 1):
        assert len(before) == len(now) > 30, f"step {step} has other parts"
        for one, other in zip(before, now):
            if any(abs(a - b) > 0.6 for a, b in zip(one[1:], other[1:])):
                found.setdefault(other[0], set()).add(step)
    return found


@pytest.mark.parametrize(
    ("width", "height", "stride"), [(1024, 768, 8), (1280, 800, 4), (1920, 1080, 8)]
)
def test_nothing_moves_from_step_to_step(
    width: int, height: int, stride: int, open_run: OpenRun, default_run_text: str
) -> None:
    run = open_run(default_run_text, width=width, height=height)
    assert moved(run.check("places", stride)) == {}


def test_nothing_moves_in_chinese_or_with_two_runs(
    open_run: OpenRun, default_run_text: str
) -> None:
    run = open_run(default_run_text, default_run_text, at="lang=zh")
    assert moved(run.check("places", 3)) == {}


def test_a_laptop_shows_all_six_scenes_at_once(open_run: OpenRun, default_run_text: str) -> None:
    run = open_run(default_run_text, at="step=20")
    bottoms = """() => [...document.querySelectorAll("section.scene")]
        .map((scene) => scene.getBoundingClientRect().bottom)"""
    for language in ("en", "zh"):
        run.show(language=language)
        assert run.ask("() => document.documentElement.scrollHeight") <= 800
        found = run.ask(bottoms)
        assert len(found) == 6 and max(found) <= 800


def test_the_page_is_never_wider_than_the_window(open_run: OpenRun, default_run_text: str) -> None:
    run = open_run(default_run_text, default_run_text, at="step=20")
    for width in (1920, 1280, 1024, 800, 390):
        run.page.set_viewport_size({"width": width, "height": 800})
        until(run.page, "width => document.documentElement.scrollWidth <= width", width)
    tops = run.ask("[...document.querySelectorAll('.root')].map((one) => one.offsetTop)")
    assert len(set(tops)) == len(tops), "a narrow window has one column"


# -- labels are inside their boxes


# The legend of pool and cache while no block is hovered.
KEY_IS_CUT = """() => [...document.querySelectorAll(".pool-details, .cache-details")]
    .some((key) => key.lastChild.matches(".quiet") && key.scrollHeight > key.clientHeight)"""


def check_labels(run: RunPage, steps: Iterable[int]) -> None:
    faults: dict[str, int] = {}
    for step in steps:
        run.show(step=step)
        num_shown, found = run.check("labels")
        assert num_shown > 40, "there is hardly any text: this looks at nothing"
        faults |= {fault: step for fault in found}
        if run.ask(KEY_IS_CUT):
            faults["the key of its marks"] = step
    assert faults == {}


@pytest.mark.parametrize(
    ("width", "height"), [SIZES[0], pytest.param(*SIZES[1], marks=pytest.mark.slow), SIZES[2]]
)
def test_labels_are_whole_and_do_not_overlap(
    width: int, height: int, open_run: OpenRun, default_run_text: str, num_steps: int
) -> None:
    run = open_run(default_run_text, width=width, height=height)
    for language in ("en", "zh"):
        run.show(language=language, request=None)
        check_labels(run, sorted({11, *range(0, num_steps, 10)}))
        run.show(request="c")
        check_labels(run, range(14, 15))


def test_a_block_s_number_is_above_its_label(open_run: OpenRun, default_run_text: str) -> None:
    """The number is not a separate text, so the test of labels does not see it."""
    heights = """() => [...document.querySelectorAll(".pool-cell")].map((cell) => {
        const number = getComputedStyle(cell, "::before");
        return [number.content !== "none", cell.clientHeight, parseFloat(number.lineHeight)];
    })"""
    seen = set()
    run = open_run(default_run_text, at="step=5")
    for width, height in SIZES:
        run.page.set_viewport_size({"width": width, "height": height})
        run.settle()
        run.settle()
        for has_number, cell, line in run.ask(heights):
            seen.add(has_number)
            assert not has_number or cell >= 2 * line + 2
    assert seen == {True, False}


def test_labels_of_two_runs_are_whole_and_do_not_overlap(
    open_run: OpenRun, default_run_text: str, num_steps: int
) -> None:
    check_labels(open_run(default_run_text, default_run_text), range(0, num_steps, 13))


# -- it can be read


@pytest.mark.parametrize("colours", ["light", "dark"])
def test_every_text_has_the_contrast_of_wcag_aa(
    colours: str, open_run: OpenRun, default_run_text: str, num_steps: int
) -> None:
    run = open_run(default_run_text, colours=colours, at="lang=en")
    pale: dict[str, float] = {}
    for step in range(0, num_steps, 9):
        run.show(step=step)
        found = run.check("contrasts")
        assert len(found) > 100
        pale |= {str(rest): round(ratio, 2) for ratio, *rest in found if ratio < 4.5}
    assert pale == {}


# -- it can be reached and named


@pytest.mark.parametrize("step", [0, 20])
def test_tab_reaches_every_control_and_shows_where_it_is(
    step: int, open_run: OpenRun, default_run_text: str
) -> None:
    run = open_run(default_run_text, at=f"step={step}")
    controls = run.check("controls")
    assert 12 < len(controls) < 40, "too many stops on the way"
    reached: dict[int, tuple[bool, bool]] = {}
    for _ in range(2 * len(controls)):
        run.page.keyboard.press("Tab")
        at = run.check("focused")
        if at is None or at[0] in reached:
            break  # once around: focus goes on to the browser's own bars, or to the first control
        reached[at[0]] = (at[1], at[2])
    missed = [name for number, name in enumerate(controls) if number not in reached]
    assert missed == []
    assert [controls[n] for n, (has_ring, _) in reached.items() if not has_ring] == []
    assert [controls[n] for n, (_, is_seen) in reached.items() if not is_seen] == []


def test_shift_tab_leads_out_again(open_run: OpenRun, default_run_text: str) -> None:
    """No part keeps the focus: from each, one press leads on, and one press back."""
    run = open_run(default_run_text, at="step=20")
    controls = run.check("controls")
    for number in range(1, len(controls) - 1):
        run.page.locator(f"[data-control='{number}']").focus()
        run.page.keyboard.press("Shift+Tab")
        before = run.check("focused")
        assert before is not None and before[0] == number - 1, controls[number]


def test_the_help_opens_keeps_the_focus_and_closes(
    open_run: OpenRun, default_run_text: str
) -> None:
    run = open_run(default_run_text)
    run.press("?")
    dialog = run.page.get_by_role("dialog")
    assert dialog.is_visible() and "play, pause" in dialog.inner_text()
    run.press("ArrowRight", "Tab", "Tab", "Tab")
    is_inside = """() => {
        const focused = document.activeElement;
        return focused === document.body || focused.closest("dialog") !== null;
    }"""
    assert run.ask(is_inside)
    assert run.step == 0
    run.press("Escape")
    assert dialog.is_hidden()
    run.press("ArrowRight")
    assert run.step == 1


def test_arrows_walk_through_requests_blocks_and_boxes(
    open_run: OpenRun, default_run_text: str
) -> None:
    run = open_run(default_run_text, at="step=20")
    run.page.locator(".grid-box").focus()
    run.press("ArrowDown", "ArrowDown")
    assert run.ask("() => [Watch.store.request, Watch.store.step]") == ["b", 20]
    assert run.page.locator(".pool-cell.is-dim").count() == 0, "it has ended: nothing to point at"
    run.show(request="a")
    assert run.page.locator(".pool-cell.is-dim").count() > 0
    run.page.locator(".pool-cells").focus()
    run.press("Home", "ArrowRight", "ArrowRight")
    assert run.ask("() => [Watch.store.block, Watch.store.step]") == [2, 20]
    run.press("Escape")
    assert run.ask("() => Watch.store.block") is None
    run.page.locator(".cache-scroll").focus()
    run.press("ArrowRight", "ArrowRight")
    assert run.ask("() => Watch.store.block") is not None


# Roles that have to have a name, be they reachable or not.
_NAMED = {"button", "combobox", "slider", "listbox", "application", "img", "image", "region"}
_NAMED |= {"dialog", "link", "option", "group"}


@pytest.mark.parametrize("language", ["en", "zh"])
def test_everything_that_can_be_used_has_a_role_and_a_name(
    language: str, open_run: OpenRun, default_run_text: str
) -> None:
    run = open_run(default_run_text, at=f"step=20&lang={language}")
    tree = run.page.context.new_cdp_session(run.page).send("Accessibility.getFullAXTree")
    nodes = [
        (
            node["role"]["value"],
            node.get("name", {}).get("value", "").strip(),
            any(p["name"] == "focusable" and p["value"]["value"] for p in node["properties"]),
        )
        for node in tree["nodes"]
        if not node["ignored"] and "properties" in node
    ]
    usable = [
        (role, name) for role, name, focusable in nodes if focusable and role != "RootWebArea"
    ]
    assert len(usable) > 12
    assert [pair for pair in usable if pair[0] in ("generic", "none", "") or not pair[1]] == []
    assert [pair[:2] for pair in nodes if pair[0] in _NAMED and not pair[1]] == []
    titles = [name for role, name, _ in nodes if role == "region"]
    assert len(titles) >= 6 and len(set(titles)) == len(titles)
