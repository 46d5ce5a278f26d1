"""The run that is shown where nobody brings one: everything happens in it, and its tokens are
those of `transformers`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from common.engine import LLMEngine
from common.engine_config import SHIPPED_ADAPTER, EngineConfig
from common.events.event_kinds import Cut, Evicted, Matched, Planned, Preempted, read_events
from common.tests.film_answers import Answers
from grammars import Regex
from request import SamplingParams
from workshop.watch import workloads
from workshop.watch.film_facts import cells
from workshop.watch.replay.film import Film
from workshop.watch.workloads import DEFAULT, Cast, Script, Visit, perform


@pytest.fixture
def film(default_film: Film) -> Film:
    return default_film


def events_of(film: Film, kind: type) -> list:
    return [event for event in film.events if isinstance(event, kind)]


def cells_of(film: Film) -> list:
    """Of all steps, with the step in front."""
    return [(number, cell) for number, step in enumerate(cells(film)) for cell in step]


def test_the_tokens_are_those_of_transformers(film: Film, cast: Cast) -> None:
    answers = Answers(cast.tokenizer).of(DEFAULT)
    requests = film.last_state().requests
    assert {name: request.outputs for name, request in requests.items()} == answers


def test_it_is_small_enough_to_watch(film: Film) -> None:
    assert len(film.last_state().requests) == 8
    assert 40 <= film.num_steps <= 60


def test_requests_come_one_by_one(film: Film) -> None:
    arrived = [p.number for p in film.steps() for e in p.events if e.kind == "arrived"]
    assert len(set(arrived)) == 8


def test_a_prefix_is_shared(film: Film) -> None:
    """With a request that runs: a block is in two tables."""
    shares = [
        step
        for step in range(film.num_steps)
        if any(len(film.state_after(step).users_of(block)) > 1 for block in range(1, 31))
    ]
    assert shares
    assert any(len(match.blocks) >= 12 for match in events_of(film, Matched))


def test_a_prompt_comes_in_pieces_beside_decodes(film: Film) -> None:
    computed = cells_of(film)
    pieces = [step for step, cell in computed if cell.request == "c" and cell.kind == "prompt"]
    assert len(pieces) >= 4
    assert all(any(s == step and c.kind == "decode" for s, c in computed) for step in pieces)


def test_requests_wait_for_several_reasons(film: Film) -> None:
    plans = events_of(film, Planned)
    assert {"budget", "blocks", "seat"} <= {plan.stop[0] for plan in plans if plan.stop}
    longest = max(len(film.state_after(step).waiting) for step in range(film.num_steps))
    assert longest >= 3


def test_somebody_is_preempted_and_comes_back(film: Film) -> None:
    lost = {event.request: event.num_lost_tokens for event in events_of(film, Preempted)}
    again = {cell.request for _, cell in cells_of(film) if cell.kind == "recomputed"}
    assert lost.keys() == again
    assert "c" in lost
    last = film.last_state().requests["c"]
    assert last.num_preemptions == 1
    assert last.finish_reason == "length"


def test_blocks_are_evicted(film: Film) -> None:
    assert sum(len(event.blocks) for event in events_of(film, Evicted)) > 20


def test_guesses_are_accepted_and_rejected(film: Film) -> None:
    verified = [
        counts for e in film.events if e.kind == "computed" for counts in e.verified.values()
    ]
    assert sum(accepted for accepted, _ in verified) > 20
    assert sum(rejected for _, rejected in verified) > 5


def test_a_stop_string_ends_one(film: Film) -> None:
    assert [(cut.request, cut.stop_string) for cut in events_of(film, Cut)] == [("e", "\n\n")]
    assert film.last_state().requests["e"].text == " self.items"


def test_two_films_differ_in_times_only(default_run_path: Path, cast: Cast, tmp_path: Path) -> None:
    perform(DEFAULT, tmp_path / "again.jsonl", cast)
    timed = {"time": 0.0, "schedule_ms": 0.0, "update_ms": 0.0, "times": {}, "started_at": 0.0}

    def timeless(path: Path) -> list:
        return [
            replace(e, **{n: v for n, v in timed.items() if hasattr(e, n)})
            for e in read_events(path)
        ]

    assert timeless(default_run_path) == timeless(tmp_path / "again.jsonl")


# -- scripts

SMALL = {"num_blocks": 9}


@pytest.fixture
def play(cast: Cast, tmp_path: Path) -> Callable[[Script], Film]:
    def play(script: Script) -> Film:
        perform(script, tmp_path / "run.jsonl", cast)
        return Film.read(tmp_path / "run.jsonl")

    return play


def test_nobody_joins_a_static_batch(play: Callable[[Script], Film]) -> None:
    visits = tuple(
        Visit(name, 0, "def f(x):", length) for name, length in zip("abcd", (2, 6, 3, 4))
    )
    film = play(Script(visits, {"max_num_seqs": 2, "num_blocks": 9}, is_static=True))
    admitted = [
        (part.number, event.request)
        for part in film.steps()
        for event in part.events
        if event.kind == "admitted"
    ]
    assert admitted == [(0, "a"), (0, "b"), (6, "c"), (6, "d")]
    state = film.state_after(3)
    assert list(state.running) == ["b"]
    assert [state.reason_to_wait(name) for name in "cd"] == ["constraint", "constraint"]


def test_somebody_may_come_when_nobody_is_there(play: Callable[[Script], Film]) -> None:
    film = play(Script((Visit("a", 0, "def", 2), Visit("b", 9, "class", 2)), SMALL))
    assert film.num_steps == 4
    assert {r.finish_reason for r in film.last_state().requests.values()} == {"length"}


def test_a_script_that_does_not_end_is_an_error(
    play: Callable[[Script], Film], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workloads, "MAX_STEPS", 3)
    with pytest.raises(RuntimeError, match="has not ended after 3 steps"):
        play(Script((Visit("a", 0, "def", 9),), SMALL))


def test_a_film_that_begins_in_the_middle_knows_what_requests_bring(
    cast: Cast, tmp_path: Path
) -> None:
    config = EngineConfig(num_blocks=40, max_loras=1, device="cpu", dtype="float64")
    engine = LLMEngine(config, loaded=cast.loaded, tokenizer=cast.tokenizer)
    engine.load_adapter("tests", SHIPPED_ADAPTER)
    options = SamplingParams(max_tokens=9, grammar=Regex("[a-z]*"))
    engine.add_request("a", "def", options, adapter="tests")
    engine.add_request("b", "def", SamplingParams(max_tokens=9))
    brought = []
    for name in "tests", None:
        engine.watch(path := tmp_path / f"{name}.jsonl")
        requests = Film.read(path).last_state().requests
        assert (requests["b"].adapter, requests["b"].grammar) == ("", "")
        brought.append((requests["a"].adapter, requests["a"].grammar))
        if name is not None:
            engine.unload_adapter(name)
    digest = engine.scheduler.requests["a"].features["adapter"]
    assert brought == [("tests", "regex"), (digest[:8], "regex")]
    engine.close()
    lines = path.read_text(encoding="utf-8").splitlines()
    snapshot = json.loads(lines[1])
    for row in snapshot["requests"]:
        del row["adapter"], row["grammar"]  # as it was written before there were any
    path.write_text(f"{lines[0]}\n{json.dumps(snapshot)}\n", encoding="utf-8")
    assert Film.read(path).last_state().requests["a"].adapter == ""
