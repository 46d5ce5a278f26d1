"""Build the book as a web site in two languages: `make book`, `python -m workshop.make_book`.

    build/book/en/, build/book/zh/      the pages, built by Sphinx, each language with its search
    build/book/films/                   the recorded runs that the pages show
    build/site_films/, build/notebooks/     films and outputs of notebooks, until the code changes

`--no-films` shows the films' stills instead. `--check` opens the site in a browser afterwards and
tests it (`tests/check_book.py`). The site makes no request to another host, and apart from its
search works from `file://`.

If the environment variable `BOOK_REPOSITORY` has the repository's address, links to source files go
there, at the built commit; else file names are text."""

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

from tqdm import tqdm

from workshop.book.path import ROOT
from workshop.site import staging
from workshop.site.page_tree import LANGUAGES, git

HERE = Path(__file__).parent
OUT = ROOT / "build" / "book"
FILMS = ROOT / "build" / "site_films"  # a folder for each digest of what the films are made of
NOTEBOOKS = ROOT / "build" / "notebooks"  # likewise
MADE_OF = ("0*/*.py", "0*/beyond/*.py", "common", "workshop/watch", "workshop/book/text_rows.py")


def digest_of_code() -> str:
    """Return the digest of the files that films and outputs of notebooks are made of."""
    listed = git("ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *MADE_OF)
    digest = hashlib.sha256()
    for name in sorted(set(listed.split("\0"))):
        if name.endswith((".md", ".ipynb")) or "/test" in name or not (ROOT / name).is_file():
            continue
        digest.update(name.encode() + b"\0" + (ROOT / name).read_bytes())
    return digest.hexdigest()[:16]


def film_folder() -> Path:
    """Return a folder with all films, recorded now if one of the files they are made of is new."""
    folder = FILMS / digest_of_code()
    if not folder.exists():
        from workshop.watch import films  # torch, and all that computes

        FILMS.mkdir(parents=True, exist_ok=True)
        old = list(FILMS.iterdir())
        with tempfile.TemporaryDirectory(dir=FILMS) as place:
            made = Path(place, "made")
            made.mkdir()
            all_films = [*films.FILMS.values(), *films.BEYOND.values()]
            pages = films.film_pages(all_films)
            for shot, page in tqdm(pages, "make book: films", len(all_films), unit="film"):
                Path(made, f"film_{shot.film.name}.html").write_text(page, encoding="utf-8")
            made.rename(folder)
        for other in old:
            shutil.rmtree(other)
    return folder


def build(has_films: bool) -> None:
    """Build the site, which takes the place of an earlier one in `OUT` when it is complete. Raises
    `SystemExit` with what Sphinx or Pagefind says if they fail."""
    OUT.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=OUT.parent, prefix="book-") as place:
        site = Path(place, "book")
        site.mkdir()
        if has_films:
            shutil.copytree(film_folder(), site / "films")
        told = "" if notebook_folder().exists() else ", and executes the notebooks"
        print(f"make book: Sphinx builds the pages of two languages{told} (a minute)", flush=True)
        _build_pages(site, Path(place, "stage"), has_films)
        print("make book: Pagefind reads them, for the search", flush=True)
        for language in LANGUAGES:
            _index(site / language)
        shutil.copyfile(HERE / "languages.html", site / "index.html")
        shutil.rmtree(site / "jupyter_execute", ignore_errors=True)
        shutil.rmtree(OUT, ignore_errors=True)
        site.rename(OUT)


def notebook_folder() -> Path:
    """Return the folder of the notebooks' outputs. Removes those of other code."""
    folder = NOTEBOOKS / digest_of_code()
    for other in NOTEBOOKS.glob("*"):
        if other != folder:
            shutil.rmtree(other)
    return folder


def _build_pages(site: Path, folder: Path, has_films: bool) -> None:
    repository = os.environ.get("BOOK_REPOSITORY", "")
    commit = git("rev-parse", "HEAD").strip()
    commands = []
    for language in LANGUAGES:
        tree = staging.stage(folder / language, language == "zh", has_films, repository)
        command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html"]
        command += ["-c", str(HERE), "-d", str(folder / f"{language}.doctrees")]
        commands.append([*command, str(tree.folder), str(site / language)])
    settings = {**os.environ, "BOOK_REPOSITORY": repository, "BOOK_COMMIT": commit}
    settings |= {"BOOK_NOTEBOOKS": str(notebook_folder()), "TQDM_DISABLE": "1"}
    runs = [
        subprocess.Popen(
            command, env={**settings, "BOOK_LANGUAGE": language}, stderr=subprocess.PIPE, text=True
        )
        for language, command in zip(LANGUAGES, commands, strict=True)
    ]
    try:
        complaints = [run.communicate()[1] for run in runs]
    finally:
        for run in runs:
            run.kill()
    if any(run.returncode for run in runs):
        raise SystemExit("make book: Sphinx warned:\n" + "".join(complaints))


def _index(folder: Path) -> None:
    command = [sys.executable, "-m", "pagefind", "--site", str(folder)]
    command += ["--root-selector", "article[role=main]", "--include-characters", "_"]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        raise SystemExit(f"make book: pagefind failed:\n{run.stdout}{run.stderr}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m workshop.make_book",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--no-films", action="store_true", help="stills in place of the films")
    parser.add_argument("--check", action="store_true", help="test the built site in a browser")
    options = parser.parse_args(arguments)
    if sys.version_info < (3, 11) or find_spec("sphinx") is None:
        raise SystemExit(
            "make book: the site needs Python 3.11 or newer, and the extra [book]. With another "
            "Python: rm -rf .venv, then make book PYTHON=python3.12"
        )
    start = time.monotonic()
    build(has_films=not options.no_films)
    num_pages = sum(1 for _ in OUT.glob("??/**/*.html"))
    print(
        f"{OUT / 'index.html'}: {num_pages} pages in {time.monotonic() - start:.0f} s. To search, "
        f"serve it: python -m http.server -d {OUT.relative_to(ROOT)}"
    )
    if options.check:
        command = [sys.executable, "-m", "pytest", "-q", str(HERE / "tests" / "check_book.py")]
        environment = {**os.environ, "VLLM_FS_REQUIRE_ALL": "1"}  # else they would be skipped
        raise SystemExit(subprocess.run(command, cwd=ROOT, env=environment).returncode)


if __name__ == "__main__":
    main()
