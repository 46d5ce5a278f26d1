"""The copies of source files to which the site's pages link while the repository has no address."""

from __future__ import annotations

import html
import re
from collections import defaultdict
from pathlib import Path, PurePath

from workshop.book.path import ROOT
from workshop.site.page_tree import Tree, git, page_name

# The end of a docstring.
SEE = re.compile(r"""(?<=See )(?P<page>[\w/]+\.md)(?P<anchor>(?:#[\w-]+)?)(?=\"{3})""")
STYLE = Path(__file__).with_name("source.css")
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark"><title>{path}</title>
<link rel="stylesheet" href="{up}source/source.css">
</head><body><nav>{home} · {path}</nav>
<p>{pages}</p>
{code}
</body></html>
"""


class Sources:
    """Which files the pages of all languages link to, and from which pages."""

    def __init__(self) -> None:
        self._pages: defaultdict[str, set[str]] = defaultdict(set)

    def add(self, tree: Tree, language: str) -> None:
        for path, pages in tree.sources.items():
            self._pages[path] |= {f"{language}/{page}" for page in pages}

    def write(self, folder: Path) -> None:
        """Write a page for each file, with an anchor `#L12` at each line, and the style of all."""
        folder.mkdir(exist_ok=True)
        (folder / STYLE.name).write_text(style(), encoding="utf-8")
        for path, pages in self._pages.items():
            target = folder / f"{path}.html"
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(source_page(path, pages), encoding="utf-8")


def style() -> str:
    """Return the style sheet of all source pages: the colours of code in both modes, then ours."""
    from pygments.formatters import HtmlFormatter

    light, dark = (HtmlFormatter(style=s).get_style_defs("pre") for s in ("default", "monokai"))
    rules = STYLE.read_text(encoding="utf-8")
    return f"{light}\n@media (prefers-color-scheme: dark) {{ {dark} }}\n{rules}"


def source_page(path: str, pages: set[str]) -> str:
    """Return the page of a file, or of a folder: the names of its files."""
    # Those of the extra [book]; the tests of staging need none of them.
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import get_lexer_for_filename
    from pygments.lexers.special import TextLexer
    from pygments.util import ClassNotFound

    file = ROOT / path
    if file.is_dir():
        tracked = git("ls-files", path).splitlines()
        names = {name.removeprefix(f"{path}/").partition("/")[0] for name in tracked}
        code = "<pre>" + "\n".join(sorted(names)) + "</pre>"
    else:
        try:
            lexer = get_lexer_for_filename(path)
        except ClassNotFound:
            lexer = TextLexer()
        numbered = HtmlFormatter(linenos="inline", linespans="L", anchorlinenos=True)
        code = highlight(file.read_text(encoding="utf-8"), lexer, numbered)
        code = code.replace('id="L-', 'id="L').replace('href="#L-', 'href="#L')

    def explained(match: re.Match[str]) -> str:
        name, anchor = page_name(PurePath(match["page"])), match["anchor"]
        return f'<a href="{up}en/{name}.html{anchor}">{match[0]}</a>'

    up = "../" * (path.count("/") + 1)
    code = SEE.sub(explained, code, count=1)
    home = f'<a href="{up}en/index.html">vllm-from-scratch</a>'
    links = (f'<a href="{up}{page}.html">{html.escape(page)}</a>' for page in sorted(pages))
    text = f"Linked from: {' · '.join(links)}"
    return _PAGE.format(path=html.escape(path), up=up, home=home, pages=text, code=code)
