"""How Sphinx builds the site from a staged tree. Sphinx reads it; `make_book.py` starts Sphinx."""

# The extra [book] is not what `make lint` installs.
# pyright: reportMissingImports=false, reportMissingModuleSource=false

import os
import re
from pathlib import Path

from docutils import nodes

from workshop.measure.records import with_ages

ROOT = Path(__file__).parents[2]
is_chinese = os.environ["BOOK_LANGUAGE"] == "zh"
repository = os.environ["BOOK_REPOSITORY"]  # "": the site has no links to sources
commit = os.environ["BOOK_COMMIT"]

project = html_title = "vllm-from-scratch"
language = "zh_CN" if is_chinese else "en"
extensions = ["myst_nb"]
nb_execution_mode = "cache"
nb_execution_cache_path = os.path.join(os.environ.get("BOOK_NOTEBOOKS", ""), language)
nb_execution_raise_on_error = True
nb_execution_timeout = 120
nb_execution_show_tb = True
highlight_language = "none"
myst_enable_extensions = ["attrs_block"]
myst_heading_anchors = 6
myst_url_schemes = dict.fromkeys(("http", "https", "mailto", "source", "film", "other"))
html_theme = "furo"
html_static_path = ["static"]
html_favicon = "static/favicon.svg"
templates_path = ["templates"]
html_css_files = ["site.css", "calculators.css", "panels.css"]
html_js_files = ["site.js", "calculators.js", "panels.js"]
html_permalinks_icon = '<span data-pagefind-ignore="all">#</span>'
html_show_sourcelink = html_copy_source = html_use_index = html_show_copyright = False
html_context = {"is_chinese": is_chinese}
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "language.html",
        "sidebar/search.html",
        "sidebar/scroll-start.html",
        "sidebar/navigation.html",
        "sidebar/scroll-end.html",
    ]
}
THEME_WORDS = {
    "On this page": "本页目录",
    "Next": "下一页",
    "Previous": "上一页",
    "Home": "首页",
    "Back to top": "回到顶部",
    "Skip to content": "跳到正文",
}


def resolve(app, doctree, docname):
    """Turn the addresses `source:`, `film:` and `other:` of staged pages into those of the site."""
    up = "../" * (docname.count("/") + 1)
    for node in list(doctree.findall(nodes.reference)):
        scheme, _, target = node.get("refuri", "").partition(":")
        path, _, anchor = target.partition("#")
        anchor = anchor and f"#{anchor}"
        if scheme == "source" and repository:
            kind = "tree" if (ROOT / path).is_dir() else "blob"
            node["refuri"] = f"{repository}/{kind}/{commit}/{path}{anchor}"
        elif scheme == "source":
            node.replace_self(node.children)
        elif scheme == "film":
            node["refuri"] = f"{up}films/film_{path}.html#{'lang=zh' if is_chinese else ''}"
        elif scheme == "other":
            node["refuri"] = f"{up}{'en' if is_chinese else 'zh'}/{path}.html{anchor}"


def date(app, docname, source):
    """Say under each measured number how many commits have changed what it measures since."""
    source[0] = with_ages(source[0], is_chinese)


def finish(app, pagename, templatename, context, doctree):
    """Give headings their anchors, of which their sections have them: search leads to headings."""
    section = r'<section id="([^"]+)">(\s*(?:<span id="[^"]+"></span>)*)<(h[2-6])>'
    context["body"] = re.sub(section, r'<section>\2<\3 id="\1">', context.get("body", ""))


def translate(app):
    """Translate the theme's own words, of which there is no Chinese."""
    found = app.builder.templates.environment.globals
    gettext = found["gettext"]
    if is_chinese:
        found["_"] = found["gettext"] = lambda text: THEME_WORDS.get(text) or gettext(text)


def setup(app):
    app.connect("source-read", date)
    app.connect("doctree-resolved", resolve)
    app.connect("html-page-context", finish)
    app.connect("builder-inited", translate)
    app.connect("builder-inited", lambda app: setattr(app.builder, "search", False))
