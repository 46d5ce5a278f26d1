"""`generate`, `stream` and `add_request` take the same options of a request, and each does what it
says: whose turn it is, what is found in the cache, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from common.llm import LLM
from common.tests.engine_oracle import checked_engine, finish, greedy_params

PARAMS = greedy_params(3)


def by_add_request(llm: LLM, prompt: list[int], **options: Any) -> None:
    llm.engine.add_request("mine", prompt, PARAMS, **options)
    finish(llm.engine)


def by_generate(llm: LLM, prompt: list[int], **options: Any) -> None:
    llm.generate([prompt], PARAMS, use_tqdm=False, **options)


def by_stream(llm: LLM, prompt: list[int], **options: Any) -> None:
    for _ in llm.stream(prompt, PARAMS, **options):
        pass


WAYS = [by_add_request, by_generate, by_stream]
Way = Callable[..., None]


@pytest.fixture
def llm(loaded) -> LLM:
    """One request at a time, by priority."""
    llm = LLM.__new__(LLM)
    limits = {"block_size": 4, "num_blocks": 200, "max_num_seqs": 1}
    llm.engine = checked_engine(loaded, policy="priority", **limits)
    return llm


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("options", "place"),
    [
        ({"priority": -1}, 0),
        ({"priority": 0, "arrival_time": 5}, 0),
        ({"priority": 0, "arrival_time": 15.0}, 1),
        ({"priority": 0, "arrival_time": 25}, 2),
        ({}, 2),  # it comes now: long after 20 seconds of the clock that they count by
        ({"priority": 1, "arrival_time": 5}, 2),
    ],
)
def test_who_is_more_urgent_or_came_earlier_is_served_first(
    way: Way, options: dict[str, Any], place: int, llm: LLM, oracle
) -> None:
    engine, order = llm.engine, dict[str, None]()
    engine.on_step = lambda record: order.update(dict.fromkeys(record.num_scheduled_tokens))
    for name, arrival_time in (("second", 20), ("first", 10)):
        engine.add_request(name, oracle.prompts[0], PARAMS, arrival_time=arrival_time)
    way(llm, oracle.prompts[3], **options)
    finish(engine)
    mine = next(name for name in order if name not in ("first", "second"))
    assert list(order).index(mine) == place
    assert [name for name in order if name != mine] == ["first", "second"]


@pytest.mark.parametrize("again", WAYS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("salt", [None, "mine"])
def test_only_who_has_the_same_salt_finds_a_prefix(
    way: Way, again: Way, salt: str | None, llm: LLM, oracle
) -> None:
    prompt, stats = oracle.prompts[2], llm.engine.stats
    way(llm, prompt, cache_salt=salt)
    again(llm, prompt, cache_salt="yours")
    assert stats().cached_tokens == 0
    again(llm, prompt, cache_salt=salt)
    assert stats().cached_tokens == (len(prompt) - 1) // 4 * 4 > 0


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("priority", None),
        ("priority", True),
        ("priority", 1.5),
        ("priority", "high"),
        ("cache_salt", ""),
        ("cache_salt", 5),
        ("cache_salt", b"mine"),
        ("arrival_time", "now"),
        ("arrival_time", math.nan),
        ("arrival_time", math.inf),
        ("arrival_time", 10**400),
        ("arrival_time", True),
    ],
)
def test_what_is_no_such_option_is_refused_in_a_sentence(
    way: Way, field: str, value: object, llm: LLM, oracle
) -> None:
    with pytest.raises(ValueError, match=f"^{field} must be .*, got {value!r}") as error:
        way(llm, oracle.prompts[0], **{field: value})
    assert "\n" not in str(error.value)
    assert not llm.engine.has_unfinished_requests()
    by_generate(llm, oracle.prompts[0])
