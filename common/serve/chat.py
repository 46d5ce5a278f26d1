"""Render messages to a prompt, with the model's template or the server's `--chat-template`. The
template also determines how the model writes its reasoning and its tool calls.

See common/serve/README.md#what-it-answers"""

from __future__ import annotations

import re
from functools import cached_property
from typing import Any

from common.requests.tokenizer import Tokenizer
from common.serve.content_forms import ContentForms
from common.serve.errors import bad
from common.serve.flags import ALWAYS_THINKING
from common.serve.tool_calls import CALL, END_THINK, MARKS, THINK, Reader, ToolUse, calls_of_history

# How a template writes calls of the supported form, also as an escaped text.
_CALL_FORM = re.compile(CALL + r'(?:\s|\\n)*\{\\*"')


class ChatPrompts:
    """Renders chats to prompts. `template` replaces the model's; None: the model's. A parser that
    is named decides how answers are parsed, otherwise the template does."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str | None = None,
        tool_call_parser: str | None = None,
        reasoning_parser: str | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._source = tokenizer.source
        self._template = template
        self._tool_call_parser = tool_call_parser
        self._reasoning_parser = reasoning_parser
        self._forms = ContentForms(lambda chat: self._render(chat, False, False, {}))

    @cached_property
    def hides_marks(self) -> bool:
        """Whether skipping special tokens removes marks from a text."""
        ids = map(self._tokenizer.backend.token_to_id, MARKS)
        return not self._tokenizer.special_ids.isdisjoint(ids)

    def reader(
        self, tools: ToolUse, has_grammar: bool, shows_reasoning: bool = True
    ) -> Reader | None:
        """Return the settings for parsing an answer; None: the text is the content. Raises
        `ApiError`."""
        template = str(self._template or getattr(self._source, "chat_template", None))
        is_asked = self._tool_call_parser or _CALL_FORM.search(template)
        if tools.choice == "auto" and not is_asked:
            raise bad(
                "tools: tool_choice must not be 'auto', because the chat template does not ask for "
                f'calls of the form {CALL}{{"name": ..., "arguments": ...}}; '
                'use "required", name a function, or start the server with --tool-call-parser',
                "tools",
            )
        has_marks = self._reasoning_parser or THINK in template or END_THINK in template
        has_reasoning = bool(has_marks) and not has_grammar
        if tools.choice == "none" and not has_reasoning:
            return None
        return Reader(tools, has_reasoning, shows_reasoning)

    def prompt_end(self, prompt: str, continued: dict[str, Any] | None = None) -> str:
        """Return the prompt's end from its last mark of reasoning on, if the answer begins after
        it, else "". Of a `continued` message, its thought, if that is open."""
        if continued is not None:
            begun = str(continued.get("content") or "")
            start = begun.rfind(THINK)
            return begun[start:] if start > begun.rfind(END_THINK) else ""
        before = prompt.rstrip()
        for mark in THINK, END_THINK:
            if before.endswith(mark):
                return prompt[len(before) - len(mark) :]
        return THINK if self._reasoning_parser in ALWAYS_THINKING else ""

    def text(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | None = None,
        kwargs: dict[str, Any] | None = None,
    ) -> str:
        """Return the prompt for `messages`. Raises `ApiError`."""
        continues = bool(continue_final_message)
        kwargs = kwargs or {}
        adds = not continues if add_generation_prompt is None else add_generation_prompt
        if self._template is None and getattr(self._source, "chat_template", None) is None:
            raise bad(
                "cannot chat: the model has no chat template; start the server with "
                "--chat-template FILE, such as common/serve/chat_template.jinja"
            )
        read = [self._message(message, f"messages[{i}]") for i, message in enumerate(messages)]
        try:
            return self._render(read, adds, continues, kwargs)
        except Exception as error:  # a template is a program that can raise its own errors
            raise bad(f"cannot render these messages: {error}", "messages") from error

    def _render(
        self, messages: list[dict[str, Any]], adds: bool, continues: bool, kwargs: dict[str, Any]
    ) -> str:
        return self._source.apply_chat_template(  # pyright: ignore[reportOptionalMemberAccess]
            messages,
            chat_template=self._template,
            add_generation_prompt=adds,
            continue_final_message=continues,
            tokenize=False,
            **kwargs,
        )

    def _message(self, message: dict[str, Any], path: str) -> dict[str, Any]:
        """Return the message in the form that the template reads."""
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise bad(f"{path}.role must be a non-empty str", "messages")
        found = {**message, "content": self._forms.content(message, path)}
        if calls := found.pop("tool_calls", None):  # some templates cannot render an empty list
            found["tool_calls"] = calls_of_history(calls, path)
        if message.get("reasoning"):  # vLLM's name; templates use another one
            found.setdefault("reasoning_content", message["reasoning"])
        return found
