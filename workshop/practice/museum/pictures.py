"""Pictures of exhibits for `MUSEUM.md`: a run with the bug beside one without, where the two part.
`python -m workshop.watch --stills` draws them."""

from __future__ import annotations

import re
from pathlib import Path

from workshop.practice.museum.exhibit import Exhibit
from workshop.practice.source_patch import ROOT

FOLDER = ROOT / "workshop" / "practice" / "museum" / "figures"

# By title: the scenes to be seen, and how high they are.
SCENES: dict[str, tuple[tuple[str, int], ...]] = {
    "New prompts first, and nobody else ever": (("grid", 225),),
    "The head of a prompt is evicted before its tail": (("grid", 150), ("cache", 250)),
    "Two equals in one seat": (("grid", 165),),
}


def picture_of(exhibit: Exhibit) -> Path:
    """Where it is, if there is one."""
    name = re.sub(r"[^a-z]+", "_", exhibit.title.lower()).strip("_")
    return FOLDER / f"{name}.png"


def shown_in(exhibit: Exhibit, title: str, is_chinese: bool) -> str:
    """The picture, as Markdown of a page in the root. Empty without one."""
    if exhibit.title not in SCENES:
        return ""
    where = picture_of(exhibit).relative_to(ROOT).as_posix()
    if is_chinese:
        return f"\n![左边有 bug，右边没有：{title}]({where.removesuffix('.png')}.zh.png)\n"
    return f"\n![Left with the bug, right without: {title}]({where})\n"
