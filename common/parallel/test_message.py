"""The message: everything of a plan and of an answer arrives, and nothing else does."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from common.models.collectives import CollectiveError
from common.parallel import message
from common.requests.input_processor import DrawnSeedParams
from common.sampling.distributions import TokenLogprobs
from request import _RANGES, SamplingParams
from scheduler_interface import (
    BlockTableUpdate,
    CachedRequestData,
    NewRequestData,
    RunnerInput,
    SchedulerOutput,
    StepOutput,
)


def through(plan: RunnerInput) -> RunnerInput:
    kind, content = message.unpack(message.pack("plan", plan=plan))
    assert kind == "plan"
    return content["plan"]


def output_through(output: StepOutput) -> StepOutput:
    return message.unpack(message.pack("output", output=output))[1]["output"]


NAMES = st.text(st.characters(), min_size=1, max_size=5)
IDS = st.integers(-1, 2**31 - 1)
LISTS = st.lists(IDS, max_size=5)
TABLES = st.lists(LISTS, max_size=3).map(tuple)  # of groups of layers
BORDERS = [n + i for bits in (63, 64, 71, 72, 80) for n in (2**bits, -(2**bits)) for i in (-1, 0)]
NUMBERS = st.sampled_from(BORDERS) | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False)
PLAIN = st.none() | st.booleans() | NUMBERS | NAMES | st.binary(max_size=4)
PLAIN |= st.lists(PLAIN, max_size=2) | st.dictionaries(NAMES, PLAIN, max_size=2)
FEATURES = st.dictionaries(NAMES, PLAIN, max_size=2)
PARAMS = st.sampled_from([SamplingParams(), DrawnSeedParams(n=2, seed=-(2**63), logprobs=-1)])
PARAMS |= st.builds(
    SamplingParams,
    **{n: st.floats(low, high) for n, (_, low, high) in _RANGES.items() if isinstance(low, float)},
    **dict.fromkeys(("top_k", "max_tokens"), st.integers(1, 2**70)),
    stop=st.lists(NAMES, max_size=2),
    stop_token_ids=st.lists(st.integers(0, 10**6), max_size=3),
    **dict.fromkeys(("ignore_eos", "skip_special_tokens"), st.booleans()),
    **dict.fromkeys(("include_stop_str_in_output", "skip_reading_prefix_cache"), st.booleans()),
)
PLANS = st.builds(
    RunnerInput,
    st.lists(st.builds(NewRequestData, NAMES, LISTS, PARAMS, IDS, TABLES, FEATURES), max_size=3),
    st.builds(
        CachedRequestData,
        *(st.lists(values, max_size=3) for values in (NAMES, LISTS, IDS, IDS, TABLES)),
        st.sets(NAMES, max_size=2),
        st.lists(NAMES, max_size=2),
    ),
    st.dictionaries(NAMES, st.integers(1, 10**6), max_size=4),
    st.sets(NAMES, max_size=3),
    st.lists(st.builds(BlockTableUpdate, NAMES, IDS, IDS, st.integers(0, 3)), max_size=3),
    st.dictionaries(NAMES, LISTS, max_size=3),
)


@settings(deadline=None)
@given(PLANS)
def test_a_plan_arrives_as_it_was_sent(plan):
    arrived = through(plan)
    assert arrived == plan
    for new, sent in zip(arrived.scheduled_new_reqs, plan.scheduled_new_reqs, strict=True):
        assert type(new.sampling_params) is type(sent.sampling_params)  # who drew the seed


FLOATS = st.floats(allow_nan=False)
TOPS = st.dictionaries(IDS, FLOATS, max_size=3)
ENTRIES = st.dictionaries(
    NAMES, st.lists(st.builds(TokenLogprobs, IDS, FLOATS, IDS, TOPS), max_size=2), max_size=2
)


@settings(deadline=None)
@given(
    st.builds(
        StepOutput,
        st.dictionaries(NAMES, LISTS, max_size=3),
        ENTRIES,
        st.dictionaries(NAMES, NAMES, max_size=2),
        st.dictionaries(NAMES, LISTS, max_size=3),
        st.dictionaries(NAMES, st.floats(0, 1e9), max_size=3),
        ENTRIES,
    )
)
def test_an_answer_arrives_as_it_was_sent(output):
    arrived = output_through(output)
    assert arrived == output
    for req_id, entries in output.logprobs.items():  # best first
        tops = [list(entry.top) for entry in entries]
        assert [list(entry.top) for entry in arrived.logprobs[req_id]] == tops


def test_the_state_of_the_scheduler_is_not_sent():
    plan = SchedulerOutput(num_scheduled_tokens={"a": 1}, finished_req_ids={"a"})
    plan.start_positions = [7]
    half = message.runner_half(plan)
    assert half == RunnerInput(num_scheduled_tokens={"a": 1}, finished_req_ids={"a"})
    assert type(through(half)) is RunnerInput


def test_an_error_caused_by_a_collective_is_marked():
    """The rank that reports the failed collective is not its cause; also if an error wraps it."""
    own, late = RuntimeError("its own"), RuntimeError("a step failed")
    late.__context__ = CollectiveError("late")
    for error, is_collective in ((own, False), (late, True), (late.__context__, True)):
        content = message.unpack(message.pack_error(error))[1]
        assert content["kind_of_error"] == type(error).__name__
        assert content["is_collective"] == is_collective
