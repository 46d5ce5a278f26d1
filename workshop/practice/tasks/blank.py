"""A source file with the body of one function taken out, by its syntax tree.

    def free(self, blocks):
        '''Drop a reference to each block. ...'''      signature and docstring stay
        # Task 2.2: ...                                what to write
        raise NotImplementedError("task 2.2: ...")

The lines are taken from the current source, so a task always matches the chapter: blank and
solution together are the source, byte for byte. A file with several tasks has several holes.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from workshop.practice.source_patch import definitions

WIDTH = 100


@dataclass(frozen=True, slots=True)
class Blank:
    before: str
    stub: str
    after: str
    solution: str
    first_line: int  # of the solution, in the source; from 1

    @property
    def text(self) -> str:
        return self.before + self.stub + self.after

    @property
    def line(self) -> int:
        """The line of the `raise` in the blank, from 1."""
        return (self.before + self.stub).count("\n")


def make_blank(
    source: str, place: str, names: Sequence[str], title: str, write: str, number: str
) -> Blank:
    """Make a blank. Raises `LookupError` if the function or the statements do not exist."""
    first, stop, indent = _region(source, place, names)
    lines = source.splitlines(keepends=True)
    margin = " " * indent
    told = filled(f"Task {number}: {title}\n\n{write}", WIDTH - indent - 2)
    comment = "".join(f"{margin}# {line}".rstrip() + "\n" for line in told.splitlines())
    stub = f'{comment}{margin}raise NotImplementedError("task {number}: not written yet")\n'
    parts = ("".join(part) for part in (lines[:first], lines[first:stop], lines[stop:]))
    before, solution, after = parts
    return Blank(before, stub, after, solution, first + 1)


def with_holes(source: str, blanks: Iterable[Blank]) -> str:
    """Return the source with all blanks."""
    for blank in sorted(blanks, key=lambda blank: -len(blank.before)):
        end = len(blank.before) + len(blank.solution)
        source = source[: len(blank.before)] + blank.stub + source[end:]
    return source


def filled(text: str, width: int) -> str:
    """Fill the paragraphs of a text. An indented one is a drawing and stays unchanged."""
    paragraphs = text.split("\n\n")
    return "\n\n".join(p if p.startswith(" ") else textwrap.fill(p, width) for p in paragraphs)


def function_at(tree: ast.Module, place: str) -> ast.FunctionDef | None:
    found = (node for name, node in definitions(tree) if name == place)
    return next((node for node in found if isinstance(node, ast.FunctionDef)), None)


def lines_of_function(function: ast.FunctionDef) -> tuple[int, int]:
    """Return the function's lines `[first, stop)`, from 0, including decorators."""
    first = min(node.lineno for node in (function, *function.decorator_list))
    return first - 1, function.end_lineno or 0


def signature(function: ast.FunctionDef) -> str:
    """Return the signature without types, which a reader may leave out."""
    bare = ast.parse(ast.unparse(function.args).join(("def f(", "): ...")))
    for argument in (node for node in ast.walk(bare) if isinstance(node, ast.arg)):
        argument.annotation = None
    return ast.unparse(bare.body[0]).removeprefix("def f").partition(":\n")[0]


def _region(source: str, place: str, names: Sequence[str]) -> tuple[int, int, int]:
    """Return the lines `[first, stop)`, from 0, to take out, and their indentation."""
    function = function_at(ast.parse(source), place)
    if function is None:
        raise LookupError(f"there is no function {place}")
    body = function.body
    if names:
        body = _that_bind(function, names)
    elif ast.get_docstring(function) is not None:
        body = body[1:]
    if not body:
        raise LookupError(f"{place} has nothing that could be taken out")
    lines = source.splitlines()
    first, stop = body[0].lineno - 1, body[-1].end_lineno or 0
    while lines[first - 1].lstrip().startswith("#"):
        first -= 1
    return first, stop, body[0].col_offset


def _that_bind(function: ast.FunctionDef, names: Sequence[str]) -> list[ast.stmt]:
    """Return the first consecutive statements of which the i-th binds `names[i]`."""
    for block in _blocks(function):
        for start in range(len(block) - len(names) + 1):
            found = block[start : start + len(names)]
            if all(name in _bound(statement) for name, statement in zip(names, found)):
                return found
    raise LookupError(f"no statements of {function.name} bind {', '.join(names)}")


def _blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    for field in ("body", "orelse", "finalbody"):
        if block := getattr(node, field, None):
            yield block
            for statement in block:
                yield from _blocks(statement)


def _bound(statement: ast.stmt) -> set[str]:
    return {
        node.id
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
