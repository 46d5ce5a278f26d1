"""JSON schemas rewritten with the keywords that llguidance supports.

    not: {}             becomes a schema that allows nothing
    uniqueItems: false  and others that allow everything are removed (`_EMPTY`)
    date, time          formats become patterns: the library allows 30 February
    oneOf               of lists of values: becomes the values that are in exactly one list
    format              removed if the library does not know it; the log names it once
    patternProperties   a pattern that matches only names in the schema becomes these properties.
                        The library excludes the names of properties from a pattern, but allows a
                        comma even if no name is left that could follow it

The rewritten schema has the same meaning.

See 04_scheduler/beyond/GRAMMARS.md#which-tokens-may-come-next"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from common.features.grammars.vocabulary import Beginning, tokenizer_of_bytes
from grammars import map_schemas, without_remarks

HEAD = '%llguidance {"no_forcing": true}\n'  # otherwise certain text has only one spelling
# The formats that the library enforces.
FORMATS = {
    *("date-time", "date", "time", "duration", "uuid"),
    *("email", "hostname", "ipv4", "ipv6", "uri"),
}
_named: set[str] = set()  # formats that were logged
logger = logging.getLogger(__name__)
# Maximum number of name prefixes that are tried for the patterns of one schema: about a second.
MAX_SCHEMA_NODES = 20_000


def rewritten(schema: dict[str, Any]) -> dict[str, Any]:
    patterns = _Patterns(frozenset(_names_in(schema)))

    def change(schema: dict[str, Any]) -> dict[str, Any] | bool:
        schema = without_remarks(schema)
        if _is_remark(schema.get("format")):
            schema = {key: inner for key, inner in schema.items() if key != "format"}
        if "not" in schema and _allows_all(schema["not"]):
            return False
        schema = _with_patterns(_without_empty(schema))
        return _without_named_patterns(_without_lists(schema), patterns)

    return map_schemas(schema, change)


# -- keywords that allow everything


def _allows_all(schema: Any, kind: str = "") -> bool:
    """Whether the schema visibly allows every value, or every value of type `kind`."""
    return schema is True or schema == {} or (bool(kind) and schema == {"type": kind})


def _depends_on_nothing(value: Any, schema: dict[str, Any]) -> bool:
    return isinstance(value, dict) and all(v == [] or _allows_all(v) for v in value.values())


def _decides_nothing(value: Any, schema: dict[str, Any]) -> bool:
    return "if" not in schema or all(_allows_all(schema.get(k, True)) for k in ("then", "else"))


def _counts_nothing(value: Any, schema: dict[str, Any]) -> bool:
    is_optional = schema.get("minContains") == 0 and "maxContains" not in schema
    return "contains" not in schema or is_optional


# Whether a keyword with this value, in this schema, can be removed.
_EMPTY: dict[str, Callable[[Any, dict[str, Any]], bool]] = {
    "not": lambda value, schema: value is False,
    "minLength": lambda value, schema: value == 0,
    "uniqueItems": lambda value, schema: value is False or schema.get("maxItems") in (0, 1),
    "propertyNames": lambda value, schema: _allows_all(value, "string"),
    **dict.fromkeys(("dependencies", "dependentRequired", "dependentSchemas"), _depends_on_nothing),
    **dict.fromkeys(("if", "then", "else"), _decides_nothing),
    **dict.fromkeys(("contains", "minContains", "maxContains"), _counts_nothing),
    "unevaluatedItems": lambda value, schema: "items" in schema or _allows_all(value),
    "unevaluatedProperties": lambda value, schema: (
        "additionalProperties" in schema or _allows_all(value)
    ),
    **dict.fromkeys(("$dynamicAnchor", "$recursiveAnchor"), lambda value, schema: True),
}
# A schema without these keywords evaluates only the names and items that it lists itself.
_IN_PLACE = {"$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "if", "dependentSchemas", "contains"}
_EVALUATED = {"unevaluatedItems": "items", "unevaluatedProperties": "additionalProperties"}


def _without_empty(schema: dict[str, Any]) -> dict[str, Any]:
    is_alone = _IN_PLACE.isdisjoint(schema)
    schema = {
        key: value
        for key, value in schema.items()
        if key not in _EMPTY or not _EMPTY[key](value, schema)
    }
    if is_alone:
        schema = {_EVALUATED.get(key, key): value for key, value in schema.items()}
    return schema


# -- formats


def _is_remark(value: object) -> bool:
    """Whether the library does not know this `format`. It is an annotation then (JSON Schema)."""
    if not isinstance(value, str) or value in FORMATS:
        return False
    if value not in _named and len(_named) < 1000:
        _named.add(value)
        logger.warning("ignoring the unknown format %.100r of a schema", value)
    return True


_YEAR = "([1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_OF_FOUR = "(0[48]|[2468][048]|[13579][26])"  # divisible by four, and not 00
_MONTHS = {
    "(0[13578]|1[02])": "(0[1-9]|[12][0-9]|3[01])",
    "(0[469]|11)": "(0[1-9]|[12][0-9]|30)",
    "02": "(0[1-9]|1[0-9]|2[0-8])",
}
_DAYS = "|".join(f"{month}-{days}" for month, days in _MONTHS.items())
_DATE = f"({_YEAR}-({_DAYS})|([0-9]{{2}}{_OF_FOUR}|{_OF_FOUR}00)-02-29)"
_CLOCK = "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_CLOCK}:[0-5][0-9](\.[0-9]+)?(Z|[+-]{_CLOCK})"
FORMAT_PATTERNS = {"date": _DATE, "time": _TIME, "date-time": f"{_DATE}T{_TIME}"}


def _with_patterns(schema: dict[str, Any]) -> dict[str, Any]:
    pattern = FORMAT_PATTERNS.get(str(schema.get("format")))
    all_of = schema.get("allOf", [])
    if pattern is None or not isinstance(all_of, list):
        return schema
    others = {key: inner for key, inner in schema.items() if key != "format"}
    return others | {"allOf": [*all_of, {"pattern": f"^{pattern}$"}]}


# -- alternatives that are lists of values


def _without_lists(schema: dict[str, Any]) -> dict[str, Any]:
    """Replace a `oneOf` of lists of values. The library supports `oneOf` only if it can see that
    the alternatives exclude each other, by type or by the texts that a property must have."""
    alternatives = schema.get("oneOf")
    lists = [_values(one) for one in alternatives] if isinstance(alternatives, list) else []
    if not lists or None in lists or not isinstance(schema.get("allOf", []), list):
        return schema
    num_lists = Counter(key for values in lists if values for key in values)
    values = {key: value for one in lists if one for key, value in one.items()}
    left = {"enum": [value for key, value in values.items() if num_lists[key] == 1]}
    others = {key: inner for key, inner in schema.items() if key != "oneOf"}
    return others | {"allOf": [*schema.get("allOf", ()), left]}


def _values(schema: Any) -> dict[str, Any] | None:
    """Return the values of a schema that only lists values, all of them strings, integers, booleans
    or null; otherwise None."""
    is_list = isinstance(schema, dict) and schema.keys() in ({"const"}, {"enum"})
    values = schema.get("enum", [schema.get("const")]) if is_list else [0.5]
    values = values if isinstance(values, list) else [0.5]  # the library reports the error
    is_plain = all(value is None or isinstance(value, str | int) for value in values)
    return {json.dumps(value): value for value in values} if is_plain else None


# -- patterns that match only names of properties


def _names_in(part: Any) -> Iterator[str]:
    """Yield all keys and all required names. Whatever the library merges, it excludes only these
    names from a pattern. Additional names do no harm."""
    if isinstance(part, dict):
        for key, inner in part.items():
            yield key
            if key == "required" and isinstance(inner, list):
                yield from (name for name in inner if isinstance(name, str))
            yield from _names_in(inner)
    elif isinstance(part, list):
        for inner in part:
            yield from _names_in(inner)


def _without_named_patterns(schema: dict[str, Any], patterns: _Patterns) -> dict[str, Any]:
    left = schema.get("patternProperties")
    properties = schema.get("properties", {})
    if not isinstance(left, dict) or not isinstance(properties, dict):
        return schema
    properties = dict(properties)
    named = {p: patterns.all_matched(p) for p in left}
    for pattern, names in named.items():
        for name in sorted(names or ()):
            inner = left[pattern]
            is_there = name in properties
            properties[name] = {"allOf": [properties[name], inner]} if is_there else inner
    left = {pattern: inner for pattern, inner in left.items() if named[pattern] is None}
    return schema | {"properties": properties, "patternProperties": left}


class _Patterns:
    """Finds the names that patterns match, with the library, which has its own regex dialect."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._num_steps_left = MAX_SCHEMA_NODES
        self._longest = 2 + 6 * max(map(len, names), default=0)  # as JSON, each character as \u0061

    def all_matched(self, pattern: str) -> set[str] | None:
        """Return the names that the pattern matches, or None if it matches other texts too or is
        invalid. Enumerates its texts byte by byte until one of them is not a name."""
        schema = json.dumps({"type": "string", "pattern": pattern})
        beginning = Beginning(tokenizer_of_bytes(), f"{HEAD}start: %json {schema}").matcher
        if beginning.is_error():
            return set() if "Regex is empty" in beginning.get_error() else None
        found = set[str]()
        spelled = [(beginning, b'"')]
        while spelled:
            before, text = spelled.pop()
            matcher = before.deep_copy()
            matcher.consume_token(1 + text[-1])
            self._num_steps_left -= 1
            if len(text) > self._longest or self._num_steps_left < 0:
                return None
            if matcher.is_accepting():
                found.add(json.loads(text))
                if json.loads(text) not in self._names:
                    return None
                continue
            allowed = int.from_bytes(matcher.compute_bitmask(), "little")
            after = [bytes([i]) for i in range(256) if allowed >> (1 + i) & 1]
            spelled += [(matcher, text + byte) for byte in after]
        return found
