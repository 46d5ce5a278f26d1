"""How the page stands: nothing jumps, no label is cut or covered, everything can be read, reached by
keyboard, and named."""

from __future__ import annotations

from typing import Any

import pytest

from common.events.event_kinds import parse_events
from common.events.film import Film
from common.watch.conftest import OpenRun, RunPage

SIZES = [(1024, 768), (1280, 800), (1920, 1080)]


@pytest.fixture(scope="session")
def num_steps(default_run_text: str) -> int:
    return Film(parse_events(default_run_text.splitlines(keepends=True))).num_steps


# -- nothing jumps


# Where everything stands that is there in each step: the bars, the six scenes, their parts.
_PLACES = """async (stride) => {
    const places = [];
    for (let step = 0; step < Watch.numSteps(); step += stride) {
        Watch.set({step});
        await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
        const parts = [...document.querySelectorAll(
            "header > *, .transport > *, section.scene, section.scene > *, .roots > .root, .body > *")];
        places.push(parts.map((part) => {
            const {left, top, width, height} = part.getBoundingClientRect();
            const name = part.closest("section")?.dataset.scene ?? "bar";
            return [`${name} ${part.localName}.${part.className.split(" ")[0]}`, left, top, width, height];
        }));
    }
    return places;
}"""


def moved(places: list[list[list[Any]]]) -> dict[str, set[int]]:
    """What stands elsewhere than in the place before, and in which of them. What only happens to be
    hidden in a step has no size there."""
    found: dict[str, set[int]] = {}
    for step, (before, now) in enumerate(zip(places, places[1:]), 1):
        assert len(before) == len(now) > 30, f"step {step} has other parts"
        for one, other in zip(before, now):
            if any(abs(a - b) > 0.6 for a, b in zip(one[1:], other[1:])):
                found.setdefault(other[0], set()).add(step)
    return found


@pytest.mark.parametrize(
    ("width", "height", "stride"), [(1024, 768, 4), (1280, 800, 1), (1920, 1080, 4)]
)
def test_nothing_moves_from_step_to_step(
    width: int, height: int, stride: int, open_run: OpenRun, default_run_text: str
) -> None:
    run = open_run(default_run_text, width=width, height=height)
    assert moved(run.ask(_PLACES, stride)) == {}


def test_nothing_moves_in_chinese_or_with_two_runs(
    open_run: OpenRun, default_run_text: str
) -> None:
    run = open_run(default_run_text, default_run_text, at="lang=zh")
    assert moved(run.ask(_PLACES, 3)) == {}


@pytest.mark.parametrize("language", ["en", "zh"])
def test_a_laptop_shows_all_six_scenes_at_once(
    language: str, open_run: OpenRun, default_run_text: str
) -> None:
    run = open_run(default_run_text, at=f"step=20&lang={language}")
    height, bottoms = run.ask(
        """() => [document.documentElement.scrollHeight,
            [...document.querySelectorAll("section.scene")].map((s) => s.getBoundingClientRect().bottom)]"""
    )
    assert height <= 800
    assert len(bottoms) == 6 and max(bottoms) <= 800


@pytest.mark.parametrize("width", [800, 1024, 1280, 1920])
def test_the_page_is_never_wider_than_the_window(
    width: int, open_run: OpenRun, default_run_text: str
) -> None:
    run = open_run(default_run_text, default_run_text, width=width, at="step=20")
    assert run.ask("() => document.documentElement.scrollWidth") <= width


# -- labels are inside their boxes


# Texts whose letters are outside of a box that cuts them off (a box that scrolls does not; one with
# an ellipsis has to say the whole in its title or its name), and pairs of texts that stand on each other.
_LABELS = r"""() => {
    const SLACK = 1.5;
    const faults = [];
    const shown = [];
    // Whether one stands in the other, or on a ground of its own, so that no letters mix.
    const covers = (one, other) => {
        for (let at = one; at; at = at.parentElement) {
            if (at.contains(other)) return at === one;
            if (!/^(transparent|rgba\(.*, 0\))$/.test(getComputedStyle(at).backgroundColor)) return true;
        }
        return false;
    };
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    for (let node = walker.nextNode(); node; node = walker.nextNode()) {
        const words = node.textContent.trim();
        const owner = node.parentElement;
        if (!words || owner.closest("script, style, noscript, option, .unseen, dialog:not([open])")) continue;
        if (!owner.checkVisibility({checkOpacity: true, checkVisibilityCSS: true})) continue;
        const range = document.createRange();
        range.selectNodeContents(node);
        for (const rect of range.getClientRects()) {
            if (rect.width < 1 || rect.height < 1) continue;
            let {left, top, right, bottom} = rect;
            for (let box = owner; box && box !== document.body; box = box.parentElement) {
                const style = getComputedStyle(box);
                if (style.position === "fixed") break;
                const frame = box.getBoundingClientRect();
                const cuts = [["x", style.overflowX, left, right, frame.left, frame.right],
                    ["y", style.overflowY, top, bottom, frame.top, frame.bottom]];
                for (const [axis, overflow, from, to, first, last] of cuts) {
                    if (overflow === "visible" || (from >= first - SLACK && to <= last + SLACK)) continue;
                    if (from > last - SLACK || to < first + SLACK) continue; // not shown at all
                    const says = style.textOverflow === "ellipsis" && axis === "x" && box.closest("[title], [aria-label]");
                    if (!["auto", "scroll"].includes(overflow) && !says) {
                        faults.push(`cut: ${words.slice(0, 40)} (${axis}, in .${box.className})`);
                    }
                }
                if (style.overflowX !== "visible") [left, right] = [Math.max(left, frame.left), Math.min(right, frame.right)];
                if (style.overflowY !== "visible") [top, bottom] = [Math.max(top, frame.top), Math.min(bottom, frame.bottom)];
            }
            if (right - left > 1 && bottom - top > 1) shown.push({owner, words, left, top, right, bottom});
        }
    }
    shown.forEach((a, i) => {
        for (const b of shown.slice(i + 1)) {
            const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
            const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
            const line = Math.min(a.bottom - a.top, b.bottom - b.top);
            if (wide > 2 && high > 0.4 * line && !covers(a.owner, b.owner) && !covers(b.owner, a.owner)) {
                faults.push(`on each other: ${a.words.slice(0, 30)} and ${b.words.slice(0, 30)}`);
            }
        }
    });
    return [shown.length, [...new Set(faults)]];
}"""


def check_labels(run: RunPage, steps: range) -> None:
    faults: dict[str, int] = {}
    for step in steps:
        run.show(step=step)
        num_shown, found = run.ask(_LABELS)
        assert num_shown > 40, "there is hardly any text: this looks at nothing"
        faults |= {fault: step for fault in found}
    assert faults == {}


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize(("width", "height"), SIZES)
def test_labels_are_whole_and_stand_apart(
    width: int, height: int, language: str, open_run: OpenRun, default_run_text: str, num_steps: int
) -> None:
    run = open_run(default_run_text, width=width, height=height, at=f"lang={language}")
    check_labels(run, range(0, num_steps, 5))
    run.show(request="c", step=14)
    check_labels(run, range(14, 15))


def test_a_block_s_number_stands_above_its_label_or_not_at_all(
    open_run: OpenRun, default_run_text: str
) -> None:
    """It is no text of its own, so that the test of labels does not see it."""
    heights = """() => [...document.querySelectorAll(".pool-cell")].map((cell) => {
        const number = getComputedStyle(cell, "::before");
        return [number.content !== "none", cell.clientHeight, parseFloat(number.lineHeight)];
    })"""
    seen = set()
    for width, height in SIZES:
        run = open_run(default_run_text, width=width, height=height, at="step=5")
        for has_number, cell, line in run.ask(heights):
            seen.add(has_number)
            assert not has_number or cell >= 2 * line + 2
    assert seen == {True, False}


def test_labels_of_two_runs_are_whole_and_stand_apart(
    open_run: OpenRun, default_run_text: str, num_steps: int
) -> None:
    check_labels(open_run(default_run_text, default_run_text), range(0, num_steps, 9))


# -- it can be read


# The contrast of each text with what it stands on: [ratio, words, colour, ground].
_CONTRASTS = """() => {
    const pen = new OffscreenCanvas(1, 1).getContext("2d", {willReadFrequently: true});
    const read = (colour) => {
        pen.clearRect(0, 0, 1, 1);
        pen.fillStyle = "#000";
        pen.fillStyle = colour;
        pen.fillRect(0, 0, 1, 1);
        const [r, g, b, a] = pen.getImageData(0, 0, 1, 1).data;
        return [r, g, b, a / 255];
    };
    const over = (top, below) => [0, 1, 2].map((i) => top[i] * top[3] + below[i] * (1 - top[3])).concat(1);
    const light = (colour) => {
        const [r, g, b] = colour.map((part) => part / 255)
            .map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const ratio = (a, b) => {
        const [high, low] = [light(a), light(b)].sort((x, y) => y - x);
        return (high + 0.05) / (low + 0.05);
    };
    const COLOUR = /(?:rgba?|color|oklab|oklch|lab|hsl)\\([^()]*\\)|#[0-9a-f]{3,8}/gi;
    // All grounds that an element may stand on: a gradient has several.
    const grounds = (element) => {
        const layers = [];
        for (let at = element; at; at = at.parentElement) {
            const style = getComputedStyle(at);
            const stops = style.backgroundImage.match(COLOUR)?.map(read);
            const plain = read(style.backgroundColor);
            layers.push(stops ? [plain, ...stops] : [plain]);
            if (plain[3] === 1) break;
        }
        let found = [[255, 255, 255, 1]];
        for (const layer of layers.reverse()) {
            const [plain, ...stops] = layer;
            found = found.flatMap((below) => {
                const base = over(plain, below);
                return stops.length ? stops.map((stop) => over(stop, base)) : [base];
            });
        }
        return found;
    };
    const results = [];
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    for (let node = walker.nextNode(); node; node = walker.nextNode()) {
        const owner = node.parentElement;
        const words = node.textContent.trim();
        if (!words || owner.closest("script, style, noscript, .unseen, dialog:not([open])")) continue;
        if (!owner.checkVisibility({visibilityProperty: true})) continue;
        if (owner.closest("[aria-hidden=true]")) continue;
        let alpha = 1;
        for (let at = owner; at; at = at.parentElement) alpha *= Number(getComputedStyle(at).opacity);
        const colour = read(getComputedStyle(owner).color);
        colour[3] *= alpha;
        for (const ground of grounds(owner)) {
            const seen = over(colour, ground);
            results.push([ratio(seen, ground), words.slice(0, 30), owner.className, seen.map(Math.round) + "", ground.map(Math.round) + ""]);
        }
    }
    return results;
}"""


@pytest.mark.parametrize("colours", ["light", "dark"])
def test_every_text_has_the_contrast_of_wcag_aa(
    colours: str, open_run: OpenRun, default_run_text: str, num_steps: int
) -> None:
    run = open_run(default_run_text, colours=colours, at="lang=en")
    pale: dict[str, float] = {}
    for step in range(0, num_steps, 6):
        run.show(step=step)
        found = run.ask(_CONTRASTS)
        assert len(found) > 100
        pale |= {str(rest): round(ratio, 2) for ratio, *rest in found if ratio < 4.5}
    assert pale == {}


# -- it can be reached and named


_CONTROLS = """() => [...document.querySelectorAll(
        "a[href], button, input, select, textarea, summary, [tabindex]")]
    .filter((e) => e.tabIndex >= 0 && !e.disabled && e.checkVisibility({visibilityProperty: true}))
    .map((e, i) => { e.dataset.control = i; return `${e.localName}.${e.className} ${e.textContent.slice(0, 20)}`; })"""

_FOCUSED = """() => {
    const e = document.activeElement;
    if (!e || e === document.body) return null;
    const style = getComputedStyle(e);
    const hasRing = (style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 1.5)
        || style.boxShadow !== "none";
    const {top, bottom, width, height} = e.getBoundingClientRect();
    return [Number(e.dataset.control ?? -1), hasRing, bottom > 0 && top < innerHeight && width * height > 0];
}"""


@pytest.mark.parametrize("step", [0, 20])
def test_tab_reaches_every_control_and_shows_where_it_is(
    step: int, open_run: OpenRun, default_run_text: str
) -> None:
    run = open_run(default_run_text, at=f"step={step}")
    controls = run.ask(_CONTROLS)
    assert len(controls) > 12
    reached: dict[int, tuple[bool, bool]] = {}
    for _ in range(2 * len(controls)):
        run.page.keyboard.press("Tab")
        at = run.ask(_FOCUSED)
        if at is None or at[0] in reached:
            break  # once around: it goes on to the browser's own bars, or begins anew
        reached[at[0]] = (at[1], at[2])
    missed = [name for number, name in enumerate(controls) if number not in reached]
    assert missed == []
    assert [controls[n] for n, (has_ring, _) in reached.items() if not has_ring] == []
    assert [controls[n] for n, (_, is_seen) in reached.items() if not is_seen] == []


def test_shift_tab_leads_out_again(open_run: OpenRun, default_run_text: str) -> None:
    """No part keeps the focus: from each, one press leads on, and one press back."""
    run = open_run(default_run_text, at="step=20")
    controls = run.ask(_CONTROLS)
    for number in range(1, len(controls) - 1):
        run.page.locator(f"[data-control='{number}']").focus()
        run.page.keyboard.press("Shift+Tab")
        before = run.ask(_FOCUSED)
        assert before is not None and before[0] == number - 1, controls[number]


def test_the_help_opens_keeps_the_focus_and_closes(
    open_run: OpenRun, default_run_text: str
) -> None:
    run = open_run(default_run_text)
    run.press("?")
    dialog = run.page.get_by_role("dialog")
    assert dialog.is_visible() and "play, pause" in dialog.inner_text()
    run.press("ArrowRight", "Tab", "Tab", "Tab")
    assert run.ask(
        "() => document.activeElement === document.body || document.activeElement.closest('dialog') !== null"
    )
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
