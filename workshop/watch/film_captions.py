"""Write the captions of the films to the chapters' texts and to the scripts of their notebooks.
They are written together with the still pictures, and checked by a test."""

from __future__ import annotations

import textwrap
from pathlib import Path

from workshop.measure.bench.bench_record import write_between_markers
from workshop.watch.films import Shot

MARKER = "film"  # <!-- table:film --> in a README.md
CELL = "# %% [markdown]\n# ## Watch it run\n"  # begins the cell of a script


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


def cell_caption(shot: Shot) -> str:
    """Return the cell for a notebook's script, without the blank line after it."""
    words = textwrap.fill(_words(shot), 98, break_on_hyphens=False).splitlines()
    how = [
        'The film itself takes seconds to make: `make watch ARGS="--film '
        f'{shot.film.chapter} --open"`',
        "in the root of the repository. Step through it with the arrow keys.",
    ]
    lines = ["", f"![{_alt(shot)}](figures/film.png)", "", *words, "", *how]
    return CELL + "".join(f"# {line}".rstrip() + "\n" for line in lines)


def _words(shot: Shot) -> str:
    return f"{shot.caption[0]} {shot.film.note[0]}".strip()


def _alt(shot: Shot) -> str:
    return f"Film {shot.film.name}: {shot.film.title[0]}"


def script_of(shot: Shot, root: Path) -> Path:
    (script,) = (root / shot.film.folder).glob("*_demo.py")
    return script


def write_captions(shot: Shot, root: Path) -> None:
    """Write the captions to their places in the texts and in a chapter's script."""
    page = root / shot.film.folder / shot.film.page
    write_between_markers(page.with_suffix(".md"), MARKER, page_caption(shot))
    if (chinese := page.with_suffix(".zh.md")).is_file():
        write_between_markers(chinese, MARKER, chinese_caption(shot))
    if not shot.film.chapter:
        return
    script = script_of(shot, root)
    before, cell, behind = parted(script.read_text(encoding="utf-8"))
    if cell:
        script.write_text(before + cell_caption(shot) + behind, encoding="utf-8")


def parted(script: str) -> tuple[str, str, str]:
    """Split a script into the part before its film cell, the cell, and the rest."""
    before, found, rest = script.partition(CELL)
    if not found:
        return script, "", ""
    cell, separator, behind = rest.partition("\n# %%")
    return before, CELL + cell, separator + behind
