"""The chapters' films show what their captions say. A caption is filled with facts and stands in a
page (`test_stills.py`); here its numbers are found a second time, in the films' states."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.engine_config import EngineConfig
from common.tests.film_answers import Answers
from workshop.practice.tasks import mine
from workshop.watch import film_scripts, films, watch_command
from workshop.watch.film_facts import NotShown, cells
from workshop.watch.film_scripts import CONSTRAINED, WINDOWED
from workshop.watch.films import BEYOND, FILMS, Shot, page_of
from workshop.watch.replay.film import Film
from workshop.watch.workloads import Cast, Script, perform

ALL = FILMS | BEYOND
Name = int | str


@pytest.fixture(scope="module")
def film_of(
    shots: dict[Name, Shot], cast: Cast, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Script], Film]:
    """A script performed once; those of the chapters' films have been."""
    known = {id(s): p for shot in shots.values() for s, p in zip(shot.film.scripts, shot.paths)}
    folder = tmp_path_factory.mktemp("others")

    def film_of(script: Script) -> Film:
        if id(script) not in known:
            path = known[id(script)] = folder / f"{len(known)}.jsonl"
            perform(script, path, cast)
        return Film.read(known[id(script)])

    return film_of


@pytest.fixture(scope="module")
def answers(cast: Cast) -> Answers:
    return Answers(cast.tokenizer)


def films_of(shot: Shot) -> list[Film]:
    return [Film.read(path) for path in shot.paths]


@pytest.mark.parametrize("name", ALL)
def test_a_film_is_short_right_and_asks_what_can_be_pointed_at(
    name: Name, shots: dict[Name, Shot], answers: Answers
) -> None:
    """Its tokens are those of `transformers`; its words have the same numbers in both languages;
    the engine takes the settings of its knob."""
    shot, recorded = shots[name], films_of(shots[name])
    for film, script in zip(recorded, shot.film.scripts, strict=True):
        plain = tuple(v for v in script.visits if not (v.adapter or v.grammar))
        outputs = {v.name: film.requests()[v.name]["outputs"] for v in plain}
        assert outputs == answers.of(replace(script, visits=plain)) != {}
        assert 4 <= len(film.requests()) <= 8 and 10 <= film.num_steps <= 40
    sentences = [words for m in shot.film.moments for words in (shot.say(m.words), shot.say(m.ask))]
    for english, chinese in (shot.caption, *sentences):
        assert sorted(re.findall(r"\d+", english)) == sorted(re.findall(r"\d+", chinese))
        assert len(english) <= 400 and not set("{}") & set(english + chinese)
    for moment in shot.film.moments:
        assert moment.request is None or shot.facts[moment.request] in recorded[0].requests()
        before = recorded[-1].state_after(shot.step(moment) - 1)
        known = {
            "request": set(before["requests"]),
            "block": range(1, recorded[-1].run.num_blocks),
        }
        if (answer := shot.answer(moment)) is not None:
            assert answer[1] in known[answer[0]] and shot.say(moment.why)[1].endswith("。")
    assert any(moment.ask[0] and moment.ask[1] for moment in shot.film.moments)
    assert 3 <= len(shot.film.knob) <= 5
    for label, changes in shot.film.knob:
        changed = dict(shot.film.scripts[-1].but(**changes).config)
        assert changed != shot.film.scripts[-1].config, label
        EngineConfig(**changed, device="cpu", dtype="float64")
    page = page_of(shot)
    assert page.count('data-label="') == len(shot.paths) and shot.caption[0] in page


def test_every_chapter_has_a_film() -> None:
    folders = sorted(path.name for path in Path(__file__).parents[2].glob("[0-9][0-9]_*"))
    assert [(n, film.folder) for n, film in FILMS.items()] == [(int(f[:2]), f) for f in folders]


CLAIMS: dict[Name, list[tuple[int, int, dict[str, Any]]]] = {  # recording, step, parts of its state
    1: [
        (0, 4, {"running": ["a", "b", "c"], "waiting": ["d", "e", "f"]}),
        (0, 12, {"running": ["b"], "waiting": ["d", "e", "f"]}),  # two seats are empty
        (0, 14, {"running": ["d", "e", "f"]}),
        (1, 5, {"requests.c.finish.reason": "length"}),
        (1, 6, {"running": ["a", "b", "d"], "waiting": ["e", "f"]}),  # at once
    ],
    2: [
        (0, 0, {"tables.a.0": [1, 2, 3, 4, 5, 6, 7, 8]}),
        (0, 4, {"waiting": ["c"], "free": [13, 14], "computed.a": 14, "computed.b": 9}),
        (0, 8, {"waiting": ["c"], "requests.b.finish.reason": "length"}),
        (0, 9, {"tables.c.0": [13, 14, 12]}),
    ],
    3: [
        (0, 4, {"requests.b.num_cached": 24, "cached.7.parent": 6, "cached.9.parent": 6}),
        (0, 18, {"cached.7.parent": 6, "cached.8.parent": 7}),
        (0, 19, {"cached.7.parent": 6, "cached.8": None}),
        (0, 20, {"cached.7": None}),
        (0, 22, {"requests.e.num_cached": 24}),
    ],
    4: [
        (0, 5, {"free": [], "computed.d": 16}),
        (0, 6, {"waiting": ["d"], "running": ["a", "b", "c"]}),
        (0, 12, {"waiting": ["d"]}),
        (0, 13, {"waiting": []}),
    ],
    6: [(0, 5, {"waiting": []}), (1, 8, {"outputs.c": []})],
    "adapters": [
        (0, 5, {"waiting": ["d", "e"]}),
        (0, 6, {"waiting": ["d"]}),
        (0, 16, {"waiting": ["d"]}),
        (0, 17, {"waiting": [], "requests.d.adapter": "half"}),
    ],
    "grammars": [
        (0, 3, {"waiting": ["b", "d", "e"]}),
        (0, 19, {"requests.b.finish.reason": "stop"}),
    ],
    "windows": [
        (0, 2, {"cached.3.group": 1}),
        (0, 6, {"requests.c.num_cached": 24}),
        (0, 18, {"requests.e.num_cached": 0}),
    ],
}


@pytest.mark.parametrize("name", CLAIMS)
def test_what_a_caption_claims_is_in_the_films_states(name: Name, shots: dict[Name, Shot]) -> None:
    recorded = films_of(shots[name])
    for film, step, parts in CLAIMS[name]:
        for path, expected in parts.items():
            found: Any = recorded[film].state_after(step)
            for key in path.split("."):
                found = None if found is None else found.get(key)
            assert found == expected, (film, step, path)


def test_what_captions_count_over_steps_is_in_the_films(shots: dict[Name, Shot]) -> None:
    static, continuous = films_of(shots[1])
    assert (static.num_steps, continuous.num_steps) == (24, 19)
    (film,) = films_of(shots[4])
    again = {kind: num for name, kind, _, num in cells(film)[13] if name == "d"}
    assert again == {"recomputed": 16, "decode": 1}
    plain, guessing = films_of(shots[5])
    assert (plain.num_steps, guessing.num_steps) == (22, 16)
    outputs = [guessing.state_after(step)["outputs"] for step in (4, 5)]
    gained = {name: len(outputs[1][name]) - len(outputs[0][name]) for name in "abcd"}
    assert gained == {"a": 3, "b": 1, "c": 1, "d": 1}
    drafted = {name: num for name, kind, _, num in cells(guessing)[5] if kind == "draft"}
    assert drafted == {"a": 2, "c": 3}
    whole, chunked = (
        [sum(num for *_, num in step) for step in cells(film)] for film in films_of(shots[6])
    )
    assert max(whole) == whole[5] == 154 and max(chunked) == 39
    (film,) = films_of(shots["grammars"])
    reasons = [film.step(step).reasons.get("b") for step in range(5)]
    assert reasons == [None, "grammar", "grammar", "grammar", None]
    (film,) = films_of(shots["windows"])
    tables = [film.state_after(step)["tables"] for step in (1, 2, 6)]
    assert [table["a"]["1"][:2] for table in tables[:2]] == [[3, 4], [0, 4]]
    assert (tables[2]["c"]["0"][:6], tables[2]["c"]["1"][:6]) == (
        [1, 2, 5, 6, 9, 10],
        [0, 0, 0, 8, 11, 12],
    )


def test_a_page_knows_how_many_functions_were_the_readers(
    shots: dict[Name, Shot], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mine, "installed", lambda bench: nullcontext((17, 24)))
    monkeypatch.setattr(films, "shoot", lambda film, *_, **__: shots[film.chapter])
    for option, sentences in (["--mine"], "[17, 24]"), ([], "null"):
        assert watch_command.main(["--film=2", *option, f"--out={tmp_path / 'out'}"]) == 0
        assert f'"mine": {sentences}' in (tmp_path / "out").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "scripts"),
    [
        (1, (film_scripts.CONTINUOUS, film_scripts.CONTINUOUS)),
        (1, (film_scripts.STATIC, film_scripts.CONTINUOUS.but(max_num_seqs=6))),
        (2, (Script(film_scripts.TABLES.visits[:2], film_scripts.TABLES.config),)),
        (2, (film_scripts.TABLES.but(scheduler="two_phase"),)),
        (3, (film_scripts.PREFIXES.but(prefix_cache="radix"),)),
        (4, (film_scripts.SCARCE.but(num_blocks=30),)),
        (5, (film_scripts.PLAIN, film_scripts.PLAIN)),
        (6, (film_scripts.WHOLE, film_scripts.WHOLE)),
        ("adapters", (film_scripts.ADAPTED.but(max_loras=2),)),
        ("grammars", (replace(CONSTRAINED, visits=CONSTRAINED.visits[:2]),)),
        ("windows", (replace(WINDOWED, window=None),)),
    ],
)
def test_a_film_that_does_not_show_it_is_not_described(
    name: Name, scripts: tuple[Script, ...], film_of: Callable[[Script], Film]
) -> None:
    with pytest.raises(NotShown, match="the film does not show"):
        ALL[name].facts(*map(film_of, scripts))
