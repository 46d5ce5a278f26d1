"""An interrupt at any line of the engine's host code, and a second one while it recovers.

A tracer raises `KeyboardInterrupt` before a line at which it has not raised yet, whoever called the
function. Then the engine goes on: every request ends, with its own tokens or aborted. Lines of the
model are left out: an interrupt there is an error of the runner like any other."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from zlib import crc32

import pytest

from common.engine import LLMEngine
from common.requests.output_processor import RequestOutput
from common.tests.engine_oracle import Oracle, checked_engine
from common.tests.test_engine_adversary import GREEDY, Caller, Strange
from request import Request, RequestStatus
from tiered_cache import KVTierConfig

ROOT = Path(__file__).parents[2]
# Where an interrupt is the runner's error, or does not come: it is held (`interrupts_held`).
ASIDE = """
    model.py blocks.py linear.py rotary.py loader.py tokenizer.py paged_attention.py
    mixed_attention.py attention_plan.py executor.py channel.py message.py assembly.py
    decode_attention.py tiled_attention.py paged_attention_triton.py
"""
CHECKS = ("check_invariants", "check", "_check_sharing", "__repr__")
# An interrupt here comes when `step` has done all: whom it was about to return is nowhere else.
DELIVERY = ("step", "call", "_end_call", "_finish_call", "_do_aborts", "between_steps")
NUM_QUIET = 15  # rounds in which no line is new: all is tried that this workload comes by
NUM_SAMPLE_ROUNDS, SAMPLE = 40, 5  # in `make test`: one line of five

OF_A_REQUEST = {Request.append_output_token.__code__}
Place = tuple[CodeType | int | RequestStatus | None, ...]


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
        self.every = every
        self.tried = set[Place]()
        self.is_armed = True
        self.is_host_code: dict[CodeType, bool] = {}
        self.last: Place | None = None  # where it has interrupted, if the last call was

    def __call__(self, call: Callable, *arguments, **options):
        sys.settrace(self._at_call)
        try:
            return call(*arguments, **options)
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
        if frame.f_code in OF_A_REQUEST:  # a preempted one's token may be half taken
            place += (frame.f_locals["self"].status,)
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


class Run(Caller):
    """Requests come, are aborted, and end, and some calls are interrupted."""

    def __init__(self, engine: LLMEngine, oracle: Oracle, interrupt: Interrupter) -> None:
        super().__init__(engine, oracle, random.Random(0))
        self.interrupt = interrupt
        self.is_interrupting = False
        engine.on_step = None

    def do(self, call: Callable, *arguments, **options):
        self.interrupt.last = None
        self.was_interrupted = False
        try:
            if self.is_interrupting:
                return self.interrupt(call, *arguments, **options)
            return call(*arguments, **options)
        except (KeyboardInterrupt, Strange):
            self.was_interrupted = True
            self.is_told = False
            self.at_risk |= self.open.keys()
            return None

    def survive(self, call: Callable) -> list[RequestOutput]:
        outputs = self.do(call)
        if self.interrupt.was_delivering and not self.engine._finished_groups:
            self.aborted.clear()
            for name in self.open.keys() - self.engine._groups.keys():
                del self.open[name]
        return outputs or []

    def add_two(self) -> None:
        index = self.rng.choice(self.indices)
        if not self.open.keys() & {"x", "y"}:
            requests = [(name, self.oracle.prompts[index], GREEDY) for name in "xy"]
            self.do(self.engine.add_requests, requests)
            self.note(dict.fromkeys("xy", (index, GREEDY)))

    def round(self, number: int) -> None:
        """Afterwards nothing is left of an interrupt but what the engine says of it."""
        self.is_interrupting = number % 3 == 0
        if number % 4 == 1:
            self.add_two()
        else:
            self.add()
        if number % 7 == 6:
            self.is_interrupting = True
            self.abort()
        for is_interrupting in (*[False] * (number % 4), True, False):
            self.is_interrupting = is_interrupting
            self.step()
        self.engine.check_invariants()

    def fail_in(self, part: object, name: str) -> None:
        """Each round a step fails there, and what interrupts is its recovery."""
        call = getattr(part, name)
        interrupt = self.interrupt

        def fail(*arguments):
            interrupt.is_armed = sys.gettrace() is not None
            if interrupt.is_armed:
                raise Strange
            return call(*arguments)

        interrupt.is_armed = False
        setattr(part, name, fail)


SIZE = dict(block_size=4, num_blocks=40, max_num_seqs=4, max_num_batched_tokens=48)
TIERS = KVTierConfig(6, disk_blocks=8)
CONFIGS = {
    "plain": {},
    "fcfs": {"scheduler": "fcfs"},
    "priority": {"policy": "priority", "num_blocks": 24, "max_num_seqs": 3},
    "prefill_first": {"scheduler": "prefill_first", "mixing": True, "num_blocks": 24},
    "no cache": {"prefix_cache": None, "num_blocks": 24, "preempt_every": 5},
    "tiers": {"kv_tiers": TIERS, "num_blocks": 24, "prefix_cache": "radix"},
    "overlap": {"overlap_scheduling": True, "preempt_every": 7},
    "guesses": {"speculative": {"method": "ngram", "num_spec_tokens": 3}},
}


def run_rounds(run: Run, most: int) -> None:
    """Until all is tried, or so many. Later requests get all of their tokens, and nobody is left in
    any part."""
    num_quiet = num_tried = 0
    for number in range(most):
        run.round(number)
        num_quiet = num_quiet + 1 if len(run.interrupt.tried) == num_tried else 0
        num_tried = len(run.interrupt.tried)
        if num_quiet == NUM_QUIET:
            break
    run.is_interrupting = False
    run.end()
    run.at_risk.clear()
    for _ in range(12):
        run.add()
    run.end()
    run.engine.close()


@pytest.mark.parametrize(
    "name, every, most",
    [
        *((name, SAMPLE, NUM_SAMPLE_ROUNDS) for name in ("plain", "fcfs", "tiers", "overlap")),
        *(pytest.param(name, 1, 20_000, marks=pytest.mark.slow) for name in CONFIGS),
    ],
)
def test_any_line_may_be_interrupted(name, every, most, family_oracle, family_loaded) -> None:
    engine = checked_engine(family_loaded, **(SIZE | CONFIGS[name]))
    run_rounds(Run(engine, family_oracle, Interrupter(every)), most)


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
    engine = checked_engine(family_loaded, **(SIZE | CONFIGS[name]))
    run = Run(engine, family_oracle, Interrupter())
    if where == "in the runner":
        run.fail_in(engine.core.runner, "execute")
    else:
        run.fail_in(engine, "_process_outputs")
    run_rounds(run, most)
    assert len(run.interrupt.tried) > 20
