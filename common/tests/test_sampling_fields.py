"""What a request may ask for besides how its tokens are drawn: its text, its log-probabilities, a
shorter prompt, no cache."""

from __future__ import annotations

from dataclasses import replace

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
    without, wanted = decode(plain.token_ids[:2]), decode(plain.token_ids[:3])
    assert stop not in plain.token_ids[:2] and without != wanted
    params = replace(greedy_params(9), stop_token_ids=[stop])
    with_it = replace(params, include_stop_str_in_output=True)
    ended = generate(llm, PROMPT, params)
    assert ended.text == without and ended.token_ids == plain.token_ids[:3]
    assert (ended.finish_reason, ended.stop_reason) == ("stop", stop)
    found = generate(llm, PROMPT, with_it)
    assert found.text == wanted and found.stop_reason == stop
    assert "".join(llm.stream(PROMPT, with_it)) == found.text


def test_who_wants_no_text_gets_none_and_the_same_tokens(llm: LLM) -> None:
    params = replace(greedy_params(9), logprobs=0)
    found = generate(llm, PROMPT, replace(params, detokenize=False))
    assert found.text == "" and found == replace(generate(llm, PROMPT, params), text="")
    assert list(llm.stream(PROMPT, replace(params, detokenize=False))) == []


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


def test_without_max_tokens_an_output_is_as_long_as_there_is_room(oracle: Oracle, loaded) -> None:
    """Trap 83. -1 then keeps one token less than the model has room for, and is
    refused where an explicit `max_tokens` leaves no room for the prompt."""
    engine = checked_engine(loaded, num_blocks=200, max_model_len=40)
    prompt, params = oracle.prompts[3], replace(greedy_params(1), max_tokens=None)
    for method in (None, "ngram"):
        if method is not None:
            engine = checked_engine(
                loaded, num_blocks=200, max_model_len=40, speculative={"method": method}
            )
        (output,) = engine.generate_batch([prompt], params).values()
        assert output.outputs[0].token_ids == oracle.expected(3, 40)[: 40 - len(prompt)]
        assert output.outputs[0].finish_reason == "length"
        assert output.metrics.finish_detail == "max_model_len=40"
    cut = replace(params, truncate_prompt_tokens=-1)
    (output,) = engine.generate_batch([prompt * 9], cut).values()
    assert output.prompt_token_ids == (prompt * 9)[-39:]
    assert len(output.outputs[0].token_ids) == 1
    for most in (40, 41, 10**6):
        with pytest.raises(ValueError, match=f"max_tokens must .*max_model_len=40 .*, got {most}"):
            engine.add_request("a", prompt, replace(cut, max_tokens=most))
    with pytest.raises(ValueError, match=r"min_tokens must be <= max_tokens \(40\), got 41"):
        engine.add_request("a", prompt, replace(params, min_tokens=41))
    with pytest.raises(ValueError, match="max_tokens must be an integer, got None"):
        Request("a", [1], params)


CACHES = [{"prefix_cache": "hash"}, {"prefix_cache": "radix"}, {"scheduler": "fcfs"}]


@pytest.mark.parametrize("config", CACHES, ids=str)
def test_who_reads_no_cache_computes_all_and_others_find_it(config, oracle, loaded) -> None:
    engine = checked_engine(loaded, num_blocks=200, block_size=4, **config)
    prompt, num_found = oracle.prompts[5], (len(oracle.prompts[5]) - 1) // 4 * 4
    skipping = replace(greedy_params(5), skip_reading_prefix_cache=True)
    for params, num_cached in ((skipping, 0), (skipping, 0), (greedy_params(5), num_found)):
        (output,) = engine.generate_batch([prompt], params).values()
        assert output.num_cached_tokens == num_cached
        assert output.outputs[0].token_ids == oracle.expected(5, 5)
    stats = engine.stats()
    assert stats.cached_tokens == num_found > 0
    assert stats.recent_prefix_cache_hit_rate == num_found / len(
        prompt
    )  # who did not look: no miss


def test_who_reads_no_cache_waits_for_nobody(oracle: Oracle, loaded) -> None:
    engine = checked_engine(loaded, num_blocks=200, block_size=4, max_num_batched_tokens=16)
    skipping = replace(greedy_params(3), skip_reading_prefix_cache=True)
    started: dict[str, int] = {}
    engine.on_step = lambda r: [started.setdefault(name, r.step) for name in r.admitted]
    for i, params in enumerate((greedy_params(3), greedy_params(3), skipping)):
        engine.add_request(str(i), oracle.prompts[-1][:8], params)
    finish(engine)
    assert started["0"] == started["2"] < started["1"]


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


def test_structured_outputs_is_another_name_of_grammar() -> None:
    wanted = {"choice": ["yes", "no"]}
    params = SamplingParams(structured_outputs=wanted)
    assert params == SamplingParams(grammar=wanted) == replace(params)
    with pytest.raises(ValueError, match=r"structured_outputs must .*grammar.*, got {'choice'"):
        SamplingParams(grammar=wanted, structured_outputs=wanted)
