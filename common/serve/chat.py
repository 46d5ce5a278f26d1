"""Messages to a prompt: a model's own template, or one that the server was given."""

from __future__ import annotations

from typing import Any

from common.serve.errors import bad
from common.tokenizer import Tokenizer


class ChatPrompts:
    """`template`: instead of the model's."""

    def __init__(self, tokenizer: Tokenizer, template: str | None = None) -> None:
        self._source, self._template = tokenizer.source, template

    def text(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | None = None,
        kwargs: dict[str, Any] | None = None,
    ) -> str:
        """Raises `ApiError`."""
        continues = bool(continue_final_message)
        adds = not continues if add_generation_prompt is None else add_generation_prompt
        if self._template is None and getattr(self._source, "chat_template", None) is None:
            raise bad(
                "this model has no chat template: start the server with --chat-template FILE, "
                "such as common/serve/chat_template.jinja"
            )
        plain = [_plain(message, i) for i, message in enumerate(messages)]
        try:
            return self._source.apply_chat_template(  # pyright: ignore[reportOptionalMemberAccess]
                plain,
                chat_template=self._template,
                add_generation_prompt=adds,
                continue_final_message=continues,
                tokenize=False,
                **(kwargs or {}),
            )
        except Exception as error:  # a template is a program, and says what it does not take
            raise bad(f"the chat template refuses these messages: {error}", "messages") from error


def _plain(message: dict[str, Any], i: int) -> dict[str, Any]:
    """Its content as one text."""
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise bad(f"messages[{i}] has no role", "messages")
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else None for part in content]
        if not all(isinstance(part, str) for part in parts):
            raise bad(f"messages[{i}]: content may have parts of type 'text' only", "messages")
        content = "\n".join(map(str, parts))
    if content is not None and not isinstance(content, str):
        raise bad(f"messages[{i}]: content must be a text", "messages")
    if message.get("tool_calls"):
        raise bad(f"messages[{i}]: tool_calls is not supported by this server", "messages")
    return {**message, "content": content or ""}
