"""Tool calls and reasoning: the tools of a chat request, and the parser of the answer's text.

    <think> reasoning </think> content <tool_call>{"name": "f", "arguments": {...}}</tool_call>

Qwen and Hermes models write this with `tool_choice` "auto". If the choice is "required" or names a
function, a grammar applies instead: the text is an array of calls, as in vLLM, or only the
arguments.

The text is parsed in order and output is never retracted, so a stream's deltas add up to the
complete answer, wherever they are split. Marks are not sent to clients, and neither are the
newlines next to them, which chat templates add again. A call is sent when its object is complete,
the arguments of a named function as they come. As in vLLM, a call ends the reasoning. Text after
`<tool_call>` that is not a complete call stays where it is.

See common/serve/README.md#tools-and-reasoning"""

from __future__ import annotations

import json
import secrets
import string
from dataclasses import dataclass
from functools import partial
from typing import Any

import regex

from common.serve.errors import bad
from grammars import Json, map_schemas

THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"
MARKS = (THINK, END_THINK, CALL, END_CALL)
_DECODER = json.JSONDecoder(strict=False)  # a model can write line breaks within strings
_ID_LETTERS = string.ascii_letters + string.digits  # Mistral's templates allow only nine of these
_SEPARATORS = " \n\r\t,[]"  # of an array of calls
_BEGINNING = regex.compile(rf"\s*{THINK}")
_MARK = regex.compile(f"{END_THINK}|{CALL}|{END_CALL}")


# -- the tools of a chat request


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a chat. `choice` is "none", "auto", "required" or "named"; `schemas` are the
    parameters' schemas, by function."""

    schemas: dict[str, dict[str, Any]]
    choice: str = "none"
    name: str = ""  # the function, if `choice` is "named"
    is_parallel: bool = True

    def grammar(self) -> Json | None:
        if self.choice == "named":
            return Json(self.schemas[self.name])
        try:
            return Json(self._array()) if self.choice == "required" else None
        except RecursionError as error:
            raise bad(
                "tools: the parameters of a function are nested too deeply", "tools"
            ) from error

    def _array(self) -> dict[str, Any]:
        """Return the schema of an array of calls. A reference within a function's schema is
        relative to the root of that schema."""
        all_schemas = {}
        calls = []
        for i, (name, schema) in enumerate(self.schemas.items()):
            root = f"#/$defs/{i}"
            all_schemas[str(i)] = map_schemas(schema, partial(_rooted, root))
            call = {"name": {"const": name}, "parameters": {"$ref": root}}
            names = {"required": [*call], "additionalProperties": False}
            calls.append({"type": "object", "properties": call} | names)
        max_items = {} if self.is_parallel else {"maxItems": 1}
        array = {"type": "array", "items": {"anyOf": calls}, "minItems": 1}
        return array | max_items | {"$defs": all_schemas}


def _rooted(root: str, schema: dict[str, Any]) -> dict[str, Any]:
    to = str(schema.get("$ref"))
    return schema | {"$ref": root + to[1:]} if to.startswith("#") else schema


def calls_of_history(calls: Any, message_path: str) -> list[dict[str, Any]]:
    """Return the calls of an earlier answer, with the arguments as the object that chat templates
    expect. As in vLLM, arguments that are not the JSON of an object become {}, because an error
    would end the conversation: the call is in the history of each later turn. Raises `ApiError`."""
    found = []
    for call in calls if isinstance(calls, list) else [{}]:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise bad(f"{message_path}.tool_calls must have functions with names", "messages")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
                json.dumps(arguments, ensure_ascii=False).encode()  # raises for half a character
            except (ValueError, RecursionError):
                arguments = {}
        arguments = arguments if isinstance(arguments, dict) else {}
        found.append(call | {"function": function | {"arguments": arguments}})
    return found


# -- the text of an answer


@dataclass(frozen=True, slots=True)
class Reader:
    """Settings for parsing an answer's texts. With a grammar there is no reasoning."""

    tools: ToolUse
    has_reasoning: bool
    shows_reasoning: bool = True  # False: the client wants none (`include_reasoning`)


class Reply:
    """An incremental parser for the text of one choice. `prompt_end` is the end of the prompt from
    its last mark of reasoning on, if the answer begins after that mark."""

    def __init__(self, reader: Reader, prompt_end: str = "") -> None:
        self._tools = reader.tools
        self._shows_reasoning = reader.shows_reasoning
        self.has_thought = reader.has_reasoning and prompt_end.startswith(THINK)
        self.is_thought_over = False  # this and the next are counted by the answer
        self.num_thought_tokens = 0
        self._text = ""  # arrived and not parsed yet
        self._num_calls = 0
        self._is_after_mark = prompt_end.rstrip() == THINK
        # Models repeat a mark of the prompt.
        self._is_beginning = reader.has_reasoning and (self._is_after_mark or not self.has_thought)
        self._is_reasoning = self.has_thought

    def delta(self, text: str, is_last: bool) -> dict[str, Any]:
        """Return the fields of a stream's delta for the new `text`."""
        self._text += text
        fields: dict[str, Any] = {}
        has_end = is_last or "}" in text  # of a call
        if self._tools.choice == "named":
            self._pass_arguments(fields)
        elif self._tools.choice == "required":
            self._text = self._text.lstrip(_SEPARATORS)
            while has_end and self._take_call(fields, self._text):
                self._text = self._text.lstrip(_SEPARATORS)
            if is_last:
                self._add_text(fields, self._text)
        elif not self._is_beginning or self._begin(is_last):
            while self._take_part(fields, is_last, has_end):
                pass
        if not self._shows_reasoning:
            fields.pop("reasoning_content", None)
        if "reasoning_content" in fields:
            fields["reasoning"] = fields["reasoning_content"]  # vLLM's name
        return fields

    def message(self, text: str) -> dict[str, Any]:
        """Return the fields of a complete answer."""
        fields = self.delta(text, True)
        for call in fields.get("tool_calls", ()):
            del call["index"]
        return {"content": None if fields else ""} | fields

    def finish_reason(self, reason: str | None) -> str | None:
        """Return the finish reason of the answer. As in vLLM, it is "stop" for a named function."""
        is_call = self._num_calls and reason == "stop" and self._tools.choice != "named"
        return "tool_calls" if is_call else reason

    def _pass_arguments(self, fields: dict[str, Any]) -> None:
        """Pass on the arguments of the named function as they come."""
        if self._text and not self._num_calls:
            self._add_call(fields, self._tools.name, self._text)
        elif self._text:
            fields["tool_calls"] = [{"index": 0, "function": {"arguments": self._text}}]
        self._text = ""

    def _begin(self, is_last: bool) -> bool:
        """Find out whether the answer begins with a thought. Returns False to wait for more."""
        found = _BEGINNING.match(self._text, partial=not is_last)
        if found is not None and found.partial:
            return False
        self._is_beginning = False
        if found is not None:
            self._text = self._text[found.end() :]
            self._is_after_mark = True
            self.has_thought = True
        self._is_reasoning = self.has_thought
        return True

    def _take_part(self, fields: dict[str, Any], is_last: bool, has_end: bool) -> bool:
        """Take the text before the next mark, and the mark with the call that it may begin. What
        can be a part of them waits for more text. Returns whether there can be more to take."""
        if self._is_after_mark:
            self._text = self._text.lstrip("\n")
        found = _MARK.search(self._text, partial=not is_last)
        end = len(self._text) if found is None else found.start()
        start = end
        if found is not None or not is_last:  # line breaks before a mark go with it
            keeps_spaces = found is not None and not found.partial and found[0] != END_CALL
            start = len(self._text[:end].rstrip("\n" if keeps_spaces else None))
        num_chars = end - start + (0 if found is None else len(found[0]))  # of mark and breaks
        self._add_text(fields, self._text[:start])
        self._text = self._text[start:]
        if found is None or found.partial:
            return False
        mark = self._text[:num_chars]
        rest = self._text[num_chars:]
        is_call = mark.endswith(CALL) and self._tools.choice == "auto"
        if is_call:
            body = rest.lstrip()
            if has_end and self._take_call(fields, body):
                return True
            if not is_last and (not body or body.startswith("{")):
                return False
        self._text = rest
        # As in vLLM, a call ends the reasoning, so the mark for its end means nothing afterwards.
        if not is_call and (self._num_calls or (self._is_reasoning and END_THINK in mark)):
            self._is_reasoning = False
            self._is_after_mark = True
        else:
            self._add_text(fields, mark)
        return True

    def _take_call(self, fields: dict[str, Any], text: str) -> bool:
        """Take the call at the beginning of `text`. Returns False if there is none, or not all."""
        try:
            call, end = _DECODER.raw_decode(text)
        except (ValueError, RecursionError):
            return False
        name = call.get("name") if isinstance(call, dict) else None
        if not name or not isinstance(name, str):
            return False
        arguments = call.get("arguments") or call.get("parameters") or {}
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        self._add_call(fields, name, arguments)
        self._text = text[end:]
        self._is_reasoning = False
        self._is_after_mark = True
        return True

    def _add_text(self, fields: dict[str, Any], text: str) -> None:
        name = "reasoning_content" if self._is_reasoning else "content"
        if text:
            fields[name] = fields.get(name, "") + text
            self._is_after_mark = False

    def _add_call(self, fields: dict[str, Any], name: str, arguments: str) -> None:
        self._num_calls += 1
        if self._num_calls > 1 and not self._tools.is_parallel:
            return
        call = {
            "index": self._num_calls - 1,
            "id": "".join(secrets.choice(_ID_LETTERS) for _ in range(9)),
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        fields.setdefault("tool_calls", []).append(call)
