"""Drawings of chapter 2's ideas.

python 02_paged_kv/lab/plot_paged_kv_drawings.py
"""

from __future__ import annotations

from block_pool import BlockPool
from grouped_kv_memory import GroupedKVMemory
from kv_cache_manager import KVCacheManager
from request import Request
from workshop.book.draw import LARGE, PAPER, SMALL, SOFT, Drawing, save_all
from workshop.book.palette import DECODE, PROMPT, WASTE, tint

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


# -- a window: the example of `beyond/WINDOWS.md`

WINDOW, STEPS = 6, ((0, 4), (4, 8), (8, 10), (10, 11), (11, 12), (12, 13), (13, 14))


def tables_by_step() -> list[list[int]]:
    """Of the request, when the slots of each step are there; 0: given up."""
    pool = BlockPool(NUM_BLOCKS + 1)
    blocks = pool.allocate(NUM_BLOCKS)
    assert blocks is not None
    for number in (5, 9, 3, 8):  # in this order they are handed out again
        pool.free([blocks[number - 1]])
    memory = GroupedKVMemory(pool, BLOCK_SIZE, [WINDOW], 4)
    request, found = Request.from_tokens("A", [0] * 40), []
    for start, stop in STEPS:
        request.num_computed_tokens = start
        assert memory.allocate_slots(request, stop - start)
        found.append(list(memory.get_block_ids("A")))
    return found


def draw_window() -> Drawing:
    drawing = Drawing(
        840,
        460,
        "A table that loses its left end",
        f"Steps of a request in blocks of {BLOCK_SIZE}, with a window of {WINDOW}: a block is given"
        " up when the first token of a step sees none of its positions any more.",
    )
    drawing.text(24, 30, f"Blocks of {BLOCK_SIZE}, a window of {WINDOW}", size=LARGE, bold=True)
    meanings = {
        "computed": PROMPT,
        "seen by the first": OWN,
        "held, not seen": EMPTY,
        "not written": SOFT,
    }
    drawing.key(24, 62, meanings | {"given up": PAPER})
    left, width = 120, 36
    drawing.text(24, 94, "step", size=SMALL, muted=True)
    drawing.text(left, 94, "positions", size=SMALL, muted=True)
    drawing.text(730, 94, "table", size=SMALL, muted=True)
    for number, ((start, stop), table) in enumerate(zip(STEPS, tables_by_step(), strict=True)):
        y = 110 + 48 * number
        last = f"-{stop - 1}" if stop - start > 1 else ""
        drawing.text(24, y + 17, f"{start}{last}", bold=True)
        for index, block_id in enumerate(table):
            for position in range(index * BLOCK_SIZE, (index + 1) * BLOCK_SIZE):
                fill = OWN if position > start - WINDOW else EMPTY
                fill = PROMPT if start <= position < stop else fill if position < start else SOFT
                label = "" if fill == SOFT or not block_id else str(position)
                cell = left + position * width, y, width, 34, label
                drawing.box(*cell, fill=fill if block_id else PAPER, radius=0, size=SMALL)
        for edge in range(len(table) + 1):
            x = left + edge * BLOCK_SIZE * width
            drawing.line((x, y - 4), (x, y + 38), width=2.4)
        drawing.text(730, y + 17, " ".join(str(b or "-") for b in table), mono=True)
    return drawing


DRAWINGS = {"position_to_slot": draw_slots, "window": draw_window}

if __name__ == "__main__":
    save_all(DRAWINGS, __file__)
