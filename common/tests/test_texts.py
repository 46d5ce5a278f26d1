"""The texts point at what is there."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from common.tests.house import House
from workshop.book.translation import sections_of

ROOT = Path(__file__).resolve().parents[2]
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
QUOTED = re.compile(r"^```(?:python|diff).*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s#]+)[^)\s]*\)")
# In backticks, in a list of files or in a command; not the end of `..._tables.py`, nor of a URL.
FILE = re.compile(r"(?<![\w./*])((?:\w[\w-]*/)*\w+\.(?:py|ipynb|md))\b")
PLACE = re.compile(r"`([\w/]+\.py)::([\w.]+)`")
ROW = re.compile(r"`([\w/]+\.txt)::([^`]+)`")  # a title in a step log
TEST = re.compile(r"`(test_\w+)(?:\[[^`]*\])?`")
PAGE = re.compile(r"\n\nSee (\S+?)(?:#(\S+))?$")  # the end of a docstring
BEGINS_WITH_WHO = re.compile(r"(?:^|[.!?:]\s+|\|\s|\*\*\s?)Who\s[^?.!|]*[.!|]")


def broken_links(text: Path) -> list[str]:
    found = LINK.findall(FENCED.sub("", text.read_text(encoding="utf-8")))
    paths = [link for link in found if "://" not in link]
    return [path for path in paths if not (text.parent / path).exists()]


def broken_anchors(text: Path) -> list[str]:
    """Links to a heading that is not there."""
    broken = []
    for link in (link for section in sections_of(text) for link in section.links()):
        path, _, anchor = link.partition("#")
        page = (text.parent / path).resolve() if path else text
        if not anchor or "://" in link or page.suffix != ".md" or not page.exists():
            continue
        if anchor not in {section.anchor for section in sections_of(page)}:
            broken.append(link)
    return broken


def broken_tables(text: Path) -> list[str]:
    """Lines that begin with `|` and that GitHub shows as they are, not in a table."""
    tokens = [token for section in sections_of(text) for token in section.tokens if token.map]
    kinds = ("table_open", "fence", "code_block", "html_block")
    shown = {line for t in tokens if t.type in kinds for line in range(*t.map)}
    lines = text.read_text(encoding="utf-8").splitlines()
    return [line for i, line in enumerate(lines) if line.startswith("|") and i not in shown]


def unknown_files(text: Path, known: list[str]) -> list[str]:
    """Names that end no path of the repository: `runner/model_runner.py` ends one. `NAME.py` and
    `NAME.md` stand for any."""
    names = set(FILE.findall(LINK.sub("](", QUOTED.sub("", text.read_text(encoding="utf-8")))))
    names -= {"NAME.py", "NAME.md"}
    names = {name for name in names if not name.startswith("my/")}  # the reader's own
    return sorted(n for n in names if not any(f"/{path}".endswith(f"/{n}") for path in known))


@cache
def definitions(source: str) -> set[str]:
    """`name` of a module, `Class.name` of a class, at whatever depth."""
    found: set[str] = set()

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef):
                found.add(prefix + child.name)
                visit(child, f"{prefix}{child.name}.")
            else:
                visit(child, prefix)

    visit(ast.parse(source), "")
    return found


def unknown_places(text: Path, sources: dict[str, str]) -> list[str]:
    """`file.py::Class.method` that is not defined there, `test_name` that is defined nowhere,
    `log.txt::title` without such a line in the log."""
    prose = text.read_text(encoding="utf-8")
    unknown = []
    for file, name in PLACE.findall(prose):
        files = [source for path, source in sources.items() if f"/{path}".endswith(f"/{file}")]
        if not any(name in definitions(source) for source in files):
            unknown.append(f"{file}::{name}")
    for file, title in ROW.findall(prose):
        logs = [log for path, log in sources.items() if f"/{path}".endswith(f"/{file}")]
        if not any(" ".join(title.split()) in log.splitlines() for log in logs):
            unknown.append(f"{file}::{title}")
    modules = {path.rpartition("/")[2] for path in sources}
    for name in TEST.findall(prose):
        if f"{name}.py" not in modules and not any(f"def {name}(" in s for s in sources.values()):
            unknown.append(name)
    return unknown


def wrong_page(module: Path, root: Path = ROOT, *, must_name_it: bool = False) -> str:
    """Return a fault of the page that ends a module's docstring, "" if there is none. With
    `must_name_it`, the section must also name the module."""
    found = PAGE.search(ast.get_docstring(ast.parse(module.read_text(encoding="utf-8"))) or "")
    if found is None:
        return "names no page"
    page, anchor = root / found[1], found[2]
    if not page.is_file():
        return f"names {found[1]}, which is not there"
    named = [s for s in sections_of(page) if anchor in (None, s.anchor)]
    if not named:
        return f"names {found[1]}, which has no heading {anchor}"
    is_named = any(module.name in section.source for section in named)
    return "" if is_named or not must_name_it else f"is not named by {found[1]}#{anchor}"


def texts(house: House) -> list[Path]:
    """Every page but those that speak of an older commit, or of the files of a corpus."""
    pages = [path for path in house.files if path.suffix == ".md"]
    return [
        path for path in pages if path.name != "CHANGELOG.md" and "checkpoints" not in path.parts
    ]


HOUSE = House(ROOT)
KNOWN = [HOUSE.name(path) for path in HOUSE.files]


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    """Python files, and the step logs that tests read."""
    logs = [p for p in HOUSE.files if p.suffix == ".txt" and HOUSE.chapter_of(p) is not None]
    files = [*HOUSE.python_files(), *logs]
    return {HOUSE.name(p): p.read_text(encoding="utf-8") for p in files}


EVERY_TEXT = pytest.mark.parametrize("text", texts(HOUSE), ids=HOUSE.name)


def test_every_link_leads_to_a_file() -> None:
    pages = [path for path in HOUSE.files if path.suffix == ".md"]
    broken = {HOUSE.name(page): broken_links(page) for page in pages}
    assert not {name: links for name, links in broken.items() if links}
    assert len(pages) > 10


@EVERY_TEXT
def test_every_anchor_is_a_heading(text: Path) -> None:
    assert not broken_anchors(text)


@EVERY_TEXT
def test_every_table_is_shown_as_one(text: Path) -> None:
    assert not broken_tables(text)


@EVERY_TEXT
def test_every_file_that_is_named_exists(text: Path) -> None:
    assert not unknown_files(text, KNOWN)


@EVERY_TEXT
def test_every_place_and_test_that_is_named_exists(text: Path, sources: dict[str, str]) -> None:
    assert not unknown_places(text, sources)


def test_every_module_of_the_engine_names_its_page() -> None:
    """In chapters and `common`; what the workshop's folders are for, their README.md says."""
    roots, files = HOUSE.root_modules(), HOUSE.python_files(aside=False)
    modules = [p for p in files if p.name != "__init__.py" and "workshop" not in p.parts]
    modules = [p for p in modules if p.parent != ROOT]
    wrong = {HOUSE.name(p): wrong_page(p, must_name_it=p in roots) for p in modules}
    assert not {name: fault for name, fault in wrong.items() if fault}
    assert len(modules) > 200


def test_the_readme_is_short_where_nothing_is_unfolded() -> None:
    """Words that a reader sees: no code of Markdown, and nothing of a picture."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for hidden in (r"<details>.*?</details>", r"<!--.*?-->", r"!\[[^]]*\]\([^)]*\)"):
        text = re.sub(hidden, "", text, flags=re.DOTALL)
    assert len(re.findall(r"\S*\w\S*", text)) <= 1100


def test_the_program_of_the_readme_runs_as_typed(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    exec(program, {})
    assert capsys.readouterr().out.count("def quote(s):") == 1
    assert f"```python\n{program}```" in (ROOT / "README.zh.md").read_text(encoding="utf-8")


@EVERY_TEXT
def test_no_sentence_begins_with_who_unless_it_asks(text: Path) -> None:
    """Such a sentence makes the reader look back for its subject."""
    prose = FENCED.sub("", text.read_text(encoding="utf-8"))
    assert not BEGINS_WITH_WHO.findall(prose)


@pytest.mark.parametrize("chapter", HOUSE.chapters(), ids=HOUSE.name)
def test_a_chapter_says_what_to_read_first(chapter: Path) -> None:
    """Near its top: every module of the root, once and on a line of its own, and the command that
    tests it."""
    modules = {path.name for path in HOUSE.root_modules() if path.parent == chapter}
    modules -= {path.name for path in HOUSE.python_files() if HOUSE.is_aside(path)}
    top = (chapter / "README.md").read_text(encoding="utf-8").partition("\n## 1.")[0]
    listed = re.findall(r"^(?:\d+\.|\*) `(\w+\.py)`: \w", top, re.MULTILINE)
    assert sorted(listed) == sorted(modules - {name for name in modules if "post_names" in name})
    assert f"pytest {chapter.name}" in top
    assert "](beyond/README.md)" in top


def test_what_leads_nowhere_is_found(tmp_path: Path) -> None:
    text = tmp_path / "a.md"
    text.write_text(
        "[x](b.md#part) [y](a.md#top) [z](https://a.com/x.py) `gone.py` `here.py` `far/here.py`\n"
        "`here.py::A.f` `here.py::A.g` `far.py::A` `test_a` `test_b[x]` `..._gone.py`\n"
        "`log.txt::b waits` `log.txt::b runs`\n"
        "```\n[w](c.md) `lost.py`\n```\n```python file=no.py\nimport no.py\n```\n"
    )
    assert broken_links(text) == ["b.md"]
    assert unknown_files(text, ["room/here.py"]) == ["far.py", "far/here.py", "gone.py", "lost.py"]
    sources = {"room/here.py": "class A:\n    def f(self): ...\n\ndef test_a(): ...\n"}
    sources["room/log.txt"] = "b waits\n  +a1; a1\n"
    unknown = ["here.py::A.g", "far.py::A", "log.txt::b runs", "test_b"]
    assert unknown_places(text, sources) == unknown


@pytest.mark.parametrize(
    ("end", "fault"),
    [
        ("See a.md#b", ""),
        ("See a.md", ""),
        ("See a.md#c", "is not named by a.md#c"),
        ("See a.md#d", "names a.md, which has no heading d"),
        ("See b.md", "names b.md, which is not there"),
        ("Plan. See a.md#b", "names no page"),
        ("See a.md#b\n\nMore.", "names no page"),
    ],
)
def test_a_wrong_page_of_a_module_is_found(end: str, fault: str, tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("# a\n## b\n`plan.py`\n## c\n")
    (module := tmp_path / "plan.py").write_text(f'"""A plan.\n\n{end}"""\n')
    assert wrong_page(module, tmp_path, must_name_it=True) == fault


def test_an_anchor_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    text = tmp_path / "a.md"
    text.write_text(
        "# A b\n\n[x](#a-b) [y](#b) [z](b.md#一-二) [w](b.md#c) [v](https://a.com/b.md#d)\n"
    )
    (tmp_path / "b.md").write_text("# `一` 二\n")
    assert broken_anchors(text) == ["#b", "b.md#c"]


def test_a_sentence_that_begins_with_who_is_found() -> None:
    assert BEGINS_WITH_WHO.search("It ends. Who has ended is gone.")
    assert not BEGINS_WITH_WHO.search("**Who starves?** Nobody. Whoever runs, runs.")
