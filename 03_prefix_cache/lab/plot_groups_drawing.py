"""A drawing of the hit that holds for every group: the example of `beyond/GROUPS.md`.

python 03_prefix_cache/lab/plot_groups_drawing.py
"""

from __future__ import annotations

from block_pool import BlockPool
from grouped_prefix_cache import GroupedPrefixCache
from prefix_cache_local import compute_hash_chain
from workshop.book.draw import LARGE, PAPER, SMALL, Drawing, save_all
from workshop.book.palette import CACHED, tint

BLOCK_SIZE, WINDOWS, WHO = 4, (None, 6), ("sees everything", "a window of 6")
THERE = ("xxx-", "x-xx")  # which of four blocks each group has
FOUND, KNOWN = tint(CACHED, 0.7), tint(CACHED, 0.25)


def turns() -> list[tuple[int, int, int]]:
    """Who is asked, up to which block, and what it says, until all agree."""
    cache = GroupedPrefixCache(BlockPool(9), BLOCK_SIZE, WINDOWS)
    chain, blocks = compute_hash_chain(range(16), BLOCK_SIZE), iter(cache.pool.blocks[1:])
    for group, own in enumerate(THERE):
        for index, is_there in enumerate(own):
            if is_there == "x":
                cache.publish(group, chain, index, next(blocks))
    hashes, found = [name for name, _ in chain], []
    while len(found) < 2 or found[-1][1] != found[-1][2]:
        group = len(found) % 2
        found.append((group, len(hashes), cache._longest_in(group, hashes)))
        hashes = hashes[: found[-1][2]]
    assert len(hashes) == cache.longest_hit(chain)
    return found


def draw_hit() -> Drawing:
    drawing = Drawing(
        840,
        320,
        "The longest prefix that holds in every group",
        "Group 0 has the first three blocks; group 1 lacks the second, and sees two blocks. One "
        "after the other they shorten the prefix, until they agree on 4 tokens.",
    )
    drawing.text(24, 30, "Each group shortens what is left", size=LARGE, bold=True)
    drawing.key(24, 62, {"there, and seen from its end": FOUND, "there": KNOWN, "gone": PAPER})
    left, width = 230, 90
    for number, (group, most, length) in enumerate(turns()):
        y = 100 + 70 * number
        drawing.text(24, y + 9, f"group {group}", bold=True)
        drawing.text(24, y + 31, WHO[group], size=SMALL, muted=True)
        first = 0 if WINDOWS[group] is None else max(0, length - 2)
        for index in range(4):
            is_there = THERE[group][index] == "x"
            fill = FOUND if first <= index < length else KNOWN if is_there else PAPER
            label = f"{index * BLOCK_SIZE}-{index * BLOCK_SIZE + 3}"
            drawing.box(left + index * width, y, width, 40, label, fill=fill, radius=0)
        if most < 4:
            x = left + most * width
            drawing.line((x, y - 8), (x, y + 48), width=3)
        drawing.text(left + 4 * width + 24, y + 20, f"says {length * BLOCK_SIZE} tokens", bold=True)
    return drawing


DRAWINGS = {"groups_hit": draw_hit}

if __name__ == "__main__":
    save_all(DRAWINGS, __file__)
