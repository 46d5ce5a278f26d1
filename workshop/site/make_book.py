"""Build the book as a web site in two languages: `make book`, `python -m workshop.make_book`.

    build/book/en/, build/book/zh/      the pages, built by Sphinx, each language with its search
    build/book/films/                   the recorded runs that the pages show
    build/book/source/                  a copy of each file that a page links to

`--no-films` shows the films' stills instead. `--check` opens the site in a browser afterwards and
tests it (`check_book.py`); `--pdf` also prints it, one PDF a language. The site makes no request
to another host, and apart from its search works from `file://`.

If `[project.urls] Repository` or the environment variable `BOOK_REPOSITORY` names the repository,
links to source files go there, at the built commit."""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from workshop.book.path import ROOT
from workshop.book.repository import repository_address
from workshop.site import source_pages, staging

HERE = Path(__file__).parent
OUT = ROOT / "build" / "book"
FILMS = ROOT / "build" / "site_films"  # a folder for each digest of what the films are made of
MADE_OF = ("0*/*.py", "0*/beyond/*.py", "common", "workshop/watch", "workshop/book/text_rows.py")
LANGUAGES = ("en", "zh")


def film_folder() -> Path:
    """Return a folder with all films, recorded now if one of the files they are made of is new."""
    listed = _git("ls-files", "--cached", "--others", "--exclude-standard", "--", *MADE_OF)
    digest = hashlib.sha256()
    for name in sorted(set(listed.split("\n"))):
        if name.endswith((".md", ".ipynb")) or "/test" in name or not (ROOT / name).is_file():
            continue
        digest.update(name.encode() + b"\0" + (ROOT / name).read_bytes())
    folder = FILMS / digest.hexdigest()[:16]
    if not folder.exists():
        # torch, and all that computes
        from workshop.watch.films import BEYOND, NUM_TAKES, page_of, shoot
        from workshop.watch.films import FILMS as CHAPTERS
        from workshop.watch.workloads import load_cast

        shutil.rmtree(FILMS, ignore_errors=True)  # those of older code
        with tempfile.TemporaryDirectory() as place:
            cast, made = load_cast(), Path(place, "made")
            made.mkdir()
            for film in (*CHAPTERS.values(), *BEYOND.values()):
                # Those beyond the chapters bring models of their own.
                shot = shoot(film, Path(place), cast if film.chapter else None, NUM_TAKES, True)
                text = page_of(shot)
                Path(made, f"film_{film.name}.html").write_text(text, encoding="utf-8")
            shutil.copytree(made, folder)
    return folder


def build(has_films: bool) -> None:
    """Build the site into `OUT`. Raises `SystemExit` with Sphinx's warnings, if it has any."""
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    repository, commit = repository_address(), _git("rev-parse", "HEAD").strip()
    if has_films:
        shutil.copytree(film_folder(), OUT / "films")
    runs, sources = [], source_pages.Sources()
    for language in LANGUAGES:
        tree = staging.stage(OUT / "stage" / language, language == "zh", has_films, repository)
        sources.add(tree, language)
        command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html"]
        command += ["-c", str(HERE), "-d", str(OUT / "stage" / f"{language}.doctrees")]
        settings = {"BOOK_LANGUAGE": language, "BOOK_REPOSITORY": repository, "BOOK_COMMIT": commit}
        runs.append(
            subprocess.Popen(
                [*command, str(tree.folder), str(OUT / language)],
                env={**os.environ, **settings},
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    if not repository:
        sources.write(OUT / "source")
    complaints = [run.communicate()[1] for run in runs]
    if any(run.returncode for run in runs):
        raise SystemExit("make book: Sphinx warned:\n" + "".join(complaints))
    for language in LANGUAGES:
        command = [sys.executable, "-m", "pagefind", "--site", str(OUT / language)]
        command += ["--root-selector", "article[role=main]"]
        command += ["--include-characters", "_"]
        run = subprocess.run(command, capture_output=True, text=True)
        if run.returncode:
            raise SystemExit(f"make book: pagefind failed:\n{run.stdout}{run.stderr}")
    shutil.copyfile(HERE / "languages.html", OUT / "index.html")
    for folder in ("stage", "jupyter_execute"):
        shutil.rmtree(OUT / folder, ignore_errors=True)


def _git(*arguments: str) -> str:
    run = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return run.stdout


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m workshop.make_book",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--no-films", action="store_true", help="stills in place of the films")
    parser.add_argument("--check", action="store_true", help="test the built site in a browser")
    parser.add_argument("--pdf", action="store_true", help="print the book, a PDF a language")
    options = parser.parse_args(arguments)
    if sys.version_info < (3, 11) or find_spec("sphinx") is None:
        raise SystemExit(
            "make book: the book is built by Python 3.11 or newer, with the extra [book]"
        )
    start = time.monotonic()
    build(has_films=not options.no_films)
    num_pages = sum(1 for _ in OUT.glob("??/**/*.html"))
    print(
        f"{OUT / 'index.html'}: {num_pages} pages in {time.monotonic() - start:.0f} s. To search, "
        f"serve it: python -m http.server -d {OUT.relative_to(ROOT)}"
    )
    if options.pdf:
        from workshop.site.print_book import print_book

        print_book(OUT)
    if options.check:
        command = [sys.executable, "-m", "pytest", "-q", str(HERE / "check_book.py")]
        raise SystemExit(subprocess.run(command, cwd=ROOT).returncode)


if __name__ == "__main__":
    main()
