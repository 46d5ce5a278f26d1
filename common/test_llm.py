"""The public call: order, seeds, streams, samples, stop conditions, and two engines in one
process."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
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


@pytest.mark.sample(dtype=1)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_seeded_output_does_not_depend_on_batch_mates_or_arrival(
    dtype: str, request: pytest.FixtureRequest
) -> None:
    llm = request.getfixturevalue("llm" if dtype == "float32" else "float64_llm")
    params = SamplingParams(temperature=1.0, seed=42, max_tokens=24, ignore_eos=True)
    (alone,) = generate(llm, "def ", params)
    mates = [SamplingParams(temperature=0.7, max_tokens=5 + i) for i in range(9)]
    crowd = generate(llm, ["def "] * 10, [*mates[:6], params, *mates[6:]])
    assert crowd[6].outputs[0].token_ids == alone.outputs[0].token_ids
    options = dict(dtype=dtype, num_blocks=400, block_size=7, shuffle_batch=True)
    shuffled, ids = LLM(llm.engine.config.model, **options), alone.prompt_token_ids
    again = generate(shuffled, [ids] * 10, [*mates[:2], params, *mates[2:]])
    assert again[2].outputs[0].token_ids == alone.outputs[0].token_ids
    other = SamplingParams(temperature=1.0, seed=43, max_tokens=24, ignore_eos=True)
    assert generate(llm, "def ", other)[0].outputs[0].token_ids != alone.outputs[0].token_ids


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
    for params in (
        SamplingParams(temperature=0, max_tokens=40),
        SamplingParams(temperature=1.0, seed=3, max_tokens=40, stop=["self", "\n\n"]),
    ):
        pieces = list(llm.stream("class Queue:", params))
        (output,) = generate(llm, "class Queue:", params)
        assert "".join(pieces) == output.outputs[0].text
        assert all(pieces)
    stream = llm.stream("class Queue:", params)
    got = next(stream)
    generate(llm, "class B", SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    assert got + "".join(stream) == output.outputs[0].text, "steps of another call have ended it"


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
        (request_id,) = llm.engine._groups
        llm.engine.abort_request(request_id)
    else:
        stream.close()
    got += "".join(stream)
    assert whole.outputs[0].text.startswith(got)
    assert len(got) < len(whole.outputs[0].text)
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


def test_requests_without_parameters_take_those_of_the_models_makers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(SHIPPED_DRAFT, tmp_path, dirs_exist_ok=True)
    recommended = {"temperature": 0, "top_p": None, "top_k": 1, "max_new_tokens": 5}
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps(recommended | {"do_sample": True}))
    caplog.set_level("INFO")
    with_file, without = (
        LLM(tmp_path, num_blocks=40, generation_config=name) for name in ("auto", "vllm")
    )
    expected = SamplingParams(temperature=0, top_k=1, max_tokens=5)
    assert with_file.get_default_sampling_params() == expected
    assert "'max_tokens': 5" in caplog.text
    assert without.get_default_sampling_params() == SamplingParams()
    assert LLM(SHIPPED_DRAFT, num_blocks=40).get_default_sampling_params() == SamplingParams()
    greedy = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    (best,) = generate(with_file, "def ", greedy)
    for params in None, [expected]:
        (output,) = generate(with_file, "def ", params)
        assert output.outputs[0].token_ids == best.outputs[0].token_ids
    assert "".join(with_file.stream("def ")) == best.outputs[0].text
    group = with_file.engine.add_request("x", "def ")
    with_file.engine.step()
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


def test_an_engine_takes_the_memory_that_it_writes_and_no_more() -> None:
    """A default one reserves room for 256 of the longest requests: 3 GiB. Nothing at its start may
    read or write that. What the process imports is 0.2 GiB."""
    script = """if True:
        import gc
        import psutil
        from common.llm import LLM, SamplingParams
        llm = LLM()
        llm.generate("def f(x):", SamplingParams(max_tokens=3), use_tqdm=False)
        kv_cache = llm.engine.kv_cache
        reserved = kv_cache.num_blocks * kv_cache.kv_bytes_per_block
        assert gc.get_freeze_count() == 0 and gc.get_threshold() == (700, 10, 10), "not ours"
        print(reserved, psutil.Process().memory_info().rss)"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    reserved, resident = map(int, done.stdout.split())
    assert resident < 1 << 30, f"{resident:,} bytes are in memory, {reserved:,} reserved"


def test_a_chat_is_the_prompt_that_the_template_writes_and_nothing_is_added(llm: LLM) -> None:
    """Trap: a template writes the BOS, and encoding would add another."""
    template = "<|endoftext|>{% for m in messages %}{{ m.content }}\n{% endfor %}"
    message, greedy = {"role": "user", "content": "def f(x):"}, SamplingParams(temperature=0)
    tokenizer = llm.engine.tokenizer
    assert tokenizer is not None
    ids = tokenizer.encode("<|endoftext|>def f(x):\n", add_special_tokens=False)
    expected = generate(llm, [ids, ids], greedy)
    chats = [[message], [message]]
    answers = llm.chat(chats, greedy, use_tqdm=False, chat_template=template)
    assert [a.prompt_token_ids for a in answers] == [ids, ids]
    assert [a.outputs[0].text for a in answers] == [e.outputs[0].text for e in expected]
    (answer,) = llm.chat([message], greedy, use_tqdm=False, chat_template=template)
    assert answer.outputs[0].text == expected[0].outputs[0].text
    for chosen, words in ((None, "the model has none"), ("{{ messages.x.y }}", "be rendered")):
        with pytest.raises(ValueError, match=words):
            llm.chat([message], greedy, chat_template=chosen)
