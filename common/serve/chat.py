"""Render messages to a prompt, with the model's template or the server's `--chat-template`. The
template also determines how the model writes its reasoning and its tool calls.

See common/serve/README.md#what-it-answers"""

from __future__ import annotations

import logging
import re
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import Any

from common.requests.tokenizer import Tokenizer
from common.serve.errors import ApiError, bad
from common.serve.tool_calls import CALL, END_THINK, MARKS, Reader, ToolUse, calls_of_history

logger = logging.getLogger(__name__)
_TRIED = {"name": "a_tool_to_try", "description": "", "parameters": {"type": "object"}}


class ChatPrompts:
    """Renders chats to prompts. `template` replaces the model's; None: the model's."""

    def __init__(self, tokenizer: Tokenizer, template: str | None = None) -> None:
        self._tokenizer, self._source, self._template = tokenizer, tokenizer.source, template

    @cached_property
    def hides_marks(self) -> bool:
        """Whether skipping special tokens removes marks from a text."""
        ids = map(self._tokenizer.backend.token_to_id, MARKS)
        return not self._tokenizer.special_ids.isdisjoint(ids)

    def reader(self, tools: ToolUse, has_grammar: bool) -> Reader | None:
        """Return the settings for parsing an answer; None: the text is the content. Raises
        `ApiError`."""
        shown = self._shown_tool if tools.schemas else ""
        if tools.choice == "auto" and not re.search(CALL + r"\s*{", shown):  # supported form
            raise bad(
                "tools: tool_choice must not be 'auto', because the chat template does not ask for "
                f'calls of the form {CALL}{{"name": ..., "arguments": ...}}; '
                'use "required" or name a function',
                "tools",
            )
        template = self._template or getattr(self._source, "chat_template", None)
        has_reasoning = END_THINK in str(template) and not has_grammar
        if tools.choice == "none" and not has_reasoning:
            return None
        return Reader(replace(tools, schemas={}), has_reasoning)  # kept as long as the answer

    @cached_property
    def _shown_tool(self) -> str:
        """A prompt with a tool, to see how the template shows it; "" if the template fails."""
        tools, text = [{"type": "function", "function": _TRIED}], ""
        with suppress(ApiError):
            text = self.text([{"role": "user", "content": "x"}], kwargs={"tools": tools})
        if _TRIED["name"] not in text:
            logger.warning("the chat template ignores tools, so the model sees none of them")
        return text

    def text(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | None = None,
        kwargs: dict[str, Any] | None = None,
    ) -> str:
        """Return the prompt for `messages`. Raises `ApiError`."""
        continues = bool(continue_final_message)
        adds = not continues if add_generation_prompt is None else add_generation_prompt
        if self._template is None and getattr(self._source, "chat_template", None) is None:
            raise bad(
                "cannot chat: the model has no chat template; start the server with "
                "--chat-template FILE, such as common/serve/chat_template.jinja"
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
        except Exception as error:  # a template is a program that can raise its own errors
            raise bad(f"cannot render these messages: {error}", "messages") from error


def _plain(message: dict[str, Any], i: int) -> dict[str, Any]:
    """Return the message with its content as one text."""
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise bad(f"messages[{i}].role must be a non-empty str", "messages")
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else None for part in content]
        if not all(isinstance(part, str) for part in parts):
            raise bad(f"messages[{i}].content must have parts of type 'text' only", "messages")
        content = "\n".join(map(str, parts))
    if content is not None and not isinstance(content, str):
        raise bad(f"messages[{i}].content must be a str", "messages")
    plain = {**message, "content": content or ""}
    if calls := plain.pop("tool_calls", None):  # some templates cannot render an empty list
        plain["tool_calls"] = calls_of_history(calls, f"messages[{i}]")
    if message.get("reasoning"):  # vLLM's name; templates use another one
        plain.setdefault("reasoning_content", message["reasoning"])
    return plain
