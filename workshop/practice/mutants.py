"""Make mechanical mutants of a module: one small wrong change inside a function.

The kinds: a turned comparison (`<` to `<=`, `in` to `not in`), a number that is off by one, a
turned sign, `or` instead of `and`, a missing `not`, a dropped statement, two swapped arguments.
Which of them are planted depends on the source alone: at least `PER_HUNDRED` for 100 lines of code
in each module, with functions and kinds in turns. Lines keep their numbers."""

from __future__ import annotations

import ast
import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeGuard

from workshop.book.quoted import code_lines

PER_HUNDRED = 3
_TURNED = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.In: "not in",
    ast.NotIn: "in",
    ast.Is: "is not",
    ast.IsNot: "is",
}
_COMMUTATIVE = ("max", "min", "gcd")
# Expressions that need no parentheses, and those that are functions of their own in compiled code.
_CLOSED = (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.Constant)
_FUNCTIONS = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)

Span = tuple[int, int]  # start and end, in bytes of the source


@dataclass(frozen=True, slots=True)
class Mutant:
    """A change of `old` to `new`. `number` counts equal changes of one function, from 1, so that a
    mutant is found again when lines have moved."""

    function: str  # "BlockPool.free"
    kind: str
    old: str
    new: str
    number: int
    span: Span

    @property
    def key(self) -> str:
        return f"{self.function}: {self.old} -> {self.new} #{self.number}"

    def lines(self, source: str) -> range:
        """Return the numbers of the changed lines, from 1."""
        first, last = (source.encode()[:place].count(b"\n") + 1 for place in self.span)
        return range(first, last + 1)

    def apply(self, source: str) -> str:
        """Return the source with the change, and with as many lines."""
        data, (start, end) = source.encode(), self.span
        breaks = "\n" * (self.old.count("\n") - self.new.count("\n"))
        new = f"{self.new[:-1]}{breaks})" if self.new.endswith(")") else self.new + breaks
        return (data[:start] + new.encode() + data[end:]).decode()


def all_mutants(source: str) -> list[Mutant]:
    """Return the mutants of a source, in the order of their places."""
    seen: Counter[tuple[str, str, str]] = Counter()
    found = []
    for function, kind, span, old, new in _changes(ast.parse(source), source.encode()):
        seen[function, old, new] += 1
        found.append(Mutant(function, kind, old, new, seen[function, old, new], span))
    return found


def planted_mutants(source: str, factor: float = 1.0) -> list[Mutant]:
    """Return the mutants of a module that are planted: `factor` x `PER_HUNDRED` for 100 lines of
    code, rounded up."""
    total = -(-int(len(code_lines(source)) * PER_HUNDRED * factor) // 100)
    queues: dict[str, list[Mutant]] = {}
    for mutant in sorted(all_mutants(source), key=lambda mutant: _digest(mutant.key)):
        queues.setdefault(mutant.function, []).append(mutant)
    used: Counter[str] = Counter()
    chosen: list[Mutant] = []
    while len(chosen) < total and any(queues.values()):
        for function in sorted(filter(queues.get, queues), key=_digest):
            if len(chosen) < total:
                mutant = min(queues[function], key=lambda mutant: used[mutant.kind])
                queues[function].remove(mutant)
                used[mutant.kind] += 1
                chosen.append(mutant)
    return sorted(chosen, key=lambda mutant: mutant.span)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _changes(tree: ast.Module, data: bytes) -> Iterator[tuple[str, str, Span, str, str]]:
    """Yield function, kind, span, old and new text of each change."""
    starts = [0]
    for line in data.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def span(node: ast.expr | ast.stmt) -> Span:
        start = starts[node.lineno - 1] + node.col_offset
        return start, starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)

    def text(node: ast.expr | ast.stmt) -> str:
        return data[slice(*span(node))].decode()

    def closed(node: ast.expr) -> str:
        return text(node) if isinstance(node, _CLOSED) else f"({text(node)})"

    def of_node(node: ast.expr | ast.stmt) -> Iterator[tuple[str, str]]:
        match node:
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                yield "comparison", f"({closed(left)} {_TURNED[type(op)]} {closed(right)})"
            case ast.Constant(value=bool()):
                pass
            case ast.Constant(value=int() as value):
                yield "off by one", str(value + 1)
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                yield "turned sign", f"({closed(left)} - {closed(right)})"
            case ast.BinOp(left=left, op=ast.Sub(), right=right):
                yield "turned sign", f"({closed(left)} + {closed(right)})"
            case ast.BoolOp(op=op, values=values):
                word = " or " if isinstance(op, ast.And) else " and "
                yield "and/or", "(" + word.join(f"({text(value)})" for value in values) + ")"
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield "not", f"(bool({text(operand)}))"
            case (
                ast.Expr(value=ast.Call())
                | ast.AugAssign()
                | ast.Delete()
                | ast.Assign(targets=[ast.Attribute() | ast.Subscript()])
            ) if not any(isinstance(part, _FUNCTIONS) for part in ast.walk(node)):
                yield "dropped statement", "pass"
            case ast.Call(func=func, args=[first, second, *_]):
                is_positional = not any(isinstance(one, ast.Starred) for one in (first, second))
                ends = [span(node)[0], *span(first), *span(second), span(node)[1]]
                head, one, between, other, rest = (data[i:j].decode() for i, j in pairwise(ends))
                is_plain = between.strip() == "," and head.rstrip()[-1] == "("
                if is_positional and is_plain and one != other and text(func) not in _COMMUTATIVE:
                    yield "swapped arguments", f"{head}{other}{between}{one}{rest}"

    def within(
        node: ast.AST, function: str, is_inside: bool
    ) -> Iterator[tuple[str, str, Span, str, str]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.JoinedStr | ast.Raise | ast.Assert) or _is_docstring(child):
                continue  # texts, and the words of errors
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{function}.{child.name}".lstrip(".")
                is_class = isinstance(child, ast.ClassDef)
                body = ast.Module(list(child.body), [])
                yield from within(body, name, is_inside or not is_class)
                continue
            if (
                is_inside
                and isinstance(child, ast.expr | ast.stmt)
                and b"#" not in data[slice(*span(child))]
            ):
                for kind, new in of_node(child):
                    yield function, kind, span(child), text(child), new
            yield from within(child, function, is_inside)

    return within(tree, "", False)


def _is_docstring(node: ast.AST) -> TypeGuard[ast.Expr]:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
