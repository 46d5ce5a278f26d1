"""Functions described as JSON, with a grammar and without: `make demo ARGS=--grammar`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from grammars import Json
from request import SamplingParams

if TYPE_CHECKING:
    from common.llm import LLM

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z_]{2,20}$"},
        "arguments": {
            "type": "array",
            "items": {"type": "string", "pattern": "^[a-z_]{1,12}$"},
            "maxItems": 4,
        },
        "returns": {"enum": ["int", "str", "bool", "list", None]},
    },
    "required": ["name", "arguments", "returns"],
    "additionalProperties": False,
}
EXAMPLE = """\
def add(first, second):
    return first + second

signature = {"name": "add", "arguments": ["first", "second"], "returns": "int"}


"""
HEADS = (
    "def is_even(number):\n    return number % 2 == 0",
    "def join(words, sep):\n    return sep.join(words)",
    "def first(items):\n    return items[0]",
    "def read_lines(path):\n    return open(path).readlines()",
)


def show(llm: LLM, temperature: float, seed: int) -> None:
    """Every text of the first kind is whole."""
    prompts = [f"{EXAMPLE}{head}\n\nsignature = " for head in HEADS]
    for title, grammar in (("with the grammar", Json(SCHEMA, 0)), ("without", None)):
        params = [
            SamplingParams(temperature=temperature, max_tokens=64, seed=seed + i, grammar=grammar)
            for i in range(len(prompts))
        ]
        print(f"\n=== {title}")
        num_whole = 0
        for head, output in zip(HEADS, llm.generate(prompts, params, use_tqdm=False), strict=True):
            completion = output.outputs[0]
            text = completion.text
            num_whole += (is_whole := _is_json(text))
            said = "JSON" if is_whole else "no JSON"
            name = head.split("(")[0].removeprefix("def ")
            print(f"{name:<12}{said:<9}{json.dumps(text[:90])}")
        print(f"{num_whole} of {len(prompts)} are JSON")


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
