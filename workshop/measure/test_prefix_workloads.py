"""The workloads share exactly what they say, and a broken trace is refused by line."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from workshop.measure.prefix_workloads import (
    PlannedRequest,
    PrefixWorkload,
    Session,
    TraceRequest,
    read_trace,
    trace_token_ids,
)

VOCAB = 64


def answer(request: PlannedRequest) -> list[int]:
    """Any answer that depends on the request alone."""
    return random.Random(request.request_id).choices(range(VOCAB), k=request.output_len)


def prompts_of(sessions: Sequence[Session]) -> dict[str, list[int]]:
    """Prompts in the order of the sessions."""
    answers: dict[str, list[int]] = {}
    prompts = {}
    for request in (request for session in sessions for request in session):
        prompts[request.request_id] = request.prompt(answers)
        answers[request.request_id] = answer(request)
    return prompts


def common_len(a: Sequence[int], b: Sequence[int]) -> int:
    for i, (x, y) in enumerate(zip(a, b)):
        if x != y:
            return i
    return min(len(a), len(b))


def naive_hits(prompts: Sequence[Sequence[int]]) -> list[int]:
    """Tokens that each prompt shares with the best of all prompts before it."""
    return [max((common_len(p, q) for q in prompts[:i]), default=0) for i, p in enumerate(prompts)]


# -- families


@pytest.mark.parametrize("seed", range(5))
def test_system_prompts_share_the_system_prompt_and_not_a_token_more(seed: int) -> None:
    sessions = PrefixWorkload(VOCAB, seed).shared_system_prompts(3, 4, 20, 7, 5)
    prompts = list(prompts_of(sessions).values())
    assert [len(p) for p in prompts] == [27] * 12
    assert naive_hits(prompts) == [0, 20, 20, 20] * 3, f"seed {seed}"


@pytest.mark.parametrize("seed", range(5))
def test_few_shot_prompts_are_a_tree_of_two_levels(seed: int) -> None:
    sessions = PrefixWorkload(VOCAB, seed).few_shot(3, 2, 10, 20, 5, 1)
    hits = naive_hits(list(prompts_of(sessions).values()))
    assert hits == [0, 30, 10, 30, 10, 30], f"seed {seed}"


@pytest.mark.parametrize("seed", range(5))
def test_a_turn_is_the_conversation_so_far_and_new_text(seed: int) -> None:
    sessions = PrefixWorkload(VOCAB, seed).chats(2, 3, 30, 8, 6)
    prompts = prompts_of(sessions)
    for session in sessions:
        for before, after in pairwise(session):
            conversation = prompts[before.request_id] + answer(before)
            assert prompts[after.request_id][:-8] == conversation
            assert prompts[after.request_id][-8:] == list(after.new_token_ids)
    assert [len(p) for p in prompts.values()] == [30, 44, 58] * 2
    assert naive_hits(list(prompts.values())) == [0, 30, 44] * 2, f"seed {seed}"


def test_a_turn_cannot_come_before_the_answer_it_follows() -> None:
    (chat,) = PrefixWorkload(VOCAB).chats(1, 2, 4, 4, 4)
    with pytest.raises(ValueError, match=f"{chat[1].request_id} follows {chat[0].request_id}"):
        chat[1].prompt({})


def test_families_of_one_workload_share_nothing() -> None:
    workload = PrefixWorkload(VOCAB)
    families = [
        workload.shared_system_prompts(3, 1, 8, 8, 1),
        workload.chats(4, 1, 8, 8, 1),
        workload.few_shot(1, 1, 8, 8, 8, 1),
        workload.unique_prompts(30, 8, 1),
        workload.unique_prompts(10, 8, 1),
    ]
    prompts = [prompt for family in families for prompt in prompts_of(family).values()]
    assert len(prompts) == 48
    assert naive_hits(prompts) == [0] * 48


def test_request_ids_are_unique_in_a_workload() -> None:
    workload = PrefixWorkload(VOCAB)
    sessions = [*workload.chats(2, 2, 4, 4, 1), *workload.chats(2, 2, 4, 4, 1)]
    assert len({r.request_id for session in sessions for r in session}) == 8


def test_equal_seeds_give_equal_requests_and_others_do_not() -> None:
    def make(seed: int) -> list[PlannedRequest]:
        workload = PrefixWorkload(VOCAB, seed)
        return workload.arrive([*workload.chats(3, 3, 9, 9, 2), *workload.unique_prompts(9, 9, 2)])

    assert make(7) == make(7)
    assert make(7) != make(8)


def test_arrival_mixes_sessions_and_keeps_each_in_order() -> None:
    workload = PrefixWorkload(VOCAB)
    chats = workload.chats(4, 5, 4, 4, 1)
    arrived = workload.arrive([*chats, *workload.unique_prompts(5, 4, 1)])
    assert len(arrived) == 25
    for chat in chats:
        assert [request for request in arrived if request in chat] == chat
    follows = sum(a in b.history for a, b in pairwise(arrived))
    assert follows < 10  # of 16: sessions one after the other would have them all
    assert [r.family for r in arrived[-5:]] != ["unique"] * 5


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PrefixWorkload(0), "vocab_size must"),
        (lambda: PrefixWorkload(4).unique_prompts(5, 2, 1), "vocab_size must"),
        (lambda: PrefixWorkload(4).shared_system_prompts(1, 5, 2, 2, 1), "vocab_size must"),
        (lambda: PrefixWorkload(4).unique_prompts(1, 0, 1), "got 0"),
    ],
)
def test_what_cannot_be_made_is_refused(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


# -- traces

GOOD = [
    {"timestamp": 0, "input_length": 1100, "output_length": 3, "hash_ids": [1, 2, 3]},
    {"timestamp": 5, "input_length": 1024, "output_length": 0, "hash_ids": [1, 2]},
    {"timestamp": 5, "input_length": 513, "output_length": 9, "hash_ids": [1, 9]},
    {"timestamp": 8, "input_length": 1, "output_length": 1, "hash_ids": [12]},
]


@pytest.fixture
def write(tmp_path: Path):
    def _write(*lines: object) -> Path:
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        path = tmp_path / "trace.jsonl"
        path.write_text("\n".join(texts), encoding="utf-8")
        return path

    return _write


def test_a_trace_is_read_line_by_line(write) -> None:
    trace = read_trace(write(GOOD[0], "", *GOOD[1:], "  "))
    assert trace[0] == TraceRequest(0, 1100, 3, (1, 2, 3))
    assert [request.hash_ids for request in trace] == [(1, 2, 3), (1, 2), (1, 9), (12,)]
    assert [request.timestamp_ms for request in trace] == [0, 5, 5, 8]


def test_the_last_block_of_a_prompt_counts_for_the_tokens_it_has() -> None:
    request = TraceRequest(0, 1100, 0, (1, 2, 3))
    assert [request.num_tokens_in(n) for n in range(4)] == [0, 512, 1024, 1100]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"timestamp": -1}, "timestamp must"),
        ({"timestamp": 1.5}, "timestamp must"),
        ({"timestamp": 4}, "timestamp must"),
        ({"input_length": 0}, "input_length must"),
        ({"input_length": "9"}, "input_length must"),
        ({"input_length": True, "hash_ids": [12]}, "input_length must"),
        ({"output_length": None}, "output_length must"),
        ({"hash_ids": 5}, "hash_ids must"),
        ({"hash_ids": [1, "2"]}, "hash_ids must"),
        ({"hash_ids": [1]}, "hash_ids must have 2"),
        ({"hash_ids": [1, 2, 3]}, "hash_ids must have 2"),
        ({"hash_ids": [2, 1]}, "hash id 2 follows both"),
        ({"hash_ids": [1, 1]}, "hash id 1 follows both"),
        ({"hash_ids": [1, 12]}, "hash id 12 follows both"),
    ],
)
def test_a_bad_line_is_named_with_what_is_wrong(write, changes: dict, message: str) -> None:
    good = {"timestamp": 8, "input_length": 1024, "output_length": 0, "hash_ids": [1, 2]}
    assert len(read_trace(write(*GOOD, good))) == 5
    with pytest.raises(ValueError, match=f"trace.jsonl, line 5: {message}"):
        read_trace(write(*GOOD, good | changes))


@pytest.mark.parametrize(
    ("line", "message"),
    [("{", "must be JSON"), ("[1]", "must be a JSON object"), ("{}", "timestamp must")],
)
def test_a_line_that_is_no_request_is_named(write, line: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"line 2: {message}"):
        read_trace(write(GOOD[0], line))


def test_an_empty_trace_and_a_missing_one_are_told_apart(write, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must have requests"):
        read_trace(write(""))
    with pytest.raises(FileNotFoundError):
        read_trace(tmp_path / "nowhere.jsonl")


def test_token_ids_of_a_trace_share_what_its_ids_share(write) -> None:
    prompts = [trace_token_ids(request, VOCAB) for request in read_trace(write(*GOOD))]
    assert [len(prompt) for prompt in prompts] == [1100, 1024, 513, 1]
    assert common_len(prompts[0], prompts[1]) == 1024
    assert common_len(prompts[0], prompts[2]) == 512
    assert set(prompts[0]) <= set(range(VOCAB)) and len(set(prompts[0])) > VOCAB // 2
