"""The laws of the house, each a function from a `House` to a list of sentences (empty: it holds).

`test_house.py` applies every law to this repository and, so that no law is one that cannot be
broken, to small trees in which it is. The laws read source text and never import it.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

from workshop.book import palette
from workshop.book.quoted import BLOCK, find_quote

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CHAPTERS = (
    "01_batching",
    "02_paged_kv",
    "03_prefix_cache",
    "04_scheduler",
    "05_spec_decode",
    "06_chunked_prefill",
)
FORBIDDEN_NAMES = frozenset({"utils", "types", "queue", "token", "profile", "select"})
# What `common` composes and must not define.
CHAPTER_TRADES = re.compile(r"(BlockPool|Cache|CacheManager|Scheduler|Proposer|Reject\w*)$")
# A path of a developer's machine; not part of a URL or of a longer path.
MACHINE_PATH = re.compile(
    rb"(?<![\w.])(?:/(?:work|root|github/workspace)/|/(?:home|Users)/\w|/tmp/(?:scratch|ipykernel)|[A-Z]:\\Users\\)"
)


@dataclass(frozen=True)
class House:
    """The files of the repository at `root`: all but those that `.gitignore` names."""

    root: Path
    files: tuple[Path, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "files", tuple(sorted(_files(self.root))))

    def chapters(self) -> list[Path]:
        """The numbered folders that exist, in order."""
        return sorted(p for p in self.root.glob("[0-9][0-9]_*") if p.is_dir())

    def python_files(self, *, aside: bool = True) -> list[Path]:
        """Every Python file; with `aside=False` only modules, without tests and helpers beside
        them."""
        return [p for p in self.files if p.suffix == ".py" and (aside or not self.is_aside(p))]

    def chapter_modules(self) -> list[Path]:
        return [p for p in self.python_files(aside=False) if self.chapter_of(p) is not None]

    def root_modules(self) -> list[Path]:
        """The modules that a chapter's text walks through."""
        return [p for p in self.chapter_modules() if p.parent.parent == self.root]

    def is_aside(self, path: Path) -> bool:
        """A test, a demo script, or anything in a `testing/`: what is served needs none of it."""
        return (
            path.name.startswith(("test_", "plot_"))
            or "testing" in path.relative_to(self.root).parts[:-1]
            or self.is_demo(path)
            or path.name == "conftest.py"
            or "tests" in path.relative_to(self.root).parts[:-1]
        )

    def helpers(self) -> dict[str, str]:
        """The chapter of each helper of tests."""
        found = (p for p in self.python_files() if p.parent.name == "testing")
        return {p.stem: p.parent.parent.name for p in found}

    def demo_scripts(self) -> list[Path]:
        return [p for p in self.python_files() if self.is_demo(p)]

    def rooms(self) -> list[str]:
        """The chapters' folders that hold modules, as pyproject.toml lists them."""
        found = {p.parent for p in self.python_files() if self.chapter_of(p) is not None}
        return sorted({self.name(p) for p in found} | {p.name for p in self.chapters()})

    def is_demo(self, path: Path) -> bool:
        is_test = path.name.startswith("test_")
        return path.name.endswith("_demo.py") and not is_test and self.chapter_of(path) is not None

    def chapter_of(self, path: Path) -> str | None:
        folder = path.relative_to(self.root).parts[0]
        return folder if re.fullmatch(r"\d\d_\w+", folder) else None

    def name(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    def pyproject(self) -> dict:
        path = self.root / "pyproject.toml"
        return tomllib.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _files(root: Path) -> Iterator[Path]:
    """Yield the files that `.gitignore` does not name, without starting git."""
    listed = root / ".gitignore"
    ignored = [".git", *listed.read_text(encoding="utf-8").split()] if listed.exists() else []
    for folder, folders, files in os.walk(root):
        prefix = "/" if folder == str(root) else ""
        folders[:] = [name for name in folders if not _matches(ignored, name + "/", prefix)]
        yield from (Path(folder, n) for n in files if not _matches(ignored, n, prefix))


def _matches(patterns: list[str], name: str, prefix: str) -> bool:
    """Whether a pattern names it, as git reads patterns: "/" first is the root, last a folder."""
    names = {name, name.rstrip("/"), prefix + name, prefix + name.rstrip("/")}
    return any(fnmatch(name, pattern) for pattern in patterns for name in names)


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


# -- the law of floors ---------------------------------------------------------------------------


@dataclass(frozen=True)
class ImportSite:
    line: int
    module: str  # "" when it is computed and cannot be read from the source
    relative: bool = False
    names: tuple[str, ...] = ()  # what is imported from the module


@dataclass(frozen=True)
class Outline:
    """The imports and classes of a file, at whatever depth, so that most laws parse it once."""

    imports: tuple[ImportSite, ...]
    classes: tuple[tuple[int, str], ...]  # line and name


@cache
def outline(path: Path) -> Outline:
    nodes = list(ast.walk(parse(path)))
    classes = tuple((n.lineno, n.name) for n in nodes if isinstance(n, ast.ClassDef))
    return Outline(tuple(imports(nodes)), classes)


def imports(nodes: Iterable[ast.AST]) -> Iterator[ImportSite]:
    """Every import: statements, `import_module("...")`, `__import__("...")`."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (ImportSite(node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names = tuple(alias.name for alias in node.names)
            yield ImportSite(node.lineno, node.module or "", node.level > 0, names)
        elif isinstance(node, ast.Call) and _called(node) in {"import_module", "__import__"}:
            name = node.args[0] if node.args else None
            known = isinstance(name, ast.Constant) and isinstance(name.value, str)
            yield ImportSite(node.lineno, name.value if known else "")


def _called(node: ast.Call) -> str:
    function = node.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def law_of_floors(house: House) -> list[str]:
    """A chapter imports no higher chapter and nothing of `common`, `workshop` or tests."""
    floor_of = {p.stem: house.chapter_of(p) for p in house.chapter_modules()}
    beside = {p.stem for p in house.python_files() if house.is_aside(p)}
    broken = []
    for path in house.chapter_modules():
        chapter = house.chapter_of(path)
        for site in outline(path).imports:
            top = site.module.partition(".")[0]
            if site.relative:
                reason = "imports relatively; chapters are no packages, names are flat"
            elif not top:
                reason = "imports a module whose name is computed"
            elif top in ("common", "workshop", *CHAPTERS):
                reason = f"imports `{top}`; no chapter module may"
            elif top in floor_of:
                if floor_of[top] <= chapter:
                    continue
                reason = f"imports `{top}` of {floor_of[top]}, which is a higher chapter"
            elif top in beside:
                reason = f"imports `{top}`, a test, a demo or a helper of tests"
            else:
                continue
            broken.append(f"{house.name(path)}:{site.line} {reason}")
    return broken


def rule_of_helpers(house: House) -> list[str]:
    """Helpers that tests share are in a chapter's `testing/`, for tests of this chapter and of
    higher ones. A helper imports no higher chapter and nothing of `common` or `workshop`."""
    helpers = house.helpers()
    floor_of = {p.stem: str(house.chapter_of(p)) for p in house.chapter_modules()} | helpers
    floor_of |= dict.fromkeys(("common", "workshop"), "common and workshop")
    broken = []
    for path in house.python_files():
        chapter, known = house.chapter_of(path), floor_of if path.stem in helpers else helpers
        for site in outline(path).imports if chapter else ():
            top = site.module.partition(".")[0]
            if known.get(top, "") > str(chapter):
                broken.append(f"{house.name(path)}:{site.line} imports `{top}` of {known[top]}")
    return broken


def distributions(house: House) -> set[str]:
    """The names of the dependencies and of the extras'."""
    project = house.pyproject().get("project", {})
    lists = [project.get("dependencies", []), *project.get("optional-dependencies", {}).values()]
    return {re.match(r"[\w.-]+", line)[0] for lines in lists for line in lines}


def declared_packages(house: House) -> set[str]:
    """Import names of the dependencies: the name of the distribution, but for those listed here."""
    imported_as = {"mooncake-transfer-engine-non-cuda": "mooncake"}
    return {imported_as.get(n, n.replace("-", "_")) for n in distributions(house)}


def law_of_one_definition(house: House) -> list[str]:
    """A chapter's class is defined once in the repository, tests included, nor again as `_Name`."""
    defined: dict[str, list[str]] = {}
    taught = set()
    for path in house.python_files():
        for line, class_name in outline(path).classes:
            name = class_name.lstrip("_")
            defined.setdefault(name, []).append(f"{house.name(path)}:{line}")
            if house.chapter_of(path) and not house.is_aside(path):
                taught.add(name)
    return [
        f"class {name} is defined {len(places)} times: {', '.join(places)}"
        for name, places in sorted(defined.items())
        if name in taught and len(places) > 1
    ]


def law_of_composition(house: House) -> list[str]:
    """`common` and `workshop` define no block pool, cache, scheduler, proposer, rejection rule."""
    return [
        f"{house.name(path)}:{line} defines `{name}`; that belongs to a chapter"
        for path in house.python_files(aside=False)
        if house.name(path).startswith(("common/", "workshop/"))
        for line, name in outline(path).classes
        if CHAPTER_TRADES.search(name)
    ]


def law_of_names(house: House) -> list[str]:
    """Module names are unique in the whole repository and hide no name that others import. A module
    in a folder of `workshop` is imported by the folder's name: `python -m workshop.NAME` finds it
    without, and imported so it would be a second module."""
    places: dict[str, list[str]] = {}
    for path in house.python_files():
        if path.stem not in {"__init__", "__main__", "conftest"}:
            places.setdefault(path.stem, []).append(house.name(path))
    taken = (
        FORBIDDEN_NAMES
        | sys.stdlib_module_names
        | declared_packages(house)
        | {"common", "workshop"}
    )
    broken = [
        f"module name `{name}` is used {len(paths)} times: {', '.join(paths)}"
        for name, paths in sorted(places.items())
        if len(paths) > 1
    ]
    broken += [
        f"{paths[0]}: the name `{name}` is taken by Python, a dependency or the style rules"
        for name, paths in sorted(places.items())
        if name in taken
    ]
    for path in house.python_files():
        for site in outline(path).imports:
            package, _, name = site.module.partition(".")
            folder = house.root / package / name.partition(".")[0]
            if package == "workshop" and not (name and folder.is_dir()):
                paths = f"{house.name(path)}:{site.line}"
                broken.append(f"{paths} imports `{site.module}` without its folder")
    return broken


def law_of_demos(house: House) -> list[str]:
    """A demo script imports its chapter and nothing of the workshop, and defines no class. A name
    that the book's palette also has, has the palette's value."""
    broken = []
    for path in house.demo_scripts():
        for node in ast.walk(parse(path)):
            at = f"{house.name(path)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.ClassDef):
                broken.append(f"{at} defines class {node.name}; a demo imports its chapter")
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
                name, value = ast.unparse(node.targets[0]), node.value.value
                if getattr(palette, name, value) != value:
                    broken.append(f"{at} has another {name} than the palette")
        broken += [
            f"{house.name(path)}:{site.line} imports `{site.module}` of the workshop"
            for site in outline(path).imports
            if site.module.partition(".")[0] == "workshop"
        ]
    return broken


# -- text and layout -----------------------------------------------------------------------------


def law_of_quotation(house: House) -> list[str]:
    """A block that begins "```python file=NAME.py" is, line by line, part of that file.

    NAME.py is a path from the root or a bare file name. The block may be moved left or right as a
    whole (a method quoted without its class); blank lines compare as blank. Docstrings may be left
    out, and nothing else.
    """
    broken = []
    called: dict[str, set[Path]] = {}
    for path in house.files:
        for name in (house.name(path), path.name):
            called.setdefault(name, set()).add(path)
    for text in (p for p in house.files if p.suffix == ".md"):
        page = text.read_text(encoding="utf-8")
        for match in BLOCK.finditer(page):
            sources = [*called.get(match["file"], set()) - {text}]
            line = page.count("\n", 0, match.start()) + 1
            at = f"{house.name(text)}:{line}"
            if len(sources) != 1:
                broken.append(f"{at} quotes {match['file']}; {len(sources)} files have that name")
            elif find_quote(sources[0].read_text(encoding="utf-8"), match["code"]) is None:
                broken.append(f"{at} differs from {house.name(sources[0])}")
    return broken


def law_of_no_machine(house: House) -> list[str]:
    """No file names a folder of the machine on which it was written."""
    broken = []
    for path in house.files:
        data = path.read_bytes()
        if match := MACHINE_PATH.search(data):
            line = data.count(b"\n", 0, match.start()) + 1
            shown = data[match.start() : match.end() + 30].split(b"\n")[0]
            broken.append(f"{house.name(path)}:{line} has {shown.decode(errors='replace')!r}")
    return broken


def law_of_text(house: House) -> list[str]:
    """Each chapter has its text, and so has its `beyond/`."""
    rooms = [house.root / room for room in house.rooms() if room.endswith("/beyond")]
    return [
        f"{house.name(room)} has no README.md"
        for room in [*house.chapters(), *rooms]
        if not (room / "README.md").is_file()
    ]


def law_of_lists(house: House, planned: tuple[str, ...] = CHAPTERS) -> list[str]:
    """pyproject.toml lists the chapters and their rooms alike for editable installs and pytest.

    A chapter of the plan may be listed before its folder exists; one that exists must be listed.
    """
    tool = house.pyproject()["tool"]
    lists = {
        "tool.hatch.build dev-mode-dirs": (tool["hatch"]["build"]["dev-mode-dirs"], ["."]),
        "pytest pythonpath": (tool["pytest"]["ini_options"]["pythonpath"], ["."]),
    }
    expected = sorted({*planned, *house.rooms()})
    broken = [
        f"{p.name} is no chapter of the plan {planned}"
        for p in house.chapters()
        if p.name not in planned
    ]
    for name, (found, first) in lists.items():
        if found != first + expected:
            broken.append(f"{name} is {found}, not {first + expected}")
    return broken


# -- notebooks -----------------------------------------------------------------------------------


def law_of_pairs(house: House) -> list[str]:
    """Each demo script has its notebook: same cells, every code cell executed, no stored error."""
    from workshop.book.notebooks import notebook_problems

    return [
        f"{house.name(path)}: {problem}"
        for path in house.demo_scripts()
        for problem in notebook_problems(path)
    ]
