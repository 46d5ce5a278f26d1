"""Drawings of chapter 2's ideas.

python 02_paged_kv/lab/plot_paged_kv_drawings.py
"""

from __future__ import annotations

from block_pool import BlockPool
from common.workshop.tools.draw import LARGE, PAPER, SMALL, SOFT, Drawing, save_all
from common.workshop.tools.palette import DECODE, PROMPT, WASTE, tint
from kv_cache_manager import KVCacheManager
from request import Request

BLOCK_SIZE, NUM_BLOCKS, NUM_TOKENS, POSITION = 4, 9, 10, 6
OWN, HERE, EMPTY = tint(DECODE, 0.5), PROMPT, tint(WASTE, 0.6)  # written; asked for; not written


def example() -> tuple[list[int], list[int], dict[int, str]]:
    """A's block table, the slots of its positions, and the owner of each block, after others have
    come and gone."""
    manager = KVCacheManager(BlockPool(NUM_BLOCKS), BLOCK_SIZE)
    requests = {name: Request.from_tokens(name, [0] * 40) for name in "ABCDEFG"}
    sizes = ("C", 4), ("B", 4), ("D", 8), ("E", 4), ("D", 12), ("F", 4), ("G", 4)
    for name, num_tokens in sizes:
        assert manager.allocate_slots(requests[name], num_tokens)
    for name in "FBEG":
        manager.free(requests[name])
    requests["A"].num_computed_tokens = 0
    assert manager.allocate_slots(requests["A"], NUM_TOKENS)
    owners = {block: n for n in "ACD" for block in manager.get_block_ids(n)}
    return list(manager.get_block_ids("A")), manager.slot_mapping("A", 0, NUM_TOKENS), owners


def draw_slots() -> Drawing:
    table, slots, owners = example()
    index, offset = divmod(POSITION, BLOCK_SIZE)
    slot = slots[POSITION]
    drawing = Drawing(
        840,
        480,
        "From a position to a slot",
        f"Position {POSITION} of request A is in entry {index} of its block table, which names "
        f"block {table[index]}; its key and value lie in slot {slot} of the memory.",
    )
    drawing.text(24, 30, f"Where is position {POSITION} of request A?", size=LARGE, bold=True)

    drawing.key(420, 32, {"A's": OWN, "A's, not written": EMPTY, "others'": SOFT})
    width = 44
    left = 190
    drawing.text(24, 90, "A's positions", bold=True)
    fills = [HERE if p == POSITION else OWN for p in range(NUM_TOKENS)]
    cells = drawing.cells(left, 72, [str(p) for p in range(NUM_TOKENS)], fills, width=width)
    drawing.text(
        left + NUM_TOKENS * width + 20, 90, f"{POSITION} // {BLOCK_SIZE} = {index}", mono=True
    )

    drawing.text(24, 200, "A's block table", bold=True)
    entries = drawing.cells(
        left + 2 * width, 180, [str(b) for b in table],
        [HERE if i == index else OWN for i in range(len(table))], width=60, height=40,
    )  # fmt: skip
    for i, entry in enumerate(entries):
        drawing.text(entry.middle[0], 232, f"entry {i}", size=SMALL, anchor="middle", muted=True)
    drawing.text(left + NUM_TOKENS * width + 20, 200, f"table[{index}] = {table[index]}", mono=True)
    drawing.arrow(cells[POSITION].bottom, entries[index].top)

    drawing.text(24, 336, "KV memory", bold=True)
    size, top = 17.5, 316
    target = None
    for block in range(NUM_BLOCKS):
        x = left + block * size * BLOCK_SIZE
        owner = owners.get(block, "")
        for i in range(BLOCK_SIZE):
            is_slot = block * BLOCK_SIZE + i == slot
            is_own = owner == "A"
            is_written = block * BLOCK_SIZE + i in slots
            own = OWN if is_written else EMPTY
            fill = HERE if is_slot else own if is_own else SOFT if owner else PAPER
            cell = drawing.box(x + i * size, top, size, 40, fill=fill, radius=0)
            target = cell if is_slot else target
        drawing.line((x, top - 6), (x, top + 46), width=2.4)
        drawing.text(x + size * 2, top + 58, str(block), anchor="middle", size=SMALL)
        label = "never" if block == 0 else owner or "free"
        drawing.text(x + size * 2, top + 78, label, anchor="middle", size=SMALL, muted=True)
    end = left + NUM_BLOCKS * size * BLOCK_SIZE
    drawing.line((end, top - 6), (end, top + 46), width=2.4)
    drawing.text(24, top + 58, "block", size=SMALL)
    drawing.text(24, top + 78, "whose", size=SMALL, muted=True)
    assert target is not None
    drawing.arrow(
        (entries[index].middle[0], 246), (entries[index].middle[0], 280),
        (target.middle[0], 280), target.top,
    )  # fmt: skip
    drawing.text(
        left, 448,
        f"slot = {table[index]} * {BLOCK_SIZE} + {POSITION} % {BLOCK_SIZE} = "
        f"{table[index] * BLOCK_SIZE} + {offset} = {slot}", mono=True,
    )  # fmt: skip
    return drawing


DRAWINGS = {"position_to_slot": draw_slots}

if __name__ == "__main__":
    save_all(DRAWINGS, __file__)
