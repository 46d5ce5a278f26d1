"""A change to one file of this repository, small enough to be read: old lines, new lines."""

from __future__ import annotations

import ast
import difflib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Patch:
    file: str  # a path from the root
    old: str  # stands in `file` exactly once
    new: str

    @property
    def module(self) -> str:
        """What `import` calls the file: `radix_cache` of a chapter, `common.outputs`."""
        path = Path(self.file).with_suffix("")
        return ".".join(path.parts) if path.parts[0] == "common" else path.name

    def text(self) -> str:
        return (ROOT / self.file).read_text(encoding="utf-8")

    def apply(self) -> str:
        """The file's text with the change. Raises `ValueError` if `old` is not there once."""
        text = self.text()
        if (num_places := text.count(self.old)) != 1:
            raise ValueError(f"{self.file} has {self.old!r} {num_places} times: it must once")
        return text.replace(self.old, self.new)

    def diff(self) -> str:
        """The whole lines that go ("- ") and come ("+ "), moved to the left together."""
        before, after = self.text().splitlines(), self.apply().splitlines()
        lines = list(difflib.unified_diff(before, after, n=0, lineterm=""))[2:]  # without the names
        changed = [f"{line[0]} {line[1:]}" for line in lines if line[0] in "+-"]
        margin = min(
            (len(x) - len(x[2:].lstrip()) - 2 for x in changed if x[2:].strip()), default=0
        )
        return "\n".join(line[:2] + line[2 + margin :] for line in changed)

    def place(self) -> str:
        """The function, method or class that the change is in: `BlockPool.free`."""
        line = self.text()[: self.text().index(self.old)].count("\n") + 1
        line += len(self.old) - len(self.old.lstrip("\n"))
        node: ast.AST = ast.parse(self.text())
        names: list[str] = []
        while True:
            inner = [
                child
                for child in ast.iter_child_nodes(node)
                if isinstance(child, ast.FunctionDef | ast.ClassDef)
                and child.lineno <= line <= (child.end_lineno or 0)
            ]
            if not inner:
                return ".".join(names)
            node = inner[0]
            names.append(inner[0].name)


def names_in(file: str) -> set[str]:
    """The functions and classes at the top level of a file of the repository."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
