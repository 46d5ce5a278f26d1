"""What a request may ask for besides how its tokens are drawn: its text, its log-probabilities, a
shorter prompt, no cache, its turn, a salt; and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from common.llm import LLM, SamplingParams
from common.tests.engine_oracle import Oracle, checked_engine, finish, greedy_params
from common.tests.model_cases import reference_logits


def test_what_of_a_text_is_shown() -> None:
    llm = LLM(dtype="float64", num_blocks=400, block_size=4, check_invariants=True)
    prompt = "def area(width, height):\n    return"
    params = replace(greedy_params(9), logprobs=0)

    def generate(params: SamplingParams):
        return llm.generate([prompt], params, use_tqdm=False)[0].outputs[0]

    plain = generate(params)
    decode = llm.engine.tokenizer.decode
    with_stop = dict[str, Any]()
    with_stop["include_stop_str_in_output"] = True
    stop_id = plain.token_ids[2]
    stop = plain.text[5:8]
    tokens = plain.token_ids
    until = plain.text.index(stop)
    rows: list[tuple[dict[str, Any], str, object]] = [
        ({"detokenize": False}, "", None),
        ({"stop": ["never there", stop]}, plain.text[:until], stop),
        ({"stop": stop} | with_stop, plain.text[: until + 3], stop),
        ({"stop_token_ids": [stop_id]}, decode(tokens[:2]), stop_id),
        ({"stop_token_ids": [stop_id]} | with_stop, decode(tokens[:3]), stop_id),
    ]
    for fields, text, stop_reason in rows:
        found = generate(asked := replace(params, **fields))
        assert (found.text, found.stop_reason) == (text, stop_reason), fields
        assert found.token_ids == tokens[: len(found.logprobs)]
        assert "".join(llm.stream(prompt, asked)) == text


def test_log_probabilities_of_all_tokens_and_their_sum(oracle: Oracle, loaded) -> None:
    """Beside a request that wants two, in one batch."""
    prompt = oracle.prompts[3]
    tokens = oracle.expected(3, 6)
    (logits,) = reference_logits(oracle.path, torch.float64, [prompt + tokens])
    expected = logits[len(prompt) - 1 : -1].log_softmax(-1)
    engine = checked_engine(loaded, num_blocks=200)
    params = [replace(greedy_params(6), logprobs=k) for k in (-1, 2, None)]
    every, two, none = engine.generate_batch([prompt] * 3, params).values()
    for entry, other, row in zip(every.outputs[0].logprobs, two.outputs[0].logprobs, expected):
        assert [entry.top[t] for t in range(97)] == pytest.approx(row.tolist(), abs=1e-9)
        assert list(entry.top.values()) == sorted(entry.top.values(), reverse=True)
        # What a row has beside it may round its sums otherwise.
        assert other.top == pytest.approx(dict(list(entry.top.items())[:2]), abs=1e-12)
    total = sum(float(row[t]) for t, row in zip(tokens, expected))
    for output in (every, two):
        assert output.outputs[0].cumulative_logprob == pytest.approx(total, abs=1e-9)
    assert none.outputs[0].cumulative_logprob is None and total < -1


def test_a_prompt_is_cut_from_the_left_and_an_output_fills_the_room(oracle: Oracle, loaded) -> None:
    """Trap 83: without `max_tokens`, -1 keeps one token less than the model has room for."""
    speculative = {"method": "ngram"}
    engine = checked_engine(loaded, num_blocks=200, max_model_len=40, speculative=speculative)
    prompt = oracle.prompts[3]
    plain = greedy_params(1)
    rows = [(1, 10, 1), (5, 10, 5), (1000, 10, 17), (-1, 10, 30), (-1, None, 39), (None, None, 17)]
    for most, max_tokens, num_kept in rows:
        given = prompt * 9 if most == -1 else prompt
        room = 40 - num_kept
        asked = replace(plain, max_tokens=max_tokens, truncate_prompt_tokens=most)
        same = replace(plain, max_tokens=min(room, max_tokens or room))
        output, whole = engine.generate_batch([given, given[-num_kept:]], [asked, same]).values()
        assert output.prompt_token_ids == whole.prompt_token_ids
        assert output.outputs[0].token_ids == whole.outputs[0].token_ids
        assert len(whole.outputs[0].token_ids) == same.max_tokens
        reason = "max_model_len=40" if max_tokens is None else None
        assert output.metrics.finish_detail == reason


# -- the cache

CACHES = [{"prefix_cache": "hash"}, {"prefix_cache": "radix"}, {"scheduler": "fcfs"}]


@pytest.mark.parametrize("config", CACHES, ids=str)
def test_who_reads_no_cache_computes_all_and_others_find_it(config, oracle, loaded) -> None:
    """And waits for nobody who computes the same."""
    engine = checked_engine(loaded, num_blocks=200, block_size=4, **config)
    started = {}
    prompt = oracle.prompts[5]
    num_found = (len(oracle.prompts[5]) - 1) // 4 * 4
    skipping = replace(greedy_params(5), skip_reading_prefix_cache=True)
    for params, num_cached in ((skipping, 0), (skipping, 0), (greedy_params(5), num_found)):
        (output,) = engine.generate_batch([prompt], params).values()
        assert output.num_cached_tokens == num_cached
        assert output.outputs[0].token_ids == oracle.expected(5, 5)
    # Who did not look has missed nothing.
    assert engine.stats().prefix_cache_hit_rate == num_found / len(prompt)
    engine.on_step = lambda r: [started.setdefault(name, r.step) for name in r.admitted]
    for i, params in enumerate((greedy_params(3), greedy_params(3), skipping)):
        engine.add_request(str(i), oracle.prompts[-1][:8], params)
    finish(engine)
    assert started["0"] == started["2"] <= started["1"]


# -- `generate`, `stream` and `add_request` take the same options


def by_add_request(llm: LLM, prompt: list[int], **options: Any) -> None:
    llm.engine.add_request("mine", prompt, greedy_params(3), **options)
    finish(llm.engine)


def by_generate(llm: LLM, prompt: list[int], **options: Any) -> None:
    llm.generate([prompt], greedy_params(3), use_tqdm=False, **options)


def by_stream(llm: LLM, prompt: list[int], **options: Any) -> None:
    for _ in llm.stream(prompt, greedy_params(3), **options):
        pass


WAYS = pytest.mark.parametrize("way", [by_add_request, by_generate, by_stream])


@pytest.fixture
def one_by_one(loaded) -> LLM:
    """One request at a time, by priority."""
    llm = LLM.__new__(LLM)
    limits = {"block_size": 4, "num_blocks": 200, "max_num_seqs": 1}
    llm.engine = checked_engine(loaded, policy="priority", **limits)
    return llm


@WAYS
def test_who_is_more_urgent_or_came_earlier_is_served_first(
    way: Callable[..., None], one_by_one: LLM, oracle
) -> None:
    engine = one_by_one.engine
    places: list[tuple[dict[str, Any], int]] = [
        ({"priority": -1}, 0),
        ({"priority": 0, "arrival_time": 15.0}, 1),
        ({}, 2),  # it comes now: long after 20 seconds of the clock that they count by
        ({"priority": 1, "arrival_time": 5}, 2),
    ]
    for options, place in places:
        order = dict[str, None]()
        engine.on_step = lambda record, order=order: order.update(record.num_scheduled_tokens)
        for name, at in (("second", 20), ("first", 10)):
            engine.add_request(name, oracle.prompts[0], greedy_params(3), arrival_time=at)
        way(one_by_one, oracle.prompts[3], **options)
        finish(engine)
        mine = next(name for name in order if name not in ("first", "second"))
        expected = ["first", "second"]
        expected.insert(place, mine)
        assert list(order) == expected


@WAYS
@pytest.mark.parametrize("salt", [None, "mine"])
def test_only_who_has_the_same_salt_finds_a_prefix(
    way: Callable[..., None], salt: str | None, one_by_one: LLM, oracle
) -> None:
    prompt = oracle.prompts[2]
    stats = one_by_one.engine.stats
    way(one_by_one, prompt, cache_salt=salt)
    by_generate(one_by_one, prompt, cache_salt="yours")
    assert stats().cached_tokens == 0
    way(one_by_one, prompt, cache_salt=salt)
    assert stats().cached_tokens == (len(prompt) - 1) // 4 * 4 > 0


# -- what is refused


@pytest.mark.check
@WAYS
def test_what_is_no_such_option_is_refused_in_a_sentence(way, one_by_one: LLM, oracle) -> None:
    wrong: dict[str, tuple] = {
        "priority": (None, True, 1.5, "high"),
        "cache_salt": ("", 5, b"mine"),
        "arrival_time": ("now", math.nan, math.inf),
    }
    for field, values in wrong.items():
        for value in values:
            with pytest.raises(ValueError, match=f"^{field} must be .*, got {value!r}"):
                way(one_by_one, oracle.prompts[0], **{field: value})
    assert not one_by_one.engine.has_unfinished_requests()


WRONG: dict[str, tuple] = {
    "truncate_prompt_tokens": (0, -2, 1.5, "3", True),
    "skip_reading_prefix_cache": (2, "yes", 0),
    "detokenize": (None, 1),
    "n": (16_385, 10**400),
    "include_stop_str_in_output": (None, "yes"),
    "prompt_logprobs": (-2, 1.5, True, "1"),
    "stop": (5,),
    "stop_token_ids": (5, [97]),
    "min_p": (True,),
    "bad_words": (["word"], [[1.5]]),
    "allowed_token_ids": ([97],),
    "logit_bias": ({-1: 2.0},),
}
AT_ODDS = [
    (dict(allowed_token_ids=[4, 3], stop_token_ids=[3, 4], min_tokens=2), "^min_tokens must"),
    (dict(stop_token_ids=range(97), min_tokens=2), r"^min_tokens must be 0 .*, got 2"),
    (dict(prompt_logprobs=1, skip_reading_prefix_cache=False), "^skip_reading_prefix_cache"),
    (dict(stop="x", detokenize=False), r"^stop must .*detokenize=True, got \('x',\)"),
    (dict(stop="x"), "^stop "),  # there is no tokenizer
    (dict(max_tokens=40, truncate_prompt_tokens=-1), "max_tokens must .*max_model_len=40 .* 40"),
    (dict(max_tokens=None, min_tokens=41), r"min_tokens must be <= max_tokens \(\d+\), got 41"),
    (dict(grammar="a", structured_outputs="a"), "structured_outputs must .*grammar.*, got 'a'"),
]


@pytest.mark.check
def test_what_is_no_such_field_or_contradicts_another_is_refused_in_a_sentence(loaded) -> None:
    engine = checked_engine(loaded, num_blocks=200, max_model_len=40)
    for field, values in WRONG.items():
        for value in values:
            with pytest.raises(ValueError, match=f"^{field} must be [^\n]*$") as error:
                engine.add_request("a", [1, 2], SamplingParams(**{field: value}))
            assert str(error.value).rpartition(" got ")[2].partition(":")[0] in repr(value)
    for fields, why in AT_ODDS:
        with pytest.raises(ValueError, match=why):
            engine.add_request("a", [1, 2], SamplingParams(**fields))
    assert not engine.has_unfinished_requests()
    wanted = {"choice": ["yes", "no"]}
    assert SamplingParams(structured_outputs=wanted) == SamplingParams(grammar=wanted)
