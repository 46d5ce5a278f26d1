"""Fields of a request body and their engine parameters, without server and engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from common.serve import wire
from common.serve.errors import ApiError
from common.serve.wire import MAX_BIASES, MAX_LOGPROBS, MAX_N, MAX_PROMPTS, ChatBody, CompletionBody
from grammars import Json
from request import SamplingParams

MESSAGES = [{"role": "user", "content": "x"}]
# Fields of vLLM's requests at `002032ee2b` that are not declared here.
VLLM = {
    *("ec_transfer_params", "kv_transfer_params", "length_penalty", "logprob_token_ids", "user"),
    *("prompt_embeds", "repetition_detection", "return_mm_kwargs", "return_token_offsets"),
    *("routed_experts_prompt_start", "session_id", "spaces_between_special_tokens", "suffix"),
    *("stream_interval", "thinking_token_budget", "truncation_side", "use_beam_search"),
    *("vllm_xargs", "watermarking", "chat_template", "media_io_kwargs", "mm_processor_kwargs"),
    "return_prompt_text",
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
        assert not any(refused(make, **{name: value}) for value in (None, *harmless))
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


SAME = {"n": 2, "temperature": 0.5, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "seed": 4}
SAME |= {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.25}
SAME |= {"max_tokens": 7, "min_tokens": 2, "stop": ("a", "b"), "stop_token_ids": (5,)}
SAME |= {"ignore_eos": True, "skip_special_tokens": False, "include_stop_str_in_output": True}
SAME |= {"allowed_token_ids": [3, 4], "bad_words": ["w"], "prompt_logprobs": 2, "logprobs": 3}
SENT = SAME | {"stop": ["a", "b"], "stop_token_ids": [5]}
TOOLS = {"tools": [{"type": "function", "function": {"name": "f"}}]}
FORCED = TOOLS | {"tool_choice": "required"}
WHOLE = {"response_format": {"type": "json_object"}}
CHOICE = {"choice": ["a"]}
UNSET = {"structured_outputs": CHOICE | {"json": None, "regex": None, "disable_fallback": False}}
UNSET["response_format"] = {"type": "text"}


def form(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}


@pytest.mark.parametrize(
    ("make", "sent", "expected"),
    [
        (completion, SENT | {"logit_bias": {"5": -1.5}}, SAME | {"logit_bias": {5: -1.5}}),
        (completion, dict.fromkeys(SAME), {"max_tokens": 16}),
        (completion, {"truncate_prompt_tokens": 3}, {"truncate_prompt_tokens": 3}),
        (completion, {"echo": True, "logprobs": 2}, {"logprobs": 2, "prompt_logprobs": 2}),
        (completion, {"echo": True, "max_tokens": 0}, {"max_tokens": 1}),  # and it is not shown
        (completion, {"logprobs": 2}, {"prompt_logprobs": None}),
        (chat, {"logprobs": True}, {"logprobs": 0, "max_tokens": None}),
        (chat, {"logprobs": True, "top_logprobs": 3}, {"logprobs": 3}),
        (chat, {"logprobs": False, "top_logprobs": 0}, {"logprobs": None}),  # as clients send it
        (chat, {"max_tokens": 5, "max_completion_tokens": 6.0}, {"max_tokens": 6}),
        # JSON knows no difference, and some languages write whole numbers so
        (completion, {"max_tokens": 4.0, "n": 2.0}, {"max_tokens": 4, "n": 2}),
        (completion, {"stop_token_ids": [7.0], "seed": 5.0}, {"stop_token_ids": (7,), "seed": 5}),
        (completion, {"prompt": [[1.0, 2.0]]}, {}),
        (chat, form({"const": 4.0}), {"grammar": Json({"const": 4.0})}),
        (chat, WHOLE | TOOLS | {"tool_choice": "none"}, {"grammar": Json({"type": "object"})}),
        (chat, WHOLE | TOOLS, {"grammar": None}),
        (chat, WHOLE | FORCED, {"grammar": chat(**FORCED).grammar}),
        (chat, UNSET, {"grammar": CHOICE}),
        (chat, {"stream": True, "stream_options": {"include_usage": True}}, {}),
        # the largest values that are taken; those that are not: `test_refusals.py`
        (completion, {"prompt": ["x"] * (MAX_PROMPTS // MAX_N), "n": MAX_N}, {"n": MAX_N}),
        (completion, {"prompt": ["x"] * MAX_PROMPTS, "logprobs": MAX_LOGPROBS}, {}),
        (completion, {"prompt_logprobs": MAX_LOGPROBS, "bad_words": ["x"] * 1024}, {}),
        (completion, {"stop": ["x"] * 1024, "temperature": 0, "max_tokens": 1}, {}),
        (completion, {"logit_bias": {str(i): 1 for i in range(MAX_BIASES)}}, {}),
    ],
)  # fmt: skip
def test_fields_are_those_of_the_engine(make: Any, sent: Any, expected: dict[str, Any]) -> None:
    params = make(**sent)
    assert {name: getattr(params, name) for name in expected} == expected


def test_what_a_models_makers_recommend_is_taken_where_nothing_is_said() -> None:
    most = {"max_tokens": 9}  # a model's max_new_tokens
    assert ChatBody(messages=MESSAGES).params(most).max_tokens == 9
    assert CompletionBody(prompt="x").params(most).max_tokens == 16
    body = CompletionBody(prompt="x", top_k=3, top_p=1.0, min_p=None, priority=-3, cache_salt="a")
    params = body.params({"temperature": 0.5, "top_k": 9, "top_p": 0.5})
    assert params == SamplingParams(temperature=0.5, top_k=3, top_p=1.0)
    assert body.options() == {"priority": -3, "cache_salt": "a"}


def test_without_max_tokens_an_answer_has_as_many_logprobs_as_fit():
    """A chat names no `max_tokens`; with 131,072 positions, asking for 20 each is not refused."""
    body = ChatBody.model_validate({"messages": MESSAGES, "logprobs": True, "top_logprobs": 20})
    params, most = body.params({}), wire.MAX_ENTRIES // 20
    by_default = replace(params, max_tokens=131_063)  # of generation_config.json
    assert body.within_entries([9], params, 4096) == params
    for one, expected in ((params, most), (replace(params, n=4), most // 4), (by_default, most)):
        assert body.within_entries([9], one, 131_072).max_tokens == expected
    body.max_completion_tokens = 131_063
    with pytest.raises(ApiError, match="at most 2,000,000, got 2,621,260"):
        body.within_entries([9], by_default, 131_072)
    body.truncate_prompt_tokens = -1
    assert body.params({"max_tokens": 4096}).max_tokens == 131_063
