"""Requests: what is refused, and when they stop."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from request import Request, SamplingParams

NAN = math.nan
INF = math.inf


def make(prompt=(1, 2, 3), eos=(), **params) -> Request:
    return Request("r", prompt, SamplingParams(temperature=0, **params), eos_token_ids=eos)


@pytest.mark.net
@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("n", v) for v in (0, -1, 1.0, True, "1", None)),
        *(("temperature", v) for v in (-0.1, NAN, INF, "hot", None, True)),
        *(("top_k", v) for v in (-2, 1.5, None, True)),
        *(("top_p", v) for v in (0.0, -0.1, 1.0001, NAN, None)),
        *(("min_p", v) for v in (-0.1, 1.1, NAN)),
        *(("repetition_penalty", v) for v in (0.0, -1.0, 5e-324, 1e300, INF, NAN)),
        *(("presence_penalty", v) for v in (-2.1, 2.1, NAN)),
        *(("frequency_penalty", v) for v in (-2.1, 2.1, NAN)),
        *(("seed", v) for v in (1.5, "7", 2**63, True)),
        *(("max_tokens", v) for v in (0, -1, 2.0)),
        *(("min_tokens", v) for v in (-1, 17, None)),  # 17 > max_tokens, which is 16
        *(("stop", v) for v in ("", ["a", ""], [3])),
        *(("stop_token_ids", v) for v in ([-1], [1.5], ["a"], [True])),
        *(("ignore_eos", v) for v in (1, None)),
        *(("logprobs", v) for v in (-2, 1.5)),
        *(("skip_special_tokens", v) for v in (0, "yes")),
    ],
)
def test_a_bad_parameter_is_named_with_its_value(name, value):
    with pytest.raises(ValueError, match=rf"^{name} must be ") as error:
        SamplingParams(**{name: value})
    shown = value[0] if isinstance(value, list) else value
    assert repr(shown) in str(error.value)


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"temperature": 0, "is_greedy": True}, {}),  # Trap 45
        ({"temperature": 1e-9, "is_greedy": False}, {}),
        ({"temperature": 100.0, "top_p": 1.0, "min_p": 0.0, "logprobs": 0}, {}),
        ({"top_p": 1e-6, "min_p": 1.0, "logprobs": -1, "repetition_penalty": 0.1}, {}),
        ({"presence_penalty": -2.0, "frequency_penalty": 2.0}, {}),
        ({"max_tokens": 1, "min_tokens": 1, "seed": -(2**63)}, {}),
        ({"max_tokens": None, "min_tokens": 99, "seed": 2**63 - 1}, {}),
        ({"top_k": np.int64(3), "temperature": np.float32(0.5), "seed": -2}, {}),
        ({"top_k": -1, "seed": np.int64(-1)}, {"top_k": 0, "seed": None}),  # as in vLLM
        ({"stop": "end", "stop_token_ids": [5]}, {"stop": ("end",), "stop_token_ids": (5,)}),
        ({"stop": ["a", "b"], "stop_token_ids": None}, {"stop": ("a", "b"), "stop_token_ids": ()}),
    ],
)
def test_what_is_allowed_and_what_becomes_of_it(params, kept):
    made = SamplingParams(**{k: v for k, v in params.items() if k != "is_greedy"})
    assert all(getattr(made, name) == value for name, value in (params | kept).items())


EOS = [40, 41, 42]  # Trap 49: every one of them stops
ENDINGS = {  # parameters, the tokens that it takes, why it ends
    "max_tokens caps": ({"max_tokens": 3}, [7, 7, 7], "length", None),
    "the first eos": ({}, [7, 40], "stop", None),
    "the last eos": ({}, [7, 42], "stop", None),
    "a stop token is named": ({"stop_token_ids": [8, 9]}, [7, 9], "stop", 9),
    "eos ignored": ({"ignore_eos": True, "max_tokens": 4}, [40, 41, 7, 40], "length", None),
    "stops at eos": ({"ignore_eos": True, "stop_token_ids": [40]}, [41, 7, 40], "stop", 40),
    "before min_tokens": ({"min_tokens": 3, "stop_token_ids": [9]}, [40, 9, 40], "stop", None),
    "at min_tokens": ({"min_tokens": 1}, [41], "stop", None),
    "after min_tokens": ({"min_tokens": 2, "max_tokens": 4}, [40, 7, 7, 7], "length", None),
    "it ends below min_tokens": ({"min_tokens": 4, "max_tokens": 2}, [40, 7], "length", None),
    "eos at the last place": ({"max_tokens": 2}, [7, 40], "stop", None),
}


@pytest.mark.net
@pytest.mark.parametrize("ending", ENDINGS.values(), ids=ENDINGS)
def test_when_a_request_ends(ending):
    params, tokens, reason, stop_reason = ending
    request = make(eos=EOS, **{**params, "max_tokens": 16})
    request.max_tokens = params.get("max_tokens", 16)  # as a scheduler lowers it
    for token in tokens:
        assert not request.is_finished
        request.append_output_token(token)
        request.check_invariants()
    assert request.all_token_ids == [1, 2, 3, *tokens]
    assert (request.finish_reason, request.stop_reason) == (reason, stop_reason)
    with pytest.raises(AssertionError, match="finished"):
        request.append_output_token(7)


def test_a_request_owns_its_lists_and_has_the_posts_names():
    prompt = list(range(20))
    request = Request.from_tokens("r", prompt, max_new_tokens=3, priority=2, arrival_time=5.0)
    request.append_output_token(3)
    prompt.append(99)
    assert request.prompt_token_ids == [*range(20)] and request.output_token_ids == [3]
    assert (request.num_prompt_tokens, request.num_tokens, request.max_num_tokens) == (20, 21, 23)
    assert (request.priority, request.arrival_time) == (2, 5.0)


@pytest.mark.parametrize("params", [None, {"max_tokens": 3}, 16])
def test_a_request_without_prompt_or_sampling_params_is_refused(params):
    """For example, someone may type the posts' `Request("a", [1, 2, 3], 16)`."""
    message = rf"^sampling_params must .*, got {re.escape(repr(params))}"
    with pytest.raises(ValueError, match=message):
        Request("a", [1, 2, 3], params)
    with pytest.raises(ValueError, match=r"'r'.*prompt_token_ids must not be empty"):
        make(prompt=())
