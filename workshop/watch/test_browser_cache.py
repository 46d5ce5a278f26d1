"""The prefix cache on the page is that of the film: every block or node with its text, what a step
matched, cut, published and evicted; and nothing moves while it lives."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from workshop.watch.conftest import OpenPage, until
from workshop.watch.scene_runs import Pages, Shown, go, ready, visible

if TYPE_CHECKING:
    from playwright.sync_api import Page

NAMES = ("hash", "radix")
FIRST_LEFT = 10  # px: where the first column begins
LARGE = {"width": 3600, "height": 1800}  # so that all boxes are in sight, and none is left out


def read_boxes(page: Page) -> list[dict[str, Any]]:
    boxes = page.evaluate(
        """() => [...document.querySelectorAll(".cache-box")].map((box) => ({
            blocks: box.dataset.blocks.split(" ").map(Number),
            text: box.querySelector(".cache-text").textContent,
            isGone: box.classList.contains("is-gone"),
            isUsed: box.classList.contains("is-used"),
            isMatch: box.classList.contains("is-match"),
            isNew: box.classList.contains("is-new"),
            isSplit: box.classList.contains("is-split"),
            left: box.offsetLeft, top: box.offsetTop, width: box.offsetWidth,
        }))"""
    )
    return sorted(boxes, key=lambda box: (box["isGone"], box["blocks"]))


def events_of(shown: Shown, number: int, kind: str) -> list[Any]:
    return [event for event in shown.step(number).events if event.kind == kind]


def own_of(event: Any) -> list[int]:
    """Of a publication, the blocks that the cache did not have."""
    return [kept for given, kept in zip(event.given, event.kept) if given == kept]


def expected_boxes(shown: Shown, number: int) -> list[dict[str, Any]]:
    matched = {m.request: m for m in events_of(shown, number, "matched")}.values()
    found = {block for event in matched for block in event.blocks}
    new = {b for event in events_of(shown, number, "published") for b in own_of(event)}
    heads = {event.block for event in events_of(shown, number, "split")}
    gone = [b for event in events_of(shown, number, "evicted") for b in event.blocks]
    state = shown.state(number)
    nodes = state.nodes() if shown.run.prefix_cache == "radix" else [[b] for b in state.cached]
    pieces = pieces_of(shown)
    boxes = [
        {
            "blocks": node,
            "text": "".join(pieces[token] for b in node for token in state.cached[b].tokens),
            "isGone": False,
            "isUsed": state.ref_cnt[node[0]] > 1,
            "isMatch": node[0] in found,
            "isNew": bool(new & set(node)),
            "isSplit": node[0] in heads,
        }
        for node in nodes
    ]
    boxes += [
        dict.fromkeys(("isUsed", "isMatch", "isNew", "isSplit"), False)
        | {"blocks": [block], "text": "", "isGone": True}
        for block in gone
    ]
    return sorted(boxes, key=lambda box: (box["isGone"], box["blocks"]))


def pieces_of(shown: Shown) -> dict[int, str]:
    """What each token reads, where it first adds to a text."""
    found: dict[int, str] = {}

    def note(tokens: list[int], pieces: list[str]) -> None:
        for token, piece in zip(tokens, pieces):
            if piece:
                found.setdefault(token, visible(piece))

    for event in shown.film.events:
        if event.kind == "arrived":
            note(event.prompt, event.pieces)
        elif event.kind == "computed":
            for name, tokens in event.tokens.items():
                note(tokens, event.pieces.get(name, []))
    return found


def differences(boxes: list[dict[str, Any]], shown: Shown, number: int) -> list[str]:
    found = [
        {name: value for name, value in box.items() if name not in ("left", "top", "width")}
        for box in boxes
    ]
    expected = expected_boxes(shown, number)
    if [box["blocks"] for box in found] != [box["blocks"] for box in expected]:
        blocks = [[box["blocks"] for box in boxes] for boxes in (found, expected)]
        return [f"step {number}: the page has the boxes {blocks[0]}, the film {blocks[1]}"]
    pairs = zip(found, expected, strict=True)
    return [f"step {number}: the page has {a}, the film {b}" for a, b in pairs if a != b]


def check_what_is_told(page: Page, shown: Shown, number: int) -> set[str]:
    """What was matched, and what happened. Returns which of it did."""
    matches = {m.request: len(m.blocks) for m in events_of(shown, number, "matched")}
    found = page.locator(".cache-match").all_inner_texts()
    assert found == [f"{r}: {n} block{'s' if n > 1 else ''}" for r, n in matches.items()]
    happened = {"matched"} if matches else set()
    for event in events_of(shown, number, "split"):
        assert str(event.block) in page.inner_text(".cache-did[data-did=split]")
        happened.add("split")
    if gone := [b for e in events_of(shown, number, "evicted") for b in e.blocks]:
        said = page.inner_text(".cache-did[data-did=evict]")
        assert said.startswith("evicted") and str(gone[0]) in said
        happened.add("evicted")
    return happened


def places_of(boxes: list[dict[str, Any]]) -> dict[int, tuple[int, int]]:
    """Of each block that lives."""
    found = {}
    for box in boxes:
        if not box["isGone"]:
            width = box["width"] / len(box["blocks"])
            for i, block in enumerate(box["blocks"]):
                found[block] = (round((box["left"] + i * width) / 10), box["top"])
    return found


@pytest.mark.parametrize("name", NAMES)
def test_boxes_are_the_film_in_whatever_order_one_looks(
    name: str, shown: Pages, open_page: OpenPage
) -> None:
    """A block's place is the same in every step of its life, and from whichever side one comes. No
    two share one. In a chain of hashes it stands as far to the right as its prefix is long."""
    film = shown[name]
    page = ready(open_page(film.page, **LARGE))
    last = film.film.num_steps - 1
    broken: list[str] = []
    happened: set[str] = set()
    seen: dict[int, dict[int, tuple[int, int]]] = {}
    lefts: dict[int, set[int]] = {}  # by how many blocks come before
    for number in [*range(last + 1), last, last // 2, 3, last - 1]:
        go(page, step=number)
        boxes = read_boxes(page)
        broken += differences(boxes, film, number)
        happened |= check_what_is_told(page, film, number)
        places = places_of(boxes)
        assert len(set(places.values())) == len(places), f"two blocks in one place, step {number}"
        assert seen.setdefault(number, places) == places
        for box in boxes if name == "hash" else []:
            if not box["isGone"]:
                prefix = film.state(number).prefix_of(box["blocks"][0])
                depth = len(prefix) // film.run.block_size - 1
                lefts.setdefault(depth, set()).add(box["left"] - FIRST_LEFT)
    assert not broken, "\n".join(broken[:4])
    assert happened == {"matched", "evicted"} | ({"split"} if name == "radix" else set())
    born = Counter(b for e in film.film.events if e.kind == "published" for b in own_of(e))
    assert max(born.values()) > 1, "no block was cached twice: this proves little"
    assert lefts == {depth: {depth * min(lefts[1])} for depth in lefts}
    for number in range(1, last + 1):
        gone = {b for e in events_of(film, number, "evicted") for b in e.blocks}
        before, after = seen[number - 1], seen[number]
        for block in before.keys() & after.keys() - gone:
            assert before[block][1] == after[block][1], f"block {block} moved in step {number}"


def test_a_planted_lie_is_seen(shown: Pages, open_page: OpenPage) -> None:
    film = shown["radix"]
    page = ready(open_page(film.page, **LARGE))
    go(page, step=2)
    assert not differences(read_boxes(page), film, 2)
    head = sorted(film.state(3).node_heads)[-1]
    page.evaluate("(head) => Watch.store.films[0].stateAfter(3).nodeHeads.delete(head)", head)
    go(page, step=3)
    assert differences(read_boxes(page), film, 3)
    block = next(iter(film.state(4).cached))
    page.evaluate("(b) => Watch.store.films[0].stateAfter(4).cached.get(b).tokens.reverse()", block)
    go(page, step=4)
    assert differences(read_boxes(page), film, 4)


def test_a_chosen_request_is_followed_through_the_cache(shown: Pages, open_page: OpenPage) -> None:
    film = shown["radix"]
    page = ready(open_page(film.page, **LARGE))
    number = next(n for n in range(film.film.num_steps) if events_of(film, n, "matched"))
    name = events_of(film, number, "matched")[0].request
    go(page, step=number)
    page.click(f".cache-match[data-request={name}]")
    page.wait_for_selector(".cache-box.is-lit")
    lit = page.evaluate(
        "[...document.querySelectorAll('.cache-box.is-lit')].map((box) => box.dataset.blocks)"
    )
    state = film.state(number)
    on_path = [b for b in state.requests[name].table if b in state.cached]
    assert sorted(int(b) for blocks in lit for b in blocks.split()) == sorted(on_path)


def test_a_block_whose_parent_was_evicted_is_lit_alone(shown: Pages, open_page: OpenPage) -> None:
    """An engine with a fault may evict the head of a prompt before its tail."""
    film, number = shown["hash"], 8
    page = ready(open_page(film.page, **LARGE))
    go(page, step=number)
    child = next(block for block, one in film.state(number).cached.items() if one.parent)
    page.evaluate(
        "([step, b]) => { Watch.store.films[0].stateAfter(step).cached.get(b).parent = 0; }",
        [number, child],
    )
    go(page, block=child)
    lit = page.evaluate(
        "[...document.querySelectorAll('.cache-box.is-lit')].map((box) => box.dataset.blocks)"
    )
    assert lit == [str(child)]
    assert f"Block {child}" in page.inner_text(".cache-details")


def test_the_keyboard_goes_along_a_chain(shown: Pages, open_page: OpenPage) -> None:
    film = shown["hash"]
    number = 8
    page = ready(open_page(film.page, at=f"step={number}&request=a"))
    cached = film.state(number).cached
    roots = [block for block, one in cached.items() if one.parent is None]
    page.focus(".cache-scroll")
    page.keyboard.press("ArrowRight")
    for _ in range(3):
        chosen = page.evaluate("Watch.store.block")
        children = [block for block, one in cached.items() if one.parent == chosen]
        page.keyboard.press("ArrowRight")
        go(page)
        assert page.evaluate("Watch.store.block") in (children or [chosen])
    for _ in range(5):
        page.keyboard.press("ArrowLeft")
    go(page)
    root = page.evaluate("Watch.store.block")
    assert root in roots
    active = page.get_attribute(".cache-scroll", "aria-activedescendant")
    assert page.get_attribute(f"#{active}", "data-blocks") == str(root)
    assert "first of its prefix" in page.inner_text(".cache-details")
    page.keyboard.press("ArrowDown")
    go(page)
    assert page.evaluate("Watch.store.block") != root
    page.keyboard.press("Escape")
    state = page.evaluate("[Watch.store.block, Watch.store.step, Watch.store.request]")
    assert state == [None, number, "a"]


def test_without_a_cache_there_is_no_panel_and_beside_one_a_sentence(
    shown: Pages, open_page: OpenPage
) -> None:
    page = ready(open_page(shown["preempted"].page))
    assert page.is_hidden(".scene-cache") and page.is_visible(".scene-pool")
    page = ready(open_page(shown["radix"].page))
    without = shown["preempted"].page.with_suffix(".jsonl")
    page.set_input_files("input[type=file]", [without, shown["radix"].page.with_suffix(".jsonl")])
    until(page, "Watch.store.films.length === 2")
    go(page)
    assert "no prefix cache" in page.inner_text(".cache-about >> nth=0")
    assert not page.is_visible(".cache-scroll >> nth=0") and page.is_visible(
        ".cache-scroll >> nth=1"
    )
    go(page, language="zh")
    assert "没有前缀缓存" in page.inner_text(".cache-about >> nth=0")
