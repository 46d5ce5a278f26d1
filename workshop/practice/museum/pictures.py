"""Pictures of exhibits for `MUSEUM.md`: a run with the bug next to one without, where they differ.
`python -m workshop.watch --stills` draws them."""

from __future__ import annotations

import re
from pathlib import Path

from workshop.practice.museum.exhibits import Exhibit
from workshop.practice.source_patch import ROOT

FOLDER = ROOT / "workshop" / "practice" / "museum" / "figures"

# By title: the scenes to show, and their heights.
SCENES: dict[str, tuple[tuple[str, int], ...]] = {
    "Prefill-first starves decodes": (("grid", 225),),
    "The head of a prompt is evicted before its tail": (("grid", 150), ("cache", 250)),
    "Equal priorities preempt each other": (("grid", 165),),
}


def picture_of(exhibit: Exhibit) -> Path:
    """The path of the picture, if there is one."""
    name = re.sub(r"[^a-z]+", "_", exhibit.title.lower()).strip("_")
    return FOLDER / f"{name}.png"


def shown_in(exhibit: Exhibit, title: str, is_chinese: bool) -> str:
    """The picture, as Markdown for a page in the root; empty without one."""
    if exhibit.title not in SCENES:
        return ""
    where = picture_of(exhibit).relative_to(ROOT).as_posix()
    if is_chinese:
        return f"\n![左边有 bug，右边没有：{title}]({where.removesuffix('.png')}.zh.png)\n"
    return f"\n![Left with the bug, right without: {title}]({where})\n"
