"""Fields of a request body and their engine parameters, and the bodies that the server refuses: one
table, each with the field that its error names."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from schemathesis.specs.openapi import checks as openapi_checks

from common.serve import wire
from common.serve.conftest import Running
from common.serve.errors import ApiError, api_error
from common.serve.wire import MAX_BIASES, MAX_LOGPROBS, MAX_N, MAX_PROMPTS, ChatBody, CompletionBody
from grammars import Json
from request import SamplingParams

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = {"role": "user", "content": "x"}

# Fields of vLLM's requests at `002032ee2b` that are not declared here.
VLLM = {
    *("ec_transfer_params", "kv_transfer_params", "length_penalty", "logprob_token_ids", "user"),
    *("prompt_embeds", "repetition_detection", "return_mm_kwargs", "return_token_offsets"),
    *("routed_experts_prompt_start", "session_id", "spaces_between_special_tokens", "suffix"),
    *("stream_interval", "thinking_token_budget", "truncation_side", "use_beam_search"),
    *("vllm_xargs", "watermarking", "chat_template", "media_io_kwargs", "mm_processor_kwargs"),
    "return_prompt_text",
}
# Those that change no answer: of accounts, images, experts, beams and chunks.
HARMLESS = {
    *("user", "safety_identifier", "session_id", "metadata", "store", "service_tier"),
    *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "kv_transfer_params"),
    *("ec_transfer_params", "media_io_kwargs", "mm_processor_kwargs", "return_mm_kwargs"),
    *("routed_experts_prompt_start", "length_penalty", "stream_interval"),
    "spaces_between_special_tokens",
}
# For each field that can be refused: a value that is, then those that change no answer.
FLAGS = ("use_beam_search", "watermarking", "return_token_offsets", "return_prompt_text", "echo")
TEXTS = ("chat_template", "prompt_embeds", "guided_regex", "guided_grammar")
OBJECTS = ("audio", "prediction", "web_search_options", "guided_json")
REFUSED: dict[str, list[Any]] = {
    **{name: [True, False] for name in FLAGS},
    **{name: ["x"] for name in TEXTS},
    **{name: [{}] for name in OBJECTS},
    "functions": [[{}], []],
    "function_call": [{"name": "f"}, "none"],
    "modalities": [["audio"], ["text"]],
    "verbosity": ["low", "medium"],
    "moderation": [{"model": "x"}],
    "suffix": ["x", ""],
    "best_of": [2, 1],
    "truncation_side": ["right", "left"],
    "thinking_token_budget": [9, -1],
    "logprob_token_ids": [[5], []],
    "repetition_detection": [{"max_pattern_size": 3, "min_count": 2}, {}],
    "vllm_xargs": [{"x": 1}, {}],
    "guided_choice": [["x"]],
}


def completion(**fields: Any) -> SamplingParams:
    body = CompletionBody.model_validate({"prompt": "x"} | fields)
    body.prompts()
    return body.params({})


def chat(**fields: Any) -> SamplingParams:
    return ChatBody.model_validate({"messages": [USER]} | fields).params({})


def refused(make: Any, **fields: Any) -> str | None:
    """The field that is named; None if it is taken."""
    try:
        make(**fields)
    except ValidationError as error:
        return str(error.errors()[0]["loc"][0])
    except ApiError as error:
        assert error.status == 400 and (error.param or "-") in error.message
        return error.param
    return None


@pytest.mark.parametrize("name", wire.NOT_BUILT)
def test_a_field_that_changes_the_answer_is_refused_by_name_and_no_other(name: str) -> None:
    refusing, *harmless = REFUSED[name]
    for make in (chat,) if name == "echo" else (chat, completion):
        assert refused(make, **{name: refusing}) == name
        assert not any(refused(make, **{name: value}) for value in (None, *harmless))


def test_every_field_of_openai_and_vllm_is_served_refused_or_harmless() -> None:
    """A field of a later version is red here until someone has decided."""
    from openai.types import completion_create_params as completions
    from openai.types.chat import completion_create_params as chats

    served = ChatBody.model_fields.keys() | CompletionBody.model_fields.keys()
    names = VLLM | chats.CompletionCreateParamsBase.__annotations__.keys()
    names |= completions.CompletionCreateParamsBase.__annotations__.keys()
    assert names - served - wire.NOT_BUILT.keys() == HARMLESS
    assert wire.NOT_BUILT.keys() - names == {n for n in wire.NOT_BUILT if n.startswith("guided")}
    assert served & wire.NOT_BUILT.keys() == {"echo"}, "which is a completion's only"


SAME = {"n": 2, "temperature": 0.5, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "seed": 4}
SAME |= {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.25}
SAME |= {"max_tokens": 7, "min_tokens": 2, "stop": ("a", "b"), "stop_token_ids": (5,)}
SAME |= {"ignore_eos": True, "skip_special_tokens": False, "include_stop_str_in_output": True}
SAME |= {"allowed_token_ids": [3, 4], "bad_words": ["w"], "prompt_logprobs": 2, "logprobs": 3}
SENT = SAME | {"stop": ["a", "b"], "stop_token_ids": [5]}
TOOLS = {"tools": [{"type": "function", "function": {"name": "f"}}]}
CALLED = TOOLS | {"tool_choice": "required"}
WHOLE = {"response_format": {"type": "json_object"}}
CHOICE = {"choice": ["a"]}
UNSET = {"structured_outputs": CHOICE | {"json": None, "regex": None, "disable_fallback": False}}
UNSET["response_format"] = {"type": "text"}


MOST = {"prompt": ["x"] * MAX_PROMPTS, "logprobs": MAX_LOGPROBS, "bad_words": ["x"] * 1024}
MOST |= {"stop": ["x"] * 1024, "temperature": 0, "max_tokens": 1}
MOST["logit_bias"] = {str(i): 1 for i in range(MAX_BIASES)}


def form(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}


@pytest.mark.parametrize(
    ("make", "sent", "expected"),
    [
        (completion, SENT | {"logit_bias": {"5": -1.5}}, SAME | {"logit_bias": {5: -1.5}}),
        (completion, dict.fromkeys(SAME), {"max_tokens": 16}),
        (completion, {"echo": True, "logprobs": 2}, {"logprobs": 2, "prompt_logprobs": 2}),
        (completion, {"echo": True, "max_tokens": 0}, {"max_tokens": 1}),  # and it is not shown
        (chat, {"logprobs": True}, {"logprobs": 0, "max_tokens": None}),
        (chat, {"logprobs": True, "top_logprobs": 3}, {"logprobs": 3}),
        (chat, {"logprobs": False, "top_logprobs": 0}, {"logprobs": None}),  # as clients send it
        (chat, {"max_tokens": 5, "max_completion_tokens": 6.0}, {"max_tokens": 6}),
        # JSON knows no difference, and some languages write whole numbers so
        (completion, {"max_tokens": 4.0, "n": 2.0}, {"max_tokens": 4, "n": 2}),
        (completion, {"stop_token_ids": [7.0], "prompt": [[1.0, 2.0]]}, {"stop_token_ids": (7,)}),
        (chat, form({"const": 4.0}), {"grammar": Json({"const": 4.0})}),
        (chat, WHOLE | TOOLS | {"tool_choice": "none"}, {"grammar": Json({"type": "object"})}),
        (chat, WHOLE | TOOLS, {"grammar": None}),
        (chat, WHOLE | CALLED, {"grammar": chat(**CALLED).grammar}),
        (chat, UNSET, {"grammar": CHOICE}),
        (chat, {"stream": True, "stream_options": {"include_usage": True}}, {}),
        # the largest values that are taken
        (completion, {"prompt": ["x"] * (MAX_PROMPTS // MAX_N), "n": MAX_N}, {"n": MAX_N}),
        (completion, MOST, {}),
    ],
)  # fmt: skip
def test_fields_are_those_of_the_engine(make: Any, sent: Any, expected: dict[str, Any]) -> None:
    params = make(**sent)
    assert {name: getattr(params, name) for name in expected} == expected


def test_what_a_models_makers_recommend_is_taken_where_nothing_is_said() -> None:
    most = {"max_tokens": 9}  # a model's max_new_tokens
    assert ChatBody(messages=[USER]).params(most).max_tokens == 9
    assert CompletionBody(prompt="x").params(most).max_tokens == 16
    body = CompletionBody(prompt="x", top_k=3, top_p=1.0, min_p=None, priority=-3, cache_salt="a")
    params = body.params({"temperature": 0.5, "top_k": 9, "top_p": 0.5})
    assert params == SamplingParams(temperature=0.5, top_k=3, top_p=1.0)
    assert body.options() == {"priority": -3, "cache_salt": "a"}


def test_an_answer_has_as_many_logprobs_as_fit():
    """Trap 87: with 131,072 positions, asking for 20 each is not refused."""
    body = ChatBody.model_validate({"messages": [USER], "logprobs": True, "top_logprobs": 20})
    params = body.params({})
    most = wire.MAX_ENTRIES // 20
    by_default = replace(params, max_tokens=131_063)  # of generation_config.json
    for one, expected in ((params, most), (replace(params, n=4), most // 4), (by_default, most)):
        assert body.within_entries([9], one).max_tokens == expected
    few = replace(params, max_tokens=8)
    assert body.within_entries([9], few) == few
    body.truncate_prompt_tokens = -1
    assert body.params({"max_tokens": 4096}).max_tokens is None


# -- bodies over HTTP

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
LONG = "y" * 200_000
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
    "temperature": [-1, "x", HUGE],
    "top_p": [HUGE],
    "min_p": [HUGE],
    "repetition_penalty": [5e-324, 1e300],
    "seed": [HUGE],
    "n": [0, -1, MAX_N + 1, HUGE],
    "max_tokens": [0, -1, 1.5, "x"],
    "min_tokens": [-1],
    "prompt_logprobs": [-1, MAX_LOGPROBS + 1],
    "stop": [["x"] * 1025, [""], [5]],
    "stop_token_ids": ["1", [2**70], [10**6]],
    "bad_words": [["x"] * 1025, "x"],
    "logit_bias": ["1", {"x": 1}, {"-1": 1}, {"5": HUGE}, {str(2**70): 1}, TOO_MANY_BIASES],
    "allowed_token_ids": [[]],
    "cache_salt": [""],
    "stream": ["x"],
    "stream_options": [{"include_usage": True}, 4.0],  # without a stream
    "structured_outputs": [
        *({"x": 1}, {"json": 1}, {"json": {"$ref": "#/nowhere"}}, {"json": {"enum": [HUGE]}}),
        {"json": {"allOf": 5, "oneOf": [{"const": 1}, {"enum": [2]}]}},
        {"json": nested(400, ('{"a":[', "]}"))},
    ],
    "response_format": [
        *({"type": "xml", "json_schema": {"schema": {}}}, {"type": "json_schema"}, {}, 1.5),
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}},
    ],
}
ONLY_COMPLETIONS: dict[str, list[Any]] = {
    "prompt": [
        *("", [], [[]], [-1], ["x", ""], ["a", 5], None, {"a": 1}, "\ud800"),
        *(["x"] * (MAX_PROMPTS + 1), [None] * 300_000, [2**40], [[2**70]], [HUGE], [5] * 64),
        *("x " * 5000, nested(900)),
    ],
    "logprobs": [-1, MAX_LOGPROBS + 1],
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
SCHEMAS = [5, {"$ref": "#/$defs/Missing"}, {"allOf": nested(900)}]
# In a chat in which a call is required.
WITH_TOOLS: dict[str, list[Any]] = {
    "tool_choice": [
        *("any", 5, {"type": "function"}, {"type": "allowed_tools"}),
        {"type": "function", "function": {"name": "g"}},
        *({"function": function} for function in ("f", {}, {"name": ["f"]})),
        {"type": "custom", "function": {"name": "f"}},
    ],
    "tools": [
        [{"type": "custom", "custom": {"name": "f"}}],
        *([{"function": function}] for function in ({}, {"name": 'a"b'})),
        *([{"function": {"name": "f", "parameters": schema}}] for schema in SCHEMAS),
    ],
    "parallel_tool_calls": ["x"],
}
# Fields that exclude each other, and bodies of other routes: with the field that is named, or with
# the beginning of the message: the field, the wrong item, and what is wrong with it.
LOOKAHEAD = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=x)"}}}
LOOKING = FORCED | {"tools": [{"function": {"name": "f", "parameters": LOOKAHEAD}}]}
WIDE = {"prompt": [[5] * 60] * 14, "n": MAX_N}
OTHERS: list[tuple[str, dict[str, Any], str | None]] = [
    (COMPLETIONS, {"structured_outputs": {"choice": []}}, "structured_outputs: choice must be"),
    (COMPLETIONS, {"structured_outputs": {"regex": "("}}, "structured_outputs: cannot compile"),
    (CHAT, LOOKING, "tools: can"),
    (CHAT, {"max_tokens": None, "max_completion_tokens": 0}, "max_completion_tokens must be"),
    *((CHAT, {"chat_template_kwargs": {"x": 1, name: 1}}, "messages") for name in ARGUMENTS),
    # trap 87: what would take too long
    (COMPLETIONS, {"prompt": LONG}, "prompt"),
    (COMPLETIONS, {"bad_words": ["y" * 65_000, "z" * 600]}, "bad_words"),
    (COMPLETIONS, {"stop": "y" * 65_537}, "stop"),
    (COMPLETIONS, {"stop_token_ids": [5] * 1025}, "stop_token_ids"),
    (COMPLETIONS, {"cache_salt": "y" * 2000}, "cache_salt"),
    (COMPLETIONS, WIDE | {"prompt_logprobs": 20}, "prompt_logprobs"),
    (COMPLETIONS, WIDE | {"logprobs": 20, "echo": True}, "echo"),
    (COMPLETIONS, {"prompt": [2**40], "echo": True}, "prompt"),
    (COMPLETIONS, {"prompt": ["x"] * 20, "n": MAX_N}, "n"),
    (COMPLETIONS, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    (COMPLETIONS, {"echo": True, "truncate_prompt_tokens": 5}, "echo"),
    (CHAT, {"logprobs": True, "top_logprobs": MAX_LOGPROBS + 1}, "top_logprobs"),
    (CHAT, {"response_format": FORM, "structured_outputs": {"regex": "x"}}, "response_format"),
    *((CHAT, FORCED | {"tools": tools}, "tool_choice") for tools in (None, [])),
    (CHAT, {"tools": [], "tool_choice": "auto"}, "tool_choice"),
    (CHAT, {"tools": [TOOL]}, "tools"),  # the template ignores them
    (CHAT, FORCED | {"tools": [TOOL, TOOL]}, "tools"),
    (CHAT, {"continue_final_message": True, "add_generation_prompt": True}, "messages"),
    *((f"{path}/render", {"temperature": -1}, "temperature") for path in (COMPLETIONS, CHAT)),
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
BYTES = [b"", b"\xff", b"9" * 100_000, b'"x"', b"{", b"[1,2]", b"[" * 100_000]
BYTES += [b'{"prompt":"x","seed":%b}' % (b"9" * 5000)]
BYTES += [b'{"prompt":"x","y":%b%b}' % (b"[" * 30_000, b"]" * 30_000)]


# What is only large is taken.
LARGE_ONES: list[dict[str, Any]] = [
    *({"priority": HUGE}, {"prompt": [5] * 63}, {"stop_token_ids": [*range(1000)]}),
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
        took_s = time.process_time() - begin
        shown = (path, str(body)[-150:], content[:300])
        name = says and re.split("[ :.]", says)[0]
        is_right = (found, error.get("param")) == (status, name) and took_s < 5
        is_right &= says == name or error["message"].startswith(says)
        if not is_right or set(error) != (set() if status == 200 else FIELDS):
            wrong.append((status, says, found, took_s, *shown))
    assert not wrong, "\n".join(map(str, wrong))
    assert "Traceback" not in caplog.text and short.is_idle()


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
]
MODES = [schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE]


@pytest.mark.parametrize("num", [30, pytest.param(2000, marks=pytest.mark.slow)])
def test_requests_of_the_schema(short: Running, num: int) -> None:
    paths = json.loads(short.request("GET", "/openapi.json")[2])["paths"]
    answers = paths[COMPLETIONS]["post"]["responses"]
    assert {"4XX", "5XX"} < answers.keys()
    assert "/events" not in paths and {COMPLETIONS, "/health", "/metrics"} <= paths.keys()
    schema = schemathesis.openapi.from_url(f"{short.url}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    cases = st.one_of(*(o.as_strategy(generation_mode=m) for o in operations for m in MODES))
    checks = list(HealthCheck)

    @seed(num)
    @settings(max_examples=num, deadline=None, database=None, suppress_health_check=checks)
    @given(cases)
    def answers_well(case: Any) -> None:
        case.call_and_validate(base_url=short.url, checks=CHECKS, timeout=60)

    answers_well()
    assert short.is_idle()
