"""Each chapter in one small file: it runs, it agrees with the chapter's class, and what it prints
stands in the chapter's text, in both languages."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("chapter", sorted(ROOT.glob("[0-9][0-9]_*")), ids=lambda p: p.name)
def test_it_says_what_the_chapter_says_prints_what_the_text_shows_and_is_as_short_as_it_says(
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
    assert f" in {num_lines} lines: " in says and 25 <= num_lines <= 45
