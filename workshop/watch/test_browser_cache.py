"""The prefix cache on the page is that of the film: every block or node with its text, what a step
matched, cut, published and evicted; and nothing moves while it lives."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from common.events.frames import nodes, prefix_of
from workshop.watch.conftest import OpenPage, until
from workshop.watch.scene_runs import Pages, Shown, blocks_in, go, lookups_in, ready, visible

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


def lookups_of(shown: Shown, number: int) -> dict[str, list[int]]:
    return lookups_in(shown.step(number), shown.run.block_size)


def expected_boxes(shown: Shown, number: int) -> list[dict[str, Any]]:
    step, state = shown.step(number), shown.state(number)
    found = {block for blocks in lookups_of(shown, number).values() for block in blocks}
    new, heads = set(blocks_in(step, "published")), set(blocks_in(step, "split"))
    cached, is_tree = state["cached"], shown.run.prefix_cache == "radix"
    runs_of_blocks = nodes(state) if is_tree else [[int(block)] for block in cached]
    texts = pieces_of(shown)
    boxes = [
        {
            "blocks": node,
            "text": "".join(texts[token] for b in node for token in cached[str(b)]["tokens"]),
            "isGone": False,
            "isUsed": state["refs"][str(node[0])] > 1,
            "isMatch": node[0] in found,
            "isNew": bool(new & set(node)),
            "isSplit": node[0] in heads,
        }
        for node in runs_of_blocks
    ]
    boxes += [
        dict.fromkeys(("isUsed", "isMatch", "isNew", "isSplit"), False)
        | {"blocks": [block], "text": "", "isGone": True}
        for block in blocks_in(step, "evicted")
    ]
    return sorted(boxes, key=lambda box: (box["isGone"], box["blocks"]))


def pieces_of(shown: Shown) -> dict[int, str]:
    """The text of each token where it first extends an output."""
    found: dict[int, str] = {}

    def note(tokens: list[int], texts: list[str]) -> None:
        for token, text in zip(tokens, texts):
            if text:
                found.setdefault(token, visible(text))

    for step in shown.film.steps():
        for row in step.state["requests"].values():
            note(row["prompt"], row["prompt_pieces"])
        for name, tokens in step.state["outputs"].items():
            note(tokens, step.state["pieces"][name])
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
    """Check the matches and events shown. Returns the kinds that occurred."""
    step = shown.step(number)
    matches = {name: len(blocks) for name, blocks in lookups_of(shown, number).items()}
    found = page.locator(".cache-match").all_inner_texts()
    assert found == [f"{r}: {n} block{'s' if n > 1 else ''}" for r, n in matches.items()]
    happened = {"matched"} if matches else set()
    for block in blocks_in(step, "split"):
        assert str(block) in page.inner_text(".cache-did[data-did=split]")
        happened.add("split")
    if evicted := blocks_in(step, "evicted"):
        about = page.inner_text(".cache-did[data-did=evict]")
        assert about.startswith("evicted") and str(evicted[0]) in about
        happened.add("evicted")
    return happened


def places_of(boxes: list[dict[str, Any]]) -> dict[int, tuple[int, int]]:
    """The place of each live block."""
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
    """A block keeps its place in every step of its life, from whichever side a reader comes. No two
    blocks share one. In a hash chain its column is the length of its prefix."""
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
                prefix = prefix_of(film.state(number), box["blocks"][0])
                depth = len(prefix) // film.run.block_size - 1
                lefts.setdefault(depth, set()).add(box["left"] - FIRST_LEFT)
    assert not broken, "\n".join(broken[:4])
    assert happened == {"matched", "evicted"} | ({"split"} if name == "radix" else set())
    born = Counter(block for step in film.film.steps() for block in blocks_in(step, "published"))
    assert max(born.values()) > 1, "no block was cached twice: this proves little"
    assert lefts == {depth: {depth * min(lefts[1])} for depth in lefts}
    for number in range(1, last + 1):
        evicted = set(blocks_in(film.step(number), "evicted"))
        before, after = seen[number - 1], seen[number]
        for block in before.keys() & after.keys() - evicted:
            assert before[block][1] == after[block][1], f"block {block} moved in step {number}"


def test_a_planted_lie_is_seen(shown: Pages, open_page: OpenPage) -> None:
    film = shown["radix"]
    page = ready(open_page(film.page, **LARGE))
    go(page, step=2)
    assert not differences(read_boxes(page), film, 2)
    head = nodes(film.state(3))[-1][0]
    lie = "(head) => { delete Watch.store.films[0].stateAfter(3).cached[head].begins_node; }"
    page.evaluate(lie, head)
    go(page, step=3)
    assert differences(read_boxes(page), film, 3)
    block = next(iter(film.state(4)["cached"]))
    page.evaluate("(b) => Watch.store.films[0].stateAfter(4).cached[b].tokens.reverse()", block)
    go(page, step=4)
    assert differences(read_boxes(page), film, 4)


def test_a_chosen_request_is_followed_through_the_cache(shown: Pages, open_page: OpenPage) -> None:
    film = shown["radix"]
    page = ready(open_page(film.page, **LARGE))
    number = next(n for n in range(film.film.num_steps) if lookups_of(film, n))
    name = next(iter(lookups_of(film, number)))
    go(page, step=number)
    page.click(f".cache-match[data-request={name}]")
    page.wait_for_selector(".cache-box.is-lit")
    lit = page.evaluate(
        "[...document.querySelectorAll('.cache-box.is-lit')].map((box) => box.dataset.blocks)"
    )
    state = film.state(number)
    on_path = [b for b in state["tables"][name]["0"] if str(b) in state["cached"]]
    assert sorted(int(b) for blocks in lit for b in blocks.split()) == sorted(on_path)


def test_a_block_without_its_parent_is_highlighted(shown: Pages, open_page: OpenPage) -> None:
    """An engine with a fault may evict the head of a prompt before its tail."""
    film, number = shown["hash"], 8
    page = ready(open_page(film.page, **LARGE))
    go(page, step=number)
    cached = film.state(number)["cached"]
    child = next(int(block) for block, row in cached.items() if row.get("parent"))
    page.evaluate(
        "([step, b]) => { Watch.store.films[0].stateAfter(step).cached[b].parent = 0; }",
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
    parents = {int(block): row.get("parent") for block, row in film.state(number)["cached"].items()}
    roots = [block for block, parent in parents.items() if parent is None]
    page.focus(".cache-scroll")
    page.keyboard.press("ArrowRight")
    for _ in range(3):
        chosen = page.evaluate("Watch.store.block")
        children = [block for block, parent in parents.items() if parent == chosen]
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
