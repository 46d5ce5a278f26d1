"""The events of a step are described completely and correctly, in both languages; each sentence
opens the lines of source that decided it; and the tokens are the text of the recorded run."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from workshop.watch.conftest import OpenPage
from workshop.watch.scene_runs import Pages, Shown, go, make_urgent, ready, visible
from workshop.watch.sentence_needs import TOLD, unproven
from workshop.watch.source_lines import ROOT
from workshop.watch.source_places import RULES
from workshop.watch.workloads import Cast

if TYPE_CHECKING:
    from playwright.sync_api import Page

NAMES = ("radix", "hash", "preempted", "forced", "prefill_first", "fcfs", "drafts", "tiers")


UNFOLD = """() => new Promise((done) => {
    const button = document.querySelector(".words-list .words-unfold");
    if (button === null) done(false);
    button?.click();
    requestAnimationFrame(() => requestAnimationFrame(() => done(true)));
})"""
HOLE = re.compile(r"(say|pool|cache|words|tokens|source|reason)\.(?!py\b)[a-z_]+|undefined|NaN")


def read_sentences(page: Page, unfold: bool = True) -> list[dict[str, Any]]:
    """Sentences of all groups: `{group, key, text, sources}`."""
    while unfold and page.evaluate(UNFOLD):
        pass
    return page.evaluate(
        """() => {
            const all = (host, selector, name) =>
                [...host.querySelectorAll(selector)].map((one) => one.dataset[name]);
            const groups = [...document.querySelectorAll(".words-list .words-group")];
            return groups.flatMap((group) =>
                [...(group.querySelector("ul")?.children ?? [group])].map((item) => ({
                    group: group.dataset.group,
                    key: item.dataset.key ?? "routine",
                    text: item.textContent,
                    sources: all(item, ".source-link", "sentence"),
                    requests: all(item, ".request-chip", "request"),
                })));
        }"""
    )


def telling_steps(shown: Shown) -> Iterator[int]:
    """Steps with event counts that no earlier step had. Steps with decodes only are represented by
    the first."""
    seen: set[frozenset] = set()
    for step in shown.film.steps():
        kinds = Counter(
            (name, *((value.get("stop") or [""])[:1] if name == "plan" else [len(value)]))
            for happened in step.happened
            for name, value in happened.items()
            if value and name not in ("result", "tokens")
        )
        if (happened := frozenset(kinds.items())) not in seen:
            seen.add(happened)
            yield step.number


# -- told completely, and truly


def expected_sentences(shown: Shown, number: int) -> Counter[tuple[str, str]]:
    """`(kind of sentence, group)`, for the kinds that are told one by one."""
    found: Counter[tuple[str, str]] = Counter()
    for (at, before, after), happened in zip(
        shown.step(number).frames, shown.step(number).happened
    ):
        plan, result = happened["plan"] or {}, happened["result"] or {}
        for name in happened["arrived"]:
            found["arrived", name] += 1
        for name, *_ in happened["preempted"]:
            found["preempted", name] += 1
        for name, _, is_back in happened["admitted"]:
            found["returned" if is_back else "admitted", name] += 1
        for name in happened["finished"]:  # a stop string is told instead
            is_cut = after["requests"][name]["finish"]["text_length"] is not None
            found["cut" if is_cut else "finished", name] += 1
        for name in happened["loads_begun"]:
            found["load_begun", name] += 1
        for name in happened["loads_ended"]:
            found["load_ended", name] += 1
        for name, load in after["loads"].items():
            was = before["loads"].get(name, {}).get("has_arrived", False)
            found["loaded", name] += load["has_arrived"] and not was
        takers = {block: name for name, blocks in happened["taken"].items() for block in blocks}
        found["evicted", "cache"] += len({takers.get(block) for block in happened["evicted"]})
        found["split", "cache"] += len(happened["split"])
        for name in plan.get("skipped", ()):
            found["parent" if name in plan.get("parents", ()) else "passed_over", name] += 1
        found["stop", ""] += "stop" in plan
        for name, (_, num_rejected) in result.get("verified", {}).items():
            found["drafts", name] += 1
            found["rejected", name] += num_rejected > 0
        found["failed", ""] += at == "failed"
    return +found


def differences(
    page: Page, shown: Shown, number: int, sentences: list[dict[str, Any]] | None = None
) -> list[str]:
    expected = expected_sentences(shown, number)
    kinds = {
        *("arrived", "preempted", "finished", "load_begun", "loaded", "load_ended", "admitted"),
        *("returned", "evicted", "split", "passed_over", "parent", "stop", "drafts", "rejected"),
        "failed",
        "cut",
    }
    shown_kinds = Counter(
        (kind, one["group"])
        for one in (sentences or read_sentences(page))
        if (kind := one["key"].removeprefix("say.").split(".")[0]) in kinds
    )
    return [
        f"step {number}: {kind} is told {shown_kinds[kind]} times, and was {expected[kind]} times"
        for kind in sorted(shown_kinds.keys() | expected.keys())
        if shown_kinds[kind] != expected[kind]
    ]


@pytest.mark.parametrize(
    "name",  # chains of hashes and FCFS have no sentences of their own
    [pytest.param(n, marks=pytest.mark.slow) if n in ("hash", "fcfs") else n for n in NAMES],
)
def test_each_event_has_one_sentence(name: str, shown: Pages, open_page: OpenPage) -> None:
    """With its numbers and its lines of source, and in both languages."""
    film = shown[name]
    page = ready(open_page(film.page))
    broken = unproven(page.evaluate(TOLD))
    for place, number in enumerate(telling_steps(film)):
        go(page, step=number)
        sentences = read_sentences(page)
        broken += differences(page, film, number, sentences)
        named = {r for one in sentences for r in [one["group"], *one["requests"]]}
        for happened in film.step(number).happened:
            assert set(happened["tokens"]) <= named, f"step {number}"
        for one in sentences:
            assert one["sources"], f"no lines for {one}"
        if place % 8 == 0:
            check_holes(page, number)
    assert not broken, "\n".join(broken[:5])


def check_holes(page: Page, number: int) -> None:
    """No sentence has one, in either language."""
    for language in ("en", "zh"):
        go(page, language=language)
        for selector in (".scene-words", ".scene-pool", ".scene-cache"):
            hole = HOLE.search(page.inner_text(selector))
            assert hole is None, f"step {number}: {hole}"
    texts = [one["text"] for one in read_sentences(page, unfold=False)]
    assert all(re.search(r"[\u4e00-\u9fff]", text) for text in texts), texts
    go(page, language="en")


def test_a_planted_lie_is_seen(shown: Pages, open_page: OpenPage) -> None:
    film = shown["preempted"]
    number = next(n for n in range(film.film.num_steps) if expected_sentences(film, n)["stop", ""])
    page = ready(open_page(film.page))
    go(page, step=number)
    assert not differences(page, film, number)
    page.evaluate(
        "(n) => { Watch.store.films[0].steps[n].frames.find(({plan}) => plan).plan.stop = null; }",
        number,
    )
    go(page, step=number - 1)
    go(page, step=number)
    assert differences(page, film, number)


def test_urgent_requests_displace_others(tmp_path: Path, cast: Cast, open_page: OpenPage) -> None:
    film = make_urgent(tmp_path, cast)
    page = ready(open_page(film.page))
    go(page, step=3)
    assert not differences(page, film, 3)
    sentences = {(one["group"], one["key"]): one for one in read_sentences(page)}
    lost = sentences["b", "say.preempted.seat"]
    assert "c is more urgent" in lost["text"]
    assert lost["sources"] == ["preempted:seat"]
    assert sentences["", "say.queue"]["text"].startswith("the queue stands in the order d, b")
    assert sentences["", "say.stop.others"]["text"].startswith("no other is admitted, 2 waiting")


# -- the lines of source


@pytest.mark.parametrize(
    "is_each_sentence", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["kinds", "all"]
)
def test_each_link_opens_the_lines_that_it_names(
    is_each_sentence: bool, shown: Pages, open_page: OpenPage
) -> None:
    """One sentence of each kind, or each sentence."""
    opened: set[str] = set()
    visited: set[str] = set()
    for name in NAMES:
        film = shown[name]
        page = ready(open_page(film.page))
        for number in telling_steps(film):
            kinds = {name for name, _ in expected_sentences(film, number)}
            if not is_each_sentence and kinds <= visited:
                continue
            visited |= kinds
            go(page, step=number)
            new = {s for one in read_sentences(page) for s in one["sources"]}
            for sentence in sorted(new):
                name_opened = sentence if is_each_sentence else sentence.split(":")[0]
                if name_opened in opened:
                    continue
                opened.add(name_opened)
                button = page.locator(f".source-link[data-sentence='{sentence}']").first
                button.click()
                check_window(page, button.inner_text())
                page.keyboard.press("Escape")
                page.wait_for_selector(".source", state="hidden")
    kinds = {sentence.split(":")[0] for sentence in opened}
    assert len(opened) >= (25 if is_each_sentence else 10), sorted(opened)
    assert {"admitted", "preempted", "finished", "taken", "evicted", "split", "reason"} <= kinds
    assert kinds <= {rule.sentence.split(":")[0] for rule in RULES}


def check_window(page: Page, name: str) -> None:
    """The window shows the function that its title names, as it is in the file."""
    title = page.inner_text("#source-title")
    found = re.fullmatch(r"(\S+), line (\d+), in (\S+)", title)
    assert found is not None, title
    file, line = found[1], int(found[2])
    assert name == f"{file.rsplit('/', 1)[-1]}:{line}"
    source = (ROOT / file).read_text(encoding="utf-8").splitlines()
    lines = page.evaluate(
        """() => [...document.querySelectorAll(".source-line")].map((one) =>
            [+one.dataset.line, one.lastChild.textContent])"""
    )
    assert lines[0][0] == line and f"def {found[3].rsplit('.', 1)[-1]}(" in lines[0][1]
    for number, text in lines:
        assert source[number - 1].strip() == text.strip()


def test_the_window_is_opened_and_closed_by_keys_alone(shown: Pages, open_page: OpenPage) -> None:
    page = ready(open_page(shown["hash"].page, at="step=6&request=a"))
    link = page.locator(".source-link").first
    link.focus()
    page.keyboard.press("Enter")
    page.wait_for_selector(".source")
    box = page.locator(".source").bounding_box()
    assert box is not None
    assert box["x"] >= 0 and box["y"] >= 0
    assert box["x"] + box["width"] <= 1280 and box["y"] + box["height"] <= 800
    page.keyboard.press("ArrowRight")  # scrolls the lines, and does not step
    page.keyboard.press("Escape")
    page.wait_for_selector(".source", state="hidden")
    state = page.evaluate("[Watch.store.step, Watch.store.request]")
    assert state == [6, "a"], "the key went through to the page"
    assert link.evaluate("(link) => link === document.activeElement")


def test_an_unknown_engine_has_sentences_without_links(shown: Pages, open_page: OpenPage) -> None:
    page = ready(open_page(shown["hash"].page))
    page.evaluate("Watch.store.films[0].run.scheduler = 'another'")
    go(page, step=1)
    go(page, step=0)
    admitted = [one for one in read_sentences(page) if one["key"] == "say.admitted"]
    assert admitted and admitted[0]["sources"] == []


# -- tokens as text


def read_tokens(page: Page) -> list[tuple[str, str]]:
    """`(text, class names)` of each, legend left out."""
    found = page.evaluate(
        """() => [...document.querySelectorAll(".words-tokens .tokens-row .token")].map((one) =>
            [one.textContent, one.className])"""
    )
    return [(text, look) for text, look in found]


def test_a_chip_among_the_tokens_can_be_clicked(shown: Pages, open_page: OpenPage) -> None:
    page = ready(open_page(shown["hash"].page, at="step=6"))
    chip = page.locator(".words-tokens .request-chip").first
    name = chip.get_attribute("data-request")
    box = chip.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.wait_for_timeout(100)
    page.mouse.down()
    page.mouse.up()
    assert page.evaluate("Watch.store.request") == name
    page.wait_for_selector(f".words-tokens .tokens-row:not(.is-short)[data-request={name}]")


def test_drafts_are_underlined_or_struck_out(shown: Pages, open_page: OpenPage) -> None:
    """All other tokens of a request are its text."""
    film = shown["drafts"]
    page = ready(open_page(film.page))
    accepted: dict[str, list[int]] = {name: [] for name in "abc"}  # positions, since the beginning
    verified: Counter[str] = Counter()
    texts: dict[int, str] = {}  # what a token adds, where it was sampled first
    for step in film.film.steps():
        for name, tokens in step.state["outputs"].items():
            for token, text_of in zip(tokens, step.state["pieces"][name]):
                texts.setdefault(token, text_of)
    for number in range(film.film.num_steps):
        step, before = film.step(number), film.state(number - 1)
        for name, (num_accepted, num_rejected) in step.result.get("verified", {}).items():
            first = len(before["requests"][name]["prompt"]) + len(before["outputs"][name])
            accepted[name] += range(first, first + num_accepted)
            verified["accepted"] += num_accepted
            verified["rejected"] += num_rejected
            go(page, step=number, request=name)
            tokens = read_tokens(page)
            rejected = [text for text, look in tokens if "is-rejected" in look]
            assert len(rejected) == num_rejected
            request, outputs = step.state["requests"][name], step.state["outputs"][name]
            kept = [pair for pair in tokens if "is-rejected" not in pair[1]]
            pieces = [*request["prompt_pieces"], *step.state["pieces"][name]]
            assert [text for text, _ in kept] == [visible(text_of) for text_of in pieces]
            sides = ["is-prompt" in look for _, look in kept]
            assert sides == [True] * len(request["prompt"]) + [False] * len(outputs)
            drafts = step.plans[0]["drafts"][name][num_accepted:]
            for text, draft in zip(rejected, drafts):
                assert text == visible(texts.get(draft, text))
            underlined = page.evaluate(
                "[...document.querySelectorAll('.tokens-row .token.is-accepted')]"
                ".map((token) => Number(token.dataset.position))"
            )
            assert underlined == accepted[name], f"step {number}, {name}"
            new = [text for text, look in tokens if "is-now" in look and "is-output" in look]
            num_new = len(outputs) - len(before["outputs"][name])
            assert new == [visible(text_of) for text_of in pieces[-num_new:]]
    assert verified["accepted"] and verified["rejected"], verified


def test_a_prompt_chunk_is_highlighted_in_its_step(shown: Pages, open_page: OpenPage) -> None:
    film = shown["preempted"]
    page = ready(open_page(film.page))
    num_chunks = 0
    for number in range(6):
        (plan,) = film.step(number).plans
        for name, start, num in zip(plan["requests"], plan["starts"], plan["num_tokens"]):
            if num == 1:
                continue
            go(page, step=number, request=name)
            lit = page.evaluate(
                "[...document.querySelectorAll('.tokens-row .is-now.is-prompt')]"
                ".map((token) => Number(token.dataset.position))"
            )
            assert lit == list(range(start, start + num))
            num_chunks += 1
    assert num_chunks > 3


def test_long_lists_are_folded_and_unfold(shown: Pages, open_page: OpenPage) -> None:
    page = ready(open_page(shown["hash"].page))
    page.evaluate(
        """() => { const film = Watch.store.films[0];
            const {frames} = film.steps[0];
            const [arrived] = frames[0].arrived;
            frames[0].arrived = Array.from({length: 30}, (_, i) => `x${i}`);
            const after = film.frameBehind(1);
            for (const id of frames[0].arrived) after.requests[id] = after.requests[arrived];
        }"""
    )
    go(page, step=1)
    go(page, step=0)
    folded = read_sentences(page, unfold=False)
    assert len({one["group"] for one in folded}) < 15
    page.click(".words-list .words-unfold")
    unfolded = read_sentences(page)
    assert {f"x{i}" for i in range(30)} <= {one["group"] for one in unfolded}
