"""The rules about the repository that no tool has, each a function from a `House` to sentences.

Layers are checked by tach (`[tool.tach]`), dependencies by deptry, names by ruff. The imports
of each file are in tach's map: every import statement, for types and in functions too."""

from __future__ import annotations

import ast
import json
import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from tempfile import TemporaryDirectory

from workshop.book.quoted import filled, unfilled

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# A path of a developer's machine; not part of a URL or of a longer path.
MACHINE_PATH = re.compile(
    rb"(?<![\w.])(?:/(?:work|root|github/workspace)/|/(?:home|Users)/\w|/tmp/(?:scratch|ipykernel)|[A-Z]:\\Users\\)"
)
# The kinds of files that a file may import, of its own chapter and lower ones. A demo shows the
# engine too; tests import what they like, but for helpers of higher chapters.
MAY_IMPORT = {
    "root": {"root"},
    "beyond": {"root", "beyond"},
    "testing": {"root", "beyond", "testing"},
    "demo": {"root", "beyond", "common"},
    "common": {"root", "beyond", "common"},
}


@dataclass(frozen=True)
class House:
    """The files of the repository at `root`, without those that `.gitignore` names."""

    root: Path
    files: tuple[Path, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "files", tuple(sorted(_files(self.root))))

    def python_files(self, *, aside: bool = True) -> list[Path]:
        """Every Python file; with `aside=False` without tests, helpers of tests and demos."""
        return [p for p in self.files if p.suffix == ".py" and (aside or not self.is_aside(p))]

    def chapter_modules(self) -> list[Path]:
        return [p for p in self.python_files(aside=False) if self.name(p)[0].isdigit()]

    def is_aside(self, path: Path) -> bool:
        return self.kind(self.name(path)) in ("test", "testing", "demo")

    def kind(self, name: str) -> str:
        """root, beyond, testing or demo of a chapter; test; common; else the top folder."""
        *folders, file = name.split("/")
        if file.startswith(("test_", "plot_")) or file == "conftest.py" or "tests" in folders:
            return "test"
        if not name[0].isdigit():
            return folders[0] if folders else ""
        return "demo" if file.endswith("_demo.py") else (*folders, "root")[1]

    def is_test(self, name: str) -> bool:
        """Whether only tests use the file."""
        is_plot = name.rpartition("/")[2].startswith("plot_")
        return self.kind(name) in ("test", "testing") and not is_plot

    def demo_scripts(self) -> list[Path]:
        return [p for p in self.python_files() if self.kind(self.name(p)) == "demo"]

    def rooms(self) -> list[str]:
        """The chapters' folders that hold modules, as pyproject.toml lists them."""
        return sorted(
            {self.name(p.parent) for p in self.python_files() if self.name(p)[0].isdigit()}
        )

    def name(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    def pyproject(self) -> dict:
        return tomllib.loads((self.root / "pyproject.toml").read_text(encoding="utf-8"))

    @cached_property
    def imports(self) -> dict[str, set[str]]:
        """The files that each file imports, by name."""
        from tach.extension import DependentMap, Direction
        from tach.parsing import parse_project_config

        config = parse_project_config(self.root)
        with TemporaryDirectory() as folder:
            path = Path(folder) / "map.json"
            DependentMap(self.root, config, Direction.Dependencies).write_to_file(path)
            return {n: set(to) for n, to in json.loads(path.read_text(encoding="utf-8")).items()}


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


# -- imports


def rule_of_floors(house: House) -> list[str]:
    """A chapter imports its own and lower chapters; its root no `beyond/`; no module a test, a demo
    or a helper of tests; a test no helper of a higher chapter."""
    broken = []
    for name, targets in sorted(house.imports.items()):
        kind = house.kind(name)
        for target in sorted(targets):
            theirs = house.kind(target)
            is_upward = kind != "demo" and name[:3] < target[:3]
            if kind == "test":
                is_wrong = name[0].isdigit() and theirs == "testing" and is_upward
            else:
                is_wrong = is_upward or theirs not in MAY_IMPORT.get(kind, {theirs})
            if is_wrong and kind not in ("workshop", ""):
                broken.append(f"{name} imports {target}")
    return broken


def rule_of_circles(house: House) -> list[str]:
    """No two files import each other, directly or through others."""
    files = {n: {t for t in to if t != n} for n, to in house.imports.items() if "__init__" not in n}
    try:
        TopologicalSorter(files).prepare()
    except CycleError as error:
        return [f"a circle of files: {' -> '.join(error.args[1])}"]
    return []


# -- names and definitions


def distributions(house: House) -> set[str]:
    """The names of the dependencies and of the extras'."""
    project = house.pyproject()["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    return {re.match(r"[\w.-]+", line)[0] for lines in lists for line in lines}


def rule_of_names(house: House) -> list[str]:
    """Module names are unique in the whole repository, and no dependency has them. (Python's own
    names are ruff's rule A005.)"""
    places = defaultdict(list)
    for path in house.python_files():
        if path.stem not in ("__init__", "__main__", "conftest"):
            places[path.stem].append(house.name(path))
    taken = {name.replace("-", "_") for name in distributions(house)} | {"common", "workshop"}
    taken |= {"mooncake", "utils"}
    return [
        f"module name `{name}` is taken: {', '.join(paths)}"
        for name, paths in sorted(places.items())
        if len(paths) > 1 or name in taken
    ]


def rule_of_single_assignments(house: House) -> list[str]:
    """Three names, or an attribute and another name, are assigned one by one (chapters, common)."""
    broken = []
    for path in house.python_files():
        name = house.name(path)
        if name.startswith("workshop/"):
            continue
        for node in ast.walk(ast.parse(path.read_bytes())):
            if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)):
                continue
            for names in (n.elts for n in node.targets if isinstance(n, ast.Tuple)):
                if len(names) > 2 or any(isinstance(n, ast.Attribute) for n in names):
                    broken.append(f"{name}:{node.lineno}: {ast.unparse(node)}")
    return broken


def rule_of_one_definition(house: House) -> list[str]:
    """A chapter's class is defined once in the repository, tests included, nor again as `_Name`."""
    places = defaultdict(list)
    taught = set[str]()
    modules = set(house.chapter_modules())
    for path in house.python_files():
        nodes = ast.walk(ast.parse(path.read_bytes()))
        names = {n.name.lstrip("_") for n in nodes if isinstance(n, ast.ClassDef)}
        taught |= names if path in modules else set()
        for name in names:
            places[name].append(house.name(path))
    return [
        f"class {name} is defined {len(places[name])} times: {', '.join(places[name])}"
        for name in sorted(taught)
        if len(places[name]) > 1
    ]


# -- text and layout


def rule_of_quotation(house: House) -> list[str]:
    """A block that begins "```python file=NAME.py" is part of that file, but for docstrings."""
    broken = []
    for page in (p for p in house.files if p.suffix == ".md"):
        text = page.read_text(encoding="utf-8")
        broken += [f"{house.name(page)}: {complaint}" for complaint in unfilled(text, page.parent)]
        if filled(text, page.parent) != text:
            broken.append(f"{house.name(page)} differs from its sources: make sync")
    return broken


def rule_of_no_machine(house: House) -> list[str]:
    """No file names a folder of the machine on which it was written."""
    found = {house.name(p): MACHINE_PATH.search(p.read_bytes()) for p in house.files}
    return [f"{name} has {match[0].decode()!r}" for name, match in found.items() if match]


def rule_of_lists(house: House) -> list[str]:
    """pyproject.toml lists the chapters' folders alike for editable installs, pytest and tach. Each
    module of `common` is in a layer."""
    tool = house.pyproject()["tool"]
    lists = {
        "dev-mode-dirs": tool["hatch"]["build"]["dev-mode-dirs"],
        "pythonpath": tool["pytest"]["ini_options"]["pythonpath"],
        "source_roots": tool["tach"]["source_roots"],
    }
    expected = [".", *house.rooms()]
    broken = [f"{name} must be {expected}" for name, them in lists.items() if them != expected]
    layers = {f"common.{layer}" for layer in tool["tach"]["layers"]}
    modules = {".".join(house.name(p)[:-3].split("/")[:2]) for p in house.python_files(aside=False)}
    modules -= {"common.__init__"}
    unknown = sorted({m for m in modules if m.startswith("common.")} - layers)
    return [*broken, *(f"{module} is in no layer" for module in unknown)]


def rule_of_notebooks(house: House) -> list[str]:
    """Each demo script has its notebook, with the same cells."""
    from workshop.book.notebooks import notebook_problems

    pairs = [(house.name(path), notebook_problems(path)) for path in house.demo_scripts()]
    return [f"{name}: {problem}" for name, problems in pairs for problem in problems]
