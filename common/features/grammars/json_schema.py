"""JSON schemas rewritten with the keywords that llguidance supports.

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

HEAD = '%llguidance {"no_forcing": true}\n'  # otherwise certain text has only one spelling
_TITLES = {"title", "description"}
_DATA = {"const", "enum", "default", "examples"}  # keywords of a schema that hold values
# The formats that the library enforces.
FORMATS = {
    *("date-time", "date", "time", "duration", "uuid"),
    *("email", "hostname", "ipv4", "ipv6", "uri"),
}
_named: set[str] = set()  # formats that were logged
_OF_NAMES = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}


logger = logging.getLogger(__name__)
# Maximum number of name prefixes that are tried for the patterns of one schema: about a second.
MAX_SCHEMA_NODES = 20_000


def rewritten(schema: dict[str, Any]) -> dict[str, Any]:
    patterns = _Patterns(frozenset(_names_in(schema)))

    def change(schema: dict[str, Any]) -> dict[str, Any]:
        if _is_remark(schema.get("format")):
            schema = {key: inner for key, inner in schema.items() if key != "format"}
        return _without_named_patterns(_without_lists(schema), patterns)

    return map_schemas(schema, change)


def map_schemas(
    part: Any, change: Callable[[dict[str, Any]], dict[str, Any]], are_names: bool = False
) -> Any:
    """Apply `change` to each schema in a schema, or in a list or object of schemas, inner ones
    first. `are_names`: the keys are names, such as those of properties, and not keywords. Values,
    such as those of `enum`, are not schemas."""
    if isinstance(part, list):
        return [map_schemas(inner, change) for inner in part]
    if not isinstance(part, dict):
        return part
    if are_names:
        return {name: map_schemas(inner, change) for name, inner in part.items()}
    return change(
        {
            key: inner if key in _DATA else map_schemas(inner, change, key in _OF_NAMES)
            for key, inner in part.items()
        }
    )


def _is_remark(value: object) -> bool:
    """Whether the library does not know this `format`. It is an annotation then (JSON Schema)."""
    if not isinstance(value, str) or value in FORMATS:
        return False
    if value not in _named and len(_named) < 1000:
        _named.add(value)
        logger.warning("ignoring the unknown format %.100r of a schema", value)
    return True


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
    is_list = isinstance(schema, dict) and schema.keys() - _TITLES in ({"const"}, {"enum"})
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
    left, properties = schema.get("patternProperties"), schema.get("properties", {})
    if not isinstance(left, dict) or not isinstance(properties, dict):
        return schema
    properties, named = dict(properties), {p: patterns.all_matched(p) for p in left}
    for pattern, names in named.items():
        for name in sorted(names or ()):
            inner, is_there = left[pattern], name in properties
            properties[name] = {"allOf": [properties[name], inner]} if is_there else inner
    left = {pattern: inner for pattern, inner in left.items() if named[pattern] is None}
    return schema | {"properties": properties, "patternProperties": left}


class _Patterns:
    """Finds the names that patterns match, with the library, which has its own regex dialect."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names, self._num_steps_left = names, MAX_SCHEMA_NODES
        self._longest = 2 + 6 * max(map(len, names), default=0)  # as JSON, each character as \u0061

    def all_matched(self, pattern: str) -> set[str] | None:
        """Return the names that the pattern matches, or None if it matches other texts too or is
        invalid. Enumerates its texts byte by byte until one of them is not a name."""
        schema = json.dumps({"type": "string", "pattern": pattern})
        beginning = Beginning(tokenizer_of_bytes(), f"{HEAD}start: %json {schema}").matcher
        if beginning.is_error():
            return set() if "Regex is empty" in beginning.get_error() else None
        found, spelled = set[str](), [(beginning, b'"')]
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
