"""`python -m common.museum`, `make museum`: see `MUSEUM.md`."""

from __future__ import annotations

import argparse
import os
import textwrap
from collections.abc import Iterator, Sequence
from itertools import groupby

from common.museum.exhibit import Exhibit
from common.museum.hall import EXHIBITS, TITLES
from common.museum.museum_page import PAGE, render, side_by_side
from common.museum.visit import broken_copy, show, try_tests
from common.tools.module_swap import ModuleSwap


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m common.museum", description="Real bugs of real engines, to look at."
    )
    parser.add_argument("bug", nargs="?", type=int, metavar="N", help="which one; none: the list")
    parser.add_argument("--find", action="store_true", help="hide the patch, and give clues")
    parser.add_argument("--reveal", action="store_true", help="with --find: all clues at once")
    parser.add_argument("--write", action="store_true", help="make MUSEUM.md anew and stop")
    options = parser.parse_args(arguments)
    if options.reveal and not options.find:
        parser.error("--reveal goes with --find; without it nothing is hidden")
    if options.find and options.bug is None:
        parser.error("--find wants a bug to look for: a number of the list")
    if options.bug is not None and not 1 <= options.bug <= len(EXHIBITS):
        parser.error(f"bug {options.bug}: it must be in [1, {len(EXHIBITS)}]")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # models here are tiny
    if options.write:
        PAGE.write_text(render(), encoding="utf-8")
    elif options.bug is None:
        print(listed())
    elif options.find:
        find(options.bug, EXHIBITS[options.bug - 1], options.reveal)
    else:
        look(options.bug, EXHIBITS[options.bug - 1])
    return 0


def listed() -> str:
    lines = []
    for chapter, group in groupby(enumerate(EXHIBITS, 1), key=lambda pair: pair[1].chapter):
        lines.append(f"\n{TITLES[chapter]}")
        lines += [f"  {number:2}  {e.title}  ({e.origin})" for number, e in group]
    return "\n".join(lines) + "\n\nLook at one: make museum BUG=8    Look for it: add ARGS=--find"


def look(number: int, exhibit: Exhibit) -> None:
    """All there is to know about it."""
    _say(f"{number}. {exhibit.title}   ({exhibit.origin}; trap {exhibit.trap})")
    _say(_filled(exhibit.seen))
    _say(_revealed(exhibit))
    with broken_copy(exhibit) as swap:
        _say(_shown(exhibit, swap))
        _say(_first_failure(exhibit, swap))
    _say(_filled(f"What it teaches. {exhibit.lesson}"))


def find(number: int, exhibit: Exhibit, is_revealed: bool) -> None:
    """The symptom, then a clue for each press of the return key, then the patch."""
    with broken_copy(exhibit) as swap:
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
    yield f"A test that notices, and what it says:\n\n{_first_failure(exhibit, swap)}"
    yield f"It is in `{exhibit.patch.place() or 'the top level of the module'}`."
    yield (
        f"{_revealed(exhibit)}\n\n{_filled(exhibit.title + '. ' + exhibit.seen)}\n\n"
        f"{_filled('What it teaches. ' + exhibit.lesson)}"
    )


def _is_asked_for() -> bool:
    try:
        return input("Return: a clue. q: no more.  ").strip().lower() != "q"
    except EOFError:
        print("\n(Nobody is at the keyboard. --reveal gives all clues at once.)")
        return False


def _shown(exhibit: Exhibit, swap: ModuleSwap) -> str:
    return side_by_side(show(exhibit, swap), show(exhibit))


def _first_failure(exhibit: Exhibit, swap: ModuleSwap) -> str:
    return try_tests(exhibit, swap, first_only=True).report.strip()


def _revealed(exhibit: Exhibit) -> str:
    return f"{exhibit.patch.file}\n\n{textwrap.indent(exhibit.patch.diff(), '    ')}"


def _filled(text: str) -> str:
    return textwrap.fill(text, 96)


def _say(text: str) -> None:
    print(f"{text}\n", flush=True)
