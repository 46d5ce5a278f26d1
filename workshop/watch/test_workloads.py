"""The default run, which is shown without a file: everything happens in it, and its tokens are
those of `transformers`."""

from __future__ import annotations

import re
from pathlib import Path

from common.tests.film_answers import Answers
from workshop.watch.replay.film import Film
from workshop.watch.tests.film_cells import cells, happened
from workshop.watch.workloads import DEFAULT, Cast, perform


def test_a_little_of_everything_happens_and_the_tokens_are_right(
    default_film: Film, cast: Cast
) -> None:
    film, requests = default_film, default_film.requests()
    answers = Answers(cast.tokenizer).of(DEFAULT)
    assert {name: row["outputs"] for name, row in requests.items()} == answers
    assert 40 <= film.num_steps <= 60 and len(requests) == 8
    assert any(len(blocks) >= 12 for _, (_, blocks) in happened(film, "shared"))
    kinds = {kind for step in cells(film) for _, kind, *_ in step}
    assert {"prompt", "decode", "draft", "recomputed"} <= kinds
    stops = {plan["stop"][0] for _, plan in happened(film, "plan") if "stop" in plan}
    assert {"budget", "blocks", "seat"} <= stops
    assert len(list(happened(film, "evicted"))) > 20
    assert requests["e"]["finish"]["stop_reason"] == "\n\n"
    assert requests["e"]["text"] == " self.items"


def test_two_films_differ_in_times_only(default_run_text: str, cast: Cast, tmp_path: Path) -> None:
    perform(DEFAULT, tmp_path / "again.jsonl", cast)
    texts = [default_run_text, (tmp_path / "again.jsonl").read_text()]
    clock = re.compile(r'"((?:arrived_at|started_at|time|\w+_ms)"):[^,}]*')
    assert clock.sub("", texts[0]) == clock.sub("", texts[1]) and texts[0] != texts[1]
