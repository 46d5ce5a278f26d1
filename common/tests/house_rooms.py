"""The laws of the rooms: what a chapter's root may import, say and weigh. See `house.py`."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from common.tests.house import House, outline, parse


def law_of_rooms(house: House) -> list[str]:
    """A chapter's root imports no `beyond/`, of whatever chapter. `beyond/` imports roots, and the
    `beyond/` of its own and lower chapters (the law of floors says that)."""
    far = {p.stem for p in house.chapter_modules() if p.parent.name == "beyond"}
    return [
        f"{house.name(path)}:{site.line} imports `{site.module}` of a `beyond/`"
        for path in house.root_modules()
        for site in outline(path).imports
        if site.module in far
    ]


# Words that a chapter's root must not use: those of later chapters, as parts of identifiers.
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
    num_kv_blocks_in_use block_ids new_block_ids BlockTableUpdate block_moves block_index block_id
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
            for line, target in _imported_files(path, files)
            if _layer_of(target) > layer
        ]
        broken += [
            f"{house.name(path)}:{site.line} imports `{site.module}`, which is beside the engine"
            for site in outline(path).imports
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
        house.name(path): {house.name(files[name]) for _, name in _imported_files(path, files)}
        for path in named
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [f"a circle of files: {' -> '.join(error.args[1])}"]
    return []


def _imported_files(path: Path, files: Collection[str]) -> Iterator[tuple[int, str]]:
    for site in outline(path).imports:
        names = [*(f"{site.module}.{name}" for name in site.names), site.module]
        yield from ((site.line, name) for name in names if name in files)
