"""`python -m workshop.watch`, `make watch`: a page that steps through a run.

python -m workshop.watch                                 the film of chapter 4, made now
python -m workshop.watch run.jsonl --open                what LLM(events=...) wrote: run.html
python -m workshop.watch run.jsonl --beside other.jsonl  two runs on one axis of steps
python -m workshop.watch --film 3 --open                 that of chapter 3; or of adapters, ...
python -m workshop.watch --mine                          made with the functions in my/
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from workshop.practice.tasks.workbench import Workbench
from workshop.watch.page_maker import Reel, make_page, write_page
from workshop.watch.replay.film import Film

FOLDER = Path("build/films")
NAMES = (*"123456", "adapters", "grammars", "windows")


def main(argv: list[str] | None = None, bench: Workbench | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m workshop.watch",
        description="Make a page on which a run can be watched.",
    )
    parser.add_argument(
        "run", nargs="?", type=Path, help="events of a run (default: chapter 4's film)"
    )
    parser.add_argument("--beside", type=Path, metavar="F", help="another run, to compare with")
    parser.add_argument(
        "--out", type=Path, metavar="F", help="default: RUN.html beside the run, or watch.html"
    )
    parser.add_argument("--open", action="store_true", help="show it in the browser")
    parser.add_argument("--mine", action="store_true", help="run with what you have written")
    films = parser.add_argument_group("one film a chapter, performed now")
    films.add_argument(
        "--film", choices=NAMES, metavar="1-6", help="of a chapter, or adapters, grammars, windows"
    )
    films.add_argument("--stills", action="store_true", help="pictures of them, into the chapters")
    args = parser.parse_args(argv)
    if args.beside is not None and args.run is None:
        parser.error("--beside needs a run to show it next to")
    if args.run is not None and args.run.name in NAMES:
        parser.error(f"run must be a file; the film of {args.run} is: --film {args.run}")
    is_about_films = args.film is not None or args.stills
    if args.run is not None and (is_about_films or args.mine):
        parser.error("--film and --mine record a new run; give no run")
    try:
        with _installed(bench) if args.mine else nullcontext() as mine:
            if is_about_films:
                _make_films(args, mine)
                return 0
            if args.run is None:
                _make_two(args.out or Path("watch.html"), mine, args.open)
            else:
                runs = [path for path in (args.run, args.beside) if path is not None]
                _show_runs(runs, args.out, args.open)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _make_films(args: argparse.Namespace, mine: tuple[int, int] | None) -> None:
    """Make the requested films. `mine` is as for `page_of`. Raises `ValueError` if that fails."""
    from workshop.watch import films  # torch, and all

    if args.stills:
        from workshop.watch.stills import make_stills

        make_stills()
    else:
        film = films.BEYOND.get(args.film) or films.FILMS[int(args.film)]
        _wait()
        ((shot, page),) = films.film_pages([film], mine)
        print(shot.caption[0])
        write_page(args.out or FOLDER / f"film_{args.film}.html", page, args.open)


def _wait() -> None:
    print("(recording the engine: some seconds)", file=sys.stderr, flush=True)


def _installed(bench: Workbench | None) -> AbstractContextManager[tuple[int, int]]:
    # Imported late: grading needs pytest, a film does not.
    from workshop.practice.tasks.mine import installed

    return installed(bench)


def _show_runs(runs: list[Path], out: Path | None, is_opened: bool) -> None:
    """Write a page of one or two runs, by default next to the first one and named for them."""
    reels = [read_reel(path) for path in runs]
    out = out or runs[0].with_name("_".join(path.stem for path in runs) + ".html")
    if out in runs:
        raise ValueError(f"--out must not be a run that the page shows, got {out}")
    write_page(out, make_page(reels), is_opened)


def read_reel(path: Path) -> Reel:
    """Read a run. Raises `FileNotFoundError`, and `ValueError` for a file that is not a run."""
    try:
        Film.read(path).last_state()
    except ValueError as error:
        wanted = 'a record of a run, as LLM(events="run.jsonl") and python -m common.demo --events'
        raise ValueError(f"{path}: {error} (It should be {wanted} write it.)") from None
    return Reel(path.stem, path.read_bytes().decode("utf-8", errors="replace"))


def _make_two(out: Path, mine: tuple[int, int] | None, is_opened: bool) -> None:
    """Make two pages that link to each other: one idea that takes a minute to understand, and a run
    with everything together."""
    from workshop.watch import films  # torch: not needed to show a run that is there

    beside = out.with_name(f"{out.stem}_everything{out.suffix}")
    _wait()
    cast = films.load_cast()
    with tempfile.TemporaryDirectory() as folder:
        every = films.shoot(films.EVERYTHING, Path(folder), cast)
        one = films.shoot(films.FILMS[4], Path(folder), cast, has_knob=True)
        back = (out.name, *films.title_of(one.film))
        beside.write_text(films.page_of(every, mine, back), encoding="utf-8", newline="\n")
        link = (beside.name, "Everything in one run", "一次运行看全部")
        write_page(out, films.page_of(one, mine, link), is_opened)
