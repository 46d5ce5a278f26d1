"""The films of the chapters, on the command line of `python -m workshop.watch`.

--film 3 [--open]      the film of chapter 3: performed now, and one page made of it
--film adapters        that of a page beyond the chapters; or "grammars", "windows"
--films                all six, with a page that leads to them, in build/films/
--stills               their decisive steps as pictures, for the chapters' texts
--facts                what they show today, into films.txt"""

from __future__ import annotations

import argparse
import html
from pathlib import Path

from workshop.watch.page_maker import write_page

FOLDER = Path("build/films")
NAMES = (*"123456", "adapters", "grammars", "windows")


def add_films(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("one film a chapter, performed now")
    group.add_argument(
        "--film", choices=NAMES, metavar="1-6", help="of a chapter, or adapters, grammars, windows"
    )
    group.add_argument("--films", action="store_true", help=f"all six, into {FOLDER}/")
    group.add_argument("--stills", action="store_true", help="pictures of them, into the chapters")
    group.add_argument("--facts", action="store_true", help="what they show, into films.txt")


def is_about_films(args: argparse.Namespace) -> bool:
    return args.film is not None or args.films or args.stills or args.facts


def make_films(args: argparse.Namespace, mine: tuple[int, int] | None = None) -> None:
    """Make the requested films. `mine` is as for `page_of`. Raises `ValueError` if that fails."""
    from workshop.watch.films import BEYOND, FILMS, film_pages, renew_facts  # torch, and all

    if args.stills:
        from workshop.watch.stills import make_stills

        make_stills()
    elif args.facts:
        renew_facts()
    elif args.film is not None:
        film = BEYOND.get(args.film) or FILMS[int(args.film)]
        ((shot, page),) = film_pages([film], mine)
        print(shot.caption[0])
        write_page(args.out or FOLDER / f"film_{args.film}.html", page, args.open)
    else:
        target, rows = args.out or FOLDER, []
        for film, (shot, page) in zip(FILMS.values(), film_pages(FILMS.values(), mine)):
            write_page(target / f"film_{film.name}.html", page)
            rows.append((film.chapter, film.title, shot.caption))
        write_page(target / "index.html", index_page(rows), args.open)


_INDEX = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1"><title>Six films</title>
<style>
body {{ max-width: 46em; margin: 2em auto; padding: 0 1em; font: 16px/1.5 system-ui, sans-serif;
  color: #222; background: #fff; }}
h1 {{ font-size: 1.4em; }} h2 {{ font-size: 1.1em; margin: 1.6em 0 .2em; }} p {{ margin: .2em 0; }}
a {{ color: #0b57d0; }} [lang=zh-CN] {{ color: #595959; }}
</style></head><body>
<h1>One film a chapter · 每章一部影片</h1>
<p>Each is a real run of the engine that the chapters are, made on this machine a moment ago.</p>
<p lang="zh-CN">每一部都是各章代码所组成的引擎的真实运行，刚刚在这台机器上录制。</p>
{rows}
</body></html>
"""


def index_page(films: list[tuple[int, tuple[str, str], tuple[str, str]]]) -> str:
    """Return the index page. `films` has each film's chapter, title and caption."""
    rows = []
    for number, titles, captions in films:
        (title, chinese_title), (caption, chinese) = (
            map(html.escape, t) for t in (titles, captions)
        )
        rows.append(
            f'<h2><a href="film_{number}.html">{number}. {title}</a> '
            f'· <a href="film_{number}.html#lang=zh" lang="zh-CN">{chinese_title}</a></h2>\n'
            f'<p>{caption}</p>\n<p lang="zh-CN">{chinese}</p>'
        )
    return _INDEX.format(rows="\n".join(rows))
