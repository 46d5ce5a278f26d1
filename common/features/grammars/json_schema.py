"""JSON schemas rewritten with the keywords that llguidance supports.

    not: {}             becomes a schema that allows nothing
    uniqueItems: false  and others that allow everything are removed (`_EMPTY`)
    format              removed if the library does not know it; the log names it

The rewritten schema has the same meaning. What the library does not support is refused by name, and
so is `patternProperties`: the library allows a comma where no name is left that could follow it.

See 04_scheduler/beyond/GRAMMARS.md#which-tokens-may-come-next"""

from __future__ import annotations

import logging
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
    return kept
