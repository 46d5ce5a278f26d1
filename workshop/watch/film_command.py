"""The films of the chapters, on the command line of `python -m workshop.watch`.

--film 3 [--open]      the film of chapter 3: performed now, and one page made of it
--film adapters        that of a page beyond the chapters; or "grammars", "windows"
--stills               their decisive steps as pictures, for the chapters' texts
--facts                what they show today, into films.txt"""

from __future__ import annotations

import argparse
from pathlib import Path

from workshop.watch.page_maker import write_page

FOLDER = Path("build/films")
NAMES = (*"123456", "adapters", "grammars", "windows")


def add_films(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("one film a chapter, performed now")
    group.add_argument(
        "--film", choices=NAMES, metavar="1-6", help="of a chapter, or adapters, grammars, windows"
    )
    group.add_argument("--stills", action="store_true", help="pictures of them, into the chapters")
    group.add_argument("--facts", action="store_true", help="what they show, into films.txt")


def is_about_films(args: argparse.Namespace) -> bool:
    return args.film is not None or args.stills or args.facts


def make_films(args: argparse.Namespace, mine: tuple[int, int] | None = None) -> None:
    """Make the requested films. `mine` is as for `page_of`. Raises `ValueError` if that fails."""
    from workshop.watch.films import BEYOND, FILMS, film_pages, renew_facts  # torch, and all

    if args.stills:
        from workshop.watch.stills import make_stills

        make_stills()
    elif args.facts:
        renew_facts()
    else:
        film = BEYOND.get(args.film) or FILMS[int(args.film)]
        ((shot, page),) = film_pages([film], mine)
        print(shot.caption[0])
        write_page(args.out or FOLDER / f"film_{args.film}.html", page, args.open)
