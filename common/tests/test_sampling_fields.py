"""What a request may ask for besides how its tokens are drawn: its text, its log-probabilities, a
shorter prompt, no cache, its turn, a salt; and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import Qwen3ForCausalLM

from common.engine import LLMEngine
from common.llm import LLM, SamplingParams
from common.tests.engine_oracle import Oracle, checked_engine, finish, greedy_params
from request import Request

PROMPT = "def area(width, height):\n    return"


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(dtype="float64", num_blocks=400, block_size=4, check_invariants=True)


def generate(llm: LLM, prompt: object, params: SamplingParams):
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    return output.outputs[0]


def test_a_text_ends_with_its_stop_string_where_that_is_wanted(llm: LLM) -> None:
    plain = generate(llm, PROMPT, greedy_params(20))
    stop = plain.text[5:8]
    wanted = plain.text[: plain.text.index(stop) + 3]
    params = replace(greedy_params(20), stop=stop, include_stop_str_in_output=True)
    found = generate(llm, PROMPT, params)
    assert (found.text, found.stop_reason, found.finish_reason) == (wanted, stop, "stop")
    assert "".join(llm.stream(PROMPT, params)) == wanted
    params = replace(params, stop=["never there", stop], include_stop_str_in_output=False)
    without = generate(llm, PROMPT, replace(params, logprobs=0))
    assert without.text == wanted[:-3] and without.token_ids == found.token_ids
    assert len(without.logprobs) == len(found.token_ids) < len(plain.token_ids)


def test_a_stop_token_has_text_where_that_is_wanted(llm: LLM) -> None:
    plain = generate(llm, PROMPT, greedy_params(9))
    stop, decode = plain.token_ids[2], llm.engine.tokenizer.decode
    params = replace(greedy_params(9), stop_token_ids=[stop])
    for is_wanted in (False, True):
        asked = replace(params, include_stop_str_in_output=is_wanted)
        ended = generate(llm, PROMPT, asked)
        assert ended.text == decode(plain.token_ids[: 2 + is_wanted])
        assert ended.token_ids == plain.token_ids[:3]
        assert (ended.finish_reason, ended.stop_reason) == ("stop", stop)
        assert "".join(llm.stream(PROMPT, asked)) == ended.text


def test_who_wants_no_text_gets_none_and_the_same_tokens(llm: LLM) -> None:
    params = replace(greedy_params(9), logprobs=0)
    found = generate(llm, PROMPT, replace(params, detokenize=False))
    assert found.text == "" and found == replace(generate(llm, PROMPT, params), text="")
    assert list(llm.stream(PROMPT, replace(params, detokenize=False))) == []
    with pytest.raises(ValueError, match=r"^stop must .*detokenize=True, got \('x',\)"):
        generate(llm, PROMPT, SamplingParams(stop="x", detokenize=False))


def test_log_probabilities_of_all_tokens_and_their_sum(oracle: Oracle, loaded) -> None:
    """Beside a request that wants two, in one batch."""
    model = Qwen3ForCausalLM.from_pretrained(oracle.path, dtype=torch.float64).eval()
    prompt, tokens = oracle.prompts[3], oracle.expected(3, 6)
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1)
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


def test_a_prompt_is_cut_from_the_left(oracle: Oracle, loaded) -> None:
    engine = checked_engine(loaded, num_blocks=200, max_model_len=40)
    prompt = oracle.prompts[3]
    for most, num_kept in ((1, 1), (5, 5), (1000, len(prompt)), (-1, 30)):
        params = replace(greedy_params(10), truncate_prompt_tokens=most)
        given = prompt * 9 if most == -1 else prompt
        (output,) = engine.generate_batch([given], params).values()
        kept = given[-num_kept:]
        (same,) = engine.generate_batch([kept], greedy_params(10)).values()
        assert output.prompt_token_ids == kept
        assert output.outputs[0].token_ids == same.outputs[0].token_ids
        assert len(output.outputs[0].token_ids) == min(10, 40 - num_kept)


@pytest.mark.parametrize("speculative", [None, {"method": "ngram"}])
def test_without_max_tokens_an_output_is_as_long_as_there_is_room(
    speculative, oracle: Oracle, loaded
) -> None:
    """Trap 83. -1 then keeps one token less than the model has room for, and is
    refused where an explicit `max_tokens` leaves no room for the prompt."""
    how = dict(num_blocks=200, max_model_len=40, speculative=speculative)
    engine = checked_engine(loaded, **how)
    prompt, params = oracle.prompts[3], replace(greedy_params(1), max_tokens=None)
    (output,) = engine.generate_batch([prompt], params).values()
    assert output.outputs[0].token_ids == oracle.expected(3, 40)[: 40 - len(prompt)]
    assert output.outputs[0].finish_reason == "length"
    assert output.metrics.finish_detail == "max_model_len=40"
    cut = replace(params, truncate_prompt_tokens=-1)
    (output,) = engine.generate_batch([prompt * 9], cut).values()
    assert output.prompt_token_ids == (prompt * 9)[-39:]
    assert len(output.outputs[0].token_ids) == 1
    with pytest.raises(ValueError, match=r"max_tokens must .*max_model_len=40 .*, got 40"):
        engine.add_request("a", prompt, replace(cut, max_tokens=40))
    with pytest.raises(ValueError, match=r"min_tokens must be <= max_tokens \(40\), got 41"):
        engine.add_request("a", prompt, replace(params, min_tokens=41))
    with pytest.raises(ValueError, match="max_tokens must be an integer, got None"):
        Request("a", [1], params)


# -- the cache

CACHES = [{"prefix_cache": "hash"}, {"prefix_cache": "radix"}, {"scheduler": "fcfs"}]


@pytest.mark.parametrize("config", CACHES, ids=str)
def test_who_reads_no_cache_computes_all_and_others_find_it(config, oracle, loaded) -> None:
    """And waits for nobody who computes the same."""
    engine, started = checked_engine(loaded, num_blocks=200, block_size=4, **config), {}
    prompt, num_found = oracle.prompts[5], (len(oracle.prompts[5]) - 1) // 4 * 4
    skipping = replace(greedy_params(5), skip_reading_prefix_cache=True)
    for params, num_cached in ((skipping, 0), (skipping, 0), (greedy_params(5), num_found)):
        (output,) = engine.generate_batch([prompt], params).values()
        assert output.num_cached_tokens == num_cached
        assert output.outputs[0].token_ids == oracle.expected(5, 5)
    stats = engine.stats()
    assert stats.cached_tokens == num_found > 0
    # Who did not look has missed nothing.
    assert stats.recent_prefix_cache_hit_rate == num_found / len(prompt)
    engine.on_step = lambda r: [started.setdefault(name, r.step) for name in r.admitted]
    for i, params in enumerate((greedy_params(3), greedy_params(3), skipping)):
        engine.add_request(str(i), oracle.prompts[-1][:8], params)
    finish(engine)
    assert started["0"] == started["2"] <= started["1"]
    engine.reset_stats()
    assert engine.stats().recent_prompt_throughput == 0 == engine.stats().recent_output_throughput


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
    llm, limits = LLM.__new__(LLM), {"block_size": 4, "num_blocks": 200, "max_num_seqs": 1}
    llm.engine = checked_engine(loaded, policy="priority", **limits)
    return llm


@WAYS
@pytest.mark.parametrize(
    ("options", "place"),
    [
        ({"priority": -1}, 0),
        ({"priority": 0, "arrival_time": 5}, 0),
        ({"priority": 0, "arrival_time": 15.0}, 1),
        ({}, 2),  # it comes now: long after 20 seconds of the clock that they count by
        ({"priority": 1, "arrival_time": 5}, 2),
    ],
)
def test_who_is_more_urgent_or_came_earlier_is_served_first(
    way: Callable[..., None], options: dict[str, Any], place: int, one_by_one: LLM, oracle
) -> None:
    engine, order = one_by_one.engine, dict[str, None]()
    engine.on_step = lambda record: order.update(dict.fromkeys(record.num_scheduled_tokens))
    for name, arrival_time in (("second", 20), ("first", 10)):
        engine.add_request(name, oracle.prompts[0], greedy_params(3), arrival_time=arrival_time)
    way(one_by_one, oracle.prompts[3], **options)
    finish(engine)
    mine = next(name for name in order if name not in ("first", "second"))
    assert list(order).index(mine) == place
    assert [name for name in order if name != mine] == ["first", "second"]


@WAYS
@pytest.mark.parametrize("salt", [None, "mine"])
def test_only_who_has_the_same_salt_finds_a_prefix(
    way: Callable[..., None], salt: str | None, one_by_one: LLM, oracle
) -> None:
    prompt, stats = oracle.prompts[2], one_by_one.engine.stats
    way(one_by_one, prompt, cache_salt=salt)
    by_generate(one_by_one, prompt, cache_salt="yours")
    assert stats().cached_tokens == 0
    way(one_by_one, prompt, cache_salt=salt)
    assert stats().cached_tokens == (len(prompt) - 1) // 4 * 4 > 0


# -- what is refused


@WAYS
@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("priority", value) for value in (None, True, 1.5, "high")),
        *(("cache_salt", value) for value in ("", 5, b"mine")),
        *(("arrival_time", value) for value in ("now", math.nan, math.inf, 10**400, True)),
    ],
)
def test_what_is_no_such_option_is_refused_in_a_sentence(
    way: Callable[..., None], field: str, value: object, one_by_one: LLM, oracle
) -> None:
    with pytest.raises(ValueError, match=f"^{field} must be .*, got {value!r}") as error:
        way(one_by_one, oracle.prompts[0], **{field: value})
    assert "\n" not in str(error.value)
    assert not one_by_one.engine.has_unfinished_requests()


@pytest.mark.parametrize(
    ("field", "value", "got"),
    [
        *(("truncate_prompt_tokens", v, v) for v in (0, -2, 1.5, "3", True)),
        *(("skip_reading_prefix_cache", v, v) for v in (2, "yes", 0)),
        *(("detokenize", v, v) for v in (None, 1)),
        *(("n", v, v) for v in (16_385, 10**400)),
        *(("include_stop_str_in_output", v, v) for v in (None, "yes")),
        *(("prompt_logprobs", v, v) for v in (-2, 1.5, True, "1")),
        *(("stop", 5, 5), ("stop", {"x": 1}, {"x": 1}), ("stop_token_ids", 5, 5)),
        *(("stop_token_ids", b"ab", b"ab"), ("temperature", 10**400, 10**400)),
        *(("min_p", True, True), ("bad_words", ["word"], "word"), ("bad_words", [[1.5]], 1.5)),
        *(("allowed_token_ids", [97], 97), ("logit_bias", {-1: 2.0}, -1)),
    ],
)
def test_what_is_no_such_field_is_refused_in_a_sentence(field, value, got, loaded) -> None:
    engine = LLMEngine(loaded=loaded)
    with pytest.raises(ValueError, match=f"^{field} must be .*, got .*{got!r}") as error:
        engine.add_request("a", [1, 2], SamplingParams(**{field: value}))
    assert "\n" not in str(error.value) and not engine.has_unfinished_requests()


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        (dict(allowed_token_ids=[4, 3], stop_token_ids=[3, 4], min_tokens=2), "^min_tokens must"),
        (dict(stop_token_ids=range(97), min_tokens=2), r"^min_tokens must be 0 .*, got 2"),
        (dict(prompt_logprobs=1, skip_reading_prefix_cache=False), "^skip_reading_prefix_cache"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(fields, why, loaded) -> None:
    with pytest.raises(ValueError, match=why):
        LLMEngine(loaded=loaded).add_request("a", [1, 2], SamplingParams(**fields))


def test_structured_outputs_is_another_name_of_grammar() -> None:
    wanted = {"choice": ["yes", "no"]}
    params = SamplingParams(structured_outputs=wanted)
    assert params == SamplingParams(grammar=wanted) == replace(params)
    with pytest.raises(ValueError, match=r"structured_outputs must .*grammar.*, got {'choice'"):
        SamplingParams(grammar=wanted, structured_outputs=wanted)
