"""The content of a message in the form that the chat template reads.

A content is a text or a list of parts. Some templates write only texts, some only go over parts,
many do both, and often another thing for each role. A content in a form that a template does not
read is missing in the prompt, or Python's list appears there, and few templates raise an error. So
each form is tried once, with words in quotes, which Python and JSON escape:

    given     tried in this order; the first that the template writes unchanged is taken
    a text    a text; one part
    parts     the parts; a text, joined by line breaks; one part with this text

A refusal and a thinking part stay as they are if the template writes them, else become text parts.

vLLM instead looks for a loop over the content in the template's syntax tree. If there is one, all
roles but `tool` get parts; it does not see a loop within a macro (Qwen 3.5).

See common/serve/README.md#tools-and-reasoning"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from common.serve.errors import bad

Message = dict[str, Any]
FIRST, SECOND = "one 'text' to \"try\"", "another 'text' to \"try\""
ROLES = ("system", "developer", "user", "assistant", "tool")  # another one is tried as a user
TEXT_TYPES = {"text": "text", "input_text": "text", "output_text": "text"}  # the part's key
TEXT_TYPES |= {"refusal": "refusal", "thinking": "thinking"}
_CALL = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {}}}


class ContentForms:
    """The forms that a template reads. `render` returns the prompt for messages, or raises."""

    def __init__(self, render: Callable[[list[Message]], str]) -> None:
        self._render = render
        self._is_read: dict[tuple[str, str], bool] = {}

    def content(self, message: Message, path: str) -> str | list[Message]:
        """Return a message's content in the form to give the template. Raises `ApiError`."""
        role = message["role"]
        given = message.get("content")
        role = role if role in ROLES else "user"
        if isinstance(given, list):
            return self._of_parts(role, [_part(part, path) for part in given])
        if given is not None and not isinstance(given, str):
            raise bad(f"{path}.content must be a str or a list of parts", "messages")
        return self._of_text(role, given)

    def _of_parts(self, role: str, parts: list[Message]) -> str | list[Message]:
        kinds = {part["type"] for part in parts} - {"text"}
        others = {kind for kind in kinds if not self._reads(role, kind)}
        parts = [_text_part(part) if part["type"] in others else part for part in parts]
        if self._reads(role, "parts"):
            return parts
        return self._of_text(role, "\n".join(_text_part(part)["text"] for part in parts))

    def _of_text(self, role: str, text: str | None) -> str | list[Message]:
        if self._reads(role, "str") or not self._reads(role, "text"):
            return text or ""
        return [] if text is None else [{"type": "text", "text": text}]

    def _reads(self, role: str, form: str) -> bool:
        """Whether the template writes a content of this form, for this role, unchanged."""
        if (role, form) not in self._is_read:
            content: str | list[Message] = FIRST
            if form != "str":
                kind = "text" if form == "parts" else form
                content = [{"type": kind, kind: FIRST}]
                content += [] if form == "text" else [{"type": "text", "text": SECOND}]
            try:
                prompt = self._render(self._messages(role, content))
            except Exception:  # a template is a program that can raise its own errors
                prompt = ""
            is_read = FIRST in prompt and (form in ("str", "text") or SECOND in prompt)
            self._is_read[role, form] = is_read
        return self._is_read[role, form]

    def _messages(self, role: str, content: str | list[Message]) -> list[Message]:
        """Return a chat that has a message of this role."""
        message = {"role": role, "content": content}
        if role == "user":
            return [message]
        user = {"role": "user", "content": self._of_text("user", "x")}
        if role == "assistant":
            return [user, message]
        if role == "tool":
            empty = self._of_text("assistant", None)
            call = {"role": "assistant", "content": empty, "tool_calls": [_CALL]}
            return [user, call, message | {"tool_call_id": _CALL["id"], "name": "f"}]
        return [message, user]


def _part(given: Any, path: str) -> Message:
    """Return a part of a known type. Raises `ApiError`."""
    if isinstance(given, str):  # as in vLLM
        return {"type": "text", "text": given}
    kind = given.get("type", "text") if isinstance(given, dict) else None
    key = TEXT_TYPES.get(kind) if isinstance(kind, str) else None
    if key is None or not isinstance(given.get(key), str):
        allowed = "text, refusal or thinking, each with its text"
        raise bad(f"{path}.content must have parts of the types {allowed}", "messages")
    return {**given, "type": key}


def _text_part(part: Message) -> Message:
    kind = part["type"]
    return part if kind == "text" else {"type": "text", "text": part[kind]}
