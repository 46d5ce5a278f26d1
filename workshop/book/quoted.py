"""Quotations of code in the pages, and links to symbols.

A block "```python file=NAME.py" of a page is, line by line, part of that file (a test checks it);
docstrings can be left out.

A block can name its source: "```python file=NAME.py symbol=Class.method". `make sync` writes the
body of these blocks, without docstrings, so that no code is copied by hand. A block that quotes a
part of a function follows its source too, as long as its first and last lines are there.

A link "[`::Class.method`](folder/NAME.py)" leads to a symbol, or to a test by its name, that is in
that file. The book's site leads to its line."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from workshop.book.path import ROOT
from workshop.practice.source_patch import definitions, module_files

BLOCK = re.compile(
    r"^(?P<fence>`{3,}|~{3,})python[ ]+file=(?P<file>\S+)(?:[ ]+symbol=(?P<symbol>\S+))?[^\n]*\n"
    r"(?P<code>.*?)^(?P=fence)[ ]*$",
    re.MULTILINE | re.DOTALL,
)
# [`::Class.method`](folder/NAME.py), [`test_name`](folder/test_NAME.py)
SYMBOL_LINK = re.compile(
    r"\[`(?:::(?P<name>[\w.]+)|(?P<test>test_\w+))`\]\((?P<path>[^)\s#]+\.py)(?=\))"
)
STRING_OR_COMMENT = re.compile(
    r'''"""(?:\\.|[^\\])*?"""|\'{3}(?:\\.|[^\\])*?\'{3}|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|#[^\n]*''',
    re.DOTALL,
)
_HAS_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@cache
def docstring_lines(source: str, *, whole_bodies: bool = True) -> frozenset[int]:
    """Return the line numbers, from 1, of docstrings. Without `whole_bodies`, leaves out docstrings
    that are a function's whole body."""
    lines: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, _HAS_DOCSTRING) and ast.get_docstring(node, clean=False) is not None:
            if len(node.body) == 1 and not whole_bodies:
                continue
            first = node.body[0]
            lines.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return frozenset(lines)


def code_lines(source: str) -> set[int]:
    """Return the numbers, from 1, of the lines that have code."""

    def without_comments(found: re.Match[str]) -> str:
        return "" if found[0][0] == "#" else "x" + "\nx" * found[0].count("\n")

    lines = STRING_OR_COMMENT.sub(without_comments, source).split("\n")
    return {i for i, line in enumerate(lines, 1) if line.strip()} - docstring_lines(source)


def without_docstrings(source: str) -> tuple[list[str], list[int]]:
    """Return the remaining lines and their numbers. A blank line after a docstring is removed."""
    lines, gone = source.splitlines(), set(docstring_lines(source, whole_bodies=False))
    gone |= {number + 1 for number in gone if lines[number : number + 1] == [""]} - {len(lines) + 1}
    numbers = [number for number in range(1, len(lines) + 1) if number not in gone]
    return [lines[number - 1].rstrip() for number in numbers], numbers


def find_quote(source: str, block: str) -> set[int] | None:
    """Return the line numbers, from 1, of `block` in `source`, with any indentation of the whole
    block, with or without docstrings. None if `source` has no such contiguous lines."""
    wanted = _dedented([line.rstrip() for line in block.strip("\n").splitlines()])
    if not any(wanted):
        return None
    whole = [line.rstrip() for line in source.splitlines()]
    for lines, numbers in (
        (whole, list(range(1, len(whole) + 1))),
        without_docstrings(source),
    ):
        for start in range(len(lines) - len(wanted) + 1):
            if _dedented(lines[start : start + len(wanted)]) == wanted:
                return set(numbers[start : start + len(wanted)])
    return None


def _dedented(lines: list[str]) -> list[str]:
    margin = min((len(x) - len(x.lstrip(" ")) for x in lines if x), default=0)
    return [line[margin:] for line in lines]


@cache
def symbol_source(source: str, symbol: str) -> str:
    """Return the source of a function, class, method ("Class.method") or assigned name, without
    docstrings and not indented. Raises `KeyError` if `source` has no such symbol."""
    node = _statement(source, symbol)
    decorators = getattr(node, "decorator_list", [])
    first, last = min([node.lineno, *(d.lineno for d in decorators)]), node.end_lineno or 0
    lines, numbers = without_docstrings(source)
    kept = [line for line, number in zip(lines, numbers) if first <= number <= last]
    return textwrap.dedent("\n".join(kept)).strip("\n") + "\n"


@cache
def _statement(source: str, symbol: str) -> ast.stmt:
    for name, node in definitions(ast.parse(source)):
        if name == symbol:
            return node
    raise KeyError(symbol)


def filled(text: str, folder: Path) -> str:
    """Return a page with its blocks filled. Files are looked up in the page's folder, then in the
    whole repository. A block without a source stays unchanged: see `unfilled`."""

    def fill(match: re.Match[str]) -> str:
        head, _, _ = match[0].partition("\n")
        try:
            return f"{head}\n{_body(match, folder)}{match['fence']}"
        except KeyError:
            return match[0]

    return BLOCK.sub(fill, text)


def symbol_line(match: re.Match[str], folder: Path) -> int:
    """Return the line of the symbol that a link names. Raises `KeyError` if it is not there."""
    source = find_file(match["path"], folder).read_text(encoding="utf-8")
    return _statement(source, match["name"] or match["test"]).lineno


def with_lines(text: str, folder: Path) -> str:
    """Return a page whose links to symbols lead to their lines: `NAME.py#L12`."""
    return SYMBOL_LINK.sub(lambda match: f"{match[0]}#L{symbol_line(match, folder)}", text)


def unfilled(text: str, folder: Path) -> Iterator[str]:
    """Yield a sentence for each block that quotes code that no longer exists, and for each link to
    a symbol that no longer exists."""
    for match in BLOCK.finditer(text):
        try:
            _body(match, folder)
        except KeyError as error:
            line = text[: match.start()].count("\n") + 1
            yield f"line {line} quotes what is not in {match['file']} any more: {error.args[0]}"
    for match in SYMBOL_LINK.finditer(text):
        try:
            symbol_line(match, folder)
        except KeyError as error:
            line = text[: match.start()].count("\n") + 1
            yield f"line {line} links to what is not in {match['path']} any more: {error.args[0]}"


def _body(match: re.Match[str], folder: Path) -> str:
    """Return the new content of a block. Raises `KeyError` if its source is not there."""
    source = find_file(match["file"], folder).read_text(encoding="utf-8")
    if match["symbol"] is not None:
        return symbol_source(source, match["symbol"])
    if find_quote(source, match["code"]) is not None:
        return match["code"]
    quote = match["code"].strip("\n").splitlines()
    margin = len(quote[0]) - len(quote[0].lstrip())
    for lines in (source.splitlines(), without_docstrings(source)[0]):
        starts = [i for i, line in enumerate(lines) if line.strip() == quote[0].strip()]
        if len(starts) == 1:
            ends = [
                i for i in range(starts[0], len(lines)) if lines[i].strip() == quote[-1].strip()
            ]
            if ends:
                piece = _dedented([line.rstrip() for line in lines[starts[0] : ends[0] + 1]])
                return textwrap.indent("\n".join(piece), " " * margin) + "\n"
    raise KeyError(f"{quote[0].strip()!r} ... {quote[-1].strip()!r}")


def first_line(match: re.Match[str], folder: Path) -> tuple[Path, int] | None:
    """Return the file that a block quotes, and the number of its first quoted line."""
    path = find_file(match["file"], folder)
    lines = find_quote(path.read_text(encoding="utf-8"), match["code"])
    return (path, min(lines)) if lines else None


def find_file(name: str, folder: Path) -> Path:
    """Return the file that a page in `folder` calls `name`: next to it, at this place in the
    repository, or the module of this name. Raises `KeyError` if there is none."""
    for path in (folder / name, ROOT / name):
        if path.is_file():
            return path
    if (path := module_files().get(name.removesuffix(".py"))) is None:
        raise KeyError(f"no file is named {name}")
    return path
