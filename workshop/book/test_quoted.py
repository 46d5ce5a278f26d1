"""Lines of code, quotations of code, and the filling of quotations."""

from __future__ import annotations

from pathlib import Path

import pytest

from workshop.book.path import ROOT
from workshop.book.quoted import (
    Share,
    code_lines,
    filled,
    find_quote,
    share_of,
    shares,
    symbol_source,
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


def test_lines_of_code_are_no_docstrings_comments_or_blank_lines() -> None:
    assert code_lines(SOURCE) == {5, 8, 11, 16, 18, 19, 22, 23, 25}


@pytest.mark.parametrize(
    ("block", "lines"),
    [
        ("LIMIT = 3  # 8\n", {8}),
        (
            "@property\ndef text(self) -> str:  # 19\n    # why\n",
            {18, 19, 21},
        ),  # moved, no docstring
        ('    def text(self) -> str:  # 19\n        """What it says."""\n', {19, 20}),  # with it
        ("class Pool:  # 11\n    size: int = 0  # 16\n", {11, 16}),
        ('def empty(self) -> None:  # 25\n    "Nothing."\n', {25, 26}),  # it is all there is
        ("def empty(self) -> None:  # 25\n", {25}),
        ("class Pool:  # 11\n\n    size: int = 0  # 16\n", None),  # a blank line that is not there
        ("import os  # 5\nLIMIT = 3  # 8\n", None),  # the text between is not a docstring
        ("limit = 3  # 8\n", None),
        ("\n", None),
    ],
)
def test_a_quotation_is_contiguous_but_for_docstrings(block: str, lines: set[int] | None) -> None:
    assert find_quote(SOURCE, block) == lines


def test_a_line_that_is_quoted_twice_counts_once_and_another_file_not_at_all(tmp_path) -> None:
    path = tmp_path / "pool.py"
    path.write_text(SOURCE)
    block = "```python file={}\nLIMIT = 3  # 8\n```\n"
    text = block.format("pool.py") + block.format("01_a/pool.py") + block.format("loop.py")
    assert share_of(path, text) == Share(9, 1)
    assert share_of(path, text).percent == pytest.approx(100 / 9)


def test_a_symbol_is_cut_out_without_docstrings() -> None:
    found = symbol_source(SOURCE, "Pool.text").splitlines()
    assert found[:3] == ["@property", "def text(self) -> str:  # 19", "    # why"]
    assert [line.strip() for line in found[3:]] == ['return """one', 'two"""  # 23']
    assert symbol_source(SOURCE, "LIMIT") == "LIMIT = 3  # 8\n"
    assert symbol_source(SOURCE, "Pool.size") == "size: int = 0  # 16\n"
    for lost in ("text", "Pool.lost", "Lost"):
        with pytest.raises(KeyError):
            symbol_source(SOURCE, lost)


def test_filling_writes_quotations_that_the_rule_accepts(tmp_path: Path) -> None:
    (tmp_path / "pool.py").write_text(SOURCE)
    page = "a\n```python file=pool.py symbol=Pool\nold\n```\nb\n```python file=pool.py\nkept\n```\n"
    text = filled(page, tmp_path)
    assert filled(text, tmp_path) == text and "old" not in text and "\nkept\n" in text
    assert list(unfilled(text, tmp_path)) == [
        f"line {text.count(chr(10)) - 2} quotes what is not in pool.py any more: 'kept' ... 'kept'"
    ]
    code = text.partition("symbol=Pool\n")[2].partition("```")[0]
    found = find_quote(SOURCE, code)
    assert found is not None and code_lines(SOURCE) & found == {11, 16, 18, 19, 22, 23, 25}


def test_a_link_to_a_symbol_leads_to_its_line(tmp_path: Path) -> None:
    (tmp_path / "pool.py").write_text(SOURCE)
    page = "[`::Pool.text`](pool.py) [`pool.py`](pool.py)\n"
    assert with_lines(page, tmp_path) == page.replace("pool.py)", "pool.py#L19)", 1)
    complaint = "line 2 links to what is not in pool.py any more: Pool.gone"
    assert list(unfilled(f"{page}[`::Pool.gone`](pool.py)\n", tmp_path)) == [complaint]


def test_an_excerpt_follows_its_source_between_its_first_and_last_line(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text("def f():\n    a = 1\n    b = 3\n    c = 4\n    return b\n")
    page = "```python file=loop.py\n    a = 1\n    b = 2\n    return b\n```\n"
    expected = "    a = 1\n    b = 3\n    c = 4\n    return b\n"
    assert filled(page, tmp_path) == f"```python file=loop.py\n{expected}```\n"


def test_a_chapter_has_a_share_for_each_module_of_its_root() -> None:
    chapter = Path(__file__).resolve().parents[2] / "01_batching"
    found = shares(chapter)
    assert "engine_core.py" in found and "batching_demo.py" not in found
    assert found["engine_core.py"].num_quoted >= 3


@pytest.mark.parametrize("chapter", sorted(ROOT.glob("[0-9][0-9]_*")), ids=lambda path: path.name)
def test_a_chapter_quotes_the_code_that_decides(chapter: Path) -> None:
    """35 to 50 % of the lines of its root. A sentence and a link stand for the rest."""
    assert 35 <= sum(shares(chapter).values(), Share(0, 0)).percent <= 50
