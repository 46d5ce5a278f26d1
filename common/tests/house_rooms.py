"""The laws of the rooms: what a chapter's root may import, say and weigh. See `house.py`."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator
from graphlib import CycleError, TopologicalSorter

from common.tests.house import House, imports, parse
from workshop.book.path import Size, loaded_size, room_sizes, rooms_table


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
    1: "block page paged prefix preempt evict tier",
    2: "prefix preempt evict tier connector",
    3: "preempt tier connector",
    5: "chunk chunked mixed mixing",
}
# Nouns of later chapters that hooks (methods), fields and parameters may use: a private word in
# their place is a riddle. Classes and functions that a later chapter teaches are defined there.
_DRAFTS = "draft spec speculative lookahead verify verified guess"
LATER_NOUNS = {1: f"chunk {_DRAFTS}", 2: f"chunk {_DRAFTS}", 3: f"chunk {_DRAFTS}", 4: _DRAFTS}
# Except these: counters of Request, fields of what crosses processes. Each has a line in the source
# that names its chapter.
SPOKEN_EARLIER = """
    num_kv_blocks_in_use block_ids new_block_ids BlockMove block_moves block_index block_id
    num_blocks_needed skip_reading_prefix_cache
"""


def words_of(identifier: str) -> set[str]:
    """`NumDraftTokens`, `num_draft_tokens` -> num, draft, tokens; a plural counts as its noun."""
    parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", identifier)
    words = {part.lower() for part in parts}
    return words | {word[:-1] for word in words if word.endswith("s")}


def law_of_words(house: House) -> list[str]:
    """A chapter's root names nothing with words of later chapters; their nouns it uses for hooks,
    fields and parameters alone."""
    broken = []
    for path in house.root_modules():
        chapter, tree = int(house.chapter_of(path)[:2]), parse(path)
        later, nouns = (set(t.get(chapter, "").split()) for t in (LATER_WORDS, LATER_NOUNS))
        defined = set(_classes_and_functions(tree))
        for line, name in sorted({*_identifiers(tree), *defined}):
            banned = later | nouns if (line, name) in defined else later
            if name not in SPOKEN_EARLIER.split() and (found := banned & words_of(name)):
                broken.append(f"{house.name(path)}:{line} says `{name}`: {found.pop()} comes later")
    return broken


def _classes_and_functions(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Without methods."""
    for node in ast.walk(tree):
        is_function = isinstance(node, ast.FunctionDef) and node in tree.body
        if isinstance(node, ast.ClassDef) or is_function:
            yield node.lineno, node.name


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


# A reader's evening: at most so many modules and lines in each root. README's table of rooms has
# the numbers of today, and so has `python -m workshop.path`.
ROOM_LIMITS = {
    "01_batching": Size(9, 1463),
    "02_paged_kv": Size(9, 1205),
    "03_prefix_cache": Size(9, 1557),
    "04_scheduler": Size(9, 1217),
    "05_spec_decode": Size(9, 1042),
    "06_chunked_prefill": Size(9, 500),
    "all roots": Size(45, 6700),
}
# With the defaults of eight families in `transformers`, and torch's threads, which are a number of
# the process and so a module of their own.
LOADED_LIMIT = Size(61, 11939)


def law_of_sizes(house: House) -> list[str]:
    """A root is read in an evening."""
    return [
        sentence
        for name, size in room_sizes(house.root).items()
        for sentence in _too_large(name, size, ROOM_LIMITS.get(name, size))
    ]


def law_of_the_default(house: House) -> list[str]:
    """What `LLM()` loads is read in a week; CONTRIBUTING says how much it is. From a process."""
    broken = _too_large("what LLM() loads", loaded_size(house.root), LOADED_LIMIT)
    page = house.root / "CONTRIBUTING.md"
    text = page.read_text(encoding="utf-8") if page.exists() else ""
    if "<!-- table:rooms -->" in text and rooms_table(house.root) not in text:
        command = "python -m workshop.path --write"
        broken.append(f"CONTRIBUTING.md: its rooms are others; run {command}")
    return broken


def _too_large(name: str, size: Size, limit: Size) -> list[str]:
    if size.num_modules <= limit.num_modules and size.num_lines <= limit.num_lines:
        return []
    return [
        f"{name} has {size.num_modules} modules and {size.num_lines} lines; its limits are "
        f"{limit.num_modules} and {limit.num_lines}"
    ]


# `common`, from below: its folders, and the modules beside them. A file's folder is its layer.
LAYERS = (
    "engine_config", "models", "requests", "sampling", "runner", "features", "assembly", "parallel",
    "events", "engine", "llm", "serve", "demo",
)  # fmt: skip


def rule_of_layers(house: House) -> list[str]:
    """A module of `common` imports from its own layer and from lower ones, for types and in a
    function too: nothing of a higher one, of the tests or of the workshop."""
    files = {
        house.name(p)[:-3].replace("/", "."): p
        for p in house.python_files()
        if house.name(p).startswith(("common/", "workshop/")) and p.stem != "__init__"
    }
    aside = {p.stem for p in house.python_files() if house.chapter_of(p) and house.is_aside(p)}
    broken = []
    for name, path in sorted(files.items()):
        if not name.startswith("common.") or house.is_aside(path):
            continue
        if (layer := _layer_of(name)) == len(LAYERS):
            broken.append(f"{house.name(path)} is in no layer: {', '.join(LAYERS)}")
        broken += [
            f"{house.name(path)}:{line} imports `{target}` of a higher layer"
            for line, target in _imported_files(parse(path), files)
            if _layer_of(target) > layer
        ]
        broken += [
            f"{house.name(path)}:{site.line} imports `{site.module}`, which is beside the engine"
            for site in imports(parse(path))
            if site.module in aside
        ]
    return broken


def _layer_of(module: str) -> int:
    """The index of its layer; tests and the workshop are above all."""
    package, name, *_ = module.split(".")
    is_of_common = package == "common" and name in LAYERS
    return LAYERS.index(name) if is_of_common else len(LAYERS)


def law_of_circles(house: House) -> list[str]:
    """No two files of the repository import each other, directly or through others."""
    named = [p for p in house.python_files() if p.stem != "__init__"]
    files = {house.name(p)[:-3].replace("/", "."): p for p in named}
    files |= {p.stem: p for p in named if house.chapter_of(p) is not None}
    graph = {
        house.name(path): {
            house.name(files[name]) for _, name in _imported_files(parse(path), files)
        }
        for path in named
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [f"a circle of files: {' -> '.join(error.args[1])}"]
    return []


def _imported_files(tree: ast.Module, files: Collection[str]) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names] + [str(node.module)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        yield from ((node.lineno, name) for name in names if name in files)
