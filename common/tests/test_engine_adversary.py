"""Callers who do what nobody expects: names taken twice, callbacks that abort, add and raise,
steps that fail, other threads. Everybody gets his own tokens, once, and the engine stays whole."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from bounded_loops import as_long_as
from common.engine import EngineConfig, LLMEngine
from common.llm import as_list_of_prompts
from common.models.loader import load_model
from common.requests.output_processor import OutputProcessor, RequestOutput
from common.tests.engine_oracle import (
    Oracle,
    checked_engine,
    finish,
    paged_runner,
    save_random_model,
    serve,
)
from request import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
THREE = replace(GREEDY, max_tokens=3)
USES: dict[str, Callable[[LLMEngine], object]] = {
    "step": lambda engine: engine.step(),
    "add_request": lambda engine: engine.add_request("late", [1, 2], THREE),
    "generate": lambda engine: engine.generate_batch([[1, 2]], THREE),
    "stream": lambda engine: next(engine.stream([1, 2], THREE)),
    "reset_prefix_cache": lambda engine: engine.reset_prefix_cache(),
    "reset_stats": lambda engine: engine.reset_stats(),
}
LOOPS = {"plain": {"overlap_scheduling": False}, "overlapped": {"overlap_scheduling": True}}


@pytest.fixture(params=LOOPS)
def engine(request, random_loaded) -> LLMEngine:
    sizes = {"block_size": 4, "num_blocks": 80, "max_num_seqs": 4, "max_model_len": 64}
    return checked_engine(random_loaded, **sizes, **LOOPS[request.param])


def must_be_empty(engine: LLMEngine) -> None:
    """Nobody is left, in no part of the engine."""
    engine.step()  # tells the runner who has finished
    if hasattr(engine.core.runner, "wait_for_steps"):
        engine.core.runner.wait_for_steps()
    engine.check_invariants()
    state = paged_runner(engine).state
    assert not engine._groups and not engine._sequences and not state.requests
    assert len(set(state._free_rows)) == len(state._free_rows) == len(state.num_tokens)
    assert engine.stats().kv_blocks_in_use == 0


def elsewhere(use: Callable[[], object]) -> object:
    """Its result in another thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(use).result(30)


# One may be a sample's, and one is what a call of the engine's would take.
NAMES = ("a", "b", "c", "d", "a#0", "request-1")


class Strange(Exception):
    pass


def names(request_id: str, n: int) -> set[str]:
    return {request_id, *(f"{request_id}#{i}" for i in range(n) if n > 1)}


# Where a step fails: a part of the engine, its method, and whether that has done its work by then.
FAULTS: dict[str, tuple[Callable[[LLMEngine], object], str, bool]] = {
    "plan": (lambda engine: engine.scheduler, "schedule", False),
    "look-up": (lambda engine: engine.kv_manager, "get_computed_blocks", False),
    "prepare": (paged_runner, "prepare", False),
    "forward": (paged_runner, "forward", False),
    "sample": (paged_runner, "sample", False),
    "update": (lambda engine: engine.scheduler, "append_sampled_tokens", True),
    "books": (lambda engine: engine, "_finish_group", False),
}


class Caller:
    """Does one strange thing after another, and knows what everybody has to be told."""

    def __init__(self, engine: LLMEngine, oracle: Oracle, rng: random.Random) -> None:
        self.engine = engine
        self.oracle = oracle
        self.rng = rng
        self.indices = [i for i, p in enumerate(oracle.prompts) if len(p) <= 20]
        self.open: dict[str, tuple[int, SamplingParams]] = {}
        self.aborted: dict[str, list[tuple[int, SamplingParams]]] = {}  # and not yet told of
        self.at_risk = set[str]()  # names of those that were open when a step failed
        self.is_told = True  # who has ended was returned
        self.was_interrupted = False  # the last call, at any place
        self.is_calling = False  # in the middle of a whole call
        engine.on_step = self.on_step

    def some_request(self) -> tuple[int, SamplingParams]:
        index = self.rng.choice(self.indices)
        is_cut = self.rng.random() < 0.5
        stop = [self.rng.choice(self.oracle.continuations[index])] if is_cut else []
        n = self.rng.choice([1, 2, 7])
        max_tokens = self.rng.choice([1, 2, 9, 16])
        return index, replace(GREEDY, n=n, max_tokens=max_tokens, stop_token_ids=stop)

    def is_taken(self, name: str, n: int) -> bool:
        """Or one of its samples' names is, until the whole group has ended."""
        open_names = {name for each, (_, p) in self.open.items() for name in names(each, p.n)}
        open_names |= {"request-1"} if self.is_calling else set()
        return not open_names.isdisjoint(names(name, n))

    def do(self, call: Callable, *arguments, **options):
        return call(*arguments, **options)

    def add(self) -> None:
        name = self.rng.choice(NAMES)
        (index, params) = self.some_request()
        prompt = self.oracle.prompts[index]
        is_taken = self.is_taken(name, params.n)
        if is_taken and self.is_told:
            with pytest.raises(ValueError, match=name):
                self.engine.add_request(name, prompt, params)
        elif not is_taken:
            priority = self.rng.randrange(3)
            self.do(self.engine.add_request, name, prompt, params, priority=priority)
            self.note({name: (index, params)})

    def note(self, added: dict[str, tuple[int, SamplingParams]]) -> None:
        """All of them are in the engine; if the call was interrupted, all or none."""
        there = added.keys() & self.engine._groups.keys()
        assert there == added.keys() or (self.was_interrupted and not there)
        self.at_risk -= there
        if self.was_interrupted:
            self.at_risk |= there
        self.open |= added if there else {}

    def add_several(self) -> None:
        """While others are added one is aborted; the last may be refused."""
        index = self.rng.choice(self.indices)
        is_bad = self.rng.random() < 0.5

        def requests():
            yield "x", self.oracle.prompts[index], GREEDY
            self.abort()
            yield "y", self.oracle.prompts[index], 5 if is_bad else GREEDY

        if self.open.keys() & {"x", "y"}:
            return
        if is_bad:
            with pytest.raises(ValueError, match="sampling_params must be"):
                self.engine.add_requests(requests())
        else:
            self.engine.add_requests(requests())
            self.note(dict.fromkeys("xy", (index, GREEDY)))

    def abort(self) -> None:
        assert self.engine.abort_request("nobody") is None
        if self.open:
            name = self.rng.choice(sorted(self.open))
            output = self.do(self.engine.abort_request, name)
            if output is None:  # it had ended, or the call was interrupted
                assert not self.is_told or self.was_interrupted
            else:
                assert output.request_id == name
                self.aborted.setdefault(name, []).append(self.open.pop(name))

    def on_step(self, _record: object) -> None:
        self.is_told = False
        luck = self.rng.random()
        if luck < 0.04:
            self.abort()
        elif luck < 0.05 and (called := self.engine._groups.keys() - self.open.keys()):
            self.at_risk.add(name := min(called))
            self.engine.abort_request(name)
        elif luck < 0.1:
            for use in USES.values():
                with pytest.raises(RuntimeError, match="from within a call"):
                    use(self.engine)
                with pytest.raises(RuntimeError, match="belongs to the thread that made it"):
                    elsewhere(lambda use=use: use(self.engine))
        elif luck < 0.12:
            error = self.rng.choice([Strange, KeyboardInterrupt])
            if error is KeyboardInterrupt:
                self.at_risk |= self.open.keys()
            raise error

    def survive(self, call: Callable[[], list[RequestOutput]]) -> list[RequestOutput]:
        try:
            return call()
        except (Strange, KeyboardInterrupt):
            return []

    def step(self) -> None:
        for output in self.survive(self.steps):
            if output.finished:
                self.take(output)

    def steps(self) -> list[RequestOutput]:
        self.is_told = False
        outputs = self.engine.step()
        self.is_told = True
        return outputs

    def fail(self) -> None:
        """One step does, at the first or at a later call of a method."""
        find, name, is_done = FAULTS[self.rng.choice(sorted(FAULTS))]
        part = find(self.engine)
        num_calls = self.rng.choice([1, 1, 2])
        error = Strange
        if self.rng.random() < 0.5:
            error = KeyboardInterrupt
        real = getattr(part, name)

        def failing(*arguments, **keywords):
            nonlocal num_calls
            num_calls -= 1
            if is_done or num_calls:
                result = real(*arguments, **keywords)
            if num_calls == 0:
                self.at_risk |= self.open.keys()
                raise error
            return result

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(part, name, failing)
            self.step()

    def call(self) -> None:
        """A whole call, beside the others. If it is interrupted, its own requests end."""
        (one, first) = self.some_request()
        (other, second) = self.some_request()
        prompts = [self.oracle.prompts[one], self.oracle.prompts[other]]
        self.is_told = False
        self.is_calling = True
        outputs = self.survive(
            lambda: [*self.engine.generate_batch(prompts, [first, second]).values()]
        )
        self.is_calling = False
        assert self.engine._groups.keys() <= self.open.keys(), "its own have ended"
        for index, params, output in zip((one, other), (first, second), outputs):
            self.check(index, params, output, may_be_cut=output.request_id in self.at_risk)

    def take(self, output: RequestOutput) -> None:
        if older := self.aborted.get(output.request_id):
            index, params = older.pop(0)
            self.check(index, params, output, may_be_cut=True)
        else:
            index, params = self.open.pop(output.request_id)
            self.check(index, params, output, may_be_cut=output.request_id in self.at_risk)

    def check(self, index: int, params: SamplingParams, output, *, may_be_cut: bool) -> None:
        assert output.finished and len(output.outputs) == params.n
        for completion in output.outputs:
            expected = self.oracle.expected(index, params.max_tokens, params.stop_token_ids)
            if completion.finish_reason in ("abort", "error"):
                assert may_be_cut, output.request_id
                expected = expected[: len(completion.token_ids)]
            assert completion.token_ids == expected, output.request_id

    def do_something(self) -> None:
        luck = self.rng.random()
        if luck < 0.3:
            self.add()
        elif luck < 0.36:
            self.abort()
        elif luck < 0.4:
            self.add_several()
        elif luck < 0.44:
            self.fail()
        elif luck < 0.46:
            self.call()
        self.step()

    def end(self) -> None:
        self.engine.on_step = None
        for _ in as_long_as(self.engine.has_unfinished_requests, max_rounds=500):
            self.step()
        assert not self.open and not any(self.aborted.values()), "each is told of, once"
        must_be_empty(self.engine)


@pytest.mark.net
@pytest.mark.sample(seed=4)
@pytest.mark.parametrize("seed", range(12))
def test_whatever_a_caller_does_everybody_gets_his_own_tokens_once(
    seed: int, random_oracle: Oracle, random_loaded
) -> None:
    rng = random.Random(seed)
    engine = checked_engine(
        random_loaded,
        scheduler=rng.choice(["two_phase", "two_phase", "prefill_first", "fcfs"]),
        overlap_scheduling=rng.random() < 0.4,
        block_size=rng.choice([1, 4, 7, 100]),
        num_blocks=rng.choice([36, 60]),
        max_num_seqs=rng.choice([1, 2, 5]),
        max_model_len=36,
        shuffle_batch=rng.random() < 0.5,
    )
    caller = Caller(engine, random_oracle, rng)
    for _ in range(150):
        caller.do_something()
    caller.end()


@pytest.mark.parametrize("is_patient", [True, False])
def test_an_engine_is_closed_from_another_thread_in_the_middle_of_a_step(
    engine, is_patient, monkeypatch
) -> None:
    if not is_patient:
        monkeypatch.setattr("common.engine.CLOSE_TIMEOUT_S", 0.05)
    closing = threading.Thread(target=engine.close)

    def on_step(record) -> None:
        if record.step == 3:
            closing.start()
            if not is_patient:
                closing.join(30)
            for _ in as_long_as(lambda: not engine._is_closed, max_rounds=10**9):
                pass

    engine.on_step = on_step
    outputs = engine.generate_batch([[1, 2], [3]], GREEDY)
    closing.join(30)
    assert [o.outputs[0].finish_reason for o in outputs.values()] == ["abort", "abort"]
    for name in ("step", "add_request", "generate", "stream"):
        with pytest.raises(RuntimeError, match="the engine is closed"):
            USES[name](engine)
    assert engine.stats().kv_blocks_in_use == 0
    engine.close()


def test_aborts_from_within_a_step_are_done_when_it_ends(
    engine, random_oracle, monkeypatch
) -> None:
    """By a signal handler, and by a generator that is collected."""
    engine.add_request("stays", random_oracle.prompts[2], GREEDY)
    engine.add_request("goes", random_oracle.prompts[3], GREEDY)
    monkeypatch.setattr(OutputProcessor, "take_delta", lambda _: "text")
    streams = [engine.stream([1, 2], GREEDY)]
    assert next(streams[0]) == "text"
    aborted = []
    schedule = engine.scheduler.schedule

    def interrupted_schedule():
        plan = schedule()
        signal.raise_signal(signal.SIGUSR1)
        streams.clear()
        assert len(engine._groups) == 3, "not in the middle of a step"
        return plan

    handler = signal.signal(signal.SIGUSR1, lambda *_: aborted.append(engine.abort_request("goes")))
    try:
        with monkeypatch.context() as patch:
            patch.setattr(engine.scheduler, "schedule", interrupted_schedule)
            ended = [output.request_id for output in engine.step() if output.finished]
    finally:
        signal.signal(signal.SIGUSR1, handler)
    assert aborted[0].request_id == "goes" and ended == ["goes"]
    assert list(engine._groups) == ["stays"] and not engine._finished_groups
    assert finish(engine)["stays"].outputs[0].token_ids == random_oracle.expected(2, 8)


def test_a_recovery_that_fails_is_done_by_the_next_call(engine, random_oracle, monkeypatch) -> None:
    engine.add_request("runs", random_oracle.prompts[2], GREEDY)
    engine.step()
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(engine.core, "step", lambda: 1 / 0)
        patch.setattr(engine.kv_manager, "clear", lambda: 1 / 0)
        engine.step()
    serve(engine, random_oracle, [3], 8)
    assert engine.kv_manager.num_blocks_in_use == 0


def test_a_forked_process_is_told_so(engine, random_oracle) -> None:
    """Trap 74: its books are a copy; workers, threads and files are its parent's."""
    serve(engine, random_oracle, [0], 4)
    uses = [*USES.values(), lambda engine: engine.abort_request("open"), LLMEngine.close]
    engine.add_request("open", random_oracle.prompts[2], GREEDY)
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # it was the time limit's of this test
        signal.alarm(20)  # an overlapped engine that is not stopped waits for a thread for ever
        for use in uses:
            try:
                use(engine)
            except BaseException as error:
                os.write(write, f"{type(error).__name__}: {error}\n".encode())
        os._exit(0)
    os.close(write)
    with open(read, encoding="utf-8") as pipe:
        said = pipe.read().splitlines()
    os.waitpid(child, 0)
    sentence = f"RuntimeError: cannot use the engine of process {os.getpid()} "
    assert len(said) == len(uses) and all(each.startswith(sentence) for each in said)
    assert finish(engine)["open"].outputs[0].token_ids == random_oracle.expected(2, 8)


def test_a_sample_that_had_ended_is_not_aborted_with_the_others(random_loaded) -> None:
    engine = checked_engine(random_loaded, num_blocks=80, max_num_seqs=1, overlap_scheduling=False)
    engine.add_request("a", [1, 2], replace(THREE, n=2))
    for _ in range(4):
        engine.step()
    output = engine.abort_request("a")
    assert output is not None
    assert [sample.finish_reason for sample in output.outputs] == ["length", "abort"]


def test_who_is_refused_or_has_a_seed_changes_no_later_sample(random_loaded) -> None:
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    samples = []
    for bad in (None, ("b", [1000], params), 5):
        engine = checked_engine(random_loaded, num_blocks=80)
        if bad is not None:
            with pytest.raises((ValueError, TypeError)):
                engine.add_requests([("a", [1, 2], params), bad])
            engine.generate_batch([[1]], replace(params, seed=3))
        (output,) = engine.generate_batch([[1, 2, 3]], params).values()
        samples.append(output.outputs[0].token_ids)
    assert samples == [samples[0]] * 3


# -- what a caller may pass


def test_a_row_of_numbers_is_one_prompt_and_what_is_no_prompt_is_refused(random_loaded) -> None:
    engine = checked_engine(random_loaded, num_blocks=80)
    array = np.array([5, 6], dtype=np.uint8)
    for prompts in ((5, 6), array, [np.int64(5), np.int32(6)], torch.tensor([5, 6])):
        assert as_list_of_prompts(prompts) == [[5, 6]]
        (output,) = engine.generate_batch([prompts], GREEDY).values()
        assert engine.step() == [], "it has been told of"
        assert {type(token) for token in output.prompt_token_ids} == {int}
    assert as_list_of_prompts(("a", [1, 2])) == ["a", [1, 2]]
    assert as_list_of_prompts(np.array([[1, 2], [3, 4]])) == [[1, 2], [3, 4]]
    assert as_list_of_prompts([1.5]) == [[1.5]]  # which is then refused for what it holds
    for wrong in (None, 5, b"ab", {"prompt": "x"}, {"x"}):  # keys and bytes are no prompts
        with pytest.raises(ValueError, match=r"prompts must be a str, .*, got [a-zA-Z]+"):
            as_list_of_prompts(wrong)


def test_model_shorter_than_the_warm_up_starts(tmp_path: Path) -> None:
    save_random_model(tmp_path, max_position_embeddings=4)
    loaded = load_model(tmp_path, torch.float32, torch.device("cpu"))
    engine = LLMEngine(EngineConfig(), loaded=loaded)
    assert len(engine.generate_batch([[1, 2]], GREEDY)["request-0"].outputs[0].token_ids) == 2


@pytest.mark.parametrize("speculative", [None, {"method": "ngram"}])
def test_an_engine_that_nobody_holds_is_gone_at_once(random_loaded, speculative) -> None:
    """The first engine of a process is hidden from Python's collector: a circle of references would
    keep its KV memory for ever."""
    engine = checked_engine(random_loaded, num_blocks=80, speculative=speculative)
    engine.generate_batch([[1, 2, 3]], GREEDY)
    parts = [weakref.ref(part) for part in (engine, engine.kv_cache, engine.scheduler)]
    gc.disable()
    try:
        del engine
        assert [part() for part in parts] == [None] * 3
    finally:
        gc.enable()
