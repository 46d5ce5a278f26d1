"""Callers who do what nobody expects: callbacks that abort and raise, names taken twice, numbers of
NumPy, calls that are interrupted. After each the engine still serves everybody else."""

from __future__ import annotations

import gc
import random
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from bounded_loops import as_long_as
from common.engine import EngineConfig, LLMEngine
from common.llm import as_list_of_prompts
from common.models.loader import load_model
from common.requests.output_processor import RequestOutput
from common.requests.tokenizer import IncrementalDetokenizer
from common.sampling.sampler import AsyncStepOutput
from common.tests.engine_oracle import Oracle, checked_engine, finish, paged_runner
from common.tests.model_cases import tiny_config
from request import SamplingParams
from step_record import RecordedScheduler

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def make_engine(loaded, **config: object) -> LLMEngine:
    most = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 64}
    return checked_engine(loaded, **{"block_size": 4, "num_blocks": 80, **most, **config})


@pytest.fixture
def engine(random_loaded) -> LLMEngine:
    return make_engine(random_loaded)


def must_be_empty(engine: LLMEngine) -> None:
    """Nobody is left, in no part of the engine."""
    engine.step()  # tells the runner who has finished
    engine.check_invariants()
    state = paged_runner(engine).state
    assert not engine._groups and not engine._sequences
    assert not state.requests
    assert len(set(state._free_rows)) == len(state._free_rows) == len(state.num_tokens)
    assert engine.stats().kv_blocks_in_use == 0


def must_end_alone(engine: LLMEngine, request_id: str, token_ids: list[int]) -> None:
    assert finish(engine)[request_id].outputs[0].token_ids == token_ids
    must_be_empty(engine)


@pytest.mark.parametrize("when", [0, 2, 7])
def test_abort_in_on_step_ends_one_request_and_no_other(
    when: int, random_oracle: Oracle, engine: LLMEngine
) -> None:
    """Step 7 is the one in which both have just finished: there is nothing left to abort."""
    engine.on_step = lambda record: record.step == when and engine.abort_request("a")
    engine.add_request("a", random_oracle.prompts[0], GREEDY)
    engine.add_request("b", random_oracle.prompts[1], GREEDY)
    outputs = finish(engine)
    a, b = outputs["a"].outputs[0], outputs["b"].outputs[0]
    assert a.finish_reason == ("length" if when == 7 else "abort")
    assert a.token_ids == random_oracle.expected(0, when + 1)
    assert b.token_ids == random_oracle.expected(1, 8)
    must_be_empty(engine)


def test_abort_and_readd_in_on_step_does_not_mix_the_two(
    random_oracle: Oracle, engine: LLMEngine
) -> None:
    def again(record) -> None:
        if record.step == 3:
            engine.abort_request("a")
            engine.add_request("a", random_oracle.prompts[1], GREEDY)

    engine.on_step = again
    engine.add_request("a", random_oracle.prompts[0], GREEDY)
    for _ in range(3):
        engine.step()
    (aborted,) = engine.step()
    assert aborted.outputs[0].finish_reason == "abort"
    must_end_alone(engine, "a", random_oracle.expected(1, 8))


def test_generate_batch_ends_when_on_step_aborts_one_that_waits(
    random_oracle: Oracle, random_loaded
) -> None:
    engine = make_engine(random_loaded, max_num_seqs=1)

    def on_step(record) -> None:
        assert record.step < 100, "generate_batch waits for an aborted request"
        if record.step == 1:
            engine.abort_request("request-1")

    engine.on_step = on_step
    one, two = engine.generate_batch(random_oracle.prompts[:2], GREEDY).values()
    assert one.outputs[0].token_ids == random_oracle.expected(0, 8)
    assert (two.outputs[0].finish_reason, two.outputs[0].token_ids) == ("abort", [])


def test_abort_between_two_steps_is_reported_by_the_next_one_and_never_again(
    random_oracle: Oracle, engine: LLMEngine
) -> None:
    engine.add_request("a", random_oracle.prompts[0], GREEDY)
    engine.add_request("b", random_oracle.prompts[1], replace(GREEDY, n=2))
    for _ in range(3):
        engine.step()
    engine.abort_request("a")
    engine.abort_request("b")
    assert engine.has_unfinished_requests(), "a loop must come to see it"
    a, b = engine.step()
    assert (a.request_id, a.finished, a.outputs[0].finish_reason) == ("a", True, "abort")
    assert a.outputs[0].token_ids == random_oracle.expected(0, 3)
    assert (b.request_id, [c.finish_reason for c in b.outputs]) == ("b", ["abort", "abort"])
    assert not engine.has_unfinished_requests()
    assert engine.step() == []
    must_be_empty(engine)


def test_abort_is_reported_beside_a_new_request_of_the_same_name(
    random_oracle: Oracle, engine: LLMEngine
) -> None:
    engine.add_request("a", random_oracle.prompts[0], GREEDY)
    engine.step()
    engine.abort_request("a")
    engine.add_request("a", random_oracle.prompts[1], GREEDY)
    old, new = engine.step()
    assert (old.finished, old.outputs[0].token_ids) == (True, random_oracle.expected(0, 1))
    assert (new.finished, new.outputs[0].token_ids) == (False, random_oracle.expected(1, 1))
    must_end_alone(engine, "a", random_oracle.expected(1, 8))


def test_request_that_ends_during_anothers_batch_is_returned_by_the_next_step(
    random_oracle: Oracle, engine: LLMEngine
) -> None:
    engine.add_request("mine", random_oracle.prompts[2], replace(GREEDY, max_tokens=3))
    batch = engine.generate_batch(random_oracle.prompts[:2], GREEDY)
    assert [o.outputs[0].token_ids for o in batch.values()] == [
        random_oracle.expected(i, 8) for i in range(2)
    ]
    (mine,) = finish(engine).values()
    assert (mine.request_id, mine.outputs[0].token_ids) == ("mine", random_oracle.expected(2, 3))
    must_be_empty(engine)


def test_exception_in_on_step_loses_no_output(random_oracle: Oracle, engine: LLMEngine) -> None:
    def on_step(record) -> None:
        if record.finished:
            engine.on_step = None
            engine.abort_request("aborted")
            raise RuntimeError("on_step")

    engine.on_step = on_step
    engine.add_request("short", random_oracle.prompts[0], replace(GREEDY, max_tokens=2))
    engine.add_request("aborted", random_oracle.prompts[1], GREEDY)
    engine.add_request("long", random_oracle.prompts[2], GREEDY)
    engine.step()
    with pytest.raises(RuntimeError, match="on_step"):
        engine.step()
    short, aborted, long = engine.step()
    assert (short.request_id, short.finished) == ("short", True)
    assert short.outputs[0].token_ids == random_oracle.expected(0, 2)
    assert aborted.outputs[0].token_ids == random_oracle.expected(1, 2)
    assert (long.finished, long.outputs[0].token_ids) == (False, random_oracle.expected(2, 3))
    assert finish(engine).keys() == {"long"}, "each is returned once"
    must_be_empty(engine)


def test_exception_in_on_step_loses_no_request(random_oracle: Oracle, engine: LLMEngine) -> None:
    def on_step(record) -> None:
        if record.step in (1, 2):
            raise RuntimeError("on_step")

    engine.on_step = on_step
    engine.add_request("short", random_oracle.prompts[0], replace(GREEDY, max_tokens=3))
    engine.add_request("long", random_oracle.prompts[1], GREEDY)
    engine.step()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="on_step"):
            engine.step()
    assert finish(engine)["long"].outputs[0].token_ids == random_oracle.expected(1, 8)
    assert engine.stats().num_finished == 2
    must_be_empty(engine)


def test_interrupted_generate_batch_aborts_its_requests_only(
    random_oracle: Oracle, engine: LLMEngine
) -> None:
    engine.add_request("mine", random_oracle.prompts[2], GREEDY)

    def interrupt(record) -> None:
        if record.step == 2:
            raise KeyboardInterrupt

    engine.on_step = interrupt
    with pytest.raises(KeyboardInterrupt):
        engine.generate_batch(random_oracle.prompts[:2], GREEDY)
    assert list(engine._groups) == ["mine"]
    must_end_alone(engine, "mine", random_oracle.expected(2, 8))


def test_name_of_a_finished_sample_is_taken_until_its_group_ends(
    random_oracle: Oracle, random_loaded
) -> None:
    engine = make_engine(random_loaded, max_num_seqs=1)
    engine.add_request("a", random_oracle.prompts[0], replace(GREEDY, n=2))
    for _ in as_long_as(lambda: "a#0" in engine.scheduler.requests):
        engine.step()
    with pytest.raises(ValueError, match="'a#0'"):
        engine.add_request("a#0", random_oracle.prompts[1], GREEDY)
    outputs = finish(engine)["a"].outputs
    assert [c.token_ids for c in outputs] == [random_oracle.expected(0, 8)] * 2
    engine.add_request("a#0", random_oracle.prompts[1], GREEDY)
    assert finish(engine)["a#0"].outputs[0].token_ids == random_oracle.expected(1, 8)


@pytest.mark.parametrize("bad", [("b", [1000], GREEDY), ("a", [1], GREEDY), 5])
def test_refused_batch_draws_no_seed_and_queues_nothing(bad: object, random_loaded) -> None:
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    clean, tried = make_engine(random_loaded), make_engine(random_loaded)
    with pytest.raises((ValueError, TypeError)):
        tried.add_requests([("a", [1, 2], params), ("c", [1, 2], params), bad])
    assert not tried.has_unfinished_requests()
    samples = []
    for engine in (clean, tried):
        engine.add_request("x", [1, 2, 3], params)
        samples.append(finish(engine)["x"].outputs[0].token_ids)
    assert samples[0] == samples[1]


def test_numbers_of_numpy_are_numbers(engine: LLMEngine) -> None:
    plain = SamplingParams(
        n=2, seed=2**63 - 1, top_k=9, top_p=0.5, max_tokens=6, stop_token_ids=[3, 4]
    )
    numpy = SamplingParams(
        n=np.int64(2),
        seed=np.int64(2**63 - 1),
        top_k=np.int32(9),
        top_p=np.float32(0.5),
        max_tokens=np.uint8(6),
        stop_token_ids=np.array([3, 4]),
    )
    assert numpy == plain
    for name in ("n", "seed", "top_k", "top_p", "max_tokens"):
        assert type(getattr(numpy, name)) is type(getattr(plain, name))
    samples = []
    for prompt, params in (
        ([5, 6], plain),
        ([np.int64(5), np.int32(6)], numpy),
        (np.array([5, 6], dtype=np.uint8), numpy),
        (torch.tensor([5, 6]), numpy),
    ):
        engine.add_request("a", prompt, params)
        output = finish(engine)["a"]
        assert {type(t) for t in output.prompt_token_ids} == {int}
        samples.append([c.token_ids for c in output.outputs])
    assert samples == [samples[0]] * 4


@pytest.mark.parametrize("prompts", [None, 5, b"ab", {"prompt": "x"}, {"x"}])
def test_prompts_that_are_none_are_refused(prompts: object) -> None:
    """The keys of a dict are not prompts, nor are bytes token ids."""
    with pytest.raises(ValueError, match=r"prompts must be a str, .*, got [a-zA-Z]+"):
        as_list_of_prompts(prompts)
    assert as_list_of_prompts(("a", [1, 2])) == ["a", [1, 2]]
    assert as_list_of_prompts((1, 2)) == [[1, 2]]


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        (np.array([1, 2]), [[1, 2]]),
        ([np.int64(1), np.int32(2)], [[1, 2]]),
        (torch.tensor([1, 2]), [[1, 2]]),
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        ([1.5], [[1.5]]),  # refused as a prompt that holds 1.5, not as a prompt that is a float
        ([True], [[True]]),
    ],
)
def test_row_of_numbers_is_one_prompt(prompts: object, expected: list) -> None:
    assert as_list_of_prompts(prompts) == expected


def test_arrays_in_a_list_are_prompts(random_oracle: Oracle, engine: LLMEngine) -> None:
    prompts = as_list_of_prompts([np.array(random_oracle.prompts[i]) for i in range(2)])
    outputs = engine.generate_batch(prompts, GREEDY).values()
    assert [o.outputs[0].token_ids for o in outputs] == [
        random_oracle.expected(i, 8) for i in range(2)
    ]


def test_model_shorter_than_the_warm_up_starts(tmp_path: Path) -> None:
    sizes = dict(vocab_size=20, max_position_embeddings=4, num_key_value_heads=1, head_dim=8)
    config = tiny_config(Qwen3Config, **sizes)
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    loaded = load_model(tmp_path, torch.float32, torch.device("cpu"))
    engine = LLMEngine(EngineConfig(), loaded=loaded)
    engine.add_request("a", [1, 2], GREEDY)
    assert len(finish(engine)["a"].outputs[0].token_ids) == 2


@pytest.mark.sample(seed=4)
@pytest.mark.parametrize("seed", range(12))
def test_samples_aborts_and_reused_names_leave_nothing_behind(
    seed: int, random_oracle: Oracle, random_loaded
) -> None:
    """Few names, many samples, tiny pools; aborts between steps and inside `on_step`."""
    rng = random.Random(seed)
    indices = [i for i, p in enumerate(random_oracle.prompts) if len(p) <= 20]
    engine = make_engine(
        random_loaded,
        block_size=rng.choice([1, 4, 7, 100]),
        num_blocks=rng.choice([36, 60]),
        max_num_seqs=rng.choice([1, 2, 5]),
        shuffle_batch=rng.random() < 0.5,
    )
    asked: dict[str, tuple[int, SamplingParams]] = {}

    def maybe_abort(_record: object) -> None:
        if rng.random() < 0.05 and asked:
            check(engine.abort_request(rng.choice(sorted(asked))))

    def check(output: RequestOutput | None) -> None:
        if output is None or output.request_id not in asked:
            return
        index, params = asked.pop(output.request_id)
        assert output.finished and len(output.outputs) == params.n
        for completion in output.outputs:
            expected = random_oracle.expected(index, params.max_tokens, params.stop_token_ids)
            if completion.finish_reason == "abort":
                expected = expected[: len(completion.token_ids)]
            assert completion.token_ids == expected, f"seed {seed}, {output.request_id}"

    engine.on_step = maybe_abort
    for _ in range(150):
        name = rng.choice("abcde")
        if name not in asked and rng.random() < 0.6:
            index = rng.choice(indices)
            stop = [rng.choice(random_oracle.continuations[index])] if rng.random() < 0.5 else []
            params = SamplingParams(
                n=rng.choice([1, 2, 7]),
                temperature=0,
                max_tokens=rng.choice([1, 2, 9, 16]),
                ignore_eos=True,
                stop_token_ids=stop,
            )
            engine.add_request(name, random_oracle.prompts[index], params)
            asked[name] = (index, params)
        if rng.random() < 0.05 and asked:
            check(engine.abort_request(rng.choice(sorted(asked))))
        for output in engine.step():
            if output.finished:
                check(output)
    for output in finish(engine).values():
        check(output)
    assert not asked, f"seed {seed}"
    must_be_empty(engine)


@pytest.mark.sample
@pytest.mark.parametrize("stage", ["prepare", "forward", "sample"])
@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("scheduler", ["two_phase", "prefill_first", "fcfs"])
def test_a_step_that_raises_ends_its_requests_and_nothing_else(
    scheduler: str,
    overlap: bool,
    error: type[BaseException],
    stage: str,
    random_oracle: Oracle,
    random_loaded,
    monkeypatch,
) -> None:
    """Where two steps are under way, the tokens of both are lost. Who waits loses nothing."""
    config = {"scheduler": scheduler, "overlap_scheduling": overlap}
    engine = checked_engine(random_loaded, num_blocks=200, max_num_seqs=2, **config)
    for i in range(4):
        engine.add_request(str(i), random_oracle.prompts[i], replace(GREEDY, max_tokens=6))
    engine.step()
    if overlap:
        engine.core.runner.wait_for_steps()
    part, name = (AsyncStepOutput, "begin") if stage == "sample" else (paged_runner(engine), stage)

    def fail(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch, pytest.raises(error):
        patch.setattr(part, name, fail)
        for _ in range(1 + overlap):
            engine.step()
    engine.check_invariants()
    assert engine.kv_manager.num_blocks_in_use == 0
    outputs = {r: o.outputs[0] for r, o in finish(engine).items()}
    for i in range(4):  # the first two had a token, and the next step says what became of them
        completion, expected = outputs[str(i)], random_oracle.expected(i, 6)
        assert completion.finish_reason == ("abort" if i < 2 else "length")
        num_tokens = 6 if i >= 2 else len(completion.token_ids) if overlap else 1
        assert completion.token_ids == expected[:num_tokens]
    assert engine.stats().num_aborted == 2


@pytest.mark.parametrize("speculative", [None, {"method": "ngram"}])
def test_an_engine_that_nobody_holds_is_gone_at_once(random_loaded, speculative) -> None:
    """What the first engine of a process is made of is hidden from Python's collector: a circle of
    references in it would keep its KV memory for ever."""
    engine = make_engine(random_loaded, speculative=speculative)
    engine.generate_batch([[1, 2, 3]], GREEDY)
    parts = [weakref.ref(part) for part in (engine, engine.kv_cache, engine.scheduler)]
    gc.disable()
    try:
        del engine
        assert [part() for part in parts] == [None, None, None]
    finally:
        gc.enable()


def test_a_step_makes_no_record_and_no_text_for_who_asks_for_none(
    shipped_loaded, shipped_tokenizer, monkeypatch
) -> None:
    engine = LLMEngine(loaded=shipped_loaded, tokenizer=shipped_tokenizer)
    read, append = [], IncrementalDetokenizer.append

    def watched(self: IncrementalDetokenizer, token_id: int):
        read.append(token_id)
        return append(self, token_id)

    monkeypatch.setattr(IncrementalDetokenizer, "append", watched)
    monkeypatch.setattr(RecordedScheduler, "record", None)  # it would be called
    engine.add_request("a", "def f(", GREEDY)
    outputs = [output for _ in range(9) for output in engine.step()]
    assert outputs[-1].finished and read == []
    completion = outputs[-1].outputs[0]
    assert completion.text == shipped_tokenizer.decode(completion.token_ids)
    assert read == completion.token_ids and len(read) == 8
    assert completion.text and len(read) == 8, "once"
