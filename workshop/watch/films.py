"""One film (recorded run) a chapter: a real run, or two, that show the chapter's idea in action.

    shot = shoot(FILMS[3], folder)        perform its scripts, and read the facts they show
    page_of(shot)                         the watch page, with its caption and moments

A caption names steps, requests and blocks of its own film, and the film is checked for what it
must show (`film_facts.py`). A film that does not show it has no caption: `NotShown`.

The texts are in `films.txt`, in two languages, a row for a film and then its moments:

    film 3 03_prefix_cache                  a chapter's number or another name, and the folder
    title, label, caption, note             see `ChapterFilm`; in Chinese `title_zh`, ...
    scripts STATIC CONTINUOUS               of `film_scripts.py`
    shows 0 4 running ["a", "b"]            see `film_facts.py`; one line each
    scenes grid words cache                 open scenes, in this order; the others on demand
    columns time                            grid columns as wide as a step took; or all equal
    knob num_blocks=18 {"num_blocks": 18}   the last script again with this change; one line each

    moment 4 b                              the step, the request to select or none
    words                                   what the moment shows
    ask                                     what to point at, in the step before it
    answer request b                        or "block 6"
    why                                     the reason for the answer, in whole sentences
    still pool 250 cache 186                scenes and their heights"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from tqdm import tqdm

from workshop.book.text_rows import TextRow, read_rows
from workshop.watch import film_facts, film_scripts
from workshop.watch.page_maker import Reel, make_page
from workshop.watch.replay.film import Film
from workshop.watch.workloads import Cast, Script, load_cast, perform

TABLE = Path(__file__).with_name("films.txt")
Both = tuple[str, str]  # in English, in Chinese


@dataclass(frozen=True, slots=True)
class Moment:
    """A step to look at."""

    step: int
    words: Both
    request: str | None  # to select there
    ask: Both  # a question before it, which is answered by pointing; "": none
    answer: tuple[str, str | int] | None  # ("request", "b") or ("block", 6); None: asks nothing
    why: Both  # is that the answer
    still: tuple[tuple[str, int], ...]  # scenes of the still picture, and how high they are


@dataclass(frozen=True, slots=True)
class ChapterFilm:
    """A film of a chapter, or of none (0): its scripts and texts. `labels` distinguish two runs."""

    name: str  # its name on the command line; a chapter film's is the chapter's number
    chapter: int
    folder: str
    title: Both
    scripts: tuple[Script, ...]
    shows: tuple[str, ...]
    caption: Both
    moments: tuple[Moment, ...]
    scenes: tuple[str, ...]
    columns: str  # "time", or "" for columns of one width
    knob: tuple[tuple[str, Mapping[str, Any]], ...]  # other settings of the last script, by label
    labels: tuple[Both, ...]
    note: Both  # what it does not show
    rule: Both  # that makes a request wait, if no engine setting names it

    @property
    def page(self) -> str:
        """The page that shows the film, relative to its folder, without ".md"."""
        return "README" if self.chapter else f"beyond/{self.name.upper()}"

    @property
    def picture(self) -> str:
        """The film's still picture, as that page names it, without ".png"."""
        return "figures/film" if self.chapter else f"../figures/film_{self.name}"


@dataclass(frozen=True, slots=True)
class Shot:
    """A chapter's film after it has been made."""

    film: ChapterFilm
    paths: tuple[Path, ...]
    turned: tuple[Path, ...] = ()  # with the other settings of the knob

    @property
    def caption(self) -> Both:
        return self.film.caption

    def address(self, moment: Moment) -> str:
        """The page address that shows the moment."""
        name = "" if moment.request is None else f"&request={moment.request}"
        return f"step={moment.step}{name}"

    def start(self, moment: Moment) -> str:
        """The page address of the moment, with the film's setting of the grid columns."""
        return self.address(moment) + (f"&columns={self.film.columns}" if self.film.columns else "")


def shoot(
    film: ChapterFilm,
    folder: Path,
    cast: Cast | None = None,
    has_knob: bool = False,
) -> Shot:
    """Perform the film's scripts and write them to `folder`. Raises `NotShown`.
    `has_knob`: also perform the settings of its knob."""
    cast = cast or load_cast()
    last = film.scripts[-1]
    names = "ab" if len(film.scripts) > 1 else ("",)
    paths = tuple(folder / f"film_{film.name}{name}.jsonl" for name in names)
    others = [last.but(**changes) for _, changes in film.knob if has_knob]
    turned = tuple(folder / f"film_{film.name}_{i}.jsonl" for i in range(len(others)))
    runs = list(zip((*film.scripts, *others), (*paths, *turned), strict=True))
    title = f"recording film {film.name}"
    for script, path in tqdm(runs, title, unit="run", leave=False, disable=None):
        perform(script, path, cast)
    film_facts.check(list(map(Film.read, paths)), film.shows)
    return Shot(film, paths, turned)


def title_of(film: ChapterFilm) -> Both:
    english, chinese = film.title
    if not film.chapter:
        return film.title
    return f"Chapter {film.chapter}: {english}", f"第 {film.chapter} 章：{chinese}"


def page_of(
    shot: Shot, mine: tuple[int, int] | None = None, link: tuple[str, str, str] | None = None
) -> str:
    """Return the film's watch page as text. The page opens at the first moment. `mine`: how many
    functions, of how many, were the reader's, if requested. `link`: another page, and its name in
    English and Chinese."""
    film = shot.film
    texts = [path.read_text(encoding="utf-8") for path in shot.paths]
    reels = [Reel(one, text, zh) for (one, zh), text in zip(film.labels, texts)]
    knob = [label for label, _ in film.knob]
    reels += [Reel(label, path.read_text("utf-8")) for label, path in zip(knob, shot.turned)]
    moments = [
        {
            "address": shot.address(moment),
            "step": moment.step,
            "request": moment.request,
            "words": moment.words,
            "ask": moment.ask,
            "answer": moment.answer,
            "why": moment.why,
        }
        for moment in film.moments
    ]
    about = {"caption": shot.caption, "note": film.note, "moments": moments}
    settings: dict[str, Any] = {"film": about | {"scenes": film.scenes, "rule": film.rule}}
    settings |= {"num_turned": len(shot.turned), "mine": mine, "link": link}
    return make_page(reels, title_of(film), shot.start(film.moments[0]), **settings)


def film_pages(
    films: Iterable[ChapterFilm], mine: tuple[int, int] | None = None
) -> Iterator[tuple[Shot, str]]:
    """Perform each film with the settings of its knob, and make its page. `mine`: see `page_of`."""
    cast = load_cast()
    with tempfile.TemporaryDirectory() as folder:
        for film in films:
            shot = shoot(film, Path(folder), cast, has_knob=True)
            yield shot, page_of(shot, mine)


# -- the table


def read_films(text: str) -> Iterator[ChapterFilm]:
    words = "title label caption note rule words ask why"
    in_chinese = " ".join(f"{word}_zh" for word in words.split())
    others = "scripts shows scenes columns knob answer still"
    rows = list(read_rows(text, f"{others} {words} {in_chinese}"))
    starts = [i for i, row in enumerate(rows) if row.head.startswith("film ")]
    for start, end in pairwise([*starts, len(rows)]):
        row, *moments = rows[start:end]
        labels = tuple(zip(row.said["label"], row.said["label_zh"]))
        _, name, *folder = row.head.split()
        yield ChapterFilm(
            name=name,
            chapter=int(name) if name.isdigit() else 0,
            folder="".join(folder),
            title=_both(row, "title"),
            scripts=tuple(getattr(film_scripts, name) for name in row.text("scripts").split()),
            shows=tuple(row.said["shows"]),
            caption=_both(row, "caption"),
            moments=tuple(map(_moment, moments)),
            scenes=tuple(row.text("scenes").split()),
            columns=row.text("columns"),
            knob=tuple(map(_setting, row.said["knob"])),
            labels=labels or (("run", "运行"),),
            note=_both(row, "note"),
            rule=_both(row, "rule"),
        )


def _setting(line: str) -> tuple[str, Mapping[str, Any]]:
    label, _, changes = line.partition(" ")
    return label, json.loads(changes)


def _moment(row: TextRow) -> Moment:
    scenes = row.text("still").split()
    still = tuple(zip(scenes[::2], map(int, scenes[1::2])))
    _, step, *request = row.head.split()
    kind, _, what = row.text("answer").partition(" ")
    return Moment(
        step=int(step),
        words=_both(row, "words"),
        request="".join(request) or None,
        ask=_both(row, "ask"),
        answer=(kind, int(what) if kind == "block" else what) if kind else None,
        why=_both(row, "why"),
        still=still,
    )


def _both(row: TextRow, word: str) -> Both:
    return row.text(word), row.text(f"{word}_zh")


# Film 0 is shown if no run is given; films with names other than numbers on request.
EVERYTHING, *_OTHERS = read_films(TABLE.read_text(encoding="utf-8"))
FILMS = {film.chapter: film for film in _OTHERS if film.chapter}
BEYOND = {film.name: film for film in _OTHERS if not film.chapter}
