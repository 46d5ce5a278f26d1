"""Lay out the tree that Sphinx reads, one for each language.

    stage(Path("build/book/stage/zh"), is_chinese=True)

A page keeps its place, except that a `README.md` becomes the `index.md` of its folder. In the
Chinese tree `X.zh.md` takes the place of `X.md`; a page without a Chinese version stays English and
is listed in a group of its own. An older Chinese section says
so. Links to pages stay relative; those to other files of the
repository, and file names in code, become `source:PATH#LINE`, which `conf.py` resolves. The site
adds to a page at marked places: a film's still becomes the film, `<!-- calculator: kv -->` a
calculator, and a quotation gets a link to its lines."""

from __future__ import annotations

import html
import json
import re
import shutil
from pathlib import Path

from workshop.book.path import ROOT
from workshop.book.quoted import BLOCK, find_file, first_line, with_lines
from workshop.book.translation import SUFFIX, english_of, older_sections
from workshop.site.page_tree import Tree, find_pages, page_name, toctrees

CODE = re.compile(r"^(?P<fence>`{3,}|~{3,}).*?^(?P=fence)[ ]*$|`[^`\n]+`", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"^`(?P<path>[\w/]+\.py)`$")
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)(?P<path>[^)\s#]+)(?P<anchor>#[^)\s]*)?(?=\))")
STILL = re.compile(
    r"(?P<still>!\[(?P<text>[^\]]*)\]\((?P<path>\S*)figures/film(?:_(?P<name>\w+))?(?:\.zh)?\.png\))"
    r"(?P<caption>\n\n\*(?:[^\n]|\n(?!\n))*\*\n(?=<!-- /table))?"
)
COMMAND = re.compile(r'make watch ARGS="?--film (?P<name>\w+)')
CLONE = re.compile(r"^git clone URL .*$", re.MULTILINE)
MARK = re.compile(r"<!-- calculator: (?P<name>\w+) -->")
FILE_NAME = re.compile(r"(?<=\[)`?[\w/.]+(?<!\.zh)\.(?:md|ipynb)`?(?=\]\()")  # "": the page's title
SWITCH = re.compile(r"^\[(?:中文|English)\]\([^)]*\)\n", re.MULTILINE)  # the sidebar has one
FULL_SIZE = ("full size", "全屏打开")
ANSWER = ("What it shows", "它演示了什么")  # folded: the film asks for it
ON_SITE = ("film {} on this site", "本站上的影片 {}")


def stage(folder: Path, is_chinese: bool, has_films: bool, repository: str = "") -> Tree:
    """Write the tree that Sphinx reads into `folder`, and return its pages."""
    shutil.rmtree(folder, ignore_errors=True)
    tree = find_pages(folder, is_chinese, repository)
    for name, path in tree.pages.items():
        target = (folder / name).with_suffix(path.suffix)
        target.parent.mkdir(parents=True, exist_ok=True)
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".ipynb":
            notebook = json.loads(text)
            for cell in notebook["cells"]:
                source = "".join(cell["source"])
                if "find_spec" in source:  # how to get the chapter
                    cell["metadata"]["tags"] = ["remove-input"]
                if cell["cell_type"] == "markdown":
                    cell["source"] = staged(source, name, path, tree, has_films)
            target.write_text(json.dumps(notebook), encoding="utf-8")
        else:
            text = staged(with_age(text, path), name, path, tree, has_films)
            text += toctrees(name, tree)
            target.write_text(text, encoding="utf-8")
    return tree


def with_age(text: str, path: Path) -> str:
    """Return a page with a line under each Chinese heading whose English section is newer."""
    if not path.name.endswith(SUFFIX):
        return text
    for english, chinese in older_sections(path):
        line = f"*[英文版]({english_of(path).name}#{english.anchor})较新。*"
        text = text.replace(f"<!-- en: {chinese.rendered} -->", line, 1)
    return text


def staged(text: str, name: str, path: Path, tree: Tree, has_films: bool) -> str:
    """Return a page as it is staged under `name`: its links, and what the site adds to it. Copies
    the pictures that it shows."""
    up = "../" * name.count("/")  # to the root of the language
    home = path.parent

    def film(match: re.Match[str]) -> str:
        if name == "INCIDENTS":  # there it is evidence
            return match[0]
        still = (home / f"{match['path']}figures/film.png").resolve()
        film = match["name"] or str(int(still.relative_to(ROOT).parts[0][:2]))
        address = f"{up}../films/film_{film}.html#{'lang=zh' if tree.is_chinese else ''}"
        words = html.escape(match["text"], quote=True)
        question = "" if name == "index" else "&ask"
        return (
            f'<figure class="film"><iframe loading="lazy" src="{address}{question}" '
            f'title="{words}"></iframe>\n\n{match["still"]}\n\n'  # the still, for print
            f'<a href="{address}">{words} · {FULL_SIZE[tree.is_chinese]}</a></figure>\n'
            + folded(match["caption"])
        )

    def folded(caption: str | None) -> str:
        if name == "index" or not caption:
            return caption or ""
        return f"\n<details><summary>{ANSWER[tree.is_chinese]}</summary>{caption}\n</details>\n"

    def quotation(match: re.Match[str]) -> str:
        found = first_line(match, home)
        if found is None:
            return match[0]
        source, line = found
        place = source.relative_to(ROOT)
        return f"{match[0]}\n\n{{.lines}}\n[{source.name}:{line}](source:{place}#L{line})\n"

    def named_file(match: re.Match[str]) -> str:
        try:
            place = find_file(match["path"], home).resolve().relative_to(ROOT)
        except KeyError:
            return match[0]
        return f"[{match[0]}](source:{place})"

    def code_with_link(code: str) -> str:
        command = COMMAND.search(code) if has_films else None
        if command is None:
            return FILE.sub(named_file, code)
        if not code.startswith("```"):
            return f"[{code}](film:{command['name']})"
        words = ON_SITE[tree.is_chinese].format(command["name"])
        return f"{code}\n\n{{.lines}}\n[{words}](film:{command['name']})\n"

    def link(match: re.Match[str]) -> str:
        target, anchor = (home / match["path"]).resolve(), match["anchor"] or ""
        if target.is_dir() and (target / "README.md").exists():
            target /= "README.md"
        place = target.relative_to(ROOT)
        page = page_name(place)
        if target.suffix in (".md", ".ipynb") and page in tree.pages:
            is_translated = tree.is_chinese and page not in tree.english
            is_chinese = target.name.endswith(".zh.md")
            if is_chinese and not tree.is_chinese:
                return f"other:{page}{anchor}"
            if anchor and is_translated and not is_chinese:
                return f"other:{page}{anchor}"  # a heading of the English page
            return f"{up}{page}{tree.pages[page].suffix}{anchor}"
        if not target.exists() or target.suffix in (".md", ".ipynb"):
            raise ValueError(f"{path}: git has no {place}, to which this page links")
        if target.suffix in (".png", ".svg"):
            copy = tree.folder / place
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(target, copy)
            return f"{up}{place}"
        return f"source:{place}{anchor}"

    if tree.repository:
        text = CLONE.sub(f"git clone {tree.repository} vllm-from-scratch", text)
    if has_films:
        text = STILL.sub(film, text)
    text = MARK.sub(r'<div class="calculator" data-calculator="\g<name>"></div>', text)
    text = with_lines(text, home)
    text = BLOCK.sub(quotation, FILE_NAME.sub("", SWITCH.sub("", text, count=1)))
    parts, end = [], 0
    for code in CODE.finditer(text):  # in code nothing is a link
        parts.append(LINK.sub(link, text[end : code.start()]))
        end = code.end()
        is_label = text[end : end + 1] == "]"
        parts.append(code[0] if is_label else code_with_link(code[0]))
    return "".join([*parts, LINK.sub(link, text[end:])])
