"""JSON schemas rewritten with the keywords that llguidance supports.

    not: {}             becomes a schema that allows nothing
    uniqueItems: false  and others that allow everything are removed (`_EMPTY`)
    oneOf               of lists of values: becomes the values that are in exactly one list
    format              removed if the library does not know it; the log names it

The rewritten schema has the same meaning. What the library does not support is refused by name, and
so is `patternProperties`: the library allows a comma where no name is left that could follow it.

See 04_scheduler/beyond/GRAMMARS.md#which-tokens-may-come-next"""

from __future__ import annotations

import json
import logging
from collections import Counter
from typing import Any

from grammars import map_schemas, without_remarks

HEAD = '%llguidance {"no_forcing": true}\n'  # otherwise certain text has only one spelling
# The formats that the library enforces.
FORMATS = {
    *("date-time", "date", "time", "duration", "uuid"),
    *("email", "hostname", "ipv4", "ipv6", "uri"),
}
# Keywords that allow everything with this value.
_EMPTY: dict[str, list[Any]] = {
    "not": [False],
    "minLength": [0],
    "uniqueItems": [False],
    "propertyNames": [True, {}, {"type": "string"}],
}
logger = logging.getLogger(__name__)


def rewritten(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema for the library. Raises `ValueError` for `patternProperties`."""
    return map_schemas(schema, _rewrite)


def _rewrite(schema: dict[str, Any]) -> dict[str, Any] | bool:
    schema = without_remarks(schema)
    if "patternProperties" in schema:
        raise ValueError("a JSON schema with patternProperties is not served")
    if schema.get("not") in (True, {}):
        return False
    kept = {}
    for key, value in schema.items():
        if key == "format" and str(value) not in FORMATS:  # an annotation then, says JSON Schema
            logger.warning("ignoring the unknown format %.100r of a schema", value)
        elif value not in _EMPTY.get(key, []):
            kept[key] = value
    return _without_lists(kept)


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
