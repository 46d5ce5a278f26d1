"""The filter of the museum and the list of the tickets, in a browser. The pages
are those of the repository, rendered by markdown-it, with sections as Sphinx makes them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from markdown_it import MarkdownIt

from workshop.book.path import ROOT
from workshop.watch.conftest import OpenPage

if TYPE_CHECKING:
    from playwright.sync_api import Page

STATIC = Path(__file__).parent / "static"
PAGE = """<!doctype html><html lang="{language}"><meta charset="utf-8">
<style>{css}</style><script>{script}</script><body>{body}</body></html>"""


@pytest.fixture
def show(open_page: OpenPage, tmp_path: Path) -> Any:
    """`show("MUSEUM", "zh", at="bug-12")`: a page of the repository with the panels."""

    def _show(name: str, language: str = "en", at: str = "") -> Page:
        suffix = ".zh.md" if language == "zh" else ".md"
        text = (ROOT / f"{name}{suffix}").read_text("utf-8")
        rendered = MarkdownIt().enable("table").render(text)
        rendered = re.sub(r"<img[^>]*>", "", rendered).replace("'", "’")
        head, *parts = rendered.split("<h2>")
        body = head + "".join(f"<section><h2>{part}</section>" for part in parts)
        css, script = ((STATIC / f"panels.{kind}").read_text("utf-8") for kind in ("css", "js"))
        path = tmp_path / f"{Path(name).name}.html"
        code = "zh-CN" if language == "zh" else "en"
        page = PAGE.format(language=code, css=css, script=script, body=body)
        path.write_text(page, encoding="utf-8")
        return open_page(path, at=at)

    return _show


def found(page: Page, words: str) -> set[str]:
    """The entries that are shown after these words are typed into the field."""
    page.fill(".museum-filter input", words)
    return set(page.locator("details[id]:visible").evaluate_all("all => all.map(e => e.id)"))


def entries(page: str) -> dict[str, str]:
    """The entries of `MUSEUM.md`: their Markdown by id."""
    text = (ROOT / page).read_text("utf-8")
    return dict(re.findall(r'<details id="(.*?)">(.*?)</details>', text, re.S))


def test_the_filter_finds_words_of_title_and_engine(show: Any) -> None:
    page, texts = show("MUSEUM"), entries("MUSEUM.md")
    assert found(page, "") == set(texts)
    assert found(page, "double FREE") == {"bug-9"}  # title
    assert "bug-9" not in found(page, "double freed")  # every word counts
    assert found(page, "mlx-lm") == {i for i, text in texts.items() if "mlx-lm" in text}  # engine
    assert found(page, "#53130") == {"bug-2"} and found(page, "#5313") == set()
    assert found(page, "this step's admissions") == {"bug-1"}  # Sphinx curls the apostrophe
    assert found(page, "c++ (") == set()


def test_the_filter_says_how_many_and_chooses_an_engine(show: Any) -> None:
    """In both languages; an address opens its entry."""
    page, texts = show("MUSEUM", at="bug-12"), entries("MUSEUM.md")
    assert page.locator("details[open]").evaluate_all("all => all.map(e => e.id)") == ["bug-12"]
    assert found(page, "double free") == {"bug-9"}
    assert page.locator("h2:visible").all_inner_texts() == ["2. Paged KV"]
    heads = {i: text.partition("</summary>")[0] for i, text in texts.items()}
    named = {i for i, head in heads.items() if re.search("(?<!-)SGLang", head)}
    page = show("MUSEUM", "zh")
    page.select_option(".museum-filter select", label=f"SGLang ({len(named)})")
    assert found(page, "") == named
    page.select_option(".museum-filter select", index=0)
    assert found(page, "nano-vllm 准入") == {"bug-1"}
    assert " 个 bug 中的 1 个" in page.inner_text(".museum-filter output")
