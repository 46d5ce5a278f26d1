"""The staged pages of both languages, which Sphinx reads."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from workshop.book.path import ROOT
from workshop.book.translation import sections_of
from workshop.site.page_tree import Tree, toctrees
from workshop.site.staging import LINK, stage, staged, with_age

FILM = re.compile(r'<iframe loading="lazy" src="(\S+)"')


@pytest.fixture(scope="module", params=["en", "zh"])
def tree(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tree:
    folder = tmp_path_factory.mktemp("staged") / request.param
    return stage(folder, request.param == "zh", has_films=True)


def text_of(tree: Tree, name: str) -> str:
    return (tree.folder / f"{name}.md").read_text(encoding="utf-8")


def test_every_link_of_a_staged_page_leads_somewhere(tree: Tree) -> None:
    num_links = 0
    for name in tree.pages:
        path = (tree.folder / name).with_suffix(tree.pages[name].suffix)
        for match in LINK.finditer(path.read_text(encoding="utf-8")):
            num_links += 1
            assert (path.parent / match["path"]).resolve().is_file(), f"{name}: {match[0]}"
    assert num_links > 200


def test_the_sidebar_has_every_page_once(tree: Tree) -> None:
    listed = Counter(
        line.removeprefix("/")
        for name in tree.pages
        for line in toctrees(name, tree).splitlines()
        if line.startswith("/")
    )
    assert listed == Counter(set(tree.pages) - {"index"})
    if tree.is_chinese:  # pages that are English are the last group
        last = toctrees("index", tree).rpartition(":caption: 英文")[2]
        assert {x.removeprefix("/") for x in last.splitlines() if x[:1] == "/"} == tree.english


def test_films_are_where_the_chapters_speak_of_them(tree: Tree) -> None:
    chapters = sorted(n for n in tree.pages if re.match(r"0\d_\w+/index", n))
    for film, chapter in enumerate(chapters, 1):
        (address,) = FILM.findall(text_of(tree, chapter))
        assert address.startswith(f"../../films/film_{film}.html#") and address.endswith("ask")
        assert ("lang=zh" in address) == tree.is_chinese
    assert not FILM.findall(text_of(tree, "INCIDENTS"))  # there a still is evidence
    (home,) = FILM.findall(text_of(tree, "index"))
    assert home.startswith("../films/film_4.html#") and "ask" not in home


def test_a_chinese_section_says_that_its_english_one_is_newer(tmp_path: Path) -> None:
    (tmp_path / "A.md").write_text("# A\n\none\n\n## B c\n\ntwo\n", encoding="utf-8")
    digest = sections_of(tmp_path / "A.md")[0].digest
    page = tmp_path / "A.zh.md"
    text = f"# 甲\n<!-- en: {digest} -->\n\n一\n\n## 乙\n<!-- en: 0123 -->\n\n二\n"
    page.write_text(text, encoding="utf-8")
    expected = text.replace("<!-- en: 0123 -->", "*[英文版](A.md#b-c)较新。*")
    assert with_age(text, page) == expected
    assert with_age(text, tmp_path / "A.md") == text


CHAPTER = "04_scheduler/"
REWRITTEN = [  # page, text, as staged
    (
        "CONTRIBUTING",  # code stays
        "`[x](Makefile)` [`y`](Makefile) [z](common) [w](04_scheduler/)\n```\n[v](Makefile)\n```",
        "`[x](Makefile)` [`y`](source:Makefile) [z](common/index.md) [w](04_scheduler/index.md)"
        "\n```\n[v](Makefile)\n```",
    ),
    ("FIRST_HOUR", "git clone URL a  # b", "git clone URL a  # b"),  # there is no address
    (
        f"{CHAPTER}index",  # the name of a file leads to it
        "`scheduler.py` `llm.py` `no_such.py` [`llm.py`](scheduler.py)",
        "[`scheduler.py`](source:04_scheduler/scheduler.py) [`llm.py`](source:common/llm.py) "
        "`no_such.py` [`llm.py`](source:04_scheduler/scheduler.py)",
    ),
    (
        "01_batching/index",  # a script is not its notebook; the language is in the sidebar
        "# A\n\n[中文](README.zh.md)\n\n[script](batching_demo.py) [`a`](batching_demo.ipynb)",
        "# A\n\n\n[script](source:01_batching/batching_demo.py) "
        "[`a`](../01_batching/batching_demo.ipynb)",
    ),
    (
        f"{CHAPTER}index",  # Sphinx puts the title of a page into a link without text
        "[`scheduler_demo.ipynb`](scheduler_demo.ipynb) [A.md](beyond/ADAPTERS.md)",
        "[](../04_scheduler/scheduler_demo.ipynb) [](../04_scheduler/beyond/ADAPTERS.md)",
    ),
]


def test_links_are_those_of_the_site(tree: Tree) -> None:
    for name, text, expected in REWRITTEN:
        assert staged(text, name, tree.pages[name], tree, True) == expected
    # a heading of a page in the other language is looked up there
    text = "[x](README.md#the-map) [y](README.md) [GLOSSARY.zh.md](GLOSSARY.zh.md#a)"
    there, glossary = "index.md#the-map", "other:GLOSSARY#a"
    if tree.is_chinese:
        there, glossary = "other:index#the-map", "GLOSSARY.md#a"
    expected = f"[x]({there}) [y](index.md) [GLOSSARY.zh.md]({glossary})"
    assert staged(text, "CONTRIBUTING", ROOT / "CONTRIBUTING.md", tree, True) == expected
    with pytest.raises(ValueError, match=r"COURSE\S*: git has no nowhere.md"):
        staged("[x](nowhere.md)", "COURSE", tree.pages["COURSE"], tree, True)
