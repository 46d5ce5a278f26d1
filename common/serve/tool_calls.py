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
import re
import secrets
import string
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from common.serve.errors import bad
from grammars import Json, map_schemas

THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"
MARKS = (THINK, END_THINK, CALL, END_CALL)
_DECODER = json.JSONDecoder(strict=False)  # a model can write line breaks within strings
_ID_LETTERS = string.ascii_letters + string.digits  # Mistral's templates allow only nine of these
_NAME = re.compile(r"[\w.:/-]{1,256}")
State = Callable[[dict[str, Any]], bool]
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


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


def tool_use(tools: Any, choice: Any, is_parallel: bool | None) -> ToolUse:
    """Return the validated tools and choice of a chat. Raises `ApiError`."""
    schemas = schemas_of(tools or ())
    if isinstance(choice, dict) and choice.get("type", "function") == "function":
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if isinstance(name, str) and name in schemas:
            return ToolUse(schemas, "named", name)
    choice = ("auto" if schemas else "none") if choice is None else choice
    if choice != "none" and not (schemas and choice in ("auto", "required")):
        allowed = "'none', or with tools 'auto', 'required' or the name of one of them, as in "
        allowed += "{'type': 'function', 'function': {'name': 'f'}}"
        raise bad(f"tool_choice must be {allowed}, got {choice!r:.200}", "tool_choice")
    return ToolUse(schemas, choice, is_parallel=is_parallel is not False)


def schemas_of(tools: Any) -> dict[str, dict[str, Any]]:
    """Return the JSON schema of each function's parameters, by name. Raises `ApiError`."""
    schemas: dict[str, dict[str, Any]] = {}
    for i, tool in enumerate(tools):
        function = tool.get("function")
        if tool.get("type", "function") != "function" or not isinstance(function, dict):
            raise bad(f"tools[{i}] must be {{'type': 'function', 'function': {{...}}}}", "tools")
        name = function.get("name")
        schema = function.get("parameters") or _NO_PARAMETERS
        if not isinstance(name, str) or not _NAME.fullmatch(name) or name in schemas:
            allowed = "letters, digits and _-.:/ only, and another one for each tool"
            raise bad(f"tools[{i}].function.name must be {allowed}, got {name!r:.200}", "tools")
        if not isinstance(schema, dict) or schema.get("type", "object") != "object":
            raise bad(f"tools[{i}].function.parameters must be an object's JSON schema", "tools")
        schemas[name] = {"type": "object"} | schema
    return schemas


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
    its last mark of reasoning on, if the answer begins after that mark. The states are methods that
    consume `_text` and return whether the next state can continue."""

    def __init__(self, reader: Reader, prompt_end: str = "") -> None:
        self._tools = reader.tools
        self._shows_reasoning = reader.shows_reasoning
        self.has_thought = False
        self.is_thought_over = False  # this and the next are counted by the answer
        self.num_thought_tokens = 0
        self._new_text = ""
        self._text = ""  # arrived and not parsed yet, with the new text
        self._is_last = False
        self._mark = ""  # the last mark, with the newlines before it
        self._is_after_mark = False
        self._field = ""  # the field of the text before the last mark
        self._content_marks: dict[str, State] = {}  # with the state after each mark
        if self._tools.choice == "auto":
            self._content_marks[CALL] = self._object
        self._num_calls = 0
        self._is_array = self._tools.choice == "required"
        if self._tools.choice == "named":
            self._state = self._named
        elif self._is_array:
            self._state = self._object
        elif reader.has_reasoning:
            self._begins_in_thought = prompt_end.startswith(THINK)
            self._is_after_mark = prompt_end.rstrip() == THINK
            self._state = self._beginning
        else:
            self._state = self._content

    def delta(self, text: str, is_last: bool) -> dict[str, Any]:
        """Return the fields of a stream's delta for the new `text`."""
        self._new_text = text
        self._text += text
        self._is_last = is_last
        fields: dict[str, Any] = {}
        while self._state(fields):
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

    # -- states

    def _beginning(self, fields: dict[str, Any]) -> bool:
        """Find out whether the answer begins with a thought. Models repeat a mark of the prompt."""
        text = self._text.lstrip()
        can_have_mark = self._is_after_mark or not self._begins_in_thought
        has_mark = can_have_mark and text.startswith(THINK)
        if can_have_mark and not has_mark and not self._is_last and THINK.startswith(text):
            return False
        if has_mark:
            self._text = text[len(THINK) :]
            self._is_after_mark = True
        self.has_thought = has_mark or self._begins_in_thought
        self._state = self._reasoning if self.has_thought else self._content
        return True

    def _reasoning(self, fields: dict[str, Any]) -> bool:
        marks = {END_THINK: self._content} | self._content_marks
        return self._take(fields, "reasoning_content", marks)

    def _content(self, fields: dict[str, Any]) -> bool:
        return self._take(fields, "content", self._content_marks)

    def _named(self, fields: dict[str, Any]) -> bool:
        """Pass on the arguments as they come."""
        if self._text and not self._num_calls:
            self._call(fields, self._tools.name, self._text)
        elif self._text:
            fields["tool_calls"] = [{"index": 0, "function": {"arguments": self._text}}]
        self._text = ""
        return False

    def _object(self, fields: dict[str, Any]) -> bool:
        """Parse the object of a call, when it is complete."""
        text = self._text.lstrip(" \n\r\t,[]" if self._is_array else None)
        if not text and (self._is_array or not self._is_last):
            return False
        if not text.startswith("{"):
            return self._no_call(fields)
        if "}" not in self._new_text and not self._is_last:
            return False
        try:
            found, end = _DECODER.raw_decode(text)
        except (ValueError, RecursionError):
            return self._is_last and self._no_call(fields)
        call = _whole_call(found)
        if call is None:
            return self._no_call(fields)
        self._call(fields, *call)
        self._text = text[end:]
        self._state = self._object if self._is_array else self._after_call
        return True

    def _no_call(self, fields: dict[str, Any]) -> bool:
        """Go on with the text before the mark, which was not that of a call."""
        self._is_after_mark = False
        self._state = self._reasoning if self._field == "reasoning_content" else self._content
        if self._mark:
            fields[self._field] = fields.get(self._field, "") + self._mark
        return True

    def _after_call(self, fields: dict[str, Any]) -> bool:
        """Skip the mark that ends a call."""
        text = self._text.lstrip()
        is_part = END_CALL.startswith(text)
        if is_part and text != END_CALL and not self._is_last:
            return False
        self._text = "" if is_part else text.removeprefix(END_CALL)
        self._is_after_mark = True
        self._state = self._content
        return True

    # -- helpers of the states

    def _take(self, fields: dict[str, Any], name: str, marks: dict[str, State]) -> bool:
        """Add the text before the first mark, and skip the mark if it has arrived. Text that can be
        a part of a mark, and newlines before that text, wait for more text."""
        text = self._text.lstrip("\n") if self._is_after_mark else self._text
        self._is_after_mark &= not text
        found = min((m for m in marks if m in text), key=text.find, default="")
        start = text.find(found) if found else len(text)
        pending = 0 if found or self._is_last else _num_pending(text, marks)
        taken = text[: start - pending]
        if marks and (found or not self._is_last):
            taken = taken.rstrip("\n")
        self._text = text[len(taken) :]
        if found:
            end = start + len(found)
            self._mark = text[len(taken) : end]
            self._field = name
            self._text = text[end:]
            self._is_after_mark = True
            self._state = marks[found]
        if taken:
            fields[name] = fields.get(name, "") + taken
        return bool(found)

    def _call(self, fields: dict[str, Any], name: str, arguments: str) -> None:
        """Add the call of a function. As in vLLM, a call ends the reasoning, so the mark for its
        end means nothing afterwards."""
        self._num_calls += 1
        if self._field == "reasoning_content":
            self._content_marks[END_THINK] = self._content
        if self._num_calls > 1 and not self._tools.is_parallel:
            return
        call = {
            "index": self._num_calls - 1,
            "id": "".join(secrets.choice(_ID_LETTERS) for _ in range(9)),
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        fields.setdefault("tool_calls", []).append(call)


def _num_pending(text: str, marks: Iterable[str]) -> int:
    """Return the number of characters at the end of `text` that can be the beginning of a mark."""
    lengths = (n for mark in marks for n in range(1, len(mark)) if text.endswith(mark[:n]))
    return max(lengths, default=0)


def _whole_call(call: dict[str, Any]) -> tuple[str, str] | None:
    """Return the name and the arguments of a call; None: it is not one."""
    name = call.get("name")
    arguments = call.get("arguments") or call.get("parameters") or {}
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return (name, arguments) if name and isinstance(name, str) else None
