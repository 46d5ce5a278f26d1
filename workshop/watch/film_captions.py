"""Write the captions of the films to the chapters' texts. They are written together with the still
pictures, and checked by a test."""

from __future__ import annotations

import textwrap
from pathlib import Path

from workshop.measure.bench.bench_record import write_between_markers
from workshop.watch.films import Shot

MARKER = "film"  # <!-- table:film --> in a README.md


def page_caption(shot: Shot) -> str:
    """Return the picture and caption for a README.md."""
    caption = textwrap.fill(f"*{_words(shot)}*", 112, break_on_hyphens=False)
    return f"![{_alt(shot)}]({shot.film.picture}.png)\n\n{caption}"


def chinese_caption(shot: Shot) -> str:
    """Return the picture and caption for a README.zh.md."""
    film = shot.film
    return (
        f"![影片 {film.name}：{film.title[1]}]({film.picture}.zh.png)\n\n"
        f"*{shot.caption[1]}{film.note[1]}*"
    )


def _words(shot: Shot) -> str:
    return f"{shot.caption[0]} {shot.film.note[0]}".strip()


def _alt(shot: Shot) -> str:
    return f"Film {shot.film.name}: {shot.film.title[0]}"


def write_captions(shot: Shot, root: Path) -> None:
    """Write the captions to their places in the texts."""
    page = root / shot.film.folder / shot.film.page
    write_between_markers(page.with_suffix(".md"), MARKER, page_caption(shot))
    if (chinese := page.with_suffix(".zh.md")).is_file():
        write_between_markers(chinese, MARKER, chinese_caption(shot))
