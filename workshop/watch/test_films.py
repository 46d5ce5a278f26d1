"""The chapters' films show what their captions say. Each caption is filled with facts; here they
are found a second time, in the states that the films rebuild."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from common.engine_config import EngineConfig
from common.events.frames import Frame, users_of
from common.tests.film_answers import Answers
from workshop.practice.tasks import mine
from workshop.watch import film_facts, film_scripts, films, watch_command
from workshop.watch.film_facts import NotShown, _table
from workshop.watch.film_scripts import CONSTRAINED, WINDOWED
from workshop.watch.films import BEYOND, FILMS, Shot, calmest, page_of
from workshop.watch.replay.film import Film, FilmStep
from workshop.watch.workloads import Cast, Script, perform

ALL = FILMS | BEYOND
EACH = pytest.mark.parametrize("name", ALL)


@pytest.fixture(scope="module")
def film_of(
    shots: dict[int | str, Shot], cast: Cast, tmp_path_factory: pytest.TempPathFactory
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


def test_every_chapter_has_a_film() -> None:
    root = Path(__file__).parents[2]
    folders = sorted(path.name for path in root.glob("[0-9][0-9]_*"))
    assert [film.folder for film in FILMS.values()] == folders
    assert list(FILMS) == [int(folder[:2]) for folder in folders]


@EACH
def test_its_tokens_are_those_of_transformers(
    name: int | str, shots: dict[int | str, Shot], answers: Answers
) -> None:
    shot = shots[name]
    for film, script in zip(films_of(shot), shot.film.scripts, strict=True):
        plain = tuple(v for v in script.visits if not (v.adapter or v.grammar))
        requests = film.requests()
        outputs = {visit.name: requests[visit.name]["outputs"] for visit in plain}
        assert outputs == answers.of(replace(script, visits=plain)) != {}


@EACH
def test_it_is_understood_in_two_minutes(name: int | str, shots: dict[int | str, Shot]) -> None:
    for film in films_of(shots[name]):
        assert 4 <= len(film.requests()) <= 8
        assert 10 <= film.num_steps <= 40
    for words, max_words in zip(shots[name].caption, (400, 200)):
        assert len(words) <= max_words


@EACH
def test_its_caption_says_the_same_numbers_in_both_languages(
    name: int | str, shots: dict[int | str, Shot]
) -> None:
    shot = shots[name]
    sentences = [words for m in shot.film.moments for words in (shot.say(m.words), shot.say(m.ask))]
    for both in [shot.caption, *sentences]:
        english, chinese = (sorted(re.findall(r"\d+", text)) for text in both)
        assert english == chinese
        assert not set("{}") & set("".join(both))


@EACH
def test_its_moments_are_steps_of_it(name: int | str, shots: dict[int | str, Shot]) -> None:
    shot = shots[name]
    longest = max(film.num_steps for film in films_of(shot))
    names = set(films_of(shot)[0].requests())
    for moment in shot.film.moments:
        assert 0 <= shot.step(moment) < longest
        assert moment.request is None or shot.facts[moment.request] in names
        if (answer := shot.answer(moment)) is not None:
            reason = shot.say(moment.why)
            assert reason[0][0].isupper() and reason[0].endswith(".") and reason[1].endswith("。")
            before = films_of(shot)[-1].state_after(shot.step(moment) - 1)
            kind, target = answer
            num_blocks = films_of(shot)[-1].run.num_blocks
            known = set(before["requests"]) if kind == "request" else range(1, num_blocks)
            assert kind in ("request", "block") and target in known, "nobody can point at it"
    assert any(moment.ask[0] and moment.ask[1] for moment in shot.film.moments)


@EACH
def test_its_knob_has_settings_that_the_engine_takes(name: int | str) -> None:
    film = ALL[name]
    assert 3 <= len(film.knob) <= 5
    for label, changes in film.knob:
        changed = dict(film.scripts[-1].but(**changes).config)
        assert changed != film.scripts[-1].config, label
        EngineConfig(**changed, device="cpu", dtype="float64")


@EACH
def test_its_page_holds_it(name: int | str, shots: dict[int | str, Shot]) -> None:
    page = page_of(shots[name])
    assert page.count('data-label="') == len(shots[name].paths)
    assert (f"Chapter {name}: " in page) == (name in FILMS)
    assert shots[name].caption[0] in page


@pytest.mark.parametrize(
    ("arguments", "page"),
    [([], "out"), (["--film", "2"], "out"), (["--films"], "out/film_6.html")],
    ids=lambda value: str(value),
)
def test_pages_know_how_many_functions_were_the_readers(
    shots: dict[int | str, Shot],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    page: str,
) -> None:
    monkeypatch.setattr(mine, "installed", lambda bench: nullcontext((17, 24)))
    monkeypatch.setattr(films, "shoot", lambda film, *_, **__: shots.get(film.chapter, shots[1]))
    monkeypatch.setattr(films, "load_cast", lambda: None)
    for option, sentences in (["--mine"], "[17, 24]"), ([], "null"):
        assert watch_command.main([*arguments, *option, "--out", str(tmp_path / "out")]) == 0
        assert f'"mine": {sentences}' in (tmp_path / page).read_text(encoding="utf-8")


# -- what each caption claims, found otherwise


def end_of(state: Frame, name: str) -> str | None:
    """How a request has ended, if it has."""
    return state["requests"][name].get("finish", {}).get("reason")


def test_1_the_batch_slot_is_empty_here_and_used_there(shots: dict[int | str, Shot]) -> None:
    static, continuous = films_of(shots[1])
    facts = shots[1].facts
    assert (static.num_steps, continuous.num_steps) == (24, 19)
    assert (facts["static_steps"], facts["continuous_steps"]) == (24, 19)
    for film in (static, continuous):
        state = film.state_after(4)
        assert list(state["running"]) == ["a", "b", "c"]
        assert state["waiting"] == ["d", "e", "f"]
        assert end_of(film.state_after(5), "c") == "length"
    assert (facts["ended"], facts["end"]) == ("c", 5)
    for step in range(6, 14):
        assert static.state_after(step)["waiting"] == ["d", "e", "f"]
        assert "d" in continuous.state_after(step)["running"]
    assert list(static.state_after(12)["running"]) == ["b"]
    assert list(static.state_after(14)["running"]) == ["d", "e", "f"]
    assert (facts["newcomer"], facts["joined"], facts["late"], facts["longest"]) == (
        *("d", 6, 14, "b"),
    )
    assert facts["num_seats"] == static.run.max_num_seqs == 3


def test_2_blocks_are_reserved_and_a_request_waits_for_them(shots: dict[int | str, Shot]) -> None:
    (film,) = films_of(shots[2])
    facts = shots[2].facts
    table = _table(film.state_after(0), "a")
    assert table == [1, 2, 3, 4, 5, 6, 7, 8]
    for step in range(20):
        assert _table(film.state_after(step), "a") == (table if step < 19 else [])
    state = film.state_after(4)
    assert (state["waiting"], len(state["free"])) == (["c"], 2)
    written = {name: state["computed"][name] for name in "ab"}
    assert written == {"a": 14, "b": 9}  # of 8 blocks of 4, and of 4
    assert facts["num_empty"] == (8 - 4) + (4 - 3)
    assert all(film.state_after(step)["waiting"] == ["c"] for step in range(4, 9))
    assert end_of(film.state_after(8), "b") == "length"
    assert _table(film.state_after(9), "c") == [13, 14, 12]
    assert (facts["num_all"], facts["num_filled"], facts["num_tokens"]) == (8, 3, 29)
    assert (facts["step"], facts["c"], facts["b"], facts["late"]) == (4, "c", "b", 9)
    assert (facts["num_needed"], facts["num_free"], facts["table"]) == (3, 2, "13, 14, 12")


def test_3_the_trunk_is_shared_and_outlives_a_branch(shots: dict[int | str, Shot]) -> None:
    (film,) = films_of(shots[3])
    facts = shots[3].facts
    assert list(film.state_after(3)["cached"]) == ["1", "2", "3", "4", "5", "6", "7"]
    state = film.state_after(4)
    assert [users_of(state, block) for block in (1, 6, 7)] == [["a", "b"], ["a", "b"], ["a"]]
    assert (state["cached"]["7"]["parent"], state["cached"]["9"]["parent"]) == (6, 6)
    assert state["requests"]["b"]["num_cached"] == 24
    assert (facts["num_trunk"], facts["num_computed"], facts["num_prompt"]) == (6, 4, 28)
    assert (facts["step"], facts["last"]) == (4, 6)
    cached = {at: {"7", "8"} & film.state_after(at)["cached"].keys() for at in (18, 19, 20, 21)}
    assert cached == {18: {"7", "8"}, 19: {"7"}, 20: set(), 21: set()}
    state = film.state_after(22)
    assert _table(state, "e")[:6] == [1, 2, 3, 4, 5, 6]
    assert state["requests"]["e"]["num_cached"] == 24
    assert facts["gone"] == "block 8 in step 19 and block 7 in step 20"
    assert (facts["late"], facts["back"], facts["c"]) == (20, 22, "e")


def test_4_one_gives_up_its_blocks_and_returns(shots: dict[int | str, Shot]) -> None:
    (film,) = films_of(shots[4])
    facts = shots[4].facts
    state = film.state_after(5)
    assert not state["free"]
    given = _table(state, "d")
    assert (facts["num_blocks"], facts["num_all"]) == (len(given), film.run.num_blocks - 1)
    assert state["computed"]["d"] == facts["num_preempted_tokens"] == 16
    state = film.state_after(6)
    assert _table(state, "c")[-1] in given
    assert state["waiting"] == [facts["victim"]] == ["d"]
    assert len(state["requests"]["d"]["prompt"]) == 14 and len(state["outputs"]["d"]) == 3
    assert all(film.state_after(step)["waiting"] == ["d"] for step in range(6, 13))
    assert "d" in film.state_after(13)["running"]
    again = {kind: num for name, kind, _, num in film_facts.cells(film)[13] if name == "d"}
    assert again == {"recomputed": 16, "decode": 1}
    assert (facts["step"], facts["late"], facts["num_waited"], facts["taker"]) == (6, 13, 7, "c")


def test_5_right_drafts_save_steps_and_wrong_ones_nothing(shots: dict[int | str, Shot]) -> None:
    plain, guessing = films_of(shots[5])
    facts = shots[5].facts
    before, after = (guessing.state_after(step)["outputs"] for step in (4, 5))
    gained = {name: len(outputs) - len(before[name]) for name, outputs in after.items()}
    assert gained == {"a": 3, "b": 1, "c": 1, "d": 1}
    cells = film_facts.cells(guessing)[5]
    drafted = {name: num for name, kind, _, num in cells if kind == "draft"}
    assert drafted == {"a": 2, "c": 3}
    assert (facts["right"], facts["num_gained"]) == ("a", 3)
    assert (facts["wrong"], facts["num_wrong"], facts["step"]) == ("c", 3, 5)
    assert (plain.num_steps, guessing.num_steps) == (22, 16)
    assert (facts["plain_steps"], facts["guessing_steps"]) == (22, 16)
    ends = [film.requests() for film in (plain, guessing)]
    outputs = [[row["outputs"] for row in rows.values()] for rows in ends]
    assert outputs[0] == outputs[1]


def test_6_a_long_prompt_is_one_step_or_five(shots: dict[int | str, Shot]) -> None:
    whole, chunked = films_of(shots[6])
    facts = shots[6].facts
    loads = [
        [sum(num for *_, num in step) for step in film_facts.cells(f)] for f in (whole, chunked)
    ]
    assert max(loads[0]) == loads[0][5] == facts["num_whole"] == 154
    assert max(loads[1]) == facts["num_most"] == 39
    assert len(whole.requests()["c"]["prompt"]) == facts["num_prompt"] == 152
    assert not chunked.state_after(8)["outputs"]["c"]
    assert len(chunked.state_after(9)["outputs"]["c"]) == 1
    assert len(whole.state_after(5)["outputs"]["c"]) == 1
    for step in range(5, 10):
        for name in "ab":
            before = len(chunked.state_after(step - 1)["outputs"][name])
            assert len(chunked.state_after(step)["outputs"][name]) == before + 1
    assert (facts["name"], facts["others"], facts["step"], facts["last"]) == ("c", "a and b", 5, 9)
    assert (facts["size"], facts["num_pieces"]) == (32, 5)


def test_adapters_wait_for_a_slot_and_share_no_cache(shots: dict[int | str, Shot]) -> None:
    (film,) = films_of(shots["adapters"])
    facts, requests = shots["adapters"].facts, film.requests()
    assert {n: r["adapter"] for n, r in requests.items() if r["adapter"]} == {
        **{"b": "tests", "f": "tests"},
        "d": "half",
    }
    assert requests["a"]["prompt"] == requests["b"]["prompt"] == requests["f"]["prompt"]
    assert (
        requests["b"]["text"].startswith(requests["f"]["text"]) and "test_" in requests["f"]["text"]
    )
    assert "test_" not in requests["a"]["text"]
    assert [requests[n]["num_cached"] for n in "abf"] == [0, 0, 16]
    for step, reason in ((5, "seat"), (6, "constraint"), (10, "constraint"), (16, "constraint")):
        assert film.step(step).reasons.get("d") == reason
    assert "e" not in film.state_after(5)["running"] and "e" in film.state_after(6)["running"]
    assert "tests" in {requests[n]["adapter"] for n in film.state_after(15)["running"]}
    assert "d" in film.state_after(17)["running"]
    assert (facts["step"], facts["gone"], facts["late"], facts["found"]) == (6, 16, 17, 10)
    assert [facts[n] for n in "abdef"] == list("abdef")


def test_grammars_are_waited_for_and_kept_to(shots: dict[int | str, Shot]) -> None:
    (film,) = films_of(shots["grammars"])
    facts, requests = shots["grammars"].facts, film.requests()
    assert {n: r["grammar"] for n, r in requests.items() if r["grammar"]} == {
        **{"b": "json", "e": "json"},
        "d": "choice",
    }
    reasons = [film.step(step).reasons.get("b") for step in range(5)]
    assert reasons == [None, *["grammar"] * 3, None]
    assert film.state_after(3)["waiting"] == ["b", "d", "e"]
    assert film.step(4).reasons.get("d") == "grammar"
    assert {"b", "e"} <= set(film.state_after(4)["running"])
    assert json.loads(requests["b"]["text"]).keys() == {"name", "returns"}
    assert requests["d"]["text"] in ("yes", "no", "none")
    assert (facts["step"], facts["late"], facts["num_waited"]) == (2, 4, 3)
    assert end_of(film.state_after(18), "b") is None
    assert end_of(film.state_after(19), "b") == "stop" and facts["end"] == 19
    assert [facts[n] for n in "abce"] == list("abce")


def test_windows_give_up_their_left_and_a_hit_holds_in_both_groups(
    shots: dict[int | str, Shot],
) -> None:
    (film,) = films_of(shots["windows"])
    facts = shots["windows"].facts
    assert film.run.windows == [0, 10]
    assert [_table(film.state_after(1), "a", group)[0] for group in (0, 1)] == [1, 3]
    assert _table(film.state_after(2), "a", 1)[:2] == [0, 4]
    assert 3 in film.state_after(2)["free"] and "3" in film.state_after(2)["cached"]
    full, windowed = (_table(film.state_after(6), "c", group) for group in (0, 1))
    assert (full[:6], windowed[:6]) == ([1, 2, 5, 6, 9, 10], [0, 0, 0, 8, 11, 12])
    assert film.state_after(6)["requests"]["c"]["num_cached"] == 24
    assert film.state_after(18)["requests"]["e"]["num_cached"] == 0
    known, prompt = [set(), set()], film.requests()["e"]["prompt"]
    for row in film.state_after(17)["cached"].values():
        start = 4 * row["place"]
        if row["tokens"] == prompt[start : start + 4]:
            known[row["group"]].add(row["place"])
    assert known[0] == {0, 1, 2, 3, 4, 5} and facts["num_there"] == 4 * len(known[0])
    assert not [h for h in range(1, 7) if set(range(max(0, h - 3), h)) <= known[1]]
    assert (facts["step"], facts["gone"], facts["found"], facts["lost"]) == (2, 3, 6, 18)


def test_of_several_takes_each_step_is_the_shortest(tmp_path: Path, cast: Cast) -> None:
    paths = [tmp_path / name for name in ("1.jsonl", "2.jsonl")]
    for path in paths:
        perform(Script(film_scripts.WHOLE.visits[3:], film_scripts.WHOLE.config), path, cast)
    calm = tmp_path / "calm.jsonl"
    calm.write_text(calmest(*(path.read_text() for path in paths)))
    times = [[_ms_of(step) for step in Film.read(path).steps()] for path in [*paths, calm]]
    assert len(times[2]) == 8 and times[0] != times[1]
    assert times[2] == [min(pair) for pair in zip(*times[:2])]


def _ms_of(step: FilmStep) -> float:
    planned = sum(plan["schedule_ms"] for plan in step.plans)
    return planned + sum(step.result["times"].values())


# -- a film that does not show it has no caption


@pytest.mark.parametrize(
    ("chapter", "scripts"),
    [
        (1, (film_scripts.CONTINUOUS, film_scripts.CONTINUOUS)),
        (1, (film_scripts.STATIC, film_scripts.STATIC)),
        (1, (film_scripts.STATIC, film_scripts.CONTINUOUS.but(max_num_seqs=6))),
        (2, (Script(film_scripts.TABLES.visits[:2], film_scripts.TABLES.config),)),
        (2, (film_scripts.TABLES.but(num_blocks=40),)),
        (3, (film_scripts.PREFIXES.but(num_blocks=40),)),
        (2, (film_scripts.TABLES.but(scheduler="two_phase"),)),
        (3, (film_scripts.PREFIXES.but(prefix_cache="radix"),)),
        (4, (film_scripts.SCARCE.but(num_blocks=30),)),
        (4, (film_scripts.SCARCE.but(num_blocks=17),)),
        (5, (film_scripts.PLAIN, film_scripts.PLAIN)),
        (5, (film_scripts.PIECES, film_scripts.GUESSING)),
        (6, (film_scripts.WHOLE, film_scripts.WHOLE)),
        (6, (film_scripts.PIECES, film_scripts.PIECES)),
        ("adapters", (film_scripts.ADAPTED.but(max_loras=2),)),
        ("grammars", (replace(CONSTRAINED, visits=CONSTRAINED.visits[:2]),)),
        ("windows", (WINDOWED.but(num_blocks=80),)),
        ("windows", (replace(WINDOWED, window=None),)),
    ],
)
def test_another_film_is_not_described(
    chapter: int | str, scripts: tuple[Script, ...], film_of: Callable[[Script], Film]
) -> None:
    films = [film_of(script) for script in scripts]
    with pytest.raises(NotShown, match="the film does not show"):
        ALL[chapter].facts(*films)
