"""The content of a message in the form that the chat template reads.

A content is a text or a list of parts. Some templates write only texts, some only go over parts,
many do both, and often another thing for each role. A content in a form that a template does not
read is missing in the prompt, or Python's list appears there, and few templates raise an error. So
each form is tried once, with words in quotes, which Python and JSON escape:

    given     tried in this order; the first that the template writes unchanged is taken
    a text    a text; one part
    parts     text parts; a text, joined by line breaks; one part with this text

A refusal and a thinking part become text parts.

vLLM instead looks for a loop over the content in the template's syntax tree. If there is one, all
roles but `tool` get parts; it does not see a loop within a macro (Qwen 3.5).

See common/serve/README.md#tools-and-reasoning"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from common.serve.errors import bad

Message = dict[str, Any]
FIRST, SECOND = "one 'text' to \"try\"", "another 'text' to \"try\""
PARTS = [{"type": "text", "text": FIRST}, {"type": "text", "text": SECOND}]
ROLES = ("system", "developer", "user", "assistant", "tool")  # another one is tried as a user
# The key of a part's text, by the part's type.
TEXT_TYPES = {"text": "text", "input_text": "text", "output_text": "text"}
TEXT_TYPES |= {"refusal": "refusal", "thinking": "thinking"}
_CALL = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {}}}


class ContentForms:
    """The forms that a template reads. `render` returns the prompt for messages, or raises."""

    def __init__(self, render: Callable[[list[Message]], str]) -> None:
        self._render = render
        self._is_read: dict[tuple[str, bool], bool] = {}

    def content(self, message: Message, path: str) -> str | list[Message]:
        """Return a message's content in the form to give the template. Raises `ApiError`."""
        role = message["role"] if message["role"] in ROLES else "user"
        given = message.get("content")
        if isinstance(given, list):
            texts = [text_of(part, path) for part in given]
            if self._reads(role, True):
                return [{"type": "text", "text": text} for text in texts]
            given = "\n".join(texts)
        if given is not None and not isinstance(given, str):
            raise bad(f"{path}.content must be a str or a list of parts", "messages")
        return self._of_text(role, given)

    def _of_text(self, role: str, text: str | None) -> str | list[Message]:
        if self._reads(role, False) or not self._reads(role, True):
            return text or ""
        return [] if text is None else [{"type": "text", "text": text}]

    def _reads(self, role: str, are_parts: bool) -> bool:
        """Whether the template writes a content of this form, for this role, unchanged."""
        form = (role, are_parts)
        if form not in self._is_read:
            try:
                prompt = self._render(self._messages(role, PARTS if are_parts else FIRST))
            except Exception:  # a template is a program that can raise its own errors
                prompt = ""
            self._is_read[form] = FIRST in prompt and (SECOND in prompt or not are_parts)
        return self._is_read[form]

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


def text_of(part: Any, path: str) -> str:
    """Return the text of a part. Raises `ApiError` for a part of another type."""
    if isinstance(part, str):  # as in vLLM
        return part
    kind = part.get("type", "text") if isinstance(part, dict) else None
    text = part.get(TEXT_TYPES.get(kind)) if isinstance(kind, str) else None
    if not isinstance(text, str):
        allowed = "text, refusal or thinking, each with its text"
        raise bad(f"{path}.content must have parts of the types {allowed}", "messages")
    return text
