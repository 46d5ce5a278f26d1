"""Lines of code, quotations of code, and the filling of quotations."""

from __future__ import annotations

from pathlib import Path

from workshop.book.path import modules_in
from workshop.book.quoted import (
    BLOCK,
    ROOT,
    code_lines,
    filled,
    find_quote,
    unfilled,
    with_lines,
)

SOURCE = '''"""A module.

Its idea."""

import os  # 5

# a comment
LIMIT = 3  # 8


class Pool:  # 11
    """Blocks.

    Free ones."""

    size: int = 0  # 16

    @property
    def text(self) -> str:  # 19
        """What it says."""
        # why
        return """one
        two"""  # 23

    def empty(self) -> None:  # 25
        "Nothing."
'''
QUOTES = {
    "LIMIT = 3  # 8\n": {8},
    "@property\ndef text(self) -> str:  # 19\n    # why\n": {18, 19, 21},  # moved, no docstring
    '    def text(self) -> str:  # 19\n        """What it says."""\n': {19, 20},  # with it
    "class Pool:  # 11\n    size: int = 0  # 16\n": {11, 16},
    'def empty(self) -> None:  # 25\n    "Nothing."\n': {25, 26},  # it is all there is
    "def empty(self) -> None:  # 25\n": {25},
    "class Pool:  # 11\n\n    size: int = 0  # 16\n": None,  # a blank line that is not there
    "import os  # 5\nLIMIT = 3  # 8\n": None,  # the text between is not a docstring
}


def test_a_quotation_is_contiguous_but_for_docstrings() -> None:
    assert {block: find_quote(SOURCE, block) for block in QUOTES} == QUOTES
    assert code_lines(SOURCE) == {5, 8, 11, 16, 18, 19, 22, 23, 25}


PAGE = """a
```python file=pool.py symbol=Pool.empty
old
```
```python file=pool.py
class Pool:  # 11
    old
    size: int = 0  # 16
```
[`::Pool.text`](pool.py) [`pool.py`](pool.py)
"""
EMPTY = 'def empty(self) -> None:  # 25\n    "Nothing."'
FILLED = PAGE.replace("old", EMPTY, 1).replace("    old\n", "")


def test_blocks_and_links_follow_their_source_or_are_named(tmp_path: Path) -> None:
    """A block without a symbol follows it between its first and last line."""
    (tmp_path / "pool.py").write_text(SOURCE.replace('    """Blocks.\n\n    Free ones."""\n\n', ""))
    assert filled(PAGE, tmp_path) == filled(FILLED, tmp_path) == FILLED
    assert list(unfilled(FILLED, tmp_path)) == []
    assert with_lines(FILLED, tmp_path) == FILLED.replace("pool.py)", "pool.py#L15)", 1)
    page = "```python file=pool.py\nkept\n```\n[`::Pool.gone`](pool.py)\n"
    assert filled(page, tmp_path) == page and list(unfilled(page, tmp_path)) == [
        "line 1 quotes what is not in pool.py any more: 'kept' ... 'kept'",
        "line 4 links to what is not in pool.py any more: Pool.gone",
    ]


def test_a_chapter_quotes_the_code_that_decides() -> None:
    """15 to 50 % of the lines of its root. A line that is quoted twice counts once."""
    for chapter in ROOT.glob("[0-9][0-9]_*"):
        blocks = list(BLOCK.finditer((chapter / "README.md").read_text(encoding="utf-8")))
        num_lines = num_quoted = 0
        for path in modules_in(chapter):
            source = path.read_text(encoding="utf-8")
            codes = [b["code"] for b in blocks if b["file"].rpartition("/")[2] == path.name]
            quoted = set().union(*(find_quote(source, code) or set() for code in codes))
            num_lines += len(code_lines(source))
            num_quoted += len(code_lines(source) & quoted)
        assert 15 <= 100 * num_quoted / num_lines <= 50, chapter.name
