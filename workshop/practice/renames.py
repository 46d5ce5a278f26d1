"""Find old code in a function whose names have changed, and write code with the new names.

    old        if num_tokens > budget:
    source     if num_tokens > token_budget:  # a comment
    names      {"num_tokens": "num_tokens", "budget": "token_budget"}

Code is compared token by token, so line breaks, indentation, comments, trailing commas and
parentheses that only group do not matter. Names must map one to one. A name of an attribute
(`.budget`) and of a keyword argument (`budget=`) is mapped apart from a variable's. Keywords and
names of Python's own functions are compared as they are, strings word by word."""

from __future__ import annotations

import ast
import builtins
import keyword
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

_STRING = r'"""(?:\\.|.)*?"""|' r"'''(?:\\.|.)*?'''|" r'"(?:\\.|[^"\\\n])*"|' r"'(?:\\.|[^'\\\n])*'"
_TOKEN = re.compile(rf"(?P<aside>[\s\\]+|#[^\n]*)|[rbfuRBFU]{{0,2}}(?:{_STRING})|\w+|.", re.DOTALL)
_WORD = re.compile(r"(\w+)")
_FIXED = {*keyword.kwlist, *dir(builtins)}


@dataclass(frozen=True, slots=True)
class Token:
    text: str
    start: int
    end: int
    name: str = ""  # "budget", ".budget" of an attribute, "budget=" of an argument; "": no name
    only_groups: bool = False  # a parenthesis

    @property
    def is_string(self) -> bool:
        return self.text[-1] in "\"'"


@cache
def tokens(text: str) -> tuple[Token, ...]:
    """Return the tokens without white space, comments, and a formatter's trailing commas."""
    found = [Token(m[0], m.start(), m.end()) for m in _TOKEN.finditer(text) if m["aside"] is None]
    nothing = Token("", 0, 0)
    following = [*found[1:], nothing, nothing]
    kept = [t for t, then in zip(found, following) if t.text != "," or then.text not in set(")]}")]
    return tuple(_classified(kept))


def _classified(found: Sequence[Token]) -> Iterator[Token]:
    """Yield the tokens with what names and parentheses they are."""
    nothing = Token("", 0, 0)
    is_call: list[bool | None] = []  # of each open bracket; None: it only groups
    for i, token in enumerate(found):
        before = [found[i - k].text if i >= k else "" for k in (1, 2)]
        after = [*found[i + 1 : i + 3], nothing, nothing]
        if token.text in ("(", "[", "{"):
            follows_value = before[0] in (")", "]") or before[0][-1:].isalnum() or "_" in before[0]
            groups = token.text == "(" and (before[0] in keyword.kwlist or not follows_value)
            is_call.append(None if groups else token.text == "(" and before[1] != "def")
            yield replace(token, only_groups=groups)
        elif token.text in (")", "]", "}"):
            yield replace(token, only_groups=bool(is_call) and is_call.pop() is None)
        elif not token.text.isidentifier() or token.text in keyword.kwlist:
            yield token
        elif before[0] == ".":
            yield replace(token, name=f".{token.text}")
        elif after[0].text == "=" and after[1].text != "=":
            is_argument = is_call[-1] if is_call else after[0].start == token.end
            yield replace(token, name=f"{token.text}=" if is_argument else token.text)
        elif token.text not in _FIXED:
            yield replace(token, name=token.text)
        else:
            yield token


def exact_places(text: str, old: str, first: int, last: int) -> Iterator[tuple[int, int]]:
    """Yield start and end of each occurrence of `old` in `text[first:last]`."""
    wanted, source = [token.text for token in tokens(old)], _within(text, first, last)
    texts = [token.text for token in source]
    for i in range(len(source) - len(wanted) + 1 if wanted else 0):
        if texts[i] == wanted[0] and texts[i : i + len(wanted)] == wanted:
            yield source[i].start, source[i + len(wanted) - 1].end


def _within(text: str, first: int, last: int) -> list[Token]:
    return [token for token in tokens(text) if first <= token.start and token.end <= last]


def renamed_places(
    text: str, old: str, first: int, last: int
) -> Iterator[tuple[int, int, dict[str, str]]]:
    """Yield start, end and names of each place of `text[first:last]` that differs from `old` in
    names alone. A name that changed does not occur there any more."""
    within = _within(text, first, last)
    present = {token.name for token in within}
    wanted = [token for token in tokens(old) if not token.only_groups]
    source = [token for token in within if not token.only_groups]
    for i in range(len(source) - len(wanted) + 1 if wanted else 0):
        names = _mapping(wanted, source[i : i + len(wanted)])
        if names is not None and not present & changed(names).keys():
            start, end = source[i].start, source[i + len(wanted) - 1].end
            yield *_balanced(text, start, end, old), names


def changed(names: Mapping[str, str]) -> dict[str, str]:
    return {old: new for old, new in names.items() if old != new}


def _mapping(old: Sequence[Token], new: Sequence[Token]) -> dict[str, str] | None:
    """Return the names, old -> new; None if the tokens differ in anything else."""
    names: dict[str, str] = {}
    strings = []
    for one, other in zip(old, new):
        if one.name and other.name:
            key = other.name.replace(other.text, one.text)
            if names.setdefault(key, other.name) != other.name:
                return None
        elif one.text != other.text:
            if not (one.is_string and other.is_string):
                return None
            strings.append((one, other))
    if not all(_agree(one.text, other.text, names) for one, other in strings):
        return None
    return names if len(set(names.values())) == len(names) else None


def _agree(old: str, new: str, names: dict[str, str]) -> bool:
    """Whether two strings differ at most in changed names; those in an f-string are added."""
    words = [_WORD.split(text) for text in (old, new)]
    if len(words[0]) != len(words[1]):
        return False
    if old[0] == "f":
        for one, other in zip(words[0][1::2], words[1][1::2]):
            names.setdefault(one, other)
    return all(other in (one, names.get(one)) for one, other in zip(*words))


def _balanced(text: str, start: int, end: int, old: str) -> tuple[int, int]:
    """Return the place with the parentheses of `old`, and those that a formatter put around a part
    of it."""
    if tokens(old)[0].only_groups and text[:start].rstrip().endswith("("):
        start = text.rindex("(", 0, start)
    surplus = _depth(_within(text, start, end)) - _depth(tokens(old))
    for _ in range(surplus):
        end = text.index(")", end) + 1
    for _ in range(-surplus):
        start = text.rindex("(", 0, start)
    return start, end


def _depth(found: Sequence[Token]) -> int:
    return sum((token.text == "(") - (token.text == ")") for token in found)


def renamed(code: str, names: Mapping[str, str]) -> str:
    """Return the code with the new names."""
    for token in reversed(tokens(code)):
        text = token.text
        if token.name in names:
            text = names[token.name].strip(".=")
        elif token.is_string:
            text = _in_string(text, names)
        code = code[: token.start] + text + code[token.end :]
    return code


def renamed_in_words(prose: str, names: Mapping[str, str]) -> str:
    """Return the text with the new names, in backticks; everywhere if all of it is code."""
    try:
        ast.parse(prose)
        return renamed(prose, names)
    except SyntaxError:
        return re.sub(r"`[^`]+`", lambda match: renamed(match[0], names), prose)


def _in_string(text: str, names: Mapping[str, str]) -> str:
    """Return the string with the new names in backticks and braces."""
    return re.sub(r"`[^`]*`|\{[^{}]*\}", lambda match: _words(match[0], names), text)


def _words(text: str, names: Mapping[str, str]) -> str:
    return "".join(names.get(word, word) for word in _WORD.split(text))


def moved_parameters(old: Sequence[str], new: Sequence[str]) -> dict[str, str]:
    """Return the names, old -> new, of parameters that were renamed, by position. Empty if they
    are not as many as before, or in another order."""
    names = changed(dict(zip(old, new)))
    is_rename = len(old) == len(new) and not {*names} & {*new} and not {*old} & {*names.values()}
    return names if is_rename else {}
