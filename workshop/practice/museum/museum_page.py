"""`MUSEUM.md` in two languages, an index that gives no bug away. Also: two runs side by side in a
terminal, and the panels and moments of an exhibit's page of two films."""

from __future__ import annotations

import re
from itertools import groupby
from pathlib import Path
from typing import Any

from workshop.book.translation import sections
from workshop.practice.museum.exhibits import CHINESE_TITLES, EXHIBITS, TITLES, Exhibit
from workshop.practice.museum.watched_run import Parting, RunOnFilm
from workshop.practice.patch_table import Bug, broken_lines
from workshop.practice.source_patch import ROOT

PAGE = ROOT / "MUSEUM.md"
_TRAP = re.compile(r" ?[(（]Trap \d+[)）]")  # what tests cite; it means nothing to a reader
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
_CHINESE_ORIGINS = {"ours": "本项目", "reported, without a number": "有人报告过，没有编号"}
_HEAD = """# A museum of bugs

[中文](MUSEUM.zh.md)

{bugs} bugs that shipped in engines people use, or in this one, and {lines} single lines of this
repository for you to break. Most of them pass every test of shapes and lengths. Each is applied to
a copy of one module, so nothing in your checkout changes.

    make museum BUG=8 ARGS=--find         find it yourself: the symptom first, then clues
    make museum BUG=8 ARGS=--watch        step through two runs: with the bug, and without
    make museum BUG=8                     the story, the patch, its effect, the test that fails
    python -m workshop.patches --only 8   line 8 of the lines to break, and the test that fails

A bug's title is folded here, because most titles name the cause; the number after an engine's name
links to the report, which names it too. `make museum` without a number lists all titles. Of a line
to break you read the effect: look for the line in its file, and then let the command show it.
(`make sync` makes this page.)
"""
_CHINESE_HEAD = """# bug 博物馆
<!-- en: -->

[English](MUSEUM.md)

{bugs} 个发布过的 bug，有的在大家都在用的引擎里，有的就在本书的引擎里；\
另有本仓库的 {lines} 行代码，可以弄坏试试。凡是只看形状和长度的测试，它们多半都能通过。\
补丁都打在那个模块的一份副本上，你的工作区一个字也不动。

    make museum BUG=8 ARGS=--find         自己找：先给症状，再给线索
    make museum BUG=8 ARGS=--watch        两次运行，有 bug 的和没有的，一步步看
    make museum BUG=8                     故事、补丁、后果、失败的测试
    python -m workshop.patches --only 8   下面的第 8 行怎么弄坏，哪个测试失败

bug 的标题都折叠着，因为多数标题就说出了原因；\
引擎名后面的编号链接到原始报告，那里也会说出原因。\
`make museum` 不带编号，就列出全部标题。\
可以弄坏的代码行只写后果：先到文件里自己找是哪一行，再让命令告诉你。\
（本页由 `make sync` 生成。）
"""


def render(is_chinese: bool = False) -> str:
    """Return the page. The digests in the Chinese one are those of the English sections; those of
    the stories are in `stories.txt`."""
    lines = list(enumerate(broken_lines(), 1))
    head, titles = (_CHINESE_HEAD, CHINESE_TITLES) if is_chinese else (_HEAD, TITLES)
    parts = [head.format(bugs=len(EXHIBITS), lines=len(lines))]
    numbered = enumerate(EXHIBITS, 1)
    for chapter, group in groupby(numbered, key=lambda pair: pair[1].chapter):
        parts.append(f"## {titles[chapter]}\n" + "<!-- en: -->\n" * is_chinese)
        parts += [_entry(number, exhibit, is_chinese) for number, exhibit in group]
        parts.append("可以弄坏的代码行：\n" if is_chinese else "Lines to break:\n")
        parts += [_line(n, bug, is_chinese) for n, bug in lines if bug.chapter == chapter]
        parts.append("")
    page = "\n".join(parts).rstrip() + "\n"
    if is_chinese:
        for section in sections(render()):
            page = page.replace("<!-- en: -->", f"<!-- en: {section.digest} -->", 1)
    return page


def _entry(number: int, exhibit: Exhibit, is_chinese: bool) -> str:
    words = exhibit.chinese if is_chinese else exhibit.english
    origin = linked(exhibit.origin)
    if is_chinese:
        origin = _CHINESE_ORIGINS.get(exhibit.origin, origin.replace(", ", "，"))
    title = words.text("title")
    return (
        f'<details id="bug-{number}"><summary>{number}. {origin}</summary>\n\n{title}\n\n'
        "</details>\n"
    )


def _line(number: int, bug: Bug, is_chinese: bool) -> str:
    said = _TRAP.sub("", bug.chinese_line if is_chinese else bug.line)
    colon = "：" if is_chinese else ": "
    return f"{number}. [`{Path(bug.file).name}`]({bug.file}){colon}{said}"


def linked(origin: str) -> str:
    """`vLLM #1 #2, SGLang #3` with a link at each number, in HTML."""
    parts = []
    for part in origin.split(", "):
        engine = part.partition(" #")[0]
        if engine in _REPOSITORIES:
            where = f"https://github.com/{_REPOSITORIES[engine]}/issues/"
            part = re.sub(r"#(\d+)", rf'<a href="{where}\1">#\1</a>', part)
        parts.append(part)
    return ", ".join(parts)


def side_by_side(wrong: str, right: str) -> str:
    """Return both texts, one below the other, for comparison."""
    rows = []
    for label, text in (("with the bug", wrong), ("without", right)):
        first, *rest = text.splitlines()
        rows += [f"{label:13} {first}", *(f"{'':13} {line}" for line in rest)]
    return "\n".join(rows)


# -- the page of two runs


# The panels to show, by the key of the first difference.
_PANELS = {
    "grid queue words pool": "in_flight requests waiting running",
    "grid words pool": "result outputs computed",
    "grid pool words cache": "tables refs free",
}


def scenes_of(where: Parting | None) -> list[str]:
    key = where.key if where else ""
    panels = (panels for panels, keys in _PANELS.items() if key in keys.split())
    return next(panels, "grid cache words pool").split()


def moments_of(where: Parting | None, wrong: RunOnFilm) -> list[dict[str, Any]]:
    """Where to look: at the first difference, and at the end by an error."""
    found: dict[int, tuple[str, tuple[str, str]]] = {}
    if wrong.error:
        last = max(wrong.num_steps - 1, 0)
        found[last] = "", ("left: the run ends in an error", "左边：运行因错误而终止")
    if where is not None:
        found[where.step] = where.request, ("the two differ from here on", "两边从这里分开")
    return [
        {
            "address": f"step={step}" + (f"&request={name}" if name else ""),
            "step": step,
            "request": name or None,
            "words": words,
        }
        for step, (name, words) in sorted(found.items())
    ]
