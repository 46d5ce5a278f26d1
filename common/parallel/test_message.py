"""The message: everything of a plan and of an answer arrives, nothing else does, and a runner that
is fed what arrived says what `transformers` says."""

from __future__ import annotations

import math
import random
from dataclasses import fields

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
from common.tests.engine_oracle import checked_engine, serve_a_crowd
from request import _NUMBERS, SamplingParams
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
    data = message.pack("plan", plan=message.plan_to_map(plan))
    assert isinstance(data, bytes)
    kind, content = message.unpack(data, PLAN)
    assert kind == "plan"
    return message.plan_from_map(content["plan"])


def output_through(output: StepOutput) -> StepOutput:
    data = message.pack("output", output=message.output_to_map(output))
    return message.output_from_map(message.unpack(data, OUTPUT)[1]["output"])


NAMES = st.text(st.characters(), min_size=1, max_size=5)
IDS = st.integers(-1, 2**31 - 1)
LISTS = st.lists(IDS, max_size=5)
TABLES = st.lists(LISTS, max_size=3).map(tuple)  # of groups of layers
POSITIVE = st.integers(0, 2**70)
NUMBERS = st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False)
PLAIN = st.recursive(
    st.none() | NUMBERS | NAMES | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NAMES, inner, max_size=2),
    max_leaves=4,
)
FEATURES = st.dictionaries(NAMES, PLAIN, max_size=2)


@st.composite
def params(draw) -> SamplingParams:
    kind = draw(st.sampled_from([SamplingParams, DrawnSeedParams]))
    max_tokens = draw(st.integers(1, 2**70))
    return kind(
        n=draw(st.integers(1, 4)),
        top_k=draw(POSITIVE),
        **{name: draw(st.floats(low, high)) for name, (_, low, high) in _NUMBERS.items()},
        seed=draw(st.none() | st.integers(-(2**63), 2**63 - 1)),
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, max_tokens)),
        stop=draw(st.lists(NAMES, max_size=2)),
        stop_token_ids=draw(st.lists(st.integers(0, 10**6), max_size=3)),
        ignore_eos=draw(st.booleans()),
        logprobs=draw(st.none() | st.integers(-1, 5)),
        skip_special_tokens=draw(st.booleans()),
        include_stop_str_in_output=draw(st.booleans()),
        skip_reading_prefix_cache=draw(st.booleans()),
    )


@st.composite
def plans(draw) -> RunnerInput:
    req_ids = draw(st.lists(NAMES, max_size=4, unique=True))

    def column(values) -> list:
        return [draw(values) for _ in req_ids]

    news = st.builds(NewRequestData, NAMES, LISTS, params(), IDS, TABLES, FEATURES)
    return RunnerInput(
        draw(st.lists(news, max_size=3)),
        CachedRequestData(
            req_ids,
            column(LISTS),
            column(IDS),
            column(IDS),
            column(TABLES),
            set(req_ids[: len(req_ids) // 2]),
            req_ids[len(req_ids) // 3 :],
        ),
        draw(st.dictionaries(NAMES, st.integers(1, 10**6), max_size=4)),
        draw(st.sets(NAMES, max_size=3)),
        draw(st.lists(st.builds(BlockTableUpdate, NAMES, IDS, IDS, st.integers(0, 3)), max_size=3)),
        draw(st.dictionaries(NAMES, LISTS, max_size=3)),
    )


@settings(deadline=None)
@given(plans())
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
    plan = RunnerInput([NewRequestData("a", [1], params, features={"token_rules": {}})])
    (new,) = through(plan).scheduled_new_reqs
    assert new.sampling_params == SamplingParams() and new.features == {"token_rules": {}}


ENTRIES = st.dictionaries(
    NAMES,
    st.lists(
        st.builds(
            TokenLogprobs,
            IDS,
            st.floats(allow_nan=False),
            IDS,
            st.dictionaries(IDS, st.floats(allow_nan=False), max_size=3),
        ),
        max_size=2,
    ),
    max_size=2,
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


def test_no_logprob_is_lost_that_is_not_a_number():
    entry = TokenLogprobs(1, -math.inf, 3, {2: math.nan})
    (arrived,) = output_through(StepOutput(logprobs={"a": [entry]})).logprobs["a"]
    assert arrived.logprob == -math.inf and math.isnan(arrived.top[2])


WRONG: list[tuple[object, str]] = [
    (RunnerInput(num_scheduled_tokens={"a": np.int64(1)}), "encoded"),
    (RunnerInput(scheduled_draft_token_ids={"a": {1, 2}}), "encoded"),
    (RunnerInput(block_moves=[BlockTableUpdate("a", 0, np.int64(3))]), "encoded"),
    (RunnerInput(block_moves=[BlockTableUpdate("a", 0, 3, np.int64(1))]), "encoded"),
    (RunnerInput(scheduled_cached_reqs=CachedRequestData(new_block_ids=[(np.arange(2),)])), "enc"),
    *(
        (RunnerInput([NewRequestData("a", ids, SamplingParams())]), "encoded")
        for ids in ([1, np.int32(2)], (1, 2), np.arange(2))
    ),
    *(
        (RunnerInput([NewRequestData("a", [1], SamplingParams(), 0, table)]), "encoded")
        for table in (([np.int64(1)],), ((1, 2),))
    ),
    *(  # the data of a feature is plain, or its plugin is named
        (
            RunnerInput([NewRequestData("r", [1], SamplingParams(), features={"odd": data})]),
            r"^features\['odd'\] of request 'r': .* (encoded|allowed)",
        )
        for data in ((1, 2), {3}, np.int64(1), {"a": object()}, [{1: "a"}], 1j)
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


def change(path: str = "", value: object = ..., **changes) -> bytes:
    """A message with another value at this place of its plan, or without one."""
    plan = RunnerInput([NewRequestData("a", [1], SamplingParams())])
    content = {"version": message.VERSION, "kind": "plan", "plan": message.plan_to_map(plan)}
    if path:
        *where, last = path.split()
        inner = content["plan"]
        for key in where:
            inner = inner[0 if key == "0" else key]
        inner[last] = value
        if value is ...:
            del inner[last]
    content |= changes
    return msgpack.packb({name: value for name, value in content.items() if value is not ...})


NEW = "scheduled_new_reqs 0"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (change(version=message.VERSION + 1), f"must be of version {message.VERSION}"),
        (change(version=...), f"must be of version {message.VERSION}"),
        (change(kind="pickle"), "must be of kind"),
        (change(plan=...), "lacks .'plan'."),
        (change(more=1), "unknown .'more'."),
        (change("block_moves"), "a plan lacks .'block_moves'."),
        (change("start_positions", []), "unknown .'start_positions'."),
        (change(f"{NEW} x", 1), "new request .* unknown"),
        (change(f"{NEW} sampling_params top_k"), "sampling_params lacks .'top_k'."),
        (change(f"{NEW} sampling_params n", 0), "sampling_params: n must"),
        (change("block_moves", [[1]]), "a plan: "),
        (change(f"{NEW} block_ids", [5]), "block tables must .*got .5"),
        (change(f"{NEW} block_ids", 5), "block tables must .*got 5"),
        (
            change("scheduled_cached_reqs new_block_ids", [[[3], 4]]),
            r"block tables must .*\[\[3\], 4\]",
        ),
        (change(plan=[]), "a plan must be a map"),
        (msgpack.packb([1]), f"must be of version {message.VERSION}"),
        (change()[:-1], "cannot decode the message"),
        (change() + b"\0", "cannot decode the message"),
        (msgpack.packb(msgpack.ExtType(7, b"")), "unknown extension 7"),
        (b"", "cannot decode the message"),
    ],
)
def test_other_messages_than_those_of_this_version_are_refused(data, reason):
    with pytest.raises(MessageError, match=reason):
        message.plan_from_map(message.unpack(data, PLAN)[1]["plan"])


# -- over whole runs


class RoundTrip:
    """A runner that gets what arrives, and that is all of the plan."""

    num_plans = 0

    def __init__(self, runner) -> None:
        self.runner = runner

    def execute(self, plan: SchedulerOutput):
        arrived = through(plan)
        assert arrived == RunnerInput(*(getattr(plan, f.name) for f in fields(RunnerInput)))
        assert not isinstance(arrived, SchedulerOutput)
        self.num_plans += 1
        return self.runner.execute(arrived)


@pytest.mark.parametrize(
    "config",
    [
        dict(num_blocks=60, overlap_scheduling=True, shuffle_batch=True, chunked_prefill=5),
        dict(num_blocks=40, speculative={"method": "ngram", "min_ngram": 1}, preempt_every=5),
    ],
    ids=lambda config: "-".join(map(str, config)),
)
def test_a_runner_that_gets_what_arrives_says_what_it_should(config, oracle, loaded, seed=0):
    engine = checked_engine(loaded, block_size=4, max_num_seqs=6, **config)
    trip = engine.core.runner = RoundTrip(engine.core.runner)
    serve_a_crowd(engine, oracle, random.Random(seed), seed)
    assert trip.num_plans > 20


def test_integers_of_every_length_arrive():
    """The sign takes a bit of its own."""
    for num_bits in (63, 64, 65, 71, 72, 80):
        for number in (2**num_bits - 1, 2**num_bits, -(2**num_bits), -(2**num_bits) - 1):
            data = message.pack("number", value=number)
            assert message.unpack(data, {"number": ("value",)})[1]["value"] == number


def test_an_error_caused_by_a_collective_is_marked():
    """Also if another error wraps it: the rank that reports the failed collective is not its
    cause."""
    for attribute in ("cause", "context"):
        try:
            try:
                raise CollectiveError("late")
            except CollectiveError as error:
                raise RuntimeError("a step failed") from (error if attribute == "cause" else None)
        except RuntimeError as error:
            data = message.pack_error(error)
        content = message.unpack(data, message.FROM_WORKER)[1]
        assert content["kind_of_error"] == "RuntimeError" and content["is_collective"]
    data = message.pack_error(RuntimeError("its own"))
    assert not message.unpack(data, message.FROM_WORKER)[1]["is_collective"]
