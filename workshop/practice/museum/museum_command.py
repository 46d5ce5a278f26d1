"""`python -m workshop.museum`, `make museum`: see `MUSEUM.md`."""

from __future__ import annotations

import argparse
import os
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from workshop.book.text_rows import is_chinese
from workshop.practice.module_swap import ModuleSwap
from workshop.practice.museum.exhibit import Exhibit, Workload
from workshop.practice.museum.hall import (
    CHINESE,
    CHINESE_TITLES,
    EXHIBITS,
    TITLES,
    words_of,
)
from workshop.practice.museum.museum_page import (
    moments_of,
    scenes_of,
    side_by_side,
)
from workshop.practice.museum.watched_run import (
    RunOnFilm,
    contradiction,
    line_of,
    make_film,
    parting,
)
from workshop.practice.trial import broken_copy, try_tests
from workshop.watch.page_maker import Reel, make_page, write_page


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m workshop.museum",
        description="Real bugs of real engines, to look at.",
    )
    parser.add_argument("bug", nargs="?", type=int, metavar="N", help="which one; none: the list")
    parser.add_argument("--find", action="store_true", help="hide the patch, and give clues")
    parser.add_argument("--reveal", action="store_true", help="with --find: all clues at once")
    parser.add_argument(
        "--watch", action="store_true", help="write a page with two films: with the bug and without"
    )
    parser.add_argument(
        "--out", type=Path, metavar="F", help="with --watch: the page (default: museum-N.html)"
    )
    parser.add_argument("--open", action="store_true", help="with --watch: show it in the browser")
    options = parser.parse_args(arguments)
    if options.reveal and not options.find:
        parser.error("--reveal needs --find; without it nothing is hidden")
    if options.find and options.bug is None:
        parser.error("--find must have a bug to look for: a number of the list")
    if options.watch and options.bug is None:
        parser.error("--watch must have a bug to watch: a number of the list")
    if (options.out or options.open) and not options.watch:
        parser.error("--out and --open need --watch, which writes a page")
    if options.bug is not None and not 1 <= options.bug <= len(EXHIBITS):
        parser.error(f"bug must be in [1, {len(EXHIBITS)}], got {options.bug}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # models here are tiny
    if options.bug is None:
        print(listed())
    else:
        exhibit = EXHIBITS[options.bug - 1]
        if options.watch:
            out = options.out or Path(f"museum-{options.bug}.html")
            watch(options.bug, exhibit, out, options.open, is_hidden=options.find)
        if options.find:
            find(options.bug, exhibit, options.reveal)
        elif not options.watch:
            look(options.bug, exhibit)
    return 0


def listed() -> str:
    lines = []
    for chapter, group in groupby(enumerate(EXHIBITS, 1), key=lambda pair: pair[1].chapter):
        lines.append(f"\n{(CHINESE_TITLES if is_chinese() else TITLES)[chapter]}")
        lines += [f"  {number:2}  {words_of(e).title}  ({e.origin})" for number, e in group]
    return "\n".join(lines) + (
        "\n\nLook at one: make museum BUG=8    Look for it: add ARGS=--find    "
        "Watch it: ARGS=--watch"
    )


def look(number: int, exhibit: Exhibit) -> None:
    """All there is to know about it."""
    words = words_of(exhibit)
    _say(f"{number}. {words.title}   ({exhibit.origin}; trap {exhibit.trap})")
    _say(_filled(words.seen))
    _say(_revealed(exhibit))
    with broken_copy(exhibit.patch) as swap:
        _say(_shown(exhibit, swap))
        _say(_first_failure(exhibit, swap))
    _say(_taught(exhibit))


def watch(
    number: int, exhibit: Exhibit, out: Path, is_opened: bool = False, is_hidden: bool = False
) -> None:
    """Writes a page on which a run with the bug stands beside one without, and opens where the two
    part. `is_hidden`: it does not say what the bug is."""
    if isinstance(exhibit.watch, str):
        _say(
            f"{number}. There is nothing to watch. " + ("" if is_hidden else words_of(exhibit).look)
        )
        return
    with tempfile.TemporaryDirectory() as folder, broken_copy(exhibit.patch) as swap:
        wrong, right = films(exhibit.watch, swap, Path(folder))
        texts = [(Path(folder) / name).read_text(encoding="utf-8") for name in _REELS]
    where, broken = parting(right, wrong), contradiction(wrong)
    _, chinese = CHINESE[exhibit.title]
    name, name_zh = ("", "") if is_hidden else (exhibit.title, chinese.title)
    title = (f"Exhibit {number}. {name}".strip(), f"展品 {number} {name_zh}".strip())
    caption = _HIDDEN if is_hidden else (exhibit.watch.look, chinese.look)
    moments = moments_of(where, broken, wrong)
    start = moments[0]["address"] if moments else ""
    reels = [Reel(label, text, zh) for (label, zh), text in zip(_LABELS, texts)]
    about = {"caption": caption, "note": ("", ""), "moments": moments, "scenes": scenes_of(where)}
    page = make_page(reels, title, start, film=about)
    if not is_hidden:
        words = words_of(exhibit)
        _say(f"{number}. {words.title}   ({exhibit.origin})")
        _say(_filled(f"{words.seen} {words.look}"))
    _say(_compared(wrong, right))
    write_page(out, page, is_opened)


_REELS = ("wrong.jsonl", "right.jsonl")
_LABELS = (("The run with the bug", "有 bug 的运行"), ("The run without it", "没有 bug 的运行"))
_HIDDEN = (
    "Left with a bug, right without. Which line of the engine would make this difference?",
    "左边有 bug，右边没有。引擎里哪一行会造成这样的差别？",
)


def films(workload: Workload, swap: ModuleSwap, folder: Path) -> tuple[RunOnFilm, RunOnFilm]:
    """With the bug, and without; their events are in files of `folder`, `_REELS`."""
    wrong, right = (folder / name for name in _REELS)
    return make_film(workload, wrong, swap), make_film(workload, right)


def _compared(wrong: RunOnFilm, right: RunOnFilm) -> str:
    """What the two say, before anybody has looked."""
    lines = [f"with the bug {wrong.num_steps} steps, without {right.num_steps}"]
    if (where := parting(right, wrong)) is not None:
        lines.append(f"the two part in {where}")
    if wrong.error:
        lines.append(f"the run with the bug ended with {wrong.error}")
    if (broken := contradiction(wrong)) is not None:
        lines.append(f"its step {broken.step} can not be: {broken.sentence}")
    return "\n".join(lines)


def find(number: int, exhibit: Exhibit, is_revealed: bool) -> None:
    """The symptom, then a clue for each press of the return key, then the patch."""
    with broken_copy(exhibit.patch) as swap:
        all_clues = clues(exhibit, swap)
        _say(
            f"{number}. There is a bug somewhere in {exhibit.patch.file}. While you look, it is in"
        )
        _say(f"    {swap.file}")
        _say(f"What it does:\n\n{next(all_clues)}")
        for clue in all_clues:
            if not (is_revealed or _is_asked_for()):
                return
            _say(clue)


def clues(exhibit: Exhibit, swap: ModuleSwap) -> Iterator[str]:
    """From what a user sees to the patch. Each is worked out when it is asked for."""
    yield _shown(exhibit, swap)
    of_films = _clues_of_films(exhibit, swap)
    yield from of_films[:1]
    yield f"A test that notices, and what it says:\n\n{_first_failure(exhibit, swap)}"
    yield from of_films[1:]
    yield f"It is in `{exhibit.patch.symbol or 'the top level of the module'}`."
    words = words_of(exhibit)
    yield f"{_revealed(exhibit)}\n\n{_filled(f'{words.title}. {words.seen}')}\n\n{_taught(exhibit)}"


def _clues_of_films(exhibit: Exhibit, swap: ModuleSwap) -> list[str]:
    """Where two films part, and what each says there."""
    if isinstance(exhibit.watch, str):
        return []
    with tempfile.TemporaryDirectory() as folder:
        wrong, right = films(exhibit.watch, swap, Path(folder))
    where = parting(right, wrong)
    if where is None:
        return []
    guests = ", ".join(guest.name for guest in exhibit.watch.guests)
    return [
        _filled(f"An engine has served {guests} on film, with the bug and without.")
        + f"\n\n{_compared(wrong, right)}\n\n(ARGS='--find --watch' writes a page of the two.)",
        "The first event that is another:\n\n"
        + side_by_side(line_of(where.wrong), line_of(where.right)),
    ]


def _is_asked_for() -> bool:
    try:
        return input("Return: a clue. q: no more.  ").strip().lower() != "q"
    except EOFError:
        print("\n(Nobody is at the keyboard. --reveal gives all clues at once.)")
        return False


def _shown(exhibit: Exhibit, swap: ModuleSwap) -> str:
    return side_by_side(exhibit.show(swap), exhibit.show())


def _first_failure(exhibit: Exhibit, swap: ModuleSwap) -> str:
    """Which test, and the first line of what it says."""
    run = try_tests(exhibit.tests, swap, first_only=True, limit_s=exhibit.limit_s(swap))
    if run.first is None:
        return run.report.strip()
    said, *more = run.first.message.strip().splitlines() or [""]
    if ", ...]" in said:  # of two lists, what is left out may be all that differs
        said += next((f" ({line.strip()})" for line in more if "At index" in line), "")
    return f"Noticed by {run.first.test}\n    {textwrap.shorten(said, 160)}"


def _revealed(exhibit: Exhibit) -> str:
    return f"{exhibit.patch.file}\n\n{textwrap.indent(exhibit.patch.diff(), '    ')}"


def _taught(exhibit: Exhibit) -> str:
    lesson = words_of(exhibit).lesson
    return f"教训。{lesson}" if is_chinese() else _filled(f"What it teaches. {lesson}")


def _filled(text: str) -> str:
    """Chinese as it is: it has no blanks at which a line could end."""
    return text if is_chinese() else textwrap.fill(text, 96)


def _say(text: str) -> None:
    print(f"{text}\n", flush=True)
