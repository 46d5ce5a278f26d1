"""The simulated fleet against what it has to be, and against brute force."""

from __future__ import annotations

import random
from itertools import takewhile

import pytest

from common.serve.fleet.policy_lab import HERE, RECORD, tables
from common.serve.fleet.simulated_router import (
    PREFILL_RATE,
    Policy,
    Router,
    Served,
    arrival_times,
    simulate,
)
from prefix_workloads import TRACE_BLOCK_SIZE, TraceRequest
from replay_trace import make_cache, num_distinct_blocks, replay
from workshop.measure.bench.bench_record import made_on, read_record, replace_between_markers

POLICIES = [
    Policy("turns"),
    Policy("two"),
    Policy("tree"),
    Policy("tree", 1.0, 4.0),
    Policy("exact"),
    Policy("exact", 1.0),
    Policy("both", 1.0),
]
APART = 0.002  # a load at which each prompt is computed before the next one comes
SEEDS = range(2)


def random_trace(seed: int, num_requests: int = 100) -> list[TraceRequest]:
    """Walks in a random tree, some at one moment: an id is numbered when its path is first seen."""
    rng = random.Random(seed)
    ids: dict[tuple[int, ...], int] = {}
    trace, now = [], 0
    for _ in range(num_requests):
        path: tuple[int, ...] = ()
        hash_ids = []
        for _ in range(rng.randint(1, 6)):
            path = (*path, min(rng.randint(0, 5), rng.randint(0, 5)))
            hash_ids.append(ids.setdefault(path, len(ids)))
        length = (len(hash_ids) - 1) * TRACE_BLOCK_SIZE + rng.randint(1, TRACE_BLOCK_SIZE)
        now += rng.choice([0, 50, 200])
        trace.append(TraceRequest(now, length, rng.randint(0, 50), tuple(hash_ids)))
    return trace


def num_common(a: TraceRequest, b: TraceRequest) -> int:
    pairs = zip(a.hash_ids, b.hash_ids, strict=False)
    return len([*takewhile(lambda pair: pair[0] == pair[1], pairs)])


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("capacity", [3, 25, 500])
def test_one_engine_finds_what_chapter_3_finds(policy: Policy, capacity: int) -> None:
    trace = random_trace(1)
    hits = sum(one.hit for one in simulate(trace, policy, 1, capacity))
    assert hits == replay(trace, make_cache("hash", capacity)).num_tokens_hit > 0


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("load", [0.3, 2.0])
def test_each_prompt_is_computed_once_in_its_turn(
    policy: Policy, load: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine is never idle while a prompt waits, and the router forgets who is done."""
    routers: list[Router] = []
    init = Router.__init__
    monkeypatch.setattr(
        Router, "__init__", lambda self, *given: routers.append(self) or init(self, *given)
    )
    trace = random_trace(2)
    served, arrivals = simulate(trace, policy, 3, 25, load), arrival_times(trace, 3, load)
    assert len(served) == len(trace) and {one.engine for one in served} == {0, 1, 2}
    ends = [0.0, 0.0, 0.0]
    for request, one, at in zip(trace, served, arrivals, strict=True):
        num_computed = max(request.input_length - one.hit, 1)
        ends[one.engine] = max(at, ends[one.engine]) + num_computed / PREFILL_RATE
        assert one.first_token == pytest.approx(ends[one.engine] - at)
    (router,) = routers
    assert router.waiting == router.unfinished == [0, 0, 0]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("load", [APART, 2.0])
def test_the_exact_index_is_brute_force_over_all_that_was_computed(seed: int, load: float) -> None:
    trace = random_trace(seed)
    served, arrivals = simulate(trace, Policy("exact"), 2, 500, load), arrival_times(trace, 2, load)
    for i, (request, one) in enumerate(zip(trace, served, strict=True)):
        best = [0, 0]
        for before, other, at in zip(trace[:i], served, arrivals, strict=False):
            if at + other.first_token <= arrivals[i]:
                shared = request.num_tokens_in(num_common(request, before))
                best[other.engine] = max(best[other.engine], shared)
        assert one.expected == best[one.engine] == max(best), (seed, i)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("weight", [0.0, 1.0])
@pytest.mark.parametrize("capacity", [15, 500])
def test_one_at_a_time_a_tree_of_the_caches_size_knows_what_the_events_tell(
    seed: int, weight: float, capacity: int
) -> None:
    """With or without evictions: it forgets what the cache forgets."""
    trace = random_trace(seed)
    tree, exact, both = (
        simulate(trace, Policy(index, weight), 3, capacity, APART)
        for index in ("tree", "exact", "both")
    )
    assert tree == exact == both, seed
    assert all(one.expected == one.hit for one in exact)
    assert capacity > 15 or num_distinct_blocks(trace) > 3 * capacity


def test_a_tree_that_is_too_large_believes_in_blocks_that_are_gone() -> None:
    trace = random_trace(0)
    large, endless = (
        simulate(trace, Policy("tree", 0.0, size), 3, 15, APART) for size in (100.0, 400.0)
    )
    assert large == endless  # its bound is out of reach: equal to an index if nothing is evicted
    assert sum(one.expected for one in large) > 1.1 * sum(one.hit for one in large)
    roomy = simulate(trace, Policy("exact"), 3, 500, APART)
    assert [one.engine for one in roomy] == [one.engine for one in large]


def sent(policy: Policy, trace: list[TraceRequest], load: float) -> list[int]:
    return [one.engine for one in simulate(trace, policy, 2, 100, load)]


def test_weight_sends_a_request_away_from_its_prefix_when_it_would_wait_longer() -> None:
    """One block is known, and the engine that has it computes eight others."""
    trace = [
        TraceRequest(0, 512, 0, (1,)),
        TraceRequest(1000, 4608, 0, (1, *range(10, 18))),
        TraceRequest(1001, 1024, 0, (1, 2)),
        TraceRequest(2000, 1, 0, (9,)),
    ]
    assert sent(Policy("exact"), trace, 1.0)[:3] == [0, 0, 0]
    assert sent(Policy("exact", 1.0), trace, 1.0)[:3] == [0, 0, 1]
    assert sent(Policy("exact", 0.1), trace, 1.0)[:3] == [0, 0, 0]


def test_the_tree_knows_what_is_being_computed_and_events_do_not() -> None:
    trace = [TraceRequest(i, 2048, 0, (1, 2, 3, 4)) for i in range(4)]
    assert sent(Policy("tree"), trace, 10.0) == [0, 0, 0, 0]
    assert sent(Policy("exact"), trace, 10.0) == [0, 1, 0, 1]
    assert sent(Policy("both"), trace, 10.0) == [0, 0, 0, 0]


def test_of_idle_engines_the_one_of_which_less_is_known_is_taken() -> None:
    trace = [TraceRequest(9000 * i, 512, 0, (i,)) for i in range(4)]
    assert sent(Policy("exact"), trace, 0.1) == sent(Policy("tree"), trace, 0.1) == [0, 1, 0, 1]


def test_of_two_the_one_with_fewer_unfinished_requests_is_taken() -> None:
    """Answers count as long as they run."""
    trace = [TraceRequest(1000 * i, 512, 10_000 * (i == 0), (i,)) for i in range(6)]
    first, *rest = sent(Policy("two"), trace, 0.5)
    assert rest == [1 - first] * 5
    with pytest.raises(ValueError, match="index is 'three'"):
        Policy("three")


def test_more_engines_are_asked_faster_and_one_moment_lasts_until_the_next() -> None:
    trace = [TraceRequest(at, PREFILL_RATE, 0, tuple(range(40))) for at in (0, 0, 3000, 3000)]
    seconds = [0, 4 / 3, 8 / 3, 10 / 3]  # of 4: the last moment lasts half as long as the rest
    for num_engines, load in ((1, 1.0), (2, 1.0), (1, 0.5)):
        times = arrival_times(trace, num_engines, load)
        assert times == pytest.approx([at / num_engines / load for at in seconds])


def test_each_router_hears_all_events_and_knows_only_what_it_sent_itself() -> None:
    """Two routers in turn. The second has sent nothing when the prompt comes again."""
    trace = [TraceRequest(9000 * i, 512, 0, (1,)) for i in range(3)]
    for index, expected in (("exact", [0, 512, 512]), ("tree", [0, 0, 512])):
        served = simulate(trace, Policy(index), 2, 10, 0.1, num_routers=2)
        assert [one.expected for one in served] == expected, index


def test_equal_seeds_give_equal_runs() -> None:
    trace = random_trace(3)
    runs: list[list[Served]] = [simulate(trace, Policy("two"), 4, 40, 1.0, 1, s) for s in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


@pytest.mark.parametrize("page", ["README.md", "README.zh.md"])
def test_the_pages_show_the_record(page: str) -> None:
    record, text = read_record(RECORD), (HERE / page).read_text(encoding="utf-8")
    shown = f"{tables(record)}\n\n{made_on(record)}"
    assert replace_between_markers(text, "policies", shown) == text
