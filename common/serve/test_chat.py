"""Chats: the form of a content that a template reads, where a thought begins, what a chat may ask,
and the marks of a text wherever a stream is cut."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from common.engine_config import SHIPPED_CHECKPOINT
from common.requests.output_processor import RequestMetrics
from common.requests.tokenizer import load_tokenizer
from common.serve.answers import Answer
from common.serve.chat import ChatPrompts
from common.serve.conftest import MODEL, Running
from common.serve.deltas import CompletionDelta, RequestDelta
from common.serve.errors import ApiError
from common.serve.tool_calls import Reader, Reply, ToolUse
from common.serve.wire import GenerateBody
from request import SamplingParams

LOOP = "{% for m in messages %}[{{ m.role }}]"
CALLS = "{% for c in m.tool_calls or [] %}<{{ c.function.name }}>{% endfor %}"
PART = "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}"
BOTH = f"{{% if m.content is string %}}{{{{ m.content }}}}{{% else %}}{PART}{{% endif %}}"
TEXT = "{{ m.content }}"
END = CALLS + "{% endfor %}"
PLAIN = LOOP + TEXT + END
EITHER = LOOP + BOTH + END
MACRO = f"{{% macro show(m) %}}{BOTH}{{% endmacro %}}{LOOP}{{{{ show(m) }}}}{END}"
# As in Llama 3.2 Vision: only the user's content can be parts.
USER_ONLY = LOOP + f"{{% if m.role == 'user' %}}{BOTH}{{% else %}}{TEXT}{{% endif %}}" + END
STRICT = "{% if messages[0].role != 'user' %}{{ raise_exception('a user first') }}{% endif %}"
STRICT += LOOP + PART + END


def text(content: Any, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": content}


def parts(*texts: str, role: str = "user") -> dict[str, Any]:
    return text([{"type": "text", "text": found} for found in texts], role)


def thought(kind: str = "thinking") -> dict[str, Any]:
    return text([{"type": kind, kind: "why"}, {"type": "text", "text": "so"}], "assistant")


CALLED = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
TOKENIZER = load_tokenizer(SHIPPED_CHECKPOINT)


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        (PLAIN, [text("a"), parts("b", "c")], "[user]a[user]b\nc"),
        (MACRO, [text("a"), parts("b", "c")], "[user]a[user]bc"),
        (STRICT, [text("a"), text("b", "assistant")], "[user]a[assistant]b"),
        (USER_ONLY, [parts("a", "b", role="system"), parts("c", "d")], "[system]a\nb[user]cd"),
        (USER_ONLY, [CALLED, parts("b", "c", role="tool")], "[assistant]<f>[tool]b\nc"),
        (MACRO, [text("a"), thought()], "[user]a[assistant]whyso"),
        (PLAIN, [text("a"), thought("refusal")], "[user]a[assistant]why\nso"),
        (LOOP + PART + END, [text(["a", {"text": "b"}])], "[user]ab"),
    ],
)
def test_a_template_gets_contents_in_the_form_that_it_reads(
    template: str, messages: list[dict[str, Any]], expected: str
) -> None:
    chat = ChatPrompts(TOKENIZER, template)
    prompts = {chat.text(messages, add_generation_prompt=False) for _ in range(2)}
    assert prompts == {expected}


IMAGE = {"type": "image_url", "image_url": {"url": "x"}, "text": "x"}
NO_TEXT = "messages[0].content must have parts of the types text"


@pytest.mark.parametrize(
    ("template", "content", "words"),
    [
        *((EITHER, [part], NO_TEXT) for part in (IMAGE, 5, None)),
        ("{{ 'a' + messages[0]['why'] }}", "x", "'dict object' has no attribute 'why'"),
        ("{{ raise_exception('no, please') }}", "x", "messages: no, please"),
        ("{{ x", "x", "unexpected end of template"),
    ],
)  # fmt: skip
def test_an_error_names_what_is_wrong(template: str, content: Any, words: str) -> None:
    with pytest.raises(ApiError) as caught:
        ChatPrompts(TOKENIZER, template).text([text(content) | {"name": None}])
    assert words in caught.value.message
    assert (caught.value.status, caught.value.param) == (400, "messages")


@pytest.mark.parametrize(
    ("prompt", "parser", "expected"),
    [
        ("user: <think>\nanswer:", None, ""),  # the user's words
        ("answer:<think>\n", None, "<think>\n"),
        ("answer:<think>\n\n</think>\n\n", None, "</think>\n\n"),
        ("answer:", "olmo3", "<think>"),  # a model that always thinks
    ],
)
def test_where_in_the_prompt_the_answer_begins(
    prompt: str, parser: str | None, expected: str
) -> None:
    chat = ChatPrompts(TOKENIZER, EITHER, reasoning_parser=parser)
    assert chat.prompt_end(prompt) == expected
    for begun, end in (("<think>\nFirst", "<think>\nFirst"), ("<think>a</think>b", ""), ("c", "")):
        assert chat.prompt_end(prompt, {"role": "assistant", "content": begun}) == end


def test_a_parser_that_is_named_decides() -> None:
    tools = ToolUse({"f": {}}, "auto")
    coder = "{% for t in tools %}<tool_call><function={{ t.function.name }}>{% endfor %}"
    for template in PLAIN, coder + PLAIN:  # Qwen3-Coder's form
        with pytest.raises(ApiError, match="--tool-call-parser"):
            ChatPrompts(TOKENIZER, template).reader(tools, has_grammar=False)
    for parser in None, "qwen3":
        found = ChatPrompts(TOKENIZER, PLAIN, "hermes", parser).reader(tools, has_grammar=False)
        assert found == Reader(tools, parser is not None)
    found = ChatPrompts(TOKENIZER, PLAIN + "<think>", "granite4").reader(tools, has_grammar=False)
    assert found == Reader(tools, True), "as in OLMo 3 Think"


def test_a_models_own_template_is_used_unless_there_is_another() -> None:
    apply = lambda messages, *, chat_template, **_: f"{chat_template} of {messages}"  # noqa: E731
    source = SimpleNamespace(chat_template="own", apply_chat_template=apply)
    tokenizer: Any = SimpleNamespace(source=source)
    assert ChatPrompts(tokenizer).text([text("x")]).startswith("None of ")
    assert ChatPrompts(tokenizer, "a").text([text(None)]) == f"a of {[text('')]}"
    source.chat_template = None
    with pytest.raises(ApiError, match="has no chat template") as caught:
        ChatPrompts(tokenizer).text([text("x")])
    assert (Path(__file__).parents[2] / caught.value.message.split()[-1]).is_file()


# -- tools and reasoning, with the `openai` package


def schema_of(unit: Any, **others: Any) -> dict[str, Any]:
    """Each has a `Unit` of its own."""
    fields = {"unit": {"$ref": "#/$defs/Unit"}} | others
    found = {"type": "object", "properties": fields, "required": [*fields]}
    return found | {"additionalProperties": False, "$defs": {"Unit": unit}}


SCHEMAS = {
    "weather": schema_of({"enum": ["C", "F"]}, days={"enum": [1, 2, 3]}),
    "home.switch": schema_of({"type": "boolean"}),
}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "description": "x", "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
PATH = "/v1/chat/completions"
NAMED: Any = {"function": {"name": "home.switch", "strict": True}, "x": 1}  # no type, more keys
FORMAT: Any = {"type": "json_object"}
MESSAGES: Any = [{"role": "user", "content": "x"}]
# As Qwen3's is made: tools and their form, calls of earlier answers, thinking that can be off.
HERMES = """
{%- if tools %}{{ tools | tojson }} as <tool_call>
{"name": <name>, "arguments": <arguments>}
</tool_call>
{% endif %}
{%- for message in messages %}{{ message.role }}:
{%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function.name }}
{%- for key, value in call.function.arguments.items() %} {{ key }}={{ value }}{% endfor %}
{%- endfor %}
{% endfor %}
{%- if enable_thinking is defined and not enable_thinking %}<think>

</think>{% endif %}
"""
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": "}\\"<\\\\"}}\n</tool_call>'
AUTO = ToolUse({}, "auto")


@pytest.fixture
def hermes(server: Running, monkeypatch: pytest.MonkeyPatch) -> Running:
    """The same server, with a template that has tools."""
    chat = ChatPrompts(server.llm.tokenizer, HERMES)
    monkeypatch.setattr(server.app.state.server, "chat", chat)
    return server


def says(
    server: Running, monkeypatch: pytest.MonkeyPatch, text: str, reason: str = "stop"
) -> list[SamplingParams]:
    """From now on the engine says this, one character at a time. Returns what is requested."""
    requested = list[SamplingParams]()

    async def generate(ids: list[int], params: SamplingParams, **_: Any) -> Any:
        requested.append(params)
        yield RequestDelta("x", prompt_token_ids=ids)
        for character in text:
            yield RequestDelta("x", {0: CompletionDelta(0, character, [5])})
        end = {0: CompletionDelta(0, "", [], None, reason)}
        yield RequestDelta("x", end, finished=True, metrics=RequestMetrics(1.0))

    monkeypatch.setattr(server.llm, "generate", generate)
    return requested


# -- the text


def joined(deltas: list[dict[str, Any]]) -> dict[str, Any]:
    """A stream as a whole message, without ids."""
    found: dict[str, Any] = {}
    for delta in deltas:
        for name in delta.keys() - {"tool_calls"}:
            found[name] = found.get(name, "") + delta[name]
        for call in delta.get("tool_calls", ()):
            calls = found.setdefault("tool_calls", [])
            if "id" in call:
                calls.append(call["function"])
            else:
                calls[-1]["arguments"] += call["function"]["arguments"]
            assert call["index"] == len(calls) - 1
    return {"content": None if found else ""} | found


def whole(reader: Reader, text: str, prompt_end: str = "") -> dict[str, Any]:
    found = Reply(reader, prompt_end).message(text)
    if "tool_calls" in found:
        assert len({call["id"] for call in found["tool_calls"]}) == len(found["tool_calls"])
        found["tool_calls"] = [call["function"] for call in found["tool_calls"]]
    return found


PARTS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "\n", "a", "<", "}", CALL, "{"]
PARTS += ['{"name": "f", "arguments": {', '{"arguments": {}, "name": "g"}', '"', "\\", "</tool"]
PARTS += ['{"id": "</tool_call>", "name": "f", "parameters": {}}', ', "id": "}"', "[", "]"]
ARRAY = '[{"name": "f", "parameters": {"x": [1, "]"]}}, {"name": "g", "parameters": {}}]'
EACH = {*range(150)}


@given(
    st.lists(st.sampled_from(PARTS), max_size=12).map("".join),
    st.sets(st.integers(0, 150)),
    st.sampled_from(["auto", "none", "required", "named"]),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["", "<think>\n", "<think>\na"]),
)
@example(f"ab</think>{CALL}", EACH, "auto", False, True, "<think>\n")
@example(f"<think>a{CALL}\n</think>\n\nhi", EACH, "auto", True, True, "")
@example(ARRAY, EACH, "required", True, False, "")
def test_a_stream_is_the_whole_answer_wherever_it_is_cut(
    text: str, cuts: set[int], choice: str, is_parallel: bool, has_reasoning: bool, end: str
) -> None:
    reader = Reader(ToolUse({}, choice, "f" * (choice == "named"), is_parallel), has_reasoning)
    reply = Reply(reader, end)
    places = [0, *sorted(c for c in cuts if c < len(text)), len(text)]
    deltas = [reply.delta(text[i:j], False) for i, j in pairwise(places)]
    assert joined([*deltas, reply.delta("", True)]) == whole(reader, text, end)


F = {"name": "f", "arguments": '{"x": "}\\"<\\\\"}'}
G, X = ({"name": "g", "arguments": text} for text in ("{}", '{"x": 1}'))
SHORT = '<tool_call>{"name": "g", "parameters": {"x": 1}'  # a bracket too few


@pytest.mark.parametrize(
    ("text", "content", "reasoning", "calls"),
    [
        (f"<think>\nab\n</think>\n\nhi\n{CALL}\n{CALL}\n", "hi", "ab", [F, F]),
        (f"\n<think>\n\n</think>\n\n{CALL}", None, None, [F]),
        ("a <think>b</think>\n", "a <think>b</think>\n", None, []),  # not at the beginning
        # a call within the reasoning ends it, a mark alone does not
        (f"<think>ab{CALL}\n</think>\nhi", "hi", "ab", [F]),
        ("<think>a\n<tool_call> b\n</think>\nhi", "hi", "a\n<tool_call> b", []),
        # other forms of a call
        ('<tool_call>{"parameters": {"x": 1}, "name": "g"}</tool_call>\na', "a", None, [X]),
        ('<tool_call>{"name": "g", "parameters": "{\\"x\\": 1}"}</tool_call>', None, None, [X]),
        ('<tool_call>{"name": "g", "arguments": null}</tool_call>', None, None, [G]),
        ('<tool_call>{"name": "g", "arguments": [5]}', None, None, [G | {"arguments": "[5]"}]),
        ('<tool_call>{"id": "</tool_call>", "name": "g"}</tool_call>a', "a", None, [G]),
        # after the arguments: other keys, a bracket too few, more text
        ('<tool_call>{"name": "g", "arguments": {}, "x": ["}"]}</tool_call>\na', "a", None, [G]),
        (f"{SHORT}\n{CALL}", SHORT, None, [F]),
        (f"{SHORT}</tool_call>a", f"{SHORT}</tool_call>a", None, []),
        ('<think>a<tool_call>{"name": "g"}{b}</tool_call>', "{b}", "a", [G]),
        # no calls
        ('hi\n<tool_call>{"name": "f", "a', 'hi\n<tool_call>{"name": "f", "a', None, []),
        ("a\n<tool_call> is a mark\n", "a\n<tool_call> is a mark\n", None, []),
        (f"{CALL} and more", " and more", None, [F]),
    ],
)
def test_tool_calls_of_a_text(
    text: str, content: str | None, reasoning: str | None, calls: list[dict[str, str]]
) -> None:
    found = whole(Reader(AUTO, True), text)
    assert (found["content"], found.get("reasoning_content")) == (content, reasoning)
    assert found.get("reasoning") == reasoning and found.get("tool_calls", []) == calls
    only_first = whole(Reader(ToolUse({}, "auto", is_parallel=False), True), text)
    assert only_first.get("tool_calls", []) == calls[:1]


@pytest.mark.parametrize(
    ("text", "end", "reasoning", "content"),
    [
        ("<think>\nab\n</think>c", "", "ab", "c"),
        ("\n<think>\na</think>b", "<think>\n", "a", "b"),  # written again
        ("\na <think></think>b", "<think>so", "\na <think>", "b"),  # within a thought
        ("ab</think>c</think>", "<think>", "ab", "c</think>"),
        ("ab</thin", "<think>", "ab</thin", None),
        ("a\n", "</think>\n\n", None, "a\n"),
        (f"ab{CALL}</think>c", "<think>", "ab", "c"),
        ("ab<tool_call>x</think>c", "<think>", "ab<tool_call>x", "c"),
    ],
)
@pytest.mark.parametrize("shows", [True, False])
def test_a_thought_that_the_prompt_may_have_opened_is_found(
    text: str, end: str, reasoning: str | None, content: str | None, shows: bool
) -> None:
    """Whether or not it is shown."""
    found = whole(Reader(AUTO, True, shows), text, end)
    expected = (reasoning, content) if shows else (None, content or "")
    assert (found.get("reasoning"), found["content"]) == expected


MARK_IDS = {"<think>": 1, "</think>": 2}


@pytest.mark.parametrize(
    ("ids", "end", "num"),
    [
        ([1, 97, 98, 2, 99], "", 2),
        ([97, 98, 2, 99, 2], "<think>", 2),
        ([97, 98], "<think>", 2),  # it has not ended
        ([97, 98], "", 0),
    ],
)
def test_the_tokens_of_a_thought_are_counted(ids: list[int], end: str, num: int) -> None:
    """Whether or not it is shown, and wherever a stream is cut."""
    backend = SimpleNamespace(token_to_id=MARK_IDS.get)
    tokenizer: Any = SimpleNamespace(backend=backend)
    texts = {number: mark for mark, number in MARK_IDS.items()}
    for size, shows in (1, True), (3, False), (100, True):
        one = Answer("chat", "m", tokenizer, GenerateBody(), SamplingParams())
        one.reader = Reader(AUTO, True, shows)
        one.prompt_end = end
        one.chunks(0, RequestDelta("x", prompt_token_ids=[5]))
        for i in range(0, len(ids), size):
            new = ids[i : i + size]
            text = "".join(texts.get(one_id) or chr(one_id) for one_id in new)
            reason = "stop" if i + size >= len(ids) else None
            one.chunks(0, RequestDelta("x", {0: CompletionDelta(0, text, new, None, reason)}))
        details = one.usage_chunk()["usage"]["completion_tokens_details"]
        assert details == {"reasoning_tokens": num}


# -- over HTTP


@pytest.mark.parametrize(("choice", "is_parallel"), [("required", True), (NAMED, False)])
def test_a_forced_call_has_the_schema_of_its_function(
    server: Running, choice: Any, is_parallel: bool
) -> None:
    """The model and its template know nothing of tools: the grammar alone forces the calls."""
    chat = {"model": MODEL, "messages": MESSAGES, "tools": TOOLS, "max_tokens": 120}
    chat |= {"tool_choice": choice, "parallel_tool_calls": is_parallel, "temperature": 1.0}
    # As agents send: a stop string that does not occur, and a format, which the tools replace.
    chat |= {"stop": ["\nObservation:"], "response_format": FORMAT, "seed": 1}
    reason = "stop" if choice == NAMED else "tool_calls"
    chats = server.chats()
    whole = chats.create(**chat)
    message = whole.choices[0].message
    assert whole.choices[0].finish_reason == reason and message.content is None
    assert len(message.tool_calls) == 1 or is_parallel
    functions = [call.function for call in message.tool_calls]
    for function in functions:
        assert choice == "required" or function.name == "home.switch"
        jsonschema.validate(json.loads(function.arguments), SCHEMAS[function.name])
    with chats.stream(**chat) as events:
        final = events.get_final_completion().choices[0]
    streamed = [(call.function.name, call.function.arguments) for call in final.message.tool_calls]
    assert streamed == [(one.name, one.arguments) for one in functions]
    assert final.finish_reason == reason
    # A stop string cuts the arguments, which are then not valid JSON.
    chat |= {"stop": ["unit"], "temperature": 0, "tools": TOOLS[1:]}
    cut = chats.create(**chat).choices[0]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", "unit")
    if choice == "required":
        assert cut.message.content.endswith('{"') and not cut.message.tool_calls
    else:
        assert cut.message.tool_calls[0].function.arguments == '{"'


@pytest.mark.parametrize(("reason", "end"), [("stop", "tool_calls"), ("length", "length")])
def test_calls_are_found_in_a_text(
    hermes: Running, monkeypatch: pytest.MonkeyPatch, reason: str, end: str
) -> None:
    says(hermes, monkeypatch, f"<think>\nab\n</think>\n\nhi\n{CALL}\n{CALL}", reason)
    chat: Any = {"model": MODEL, "messages": MESSAGES, "tools": TOOLS}
    chat |= {"extra_body": {"structured_outputs": {"regex": "x"}}}
    chats = hermes.chats()
    whole = chats.create(**chat)
    message = whole.choices[0].message
    assert (whole.choices[0].finish_reason, message.content) == (end, "hi")
    assert message.reasoning_content == message.reasoning == "ab"
    assert [call.function.model_dump() for call in message.tool_calls] == [F, F]
    assert all(re.fullmatch("[0-9A-Za-z]{9}", call.id) for call in message.tool_calls), "Mistral's"
    with chats.stream(**chat) as events:
        choices = [event.chunk.choices[0] for event in events if event.type == "chunk"]
    assert [choice.finish_reason for choice in choices] == [None] * (len(choices) - 1) + [end]
    (second,) = [c for one in choices for c in one.delta.tool_calls or () if c.index == 1]
    assert (second.type, second.function.model_dump()) == ("function", F)
    for fields in {"tools": TOOLS, "tool_choice": "none"}, {}:
        message = chats.create(model=MODEL, messages=MESSAGES, **fields).choices[0].message
        assert (message.content, message.tool_calls) == (f"hi\n{CALL}\n{CALL}", None)
    _, answer = hermes.post(PATH, {"messages": MESSAGES, "include_reasoning": False})
    assert answer["choices"][0]["message"].keys() == {"role", "refusal", "content"}
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0, "marks are texts"


def test_histories_and_tools_reach_the_template(hermes: Running) -> None:
    """Trap 98: what is no JSON of an object is {}, as in vLLM."""
    wrong: list[Any] = ["", "null", "{", '{"x": 1}{"y": 2}', "[" * 9999, '{"x": "a\nb"}']
    wrong += ['{"x": "\\ud800"}', f'{{"x": {"9" * 9999}}}', None, [{"x": 1}], 1.5]
    right: list[Any] = [('{"x": 1, "y": "z"}', " x=1 y=z"), ({"x": 1}, " x=1")]
    for arguments, shown in right + [(one, "") for one in wrong]:
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        said = {"role": "assistant", "content": None, "reasoning": "why", "tool_calls": [call]}
        messages = [*MESSAGES, said, {"role": "tool", "tool_call_id": "1", "content": "9"}]
        chat = {"messages": messages, "tools": TOOLS, "enable_thinking": False}
        text = hermes.llm.tokenizer.decode(hermes.post("/tokenize", chat)[1]["tokens"])
        tools, _, call_text = text.partition(" as <tool_call>")
        assert json.loads(tools) == TOOLS
        answer = f"assistant:<think>why</think><tool_call>f{shown}"
        assert call_text.endswith(f"user:x{answer}tool:9<think>\n\n</think>"), arguments


def test_marks_that_are_special_tokens_are_not_skipped(
    hermes: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested = says(hermes, monkeypatch, "x")
    chat = hermes.app.state.server.chat
    for hides_marks in (False, True):
        monkeypatch.setitem(vars(chat), "hides_marks", hides_marks)
        hermes.chats().create(model=MODEL, messages=MESSAGES, tools=TOOLS)
        assert requested[-1].skip_special_tokens is not hides_marks
    marks: Any = SimpleNamespace(source=None, special_ids=frozenset({7}))
    for mark in "<tool_call>", "</think>", "other":
        marks.backend = SimpleNamespace(token_to_id={mark: 7}.get)
        assert ChatPrompts(marks).hides_marks == (mark != "other")
