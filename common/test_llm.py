"""The public call: order, seeds, streams, samples, stop conditions, and two engines in one
process."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from common.engine_config import SHIPPED_DRAFT
from common.llm import LLM, SamplingParams
from common.tests.engine_oracle import Oracle


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(SHIPPED_DRAFT, dtype="float32", num_blocks=400, block_size=4, check_invariants=True)


@pytest.fixture(scope="module")
def float64_llm() -> LLM:
    return LLM(dtype="float64", num_blocks=400, check_invariants=True)


def generate(llm: LLM, prompts: object, params: object) -> list:
    return llm.generate(prompts, params, use_tqdm=False)


def test_outputs_are_in_the_order_given_whatever_their_length(
    float64_llm: LLM, shipped_oracle: Oracle
) -> None:
    lengths = [20, 1, 9, 3, 24, 2, 5, 7]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
    outputs = generate(float64_llm, shipped_oracle.prompts, params)
    expected = [shipped_oracle.expected(i, n) for i, n in enumerate(lengths)]
    assert [o.outputs[0].token_ids for o in outputs] == expected
    assert [o.prompt_token_ids for o in outputs] == shipped_oracle.prompts


def test_seeded_output_does_not_depend_on_batch_mates_or_arrival(float64_llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=42, max_tokens=24, ignore_eos=True)
    mates = [SamplingParams(temperature=0.7, max_tokens=5 + i) for i in range(9)]
    other = LLM(dtype="float64", num_blocks=400, block_size=7, shuffle_batch=True)
    found = set[tuple[int, ...]]()
    for llm, place in ((float64_llm, 0), (float64_llm, 6), (other, 2)):
        crowd = [*mates[:place], params, *mates[place : place * 2]]
        outputs = generate(llm, ["def "] * len(crowd), crowd)
        found.add(tuple(outputs[place].outputs[0].token_ids))
    assert len(found) == 1
    (another,) = generate(other, "def ", replace(params, seed=43))
    assert tuple(another.outputs[0].token_ids) not in found


def test_engine_seed_repeats_unseeded_requests_and_another_seed_does_not() -> None:
    def run(seed: int) -> list:
        llm = LLM(SHIPPED_DRAFT, dtype="float32", num_blocks=400, seed=seed)
        outputs = generate(llm, ["x = "] * 3, SamplingParams(max_tokens=12, ignore_eos=True))
        return [o.outputs[0].token_ids for o in outputs]

    first = run(0)
    assert len({tuple(ids) for ids in first}) == 3, "requests of one engine draw differently"
    assert run(0) == first
    assert run(1) != first


def test_joined_stream_is_the_generated_text(llm: LLM) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=40)
    seeded = SamplingParams(temperature=1.0, seed=3, max_tokens=40, stop=["self", "\n\n"])
    for params in (greedy, seeded):
        (output,) = generate(llm, "class Queue:", params)
        stream = llm.stream("class Queue:", params)
        pieces = [next(stream)]
        generate(llm, "class B", greedy)  # its steps do not end the stream
        pieces += stream
        assert "".join(pieces) == output.outputs[0].text and all(pieces)


@pytest.mark.parametrize("ends", ["leaving it", "abort_request", "close"])
def test_a_stream_whose_request_is_ended_ends_with_what_it_has(ends: str) -> None:
    llm = LLM(SHIPPED_DRAFT, dtype="float32", num_blocks=400, block_size=4, check_invariants=True)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    (whole,) = generate(llm, "def a(", params)
    stream = llm.stream("def a(", params)
    got = next(stream) + next(stream)
    if ends == "close":
        llm.close()
    elif ends == "abort_request":
        llm.engine.abort_request(*llm.engine._groups)
    else:
        stream.close()
    got += "".join(stream)
    assert whole.outputs[0].text.startswith(got) and len(got) < len(whole.outputs[0].text)
    assert not llm.engine.has_unfinished_requests(), "the stream was told: no step need be"
    assert llm.engine.stats().kv_blocks_in_use == 0


def test_two_engines_in_one_process_share_nothing() -> None:
    """Trap 50."""
    small = LLM(SHIPPED_DRAFT, dtype="float32", num_blocks=50, block_size=2)
    large = LLM(SHIPPED_DRAFT, dtype="float32", num_blocks=60, block_size=16)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    pieces = list(zip(small.stream("def a", params), large.stream("def a", params), strict=True))
    texts = {"".join(text) for text in zip(*pieces)}
    assert texts == {generate(large, "def a", params)[0].outputs[0].text}
    assert small.engine.stats().num_finished == 1 and small.engine.config.block_size == 2


def test_requests_without_parameters_take_those_of_the_models_makers(tmp_path: Path) -> None:
    shutil.copytree(SHIPPED_DRAFT, tmp_path, dirs_exist_ok=True)
    recommended = {"temperature": 0, "top_p": None, "top_k": 1, "max_new_tokens": 5}
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps(recommended | {"do_sample": True}))
    with_file, without = (
        LLM(tmp_path, num_blocks=40, generation_config=name) for name in ("auto", "vllm")
    )
    expected = SamplingParams(temperature=0, top_k=1, max_tokens=5)
    assert with_file.get_default_sampling_params() == expected
    assert without.get_default_sampling_params() == SamplingParams()
    (best,) = generate(with_file, "def ", replace(expected, ignore_eos=True))
    for params in None, [expected]:
        (output,) = generate(with_file, "def ", params)
        assert output.outputs[0].token_ids == best.outputs[0].token_ids
    assert "".join(with_file.stream("def ")) == best.outputs[0].text
    group = with_file.engine.add_request("x", "def ")
    assert group.sequences[0].request.sampling_params.top_k == 1
    (output,) = generate(with_file, "def ", SamplingParams(ignore_eos=True))  # nothing is taken
    assert len(output.outputs[0].token_ids) == 16
    file.write_text('{"min_p": "x"}')
    with pytest.raises(ValueError, match=r"generation_config\.json: min_p must be .*got 'x'"):
        LLM(tmp_path, num_blocks=40).get_default_sampling_params()
    with pytest.raises(ValueError, match="generation_config must be 'auto' or 'vllm', got 'x'"):
        LLM(tmp_path, generation_config="x")


def test_unknown_argument_and_wrong_number_of_params_are_named(llm: LLM) -> None:
    with pytest.raises(ValueError, match="blocksize"):
        LLM(blocksize=16)
    with pytest.raises(ValueError, match=r"prompt contains '\\ud800'"):
        generate(llm, "a\ud800b", SamplingParams())
    with pytest.raises(ValueError, match="got 2"):
        generate(llm, ["a", "b", "c"], [SamplingParams(), SamplingParams()])
    assert generate(llm, [], SamplingParams()) == []


def test_a_chat_is_the_prompt_that_the_template_writes_and_nothing_is_added(llm: LLM) -> None:
    """Trap: a template writes the BOS, and encoding would add another."""
    template = "<|endoftext|>{% for m in messages %}{{ m.content }}\n{% endfor %}"
    message = {"role": "user", "content": "def f(x):"}
    greedy = SamplingParams(temperature=0)
    tokenizer = llm.engine.tokenizer
    assert tokenizer is not None
    ids = tokenizer.encode("<|endoftext|>def f(x):\n", add_special_tokens=False)
    (expected,) = generate(llm, [ids], greedy)
    for chats in ([message], [[message], [message]]):
        for answer in llm.chat(chats, greedy, use_tqdm=False, chat_template=template):
            assert answer.prompt_token_ids == ids
            assert answer.outputs[0].text == expected.outputs[0].text
    for chosen, words in ((None, "template"), ("{{ messages.x.y }}", "be rendered")):
        with pytest.raises(ValueError, match=words):
            llm.chat([message], greedy, chat_template=chosen)
