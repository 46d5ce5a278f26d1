"""The chapters' films show what their captions say: `shoot` checks the rows `shows` of each. A
caption stands in a page (`test_stills.py`)."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from common.engine_config import EngineConfig
from common.tests.film_answers import Answers
from workshop.practice.tasks import mine
from workshop.watch import films, watch_command
from workshop.watch.film_facts import NotShown, check, fact
from workshop.watch.films import BEYOND, FILMS, Shot, page_of
from workshop.watch.replay.film import Film
from workshop.watch.tests.film_cells import cells
from workshop.watch.workloads import Cast

ALL = FILMS | BEYOND
Name = int | str


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
    sentences = [words for m in shot.film.moments for words in (m.words, m.ask)]
    for english, chinese in (shot.caption, *sentences):
        assert sorted(re.findall(r"\d+", english)) == sorted(re.findall(r"\d+", chinese))
        assert len(english) <= 400 and not set("{}") & set(english + chinese)
    for moment in shot.film.moments:
        assert moment.request is None or moment.request in recorded[0].requests()
        before = recorded[-1].state_after(moment.step - 1)
        blocks = range(1, recorded[-1].run.num_blocks)
        if (answer := moment.answer) is not None:
            assert answer[1] in {"request": before["requests"], "block": blocks}[answer[0]]
    assert any(moment.ask[0] and moment.ask[1] for moment in shot.film.moments)
    assert 3 <= len(shot.film.knob) <= 5
    for label, changes in shot.film.knob:
        changed = dict(shot.film.scripts[-1].but(**changes).config)
        assert changed != shot.film.scripts[-1].config, label
        EngineConfig(**changed, device="cpu", dtype="float64")
    page = page_of(shot)
    assert page.count('data-label="') == len(shot.paths) and shot.caption[0] in page


def test_a_film_that_shows_something_else_has_no_caption(shots: dict[Name, Shot]) -> None:
    """Each row has the value of today."""
    for shot in shots.values():
        recorded, rows = films_of(shot), shot.film.shows
        assert len(rows) >= 4
        where, value = fact(recorded, rows[0])
        with pytest.raises(NotShown, match="does not show"):
            check(recorded, [f"{where} {json.dumps([value])}"])


def test_what_captions_count_over_steps_is_in_the_films(shots: dict[Name, Shot]) -> None:
    for chapter, expected in {1: [24, 19], 5: [22, 16]}.items():
        assert [film.num_steps for film in films_of(shots[chapter])] == expected
    most = [max(sum(row[-1] for row in step) for step in cells(f)) for f in films_of(shots[6])]
    assert most == [154, 39]
    outputs = [films_of(shots[5])[1].state_after(step)["outputs"] for step in (4, 5)]
    assert [len(outputs[1][name]) - len(outputs[0][name]) for name in "abcd"] == [3, 1, 1, 1]


def test_a_page_knows_how_many_functions_were_the_readers(
    shots: dict[Name, Shot], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mine, "installed", lambda bench: nullcontext((17, 24)))
    monkeypatch.setattr(films, "shoot", lambda film, *_, **__: shots[film.chapter])
    for option, sentences in (["--mine"], "[17, 24]"), ([], "null"):
        assert watch_command.main(["--film=2", *option, f"--out={tmp_path / 'out'}"]) == 0
        assert f'"mine": {sentences}' in (tmp_path / "out").read_text(encoding="utf-8")
