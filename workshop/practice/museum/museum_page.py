"""`MUSEUM.md`, an exhibit as text for a terminal, and what the page of its two runs says of it."""

from __future__ import annotations

import re
from itertools import groupby
from pathlib import Path
from typing import Any

from workshop.practice.museum.exhibit import Exhibit, Workload
from workshop.practice.museum.hall import EXHIBITS, TITLES
from workshop.practice.museum.pictures import shown_in
from workshop.practice.museum.watched_run import Contradiction, Parting, RunOnFilm
from workshop.practice.source_patch import ROOT

PAGE = ROOT / "MUSEUM.md"
_REPOSITORIES = {
    "nano-vllm": "GeeeekExplorer/nano-vllm",
    "mini-sglang": "sgl-project/mini-sglang",
    "vLLM": "vllm-project/vllm",
    "SGLang": "sgl-project/sglang",
    "mlx-lm": "ml-explore/mlx-lm",
    "ATOM": "ROCm/ATOM",
    "ollama": "ollama/ollama",
    "uvicorn": "Kludex/uvicorn",
}
_HEAD = """# A museum of bugs

[中文](MUSEUM.zh.md)

{count} bugs that shipped in engines people use, or in this one, each put back into our code as a
small patch: what a user saw, what it teaches, what our engine says with the bug and without, and
the test that notices. None of them is stupid. Most are one line, and most pass every test that
looks at shapes and lengths.

    make museum                     the list
    make museum BUG=8               the story, the patch, what it does, the first test that fails
    make museum BUG=8 ARGS=--find   look for it yourself: the symptom first, then clues
    make museum BUG=8 ARGS=--watch  a page to step through: an engine with the bug, and one without

The bug is put into a copy of the one module, and an import hook
([`workshop/practice/module_swap.py`](workshop/practice/module_swap.py)) gives that copy to
whoever imports it; nothing in your checkout changes. Every exhibit is checked whenever the tests
run: with the bug it shows its symptom and the named tests fail, without it shows what is right. A
trap is a number in our list of such bugs; `grep -rn "Trap 10"` finds its tests. A number behind an
engine's name leads to the report. (This page is made by `python -m workshop.museum
--write`.)
"""


def render() -> str:
    parts = [_HEAD.format(count=len(EXHIBITS))]
    numbered = enumerate(EXHIBITS, 1)
    for chapter, group in groupby(numbered, key=lambda pair: pair[1].chapter):
        parts.append(f"## {TITLES[chapter]}\n")
        parts += [_entry(number, exhibit) for number, exhibit in group]
    return "\n".join(parts)


def _entry(number: int, exhibit: Exhibit) -> str:
    file = exhibit.patch.file
    tests = ", ".join(_test_link(test) for test in exhibit.tests)
    return (
        f"### {number}. {exhibit.title}\n\n"
        f"*{linked(exhibit.origin)} · trap {exhibit.trap}*\n\n"
        f"{exhibit.seen}\n\n"
        f"**What it teaches.** {exhibit.lesson}\n\n"
        f"In [`{file}`]({file}):\n\n"
        f"```diff\n{exhibit.patch.diff()}\n```\n\n"
        f"```text\n{side_by_side(exhibit.wrong, exhibit.right)}\n```\n\n"
        f"{_to_watch(number, exhibit.watch)}\n\n"
        f"{shown_in(exhibit)}"
        f"Caught by {tests}.\n"
    )


def _to_watch(number: int, watch: Workload | str) -> str:
    if isinstance(watch, str):
        return f"**To watch.** Nothing. {watch}"
    return f"**To watch.** {watch.look} (`make museum BUG={number} ARGS=--watch`)"


def _test_link(test: str) -> str:
    file, _, name = test.partition("::")
    return f"`{name}` in [`{Path(file).name}`]({file})"


def linked(origin: str) -> str:
    """`vLLM #1 #2, SGLang #3` with a link at each number."""
    parts = []
    for part in origin.split(", "):
        engine = part.partition(" #")[0]
        if engine in _REPOSITORIES:
            where = f"https://github.com/{_REPOSITORIES[engine]}/issues/"
            part = re.sub(r"#(\d+)", rf"[#\1]({where}\1)", part)
        parts.append(part)
    return ", ".join(parts)


def side_by_side(wrong: str, right: str) -> str:
    """One below the other, so that they can be compared."""
    rows = []
    for label, text in (("with the bug", wrong), ("without", right)):
        first, *rest = text.splitlines()
        rows += [f"{label:13} {first}", *(f"{'':13} {line}" for line in rest)]
    return "\n".join(rows)


# -- the page of two runs


def chinese_of(number: int) -> tuple[str, str]:
    """The title of an exhibit and what to look at, as the Chinese page has them."""
    page = PAGE.with_suffix(".zh.md").read_text(encoding="utf-8")
    found = re.search(rf"^### {number}\. (.+?)$.*?\*\*看什么。\*\* (.+?)（`make", page, re.M | re.S)
    assert found, f"the Chinese page has no exhibit {number} to be watched"
    return found[1], found[2]


# By the kind of event at which the two part: the panels in which it can be seen, those first.
_PANELS = {
    "planned": "grid queue words pool",
    "computed": "grid words pool",
    "table": "grid pool words cache",
    "taken": "grid pool words cache",
    "freed": "grid pool words cache",
    "shared": "grid pool cache words",
}
_OF_CACHE = "grid cache words pool"


def scenes_of(where: Parting | None) -> list[str]:
    kinds = [] if where is None else [e.kind for e in (where.right, where.wrong) if e is not None]
    return next((_PANELS[kind] for kind in kinds if kind in _PANELS), _OF_CACHE).split()


def moments_of(
    where: Parting | None, broken: Contradiction | None, wrong: RunOnFilm
) -> list[dict[str, Any]]:
    """Where to look: at the parting, at what cannot be, at the end that an error made."""
    found: list[tuple[int, str, tuple[str, str]]] = []
    if where is not None:
        found.append((where.step, where.request, ("the two part", "两边从这里分开")))
    if broken is not None:
        found.append((broken.step, "", ("left: this cannot be", "左边：这不可能发生")))
    if wrong.error:
        last = max(wrong.num_steps - 1, 0)
        found.append((last, "", ("left: the run ends in an error", "左边：运行因错误而终止")))
    steps = {step: (step, name, words) for step, name, words in reversed(found)}
    return [
        {
            "address": f"step={step}" + (f"&request={name}" if name else ""),
            "step": step,
            "request": name or None,
            "words": words,
        }
        for step, name, words in (steps[at] for at in dict.fromkeys(step for step, *_ in found))
    ]
