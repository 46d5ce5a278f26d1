"""The words for an error of a chat template: the variables that it needs, instead of what Python
says of their values.

See common/serve/README.md"""

from __future__ import annotations

import re
from collections.abc import Iterator
from traceback import walk_tb
from typing import Any

FILE = "<template>"  # jinja's name in tracebacks for a template without a file
_USED = re.compile(r"{{.*?}}|{%-?\s*(?:for|set)\b.*?%}")  # and not only tested
_VARIABLE = re.compile(r"""\b[a-zA-Z_]\w*(?:\.\w+\b(?!\()|\[(?:'\w+'|"\w+"|\d+)\])+""")


def words_of(error: Exception, template: str) -> str:
    """Return what to say of an error: the template's own words, or the variables that are missing
    or null in the line that failed."""
    frames = [(f, line) for f, line in walk_tb(error.__traceback__) if f.f_code.co_filename == FILE]
    if type(error).__name__ == "TemplateError" or not frames:  # raised by the template
        return str(error)
    frame, number = frames[-1]
    lines = template.splitlines()
    used = "".join(_USED.findall(lines[number - 1])) if 1 <= number <= len(lines) else ""
    place = f"line {number} of the chat template"
    missing = list(dict.fromkeys(_missing(used, frame.f_locals)))
    named = re.findall(r"'(\w+)'", str(error))  # jinja names what is undefined
    missing = [found for found in missing if re.findall(r"\w+", found)[-1] in named] or missing
    if missing:
        return f"{place} needs {', '.join(missing)}, which is missing or null"
    return f"{place}: {error}"


def _missing(used: str, variables: dict[str, Any]) -> Iterator[str]:
    """Yield the variables in `used` that are not in a message, or null there."""
    for found in _VARIABLE.finditer(used):
        value: Any = variables
        for step in re.finditer(r"(\w+)['\"]?\]?", found[0]):
            if isinstance(value, dict):
                value = value.get(step[1])
            elif isinstance(value, list) and step[1].isdigit() and int(step[1]) < len(value):
                value = value[int(step[1])]
            elif isinstance(value, str | int | float):
                value = None  # such a value has no variables
            else:
                break
            if value is None:
                yield found[0][: step.end()]
                break
