"""One film a chapter: a real run, or two, in which the chapter's idea can be seen happening.

    shot = shoot(FILMS[3], folder)        perform its scripts, and read what they show
    page_of(shot)                         the watch page, with its caption and where to look

A caption names steps, requests and blocks that are read from the events of the very film it stands
above (`film_facts.py`). A film that does not show its point has no caption: `NotShown`.

What is said stands in `films.txt`, in two languages, a row for a film and then its moments:

    film 3
    folder, title, label, caption, note     see `ChapterFilm`; in Chinese `title_zh`, ...
    scripts PREFIXES                        of `film_scripts.py`
    facts shared_prefix                     of `film_facts.py`

    moment step                             the name of a fact
    request b                               another
    words                                   what is to be seen
    still cache 255                         a scene, and how high; may stand more than once"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from common.workshop.replay.film import Film
from common.workshop.tools.text_rows import TextRow, read_rows
from common.workshop.watch import film_facts, film_scripts
from common.workshop.watch.film_facts import Facts
from common.workshop.watch.page_maker import Reel, make_page
from common.workshop.watch.workloads import Cast, Script, load_cast, perform

TABLE = Path(__file__).with_name("films.txt")
Both = tuple[str, str]  # in English, in Chinese


@dataclass(frozen=True, slots=True)
class Moment:
    """A step to look at. `step` is the name of a fact; so are the names in braces."""

    step: str
    words: Both
    request: str | None  # whom to select there, the name of a fact
    still: tuple[tuple[str, int], ...]  # scenes of the still picture, and how high they are


@dataclass(frozen=True, slots=True)
class ChapterFilm:
    """Of a chapter: its scripts, and what is said of them. `labels` tell two runs apart."""

    chapter: int
    folder: str
    title: Both
    scripts: tuple[Script, ...]
    facts: Callable[..., Facts]
    caption: Both
    moments: tuple[Moment, ...]
    labels: tuple[Both, ...]
    note: Both  # what it does not show


@dataclass(frozen=True, slots=True)
class Shot:
    """A chapter's film, made."""

    film: ChapterFilm
    paths: tuple[Path, ...]
    facts: Facts

    @property
    def caption(self) -> Both:
        return self.say(self.film.caption)

    def say(self, words: Both) -> Both:
        english, chinese = (text.format(**self.facts) for text in words)
        return english, chinese

    def step(self, moment: Moment) -> int:
        return int(self.facts[moment.step])

    def address(self, moment: Moment) -> str:
        """Where the page shows it."""
        name = "" if moment.request is None else f"&request={self.facts[moment.request]}"
        return f"step={self.step(moment)}{name}"


def shoot(film: ChapterFilm, folder: Path, cast: Cast | None = None) -> Shot:
    """Perform its scripts, into `folder`. Raises `NotShown`."""
    cast = cast or load_cast()
    names = "ab" if len(film.scripts) > 1 else ("",)
    paths = tuple(folder / f"film_{film.chapter}{name}.jsonl" for name in names)
    for script, path in zip(film.scripts, paths):
        perform(script, path, cast)
    return Shot(film, paths, film.facts(*map(Film.read, paths)))


def page_of(shot: Shot, language: int | None = None) -> str:
    """The watch page of it, as text. It opens at the first moment. `language` is that of the labels
    of two runs: 0 is English, 1 Chinese, None both."""
    film = shot.film
    labels = [" · ".join(both) if language is None else both[language] for both in film.labels]
    reels = [
        Reel(label, path.read_text(encoding="utf-8")) for label, path in zip(labels, shot.paths)
    ]
    moments = [
        {
            "address": shot.address(moment),
            "step": shot.step(moment),
            "request": shot.facts[moment.request] if moment.request else None,
            "words": shot.say(moment.words),
        }
        for moment in film.moments
    ]
    about = {"caption": shot.caption, "note": film.note, "moments": moments}
    settings: dict[str, Any] = {"film": about}
    english, chinese = film.title
    title = (f"Chapter {film.chapter}: {english}", f"第 {film.chapter} 章：{chinese}")
    return make_page(reels, title, shot.address(film.moments[0]), **settings)


# -- the table


def read_films(text: str) -> Iterator[ChapterFilm]:
    words = "title label caption note words"
    in_chinese = " ".join(f"{word}_zh" for word in words.split())
    rows = list(read_rows(text, f"folder scripts facts request still {words} {in_chinese}"))
    starts = [i for i, row in enumerate(rows) if row.head.startswith("film ")]
    for start, end in pairwise([*starts, len(rows)]):
        row, *moments = rows[start:end]
        labels = tuple(zip(row.said["label"], row.said["label_zh"]))
        yield ChapterFilm(
            chapter=int(row.head.partition(" ")[2]),
            folder=row.text("folder"),
            title=_both(row, "title"),
            scripts=tuple(getattr(film_scripts, name) for name in row.text("scripts").split()),
            facts=getattr(film_facts, row.text("facts")),
            caption=_both(row, "caption"),
            moments=tuple(map(_moment, moments)),
            labels=labels or (("run", "运行"),),
            note=_both(row, "note"),
        )


def _moment(row: TextRow) -> Moment:
    scenes = [scene.split() for scene in row.said["still"]]
    still = tuple((name, int(height)) for name, height in scenes)
    step = row.head.partition(" ")[2]
    return Moment(step, _both(row, "words"), row.text("request") or None, still)


def _both(row: TextRow, word: str) -> Both:
    return row.text(word), row.text(f"{word}_zh")


FILMS = {film.chapter: film for film in read_films(TABLE.read_text(encoding="utf-8"))}
