"""The block pool on the page is the block pool of the film: whose each block is, how many hold it,
what is free and in which order, what a step did; and what lights up is what is pointed at."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from common.events.frames import Frame
from workshop.watch.conftest import OpenPage, until
from workshop.watch.scene_runs import (
    SCRIPTS,
    Pages,
    Shown,
    blocks_in,
    go,
    make_one,
    ready,
    visible,
)
from workshop.watch.workloads import Cast

if TYPE_CHECKING:
    from playwright.sync_api import Page

NAMES = ("hash", "radix", "preempted", "tiers")
NUM_NEXT = 6  # blocks in each order that the page numbers
WIDE = {"width": 1920, "height": 1080}  # cells with room for every number


# -- what the page says, and what the film says


def read_cells(page: Page) -> list[dict[str, Any]]:
    return page.evaluate(
        """() => [...document.querySelectorAll(".pool-cell")].map((cell) => ({
            block: Number(cell.dataset.block),
            state: cell.className.match(/is-(null|free|held|idle|loading)/)[1],
            change: cell.className.match(/was-(\\w+)/)?.[1] ?? null,
            label: cell.querySelector(".pool-label").textContent,
            refs: Number(cell.querySelector(".pool-refs").textContent || 0),
            order: Number(cell.querySelector(".pool-order").textContent || 0),
            published: cell.classList.contains("is-published"),
        }))"""
    )


def expected_cells(shown: Shown, number: int) -> list[dict[str, Any]]:
    changes = changes_of(shown, number)
    state = shown.state(number)
    idle, free, tables = state["evictable"], state["free"], state["tables"]
    order = {block: i for some in (free, idle) for i, block in enumerate(some[:NUM_NEXT], 1)}
    loads = {b: name for name, load in state["loads"].items() for b in load["blocks"]}
    loading = {b for b, name in loads.items() if not state["loads"][name]["has_arrived"]}
    cells = []
    for block in range(shown.run.num_blocks):
        refs = state["refs"].get(str(block), 0)
        users = [name for name in state["running"] if block in tables[name]["0"]]
        others = f"+{len(users) - 1}" if len(users) > 1 else ""
        owner = f"{users[0]}{others}" if users else loads.get(block, "")
        kind = (
            "null" if block == 0 else "free" if refs == 0 else "idle" if block in idle else "held"
        )
        cells.append(
            {
                "block": block,
                "state": "loading" if block in loading else kind,
                "change": changes.get(block),
                "label": "∅" if block == 0 else owner,
                "refs": refs if refs > 1 else 0,
                "order": order.get(block, 0),
                "published": str(block) in state["cached"] and refs > 1,
            }
        )
    return cells


def changes_of(shown: Shown, number: int) -> dict[int, str]:
    """The outline of a block: of several events, the most important one."""
    step, found = shown.step(number), {}
    for kind in ("freed", "evicted", "published", "shared", "taken"):
        replaced = [row for happened in step.happened for row in happened["known"]]
        also = {"freed": [given for _, given, _ in replaced], "shared": [b for *_, b in replaced]}
        found |= dict.fromkeys([*blocks_in(step, kind), *also.get(kind, [])], kind)
    return found | dict.fromkeys(loaded_in(shown, number), "loaded")


def loaded_in(shown: Shown, number: int) -> set[int]:
    """The blocks whose KV has arrived from a tier."""
    before = shown.state(number - 1)["loads"]
    return {
        block
        for name, load in shown.state(number)["loads"].items()
        if load["has_arrived"] and not before.get(name, load)["has_arrived"]
        for block in load["blocks"]
    }


def read_summary(page: Page) -> dict[str, Any]:
    """The next block of each order, the number of blocks of a kind, and the counts of the legend
    for a step."""
    return page.evaluate(
        """() => {
            const texts = (selector) =>
                [...document.querySelectorAll(selector)].map((one) => one.textContent);
            const counted = (change) => Number(document.querySelector(
                `.pool-change[data-change=${change}], .is-none[data-change=${change}]`
            )?.dataset.count ?? 0);  // a run without tiers has none for what is loaded
            return {
                counts: document.querySelector(".pool-counts").innerText,
                free: texts("[data-order=next_taken] .pool-next"),
                idle: texts("[data-order=next_evicted] .pool-next"),
                taken: counted("taken"), loaded: counted("loaded"),
            };
        }"""
    )


def expected_summary(shown: Shown, number: int) -> dict[str, Any]:
    state = shown.state(number)
    idle, free, usable = state["evictable"], state["free"], shown.run.num_blocks - 1
    counts = f"{usable - len(idle) - len(free)} in use · {len(idle)} cached, unused"
    taken = set(blocks_in(shown.step(number), "taken"))
    return {
        "counts": f"{counts} · {len(free)} free · of {usable}",
        "free": [str(block) for block in free[:NUM_NEXT]],
        "idle": [str(block) for block in idle[:NUM_NEXT]],
        "taken": len(taken),
        "loaded": len(loaded_in(shown, number)),
    }


def differences(page: Page, shown: Shown, number: int) -> list[str]:
    found = [*read_cells(page), read_summary(page)]
    expected = [*expected_cells(shown, number), expected_summary(shown, number)]
    pairs = zip(found, expected, strict=True)
    return [f"step {number}: the page has {a}, the film {b}" for a, b in pairs if a != b]


def steps_of(shown: Shown, every: int = 5) -> list[int]:
    """And those that load something, and the last."""
    last = shown.film.num_steps - 1
    loads = [number for number in range(last) if loaded_in(shown, number)]
    return sorted({*range(0, last, every), *loads, last})


@pytest.mark.parametrize("name", NAMES)
def test_cells_are_the_film_in_whatever_order_one_looks(
    name: str, shown: Pages, open_page: OpenPage
) -> None:
    film = shown[name]
    page = ready(open_page(film.page, **WIDE))
    broken = []
    for number in [*steps_of(film), *reversed(steps_of(film, 7))]:
        go(page, step=number)
        broken += differences(page, film, number)
    assert not broken, "\n".join(broken[:5])


def test_a_planted_lie_is_seen(shown: Pages, open_page: OpenPage) -> None:
    film = shown["hash"]
    page = ready(open_page(film.page, **WIDE))
    go(page, step=6)
    assert not differences(page, film, 6)
    page.evaluate("Watch.store.films[0].stateAfter(7).refs[2] += 1")
    go(page, step=7)
    assert any("'block': 2" in sentence for sentence in differences(page, film, 7))
    page.evaluate("Watch.store.films[0].stateAfter(8).tables.a[0].reverse()")
    go(page, step=8, request="a")
    assert lit_cells(page) != lit_of(film.state(8), "a")


# -- what lights up


def lit_cells(page: Page) -> list[tuple[int, str]]:
    """`(block, what it says)` of each, by what it says."""
    found = page.evaluate(
        """() => [...document.querySelectorAll(".pool-cell.is-lit")].map((cell) =>
            [Number(cell.dataset.block), cell.querySelector(".pool-label").textContent])"""
    )
    return sorted(((block, label) for block, label in found), key=lambda pair: int(pair[1] or 0))


def lit_of(state: Frame, request: str) -> list[tuple[int, str]]:
    return [(block, str(place)) for place, block in enumerate(state["tables"][request]["0"])]


def test_a_request_lights_its_table_in_order(shown: Pages, open_page: OpenPage) -> None:
    film = shown["hash"]
    page = ready(open_page(film.page, **WIDE))
    go(page, step=6)
    state = film.state(6)
    table = state["tables"]["b"]["0"]
    assert len(table) > 3
    for chip in (".queue-list button[data-request=b]", ".request-chip[data-request=b] >> nth=0"):
        page.hover(chip)
        page.wait_for_selector(".pool-cell.is-lit")
        assert lit_cells(page) == lit_of(state, "b")
        page.mouse.move(5, 5)
        page.wait_for_selector(".pool-cell.is-lit", state="detached")
    page.hover(chip)
    page.wait_for_selector(".pool-cell.is-lit")
    size = film.run.block_size
    rows = page.locator(".pool-table tr").all()
    assert rows[0].locator("td").all_inner_texts() == [
        f"{i * size}–{(i + 1) * size - 1}" for i in range(len(table))
    ]
    assert rows[1].locator("td").all_inner_texts() == [str(block) for block in table]
    shared = page.locator(".pool-table td.is-shared").all_inner_texts()
    others = {b for n in state["running"] if n != "b" for b in state["tables"][n]["0"]}
    assert shared == [str(block) for block in table if block in others]
    assert shared, "nobody shares: this proves nothing"


def test_a_block_names_its_users_and_its_text(shown: Pages, open_page: OpenPage) -> None:
    film = shown["hash"]
    page = ready(open_page(film.page, **WIDE))
    go(page, step=6)
    state, size = film.state(6), film.run.block_size
    for block, cached in [(int(block), row) for block, row in state["cached"].items()][:6]:
        page.hover(f".pool-cell[data-block='{block}']")
        page.wait_for_selector(f".pool-about b:text-is('Block {block}')")
        about = page.inner_text(".pool-about")
        users = [name for name in state["running"] if block in state["tables"][name]["0"]]
        holders = ", ".join([*users, "the cache"])
        assert f"references: {holders} ·" in about
        assert f"hash {cached['hash']}" in about
        above = cached.get("parent")
        parent = f"after block {above}" if above else "first of its prefix"
        assert parent in about
        name = users[0]
        place = state["tables"][name]["0"].index(block)
        texts = [*state["requests"][name]["prompt_pieces"], *state["pieces"][name]]
        texts = texts[place * size : (place + 1) * size]
        text = page.locator(".pool-details .token").all_text_contents()
        assert text == [visible(text_of) for text_of in texts]


def test_the_keyboard_goes_from_block_to_block_and_steps_nothing(
    shown: Pages, open_page: OpenPage
) -> None:
    page = ready(open_page(shown["hash"].page, at="step=6&request=a"))
    page.focus(".pool-cells")
    columns = page.evaluate(
        "getComputedStyle(document.querySelector('.pool-cells'))"
        ".gridTemplateColumns.split(' ').length"
    )
    for key, block in [
        ("ArrowRight", 1),
        ("ArrowRight", 2),
        ("ArrowDown", 2 + columns),
        ("ArrowLeft", 1 + columns),
        ("ArrowUp", 1),
        ("End", 33),
        ("ArrowRight", 33),
        ("Home", 0),
    ]:
        page.keyboard.press(key)
        page.wait_for_selector(f".pool-about b:text-is('Block {block}')")
        active = page.get_attribute(".pool-cells", "aria-activedescendant")
        assert page.get_attribute(f"#{active}", "data-block") == str(block)
        assert page.get_attribute(f"#{active}", "aria-label").startswith(f"Block {block} ·")
    page.keyboard.press("Escape")
    page.wait_for_selector(".pool-cell.is-cursor", state="detached")
    assert page.evaluate("[Watch.store.step, Watch.store.request]") == [6, "a"]


# -- few blocks and many


@pytest.fixture(scope="module")
def sizes(tmp_path_factory: pytest.TempPathFactory, cast: Cast) -> dict[int, Shown]:
    folder, script = tmp_path_factory.mktemp("sizes"), SCRIPTS["hash"]
    script = type(script)((script.visits[0],), script.config)
    return {
        n: make_one(folder, f"n{n}", script.but(num_blocks=n, block_size=16 if n < 20 else 4), cast)
        for n in (8, 400, 401, 4096)  # up to 400 a block is an element
    }


def test_every_block_is_inside_an_area_that_does_not_grow(
    sizes: dict[int, Shown], open_page: OpenPage
) -> None:
    """Nor when the window is made larger or smaller. And labels are inside their cells."""
    heights: dict[int, set[int]] = {}  # by the window's width
    for num_blocks, film in sizes.items():
        page = ready(open_page(film.page, 1280, 800, at="step=3"))
        for width, height in ((1280, 800), (1024, 768), (1920, 1080)):
            page.set_viewport_size({"width": width, "height": height})
            until(page, "width => innerWidth === width", width)
            go(page)
            go(page)  # sizes are measured, and drawn with the next frame
            assert page.evaluate(OUTSIDE) == []
            area = page.locator(".pool-cells").bounding_box()
            assert area is not None
            heights.setdefault(width, set()).add(round(area["height"]))
            for block in (0, num_blocks // 2, num_blocks - 1):
                x, y = middle_of(page, block)
                assert area["x"] <= x <= area["x"] + area["width"]
                assert area["y"] <= y <= area["y"] + area["height"]
                page.mouse.move(x, y)
                page.wait_for_selector(f".pool-about b:text-is('Block {block}')")
    assert all(len(found) == 1 for found in heights.values()), f"it grows with the pool: {heights}"


# What cells say whose labels are not inside them.
OUTSIDE = """() => [...document.querySelectorAll(".pool-cell")].filter((cell) => {
    const box = cell.getBoundingClientRect();
    return [...cell.children].some((part) => {
        const own = part.getBoundingClientRect();
        return own.width > 0 && (own.left < box.left || own.right > box.right + 0.5
            || own.top < box.top - 0.5 || own.bottom > box.bottom + 0.5);
    });
}).map((cell) => cell.textContent)"""


def middle_of(page: Page, block: int) -> tuple[float, float]:
    """The centre of a cell, an element or a painted one."""
    x, y = page.evaluate(
        """(block) => {
            const cell = document.querySelector(`.pool-cell[data-block="${block}"]`);
            const host = document.querySelector(".pool-cells");
            const box = (cell ?? host.querySelector(".pool-canvas")).getBoundingClientRect();
            if (cell) return [box.left + box.width / 2, box.top + box.height / 2];
            const num = Watch.store.films[0].run.num_blocks;
            const {w, h, columns} = Watch.poolGrid(host.clientWidth, host.clientHeight, num);
            const [column, row] = [block % columns, Math.floor(block / columns)];
            return [box.left + (column + 0.5) * w, box.top + (row + 0.5) * h];
        }""",
        block,
    )
    return x, y


def test_a_painted_pool_has_the_colours_of_its_owners(
    sizes: dict[int, Shown], open_page: OpenPage
) -> None:
    """Each block of the request is painted otherwise than a free one, and no other is."""
    film = sizes[4096]
    page = ready(open_page(film.page, 1920, 1080, at="step=3"))
    go(page)
    table = film.state(3)["tables"]["a"]["0"]
    pixels = page.evaluate(
        """() => {
            const canvas = document.querySelector(".pool-canvas.is-lower");
            const host = canvas.closest(".pool-cells");
            const num = Watch.store.films[0].run.num_blocks;
            const {w, h, columns} = Watch.poolGrid(host.clientWidth, host.clientHeight, num);
            const pen = canvas.getContext("2d");
            const {data, width} = pen.getImageData(0, 0, canvas.width, canvas.height);
            return Array.from({length: num}, (_, block) => {
                const x = Math.floor((block % columns + 0.5) * w);
                const y = Math.floor((Math.floor(block / columns) + 0.4) * h);
                return [...data.slice(4 * (y * width + x), 4 * (y * width + x) + 3)];
            });
        }"""
    )
    white = pixels[4000]
    painted = [block for block, pixel in enumerate(pixels) if pixel != white and block > 0]
    assert sorted(table) == painted


def test_only_the_used_part_of_a_huge_pool_is_drawn(
    tmp_path_factory: pytest.TempPathFactory, cast: Cast, open_page: OpenPage
) -> None:
    """More of it when more is used; going back in time removes no cell."""
    script = SCRIPTS["hash"]
    script = type(script)((script.visits[0],), script.config).but(num_blocks=4097)
    film = make_one(tmp_path_factory.mktemp("large"), "n4097", script, cast)
    page = ready(open_page(film.page, 1280, 800, at="step=3"))
    counts = page.locator(".pool-counts")

    def owned() -> list[int]:
        return [cell["block"] for cell in read_cells(page) if cell["state"] == "held"]

    assert len(read_cells(page)) == 128 and owned() == sorted(film.state(3)["tables"]["a"]["0"])
    assert "4096" in counts.inner_text() and "the first 127" in counts.inner_text()
    page.evaluate("Watch.store.films[0].stateAfter(4).refs[300] = 1")
    for step in (4, 3):
        go(page, step=step)
        assert "the first 511" in counts.inner_text()
    assert read_cells(page) == [] and page.locator(".pool-canvas.is-lower").count() == 1
