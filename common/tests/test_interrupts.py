"""An interrupt at any line of the engine's host code, and a second one while it recovers.

A tracer raises `KeyboardInterrupt` before a line at which it has not raised yet, whoever called the
function. Then the engine goes on: every request ends, with its own tokens or aborted; books that
contradict each other would be seen by `check_invariants`, after every step. Lines of the model are
left out: an interrupt there is an error of the runner like any other."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from zlib import crc32

import pytest

from bounded_loops import as_long_as
from common.engine import LLMEngine
from common.tests.engine_oracle import Oracle, checked_engine
from request import Request, RequestStatus, SamplingParams
from tiered_cache import KVTierConfig

ROOT = Path(__file__).parents[2]
# Where an interrupt is the runner's error, or does not come: it is held (`interrupts_held`).
ASIDE = """
    model.py blocks.py linear.py rotary.py loader.py tokenizer.py paged_attention.py
    mixed_attention.py attention_plan.py executor.py channel.py message.py scheduler_assembly.py
    decode_attention.py tiled_attention.py split_attention_triton.py
"""
CHECKS = ("check_invariants", "check", "_check_sharing", "__repr__")
# An interrupt here comes when `step` has done all: whom it was about to return is nowhere else.
DELIVERY = ("step", "ack", "__exit__", "release", "run_deferred")
NUM_QUIET = 15  # rounds in which no line is new: all is tried that this workload comes by
NUM_SAMPLE_ROUNDS, SAMPLE = 40, 5  # in `make test`: one line of five

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)

Place = tuple[CodeType, int, CodeType | None]


def is_host_code(code: CodeType) -> bool:
    path = Path(code.co_filename)
    if not path.is_relative_to(ROOT) or path.name in ASIDE.split() or code.co_name in CHECKS:
        return False
    parts = path.relative_to(ROOT).parts
    is_aside = parts[0] == "workshop" or parts[1] in ("tests", "testing", "kernels", "checkpoints")
    return not (is_aside or path.name.startswith("test_") or parts[0] == ".venv")


class Interrupter:
    """Calls what it is given, and interrupts it at the first line of its kind. `every`: of so many
    lines one, always the same ones."""

    def __init__(self, every: int = 1) -> None:
        self.every, self.tried = every, set[Place]()
        self.is_armed = True
        self.is_host_code: dict[CodeType, bool] = {}
        self.last: Place | None = None  # where it has interrupted, if the last call was

    def __call__(self, call: Callable, *arguments):
        self.last = None
        sys.settrace(self._at_call)
        try:
            return call(*arguments)
        finally:
            sys.settrace(None)

    def _at_call(self, frame: FrameType, *_):
        code = frame.f_code
        if code not in self.is_host_code:
            self.is_host_code[code] = is_host_code(code)
        return self._at_line if self.is_host_code[code] else None

    def _at_line(self, frame: FrameType, event: str, _):
        if event != "line" or not self.is_armed:
            return self._at_line
        place = (frame.f_code, frame.f_lineno, frame.f_back and frame.f_back.f_code)
        if place not in self.tried:
            self.tried.add(place)
            name = f"{frame.f_code.co_name}:{frame.f_lineno - frame.f_code.co_firstlineno}"
            if crc32(name.encode()) % self.every == 0:
                self.last = place
                raise KeyboardInterrupt(f"{frame.f_code.co_filename}:{frame.f_lineno} {name}")
        return self._at_line

    @property
    def was_delivering(self) -> bool:
        return self.last is not None and self.last[0].co_name in DELIVERY


class Run:
    """Requests come, are aborted, and end, and some calls are interrupted."""

    def __init__(self, engine: LLMEngine, oracle: Oracle, interrupt: Interrupter) -> None:
        self.engine, self.oracle, self.interrupt = engine, oracle, interrupt
        self.indices = [i for i, prompt in enumerate(oracle.prompts) if len(prompt) < 40]
        self.open: dict[str, int] = {}  # index of the prompt, by name
        self.num_added = self.num_right = 0

    def add(self, call: Callable) -> None:
        """One, or two of which both stay or none."""
        requests = []
        for _ in range(1 + (self.num_added % 4 == 1)):
            index = self.indices[self.num_added % len(self.indices)]
            name, self.num_added = f"{self.num_added} {index}", self.num_added + 1
            params = replace(GREEDY, n=1 + (self.num_added % 5 == 1))
            self.open[name] = index
            requests.append((name, self.oracle.prompts[index], params))
        if len(requests) == 1:
            add = partial(self.engine.add_request, priority=-self.num_added % 3)
            self.survive(call, add, *requests[0])
        else:
            self.survive(call, self.engine.add_requests, requests)
        lost = {name for name, *_ in requests if name not in self.engine._groups}
        if self.interrupt.last is not None and lost:
            assert len(lost) == len(requests)
            for name in lost:
                self.open.pop(name, None)

    def survive(self, call: Callable, *arguments):
        self.interrupt.last = None
        try:
            return call(*arguments)
        except (KeyboardInterrupt, Failed):
            return None

    def step(self, call: Callable) -> None:
        for output in self.survive(call, self.engine.step) or ():
            if output.finished:
                self.take(output)
        if self.interrupt.was_delivering:
            finished = {group.request_id for group in self.engine._finished_groups}
            for name in self.open.keys() - self.engine._groups.keys() - finished:
                del self.open[name]

    def take(self, output) -> None:
        expected = self.oracle.expected(self.open.pop(output.request_id), 6)
        for completion in output.outputs:
            tokens = completion.token_ids
            assert completion.finish_reason in ("length", "abort"), completion
            assert tokens == expected[: len(tokens)], (output.request_id, self.interrupt.last)
            assert completion.finish_reason == "abort" or len(tokens) == 6
            self.num_right += completion.finish_reason == "length"

    def finish(self) -> None:
        for _ in as_long_as(self.engine.has_unfinished_requests, 3000):
            self.step(plainly)
        assert not self.open, "never told of"
        self.engine.check_invariants()
        assert self.engine.kv_manager.num_blocks_in_use == 0

    def round(self, number: int) -> None:
        """Afterwards nothing is left of an interrupt but what the engine says of it."""
        self.add(self.interrupt if number % 3 == 0 else plainly)
        if number % 7 == 6 and self.open:
            name = list(self.open)[number % len(self.open)]
            self.survive(self.interrupt, self.engine.abort_request, name)
        for _ in range(number % 4):
            self.step(plainly)
        self.step(self.interrupt)
        self.step(plainly)
        self.engine.check_invariants()

    def fail_in(self, part: object, name: str) -> None:
        """Each round a step fails there, and what interrupts is its recovery."""
        call, interrupt = getattr(part, name), self.interrupt

        def fail(*arguments):
            interrupt.is_armed = sys.gettrace() is not None
            if interrupt.is_armed:
                raise Failed
            return call(*arguments)

        interrupt.is_armed = False
        setattr(part, name, fail)


def plainly(call: Callable, *arguments):
    return call(*arguments)


class Failed(Exception):
    pass


def run_rounds(run: Run, most: int) -> None:
    """Until all is tried, or so many."""
    num_quiet = num_tried = 0
    for number in range(most):
        run.round(number)
        num_quiet = num_quiet + 1 if len(run.interrupt.tried) == num_tried else 0
        num_tried = len(run.interrupt.tried)
        if num_quiet == NUM_QUIET:
            break


def rows_known_to_the_runner(engine: LLMEngine) -> set[str]:
    runner = engine.parts.runner_handle.runner
    while not hasattr(runner, "state"):
        runner = runner.runner
    return set(runner.state.row_of) | set(runner.state.requests)


SIZE = dict(block_size=4, num_blocks=40, max_num_seqs=4, max_num_batched_tokens=48)
TIERS = KVTierConfig(6, disk_blocks=8)
CONFIGS = {
    "plain": {},
    "radix": {"prefix_cache": "radix"},
    "fcfs": {"scheduler": "fcfs"},
    "priority": {"policy": "priority", "num_blocks": 24, "max_num_seqs": 3},
    "prefill_first": {"scheduler": "prefill_first", "mixing": True, "num_blocks": 24},
    "no cache": {"prefix_cache": None, "num_blocks": 24, "preempt_every": 5},
    "tiers": {"kv_tiers": replace(TIERS, write_policy="write_through"), "num_blocks": 24},
    "tiers back": {"kv_tiers": TIERS, "num_blocks": 24, "prefix_cache": "radix"},
    "overlap": {"overlap_scheduling": True, "preempt_every": 7},
    "overlap radix": {
        "overlap_scheduling": True,
        "prefix_cache": "radix",
        "kv_tiers": TIERS,
        "num_blocks": 24,
    },
    "guesses": {"speculative": {"method": "ngram", "num_spec_tokens": 3}},
}


def start(oracle: Oracle, loaded, name: str, every: int = 1) -> Run:
    engine = checked_engine(loaded, **(SIZE | CONFIGS[name]))
    return Run(engine, oracle, Interrupter(every))


def finish_and_compare(run: Run) -> None:
    """Later requests get all of their tokens, and the runner has no row of another."""
    run.finish()
    run.num_right, first = 0, run.num_added
    while run.num_added < first + 12:
        run.add(plainly)
    run.finish()
    assert run.num_right == sum(1 + (n % 5 == 0) for n in range(first, run.num_added))
    run.add(plainly)
    run.step(plainly)
    assert rows_known_to_the_runner(run.engine) <= names_of(run)
    run.finish()
    run.engine.close()


def names_of(run: Run) -> set[str]:
    names = set(run.open)
    return names | {f"{name}#{i}" for name in names for i in range(2)}


@pytest.mark.parametrize(
    "name, every, most",
    [
        *((name, SAMPLE, NUM_SAMPLE_ROUNDS) for name in ("plain", "fcfs", "tiers back", "overlap")),
        *(pytest.param(name, 1, 20_000, marks=pytest.mark.slow) for name in CONFIGS),
    ],
)
def test_any_line_may_be_interrupted(name, every, most, family_oracle, family_loaded) -> None:
    run = start(family_oracle, family_loaded, name, every)
    run_rounds(run, most)
    finish_and_compare(run)


@pytest.mark.parametrize("where", ["in the runner", "in the books"])
@pytest.mark.parametrize(
    "name, most",
    [
        ("plain", NUM_SAMPLE_ROUNDS),
        *(pytest.param(name, 20_000, marks=pytest.mark.slow) for name in CONFIGS),
    ],
)
def test_recovery_may_be_interrupted(name, most, where, family_oracle, family_loaded) -> None:
    """The next call goes on with it."""
    run = start(family_oracle, family_loaded, name)
    if where == "in the runner":
        run.fail_in(run.engine.core.runner, "execute")
    else:
        run.fail_in(run.engine.scheduler.delta, "ack")
    run_rounds(run, most)
    assert len(run.interrupt.tried) > 20
    finish_and_compare(run)


def test_a_token_that_is_half_taken_is_nobodys(family_oracle, family_loaded, monkeypatch) -> None:
    """By a request that was preempted while its step was under way, and waits."""
    engine = start(family_oracle, family_loaded, "overlap").engine
    append, seen = Request.append_output_token, list[str]()

    def interrupted(request: Request, token_id: int) -> None:
        if request.status is RequestStatus.PREEMPTED and not seen:
            seen.append(request.request_id)
            request.output_token_ids.append(token_id)
            raise KeyboardInterrupt
        append(request, token_id)

    monkeypatch.setattr(Request, "append_output_token", interrupted)
    for index in range(6):
        engine.add_request(str(index), family_oracle.prompts[index], GREEDY)
    outputs = {}
    for _ in as_long_as(engine.has_unfinished_requests, max_rounds=300):
        try:
            outputs |= {o.request_id: o.outputs[0] for o in engine.step() if o.finished}
        except KeyboardInterrupt:
            assert seen
    assert seen and outputs[seen[0]].finish_reason == "abort"
    for index in range(6):
        output = outputs[str(index)]
        num_tokens = 6 if output.finish_reason == "length" else 0
        assert output.token_ids[:num_tokens] == family_oracle.expected(index, num_tokens)
