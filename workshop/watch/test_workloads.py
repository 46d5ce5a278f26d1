"""The default run, which is shown without a file: everything happens in it, and its tokens are
those of `transformers`."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from common.engine import LLMEngine
from common.engine_config import SHIPPED_ADAPTER, EngineConfig
from common.events.frames import users_of
from common.tests.film_answers import Answers
from grammars import Regex
from request import SamplingParams
from workshop.watch import workloads
from workshop.watch.film_facts import cells, happened
from workshop.watch.replay.film import Film
from workshop.watch.workloads import DEFAULT, Cast, Script, Visit, perform


@pytest.fixture
def film(default_film: Film) -> Film:
    return default_film


def cells_of(film: Film) -> list:
    """Cells of all steps, each with the previous step."""
    return [(number, cell) for number, step in enumerate(cells(film)) for cell in step]


def test_the_tokens_are_those_of_transformers(film: Film, cast: Cast) -> None:
    answers = Answers(cast.tokenizer).of(DEFAULT)
    assert {name: row["outputs"] for name, row in film.requests().items()} == answers


def test_a_little_of_everything_happens_in_it(film: Film) -> None:
    assert 40 <= film.num_steps <= 60
    assert len(film.requests()) == len({step for step, _ in happened(film, "arrived")}) == 8
    held = [
        (step, len(users_of(film.state_after(step), block)))
        for step in range(film.num_steps)
        for block in range(1, 31)
    ]
    assert max(num for _, num in held) > 1, "a prefix is shared with a request that runs"
    assert any(len(blocks) >= 12 for _, (_, blocks) in happened(film, "shared"))
    computed = cells_of(film)
    chunks = [step for step, (name, kind, *_) in computed if (name, kind) == ("c", "prompt")]
    assert len(chunks) >= 4
    decodes = {step for step, (_, kind, *_) in computed if kind == "decode"}
    assert set(chunks) <= decodes, "a prompt comes in chunks beside decodes"
    plans = [plan for _, plan in happened(film, "plan")]
    assert {"budget", "blocks", "seat"} <= {plan["stop"][0] for plan in plans if "stop" in plan}
    assert max(len(step.state["waiting"]) for step in film.steps()) >= 3
    lost = {name for _, (name, *_) in happened(film, "preempted")}
    assert lost == {name for _, (name, kind, *_) in computed if kind == "recomputed"}
    last = film.requests()["c"]
    assert (last["num_preemptions"], last["finish"]["reason"]) == (1, "length")
    assert sum(1 for _ in happened(film, "evicted")) > 20
    results = [result for _, result in happened(film, "result")]
    verified = [counts for result in results for counts in result.get("verified", {}).values()]
    assert sum(accepted for accepted, _ in verified) > 20
    assert sum(rejected for _, rejected in verified) > 5
    stopped = {n: r["finish"]["stop_reason"] for n, r in film.requests().items()}
    assert {n: text for n, text in stopped.items() if isinstance(text, str)} == {"e": "\n\n"}
    assert film.requests()["e"]["text"] == " self.items"


def test_two_films_differ_in_times_only(default_run_path: Path, cast: Cast, tmp_path: Path) -> None:
    perform(DEFAULT, tmp_path / "again.jsonl", cast)
    texts = [path.read_text() for path in (default_run_path, tmp_path / "again.jsonl")]
    clock = re.compile(r'"((?:arrived_at|started_at|time|\w+_ms)"):[^,}]*')
    assert clock.sub("", texts[0]) == clock.sub("", texts[1]) and texts[0] != texts[1]


# -- scripts

SMALL = {"num_blocks": 9}


@pytest.fixture
def play(cast: Cast, tmp_path: Path) -> Callable[[Script], Film]:
    def play(script: Script) -> Film:
        perform(script, tmp_path / "run.jsonl", cast)
        return Film.read(tmp_path / "run.jsonl")

    return play


def test_no_request_joins_a_static_batch(play: Callable[[Script], Film]) -> None:
    visits = tuple(
        Visit(name, 0, "def f(x):", length) for name, length in zip("abcd", (2, 6, 3, 4))
    )
    film = play(Script(visits, {"max_num_seqs": 2, "num_blocks": 9}, is_static=True))
    admitted = [(step, name) for step, (name, *_) in happened(film, "admitted")]
    assert admitted == [(0, "a"), (0, "b"), (6, "c"), (6, "d")]
    assert film.state_after(3)["running"] == ["b"]
    assert film.step(3).reasons == {"c": "constraint", "d": "constraint"}


def test_a_request_can_arrive_when_none_is_running(play: Callable[[Script], Film]) -> None:
    film = play(Script((Visit("a", 0, "def", 2), Visit("b", 9, "class", 2)), SMALL))
    assert film.num_steps == 4
    assert {row["finish"]["reason"] for row in film.requests().values()} == {"length"}


def test_a_script_that_does_not_end_is_an_error(
    play: Callable[[Script], Film], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workloads, "MAX_STEPS", 3)
    with pytest.raises(RuntimeError, match="has not ended after 3 steps"):
        play(Script((Visit("a", 0, "def", 9),), SMALL))


def test_a_run_recorded_from_the_middle_knows_the_requests(cast: Cast, tmp_path: Path) -> None:
    config = EngineConfig(num_blocks=40, max_loras=1, device="cpu", dtype="float64")
    engine = LLMEngine(config, loaded=cast.loaded, tokenizer=cast.tokenizer)
    engine.load_adapter("tests", SHIPPED_ADAPTER)
    options = SamplingParams(max_tokens=9, grammar=Regex("[a-z]*"))
    engine.add_request("a", "def", options, adapter="tests")
    engine.add_request("b", "def", SamplingParams(max_tokens=9))
    brought = []
    for name in "tests", None:
        engine.watch(path := tmp_path / f"{name}.jsonl")
        requests = Film.read(path).requests()
        assert (requests["b"]["adapter"], requests["b"]["grammar"]) == ("", "")
        brought.append((requests["a"]["adapter"], requests["a"]["grammar"]))
        if name is not None:
            engine.unload_adapter(name)
    digest = engine.scheduler.requests["a"].features["adapter"]
    assert brought == [("tests", "regex"), (digest[:8], "regex")]
    engine.close()
