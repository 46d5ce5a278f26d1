"""The whole book as one PDF a language, printed by Chromium: `make book ARGS=--pdf`.

The pages follow each other as in the sidebar, each on a new sheet; folded parts are open, a film is
its still, and links between pages lead to the place in the PDF."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urljoin, urlsplit

from workshop.site.page_tree import LANGUAGES
from workshop.watch.chromium import started_browser

if TYPE_CHECKING:
    from bs4 import BeautifulSoup, Tag

STYLE = Path(__file__).with_name("print.css")


def print_book(site: Path) -> None:
    """Write `book.en.pdf` and `book.zh.pdf` into the folder of the built site."""
    with started_browser() as browser:
        for language in LANGUAGES:
            whole = site / f"book.{language}.html"
            whole.write_text(whole_book(site / language), encoding="utf-8")
            page = browser.new_page()
            page.goto(whole.as_uri())
            path = site / f"book.{language}.pdf"
            page.pdf(
                path=path,
                format="A4",
                margin={"top": "16mm", "bottom": "18mm", "left": "15mm", "right": "15mm"},
                display_header_footer=True,
                header_template="<span></span>",
                footer_template='<div style="font-size:8px;width:100%;text-align:center">'
                '<span class="pageNumber"></span></div>',
                outline=True,
                tagged=True,
            )
            page.close()
            whole.unlink()
            print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")


def whole_book(folder: Path) -> str:
    """Return one HTML page with the articles of all pages in `folder`, in the sidebar's order."""
    from bs4 import BeautifulSoup  # of the extra [book]

    def soup_of(name: str) -> BeautifulSoup:
        return BeautifulSoup((folder / name).read_text(encoding="utf-8"), "html.parser")

    home = soup_of("index.html")
    links = home.select(".sidebar-tree a.reference.internal")
    names = ["index.html", *(urljoin("index.html", str(link["href"])) for link in links)]
    order = dict.fromkeys(name for name in names if not name.startswith("#"))
    articles = []
    for name in order:
        article = soup_of(name).select_one("article[role=main]")
        assert article is not None, name
        _move(article, name, order, folder.name)
        articles.append(str(article))
    return (
        f'<!doctype html><html lang="{folder.name}"><head><meta charset="utf-8">'
        f"<title>vllm-from-scratch</title><style>{STYLE.read_text(encoding='utf-8')}</style></head>"
        f"<body>{''.join(articles)}</body></html>"
    )


def _move(article: Tag, name: str, order: dict[str, None], language: str) -> None:
    """Make the anchors of a page unique in the book, and its addresses those of the book."""
    article["id"] = name
    for tag in article.select("details"):
        tag["open"] = ""
    for tag in article.select("[id]"):
        tag["id"] = f"{name}--{tag['id']}"
    for attribute in ("href", "src"):
        for tag in article.select(f"[{attribute}]"):
            parts = urlsplit(urljoin(name, str(tag[attribute])))
            page = unquote(parts.path) or name
            if parts.netloc or parts.scheme:
                continue
            if page in order and attribute == "href":
                tag[attribute] = (
                    f"#{page}--{unquote(parts.fragment)}" if parts.fragment else f"#{page}"
                )
            elif attribute == "src":  # the book lies next to the folder of the language
                tag[attribute] = f"{language}/{page}"
            else:
                del tag[attribute]
