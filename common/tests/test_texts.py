"""The texts name what is there. Links and headings are Sphinx's business: `make book`."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from common.tests.house import House
from workshop.book.translation import sections_of

ROOT = Path(__file__).resolve().parents[2]
HOUSE = House(ROOT)
QUOTED = re.compile(r"^```(?:python|diff).*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s#]+)[^)\s]*\)")
# In backticks, in a list of files or in a command; not the end of `..._tables.py`, nor of a URL.
FILE = re.compile(r"(?<![\w./*])((?:\w[\w-]*/)*\w+\.(?:py|ipynb|md))\b")
PLACE = re.compile(r"`([\w/]+\.py)::([\w.]+)`")
ROW = re.compile(r"`([\w/]+\.txt)::([^`]+)`")  # of a step log, by its title
TEST = re.compile(r"`(test_\w+)(?:\[[^`]*\])?`")


def unknown_files(text: str, known: list[str]) -> list[str]:
    """Names that end no path of the repository. `NAME.py`, `NAME.md` and `my/` stand for any."""
    names = set(FILE.findall(LINK.sub("](", QUOTED.sub("", text)))) - {"NAME.py", "NAME.md"}
    ends = [f"/{path}" for path in known]
    names = {name for name in names if not name.startswith("my/")}
    return sorted(name for name in names if not any(end.endswith(f"/{name}") for end in ends))


def unknown_places(text: str, sources: dict[str, str]) -> list[str]:
    """`file.py::Class.method`, `log.txt::title` and `test_name` that are nowhere."""
    unknown = []
    for file, name in PLACE.findall(text) + ROW.findall(text):
        found = [source for path, source in sources.items() if f"/{path}".endswith(f"/{file}")]
        words = name.split(".") if file.endswith(".py") else []
        patterns = [rf"^ *(async )?(def|class) {word}\b" for word in words]
        patterns = patterns or [rf"^{re.escape(' '.join(name.split()))}(  |$)"]
        if not any(all(re.search(p, s, re.MULTILINE) for p in patterns) for s in found):
            unknown.append(f"{file}::{name}")
    tests = {path.rpartition("/")[2].removesuffix(".py") for path in sources}
    tests |= {name for s in sources.values() for name in re.findall(r"def (test_\w+)\(", s)}
    return unknown + [name for name in TEST.findall(text) if name not in tests]


def broken_tables(page: Path) -> list[str]:
    """Lines that begin with `|` and that GitHub shows as they are, not in a table."""
    tokens = [token for section in sections_of(page) for token in section.tokens if token.map]
    kinds = ("table_open", "fence", "code_block", "html_block")
    shown = {line for t in tokens if t.type in kinds for line in range(*t.map)}
    lines = page.read_text(encoding="utf-8").splitlines()
    return [line for i, line in enumerate(lines) if line.startswith("|") and i not in shown]


def pages() -> dict[str, Path]:
    """Every page but those that speak of an older commit, or of the files of a corpus."""
    found = {HOUSE.name(path): path for path in HOUSE.files if path.suffix == ".md"}
    return {n: path for n, path in found.items() if n != "CHANGELOG.md" and "checkpoints" not in n}


def test_what_a_page_names_exists_and_its_tables_are_tables() -> None:
    known = [HOUSE.name(path) for path in HOUSE.files]
    paths = [path for path in HOUSE.files if path.suffix in (".py", ".txt")]
    sources = {HOUSE.name(path): path.read_text(encoding="utf-8") for path in paths}
    faults = {}
    for name, page in pages().items():
        text = page.read_text(encoding="utf-8")
        found = unknown_files(text, known) + unknown_places(text, sources) + broken_tables(page)
        faults |= {name: found} if found else {}
    assert not faults and len(pages()) > 10


def test_the_readme_is_short_and_its_program_runs_as_typed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Words that a reader sees before anything is unfolded, without the code of pictures."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    seen = re.sub(r"<details>.*?</details>|<!--.*?-->|!\[[^]]*\]\([^)]*\)", "", text, flags=re.S)
    assert len(re.findall(r"\S*\w\S*", seen)) <= 1100
    (program,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    exec(program, {})
    assert capsys.readouterr().out.count("def quote(s):") == 1
    assert f"```python\n{program}```" in (ROOT / "README.zh.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("chapter", sorted(ROOT.glob("[0-9][0-9]_*")), ids=lambda p: p.name)
def test_a_small_file_agrees_with_its_chapter_and_prints_what_the_text_shows(
    chapter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (path,) = chapter.glob("small_*.py")
    runpy.run_path(str(path))
    printed = capsys.readouterr().out
    assert printed.endswith(".py says the same\n"), "its last lines compare it with the chapter"
    for page in ("README.md", "README.zh.md"):
        text = (chapter / page).read_text(encoding="utf-8")
        assert f"```\n{printed}```\n" in text, f"what it prints is not in {page}"
    idea = re.split(r"\n# (Compare with|The same by)", path.read_text(encoding="utf-8"))[0]
    _, says, code = idea.split('"""', 2)
    num_lines = sum(bool(line) and not line.lstrip().startswith("#") for line in code.splitlines())
    assert f" in {num_lines} lines: " in says and 25 <= num_lines <= 50
