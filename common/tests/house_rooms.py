"""The laws of the rooms: what a chapter's root may import, say and weigh. See `house.py`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from common.tests.house import House, imports, parse


def law_of_rooms(house: House) -> list[str]:
    """A chapter's root imports no `beyond/`, of whatever chapter. `beyond/` imports roots, and the
    `beyond/` of its own and lower chapters (the law of floors says that)."""
    far = {p.stem for p in house.chapter_modules() if p.parent.name == "beyond"}
    return [
        f"{house.name(path)}:{site.line} imports `{site.module}` of a `beyond/`"
        for path in house.root_modules()
        for site in imports(parse(path))
        if site.module in far
    ]


# What a chapter's root may not speak of: words of later chapters, as parts of identifiers.
LATER_WORDS = {
    1: "block page paged prefix preempt chunk draft spec speculative lookahead evict fork tier",
    2: "prefix preempt chunk draft spec speculative lookahead evict fork tier connector",
    3: "preempt chunk draft spec speculative lookahead tier connector",
    4: "draft drafts spec speculative lookahead verify verified guess",
    5: "chunk chunked mixed mixing",
    6: "",
}
# Except these: members of RequestStatus, counters of Request, fields of what crosses processes.
# Each has a line in the source that names its chapter.
SPOKEN_EARLIER = """
    PREEMPTED num_preemptions preempted_requests num_kv_blocks_in_use block_ids new_block_ids
    BlockMove block_moves block_index block_id draft_token_ids scheduled_draft_token_ids
    ChunkPolicy chunk_policy num_blocks_needed POST_BLOCK_SIZE
"""


def words_of(identifier: str) -> set[str]:
    """`NumDraftTokens`, `num_draft_tokens` -> num, draft, tokens; a plural counts as its noun."""
    parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", identifier)
    words = {part.lower() for part in parts}
    return words | {word[:-1] for word in words if word.endswith("s")}


def law_of_words(house: House) -> list[str]:
    """A chapter's root does not speak of later chapters: not in a name that its code uses."""
    broken = []
    for path in house.root_modules():
        later = set(LATER_WORDS.get(int(house.chapter_of(path)[:2]), "").split())
        for line, name in sorted(set(_identifiers(parse(path)))):
            if name not in SPOKEN_EARLIER.split() and (found := later & words_of(name)):
                broken.append(f"{house.name(path)}:{line} says `{name}`: {found.pop()} comes later")
    return broken


def _identifiers(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node.lineno, node.name


# A reader's evening: modules and lines of each root, and of the files of the engine in `common`.
ROOM_LIMITS = {
    "01_batching": (9, 1400),
    "02_paged_kv": (8, 1200),
    "03_prefix_cache": (8, 1700),
    "04_scheduler": (8, 1300),
    "05_spec_decode": (8, 1300),
    "06_chunked_prefill": (8, 600),
}
ALL_ROOTS_LIMIT = 6500
ENGINE_LIMIT = 3600
ENGINE_ROOMS = ("common", "common/runner", "common/sampling")
NOT_ENGINE = ("demo.py", "notebooks.py", "ladder.py")


def room_sizes(house: House) -> dict[str, tuple[int, int]]:
    """Modules and lines of each chapter's root, and of the engine."""
    sizes = {}
    for chapter in house.chapters():
        sizes[chapter.name] = _size([p for p in house.root_modules() if p.parent == chapter])
    sizes["engine"] = _size(
        [
            p
            for p in house.python_files(aside=False)
            if house.name(p.parent) in ENGINE_ROOMS and p.name not in NOT_ENGINE
        ]
    )
    return sizes


def _size(paths: list[Path]) -> tuple[int, int]:
    return len(paths), sum(len(p.read_text(encoding="utf-8").splitlines()) for p in paths)


def law_of_sizes(house: House) -> list[str]:
    """A root is read in an evening, and the engine in a weekend."""
    sizes = room_sizes(house)
    engine = sizes.pop("engine")
    limits = {**ROOM_LIMITS, "all roots": (99, ALL_ROOTS_LIMIT), "engine": (99, ENGINE_LIMIT)}
    total = tuple(map(sum, zip(*sizes.values(), strict=True))) or (0, 0)
    return [
        f"{name} has {found[0]} modules and {found[1]} lines; the limits are {limits[name]}"
        for name, found in {**sizes, "all roots": total, "engine": engine}.items()
        if name in limits and (found[0] > limits[name][0] or found[1] > limits[name][1])
    ]
