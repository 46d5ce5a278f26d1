"""An exhibit's two recorded runs, with the bug and without: in words, and on a page of films."""

from __future__ import annotations

import tempfile
from pathlib import Path

from workshop.practice.module_swap import ModuleSwap
from workshop.practice.museum.exhibits import Exhibit
from workshop.practice.museum.museum_page import moments_of, scenes_of
from workshop.practice.museum.watched_run import RunOnFilm, make_film, parting
from workshop.watch.page_maker import Reel, make_page

_REELS = ("wrong.jsonl", "right.jsonl")
_LABELS = (("The run with the bug", "有 bug 的运行"), ("The run without it", "没有 bug 的运行"))
_HIDDEN = (
    "Left with a bug, right without. Which line of the engine could make this difference?",
    "左边有 bug，右边没有。引擎里哪一行会造成这样的差别？",
)


def films(exhibit: Exhibit, swap: ModuleSwap, folder: Path) -> tuple[RunOnFilm, RunOnFilm]:
    """Record the run with the bug and the run without; `folder` gets their frames, as `_REELS`."""
    assert exhibit.watch is not None
    wrong, right = (folder / name for name in _REELS)
    return make_film(exhibit.watch, wrong, swap), make_film(exhibit.watch, right)


def compared(wrong: RunOnFilm, right: RunOnFilm) -> str:
    """Return the differences that can be found without looking."""
    lines = [f"with the bug {wrong.num_steps} steps, without {right.num_steps}"]
    if (where := parting(right, wrong)) is not None:
        lines.append(f"the first difference is {where.place}")
    if wrong.error:
        lines.append(f"the run with the bug ended with {wrong.error}")
    return "\n".join(lines)


def page_of_films(
    number: int, exhibit: Exhibit, swap: ModuleSwap, is_hidden: bool = False
) -> tuple[str, str]:
    """Return a page with a run with the bug next to one without, and how they compare. The page
    opens at the first difference. `is_hidden`: it does not name the bug."""
    with tempfile.TemporaryDirectory() as folder:
        wrong, right = films(exhibit, swap, Path(folder))
        texts = [(Path(folder) / name).read_text(encoding="utf-8") for name in _REELS]
    where = parting(right, wrong)
    languages = exhibit.english, exhibit.chinese
    names = ["" if is_hidden else words.text("title") for words in languages]
    title = (f"Exhibit {number}. {names[0]}".strip(), f"展品 {number} {names[1]}".strip())
    caption = _HIDDEN if is_hidden else tuple(words.text("watch") for words in languages)
    moments = moments_of(where, wrong)
    start = moments[0]["address"] if moments else ""
    reels = [Reel(label, text, zh) for (label, zh), text in zip(_LABELS, texts)]
    about = {"caption": caption, "note": ("", ""), "moments": moments, "scenes": scenes_of(where)}
    return make_page(reels, title, start, film=about), compared(wrong, right)
