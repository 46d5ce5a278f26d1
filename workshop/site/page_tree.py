"""The pages of one language of the site, and their order in the sidebar."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path, PurePath, PurePosixPath

from workshop.book.path import ROOT

LANGUAGES = ("en", "zh")
PAGES = PurePath("workshop", "site", "pages")  # of those that only the site has, at its root

# The sidebar: captions in both languages, and their pages. A page in or below the folder of an
# `index` that no other `index` is nearer to is listed below that.
SIDEBAR: dict[tuple[str, str], tuple[str, ...]] = {
    ("Start", "开始"): ("FIRST_HOUR", "COURSE", "CALCULATORS", "READING_ALONG", "GLOSSARY"),
    ("Chapters", "各章"): (
        "01_batching/index",
        "02_paged_kv/index",
        "03_prefix_cache/index",
        "04_scheduler/index",
        "05_spec_decode/index",
        "06_chunked_prefill/index",
    ),
    ("The engine", "引擎"): ("common/index",),
    ("Practice", "练习"): ("MUSEUM", "INCIDENTS"),
    ("Workshop", "工具"): (
        "workshop/index",
        "workshop/measure/bench/index",
        "CONTRIBUTING",
        "CHANGELOG",
    ),
}
ENGLISH_ONLY = "英文"  # the caption of the last group of the Chinese sidebar


@dataclass(frozen=True, slots=True)
class Tree:
    """The pages of one language: `pages` maps names without suffix, such as "04_scheduler/index",
    to their files; `english` are those that have no Chinese version."""

    folder: Path
    is_chinese: bool
    pages: dict[str, Path]
    english: frozenset[str]
    repository: str = ""  # the address where sources are; "": nowhere, so that they have no links


def git(*arguments: str) -> str:
    """Return the output of a command of git. Raises `SystemExit` where there is no clone."""
    run = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    if run.returncode:
        raise SystemExit(f"make book: git lists the pages, so a clone is needed: {run.stderr}")
    return run.stdout


def page_name(path: PurePath) -> str:
    """Return the name that the page `path`, relative to the repository, has in the site."""
    path = path.relative_to(PAGES) if path.is_relative_to(PAGES) else path
    name = str(path).removesuffix(path.suffix).removesuffix(".zh")
    return re.sub(r"(^|/)README$", r"\1index", name)


def find_pages(folder: Path, is_chinese: bool, repository: str) -> Tree:
    """Return the pages that git tracks. Those of `PAGES` are at the root."""
    listed = git("ls-files", "-z", "*.md", "*.ipynb").rstrip("\0").split("\0")
    english: dict[str, Path] = {}
    chinese: dict[str, Path] = {}
    for path in map(PurePath, listed):
        (chinese if path.stem.endswith(".zh") else english)[page_name(path)] = ROOT / path
    if not is_chinese:
        return Tree(folder, False, english, frozenset(), repository)
    missing = frozenset(
        name for name, path in english.items() if path.suffix == ".md" and name not in chinese
    )
    return Tree(folder, True, english | chinese, missing, repository)


def toctrees(name: str, tree: Tree) -> str:
    """Return the directives that list, in the sidebar, the pages below the page `name`."""
    if name == "index":
        groups = [(c[tree.is_chinese], p) for c, p in SIDEBAR.items()]
        groups.append((ENGLISH_ONLY, tuple(sorted(tree.english - {"index"}))))
    elif name.endswith("/index"):
        groups = [("", tuple(sorted(n for n in tree.pages if owner(n, tree) == name)))]
    else:
        return ""
    found = ""
    for caption, pages in groups:
        listed = [p for p in pages if p in tree.pages]
        if caption != ENGLISH_ONLY:
            listed = [p for p in listed if p not in tree.english]
        if listed:
            options = f":caption: {caption}\n" if caption else ""
            lines = "\n".join(f"/{page}" for page in listed)
            found += f"\n\n```{{toctree}}\n:hidden:\n{options}\n{lines}\n```\n"
    return found


def owner(name: str, tree: Tree) -> str:
    """Return the `index` that lists a page: the nearest above it, "" for a page of the sidebar."""
    if any(name in pages for pages in SIDEBAR.values()):
        return ""
    folder = PurePosixPath(name).parent
    for above in (folder, *folder.parents):
        index = "index" if str(above) == "." else f"{above}/index"
        if index in tree.pages and index != name:
            return index
    return ""
