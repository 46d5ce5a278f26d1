"""A change to one place of this repository, found by its symbol and its text.

    Patch("block_pool", "BlockPool.free", "if block.ref_cnt == 0:", "if True:")

`module` is the last part of a module's name. Names are flat and unique, so a patch survives a move
to another folder. `old` is searched in the symbol, token by token, so line breaks, indentation,
comments and code elsewhere do not matter. It must occur exactly once. If it does not occur, but
code that differs from it in names alone, then those names replace the ones in `new`: `renames.py`.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from workshop.practice.renames import changed, exact_places, renamed, renamed_places, tokens

ROOT = Path(__file__).resolve().parents[2]


class PatchError(ValueError):
    """A patch does not apply. The message has the patch and the code it searches."""


@cache
def module_files() -> dict[str, Path]:
    """Return the modules of chapters and packages: name -> file, without names of many folders."""
    packages = [init.parent for init in ROOT.glob("*/__init__.py")]
    folders = [*sorted(ROOT.glob("[0-9][0-9]_*")), *sorted(packages)]
    return {
        path.stem: path
        for folder in folders
        for path in sorted(folder.rglob("*.py"))
        if path.stem not in ("__init__", "__main__", "conftest")
    }


def file_of(module: str) -> Path:
    """Return a module's file. Raises `LookupError` with the nearest names."""
    if (path := module_files().get(module)) is None:
        near = ", ".join(difflib.get_close_matches(module, module_files())) or "nothing like it"
        raise LookupError(f"there is no module {module}; there is {near}")
    return path


def definitions(tree: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    """Yield functions and classes with their full names, outer ones first, and names assigned at
    the top level or in a class."""

    def within(node: ast.AST, prefix: str, is_function: bool) -> Iterator[tuple[str, ast.stmt]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = prefix + child.name
                yield name, child
                yield from within(child, f"{name}.", not isinstance(child, ast.ClassDef))
            elif isinstance(child, ast.Assign | ast.AnnAssign) and not is_function:
                targets = child.targets if isinstance(child, ast.Assign) else [child.target]
                yield from ((prefix + t.id, child) for t in targets if isinstance(t, ast.Name))
            else:
                yield from within(child, prefix, is_function)

    return within(tree, "", False)


@dataclass(frozen=True, slots=True)
class Patch:
    module: str  # "block_pool"; "outputs" for `common.requests.output_processor`
    symbol: str  # "BlockPool.free"; "" for all of the module
    old: str
    new: str  # replaces `old`; its lines are indented relative to the first line of `old`

    @property
    def path(self) -> Path:
        return file_of(self.module)

    @property
    def file(self) -> str:
        """The file's path, relative to the root."""
        return self.path.relative_to(ROOT).as_posix()

    @property
    def chapter(self) -> str:
        """The chapter's folder, or "common"."""
        folder = self.file.partition("/")[0]
        return folder if folder[0].isdigit() else "common"

    @property
    def name(self) -> str:
        return f"{self.module} {self.symbol}".strip()

    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    def known_names(self) -> dict[str, str]:
        """Return the names that changed in the symbol, as other patches there tell."""
        return {}

    def changed_names(self) -> dict[str, str]:
        """Return the names of the patch that have changed, old -> new. Raises as `apply` does."""
        return changed(self._place(self.text())[2])

    def apply(self) -> str:
        """Return the file's text with the change. Raises `PatchError` unless `old` occurs once."""
        text = self.text()
        start, end, names = self._place(text)
        new = renamed(self.new, {**self.known_names(), **names})
        begin = text.rfind("\n", 0, start) + 1
        if text[begin:start].strip():  # in the middle of a line
            return text[:start] + new + text[end:]
        if not new:
            return text[:begin] + text[end:].lstrip(" ").removeprefix("\n")
        shift = start - begin - (len(self.old) - len(self.old.lstrip(" ")))
        lines = [_moved(line, shift) for line in new.split("\n")]
        return text[:begin] + "\n".join(lines) + text[end:]

    def _place(self, text: str) -> tuple[int, int, dict[str, str]]:
        """Return start and end of `old`, with comments around it if `old` itself has some, and its
        names as they are now."""
        within = regions(text, self.symbol)
        places = [
            (*place, {}) for region in within for place in exact_places(text, self.old, *region)
        ]
        if not places:
            places = [p for region in within for p in renamed_places(text, self.old, *region)]
        if len(places) > 1:
            known = self.known_names()
            places = [p for p in places if changed(p[2]).items() <= known.items()] or places
        if len(places) != 1:
            where = (
                f"{self.name} ({self.file}) does not apply. It looks for, {len(places)} times there"
            )
            raise PatchError(f"{where}:\n{self.old}")
        ((start, end, names),) = places
        if self.old.lstrip().startswith("#"):
            lines = text[:start].splitlines(keepends=True)
            margin = lines.pop() if lines and not lines[-1].endswith("\n") else ""
            while lines and lines[-1].lstrip().startswith("#"):
                margin = lines.pop()
            start = len("".join(lines)) + len(margin) - len(margin.lstrip(" "))
        if "#" in _tail(self.old):
            end += len(text[end:].partition("\n")[0])
        return start, end, names

    def diff(self) -> str:
        """Return the removed ("- ") and added ("+ ") whole lines, dedented together."""
        before, after = self.text().splitlines(), self.apply().splitlines()
        lines = list(difflib.unified_diff(before, after, n=0, lineterm=""))[2:]  # without the names
        changed = [f"{line[0]} {line[1:]}" for line in lines if line[0] in "+-"]
        margin = min(
            (len(x) - len(x[2:].lstrip()) - 2 for x in changed if x[2:].strip()), default=0
        )
        return "\n".join(line[:2] + line[2 + margin :] for line in changed)


def regions(text: str, symbol: str) -> list[tuple[int, int]]:
    """Return start and end of the symbol's definitions. A property and its setter are two."""
    if not symbol:
        return [(0, len(text))]
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    return [(starts[first - 1], starts[last]) for n, first, last in _spans(text) if n == symbol]


def _tail(text: str) -> str:
    """Return the text after the last token."""
    found = tokens(text)
    return text[found[-1].end :] if found else text


def _moved(line: str, shift: int) -> str:
    return line[-shift:] if shift < 0 else f"{' ' * shift}{line}" if line else line


def parameters_of(text: str, symbol: str) -> list[str]:
    """Return the names of a function's parameters, without `self`. Empty for anything else."""
    nodes = [node for name, node in definitions(ast.parse(text)) if name == symbol]
    if not nodes or not isinstance(nodes[0], ast.FunctionDef):
        return []
    given = nodes[0].args
    names = [one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return names[names[:1] == ["self"] :]


@cache  # a file has many bugs
def _spans(text: str) -> list[tuple[str, int, int]]:
    """Return the name, first line and last line of each definition."""
    return [
        (name, min([node.lineno, *(d.lineno for d in decorators)]), node.end_lineno or 0)
        for name, node in definitions(ast.parse(text))
        for decorators in [getattr(node, "decorator_list", [])]
    ]


def names_in(path: Path) -> set[str]:
    """Return the names of a file's top-level functions and classes."""
    names = (name for name, _, _ in _spans(path.read_text(encoding="utf-8")))
    return {name for name in names if "." not in name}


def titles_in(log: Path) -> set[str]:
    """Return the titles of the cases of a step log (`01_batching/testing/step_log.py`)."""
    lines = log.read_text(encoding="utf-8").splitlines()
    return {line.strip() for line in lines if line.strip() and line[0] not in "# "}


def logs_of(test_file: Path) -> list[Path]:
    """Return the step logs that a file of tests reads: they lie beside it."""
    names = re.findall(r'"(\w+\.txt)"', test_file.read_text(encoding="utf-8"))
    return [log for name in names if (log := test_file.with_name(name)).exists()]
