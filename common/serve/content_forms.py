"""The content of a message in the form that the chat template reads.

A content is a text or a list of parts. Some templates write only texts, some only go over parts,
many do both, and often another thing for each role. A content in a form that a template does not
read is missing in the prompt, or Python's list appears there, and few templates raise an error. So
each form is tried once, with words in quotes, which Python and JSON escape. Parts go to the
template as parts if it writes them unchanged, else as one text, joined by line breaks; a text as
one part if the template writes only parts.

A refusal and a thinking part become text parts.

vLLM instead looks for a loop over the content in the template's syntax tree. If there is one, all
roles but `tool` get parts; it does not see a loop within a macro (Qwen 3.5).

See common/serve/README.md#tools-and-reasoning"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
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
        self._reads = cache(self._is_read)

    def content(self, message: Message, path: str) -> str | list[Message]:
        """Return a message's content in the form to give the template. Raises `ApiError`."""
        given = message.get("content")
        if given is not None and not isinstance(given, str | list):
            raise bad(f"{path}.content must be a str or a list of parts", "messages")
        role = message["role"] if message["role"] in ROLES else "user"
        parts = given if isinstance(given, list) else [given] if given else []
        texts = [text_of(part, path) for part in parts]
        is_text = not isinstance(given, list) and self._reads(role, False)
        if not is_text and self._reads(role, True):
            return [{"type": "text", "text": text} for text in texts]
        return "\n".join(texts)

    def _is_read(self, role: str, are_parts: bool) -> bool:
        """Whether the template writes a content of this form, for this role, unchanged."""
        chat: list[Message] = [{"role": role, "content": PARTS if are_parts else FIRST}]
        if role != "user":
            user: Message = {"role": "user", "content": "x"}
            user["content"] = self.content(user, "")
            chat = [*chat, user] if role in ("system", "developer") else [user, *chat]
        if role == "tool":
            call: Message = {"role": "assistant", "tool_calls": [_CALL]}
            call["content"] = self.content(call, "")
            chat = [chat[0], call, chat[1] | {"tool_call_id": _CALL["id"], "name": "f"}]
        try:
            prompt = self._render(chat)
        except Exception:  # a template is a program that can raise its own errors
            return False
        return FIRST in prompt and (SECOND in prompt or not are_parts)


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
