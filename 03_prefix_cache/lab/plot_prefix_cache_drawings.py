"""Drawings of chapter 3's ideas: a split and an eviction of the radix tree, the walk of
`dfs-weight`, and how KV goes down the tiers and comes back.

python 03_prefix_cache/lab/plot_prefix_cache_drawings.py
"""

from __future__ import annotations

from block_pool import BlockPool
from bounded_loops import as_long_as
from common.tools.draw import LARGE, PAPER, SMALL, SOFT, Box, Drawing, Lanes, save_all
from common.tools.palette import CACHED, DECODE, OTHER, PREEMPTED, PROMPT, tint
from kv_memory import ComputedBlocks, NotReady
from loading_kv_cache_manager import LoadingKVCacheManager
from prefix_cache import KeyedRequest
from prefix_cache_local import PrefixCacheLocal
from radix_words import Rig
from request import Request, SamplingParams
from sglang_policies import DFSWeight
from tiered_cache import KVTierConfig, TieredCache

USED, IDLE, GONE = tint(CACHED, 0.7), tint(CACHED, 0.3), tint(PREEMPTED, 0.6)

# -- the radix tree


def draw_split() -> Drawing:
    """A letter is a page, as in `radix_words.py`."""
    drawing = Drawing(
        840,
        390,
        "A radix tree before a split, after it, and after an eviction",
        "First one edge ABCD; ABX cuts it into AB with the children CD and X; then the oldest leaf "
        "that nobody uses gives its last page.",
    )
    drawing.text(24, 30, "A split, and an eviction. Each letter is a page", size=LARGE, bold=True)
    drawing.key(24, 62, {"in use": USED, "cached, idle": IDLE, "evicted": GONE})
    rig = Rig(num_pages=7)
    rig.warm("ABCD")
    trees = [("1  ABCD was cached", rig.nodes(), _pages(rig))]
    rig.hold("ABX")
    trees.append(("2  ABX comes: a split", rig.nodes(), _pages(rig)))
    before = _pages(rig)
    rig.cache.evict(1)
    trees.append(("3  one page is evicted", rig.nodes(), _pages(rig)))
    gone = {path: letters for path, letters in before.items()
            if letters != _pages(rig).get(path)}  # fmt: skip
    for number, (title, nodes, pages) in enumerate(trees):
        x = 36 + number * 270
        drawing.text(x, 110, title, bold=True)
        lost = gone if number == 2 else {}
        _tree(drawing, x, 140, nodes, pages, lost)
    drawing.text(24, 362, "A user of ABX locks AB too: the lock count of a node is at least that of"
                 " each child.", size=SMALL)  # fmt: skip
    return drawing


def _pages(rig: Rig) -> dict[str, dict[str, int]]:
    """Of each node, by its path: the block of each letter."""
    tree = rig.cache.tree
    return {
        ".".join(rig.word(link) for link in tree.path_to(node)): {
            letter: block.block_id for letter, block in zip(rig.word(node), node.blocks)
        }
        for node in tree.nodes()
        if not node.is_root
    }


def _tree(
    drawing: Drawing,
    x: float,
    y: float,
    locks: dict[str, int],
    pages: dict[str, dict[str, int]],
    lost: dict[str, dict[str, int]],
) -> None:
    """Nodes under each other, children side by side. A lost page is drawn where it was."""
    root = drawing.box(x + 70, y, 60, 28, "root", fill=PAPER, size=SMALL)
    places: dict[str, Box] = {"": root}
    column = dict.fromkeys(range(9), x)
    for path in sorted(locks, key=lambda path: (path.count("."), path)):
        depth = path.count(".")
        parent = places[path.rpartition(".")[0]]
        letters = list(pages[path])
        tail = [n for p, blocks in lost.items() if _same_node(p, path) for n in blocks
                if n not in letters]  # fmt: skip
        left = column[depth]
        top = y + 62 + depth * 84
        shown = [*letters, *tail]
        fill = USED if locks[path] else IDLE
        cells = drawing.cells(
            left, top, shown, [GONE if n in tail else fill for n in shown], width=34
        )
        is_inner = any(other.startswith(f"{path}.") for other in locks)
        place = (left + 34 * len(shown) + 10, top + 17) if is_inner else (left, top + 47)
        drawing.text(*place, f"lock_ref {locks[path]}", size=SMALL, muted=True)
        node = Box(cells[0].x, top, 34 * len(shown), 34)
        drawing.arrow(parent.bottom, node.top)
        places[path] = node
        column[depth] = left + max(len(shown) * 34, 78) + 26


def _same_node(before: str, after: str) -> bool:
    """A leaf that has lost its tail has another name."""
    return before == after or (before.startswith(after) and "." not in before[len(after) :])


# -- dfs-weight


def draw_dfs() -> Drawing:
    """The example of `DFSWeight`'s docstring, ordered by it."""
    ways = {"r1": "D", "r2": "A", "r3": "AB", "r4": "ABC", "r5": "D"}
    blocks = {letter: number for number, letter in enumerate("ABCD", 1)}
    requests = [Request.from_tokens(name, list(range(40))) for name in ways]
    policy = DFSWeight(
        lambda request: [blocks[letter] for letter in ways[request.request_id]],
        block_size=4,
        min_cached=0,
    )
    order = [request.request_id for request in policy.order(requests)]
    weights = {letter: sum(letter in way for way in ways.values()) for letter in blocks}
    drawing = Drawing(
        840,
        410,
        "dfs-weight walks the tree of cached prefixes",
        "Five waiting requests hang on the tree of their cached prefixes. The heaviest child is "
        "visited first, so the order of service is " + ", ".join(order) + ".",
    )
    drawing.text(
        24, 30, "The child with the most requests first, depth first", size=LARGE, bold=True
    )
    places = {"root": (70, 200), "A": (215, 130), "B": (360, 130), "C": (505, 130), "D": (215, 270)}
    parents = {"A": "root", "B": "A", "C": "B", "D": "root"}
    nodes = {}
    for name, (x, y) in places.items():
        label = name if name == "root" else f"{name}: {weights[name]}"
        fill = PAPER if name == "root" else tint(CACHED, 0.3 + 0.15 * weights[name])
        nodes[name] = drawing.box(x - 40, y - 20, 80, 40, label, fill=fill, radius=20)
    for child, parent in parents.items():
        start, stop = nodes[parent].right, nodes[child].left
        drawing.arrow(start, stop, width=0.8 + weights[child])
    for letter in "ABCD":
        ends = [name for name, way in ways.items() if way[-1] == letter]
        x, y = nodes[letter].bottom
        for i, name in enumerate(ends):
            drawing.box(x - 50 + i * 54 if len(ends) > 1 else x - 24, y + 14, 48, 26, name,
                        fill=SOFT, size=SMALL, radius=13)  # fmt: skip
    drawing.text(590, 130, "A: 3  a cached block, and the\nnumber of waiting requests\n"
                 "whose prefix goes through it", size=SMALL)  # fmt: skip
    drawing.text(24, 376, "order of arrival", size=SMALL)
    drawing.text(430, 376, "order of service", size=SMALL)
    for x, names in ((160, list(ways)), (566, order)):
        for i, name in enumerate(names):
            drawing.box(x + i * 48, 362, 42, 28, name, fill=SOFT, size=SMALL, radius=13)
    return drawing


# -- down the tiers, and back


class TracedIO:
    """The KV memory of a device, and what was done to it."""

    block_nbytes = 8

    def __init__(self) -> None:
        self.blocks: dict[int, bytes] = {}
        self.done: list[tuple[str, int]] = []

    def read_block(self, block_id: int) -> bytes:
        self.done.append(("read", block_id))
        return self.blocks.get(block_id, bytes(8))

    def write_block(self, block_id: int, data: bytes | memoryview) -> None:
        self.done.append(("write", block_id))
        self.blocks[block_id] = bytes(data)


def tier_run() -> dict[str, int]:
    """a is computed and ends; b needs its blocks; a's prompt comes again. Host of one block, so the
    other goes to disk."""
    io, pool = TracedIO(), BlockPool(5)
    tiers = TieredCache(KVTierConfig(host_blocks=1, disk_blocks=4))
    tiers.bind(io, 2, (("model", "drawn"),))
    try:
        cache = PrefixCacheLocal(pool=pool, block_size=2, listener=tiers)
        manager = LoadingKVCacheManager(pool, 2, cache, tiers)
        params = SamplingParams(max_tokens=1)

        def serve(name: str, tokens: list[int]) -> None:
            request = KeyedRequest(name, tokens, params)
            computed = manager.get_computed_blocks(request)
            assert isinstance(computed, ComputedBlocks)
            assert manager.allocate_slots(request, len(tokens), 0, computed)
            manager.cache_blocks(request, len(tokens))
            manager.free(request)

        serve("a", [1, 2, 3, 4, 5])
        serve("b", [6, 7, 8, 9, 10, 11, 12])
        evicted = [block for what, block in io.done if what == "read"]
        counts = {"evicted": len(evicted), "host": len(tiers.host), "disk": len(tiers.disk or ())}
        again = KeyedRequest("c", [1, 2, 3, 4, 5], params)
        for _ in as_long_as(lambda: manager.get_computed_blocks(again) is NotReady.LOADING, 2000):
            tiers.wait_for_load(0.01)
        computed = manager.get_computed_blocks(again)
        assert isinstance(computed, ComputedBlocks)
        counts["loaded"] = computed.num_tokens
        counts["from_host"], counts["from_disk"] = (
            tiers.stats.num_host_hits,
            tiers.stats.num_disk_hits,
        )
        return counts
    finally:
        tiers.close()


def draw_tiers() -> Drawing:
    run = tier_run()
    drawing = Drawing(
        850,
        742,
        "KV goes down the tiers and comes back",
        "Evicted blocks are copied to the host and pushed on to disk. When the prompt comes again, "
        "the manager starts a load, the request waits, and what arrives enters the prefix cache.",
    )
    drawing.text(24, 30, "Down when evicted, up before admission", size=LARGE, bold=True)
    x = {"scheduler": 70, "manager": 250, "tiers": 486, "reader": 596, "disk": 694, "device": 790}
    fills = {"device": tint(DECODE, 0.5), "disk": tint(OTHER, 0.25), "scheduler": tint(PROMPT, 0.3)}
    lanes = Lanes(drawing, x, 144, 90, fills)
    drawing.text(24, 108, f"Down: {run['evicted']} blocks are evicted", size=SMALL, bold=True)
    lanes.call("scheduler", "manager", "allocate_slots")
    lanes.call("manager", "tiers", "blocks_evicted")
    lanes.call("tiers", "device", "read_block", at=0.2)
    lanes.call("tiers", "disk", "put", at=0.25)
    drawing.text(24, lanes.y + 2, "Up: the same prompt comes again", size=SMALL, bold=True)
    lanes.y += 44
    lanes.call("scheduler", "manager", "get_computed_blocks")
    lanes.call("manager", "tiers", "get_num_new_matched_tokens")
    lanes.returns("tiers", "manager", f"{run['loaded']} tokens")
    lanes.call("manager", "tiers", "update_state_after_alloc")
    lanes.call("tiers", "reader", "submit")
    lanes.returns("manager", "scheduler", "NotReady.LOADING")
    lanes.call("reader", "disk", "read")
    lanes.call("scheduler", "manager", "get_computed_blocks")
    lanes.call("manager", "tiers", "get_finished_load")
    lanes.call("tiers", "device", "write_block", at=0.2)
    lanes.returns("manager", "scheduler", "ComputedBlocks")
    drawing.text(
        24, lanes.y + 16,
        f"{run['from_host']} block came from the host, {run['from_disk']} from disk. While it "
        "waits, other requests run.", size=SMALL,
    )  # fmt: skip
    lanes.draw_lanes(54, lanes.y - 14)
    drawing.height = lanes.y + 42
    return drawing


DRAWINGS = {"radix_split": draw_split, "dfs_weight": draw_dfs, "tiers_sequence": draw_tiers}

if __name__ == "__main__":
    save_all(DRAWINGS, __file__)
