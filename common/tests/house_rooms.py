"""The laws of the rooms: what a chapter's root may import, say and weigh. See `house.py`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from common.tests.house import House, imports, parse
from common.tools.path import Size, room_sizes, rooms_table


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
    PREEMPTED num_preemptions num_kv_blocks_in_use block_ids new_block_ids
    BlockMove block_moves block_index block_id draft_token_ids scheduled_draft_token_ids
    ChunkPolicy chunk_policy num_blocks_needed
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


# A reader's evening: at most so many modules and lines in each root, and in the engine's files in
# `common`. `python -m common.tools.path` counts; README's table of rooms has the numbers of today.
ROOM_LIMITS = {
    "01_batching": Size(9, 1350),
    "02_paged_kv": Size(9, 1150),
    "03_prefix_cache": Size(9, 1450),
    "04_scheduler": Size(9, 1120),
    "05_spec_decode": Size(9, 1050),
    "06_chunked_prefill": Size(9, 500),
    "all roots": Size(46, 6450),
    "engine": Size(33, 6200),
}


def law_of_sizes(house: House) -> list[str]:
    """A root is read in an evening, the engine in a weekend; README says how much it is."""
    broken = [
        f"{name} has {size.num_modules} modules and {size.num_lines} lines; its limits are "
        f"{limit.num_modules} and {limit.num_lines}"
        for name, size in room_sizes(house.root).items()
        if (limit := ROOM_LIMITS.get(name)) is not None
        and (size.num_modules > limit.num_modules or size.num_lines > limit.num_lines)
    ]
    readme = house.root / "README.md"
    text = readme.read_text(encoding="utf-8") if readme.exists() else ""
    if "<!-- table:rooms -->" in text and rooms_table(house.root) not in text:
        broken.append(
            "README.md: its rooms are others; run python -m common.tools.path --write-readme"
        )
    return broken
