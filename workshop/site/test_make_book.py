"""The command that builds the site: when films are recorded again, and what it needs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from workshop.book.path import ROOT
from workshop.site import make_book
from workshop.site.page_tree import git
from workshop.watch import films


def test_films_are_kept_until_a_file_they_are_made_of_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And those of a recording that fails are not kept."""
    kept, names, recordings = tmp_path / "kept", ["a.py", "README.md", "in/test_a.py"], list[str]()

    def film_pages(_: object) -> Iterator[tuple[SimpleNamespace, str]]:
        recordings.append("begun")
        yield SimpleNamespace(film=SimpleNamespace(name="4")), "a page"
        if len(recordings) == 2:
            raise ValueError("the second recording")

    def write(name: str, text: str) -> None:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")

    monkeypatch.setattr(films, "film_pages", film_pages)
    monkeypatch.setattr(make_book, "ROOT", tmp_path)
    monkeypatch.setattr(make_book, "FILMS", kept)
    monkeypatch.setattr(make_book, "git", lambda *_: "".join(f"{name}\0" for name in names))
    for name in names:
        write(name, "one")
    first = make_book.film_folder()
    assert [path.name for path in first.iterdir()] == ["film_4.html"]
    write("README.md", "two")
    write("in/test_a.py", "two")
    assert make_book.film_folder() == first and len(recordings) == 1
    write("a.py", "two")
    with pytest.raises(ValueError, match="second"):
        make_book.film_folder()
    assert list(kept.iterdir()) == [first]
    second = make_book.film_folder()
    assert list(kept.iterdir()) == [second] and second != first and len(recordings) == 3


def test_films_are_made_of_the_modules_that_record_them() -> None:
    code = "import sys, workshop.watch.films\nprint(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    files = [name.replace(".", "/") + ".py" for name in run.stdout.split()]
    listed = set(git("ls-files", "-z", "--", *make_book.MADE_OF).split("\0"))
    others = {f for f in files if f.startswith(("common/", "workshop/"))} - listed
    assert not {f for f in others if (ROOT / f).is_file()} and "common/engine.py" in files


def test_without_sphinx_the_command_says_which_python_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(make_book, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"Python 3\.11 or newer"):
        make_book.main([])
