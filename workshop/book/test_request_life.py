"""The calls that are drawn are those of a step of the engine, in this order."""

from __future__ import annotations

import sys
from types import FrameType

import pytest

from common.llm import LLM
from request import RequestStatus, SamplingParams
from workshop.book.plot_request_life import CALLS, GROUPS


@pytest.fixture(scope="module")
def called() -> list[str]:
    """Every function of one step in which a request is admitted, by its qualified name."""
    engine = LLM(num_blocks=50).engine
    engine.add_request("a", "def f(x):", SamplingParams(temperature=0, max_tokens=2))
    names: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            owner = frame.f_locals.get("self")
            name = frame.f_code.co_name
            kinds = [] if owner is None else [kind.__name__ for kind in type(owner).__mro__]
            defined = [k for k in kinds if name in vars(_class_of(owner, k))]
            names.append(f"{defined[0]}.{name}" if defined else name)
            names.extend(f"{kind}.{name}" for kind in defined[1:])

    sys.setprofile(note)
    try:
        engine.step()
    finally:
        sys.setprofile(None)
    return names


def _class_of(owner: object, name: str) -> type:
    return next(kind for kind in type(owner).__mro__ if kind.__name__ == name)


def test_a_step_makes_the_calls_that_are_drawn_in_this_order(called: list[str]) -> None:
    rest = iter(called)
    for function in filter(None, (call[3] for call in CALLS)):
        assert function in rest, f"{function} is not called, or not there"


def test_every_status_of_a_request_is_drawn_once() -> None:
    assert sorted(s for group in GROUPS.values() for s in group) == list(RequestStatus)
