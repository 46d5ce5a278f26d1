"""Chats and templates: the form of a content that a template reads, where a thought begins, and
which parser reads an answer. The oracle for a content is `apply_chat_template`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common.engine_config import SHIPPED_CHECKPOINT
from common.requests.tokenizer import Tokenizer, load_tokenizer
from common.serve.__main__ import parse_args
from common.serve.chat import ChatPrompts
from common.serve.errors import ApiError
from common.serve.tool_calls import Reader, ToolUse, tool_use

LOOP = "{% for m in messages %}[{{ m.role }}]"
CALLS = "{% for c in m.tool_calls or [] %}<{{ c.function.name }}>{% endfor %}"
PART = "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}"
BOTH = f"{{% if m.content is string %}}{{{{ m.content }}}}{{% else %}}{PART}{{% endif %}}"
TEXT = "{{ m.content }}"
END = CALLS + "{% endfor %}"
MACRO = f"{{% macro show(m) %}}{BOTH}{{% endmacro %}}{LOOP}{{{{ show(m) }}}}{END}"
# As in Llama 3.2 Vision: only the user's content can be parts.
USER_ONLY = LOOP + f"{{% if m.role == 'user' %}}{BOTH}{{% else %}}{TEXT}{{% endif %}}" + END
FIRST_ONLY = LOOP + "{{ m.content[0].text }}" + END
THINKS = "{% if p.type == 'thinking' %}<{{ p.thinking }}>{% else %}{{ p.text }}{% endif %}"
THINKS = LOOP + "{% for p in m.content %}" + THINKS + "{% endfor %}" + END
JSON = LOOP + "{{ m.content | tojson }}" + END
STRICT = "{% if messages[0].role != 'user' %}{{ raise_exception('a user first') }}{% endif %}"
STRICT += LOOP + PART + END


def text(content: Any, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": content}


def parts(*texts: str, role: str = "user") -> dict[str, Any]:
    return text([{"type": "text", "text": found} for found in texts], role)


def thought(kind: str = "thinking") -> dict[str, Any]:
    return text([{"type": kind, kind: "why"}, {"type": "text", "text": "so"}], "assistant")


CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(SHIPPED_CHECKPOINT)


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        (LOOP + BOTH + END, [text("a"), parts("b", "c")], "[user]a[user]bc"),
        (LOOP + PART + END, [text("a"), parts("b", "c")], "[user]a[user]bc"),
        (LOOP + TEXT + END, [text("a"), parts("b", "c")], "[user]a[user]b\nc"),
        (MACRO, [text("a"), parts("b", "c")], "[user]a[user]bc"),
        (JSON, [text("a"), parts("b", "c")], '[user]"a"[user]"b\\nc"'),
        (FIRST_ONLY, [text("a"), parts("b", "c")], "[user]a[user]b\nc"),
        (STRICT, [text("a"), text("b", "assistant")], "[user]a[assistant]b"),
        (USER_ONLY, [parts("a", "b", role="system"), parts("c", "d")], "[system]a\nb[user]cd"),
        (USER_ONLY, [parts("a", "b", role="developer")], "[developer]a\nb"),
        (USER_ONLY, [CALL, parts("b", "c", role="tool")], "[assistant]<f>[tool]b\nc"),
        (LOOP + PART + END, [text("a"), CALL, text("b", "tool")], "[user]a[assistant]<f>[tool]b"),
        (LOOP + PART + END, [parts("a", role="critic")], "[critic]a"),
        (THINKS, [text("a"), thought()], "[user]a[assistant]<why>so"),
        (THINKS, [text("a"), thought("refusal")], "[user]a[assistant]whyso"),
        (LOOP + PART + END, [text("a"), thought()], "[user]a[assistant]whyso"),
        (LOOP + TEXT + END, [text("a"), thought("refusal")], "[user]a[assistant]why\nso"),
        (LOOP + PART + END, [text(["a", {"text": "b"}])], "[user]ab"),
        (LOOP + TEXT + END, [text([])], "[user]"),
    ],
)  # fmt: skip
def test_a_template_gets_contents_in_the_form_that_it_reads(
    tokenizer: Tokenizer, template: str, messages: list[dict[str, Any]], expected: str
) -> None:
    chat = ChatPrompts(tokenizer, template)
    prompts = {chat.text(messages, add_generation_prompt=False) for _ in range(2)}
    assert prompts == {expected}
    if template in (LOOP + BOTH + END, MACRO):  # what transformers gives the template
        plain = tokenizer.source.apply_chat_template(
            messages, chat_template=template, tokenize=False
        )
        assert plain == expected


IMAGE = {"type": "image_url", "image_url": {"url": "x"}, "text": "x"}
NO_TEXT = "messages[0].content must have parts of the types text"


@pytest.mark.parametrize(
    ("template", "content", "words"),
    [
        *((LOOP + BOTH + END, [part], NO_TEXT) for part in (IMAGE, 5, None)),
        # the variable of the template
        (LOOP + "\n{{ 'a' + m.why }}" + END, "x", "line 2 of the chat template needs m.why, which"),
        ("{{ 'a' + messages[0]['name'] }}", "x", "chat template needs messages[0]['name'], which"),
        ("{{ messages[0].content.a.b.items() }}", "x", "needs messages[0].content.a, which"),
        ("{{ nothing.at.all }}", "x", "chat template needs nothing, which is missing"),
        ("{{ raise_exception('no, please') }}", "x", "messages: no, please"),
        ("{{ 'a' + 1 }}", "x", "line 1 of the chat template: can only concatenate"),
        ("{{ x", "x", "unexpected end of template"),
    ],
)  # fmt: skip
def test_an_error_names_what_is_wrong(
    tokenizer: Tokenizer, template: str, content: Any, words: str
) -> None:
    with pytest.raises(ApiError) as caught:
        ChatPrompts(tokenizer, template).text([text(content) | {"name": None}])
    assert words in caught.value.message
    assert (caught.value.status, caught.value.param) == (400, "messages")


@pytest.mark.parametrize(
    ("prompt", "continued", "parser", "expected"),
    [
        ("user: <think>\nanswer:", None, None, ""),  # the user's words
        ("answer:<think>\n", None, None, "<think>\n"),
        ("answer:<think>\n\n</think>\n\n", None, None, "</think>\n\n"),
        ("answer:<think>\n\n</think>\n\n", None, "olmo3", "</think>\n\n"),
        ("answer:", None, "olmo3", "<think>"),  # a model that always thinks
        ("answer:", None, "qwen3", ""),
        ("answer:<think>\na <b", "<think>\na <b", None, "<think>\na <b"),
        ("answer:<think>\na</think>b", "<think>\na</think>b", "olmo3", "</think>b"),
        ("answer:<think>\nso ", "so ", None, "<think>\nso "),  # the template opens it
        ("answer:so", "so ", "olmo3", ""),
        ("answer:<think>ab", [{"text": "<think>"}, "a", "b"], None, "<think>ab"),
        ("answer:so", [{"type": "refusal", "refusal": "so", "text": None}], None, ""),
    ],
)
def test_where_in_the_prompt_the_answer_begins(
    tokenizer: Tokenizer, prompt: str, continued: Any, parser: str | None, expected: str
) -> None:
    chat = ChatPrompts(tokenizer, LOOP + BOTH + END, reasoning_parser=parser)
    message = None if continued is None else text(continued, "assistant")
    assert chat.prompt_end(prompt, message) == expected


def test_a_parser_that_is_named_decides(
    tokenizer: Tokenizer, capsys: pytest.CaptureFixture
) -> None:
    tools = tool_use([{"type": "function", "function": {"name": "f"}}], "auto", None)
    coder = "{% for t in tools %}<tool_call><function={{ t.function.name }}>{% endfor %}"
    for template in LOOP + TEXT + END, coder + LOOP + TEXT + END:  # Qwen3-Coder's form
        with pytest.raises(ApiError, match="--tool-call-parser"):
            ChatPrompts(tokenizer, template).reader(tools, has_grammar=False)
    for template, parsers, has_reasoning in (
        (LOOP + TEXT + END, ("hermes", None), False),
        (LOOP + TEXT + END, ("hermes", "qwen3"), True),
        (LOOP + TEXT + END + "<think>", ("granite4", None), True),  # as in OLMo 3 Think
    ):
        chat = ChatPrompts(tokenizer, template, *parsers)
        found = chat.reader(tools, has_grammar=False)
        assert found == Reader(ToolUse({}, "auto"), has_reasoning)
        forced = chat.reader(tools, has_grammar=True)
        assert forced is not None and not forced.has_reasoning
    flags = ["--enable-auto-tool-choice", "--reasoning-parser=deepseek_r1"]
    assert parse_args(flags).reasoning_parser == "deepseek_r1", "as at vLLM"
    for flag, name in ("reasoning", "olmo3"), ("tool-call", "hermes"):
        with pytest.raises(SystemExit):
            parse_args([f"--{flag}-parser=mistral"])
        printed = capsys.readouterr().err
        assert "mistral" in printed and name in printed


def test_a_models_own_template_is_used_unless_there_is_another() -> None:
    apply = lambda messages, *, chat_template, **_: f"{chat_template} of {messages}"  # noqa: E731
    source = SimpleNamespace(chat_template="own", apply_chat_template=apply)
    tokenizer: Any = SimpleNamespace(source=source)
    assert ChatPrompts(tokenizer).text([text("x")]).startswith("None of ")
    config = {"role": "assistant", "content": None, "name": "x"}  # messages as they are
    assert ChatPrompts(tokenizer, "a").text([config]) == f"a of {[config | {'content': ''}]}"
    source.chat_template = None
    with pytest.raises(ApiError, match="has no chat template") as caught:
        ChatPrompts(tokenizer).text([text("x")])
    assert (Path(__file__).parents[2] / caught.value.message.split()[-1]).is_file()
