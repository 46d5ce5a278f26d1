"""Fields of a request body and their engine parameters, without server and engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from common.serve import wire
from common.serve.errors import ApiError
from common.serve.wire import (
    MAX_BIASES,
    MAX_LOGPROBS,
    MAX_N,
    MAX_PROMPTS,
    ChatBody,
    CompletionBody,
)
from grammars import Json
from request import SamplingParams

MESSAGES = [{"role": "user", "content": "x"}]
# Fields of vLLM's requests at `002032ee2b` that are not declared here.
VLLM = {"ec_transfer_params", "kv_transfer_params", "length_penalty", "logprob_token_ids"}
VLLM |= {"prompt_embeds", "repetition_detection", "return_mm_kwargs", "return_token_offsets"}
VLLM |= {"routed_experts_prompt_start", "session_id", "spaces_between_special_tokens", "suffix"}
VLLM |= {"stream_interval", "thinking_token_budget", "truncation_side", "use_beam_search", "user"}
VLLM |= {"vllm_xargs", "watermarking", "chat_template", "media_io_kwargs", "mm_processor_kwargs"}
VLLM |= {"return_prompt_text"}
# For each field that can be refused: a value that is, then those that change no answer.
REFUSED: dict[str, list[Any]] = {
    "functions": [[{}], []],
    "function_call": [{"name": "f"}, "none"],
    "audio": [{}],
    "modalities": [["audio"], ["text"]],
    "verbosity": ["low", "medium"],
    "prediction": [{}],
    "web_search_options": [{}],
    "moderation": [{"model": "x"}],
    "suffix": ["x", ""],
    "best_of": [2, 1],
    "use_beam_search": [True, False],
    "chat_template": ["x"],
    "prompt_embeds": ["x"],
    "truncation_side": ["right", "left"],
    "thinking_token_budget": [9, -1],
    "logprob_token_ids": [[5], []],
    "repetition_detection": [{"max_pattern_size": 3, "min_count": 2}, {}],
    "watermarking": [True, False],
    "vllm_xargs": [{"x": 1}, {}],
    "return_token_offsets": [True, False],
    "return_prompt_text": [True, False],
    "echo": [True, False],
    "guided_json": [{}],
    "guided_regex": ["x"],
    "guided_choice": [["x"]],
    "guided_grammar": ["x"],
}


def completion(**fields: Any) -> SamplingParams:
    body = CompletionBody.model_validate({"prompt": "x"} | fields)
    body.prompts()
    return body.params({})


def chat(**fields: Any) -> SamplingParams:
    return ChatBody.model_validate({"messages": MESSAGES} | fields).params({})


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
def test_a_field_that_changes_the_answer_is_refused_by_name_and_no_other(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    refusing, *harmless = REFUSED.get(name, [None, 1, "x", {}])
    for make in (chat,) if name == "echo" else (chat, completion):
        assert refused(make, **{name: refusing}) == (name if name in REFUSED else None)
        assert [refused(make, **{name: value}) for value in (None, *harmless)] == (
            [None] * (1 + len(harmless))
        )
    assert not caplog.records, "it is no unknown field"


def test_every_field_of_openai_and_vllm_is_served_refused_or_harmless() -> None:
    """A field of a later version is red here until someone has decided."""
    from openai.types import completion_create_params as completions
    from openai.types.chat import completion_create_params as chats

    served = ChatBody.model_fields.keys() | CompletionBody.model_fields.keys()
    names = VLLM | chats.CompletionCreateParamsBase.__annotations__.keys()
    names |= completions.CompletionCreateParamsBase.__annotations__.keys()
    assert names - served - wire.NOT_BUILT.keys() == set()
    assert wire.NOT_BUILT.keys() - names == {n for n in wire.NOT_BUILT if n.startswith("guided")}
    assert served & wire.NOT_BUILT.keys() == {"echo"}, "which is a completion's only"


def test_unknown_fields_are_named_once_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(wire, "_named", known := set[str]())
    for _ in range(2):
        chat(frobnicate=1)
    chat(**{"x" * 200: 1})
    named = [record.args for record in caplog.records]
    assert named == [("frobnicate",), ("x" * 200,)]
    assert max(len(r.getMessage()) for r in caplog.records) < 200
    known |= set(map(str, range(997)))
    chat(another=1)
    chat(one_too_many=1)
    assert "another" in known and len(known) == 1000, "and no more"


def test_fields_are_those_of_the_engine() -> None:
    same = {"n": 2, "temperature": 0.5, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "seed": 4}
    same |= {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.25}
    same |= {"max_tokens": 7, "min_tokens": 2, "stop": ("a", "b"), "stop_token_ids": (5,)}
    same |= {"ignore_eos": True, "skip_special_tokens": False, "include_stop_str_in_output": True}
    same |= {"allowed_token_ids": [3, 4], "bad_words": ["w"], "prompt_logprobs": 2, "logprobs": 3}
    sent = {k: list(v) if isinstance(v, tuple) else v for k, v in same.items()}
    expected = SamplingParams(**same, logit_bias={5: -1.5})
    assert completion(**sent, logit_bias={"5": -1.5}) == expected
    assert completion(truncate_prompt_tokens=3) == SamplingParams(truncate_prompt_tokens=3)
    assert completion(**dict.fromkeys(same)) == completion() == SamplingParams()
    assert completion(echo=True, logprobs=2) == SamplingParams(logprobs=2, prompt_logprobs=2)
    assert completion(echo=True, max_tokens=0).max_tokens == 1, "and it is not shown"
    assert completion(logprobs=2).prompt_logprobs is None
    assert chat(logprobs=True).logprobs == 0 and chat(logprobs=True, top_logprobs=3).logprobs == 3
    limits = [{}, {"max_tokens": 5}, {"max_completion_tokens": 6}]
    assert [chat(**limit).max_tokens for limit in limits] == [None, 5, 6]
    body, recommended = ChatBody(messages=MESSAGES), {"max_tokens": 9}  # a model's max_new_tokens
    assert (body.params(recommended).max_tokens, body.params({}).max_tokens) == (9, None)
    assert CompletionBody(prompt="x").params(recommended).max_tokens == 16
    assert chat(logprobs=False, top_logprobs=0).logprobs is None, "as clients send it"
    assert chat(max_tokens=5, max_completion_tokens=6).max_tokens == 6
    recommended = {"temperature": 0.5, "top_k": 9, "top_p": 0.5}
    expected = SamplingParams(temperature=0.5, top_k=3, top_p=1.0)
    fields: Any = {"top_k": 3, "top_p": 1.0, "min_p": None}
    assert CompletionBody(prompt="x", **fields).params(recommended) == expected
    assert ChatBody(messages=MESSAGES, **fields).params(recommended) == replace(
        expected, max_tokens=None
    )
    grammar = chat(response_format={"type": "json_schema", "json_schema": {"schema": {"a": 1}}})
    assert grammar.grammar == Json({"a": 1})
    whole = {"response_format": {"type": "json_object"}}
    assert chat(**whole).grammar == Json({"type": "object"})
    whole["tools"] = [{"type": "function", "function": {"name": "f"}}]
    assert chat(**whole, tool_choice="none").grammar == Json({"type": "object"})
    assert chat(**whole).grammar is None and chat(**whole, tool_choice="required").grammar == (
        chat(tools=whole["tools"], tool_choice="required").grammar
    )
    choice = {"choice": ["a"]}
    unset = {"json": None, "regex": None, "disable_fallback": False}
    fields = choice | unset
    assert chat(structured_outputs=fields, response_format={"type": "text"}).grammar == choice
    body = CompletionBody(prompt="x", priority=-3, cache_salt="a")
    assert body.options() == {"priority": -3, "cache_salt": "a"}


@pytest.mark.parametrize(
    ("make", "name", "taken"),
    [
        (completion, "n", [1, MAX_N]),
        (completion, "logprobs", [0, MAX_LOGPROBS]),
        (completion, "prompt_logprobs", [0, MAX_LOGPROBS]),
        (completion, "prompt", ["x", [1], [[1], [2]], ["x"] * MAX_PROMPTS]),
        (completion, "stop", ["x", ["x"] * 1024]),
        (completion, "bad_words", [["x"] * 1024]),
        (completion, "logit_bias", [{str(i): 1 for i in range(MAX_BIASES)}]),
        (completion, "temperature", [0, 2.0]),
        (completion, "max_tokens", [1]),
        (chat, "top_logprobs", [None]),
        (chat, "messages", [MESSAGES]),
        (chat, "response_format", [{"type": "text"}]),
        (chat, "stream_options", [None]),
    ],
)
def test_allowed_values_of_a_field(make: Any, name: str, taken: list) -> None:
    """Values that are refused: `test_refusals.py`."""
    for value in taken:
        assert refused(make, **{name: value}) is None, value


def test_a_whole_number_may_have_a_point() -> None:
    """JSON knows no difference, and some languages write it so."""
    fields = {"max_tokens": 4.0, "n": 2.0, "top_k": 3.0, "seed": 5.0, "stop_token_ids": [7.0]}
    params = completion(prompt=[[1.0, 2.0]], **fields)
    assert (params.max_tokens, params.n, params.top_k, params.seed) == (4, 2, 3, 5)
    assert params.stop_token_ids == (7,)
    assert CompletionBody.model_validate({"prompt": [[1.0]]}).prompt == [[1]]
    assert chat(max_completion_tokens=6.0, top_logprobs=2.0, logprobs=True).logprobs == 2
    schema = {"const": 4.0}
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    assert repr(chat(response_format=form, n=1.0).grammar) == repr(Json(schema))


def test_what_goes_together() -> None:
    assert refused(completion, prompt=["x"] * (MAX_PROMPTS // MAX_N), n=MAX_N) is None
    assert refused(chat, stream=True, stream_options={"include_usage": True}) is None


def test_without_max_tokens_an_answer_has_as_many_logprobs_as_fit():
    """A chat names no `max_tokens`; with 131,072 positions, asking for 20 each is not refused."""
    body = ChatBody.model_validate({"messages": MESSAGES, "logprobs": True, "top_logprobs": 20})
    params = body.params({})
    assert params.max_tokens is None
    assert body.within_entries([9], params, 4096) == params
    assert body.within_entries([9], params, 131_072).max_tokens == wire.MAX_ENTRIES // 20
    assert body.within_entries([9], replace(params, n=4), 131_072).max_tokens == 25_000
    by_default = replace(params, max_tokens=131_063)  # of generation_config.json
    assert body.within_entries([9], by_default, 131_072).max_tokens == wire.MAX_ENTRIES // 20
    body.max_completion_tokens = 131_063
    with pytest.raises(ApiError, match="at most 2,000,000, got 2,621,260"):
        body.within_entries([9], by_default, 131_072)
    body.truncate_prompt_tokens = -1
    assert body.params({"max_tokens": 4096}).max_tokens == 131_063
    body.max_completion_tokens = None
    assert body.params({"max_tokens": 4096}).max_tokens is None
