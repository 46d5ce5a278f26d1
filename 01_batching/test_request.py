"""Requests: what is refused, and when they stop."""

from __future__ import annotations

import math
import re
from dataclasses import FrozenInstanceError

import numpy as np
import pytest

from request import Request, RequestStatus, SamplingParams, check_integers

NAN, INF = math.nan, math.inf


def make(prompt=(1, 2, 3), eos=(), **params) -> Request:
    return Request("r", prompt, SamplingParams(temperature=0, **params), eos_token_ids=eos)


def feed(request: Request, tokens: list[int]) -> int:
    """Append until the request is finished. Returns how many tokens it took."""
    for count, token in enumerate(tokens, start=1):
        request.append_output_token(token)
        request.check_invariants()
        if request.is_finished:
            return count
    return len(tokens)


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
    "params",
    [
        {"temperature": 0},
        {"temperature": 100.0},
        {"top_p": 1.0},
        {"top_p": 1e-6},
        {"min_p": 0.0},
        {"min_p": 1.0},
        {"presence_penalty": -2.0, "frequency_penalty": 2.0},
        {"repetition_penalty": 0.1},
        {"max_tokens": 1, "min_tokens": 1},
        {"max_tokens": None, "min_tokens": 99},
        {"seed": -(2**63)},
        {"seed": -2},
        {"seed": 2**63 - 1},
        {"logprobs": 0},
        {"logprobs": -1},
        {"top_k": np.int64(3), "temperature": np.float32(0.5)},
    ],
)
def test_the_ends_of_every_interval_are_allowed(params):
    made = SamplingParams(**params)
    assert all(getattr(made, name) == value for name, value in params.items())


def test_lists_of_stops_become_tuples_and_one_string_is_one_stop():
    params = SamplingParams(stop="end", stop_token_ids=[5, 6])
    assert params.stop == ("end",)
    assert params.stop_token_ids == (5, 6)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop=None, stop_token_ids=None) == SamplingParams()
    with pytest.raises(FrozenInstanceError):
        params.max_tokens = 3


def test_temperature_zero_is_greedy_and_stays_zero():
    """Trap 45."""
    assert SamplingParams(temperature=0).is_greedy
    assert SamplingParams(temperature=0.0).temperature == 0
    assert not SamplingParams(temperature=1e-9).is_greedy


def test_an_empty_prompt_is_an_error_that_names_the_request():
    with pytest.raises(ValueError, match=r"'r'.*prompt_token_ids must not be empty"):
        make(prompt=())


def test_a_request_owns_its_lists():
    prompt = [1, 2]
    request = make(prompt)
    request.append_output_token(3)
    prompt.append(99)
    assert request.prompt_token_ids == [1, 2]
    assert request.output_token_ids == [3]
    assert request.all_token_ids == [1, 2, 3]
    assert (request.num_prompt_tokens, request.num_output_tokens, request.num_tokens) == (2, 1, 3)
    assert request.max_num_tokens == 18
    assert request.num_computed_tokens == 0


def test_statuses_from_stopped_on_are_finished():
    request, reasons = make(), []
    for request.status in RequestStatus:
        reasons.append(request.finish_reason)
        assert request.is_finished == (request.finish_reason is not None)
    assert reasons == [None] * 5 + ["stop", "length", "abort", "error"]


def test_from_tokens_is_greedy_and_stopped_by_its_length_only():
    request = Request.from_tokens("r", [1], max_new_tokens=3, priority=2, arrival_time=5.0)
    assert request.sampling_params.is_greedy
    assert (request.priority, request.arrival_time) == (2, 5.0)
    assert feed(request, [0, 0, 0, 0]) == 3
    assert request.finish_reason == "length"


def test_max_tokens_caps_the_length():
    request = make(max_tokens=3)
    assert feed(request, [7] * 9) == 3
    assert request.status == RequestStatus.FINISHED_LENGTH_CAPPED
    assert (request.finish_reason, request.stop_reason) == ("length", None)
    lowered = make(eos=[40], max_tokens=9, min_tokens=4)
    lowered.max_tokens = 3  # as the scheduler does where the model ends sooner
    assert feed(lowered, [7, 7, 40, 7]) == 3 and lowered.finish_reason == "length"


@pytest.mark.parametrize("eos", [40, 41, 42])
def test_every_eos_id_of_the_model_stops(eos):
    """Trap 49."""
    request = make(eos=[40, 41, 42])
    assert feed(request, [7, eos, 7]) == 2
    assert request.output_token_ids == [7, eos]
    assert (request.finish_reason, request.stop_reason) == ("stop", None)


def test_a_stop_token_names_itself_and_eos_does_not():
    request = make(eos=[40], stop_token_ids=[8, 9])
    assert feed(request, [7, 9, 7]) == 2
    assert (request.finish_reason, request.stop_reason) == ("stop", 9)


def test_ignore_eos_ignores_eos_but_not_stop_tokens():
    assert feed(make(eos=[40, 41], ignore_eos=True, max_tokens=5), [40, 41, 7, 40, 41]) == 5
    request = make(eos=[40], stop_token_ids=[40], ignore_eos=True)
    assert feed(request, [7, 40, 7]) == 2
    assert request.stop_reason == 40


@pytest.mark.parametrize(("min_tokens", "expected"), [(0, 1), (1, 1), (2, 2), (3, 3), (4, 5)])
def test_nothing_stops_before_min_tokens(min_tokens, expected):
    """The stop token that is token number `min_tokens` counts; earlier ones do not."""
    request = make(eos=[40], stop_token_ids=[9], min_tokens=min_tokens)
    assert feed(request, [40, 9, 40, 7, 9, 7]) == expected
    assert request.finish_reason == "stop"


def test_a_stop_token_at_the_last_place_is_a_stop_and_not_a_length():
    request = make(eos=[40], max_tokens=2)
    assert feed(request, [7, 40]) == 2
    assert request.finish_reason == "stop"


@pytest.mark.parametrize(
    "damage",
    [
        lambda r: setattr(r, "num_computed_tokens", -1),
        lambda r: setattr(r, "num_computed_tokens", r.num_tokens + 1),
        lambda r: r.all_token_ids.append(1),
        lambda r: r.output_token_ids.append(1),
        lambda r: r.all_token_ids.__setitem__(0, 50),
        lambda r: r.all_token_ids.__setitem__(-1, 50),
        lambda r: setattr(r, "max_tokens", r.max_tokens + 1),
        lambda r: setattr(r, "max_tokens", 0),
    ],
)
def test_the_invariants_notice_damage(damage):
    request = make()
    request.append_output_token(7)
    request.check_invariants()
    damage(request)
    with pytest.raises(AssertionError):
        request.check_invariants()


@pytest.mark.parametrize(("name", "unset"), [("top_k", 0), ("seed", None)])
def test_minus_one_is_no_limit_and_no_seed_as_in_vllm(name, unset):
    for minus_one in -1, np.int64(-1):
        found = getattr(SamplingParams(**{name: minus_one}), name)
        assert (found, type(found)) == (unset, type(unset))


@pytest.mark.parametrize("params", [None, {"max_tokens": 3}, 16])
def test_a_request_without_sampling_params_is_refused_with_a_sentence(params):
    """For example, someone may type the posts' `Request("a", [1, 2, 3], 16)`."""
    with pytest.raises(
        ValueError, match=rf"^sampling_params must .*, got {re.escape(repr(params))}"
    ):
        Request("a", [1, 2, 3], params)


@pytest.mark.parametrize("value", [True, 1.0, "1", None, 1, np.int64(1)])
def test_a_value_that_is_not_an_allowed_integer_is_named(value):
    with pytest.raises(ValueError, match=rf"^b must be an integer.*{re.escape(repr(value))}"):
        check_integers(2, a=2, b=value)
    if value == 1 and type(value) not in (bool, float):
        check_integers(1, b=value)
        check_integers(b=value)


def test_the_posts_names_are_mapped_to_names_of_this_repository():
    request = make(prompt=range(20))
    request.num_computed_tokens = 3
    assert (request.seq_len, request.remaining_tokens, request.num_blocks_needed) == (20, 17, 2)


def test_a_finished_request_takes_no_more_tokens():
    request = make(max_tokens=1)
    request.append_output_token(7)
    with pytest.raises(AssertionError, match="finished"):
        request.append_output_token(7)
    assert request.all_token_ids == [1, 2, 3, 7]
