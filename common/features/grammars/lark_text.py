"""Grammars of `04_scheduler/beyond/grammars.py` translated to llguidance's Lark syntax.

Two features of llguidance would give other masks than the grammar defines, and are avoided here. If
the text is certain, it allows only the tokens that a tokenizer would choose (`no_forcing` turns
that off). And it matches terminals greedily before it applies rules, so `[a-z]+ "b"` would match
nothing. So in the translation of an `Ebnf`, each terminal is a single character.

See 04_scheduler/beyond/GRAMMARS.md#which-tokens-may-come-next"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from llguidance import LLTokenizer, regex_to_lark

from common.features.grammars.json_schema import HEAD, rewritten
from common.features.grammars.vocabulary import RULES, beginning_of

NOTHING_FITS = "no text fits it"
TOO_MANY_WAYS = (
    "it can be read in too many ways at once: where a rule is made of itself several times, or "
    "ends with itself, say * or +"
)
_TOKEN = re.compile(
    r"""\s+ | \#[^\n]*
    | (?P<defined>[A-Za-z_][\w-]*)\s*::=
    | (?P<name>[A-Za-z_][\w-]*)
    | (?P<text>"(?:\\.|[^"\\])*")
    | (?P<chars>\[\^?(?:\\.|[^\]\\])*\])
    | (?P<sign>[()|?*+.]|\{\s*\d+\s*(?:,\s*\d*\s*)?\})""",
    re.VERBOSE | re.DOTALL,
)
_HEX = "[0-9A-Fa-f]"
_CHARACTER = re.compile(rf"\\x({_HEX}{{2}})|\\u({_HEX}{{4}})|\\U({_HEX}{{8}})|\\(.)|(.)", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r"} | {c: c for c in '\\"[]-^/'}


def compile_source(source: str, tokenizer: LLTokenizer) -> str:
    """Return the grammar in Lark syntax. Raises `ValueError` if it cannot be a grammar of these
    tokens. Takes milliseconds for most, seconds for schemas of a thousand objects: the library
    counts its operations and gives up at a limit."""
    text = _lark_of(json.loads(source))
    matcher = beginning_of(tokenizer, text).matcher
    if not matcher.is_error():
        matcher = matcher.deep_copy()
        matcher.compute_bitmask()
    if matcher.is_error():
        raise ValueError(sentence_of(matcher.get_error()))
    return text


def sentence_of(error: str) -> str:
    """Return the library's error without its state and without positions in the generated text."""
    if error.startswith("NoExtensionBias"):
        return NOTHING_FITS
    if re.search(r"Current row has \d+ items|Too many items", error):
        return TOO_MANY_WAYS
    if unknown := re.search(r"Unimplemented keys: \[(.*)\]", error):
        return f"a JSON schema with {unknown[1]} is not served, since the library cannot enforce it"
    return re.sub(r"^(at )?[\d()]+: ", "", re.split(r"\n<|\n +\d+ \|", error)[0])


def _lark_of(grammar: dict[str, Any]) -> str:
    if "ebnf" in grammar:
        return HEAD + RULES + " ".join(_rules(grammar["ebnf"]))
    if "regex" in grammar:
        return f"{HEAD}start: /{regex_to_lark(grammar['regex'])}/"
    if "choice" in grammar:
        # As one terminal, because each alternative of a rule is tried separately.
        return f"{HEAD}start: TEXTS\nTEXTS: " + " | ".join(map(_quoted, grammar["choice"]))
    schema = rewritten(grammar["json"])
    max_whitespace = grammar["max_whitespace"]
    if isinstance(schema, bool):
        raise ValueError(NOTHING_FITS)
    options: dict[str, Any] = {"whitespace_pattern": f"[ \\n\\t]{{0,{max_whitespace}}}"}
    if max_whitespace == 0:
        options = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    return f"{HEAD}start: %json {json.dumps(schema | {'x-guidance': options})}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _rules(text: str) -> Iterator[str]:
    at = 0
    names = {"root": "start"}
    defined: set[str] = set()
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            raise ValueError(f"cannot parse {text[at : at + 20]!r} at character {at} of a rule")
        at = found.end()
        kind = found.lastgroup
        part = found[found.lastgroup or 0]
        if kind == "defined":
            if part in defined:
                raise ValueError(f"rule {part!r} must be defined once")
            defined.add(part)
            yield f"\n{names.setdefault(part, f'r{len(names)}')}:"
        elif kind == "name":
            yield names.setdefault(part, f"r{len(names)}")
        elif kind == "text":
            characters = [_quoted(_character(match)) for match in _CHARACTER.finditer(part[1:-1])]
            yield f"({' '.join(characters) or _quoted('')})"
        elif kind == "chars":
            yield f"/{_class(part[1:-1])}/"
        elif kind == "sign":
            yield "/(?s:.)/" if part == "." else part
    for name in names:
        if name not in defined:
            raise ValueError(f"rule {name!r} is not defined")


def _class(inside: str) -> str:
    """Write each character by its number, because special characters in brackets differ."""
    sign = "^" if inside.startswith("^") else ""
    matches = list(_CHARACTER.finditer(inside, len(sign)))
    found = [f"\\x{{{ord(_character(match)):x}}}" for match in matches]
    for i in range(1, len(matches) - 1):
        if matches[i][0] == "-":
            found[i] = "-"
    return f"[{sign}{''.join(found)}]"


def _character(match: re.Match[str]) -> str:
    code = int(match[1] or match[2] or match[3] or "0", 16)
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:
        raise ValueError(f"{match[0]} is not a character")
    if match[4] is not None and match[4] not in _ESCAPES:
        raise ValueError(f"escape must be one of {' '.join(_ESCAPES)} x u U, got {match[0]}")
    return match[5] or _ESCAPES.get(match[4]) or chr(code)
