"""The command that builds the site: when films are recorded again, and what it needs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from workshop.site import make_book
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
