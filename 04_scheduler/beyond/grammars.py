"""What an output must look like: JSON that fits a schema, a regular expression, one of some texts,
or a grammar.

    SamplingParams(grammar=Json({"type": "object", "properties": {"age": {"type": "integer"}}}))
    SamplingParams(grammar=Regex(r"[0-9]{4}-[0-9]{2}-[0-9]{2}"))
    SamplingParams(grammar=Choice(["yes", "no"]))
    SamplingParams(grammar=Ebnf('root ::= "a" root "b" | "ab"'))

Each says which texts are whole. From that follows, after every token, which tokens may come next:
those with which the text can still become a whole one; and EOS, when it is one. What is compiled
for this and how it is matched is in `common/features/grammars`; how long a request waits for it, in
`grammar_queue.py`.

A dictionary of vLLM's `structured_outputs` says the same: `json`, `json_object`, `regex`, `choice`,
`grammar`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from request import SamplingParams, check_integers, require

# What is compiled takes hundreds of bytes for each, and a parser calls itself for what is nested.
MOST_CHARACTERS = 200_000  # a list of texts, which nests nothing, may have ten times as many


@dataclass(frozen=True, slots=True)
class Json:
    """`schema` is a JSON schema, as an object or as text; None: any object. Say
    `"additionalProperties": false` where you can: else a name that you give a type to may come once
    more, written with escapes, and is held to no type then. What is not known of a schema
    (`not`, `uniqueItems`, `oneOf` of schemas that a value could fit both) is refused; an unknown
    `format` is a remark, and left out. Between two
    elements stand at most `max_whitespace` blanks, so that no model writes legal blanks to the end;
    0: one line, with one blank behind each comma and colon."""

    schema: Mapping[str, Any] | str | bool | None = None
    max_whitespace: int = 2


@dataclass(frozen=True, slots=True)
class Regex:
    """All of the text matches, in the dialect of Rust's `regex`: without look-around and references
    back."""

    pattern: str


@dataclass(frozen=True, slots=True)
class Choice:
    choices: Sequence[str]

    def __post_init__(self) -> None:
        if isinstance(self.choices, Iterator):  # it can be read once, and is read more often
            object.__setattr__(self, "choices", tuple(self.choices))


@dataclass(frozen=True, slots=True)
class Ebnf:
    """Rules `name ::= ...`, as llama.cpp writes them. The text is a `root`."""

    rules: str


Grammar = Json | Regex | Choice | Ebnf


def source_of(grammar: object) -> str:
    """The content, as one text: equal grammars have equal ones. Raises `ValueError` that says what
    is allowed. Whether it can be compiled shows later."""
    if isinstance(grammar, Mapping):
        grammar = _of_vllm(grammar)
    if isinstance(grammar, Json):
        check_integers(0, max_whitespace=grammar.max_whitespace)
        schema, most = _schema(grammar.schema), int(grammar.max_whitespace)
        return _bounded(f'{{"json": {schema}, "max_whitespace": {most}}}')
    if isinstance(grammar, Regex):
        return _bounded(json.dumps({"regex": _text("grammar", grammar.pattern)}))
    if isinstance(grammar, Choice):
        return _bounded(json.dumps({"choice": _texts(grammar.choices)}), 10 * MOST_CHARACTERS)
    require(isinstance(grammar, Ebnf), "grammar", grammar, "a Json, Regex, Choice or Ebnf")
    assert isinstance(grammar, Ebnf)
    return _bounded(json.dumps({"ebnf": _text("grammar", grammar.rules)}))


def _bounded(source: str, most: int = MOST_CHARACTERS) -> str:
    if (num := len(source)) > most:
        raise ValueError(f"grammar must have at most {most:,} characters, got {num:,}")
    return source


def check_params(params: SamplingParams, eos_token_ids: Sequence[int]) -> None:
    """Raises `ValueError` for what a grammar contradicts: where a text ends is its affair, and EOS
    is how the model says so."""
    ends = {"ignore_eos": False, "min_tokens": 0, "stop": (), "stop_token_ids": ()}
    for name, allowed in ends.items():
        value = getattr(params, name)
        require(value == allowed, name, value, f"{allowed!r} with a grammar")
    if not eos_token_ids:
        raise ValueError("grammar must be None if the model has no EOS token")


def _of_vllm(wanted: Mapping[str, Any]) -> Grammar:
    """Of entries that are None or False nothing is wanted, as there."""
    makers = {
        "json": Json,
        "json_object": lambda _: Json(),
        "regex": Regex,
        "choice": Choice,
        "grammar": Ebnf,
    }
    given = {name: value for name, value in wanted.items() if value is not None and value != False}  # noqa: E712
    if len(given) != 1 or not given.keys() <= makers.keys():
        raise ValueError(f"grammar must have one of {[*makers]}, got {sorted(map(str, given))}")
    name, value = next(iter(given.items()))
    return makers[name](value)


def _schema(schema: object) -> str:
    if schema is None:
        return '{"type": "object"}'
    try:
        found = json.loads(schema) if isinstance(schema, str | bytes) else schema
        text = json.dumps(found, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"schema must be JSON: {error}") from error
    text = "{}" if text == "true" else text
    require(text[0] == "{", "schema", schema, "a JSON schema (an object)")
    return text


def _texts(choices: object) -> list[str]:
    is_list = isinstance(choices, Iterable) and not isinstance(choices, str | bytes | Mapping)
    texts = list(choices) if is_list else []  # pyright: ignore[reportArgumentType]
    allowed = "a sequence of non-empty strings"
    require(
        bool(texts) and all(isinstance(t, str) and t for t in texts), "choice", choices, allowed
    )
    return [_text("choice", text) for text in texts]


def _text(name: str, value: object) -> str:
    require(isinstance(value, str) and bool(value), name, value, "a non-empty str")
    assert isinstance(value, str)
    is_text = not any("\ud800" <= c <= "\udfff" for c in value)
    require(is_text, name, value, "text without unpaired surrogates")
    return value
