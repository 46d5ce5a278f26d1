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
    LABELS,
    TITLES,
    Words,
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
        description="Show real bugs of real engines.",
    )
    parser.add_argument(
        "bug", nargs="?", type=int, metavar="N", help="its number; without one: the list"
    )
    parser.add_argument("--find", action="store_true", help="hide the patch and give clues")
    parser.add_argument(
        "--reveal", action="store_true", help="with --find: print all clues without asking"
    )
    parser.add_argument(
        "--watch", action="store_true", help="write a page with two films: with the bug and without"
    )
    parser.add_argument(
        "--out", type=Path, metavar="F", help="with --watch: the page (default: museum-N.html)"
    )
    parser.add_argument("--open", action="store_true", help="with --watch: open it in the browser")
    options = parser.parse_args(arguments)
    if options.reveal and not options.find:
        parser.error("--reveal needs --find; otherwise nothing is hidden")
    if options.find and options.bug is None:
        parser.error("--find needs a bug: a number of the list")
    if options.watch and options.bug is None:
        parser.error("--watch needs a bug: a number of the list")
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
        "\n\nRead one: make museum BUG=8    Find it yourself: add ARGS=--find    "
        "Watch it: ARGS=--watch"
    )


def look(number: int, exhibit: Exhibit) -> None:
    """Print the whole story, the patch, its effect and a test that fails."""
    words = words_of(exhibit)
    _say(f"{number}. {words.title}   ({exhibit.origin}; trap {exhibit.trap})")
    _say(_labelled(words, "symptom", "cause"))
    _say(_revealed(exhibit))
    with broken_copy(exhibit.patch) as swap:
        _say(_shown(exhibit, swap))
        _say(_first_failure(exhibit, swap))
    _say(_labelled(words, "lesson", "watch"))
    if not isinstance(exhibit.watch, str):
        _say(f"    make museum BUG={number} ARGS=--watch")


def watch(
    number: int, exhibit: Exhibit, out: Path, is_opened: bool = False, is_hidden: bool = False
) -> None:
    """Write a page with a run with the bug next to one without. It opens at the first difference.
    `is_hidden`: it does not name the bug."""
    if isinstance(exhibit.watch, str):
        reason = "" if is_hidden else words_of(exhibit).watch
        _say(f"{number}. There is nothing to watch. {reason}")
        return
    with tempfile.TemporaryDirectory() as folder, broken_copy(exhibit.patch) as swap:
        wrong, right = films(exhibit.watch, swap, Path(folder))
        texts = [(Path(folder) / name).read_text(encoding="utf-8") for name in _REELS]
    where, broken = parting(right, wrong), contradiction(wrong)
    _, chinese = CHINESE[exhibit.title]
    name, name_zh = ("", "") if is_hidden else (exhibit.title, chinese.title)
    title = (f"Exhibit {number}. {name}".strip(), f"展品 {number} {name_zh}".strip())
    caption = _HIDDEN if is_hidden else (exhibit.watch.look, chinese.watch)
    moments = moments_of(where, broken, wrong)
    start = moments[0]["address"] if moments else ""
    reels = [Reel(label, text, zh) for (label, zh), text in zip(_LABELS, texts)]
    about = {"caption": caption, "note": ("", ""), "moments": moments, "scenes": scenes_of(where)}
    page = make_page(reels, title, start, film=about)
    if not is_hidden:
        words = words_of(exhibit)
        _say(f"{number}. {words.title}   ({exhibit.origin})")
        _say(_labelled(words, "symptom", "cause", "watch"))
    _say(_compared(wrong, right))
    write_page(out, page, is_opened)


_REELS = ("wrong.jsonl", "right.jsonl")
_LABELS = (("The run with the bug", "有 bug 的运行"), ("The run without it", "没有 bug 的运行"))
_HIDDEN = (
    "Left with a bug, right without. Which line of the engine could make this difference?",
    "左边有 bug，右边没有。引擎里哪一行会造成这样的差别？",
)


def films(workload: Workload, swap: ModuleSwap, folder: Path) -> tuple[RunOnFilm, RunOnFilm]:
    """Record the run with the bug and the run without; `folder` gets their events, as `_REELS`."""
    wrong, right = (folder / name for name in _REELS)
    return make_film(workload, wrong, swap), make_film(workload, right)


def _compared(wrong: RunOnFilm, right: RunOnFilm) -> str:
    """Return the differences that can be found without looking."""
    lines = [f"with the bug {wrong.num_steps} steps, without {right.num_steps}"]
    if (where := parting(right, wrong)) is not None:
        lines.append(f"the first difference is in {where}")
    if wrong.error:
        lines.append(f"the run with the bug ended with {wrong.error}")
    if (broken := contradiction(wrong)) is not None:
        lines.append(f"its step {broken.step} is impossible: {broken.sentence}")
    return "\n".join(lines)


def find(number: int, exhibit: Exhibit, is_revealed: bool) -> None:
    """Print the symptom, then a clue for each press of the return key, then the patch."""
    with broken_copy(exhibit.patch) as swap:
        all_clues = clues(exhibit, swap)
        _say(f"{number}. There is a bug in {exhibit.patch.file}. While you look for it, it is in")
        _say(f"    {swap.file}")
        _say(_labelled(words_of(exhibit), "symptom"))
        _say(f"What it does:\n\n{next(all_clues)}")
        for clue in all_clues:
            if not (is_revealed or _is_asked_for()):
                return
            _say(clue)


def clues(exhibit: Exhibit, swap: ModuleSwap) -> Iterator[str]:
    """Yield clues, from the symptom to the patch. Each is computed when it is requested."""
    yield _shown(exhibit, swap)
    of_films = _clues_of_films(exhibit, swap)
    yield from of_films[:1]
    yield f"A test that fails, and its message:\n\n{_first_failure(exhibit, swap)}"
    yield from of_films[1:]
    yield f"It is in `{exhibit.patch.symbol or 'the top level of the module'}`."
    words = words_of(exhibit)
    parts = _labelled(words, "cause", "lesson", "watch")
    yield f"{_revealed(exhibit)}\n\n{words.title}\n\n{parts}"


def _clues_of_films(exhibit: Exhibit, swap: ModuleSwap) -> list[str]:
    """Where the two films differ, and the event of each there."""
    if isinstance(exhibit.watch, str):
        return []
    with tempfile.TemporaryDirectory() as folder:
        wrong, right = films(exhibit.watch, swap, Path(folder))
    where = parting(right, wrong)
    if where is None:
        return []
    guests = ", ".join(guest.name for guest in exhibit.watch.guests)
    return [
        _filled(f"An engine was recorded serving {guests}, with the bug and without.")
        + f"\n\n{_compared(wrong, right)}\n\n(ARGS='--find --watch' writes a page with both.)",
        "The first event that differs:\n\n"
        + side_by_side(line_of(where.wrong), line_of(where.right)),
    ]


def _is_asked_for() -> bool:
    try:
        return input("Return: next clue. q: quit.  ").strip().lower() != "q"
    except EOFError:
        print("\n(No terminal. --reveal prints all clues without asking.)")
        return False


def _shown(exhibit: Exhibit, swap: ModuleSwap) -> str:
    return side_by_side(exhibit.show(swap), exhibit.show())


def _first_failure(exhibit: Exhibit, swap: ModuleSwap) -> str:
    """Return the first test that fails and the first line of its message."""
    run = try_tests(exhibit.tests, swap, first_only=True, limit_s=exhibit.limit_s(swap))
    if run.first is None:
        return run.report.strip()
    message, *more = run.first.message.strip().splitlines() or [""]
    if ", ...]" in message:  # the elided part of two lists can be their only difference
        message += next((f" ({line.strip()})" for line in more if "At index" in line), "")
    return f"Caught by {run.first.test}\n    {textwrap.shorten(message, 160)}"


def _revealed(exhibit: Exhibit) -> str:
    return f"{exhibit.patch.file}\n\n{textwrap.indent(exhibit.patch.diff(), '    ')}"


def _labelled(words: Words, *parts: str) -> str:
    """The given parts of a story, each a paragraph with its label."""
    blank = "" if is_chinese() else " "
    labels = [LABELS[part][is_chinese()] for part in parts]
    return "\n".join(_filled(f"{x}{blank}{getattr(words, p)}") for x, p in zip(labels, parts))


def _filled(text: str) -> str:
    """Wrap the text. Chinese is returned unchanged, because it has no blanks to break at."""
    return text if is_chinese() else textwrap.fill(text, 96)


def _say(text: str) -> None:
    print(f"{text}\n", flush=True)
