"""Grammars that an output must follow: JSON for a schema, a regular expression, a choice of texts,
or EBNF rules.

    SamplingParams(grammar=Json({"type": "object", "properties": {"age": {"type": "integer"}}}))
    SamplingParams(grammar=Regex(r"[0-9]{4}-[0-9]{2}-[0-9]{2}"))
    SamplingParams(grammar=Choice(["yes", "no"]))
    SamplingParams(grammar=Ebnf('root ::= "a" root "b" | "ab"'))

A grammar defines which texts are complete. From that follows, after every token, which tokens can
come next: those with which the text can still become complete, and EOS if it is complete.
`common/features/grammars` compiles and matches grammars; `grammar_queue.py` decides how long a
request waits for that.

A dictionary as in vLLM's `structured_outputs` is accepted too: `json`, `json_object`, `regex`,
`choice`, `grammar`.

See 04_scheduler/beyond/GRAMMARS.md#who-does-what-and-when"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from request import SamplingParams, check_integers, require

# Keywords of a schema that hold values, or objects by name. Remarks say nothing about a text.
_DATA = {"const", "enum", "default", "examples"}
_OF_NAMES = {"properties", "patternProperties"}
_OF_NAMES |= {"$defs", "definitions", "dependentSchemas", "dependentRequired", "dependencies"}
_REMARKS = {"title", "description", "$comment", "default", "examples"}
_REMARKS |= {"deprecated", "readOnly", "writeOnly"}
# A compiled grammar takes hundreds of bytes per character, and parsers recurse into nested rules.
MAX_CHARACTERS = 200_000  # a list of texts, which nests nothing, can have ten times as many


@dataclass(frozen=True, slots=True)
class Json:
    """JSON that fits `schema`, a JSON schema as an object or as text; None: any object.

    Set `"additionalProperties": false` where you can: otherwise a name with a type can occur once
    more, written with escapes, and is then not held to a type. Unsupported parts of a schema
    (`not` of something, `uniqueItems: true`, `oneOf` of schemas that a value could fit both) are
    rejected; an unknown `format` is reported, and ignored. At most `max_whitespace` blanks are
    allowed between two elements, so that no model writes legal blanks to the end; 0 means one line,
    with one blank after each comma and colon.
    """

    schema: Mapping[str, Any] | str | bool | None = None
    max_whitespace: int = 2


@dataclass(frozen=True, slots=True)
class Regex:
    """The whole text matches, in the dialect of Rust's `regex`: without look-around and
    back-references."""

    pattern: str


@dataclass(frozen=True, slots=True)
class Choice:
    choices: Sequence[str]


@dataclass(frozen=True, slots=True)
class Ebnf:
    """Rules `name ::= ...`, as llama.cpp writes them. The text matches `root`."""

    rules: str


Grammar = Json | Regex | Choice | Ebnf
_VLLM = {"json": Json, "json_object": Json, "regex": Regex, "choice": Choice, "grammar": Ebnf}


def source_of(grammar: object) -> str:
    """Return the content as one text; equal grammars have equal texts. Raises `ValueError` that
    names the allowed types. Errors in the content are found when it is compiled."""
    if isinstance(grammar, Mapping):
        grammar = _of_vllm(grammar)
    max_chars = MAX_CHARACTERS
    if isinstance(grammar, Json):
        check_integers(0, max_whitespace=grammar.max_whitespace)
        source = {"json": _schema(grammar.schema), "max_whitespace": int(grammar.max_whitespace)}
    elif isinstance(grammar, Regex):
        source = {"regex": _text("grammar", grammar.pattern)}
    elif isinstance(grammar, Choice):
        source = {"choice": _texts(grammar.choices)}
        max_chars *= 10
    elif isinstance(grammar, Ebnf):
        source = {"ebnf": _text("grammar", grammar.rules)}
    else:
        raise ValueError(f"grammar must be a Json, Regex, Choice or Ebnf, got {grammar!r}")
    try:
        text = json.dumps(source, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"schema must be JSON: {error}") from error
    if len(text) > max_chars:
        raise ValueError(f"grammar must have at most {max_chars:,} characters, got {len(text):,}")
    return text


def check_params(params: SamplingParams, eos_token_ids: Sequence[int]) -> None:
    """Raise `ValueError` without EOS, with which the model ends a text that is complete."""
    require(not params.ignore_eos, "ignore_eos", params.ignore_eos, "False with a grammar")
    if not eos_token_ids:
        raise ValueError("grammar must be None if the model has no EOS token")


def _of_vllm(options: Mapping[str, Any]) -> Grammar:
    """Convert vLLM's dictionary. Entries that are None or False are ignored, as in vLLM."""
    given = {name: value for name, value in options.items() if value not in (None, False)}
    if len(given) != 1 or not given.keys() <= _VLLM.keys():
        raise ValueError(f"grammar must have one of {[*_VLLM]}, got {sorted(map(str, given))}")
    ((name, value),) = given.items()
    return Json() if name == "json_object" else _VLLM[name](value)


def _schema(schema: object) -> object:
    if schema is None:
        return {"type": "object"}
    try:
        found = json.loads(schema) if isinstance(schema, str | bytes) else schema
    except (ValueError, RecursionError) as error:
        raise ValueError(f"schema must be JSON: {error}") from error
    found = {} if found is True else found
    require(isinstance(found, Mapping), "schema", schema, "a JSON schema (an object)")
    return found


def map_schemas(part: Any, change: Callable[[dict[str, Any]], Any], are_names: bool = False) -> Any:
    """Apply `change` to each schema in a schema, or in a list or object of schemas, inner ones
    first. `are_names`: the keys are names, such as those of properties, and not keywords. Values,
    such as those of `enum`, are not schemas."""
    if isinstance(part, list):
        return [map_schemas(inner, change) for inner in part]
    if not isinstance(part, Mapping):
        return part
    if are_names:
        return {name: map_schemas(inner, change) for name, inner in part.items()}
    return change(
        {
            key: inner if key in _DATA else map_schemas(inner, change, key in _OF_NAMES)
            for key, inner in part.items()
        }
    )


def without_remarks(schema: dict[str, Any]) -> dict[str, Any]:
    return {key: inner for key, inner in schema.items() if key not in _REMARKS}


def _texts(choices: Sequence[str]) -> list[str]:
    is_list = isinstance(choices, Sequence) and not isinstance(choices, str | bytes)
    require(is_list and len(choices) > 0, "choice", choices, "a sequence of non-empty strings")
    return [_text("choice", text) for text in choices]


def _text(name: str, value: str) -> str:
    require(isinstance(value, str) and len(value) > 0, name, value, "a non-empty str")
    has_surrogates = any("\ud800" <= c <= "\udfff" for c in value)
    require(not has_surrogates, name, value, "text without unpaired surrogates")
    return value
