"""The radix tree after a few requests, drawn from a real `RadixCache` whose tokens are words.

`plot_prefix_cache.py` draws it; alone it does nothing.
"""

from __future__ import annotations

import textwrap

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from radix_cache import RadixCache
from radix_tree import TreeNode
from workshop.book.draw import ink_on
from workshop.book.palette import CACHED, INK, tint

SYSTEM = "You are a helpful assistant ."
DONE = [
    f"{SYSTEM} What is a block ? Sixteen tokens .",
    f"{SYSTEM} What is a page ? The same .",
    f"{SYSTEM} Say hello in French : bonjour",
    "Complete the code : def add ( a , b ) : return a + b",
    "Complete the code : def mul ( a , b ) : return a * b",
]
RUNNING = f"{SYSTEM} What is a block ? Sixteen tokens . Why sixteen ?"
EVICTABLE, USED = tint(CACHED, 0.15), tint(CACHED, 0.6)
BOX_WIDTH, COLUMN = 24, 1.25  # characters; boxes and gaps


class Words:
    """Token ids for words, in the order in which they come up."""

    def __init__(self) -> None:
        self.words: list[str] = []

    def encode(self, text: str) -> list[int]:
        for word in text.split():
            if word not in self.words:
                self.words.append(word)
        return [self.words.index(word) for word in text.split()]

    def decode(self, token_ids: list[int]) -> str:
        return " ".join(self.words[token] for token in token_ids)


def small_run() -> tuple[RadixCache, Words]:
    """Five requests have finished, a sixth goes on where the first has ended."""
    cache, words = RadixCache(page_size=1, num_pages=100), Words()
    for text in DONE:
        cache.cache_computed_blocks(words.encode(text))
    cache.touch(cache.cache_computed_blocks(words.encode(RUNNING)))
    return cache, words


def place(node: TreeNode, depth: int, places: dict[TreeNode, tuple[int, float]]) -> float:
    """Leaves below each other, parents in the middle of their children. Returns the height."""
    heights = [place(child, depth + 1, places) for child in node.children.values()]
    num_leaves = sum(not other.children for other in places)
    height = (heights[0] + heights[-1]) / 2 if heights else float(num_leaves)
    places[node] = (depth, height)
    return height


def draw_tree() -> Figure:
    cache, words = small_run()
    (root,) = cache.tree.roots.values()
    places: dict[TreeNode, tuple[int, float]] = {}
    place(root, 0, places)
    figure, axis = plt.subplots(figsize=(9, 5), layout="constrained")
    for node, (depth, height) in places.items():
        text = "root"
        if not node.is_root:
            text = textwrap.fill(words.decode(node.key), BOX_WIDTH)
            start_depth, start_height = places[node.above]
            ends = [start_depth * COLUMN, depth * COLUMN], [start_height, height]
            axis.plot(*ends, color=INK, linewidth=1, zorder=1)
        box = {
            "boxstyle": "round",
            "facecolor": USED if node.lock_ref else EVICTABLE,
            "edgecolor": INK,
        }
        look = {"ha": "center", "va": "center", "color": ink_on(EVICTABLE), "fontsize": 11}
        axis.text(depth * COLUMN, height, text, bbox=box, **look)
    depths, heights = zip(*places.values(), strict=True)
    axis.set(xlim=(-0.3, max(depths) * COLUMN + 0.55), ylim=(max(heights) + 0.6, -0.6))
    axis.axis("off")
    num_used = cache.num_cached_blocks - cache.num_evictable_blocks
    figure.suptitle(
        f"Six requests: {cache.num_cached_blocks} tokens cached, "
        f"{num_used} in use (dark), {cache.num_evictable_blocks} evictable"
    )
    return figure
