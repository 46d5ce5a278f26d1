"""Find a file's private words: expressions of `vocabulary.tsv`, in docstrings, comments, pages and
text tables, without code. Three kinds are counted: words, docstrings that begin with neither a
command nor a noun, and identifiers where they are bound. `words.py` compares the numbers with a
table."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

VOCABULARY = Path(__file__).with_name("vocabulary.tsv")
KIND_OF = {"W": "words", "B": "words", "D": "docstrings", "N": "names"}  # by an id's first letter
KINDS = tuple(dict.fromkeys(KIND_OF.values()))
FENCED = re.compile(r"^ *(```|~~~).*?^ *\1 *$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`]*`|\]\([^)]*\)|<!--.*?-->|\w+(?:[._]\w+)+")
BREAK = re.compile(r"[*|#-]|\d+\. ")  # begins a paragraph without a blank line
STRING_OR_COMMENT = re.compile(
    r'''"""(?:\\.|[^\\])*?"""|\'{3}(?:\\.|[^\\])*?\'{3}|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|#[^\n]*''',
    re.DOTALL,
)
AROUND = 30  # characters around a hit that can make it an allowed use
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)

Paragraph = tuple[str, list[tuple[int, int]]]  # its text in one line; offsets and numbers of lines


class Row(NamedTuple):
    """A row of the vocabulary: an expression."""

    pattern: re.Pattern[str]
    allowed: re.Pattern[str] | None
    instead: str
    example: str


class Hit(NamedTuple):
    kind: str
    line: int
    found: str
    instead: str


@cache
def vocabulary(kind: str) -> list[Row]:
    lines = VOCABULARY.read_text(encoding="utf-8").splitlines()
    rows = []
    for key, pattern, allowed, *rest in (x.split("\t") for x in lines if x[0] != "#"):
        flags = 0 if key[0] == "N" or key[-1] == "C" else re.IGNORECASE
        around = re.compile(allowed) if allowed else None
        if KIND_OF[key[0]] == kind:
            rows.append(Row(re.compile(pattern, flags), around, *rest))
    return rows


def prose_of(name: str, source: str, nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield lines without code. A text table's lines have a key and indented continuations."""
    if name.endswith(".py"):
        for _, first, text in docstrings(nodes):
            yield from [*enumerate(text.split("\n"), first), (0, "")]
        last = (0, 0)
        for line, column, text in comments(source):
            yield from [] if last == (line - 1, column) else [(0, "")]
            yield line, text.lstrip("#")
            last = (line, column)
        return
    text = FENCED.sub(lambda match: "\n" * match[0].count("\n"), source)
    for number, line in enumerate(text.splitlines(), 1):
        if name.endswith(".txt") and line[:1] != " ":
            yield number, ""
            line = "" if line[:1] in set("-+|#@") else re.sub(r"^[a-z_]+ ", "", line)
        yield number, line


def comments(source: str) -> Iterator[tuple[int, int, str]]:
    """Yield line, column and text of comments, as `tokenize` finds them in ten times the time."""
    line, begin = 1, 0
    for found in STRING_OR_COMMENT.finditer(source):
        if found[0][0] == "#":
            at = found.start()
            line, begin = line + source.count("\n", begin, at), at
            yield line, at - source.rfind("\n", 0, at) - 1, found[0]


def docstrings(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, int, str]]:
    """Yield each docstring's documented name, first line number, and text."""
    for node in nodes:
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            assert isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
            yield getattr(node, "name", "module"), first.lineno, str(first.value.value)


def paragraphs(prose: Iterable[tuple[int, str]]) -> Iterator[Paragraph]:
    """Yield paragraphs: joined lines, without code."""
    text, starts = "", []
    for number, line in [*prose, (0, "")]:
        line = line.strip()
        if text and (not line or BREAK.match(line)):
            yield CODE.sub(lambda match: "`" * len(match[0]), text), starts
            text, starts = "", []
        if line:
            text += " " if text else ""
            starts.append((len(text), number))
            text += line


def bindings(name: str, nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield line and identifier with its kind of binding: `def f`. Names of tests are left out."""
    yield 1, f"module {Path(name).stem}"
    for node in nodes:
        if isinstance(node, ast.ClassDef):
            yield node.lineno, f"class {node.name}"
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, f"def {node.name}"
        elif isinstance(node, ast.arg):
            yield node.lineno, f"arg {node.arg}"
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, f"name {node.id if isinstance(node, ast.Name) else node.attr}"


@cache
def private_name(identifier: str) -> Row | None:
    forms = (identifier, identifier.partition(" ")[2].lstrip("_"))
    rows = [row for row in vocabulary("names") if any(map(row.pattern.fullmatch, forms))]
    return rows[0] if rows and not forms[1].startswith("test_") else None


def hits_of(name: str, source: str) -> tuple[list[Hit], int]:
    """Return the hits in the order of lines, and the number of words."""
    nodes = list(ast.walk(ast.parse(source))) if name.endswith(".py") else []
    prose = list(paragraphs(prose_of(name, source, nodes)))
    hits = []
    for text, starts in prose:
        for row in vocabulary("words"):
            for found in row.pattern.finditer(text):
                around = text[max(0, found.start() - AROUND) : found.end() + AROUND]
                if row.allowed is None or not row.allowed.search(around):
                    line = max(number for at, number in starts if at <= found.start())
                    hits.append(Hit("words", line, found[0].strip(), row.instead))
    (opener,) = vocabulary("docstrings")
    for _, line, text in docstrings(nodes):
        if found := opener.pattern.match(text.lstrip()):
            hits.append(Hit("docstrings", line, f"{found[0]} ...", opener.instead))
    for line, identifier in bindings(name, nodes) if nodes else ():
        if row := private_name(identifier):
            hits.append(Hit("names", line, identifier, row.instead))
    return sorted(hits, key=lambda hit: hit.line), sum(len(text.split()) for text, _ in prose)
