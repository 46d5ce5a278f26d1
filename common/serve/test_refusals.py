"""The bodies that the server refuses: one table, each with the field that its error names."""

from __future__ import annotations

import inspect
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from schemathesis.specs.openapi import checks as openapi_checks
from transformers import PreTrainedTokenizerBase

from common.serve.conftest import Running
from common.serve.errors import api_error
from common.serve.wire import MAX_BIASES, MAX_LOGPROBS, MAX_N, MAX_PROMPTS, NO_VARIABLES

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = {"role": "user", "content": "x"}
# A valid body for each route.
VALID: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "x", "max_tokens": 2},
    CHAT: {"messages": [USER], "max_tokens": 2},
    f"{COMPLETIONS}/render": {"prompt": "x"},
    f"{CHAT}/render": {"messages": [USER]},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [5]},
    "/v1/load_lora_adapter": {"lora_name": "a", "lora_path": "x"},
    "/v1/unload_lora_adapter": {"lora_name": "a"},
}
HUGE = 10**400
FORM = {"type": "json_object"}
TOO_MANY_BIASES = {str(i): 1 for i in range(MAX_BIASES + 1)}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
FORCED = {"tools": [TOOL], "tool_choice": "required"}
ARGUMENTS = ("tokenize", "conversation", "messages", "add_generation_prompt")
IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}


def nested(depth: int, around: tuple[str, str] = ("[", "]")) -> Any:
    return json.loads(around[0] * depth + around[1] * depth)


# Values that are refused, by field: on both routes, on completions, on chats.
GENERATION: dict[str, list[Any]] = {
    "temperature": [-1, "1", HUGE],
    "top_p": [HUGE],
    "min_p": [HUGE],
    "repetition_penalty": [5e-324, 1e300],
    "seed": [HUGE],
    "n": [0, -1, MAX_N + 1, HUGE],
    "max_tokens": [0, -1, 1.5, "1", True],
    "min_tokens": [-1],
    "prompt_logprobs": [-1, MAX_LOGPROBS + 1],
    "stop": [["x"] * 1025, [""], [5], "", 5],
    "stop_token_ids": ["1", [2**70], [10**6]],
    "bad_words": [["x"] * 1025, "x"],
    "logit_bias": ["1", {"x": 1}, {"-1": 1}, {"5": HUGE}, {str(2**70): 1}, TOO_MANY_BIASES],
    "allowed_token_ids": [[]],
    "cache_salt": [""],
    "stream": ["1"],
    "stream_options": [{"include_usage": True}, 4.0],  # without a stream
    "structured_outputs": [
        *({"regex": "("}, {"x": 1}),
        *(
            {"json": wrong}
            for wrong in (1, {"$ref": "#/nowhere"}, {"type": "no"}, {"enum": [HUGE]})
        ),
        {"json": {"oneOf": [{"const": 1}, {"enum": 5}]}},
        {"json": {"allOf": 5, "oneOf": [{"const": 1}, {"enum": [2]}]}},
        {"json": nested(400, ('{"a":[', "]}"))},
    ],
    "response_format": [
        *({"type": "xml"}, {"type": "json_schema"}, {}, 1.5),
        {"type": "xml", "json_schema": {"schema": {}}},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}},
    ],
    "guided_json": [{}],
}
ONLY_COMPLETIONS: dict[str, list[Any]] = {
    "prompt": [
        *("", [], [[]], [-1], [True], ["x", ""], ["a", 5], None, {"a": 1}, "\ud800"),
        *(["x"] * (MAX_PROMPTS + 1), [None] * 300_000, [2**40], [[2**70]], [HUGE], [5] * 65),
        *("x " * 5000, nested(900)),
    ],
    "logprobs": [-1, MAX_LOGPROBS + 1, True],
    "suffix": ["x"],
}
ONLY_CHAT: dict[str, list[Any]] = {
    "messages": [
        *([], ["x"], "x", [{}], [{"content": "x"}], [{"role": "\ud800", "content": {}}]),
        *([{"role": role, "content": "x"}] for role in ("", 5)),
        *([USER | {"content": text}] for text in (3, [IMAGE], [5], [{"text": 1}], nested(300))),
        *([USER | {"content": text}] for text in ("\ud800", "x " * 5000)),
        *([USER | {"tool_calls": calls}] for calls in (5, [1], [{}], [{"function": {}}])),
    ],
    "top_logprobs": [3, MAX_LOGPROBS + 1],  # without `logprobs`
    "max_completion_tokens": [0],
    "tools": [[{}], {}, [5]],
}
# In a chat in which a call is required.
WITH_TOOLS: dict[str, list[Any]] = {
    "tool_choice": [
        *("any", 5, {"type": "function"}, {"type": "allowed_tools"}),
        {"type": "function", "function": {"name": "g"}},
        *({"function": function} for function in ("f", {}, {"name": ["f"]})),
        {"type": "custom", "function": {"name": "f"}},
    ],
    "tools": [
        *([TOOL, TOOL], [{"type": "custom", "custom": {"name": "f"}}]),
        *([{"function": function}] for function in ({}, {"name": 'a"b'})),
        *(
            [{"function": {"name": "f", "parameters": schema}}]
            for schema in (
                *(5, {"type": "array"}, {"$ref": "#/$defs/Missing"}),
                *({"properties": {"x": {"type": "nothing"}}}, {"allOf": nested(900)}),
            )
        ),
    ],
    "parallel_tool_calls": ["yes"],
}
# Fields that exclude each other, and bodies of other routes: with the field that is named, or with
# the beginning of the message: the field, the wrong item, and what is wrong with it.
LOOKAHEAD = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=x)"}}}
LOOKING = FORCED | {"tools": [{"function": {"name": "f", "parameters": LOOKAHEAD}}]}
NO_VARIABLE = "chat_template_kwargs: must have variables of"
WIDE = {"prompt": [[5] * 60] * 14, "n": MAX_N}
OTHERS: list[tuple[str, dict[str, Any], str | None]] = [
    (COMPLETIONS, {"prompt": [1, "a"]}, "prompt.1: Input should be a valid integer (in a list[int"),
    (COMPLETIONS, {"prompt": ["a", 1]}, "prompt.1: Input should be a valid string (in a list[str"),
    (COMPLETIONS, {"prompt": [[1], [2, -1]]}, "prompt.1.1: Input should be greater than or equal"),
    (COMPLETIONS, {"structured_outputs": {"choice": []}}, "structured_outputs: choice must be"),
    (COMPLETIONS, {"structured_outputs": {"regex": "("}}, "structured_outputs: cannot compile"),
    (CHAT, LOOKING, "tools: can"),
    (CHAT, {"max_tokens": None, "max_completion_tokens": 0}, "max_completion_tokens must be"),
    *((CHAT, {"chat_template_kwargs": {"x": 1, name: 1}}, NO_VARIABLE) for name in ARGUMENTS),
    # trap 87: what would take too long
    (COMPLETIONS, {"bad_words": ["y" * 65_000, "z" * 600]}, "bad_words"),
    (COMPLETIONS, {"stop": "y" * 65_537}, "stop"),
    (COMPLETIONS, {"stop_token_ids": [5] * 1025}, "stop_token_ids"),
    (COMPLETIONS, {"cache_salt": "y" * 2000}, "cache_salt"),
    (COMPLETIONS, WIDE | {"prompt": [[5, 6]] * 14, "max_tokens": 60, "logprobs": 20}, "logprobs"),
    (COMPLETIONS, WIDE | {"prompt_logprobs": 20}, "prompt_logprobs"),
    (COMPLETIONS, WIDE | {"logprobs": 20, "echo": True}, "echo"),
    (COMPLETIONS, {"prompt": [2**40], "echo": True}, "prompt"),
    (COMPLETIONS, {"prompt": ["x"] * 20, "n": MAX_N}, "n"),
    (COMPLETIONS, {"structured_outputs": {"choice": 1}}, "structured_outputs"),
    (COMPLETIONS, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    (COMPLETIONS, {"echo": True, "truncate_prompt_tokens": 5}, "echo"),
    (COMPLETIONS, {"stream": True, "stream_options": 4.0}, "stream_options"),
    (CHAT, {"logprobs": True, "top_logprobs": MAX_LOGPROBS + 1}, "top_logprobs"),
    (CHAT, {"response_format": FORM, "structured_outputs": {"regex": "x"}}, "response_format"),
    *((CHAT, FORCED | {"tools": tools}, "tool_choice") for tools in (None, [])),
    (CHAT, {"tools": [], "tool_choice": "auto"}, "tool_choice"),
    (CHAT, {"tools": [TOOL]}, "tools"),  # the template ignores them
    (CHAT, {"continue_final_message": True, "add_generation_prompt": True}, "messages"),
    (f"{COMPLETIONS}/render", {"temperature": -1}, "temperature"),
    (f"{CHAT}/render", {"temperature": -1}, "temperature"),
    ("/tokenize", {"prompt": "\ud800"}, "prompt"),
    ("/tokenize", {"prompt": None, "messages": [USER | {"content": "\ud800"}]}, "messages"),
    ("/tokenize", {"prompt": None}, None),
    ("/tokenize", {"messages": [USER]}, None),
    ("/tokenize", {"prompt": None, "messages": [USER], "tools": [{}]}, "tools"),
    *(("/detokenize", {"tokens": [token]}, "tokens") for token in (-1, 10**6, HUGE)),
    *(("/v1/load_lora_adapter", {name: ""}, name) for name in ("lora_name", "lora_path")),
    ("/v1/load_lora_adapter", {"lora_name": "tiny"}, "lora_name"),
    ("/v1/load_lora_adapter", {"lora_path": "x" * 5000}, "lora_path"),
    ("/v1/load_lora_adapter", {"lora_path": "\0"}, None),
]
FIELDS = {"message", "type", "param", "code"}
# Bodies other than a JSON object.
BYTES = [b"", b"\xff", b"\0", b"1", b"9" * 100_000, b'"x"', b"4.0", b"{", b"[1,2]", b"[" * 100_000]
BYTES += [b'{"prompt":"x","seed":%b}' % (b"9" * 5000)]
BYTES += [b'{"prompt":"x","y":%b%b}' % (b"[" * 30_000, b"]" * 30_000)]


STRINGS = (b'"x"', rb'"\\"', rb'"\\\""')  # with one and two escaped characters
# What is only large is taken.
LARGE_ONES: list[dict[str, Any]] = [
    *({"top_k": HUGE}, {"max_tokens": HUGE}, {"priority": HUGE}, {"prompt": [5] * 63}),
    {"stop_token_ids": [*range(1000)]},
    {"prompt": [5] * 99, "truncate_prompt_tokens": 9},
    {"top_k": HUGE, "min_tokens": HUGE, "max_tokens": HUGE, "seed": 2**62, "stop": "e"},
    {"prompt": [[i, 5] for i in range(6)], "n": 2, "max_tokens": 60, "logprobs": 20},
    {"bad_words": ["y" * 65_000]},
]


def refusals() -> Iterator[tuple[str, Any, int, str | None]]:
    """Yield path, body, status and the field that the error names, or its message's beginning."""
    for path, more, fields in (
        (COMPLETIONS, {}, GENERATION | ONLY_COMPLETIONS),
        (CHAT, {}, GENERATION | ONLY_CHAT),
        (CHAT, FORCED, WITH_TOOLS),
    ):
        for name, values in fields.items():
            yield from ((path, VALID[path] | more | {name: value}, 400, name) for value in values)
    for path, fields, name in OTHERS:
        yield path, VALID[path] | fields, 400, name
    yield from ((COMPLETIONS, body, 400, None) for body in BYTES)
    for number in b"NaN", b"1e999":
        yield COMPLETIONS, b'{"prompt":"x","temperature":%b}' % number, 400, "temperature"
    for path in list(VALID)[:6]:
        for model in "gpt-4", "\ud800":
            yield path, VALID[path] | {"model": model}, 404, "model"
    for string in STRINGS:
        for num, status in (60_000, 200), (66_000, 413):
            strings = b",".join([string] * num)
            yield COMPLETIONS, b'{"prompt":"x","max_tokens":1,"y":[%b]}' % strings, status, None
    yield from ((COMPLETIONS, VALID[COMPLETIONS] | fields, 200, None) for fields in LARGE_ONES)
    yield "/v1/nothing", {}, 404, None
    yield "/v1/embeddings", {"input": "x"}, 404, None
    yield "/v1/models", {}, 405, None


def test_a_wrong_body_is_refused(short: Running, caplog: pytest.LogCaptureFixture) -> None:
    """Within five seconds, without a traceback, and no request is left in the engine."""
    wrong = []
    for path, body, status, says in refusals():
        begin = time.process_time()
        found, headers, content = short.request("POST", path, body)
        is_json = headers["content-type"] == "application/json"
        error = json.loads(content).get("error", {}) if is_json else {}
        took_s, shown = time.process_time() - begin, (path, str(body)[-150:], content[:300])
        name = says and re.split("[ :.]", says)[0]
        is_right = (found, error.get("param")) == (status, name) and took_s < 5
        is_right &= says == name or error["message"].startswith(says)
        if not is_right or set(error) != (set() if status == 200 else FIELDS):
            wrong.append((status, says, found, took_s, *shown))
    assert not wrong, "\n".join(map(str, wrong))
    assert "Traceback" not in caplog.text and short.is_idle()


def test_no_argument_of_the_renderer_is_a_variable_of_templates() -> None:
    arguments = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters.keys()
    assert arguments - NO_VARIABLES == {"documents", "tools", "kwargs"}


def test_no_error_names_a_file_of_the_server(
    short: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert api_error(ValueError("the prompt has 5"), {"prompt"}).param is None, "nor a field"
    text = lambda: Path("/a/folder/of/the/server").read_text()  # noqa: E731
    monkeypatch.setattr(short.app.state.server.metrics, "text", text)
    status, _, content = short.request("GET", "/metrics")
    message = json.loads(content)["error"]["message"]
    assert status == 500 and message == "the server has failed: FileNotFoundError"
    root = short.app.state.server.config.adapter_root
    (root / "other").mkdir()
    (root / "other" / "adapter_model.safetensors").write_bytes(b"none")
    for config in ("{", '{"peft_type": "IA3"}', '{"peft_type": "LORA", "target_modules": 5}'):
        (root / "other" / "adapter_config.json").write_text(config)
        for path in ("other", "./other", "nowhere", "../other", str(root.parent)):
            body = {"lora_name": "a", "lora_path": path}
            status, answer = short.post("/v1/load_lora_adapter", body)
            error = answer["error"]
            assert status == {"./other": 400, "other": 400, "nowhere": 404}.get(path, 403)
            assert error["param"] == "lora_path" and str(root.parent) not in error["message"]
            assert status != 400 or path in error["message"], error


# -- requests of the schema that the server shows: it never says 500, and answers as that says

CHECKS = [
    schemathesis.checks.not_a_server_error,
    openapi_checks.status_code_conformance,
    openapi_checks.content_type_conformance,
    openapi_checks.response_schema_conformance,
]
MODES = [schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE]
LARGE = pytest.mark.slow


@pytest.mark.parametrize(
    ("number", "num"), [(0, 30), *(pytest.param(i, 500, marks=LARGE) for i in range(1, 5))]
)
def test_requests_of_the_schema(short: Running, number: int, num: int) -> None:
    paths = json.loads(short.request("GET", "/openapi.json")[2])["paths"]
    answers = paths["/v1/completions"]["post"]["responses"]
    assert "text/event-stream" in answers["200"]["content"] and {"4XX", "5XX"} < answers.keys()
    assert "/events" not in paths and {"/v1/completions", "/health", "/metrics"} <= paths.keys()
    schema = schemathesis.openapi.from_url(f"{short.url}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    cases = st.one_of(*(o.as_strategy(generation_mode=m) for o in operations for m in MODES))
    checks = list(HealthCheck)

    @seed(number)
    @settings(max_examples=num, deadline=None, database=None, suppress_health_check=checks)
    @given(cases)
    def answers_well(case: Any) -> None:
        case.call_and_validate(base_url=short.url, checks=CHECKS, timeout=60)

    answers_well()
    assert short.is_idle()
