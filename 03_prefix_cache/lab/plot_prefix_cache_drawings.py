"""Drawings of chapter 3's ideas: a split and an eviction of the radix tree, the walk of
`dfs-weight`, and how KV goes down the tiers and comes back.

python 03_prefix_cache/lab/plot_prefix_cache_drawings.py
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any, cast

from block_pool import BlockPool
from bounded_loops import as_long_as
from global_kv_pool import GlobalKVPool, copy_in_process
from kv_memory import ComputedBlocks, NotReady
from kv_pool import KVPool
from loading_kv_cache_manager import LoadingKVCacheManager
from pool_connector import PoolConnector
from prefix_cache import KeyedRequest
from prefix_cache_local import PrefixCacheLocal
from radix_words import Rig
from request import Request, SamplingParams
from sglang_policies import DFSWeight
from tiered_cache import KVTierConfig, TieredCache
from workshop.book.draw import LARGE, PAPER, SMALL, SOFT, Box, Drawing, save_all
from workshop.book.draw_parts import Lanes
from workshop.book.palette import CACHED, DECODE, OTHER, PREEMPTED, PROMPT, tint

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
    drawing.text(590, 130, "A: 3  the cached block A is\non the way of three waiting\n"
                 "requests", size=SMALL)  # fmt: skip
    drawing.text(24, 376, "order of arrival", size=SMALL)
    drawing.text(430, 376, "order of service", size=SMALL)
    for x, names in ((160, list(ways)), (566, order)):
        for i, name in enumerate(names):
            drawing.box(x + i * 48, 362, 42, 28, name, fill=SOFT, size=SMALL, radius=13)
    return drawing


# -- down the tiers, and back; through a pool

Call = tuple[str, str, str]  # from lane, to lane, what; a lane of `RETURNS` says what comes back
RETURNS = ("4 tokens", "NotReady.LOADING", "ComputedBlocks")
BLOCK_SIZE = 2
NAMESPACE = (("model", "drawn"),)
PROMPT_IDS = [1, 2, 3, 4, 5]  # two full blocks, and the token that is computed in any case

DOWN: list[Call] = [
    ("scheduler", "manager", "allocate_slots"),
    ("manager", "tiers", "blocks_evicted"),
    ("tiers", "device", "read_block"),
    ("tiers", "disk", "put"),
]
UP: list[Call] = [
    ("scheduler", "manager", "get_computed_blocks"),
    ("manager", "tiers", "get_num_new_matched_tokens"),
    ("tiers", "manager", "4 tokens"),
    ("manager", "tiers", "update_state_after_alloc"),
    ("tiers", "reader", "submit"),
    ("manager", "scheduler", "NotReady.LOADING"),
    ("reader", "disk", "read"),
    ("scheduler", "manager", "get_computed_blocks"),
    ("manager", "tiers", "get_finished_load"),
    ("tiers", "device", "write_block"),
    ("manager", "scheduler", "ComputedBlocks"),
]
PUBLISHED: list[Call] = [
    ("engine 1", "connector 1", "request_finished"),
    ("connector 1", "pool", "query"),
    ("connector 1", "pool", "publish"),
]
FETCHED: list[Call] = [
    ("engine 2", "connector 2", "get_num_new_matched_tokens"),
    ("connector 2", "pool", "query"),
    ("connector 2", "engine 2", "4 tokens"),
    ("engine 2", "connector 2", "update_state_after_alloc"),
    ("connector 2", "pool", "async_transfer"),
    ("pool", "thread", "copy"),
    ("engine 2", "connector 2", "get_finished_load"),
    ("connector 2", "pool", "transfer_result"),
    ("connector 2", "memory 2", "write_block"),
    ("connector 2", "engine 2", "4 tokens"),
]


class TracedIO:
    """The KV memory of a device."""

    block_nbytes = 8

    def __init__(self) -> None:
        self.blocks: dict[int, bytes] = {}

    def read_block(self, block_id: int) -> bytes:
        return self.blocks.get(block_id, bytes(8))

    def write_block(self, block_id: int, data: bytes | memoryview) -> None:
        self.blocks[block_id] = bytes(data)


def spy(log: list[Call], start: str, stop: str, part: object, *names: str) -> None:
    """Calls of these methods of `part` are written down from here on."""

    def make(name: str) -> Callable[..., Any]:
        method = getattr(part, name)

        def called(*arguments: Any, **keywords: Any) -> Any:
            log.append((start, stop, name))
            return method(*arguments, **keywords)

        return called

    for name in names:
        setattr(part, name, make(name))


def say(log: list[Call], start: str, stop: str, answer: object) -> None:
    if isinstance(answer, NotReady):
        answer = f"NotReady.{answer.name}"
    elif isinstance(answer, ComputedBlocks):
        answer = "ComputedBlocks"
    log.append((start, stop, str(answer)))


@dataclass(frozen=True, slots=True)
class TierRun:
    calls: list[Call]
    num_evicted: int
    num_from_host: int
    num_from_disk: int


def tier_run() -> TierRun:
    """a is computed and ends; b needs its blocks; a's prompt comes again. The host has room for one
    block, so the other goes to disk. The reader waits until it was asked for once."""
    log: list[Call] = []
    io, pool, may_read = TracedIO(), BlockPool(5), threading.Event()
    tiers = TieredCache(KVTierConfig(host_blocks=1, disk_blocks=4))
    tiers.bind(io, BLOCK_SIZE, NAMESPACE)
    spy(log, "manager", "tiers", tiers, "blocks_evicted", "get_num_new_matched_tokens",
        "update_state_after_alloc", "get_finished_load")  # fmt: skip
    spy(log, "tiers", "device", io, "read_block", "write_block")
    spy(log, "tiers", "reader", tiers._reader, "submit")
    disk = tiers.disk
    assert disk is not None
    spy(log, "reader", "disk", disk, "read")
    read = disk.read
    disk.read = lambda block_hash: read(block_hash) if may_read.wait(20) else None
    spy(log, "tiers", "disk", disk, "put")
    try:
        cache = PrefixCacheLocal(pool=pool, block_size=BLOCK_SIZE, listener=tiers)
        manager = LoadingKVCacheManager(pool, BLOCK_SIZE, cache, tiers)
        spy(log, "scheduler", "manager", manager, "get_computed_blocks", "allocate_slots")
        params = SamplingParams(max_tokens=1)

        def serve(name: str, tokens: list[int]) -> None:
            request = KeyedRequest(name, tokens, params)
            computed = manager.get_computed_blocks(request)
            assert isinstance(computed, ComputedBlocks)
            assert manager.allocate_slots(request, len(tokens), 0, computed)
            manager.cache_blocks(request, len(tokens))
            manager.free(request)

        serve("a", PROMPT_IDS)
        serve("b", [6, 7, 8, 9, 10, 11, 12])
        num_evicted = sum(name == "read_block" for *_, name in log)
        again = KeyedRequest("c", PROMPT_IDS, params)
        say(log, "manager", "scheduler", manager.get_computed_blocks(again))
        may_read.set()
        for _ in as_long_as(lambda: manager.get_computed_blocks(again) is NotReady.LOADING, 2000):
            tiers.wait_for_load(0.01)
        computed = manager.get_computed_blocks(again)
        assert isinstance(computed, ComputedBlocks)
        say(log, "tiers", "manager", f"{computed.num_tokens} tokens")
        say(log, "manager", "scheduler", computed)
        return TierRun(log, num_evicted, tiers.stats.num_host_hits, tiers.stats.num_disk_hits)
    finally:
        may_read.set()
        tiers.close()


def pool_run() -> list[Call]:
    """Engine 1 has computed the prompt, engine 2 is asked for it."""
    log: list[Call] = []

    def copy(*arguments: Any) -> Any:
        log.append(("pool", "thread", "copy"))
        return copy_in_process(*arguments)

    with closing(GlobalKVPool(transport=copy)) as pool:
        connectors = []
        for number in (1, 2):
            seen = _Watched(pool, log, f"connector {number}")
            connector = PoolConnector(cast(KVPool, seen), f"node {number}", load_timeout_s=20)
            io = TracedIO()
            connector.bind(io, BLOCK_SIZE, NAMESPACE)
            spy(log, f"connector {number}", f"memory {number}", io, "read_block", "write_block")
            spy(log, f"engine {number}", f"connector {number}", connector, "request_finished",
                "get_num_new_matched_tokens", "update_state_after_alloc",
                "get_finished_load")  # fmt: skip
            connectors.append(connector)
        params = SamplingParams(max_tokens=1)
        first, second = connectors
        first.request_finished(KeyedRequest("a", PROMPT_IDS, params), [1, 2])
        request = KeyedRequest("b", PROMPT_IDS, params)
        num_tokens, _ = second.get_num_new_matched_tokens(request, 0)
        say(log, "connector 2", "engine 2", f"{num_tokens} tokens")
        second.update_state_after_alloc(request, [5, 6], num_tokens)
        arrived: list[int] = []
        for _ in as_long_as(lambda: not arrived, 2000):
            second.wait_for_load(0.01)
            num_arrived = second.get_finished_load("b")
            if num_arrived is not None:
                arrived.append(num_arrived)
        say(log, "connector 2", "engine 2", f"{arrived[0]} tokens")
    return log


class _Watched:
    """A pool as one engine sees it."""

    def __init__(self, pool: GlobalKVPool, log: list[Call], lane: str) -> None:
        self._pool, self._log, self._lane = pool, log, lane

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._pool, name)

        def called(*arguments: Any) -> Any:
            self._log.append((self._lane, "pool", name))
            return method(*arguments)

        return called


def _sequence(lanes: Lanes, calls: list[Call], at: dict[str, float]) -> None:
    for start, stop, what in calls:
        if what in RETURNS:
            lanes.returns(start, stop, what)
        else:
            lanes.call(start, stop, what, at=at.get(what, 0.5))


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
    drawing.text(24, 108, f"Down: {run.num_evicted} blocks are evicted", size=SMALL, bold=True)
    at = {"read_block": 0.2, "put": 0.25, "write_block": 0.2}
    _sequence(lanes, DOWN, at)
    drawing.text(24, lanes.y + 2, "Up: the same prompt comes again", size=SMALL, bold=True)
    lanes.y += 44
    _sequence(lanes, UP, at)
    drawing.text(
        24, lanes.y + 16,
        f"{run.num_from_host} block came from the host, {run.num_from_disk} from disk. While it "
        "waits, other requests run.", size=SMALL,
    )  # fmt: skip
    lanes.draw_lanes(54, lanes.y - 14)
    drawing.height = lanes.y + 42
    return drawing


def draw_pool() -> Drawing:
    drawing = Drawing(
        850,
        700,
        "KV through a pool of several engines",
        "Engine 1 publishes the blocks of a request that has ended. Engine 2 asks the pool, a "
        "thread copies, and engine 2 writes what arrived into its own memory.",
    )
    drawing.text(24, 30, "Published by one engine, fetched by another", size=LARGE, bold=True)
    x = {"engine 1": 60, "connector 1": 218, "thread": 330, "pool": 420, "connector 2": 560,
         "engine 2": 795, "memory 2": 690}  # fmt: skip
    fills = {"pool": tint(CACHED, 0.4), "memory 2": tint(DECODE, 0.5)}
    lanes = Lanes(drawing, x, 144, 88, fills, {"connector 1": 102, "connector 2": 102, "pool": 60,
                                               "thread": 70})  # fmt: skip
    drawing.text(24, 108, "A request ends in engine 1", size=SMALL, bold=True)
    _sequence(lanes, PUBLISHED, {"query": 0.3, "publish": 0.3})
    drawing.text(24, lanes.y + 2, "Its prompt comes to engine 2", size=SMALL, bold=True)
    lanes.y += 44
    _sequence(lanes, FETCHED, {})
    drawing.text(
        24, lanes.y + 16,
        "The thread brings bytes. Only the engine writes to its memory, after it has checked them.",
        size=SMALL,
    )  # fmt: skip
    lanes.draw_lanes(54, lanes.y - 14)
    drawing.height = lanes.y + 42
    return drawing


DRAWINGS = {
    "radix_split": draw_split,
    "dfs_weight": draw_dfs,
    "tiers_sequence": draw_tiers,
    "pool_sequence": draw_pool,
}

if __name__ == "__main__":
    save_all(DRAWINGS, __file__)
