"""The message: everything of a plan and of an answer arrives, and nothing else does."""

from __future__ import annotations

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.models.collectives import CollectiveError
from common.parallel import message
from common.parallel.message import MessageError
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

PLAN, OUTPUT = {"plan": ("plan",)}, {"output": ("output",)}


def through(plan: RunnerInput) -> RunnerInput:
    data = message.pack("plan", plan=plan)
    assert isinstance(data, bytes)
    kind, content = message.unpack(data, PLAN)
    assert kind == "plan"
    return content["plan"]


def output_through(output: StepOutput) -> StepOutput:
    return message.unpack(message.pack("output", output=output), OUTPUT)[1]["output"]


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


def test_parameters_sent_as_features_are_not_sent_twice():
    params = SamplingParams(
        **dict(logit_bias={np.int64(3): 1.0}, allowed_token_ids=np.arange(4), bad_words=[("a",)]),
        **dict(prompt_logprobs=np.int64(2), truncate_prompt_tokens=np.int64(9)),
    )
    new = NewRequestData("a", [1], params, features={"token_rules": {}})
    (new,) = through(RunnerInput([new])).scheduled_new_reqs
    assert new.sampling_params == SamplingParams() and new.features == {"token_rules": {}}


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


WRONG: list[tuple[object, str]] = [
    (RunnerInput(num_scheduled_tokens={"a": np.int64(1)}), "encoded"),
    (RunnerInput(block_moves=[BlockTableUpdate("a", 0, 3, np.int64(1))]), "encoded"),
    (RunnerInput(scheduled_cached_reqs=CachedRequestData(new_block_ids=[(np.arange(2),)])), "enc"),
    *(
        (RunnerInput([NewRequestData("a", ids, SamplingParams(), 0, table)]), "encoded")
        for ids, table in ((np.arange(2), ()), ([1], ([np.int64(1)],)))
    ),
    *(  # the data of a feature is plain, or its plugin is named
        (
            RunnerInput([NewRequestData("r", [1], SamplingParams(), features={"odd": data})]),
            r"^features\['odd'\] of request 'r': .* encoded",
        )
        for data in (np.int64(1), {"a": object()})
    ),
    (StepOutput(times={"a": np.float64()}), "float64 cannot be encoded"),
]


@pytest.mark.parametrize(("sent", "reason"), WRONG)
def test_numbers_of_numpy_tuples_sets_and_objects_do_not_slip_through(sent, reason):
    with pytest.raises(TypeError, match=reason):
        (through if isinstance(sent, RunnerInput) else output_through)(sent)


def test_a_name_of_numpy_is_a_text_and_the_state_of_the_scheduler_is_not_sent():
    name = np.str_("a")
    plan = SchedulerOutput(num_scheduled_tokens={name: 1}, finished_req_ids={name})
    plan.start_positions = [7]
    arrived = through(plan)
    assert arrived == RunnerInput(num_scheduled_tokens={"a": 1}, finished_req_ids={"a"})
    assert {type(r) for r in (*arrived.num_scheduled_tokens, *arrived.finished_req_ids)} == {str}


def change(**changes) -> bytes:
    """A message with other values, or without some."""
    content = {"version": message.VERSION, "kind": "plan", "plan": RunnerInput()} | changes
    return message._pack({name: value for name, value in content.items() if value is not ...})


def changed(value: object, **changes) -> msgpack.ExtType:
    """The value with other fields, or without some."""
    kind = type(value)
    content = message._fields_of(value, kind) | changes
    data = message._pack({name: value for name, value in content.items() if value is not ...})
    return msgpack.ExtType(message._FIRST_CLASS + message._CLASSES.index(kind), data)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (change(version=message.VERSION + 1), f"must be of version {message.VERSION}"),
        (change(kind="pickle"), "must be of kind"),
        (change(plan=...), "lacks .'plan'."),
        (change(more=1), "unknown .'more'."),
        (change(plan=changed(RunnerInput(), block_moves=...)), "RunnerInput lacks .'block_moves'."),
        (change(plan=changed(RunnerInput(), x=1)), "RunnerInput .* unknown .'x'."),
        (change(plan=changed(SamplingParams(), top_k=...)), "SamplingParams lacks .'top_k'."),
        (change(plan=changed(SamplingParams(), n=0)), "SamplingParams: n must"),
        (change(plan=msgpack.ExtType(message._FIRST_CLASS, msgpack.packb([]))), "must be a map"),
        (msgpack.packb([1]), f"must be of version {message.VERSION}"),
        (change()[:-1], "cannot decode the message"),
        (change() + b"\0", "cannot decode the message"),
        (msgpack.packb(msgpack.ExtType(70, b"")), "unknown extension 70"),
        (b"", "cannot decode the message"),
    ],
)
def test_other_messages_than_those_of_this_version_are_refused(data, reason):
    with pytest.raises(MessageError, match=reason):
        message.unpack(data, PLAN)


def test_an_error_caused_by_a_collective_is_marked():
    """The rank that reports the failed collective is not its cause; also if an error wraps it."""
    own, late = RuntimeError("its own"), RuntimeError("a step failed")
    late.__context__ = CollectiveError("late")
    for error, is_collective in ((own, False), (late, True), (late.__context__, True)):
        content = message.unpack(message.pack_error(error), message.FROM_WORKER)[1]
        assert content["kind_of_error"] == type(error).__name__
        assert content["is_collective"] == is_collective
